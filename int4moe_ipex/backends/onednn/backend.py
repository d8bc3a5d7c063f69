"""The oneDNN backend: the tokens of each expert as int4-weight matmuls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from int4moe_ipex.backends.base import (
    ExpertsSpec,
    Immutable,
    LinearSpec,
    LinearWeights,
    Rejected,
    RunConfig,
    Supported,
    Verdict,
)
from int4moe_ipex.backends.onednn.enums import DataType
from int4moe_ipex.backends.onednn.library import narrower
from int4moe_ipex.backends.onednn.matmul import DTYPES, GROUP_STEP, TORCH, Problem, session
from int4moe_ipex.backends.three_linears import ThreeLinearsBackend
from int4moe_ipex.canonical import CanonicalWeight
from int4moe_ipex.cpu import CpuFeatures
from int4moe_ipex.errors import BackendError

ALIGNMENT = 64
# down's activations stay float32. In bfloat16, oneDNN's rounding of the weights, after that of gate and up, came to a
# relative error of 4.3e-3; in float16 they may overflow.
INNER = torch.float32


def _candidates(spec: LinearSpec, dtype: torch.dtype, grouped_zeros: bool) -> Iterator[Problem]:
    """Ways to run a linear, best first: activations in their own type before float32, scales as stored before float32.

    Scales become float32 without loss, so the order matters for memory alone.
    """
    group = math.gcd(spec.group_size, spec.in_features)
    for source in dict.fromkeys((DTYPES[dtype], DataType.F32)):
        for scales in dict.fromkeys((DTYPES[spec.scales_dtype], DataType.F32)):
            yield Problem(spec.in_features, spec.out_features, group, grouped_zeros, source, scales)


def _plan(spec: LinearSpec, dtype: torch.dtype, grouped_zeros: bool) -> tuple[Problem, str] | str:
    """(problem, implementation) of the best way that is optimised here, or the reason why there is none."""
    engine = session()
    name = ""
    for problem in _candidates(spec, dtype, grouped_zeros):
        name = engine.implementation(problem)
        if name and not name.startswith("ref"):
            return problem, name
    library = engine.library
    has = f"only its reference implementation ({name})" if name else "no implementation"
    return f"oneDNN {library.version_text} on {library.effective_isa} has {has} for {problem}"


def _path(implementation: str, problem: Problem) -> str:
    """brg_matmul:avx512_core_bf16 -> onednn/avx512_core_bf16/bf16."""
    return f"onednn/{implementation.rpartition(':')[2]}/{problem.source.name.lower()}"


@dataclass(frozen=True, eq=False)
class OneDnnLinear(Immutable):
    """codes uint8 [N, K/2] as in the canonical weight; scales [G, N], zeros uint8 [G, N] or None for 8."""

    spec: LinearSpec
    problem: Problem
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    scales_dtype: torch.dtype
    perm: torch.Tensor | None
    bias: torch.Tensor | None
    path: str

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("codes", "scales", "zeros", "perm", "bias")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K], M >= 1 -> float32 [M, N]."""
        x = x.to(TORCH[self.problem.source])
        if self.perm is not None:
            x = x[:, self.perm]
        y = session().multiply(self.problem, x, self.codes, self.scales, self.zeros)
        return y if self.bias is None else y.add_(self.bias)


class OneDnnBackend(ThreeLinearsBackend):
    """W4A16 on oneDNN 3.10 or later."""

    name = "onednn"

    def support_experts(self, spec: ExpertsSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        verdict = self.support_linear(spec.down, cpu, self.run_of_down(run))
        for linear in filter(None, (spec.gate, spec.up)):
            if isinstance(verdict, Rejected):
                break
            verdict = self.support_linear(linear, cpu, run)
        return verdict

    def run_of_down(self, run: RunConfig) -> RunConfig:
        return replace(run, dtype=INNER)

    def support_linear(self, spec: LinearSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        if run.compute != "w4a16":
            return Rejected(f"this backend computes w4a16 only, not {run.compute}")
        group = math.gcd(spec.group_size, spec.in_features)
        if group % GROUP_STEP:
            return Rejected(
                f"oneDNN's groups are multiples of {GROUP_STEP}; no such one divides both group_size "
                f"{spec.group_size} and in_features {spec.in_features}"
            )
        try:
            if run.isa != "auto" and narrower(run.isa):
                library = session().library
                return Rejected(
                    f"oneDNN runs on {library.effective_isa} in this process, which the cap {run.isa} forbids: it is "
                    "capped once, by INT4MOE_MAX_ISA or ONEDNN_MAX_CPU_ISA"
                )
            # Experts of one pack may differ in whether they have zero points.
            plans = [_plan(spec, run.dtype, grouped) for grouped in ((False,) if spec.symmetric else (False, True))]
        except BackendError as error:
            return Rejected(str(error))
        for plan in plans:
            if isinstance(plan, str):
                return Rejected(plan)
        problem, implementation = plans[0]
        return Supported(_path(implementation, problem))

    def pack_linear(self, spec: LinearSpec, linear: LinearWeights, run: RunConfig) -> OneDnnLinear:
        weight = linear.weight
        plan = _plan(spec, run.dtype, weight.zeros is not None)
        if isinstance(plan, str):
            raise BackendError(plan)
        problem, implementation = plan
        columns = torch.arange(0, weight.in_features, problem.group_size) // weight.group_size
        codes = weight.codes.contiguous()
        if codes.data_ptr() % ALIGNMENT:
            codes = codes.clone()
        return OneDnnLinear(
            spec=spec,
            problem=problem,
            codes=codes,
            scales=weight.scales[:, columns].to(TORCH[problem.scales]).t().contiguous(),
            zeros=None if weight.zeros is None else weight.zeros[:, columns].t().contiguous(),
            scales_dtype=weight.scales.dtype,
            perm=None if weight.perm is None else weight.perm.clone(),
            bias=None if linear.bias is None else linear.bias.clone(),
            path=_path(implementation, problem),
        )

    def unpack_linear(self, packed: OneDnnLinear) -> LinearWeights:
        group_size = packed.spec.group_size
        columns = torch.arange(0, packed.spec.in_features, group_size) // packed.problem.group_size

        def stored(per_group: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
            return None if per_group is None else per_group[columns].t().to(dtype).contiguous()

        weight = CanonicalWeight(
            codes=packed.codes,
            scales=stored(packed.scales, packed.scales_dtype),
            zeros=stored(packed.zeros, torch.uint8),
            group_size=group_size,
            perm=packed.perm,
        )
        return LinearWeights(weight, packed.bias)
