"""The reference backend: dequantise by the one formula, multiply in float32, in plain torch. Slow and right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from int4moe_ipex.backends.base import (
    ExpertsSpec,
    ExpertWeights,
    Immutable,
    LinearSpec,
    LinearWeights,
    Rejected,
    RunConfig,
    Supported,
    Verdict,
    linear_tensors,
)
from int4moe_ipex.canonical import dequantize
from int4moe_ipex.cpu import CpuFeatures
from int4moe_ipex.moe.routing import run_grouped

PATH = "reference/float32"


@dataclass(frozen=True, eq=False)
class ReferenceLinear(Immutable):
    spec: LinearSpec
    linear: LinearWeights
    path: str = PATH

    def tensors(self) -> dict[str, torch.Tensor]:
        return linear_tensors(self.linear)


@dataclass(frozen=True, eq=False)
class ReferenceExperts(Immutable):
    spec: ExpertsSpec
    experts: tuple[ExpertWeights, ...]
    path: str = PATH

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for index, expert in enumerate(self.experts):
            for name in ("gate", "up", "down"):
                linear = getattr(expert, name)
                if linear is not None:
                    found |= linear_tensors(linear, f"{index}.{name}.")
        return found


def _apply(linear: LinearWeights, x: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.float()
    return F.linear(x, dequantize(linear.weight), bias)


class ReferenceBackend:
    """float32 whatever the activations' dtype; supports everything that a canonical weight can be."""

    name = "reference"

    def support_experts(self, spec: ExpertsSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        return self._support(run)

    def support_linear(self, spec: LinearSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        return self._support(run)

    def _support(self, run: RunConfig) -> Verdict:
        if run.compute != "w4a16":
            return Rejected(f"computes in float32 only, not {run.compute}")
        return Supported(PATH, "dequantises on every call")

    def pack_experts(self, spec: ExpertsSpec, experts: Iterable[ExpertWeights], run: RunConfig) -> ReferenceExperts:
        return ReferenceExperts(spec, tuple(experts))

    def pack_linear(self, spec: LinearSpec, linear: LinearWeights, run: RunConfig) -> ReferenceLinear:
        return ReferenceLinear(spec, linear)

    def experts_forward(
        self, packed: ReferenceExperts, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
            weights = packed.experts[expert]
            rows = rows.float()
            gate = None if weights.gate is None else _apply(weights.gate, rows)
            return _apply(weights.down, packed.spec.activation.apply(gate, _apply(weights.up, rows)))

        return run_grouped(x, top_k_index, top_k_weights, packed.spec.num_experts, one)

    def linear_forward(self, packed: ReferenceLinear, x: torch.Tensor) -> torch.Tensor:
        return _apply(packed.linear, x.float()).to(x.dtype)

    def unpack_experts(self, packed: ReferenceExperts) -> Iterator[ExpertWeights]:
        return iter(packed.experts)

    def unpack_linear(self, packed: ReferenceLinear) -> LinearWeights:
        return packed.linear
