"""torch's own int4 op, `aten::_weight_int4pack_mm_for_cpu`, one call per projection.

The op computes (q - 8) * s + z with s and z in the activations' dtype (so z = (8 - zero) * s is rounded to it);
it is vectorised in bfloat16 only. float16 activations run in float32: the op would overflow before the routing weight
is applied. Its packed layout depends on the CPU: it is made at load and never stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
from int4moe_ipex.backends.three_linears import ThreeLinearsBackend
from int4moe_ipex.canonical import SYMMETRIC_ZERO, CanonicalWeight, pack_codes, unpack_codes
from int4moe_ipex.cpu import CpuFeatures

GROUP_SIZES = (32, 64, 128, 256)
ROWS = 16  # the op's blocks of output rows


@dataclass(frozen=True, eq=False)
class TorchLinear(Immutable):
    """packed uint8 [N, K/2] in the op's layout, scale_and_zero [K/g, N, 2]; scales and zeros as they were."""

    spec: LinearSpec
    packed: torch.Tensor
    scale_and_zero: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    perm: torch.Tensor | None
    bias: torch.Tensor | None
    path: str

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("packed", "scale_and_zero", "scales", "zeros", "perm", "bias")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K], M >= 1 -> [M, N] in the dtype that the op computes in."""
        dtype = self.scale_and_zero.dtype
        x = (x if self.perm is None else x[:, self.perm]).to(dtype).contiguous()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.spec.group_size, self.scale_and_zero)
        return y if self.bias is None else (y + self.bias).to(dtype)


def _reject(spec: LinearSpec) -> str | None:
    if spec.group_size not in GROUP_SIZES:
        return f"torch's int4 op takes group_size {', '.join(map(str, GROUP_SIZES))}, not {spec.group_size}"
    if spec.in_features % spec.group_size:
        return f"in_features {spec.in_features} is not a multiple of group_size {spec.group_size}"
    if spec.out_features % ROWS:
        return f"out_features {spec.out_features} is not a multiple of {ROWS}"
    return None


def _compute_dtype(run: RunConfig) -> torch.dtype:
    return torch.bfloat16 if run.dtype == torch.bfloat16 else torch.float32


def _path(run: RunConfig) -> str:
    return f"torch/{str(_compute_dtype(run)).removeprefix('torch.')}"


class TorchInt4Backend(ThreeLinearsBackend):
    """W4A16 through torch's int4 op; weights stay int4, act-order permutes the activations on every call."""

    name = "torch"

    def _verdict(self, specs: Iterable[LinearSpec | None], run: RunConfig) -> Verdict:
        if run.compute != "w4a16":
            return Rejected(f"torch's int4 op computes w4a16 only, not {run.compute}")
        for spec in specs:
            reason = None if spec is None else _reject(spec)
            if reason:
                return Rejected(reason)
        note = "" if run.dtype == torch.bfloat16 else "the op is not vectorised outside bfloat16"
        return Supported(_path(run), note)

    def support_experts(self, spec: ExpertsSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        return self._verdict((spec.gate, spec.up, spec.down), run)

    def support_linear(self, spec: LinearSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        return self._verdict((spec,), run)

    def pack_linear(self, spec: LinearSpec, linear: LinearWeights, run: RunConfig) -> TorchLinear:
        weight = linear.weight
        scales = weight.scales.float()
        zeros = torch.zeros_like(scales) if weight.zeros is None else (SYMMETRIC_ZERO - weight.zeros.float()) * scales
        return TorchLinear(
            spec=spec,
            packed=torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_codes(weight.codes).int(), 1),
            scale_and_zero=torch.stack((scales.t(), zeros.t()), dim=-1).to(_compute_dtype(run)).contiguous(),
            scales=weight.scales.clone(),
            zeros=None if weight.zeros is None else weight.zeros.clone(),
            perm=None if weight.perm is None else weight.perm.clone(),
            bias=None if linear.bias is None else linear.bias.clone(),
            path=_path(run),
        )

    def unpack_linear(self, packed: TorchLinear) -> LinearWeights:
        # The op's layout has no inverse in torch: multiplying the identity with scale 1 and zero 0 reads it back.
        spec = packed.spec
        plain = torch.zeros_like(packed.scale_and_zero, dtype=torch.float32)
        plain[..., 0] = 1
        eye = torch.eye(spec.in_features)
        codes = torch.ops.aten._weight_int4pack_mm_for_cpu(eye, packed.packed, spec.group_size, plain)
        weight = CanonicalWeight(
            codes=pack_codes((codes.t() + SYMMETRIC_ZERO).round().to(torch.uint8)),
            scales=packed.scales,
            zeros=packed.zeros,
            group_size=spec.group_size,
            perm=packed.perm,
        )
        return LinearWeights(weight, packed.bias)
