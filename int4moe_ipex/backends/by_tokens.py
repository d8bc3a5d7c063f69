"""Several backends for one module, chosen on each call by how many tokens an expert gets.

It exists only where a configuration's rules say so (`min_tokens`, `max_tokens`), or crossings that were measured: the
module is packed once for each engine, so that ranges on two engines cost the memory of both. Rows of the native core
share one pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from int4moe_ipex.backends.base import (
    ExpertsSpec,
    ExpertWeights,
    Immutable,
    LinearSpec,
    LinearWeights,
    Packed,
    RunConfig,
    Supported,
    Verdict,
)
from int4moe_ipex.backends.select import Choice
from int4moe_ipex.cpu import CpuFeatures


@dataclass(frozen=True, eq=False)
class PackedByTokens(Immutable):
    """parts: (max_tokens or None, choice, packed) by rising token counts; equal choices share one pack."""

    spec: ExpertsSpec | LinearSpec
    parts: tuple[tuple[int | None, Choice, Packed], ...]
    path: str

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for _, choice, packed in self.parts:
            for name, tensor in packed.tensors().items():
                if tensor.data_ptr() not in seen:
                    found[f"{choice.path}.{name}"] = tensor
                    seen.add(tensor.data_ptr())
        return found

    def at(self, tokens: int) -> tuple[Choice, Packed]:
        """Choice and pack for that many tokens per expert."""
        return next((c, p) for last, c, p in self.parts if last is None or tokens <= last)


class ByTokensBackend:
    """A backend made of others. `run` arguments are those of each choice; the caller's are not used."""

    name = "by_tokens"

    def __init__(self, choices: tuple[tuple[int | None, Choice], ...]):
        self.choices = choices
        self.path = ", ".join(c.path if last is None else f"{c.path} up to {last} tokens" for last, c in choices)

    def support_experts(self, spec: ExpertsSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        return Supported(self.path)

    def support_linear(self, spec: LinearSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        return Supported(self.path)

    def pack_experts(self, spec: ExpertsSpec, experts: Iterable[ExpertWeights], run: RunConfig) -> PackedByTokens:
        held = list(experts)
        return self._pack(spec, lambda choice: choice.pack_experts(spec, iter(held)))

    def pack_linear(self, spec: LinearSpec, linear: LinearWeights, run: RunConfig) -> PackedByTokens:
        return self._pack(spec, lambda choice: choice.pack_linear(spec, linear))

    def _pack(self, spec: ExpertsSpec | LinearSpec, pack) -> PackedByTokens:
        done: dict[tuple, Packed] = {}
        parts = []
        for last, choice in self.choices:
            key = (choice.backend.name, choice.path, choice.run)
            if key not in done:
                done[key] = self._again(done, choice) or pack(choice)
            parts.append((last, choice, done[key]))
        return PackedByTokens(spec, tuple(parts), self.path)

    def _again(self, done: dict[tuple, Packed], choice: Choice) -> Packed | None:
        """The native core's layout is the same for all of its rows: they share one pack."""
        if choice.backend.name != "native":
            return None
        first = next((packed for (name, _, _), packed in done.items() if name == "native"), None)
        if first is None:
            return None
        from int4moe_ipex.backends.native import with_row

        _, isa, compute = choice.path.split("/")
        return with_row(first, isa, compute)

    def experts_forward(
        self, packed: PackedByTokens, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """By the mean number of tokens of an expert, `T * k / num_experts`, and at least 1."""
        slots = top_k_index.shape[0] * top_k_index.shape[1]
        choice, part = packed.at(max(1, slots // packed.spec.num_experts))
        return choice.backend.experts_forward(part, x, top_k_index, top_k_weights)

    def linear_forward(self, packed: PackedByTokens, x: torch.Tensor) -> torch.Tensor:
        """By the number of rows."""
        rows = 1
        for size in x.shape[:-1]:
            rows *= size
        choice, part = packed.at(rows)
        return choice.backend.linear_forward(part, x)

    def unpack_experts(self, packed: PackedByTokens) -> Iterator[ExpertWeights]:
        _, choice, part = packed.parts[0]
        return choice.backend.unpack_experts(part)

    def unpack_linear(self, packed: PackedByTokens) -> LinearWeights:
        _, choice, part = packed.parts[0]
        return choice.backend.unpack_linear(part)
