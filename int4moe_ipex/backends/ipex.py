"""Intel Extension for PyTorch 2.8.0: its weight-only int4 linears and `deepseek_moe_woq`.

Only IPEX's native library is loaded, by `torch.ops.load_library`: its Python package does not import beside
transformers 5, and on a wrong torch it ends the process. Versions are read from package metadata first.

IPEX has two tiers. With AVX512-FP16 and AMX (4th-generation Xeon on) weights are packed into blocks and multiplied by
its own kernels. Elsewhere they stay [N, K/2] and every call dequantises all of them: right, slow, and chosen only
when this backend is forced.

What IPEX does badly and this module keeps from its callers (all read in its 2.8.0 sources):
- an empty batch divides by zero, and expert ids are not checked: neither reaches it;
- its sum over experts is rounded to the activations' dtype at each step and races on repeated ids: every
  (token, expert) pair is given to it as a token of its own, and the weighted sum is ours, in float32;
- on the packed tier, bfloat16 activations make it round every projection to bfloat16, which with its bfloat16 weights
  exceeds the bound of W4A16 (benchmarks/ipex_onednn.md): it gets and returns float32, and `lowp_mode` BF16 makes it
  multiply gate, up and single linears in bfloat16 none the less;
- `lowp_mode` BF16 computes in float16 below five rows, and float16 overflows in down: it never gets fewer;
- blocks need a group size that is a power of two dividing in_features: other groups are split into such ones;
- `silu(gate) * up` inside `deepseek_moe_woq` mixes padded with unpadded rows, and raises, unless intermediate_size is
  a multiple of 32: other layers run expert by expert;
- one group per row, a single row and act-order have special cases in it: handled here or rejected.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

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
)
from int4moe_ipex.backends.three_linears import ThreeLinears, ThreeLinearsBackend
from int4moe_ipex.canonical import CanonicalWeight
from int4moe_ipex.cpu import CpuFeatures, amx_permitted, detect
from int4moe_ipex.errors import BackendError
from int4moe_ipex.moe.routing import CHUNK_TOKENS, check_routing, sum_slots

PACKAGE = "intel-extension-for-pytorch"
VERSION = "2.8.0"
LIBRARY = "intel_extension_for_pytorch/lib/libintel-ext-pt-cpu.so"
PACKED_FLAGS = frozenset(
    {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "avx512_fp16"}
    | {"amx_tile", "amx_int8", "amx_bf16"}
)
# IPEX's own numbers.
LOWP_NONE, LOWP_BF16, LOWP_INT8 = 0, 2, 3
BF16_ROWS = 5  # lowp_mode BF16 means it from this number of rows on
PER_TOKEN_AND_GROUP = 3  # activations: uint8 with a zero point per row and block of K
PLAIN_FORMAT = 0
MIN_PACKED_GROUP = 16
ROWS = 32  # output rows are padded to whole blocks of this


def _release(version: str) -> str:
    """2.8.0+cpu -> 2.8.0."""
    return version.partition("+")[0]


@functools.cache
def _find() -> tuple[Path | None, str]:
    """The native library, or None and one sentence about what is missing. Imports and loads nothing."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None, f"{PACKAGE} is not installed: pip install torch=={VERSION} {PACKAGE}=={VERSION} in an environment"
    if _release(package.version) != VERSION:
        return None, f"{PACKAGE} {package.version} is installed; only {VERSION}, its last release, is supported"
    if _release(torch.__version__) != VERSION:
        return None, f"{PACKAGE} {VERSION} needs torch {VERSION} exactly, and torch {torch.__version__} is running"
    library = Path(str(package.locate_file(LIBRARY)))
    if not library.is_file():
        return None, f"{PACKAGE} {VERSION} has no {LIBRARY}: install it again"
    return library, ""


def status() -> tuple[bool, str]:
    """Whether IPEX can be loaded here, and one line for a person: which one, or how to get it."""
    library, problem = _find()
    return (False, problem) if library is None else (True, f"{PACKAGE} {VERSION}: {library}")


@functools.cache
def _load() -> None:
    """Registers IPEX's operators with torch.

    Raises:
        BackendError: IPEX is missing, has the wrong version, or does not load.
    """
    library, problem = _find()
    if library is None:
        raise BackendError(problem)
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise BackendError(f"{library} does not load: {error}") from error


def _kernel_group(spec: LinearSpec) -> int:
    """The group size given to IPEX: the largest power of two that divides group_size and in_features."""
    common = math.gcd(spec.group_size, spec.in_features)
    return common & -common


def _lacking(cpu: CpuFeatures) -> str:
    """What IPEX's packed tier needs and does not have here; "" where IPEX will choose that tier."""
    flags = PACKED_FLAGS - cpu.flags
    if flags:
        return ", ".join(sorted(flags))
    if os.environ.get("ATEN_CPU_CAPABILITY", "avx512_fp16") != "avx512_fp16":
        return "ATEN_CPU_CAPABILITY lifted"
    return "" if amx_permitted() else "the kernel's permission for AMX tiles"


def _lowp(run: RunConfig) -> int:
    """What IPEX multiplies in. Its slow tier has float32 only."""
    if run.compute == "w4a8":
        return LOWP_INT8
    return LOWP_BF16 if run.dtype == torch.bfloat16 and not _lacking(detect()) else LOWP_NONE


@dataclass(frozen=True, eq=False)
class IpexLinear(Immutable):
    """One projection: IPEX's context, which owns the weight, and the handle through which its operators find it.

    IPEX keeps three copies of the scales (float32, float16, bfloat16) and four of the zeros; `tensors` can show only
    the float32 ones.
    """

    spec: LinearSpec
    context: object
    handle: torch.Tensor
    group_size: int
    scales_dtype: torch.dtype
    perm: torch.Tensor | None
    lowp: int
    path: str

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {
            "codes": self.context.get_weight(),
            "scales": self.context.get_scales(),
            "zeros": self.context.get_zero_points(),
            "bias": self.context.get_bias(),
            "perm": self.perm,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K], M >= 1 -> float32 [M, N]."""
        x, rows = x.float(), x.shape[0]
        if self.perm is not None:
            x = x[:, self.perm]
        if self.lowp == LOWP_BF16 and rows < BF16_ROWS:
            x = F.pad(x, (0, 0, 0, BF16_ROWS - rows))
        return torch.ops.torch_ipex.ipex_woq_linear(x.contiguous(), self.handle)[:rows]


def _fused(layer: ThreeLinears) -> bool:
    """Whether `deepseek_moe_woq` runs the layer."""
    spec = layer.spec
    act_order = any(linear is not None and linear.perm is not None for expert in layer.experts for linear in expert)
    whole_blocks = spec.intermediate_size % ROWS == 0
    return spec.gate is not None and spec.activation.name == "silu" and not act_order and whole_blocks


@dataclass(frozen=True, eq=False)
class IpexExperts(ThreeLinears):
    """All experts; fused says that `deepseek_moe_woq` runs them."""

    fused: bool


class IpexBackend(ThreeLinearsBackend):
    """IPEX 2.8.0's weight-only int4 path."""

    name = "ipex"

    def support_experts(self, spec: ExpertsSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        return self._support((spec.gate, spec.up, spec.down), cpu, run)

    def support_linear(self, spec: LinearSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        return self._support((spec,), cpu, run)

    def _support(self, specs: Iterable[LinearSpec | None], cpu: CpuFeatures, run: RunConfig) -> Verdict:
        library, problem = _find()
        if library is None:
            return Rejected(problem)
        if "avx2" not in cpu.flags:
            return Rejected("IPEX needs a CPU with AVX2")
        lacking = _lacking(cpu)
        packed = not lacking
        if packed and (run.isa not in ("auto", "amx") or cpu.max_isa != "amx"):
            return Rejected(
                f"IPEX would use AMX, which the cap {run.isa if run.isa != 'auto' else cpu.max_isa} forbids: "
                "it takes its own cap from the environment variable ATEN_CPU_CAPABILITY, set before it is loaded"
            )
        for spec in filter(None, specs):
            reason = self._reject(spec, packed)
            if reason:
                return Rejected(reason)
        if packed:
            return Supported(f"ipex/packed/{run.compute}")
        if run.compute != "w4a16":
            return Rejected(f"IPEX quantises activations on its packed tier only, which needs {lacking}")
        if not run.forced:
            return Rejected(
                f"IPEX's packed tier needs {lacking}; its reference tier dequantises on every call and runs only when "
                "asked for by name (backend: ipex)"
            )
        return Supported("ipex/reference/float32", "dequantises the whole weight on every call")

    @staticmethod
    def _reject(spec: LinearSpec, packed: bool) -> str | None:
        if spec.out_features == 1:
            return "IPEX takes a single output row for a vector: out_features must be 2 or more"
        least = MIN_PACKED_GROUP if packed else 2
        if _kernel_group(spec) < least:
            return (
                f"IPEX's groups are powers of two from {least} on; no such one divides both group_size "
                f"{spec.group_size} and in_features {spec.in_features}"
            )
        return None

    def pack_linear(self, spec: LinearSpec, linear: LinearWeights, run: RunConfig) -> IpexLinear:
        _load()
        weight = linear.weight
        n, k = weight.out_features, weight.in_features
        group = _kernel_group(spec)
        one_group = weight.num_groups == 1
        scales, zeros = weight.scales, weight.zeros
        if not one_group and group != weight.group_size:
            columns = torch.arange(0, k, group) // weight.group_size
            scales = scales[:, columns]
            zeros = None if zeros is None else zeros[:, columns]
        lowp = _lowp(run)
        context = torch.ops.ipex_prepack.weight_only_qlinear_prepack_int4(
            weight.codes.contiguous(),
            scales.float().reshape(n if one_group else scales.shape),
            None if zeros is None else zeros.float().reshape(n if one_group else zeros.shape),
            None if linear.bias is None else linear.bias.clone(),
            None,  # g_idx: act-order is ours
            None,
            -1 if one_group else group,
            lowp,
            PER_TOKEN_AND_GROUP,
            False,
            PLAIN_FORMAT,
        )
        packed = context.get_weight().dim() == 4
        if not packed and (lowp != LOWP_NONE or not run.forced):
            raise BackendError(
                "IPEX did not choose its packed tier here; backend: ipex takes its slow one (w4a16 only)"
            )
        return IpexLinear(
            spec=spec,
            context=context,
            handle=context.get_data_handle(),
            group_size=weight.group_size,
            scales_dtype=weight.scales.dtype,
            perm=None if weight.perm is None else weight.perm.clone(),
            lowp=lowp,
            path=f"ipex/packed/{run.compute}" if packed else "ipex/reference/float32",
        )

    def run_of_down(self, run: RunConfig) -> RunConfig:
        # In bfloat16 as well, down's weights and activations would take the layer over the bound.
        return replace(run, dtype=torch.float32)

    def pack_experts(self, spec: ExpertsSpec, experts: Iterable[ExpertWeights], run: RunConfig) -> IpexExperts:
        layer = super().pack_experts(spec, experts, run)
        return IpexExperts(spec, layer.experts, _fused(layer))

    def experts_forward(
        self, packed: IpexExperts, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        run = _fused_forward if packed.fused else super().experts_forward
        return run(packed, x, top_k_index, top_k_weights)

    def unpack_linear(self, packed: IpexLinear) -> LinearWeights:
        context = packed.context
        spec, starts = packed.spec, torch.arange(0, packed.spec.in_features, packed.group_size)

        def stored(per_group: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
            if per_group is None:
                return None
            per_group = per_group.reshape(spec.out_features, -1)
            columns = starts // (spec.in_features // per_group.shape[1])
            return per_group[:, columns].to(dtype)

        weight = CanonicalWeight(
            codes=context.to_public(context.get_weight()),
            scales=stored(context.get_scales(), packed.scales_dtype),
            zeros=stored(context.get_zero_points(), torch.uint8),
            group_size=packed.group_size,
            perm=packed.perm,
        )
        return LinearWeights(weight, context.get_bias())


def _fused_forward(
    packed: IpexExperts, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`deepseek_moe_woq` over (token, expert) pairs, each with weight 1; the weighted sum is taken here in float32."""
    num_experts = packed.spec.num_experts
    ids = check_routing(x, top_k_index, top_k_weights, num_experts)
    gates, ups, downs = ([linear.context for linear in column] for column in zip(*packed.experts))
    least = BF16_ROWS if packed.experts[0][1].lowp == LOWP_BF16 else 1
    k = ids.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for start in range(0, x.shape[0], CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        tokens, flat = x[part], ids[part].reshape(-1)
        where = torch.nonzero((flat >= 0) & (flat < num_experts)).squeeze(1)
        slots = torch.zeros(flat.shape[0], x.shape[1])
        if where.numel():
            experts = flat[where]
            more = _missing_rows(experts, least)
            rows = F.pad(tokens.float()[where // k], (0, 0, 0, more.numel()))
            pairs = torch.cat((experts, more)).unsqueeze(1)
            ones = torch.ones(pairs.shape)
            y = torch.ops.torch_ipex.deepseek_moe_woq(rows, pairs, gates, ups, downs, ones, False)
            slots[where] = y[: where.numel()] * top_k_weights[part].reshape(-1, 1)[where].float()
        out[part] = sum_slots(slots.view(tokens.shape[0], k, x.shape[1])).to(x.dtype)
    return out


def _missing_rows(experts: torch.Tensor, least: int) -> torch.Tensor:
    """The ids that give every expert which is there `least` rows."""
    hit, counts = experts.unique(return_counts=True)
    return hit.repeat_interleave((least - counts).clamp_min(0))
