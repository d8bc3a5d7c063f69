"""Experts as three packed linears each, run expert by expert: what the backends over other libraries share.

Such a backend says how one linear is packed, computed and unpacked; layers follow from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from int4moe_ipex.backends.base import (
    ExpertsSpec,
    ExpertWeights,
    Immutable,
    LinearSpec,
    LinearWeights,
    Packed,
    RunConfig,
)
from int4moe_ipex.moe.routing import run_grouped


class PackedLinear(Packed, Protocol):
    """A packed linear that computes itself."""

    spec: LinearSpec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] of any float dtype, M >= 1 -> [M, N] in the dtype that it was computed in."""
        ...


@dataclass(frozen=True, eq=False)
class ThreeLinears(Immutable):
    """All experts: gate (None without one), up and down of each. The path is that of up."""

    spec: ExpertsSpec
    experts: tuple[tuple[PackedLinear | None, PackedLinear, PackedLinear], ...]

    @property
    def path(self) -> str:
        return self.experts[0][1].path

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{index}.{name}.{key}": tensor
            for index, expert in enumerate(self.experts)
            for name, linear in zip(("gate", "up", "down"), expert)
            if linear is not None
            for key, tensor in linear.tensors().items()
        }


class ThreeLinearsBackend:
    """The part of a Backend that follows from `pack_linear` and `unpack_linear`, with float32 between projections."""

    def pack_linear(self, spec: LinearSpec, linear: LinearWeights, run: RunConfig) -> PackedLinear:
        raise NotImplementedError

    def unpack_linear(self, packed: PackedLinear) -> LinearWeights:
        raise NotImplementedError

    def run_of_down(self, run: RunConfig) -> RunConfig:
        """How down is packed in a layer that runs as `run`."""
        return run

    def pack_experts(self, spec: ExpertsSpec, experts: Iterable[ExpertWeights], run: RunConfig) -> ThreeLinears:
        inner = self.run_of_down(run)
        packed = tuple(
            (
                None if e.gate is None else self.pack_linear(spec.gate, e.gate, run),
                self.pack_linear(spec.up, e.up, run),
                self.pack_linear(spec.down, e.down, inner),
            )
            for e in experts
        )
        return ThreeLinears(spec, packed)

    def linear_forward(self, packed: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], packed.spec.out_features)
        y = packed.forward(x.reshape(-1, x.shape[-1]))
        return y.to(x.dtype).reshape(*x.shape[:-1], packed.spec.out_features)

    def experts_forward(
        self, packed: ThreeLinears, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
            gate, up, down = packed.experts[expert]
            gated = None if gate is None else gate.forward(rows).float()
            return down.forward(packed.spec.activation.apply(gated, up.forward(rows).float()))

        return run_grouped(x, top_k_index, top_k_weights, packed.spec.num_experts, one)

    def unpack_experts(self, packed: ThreeLinears) -> Iterator[ExpertWeights]:
        for gate, up, down in packed.experts:
            yield ExpertWeights(
                None if gate is None else self.unpack_linear(gate), self.unpack_linear(up), self.unpack_linear(down)
            )
