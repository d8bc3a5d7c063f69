"""Several backends for one module, chosen on each call by how many tokens an expert gets.

It exists only where a configuration's rules say so (`min_tokens`, `max_tokens`): the module is packed once for each
distinct choice, so that two ranges cost the memory of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from int4moe_ipex.backends.base import (
    ExpertsSpec,
    ExpertWeights,
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
class PackedByTokens:
    """parts: (max_tokens or None, choice, packed) by rising token counts; equal choices share one pack."""

    spec: ExpertsSpec | LinearSpec
    parts: tuple[tuple[int | None, Choice, Packed], ...]
    path: str

    def tensors(self) -> dict[str, torch.Tensor]:
        distinct = {id(packed): (choice, packed) for _, choice, packed in self.parts}
        return {
            f"{choice.path}.{name}": tensor
            for choice, packed in distinct.values()
            for name, tensor in packed.tensors().items()
        }

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
                done[key] = pack(choice)
            parts.append((last, choice, done[key]))
        return PackedByTokens(spec, tuple(parts), self.path)

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
