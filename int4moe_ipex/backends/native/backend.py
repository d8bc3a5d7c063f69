"""The native core behind the protocol of `backends/base.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from int4moe_ipex.backends.base import (
    ExpertsSpec,
    ExpertWeights,
    LinearSpec,
    LinearWeights,
    Rejected,
    RunConfig,
    Supported,
    Verdict,
)
from int4moe_ipex.backends.native import packing
from int4moe_ipex.backends.native.core import LINE
from int4moe_ipex.backends.native.packed import NativeExperts, NativeLinear, open_experts, open_linear
from int4moe_ipex.backends.native.rows import pick
from int4moe_ipex.backends.native.run import run_experts, run_linear
from int4moe_ipex.cpu import CpuFeatures, detect
from int4moe_ipex.errors import BackendError


def linear_problem(name: str, spec: LinearSpec | None) -> str | None:
    """Why the core cannot hold a linear, or None."""
    if spec is None:
        return None
    if spec.in_features % 2:
        return f"{name}: in_features {spec.in_features} is odd"
    if spec.group_size % LINE and spec.group_size != spec.in_features:
        return f"{name}: group_size {spec.group_size} is neither a multiple of {LINE} nor all of in_features"
    return None


class NativeBackend:
    """W4A16 and W4A8 in C++; see `csrc/core/experts.h` for the order of summation."""

    name = "native"

    def support_experts(self, spec: ExpertsSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        named = zip(packing.PROJECTIONS, (spec.gate, spec.up, spec.down))
        problem = next((p for p in (linear_problem(n, s) for n, s in named) if p), None)
        if spec.activation.name == "swiglu_clamped" and spec.gate is None:
            problem = "swiglu_clamped needs a gate projection"
        return self._verdict(problem, cpu, run)

    def support_linear(self, spec: LinearSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        return self._verdict(linear_problem("linear", spec), cpu, run)

    def _verdict(self, problem: str | None, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        row = pick(cpu, run)
        if isinstance(row, Rejected):
            return row
        return Rejected(problem) if problem else Supported(f"native/{row[0]}/{row[1]}")

    def _row(self, run: RunConfig) -> tuple[str, str]:
        row = pick(detect(), run)
        if isinstance(row, Rejected):
            raise BackendError(f"native: {row.reason}")
        return row

    def pack_experts(self, spec: ExpertsSpec, experts: Iterable[ExpertWeights], run: RunConfig) -> NativeExperts:
        """Packs expert by expert into one buffer; memory peaks at the packed size and one expert.

        Raises:
            BackendError: no row for this CPU, or an expert that is not what the spec says.
        """
        row = self._row(run)
        return open_experts(spec, *packing.fill_experts(spec, experts), *row)

    def pack_linear(self, spec: LinearSpec, linear: LinearWeights, run: RunConfig) -> NativeLinear:
        row = self._row(run)
        return open_linear(
            spec, packing.fill_linear(spec, linear), None if linear.bias is None else linear.bias.dtype, *row
        )

    def experts_forward(
        self, packed: NativeExperts, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if type(x) is not torch.Tensor or torch.compiler.is_compiling():
            from int4moe_ipex.backends.native import ops

            return ops.call_experts(packed, x, top_k_index, top_k_weights)
        return run_experts(
            packed.handle,
            packed.address,
            packed.spec.hidden_size,
            packed.spec.num_experts,
            x,
            top_k_index,
            top_k_weights,
        )

    def linear_forward(self, packed: NativeLinear, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor or torch.compiler.is_compiling():
            from int4moe_ipex.backends.native import ops

            return ops.call_linear(packed, x)
        return run_linear(packed.handle, packed.address, packed.spec.in_features, packed.spec.out_features, x)

    def unpack_experts(self, packed: NativeExperts) -> Iterator[ExpertWeights]:
        return packing.read_experts(packed)

    def unpack_linear(self, packed: NativeLinear) -> LinearWeights:
        return packing.read_linear(packed)
