"""The native backend: our C++ core (csrc/), one call per MoE layer, on AVX2, AVX-512 or AMX.

The packed layout does not depend on the instruction set. Rows (instruction set, compute) are chosen when packing, and
the core checks the CPU again before it runs one.

W4A16 multiplies float32 activations in float32. Activations of 16 bits become int16 with one scale per token and group
(finer than their own rounding) where that is faster, and sums within a group are exact; `csrc/isa/avx2_int16.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

# torch has loaded its OpenMP runtime by now, and the core uses that one.
try:
    from int4moe_ipex import _native

    BUILD_PROBLEM = ""
except ImportError as error:
    _native = None
    BUILD_PROBLEM = f"the C++ core is not built here ({error}); install with a C++ compiler (g++ >= 11) to get it"

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
from int4moe_ipex.canonical import CanonicalWeight
from int4moe_ipex.cpu import ISA_ORDER, CpuFeatures
from int4moe_ipex.errors import BackendError, RoutingError
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.packing.layout import NativeLayout, allocate

# Numbers of csrc/core/layout.h.
FLOAT_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
WEIGHT_TYPES = FLOAT_TYPES | {torch.float64: 3}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3, "swiglu_clamped": 4}
PROJECTIONS = ("gate", "up", "down")
LINE = 8  # columns of a line: groups are whole lines
ALONE = 1 << 20  # products of a linear that one thread computes in the time that another needs to wake


@dataclass(frozen=True, eq=False)
class NativeExperts:
    """One layer's experts in one buffer. `handle` is the core's object; it holds shapes only, not the buffer."""

    spec: ExpertsSpec
    blob: torch.Tensor
    layout: NativeLayout
    isa: str
    compute: str
    bias_dtypes: tuple[torch.dtype | None, ...]
    handle: object
    address: int

    @property
    def path(self) -> str:
        return f"native/{self.isa}/{self.compute}"

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"packed": self.blob}


@dataclass(frozen=True, eq=False)
class NativeLinear:
    """One linear in one buffer."""

    spec: LinearSpec
    blob: torch.Tensor
    layout: NativeLayout
    isa: str
    compute: str
    bias_dtype: torch.dtype | None
    handle: object
    address: int

    @property
    def path(self) -> str:
        return f"native/{self.isa}/{self.compute}"

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"packed": self.blob}


def status() -> tuple[bool, str]:
    """Whether the C++ core is built here, and the rows that this CPU runs or what is missing."""
    if _native is None:
        return False, BUILD_PROBLEM
    return True, ", ".join(f"{isa}/{compute}" for (isa, compute), usable in rows().items() if usable)


def rows() -> dict[tuple[str, str], bool]:
    """(isa, compute) of every row of this build, narrow to wide -> whether the core may run it on this CPU."""
    if _native is None:
        return {}
    return {(isa, compute): state == "usable" for isa, compute, state in _native.rows()}


def _pick(cpu: CpuFeatures, run: RunConfig) -> tuple[str, str] | Rejected:
    """The widest row for `run` that this build has and this CPU runs, at most run.isa."""
    if _native is None:
        return Rejected(BUILD_PROBLEM)
    if run.isa not in ("auto", *ISA_ORDER):
        return Rejected(f"unknown instruction set {run.isa!r}; known: auto, {', '.join(ISA_ORDER)}")
    if run.dtype not in FLOAT_TYPES:
        return Rejected(f"activations must be bfloat16, float16 or float32, not {run.dtype}")
    if run.isa != "auto" and not cpu.has(run.isa):
        missing = cpu.missing(run.isa)
        lack = f"this CPU lacks {', '.join(missing)}" if missing else f"INT4MOE_MAX_ISA={cpu.max_isa} caps it"
        return Rejected(f"isa {run.isa} is asked for and {lack}")
    known = rows()
    if run.isa == "amx" and known.get(("amx", run.compute)) is False:
        return Rejected("the kernel refuses the permission for AMX tiles (arch_prctl ARCH_REQ_XCOMP_PERM)")
    cap = ISA_ORDER.index(cpu.best_isa if run.isa == "auto" else run.isa)
    # The scalar row is for tests: it is never taken unless it is asked for.
    lowest = 0 if run.isa == "scalar" else 1
    for isa in reversed(ISA_ORDER[lowest : cap + 1]):
        if known.get((isa, run.compute)) and cpu.has(isa):
            return isa, run.compute
    if not any(compute == run.compute for _, compute in known):
        return Rejected(f"computes w4a16 or w4a8, not {run.compute}")
    return Rejected(
        "needs a CPU with AVX2, FMA and F16C" if cap == 0 else f"this build has no {run.compute} row for it"
    )


def _reject(name: str, spec: LinearSpec | None) -> str | None:
    if spec is None:
        return None
    if spec.in_features % 2:
        return f"{name}: in_features {spec.in_features} is odd"
    if spec.group_size % LINE and spec.group_size != spec.in_features:
        return f"{name}: group_size {spec.group_size} is neither a multiple of {LINE} nor all of in_features"
    return None


def _floats(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach().to(torch.float32).contiguous()


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check_perm(where: str, perm: torch.Tensor | None) -> None:
    if perm is not None and not torch.equal(torch.sort(perm).values, torch.arange(perm.numel(), dtype=torch.int32)):
        raise BackendError(f"{where}: perm is not a permutation of 0..{perm.numel() - 1}")


def _check(where: str, spec: LinearSpec, linear: LinearWeights) -> None:
    """That the weight is what the spec says; the core trusts it."""
    weight, bias = linear.weight, linear.bias
    found = LinearSpec.of(weight, bias)
    same = ("in_features", "out_features", "group_size", "scales_dtype", "bias")
    wrong = [
        f"{n} {getattr(found, n)} instead of {getattr(spec, n)}" for n in same if getattr(found, n) != getattr(spec, n)
    ]
    if found.act_order and not spec.act_order:
        wrong.append("a permutation that the spec does not announce")
    if not found.symmetric and spec.symmetric:
        wrong.append("zero points that the spec does not announce")
    if wrong:
        raise BackendError(f"{where}: {'; '.join(wrong)}")
    if bias is not None and bias.dtype not in FLOAT_TYPES:
        raise BackendError(f"{where}: bias must be float16, bfloat16 or float32, not {bias.dtype}")
    if weight.zeros is not None and int(weight.zeros.max()) > 15:
        raise BackendError(f"{where}: a zero point is {int(weight.zeros.max())}, beyond 4 bits")
    _check_perm(where, weight.perm)


def _pack_one(layout, blob: torch.Tensor, expert: int, projection: int, linear: LinearWeights, row_perm) -> None:
    weight = linear.weight
    kept = [weight.codes, weight.scales, weight.zeros, _floats(linear.bias), weight.perm]
    kept = [None if t is None else t.contiguous() for t in kept]
    layout.pack(blob.data_ptr(), expert, projection, *map(_pointer, kept), _pointer(row_perm), torch.get_num_threads())


def _unpack_one(
    layout, blob: torch.Tensor, expert: int, projection: int, spec: LinearSpec, bias_dtype, row_perm
) -> LinearWeights:
    n, k, groups = spec.out_features, spec.in_features, -(-spec.in_features // spec.group_size)
    codes = torch.empty(n, k // 2, dtype=torch.uint8)
    scales = torch.empty(n, groups, dtype=spec.scales_dtype)
    zeros = None if spec.symmetric else torch.empty(n, groups, dtype=torch.uint8)
    bias = torch.empty(n, dtype=torch.float32) if spec.bias else None
    perm = torch.empty(k, dtype=torch.int32) if spec.act_order else None
    pointers = map(_pointer, (codes, scales, zeros, bias, perm))
    has_zeros = layout.unpack(
        blob.data_ptr(), expert, projection, *pointers, _pointer(row_perm), torch.get_num_threads()
    )
    if perm is not None and perm[0] < 0:
        perm = None
    weight = CanonicalWeight(codes, scales, zeros if has_zeros else None, spec.group_size, perm)
    return LinearWeights(weight, None if bias is None else bias.to(bias_dtype))


class NativeBackend:
    """W4A16 and W4A8 in C++; see `csrc/core/experts.h` for the order of summation."""

    name = "native"

    def support_experts(self, spec: ExpertsSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        named = zip(PROJECTIONS, (spec.gate, spec.up, spec.down))
        problem = next((p for p in (_reject(n, s) for n, s in named) if p), None)
        if spec.activation.name == "swiglu_clamped" and spec.gate is None:
            problem = "swiglu_clamped needs a gate projection"
        return self._verdict(problem, cpu, run)

    def support_linear(self, spec: LinearSpec, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        return self._verdict(_reject("linear", spec), cpu, run)

    def _verdict(self, problem: str | None, cpu: CpuFeatures, run: RunConfig) -> Verdict:
        row = _pick(cpu, run)
        if isinstance(row, Rejected):
            return row
        return Rejected(problem) if problem else Supported(f"native/{row[0]}/{row[1]}")

    def _row(self, run: RunConfig) -> tuple[str, str]:
        from int4moe_ipex.cpu import detect

        row = _pick(detect(), run)
        if isinstance(row, Rejected):
            raise BackendError(f"native: {row.reason}")
        return row

    def pack_experts(self, spec: ExpertsSpec, experts: Iterable[ExpertWeights], run: RunConfig) -> NativeExperts:
        """Packs expert by expert into one buffer; memory peaks at the packed size and one expert.

        Raises:
            BackendError: no row for this CPU, or an expert that is not what the spec says.
        """
        row = self._row(run)
        layout = NativeLayout.of_experts(spec)
        core = _native.Layout(layout.experts, list(layout.numbers))
        blob = allocate(core.total_bytes)
        dtypes: tuple[torch.dtype | None, ...] = ()
        count = 0
        for index, expert in enumerate(experts):
            if index >= spec.num_experts:
                raise BackendError(f"more than {spec.num_experts} experts were given")
            parts = (expert.gate, expert.up, expert.down)
            for name, wanted, linear in zip(PROJECTIONS, (spec.gate, spec.up, spec.down), parts):
                if (wanted is None) != (linear is None):
                    raise BackendError(f"expert {index}: {name} is {'missing' if linear is None else 'unexpected'}")
                if linear is not None:
                    _check(f"expert {index} {name}", wanted, linear)
            found = tuple(None if p is None or p.bias is None else p.bias.dtype for p in parts)
            if index and found != dtypes:
                raise BackendError(f"expert {index}: bias dtypes differ from those of expert 0")
            dtypes = found
            down_perm = expert.down.weight.perm
            down_perm = None if down_perm is None else down_perm.contiguous()
            for projection, linear in enumerate(parts):
                if linear is not None:
                    _pack_one(core, blob, index, projection, linear, None if projection == 2 else down_perm)
            count = index + 1
        if count != spec.num_experts:
            raise BackendError(f"{count} experts were given, {spec.num_experts} announced")
        return open_experts(spec, blob, dtypes, *row)

    def pack_linear(self, spec: LinearSpec, linear: LinearWeights, run: RunConfig) -> NativeLinear:
        row = self._row(run)
        _check("linear", spec, linear)
        layout = NativeLayout.of_linear(spec)
        core = _native.Layout(1, list(layout.numbers))
        blob = allocate(core.total_bytes)
        _pack_one(core, blob, 0, 1, linear, None)
        return open_linear(spec, blob, None if linear.bias is None else linear.bias.dtype, *row)

    def experts_forward(
        self, packed: NativeExperts, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if type(x) is not torch.Tensor or torch.compiler.is_compiling():
            from int4moe_ipex.backends import native_ops

            return native_ops.call_experts(packed, x, top_k_index, top_k_weights)
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
            from int4moe_ipex.backends import native_ops

            return native_ops.call_linear(packed, x)
        return run_linear(packed.handle, packed.address, packed.spec.in_features, packed.spec.out_features, x)

    def unpack_experts(self, packed: NativeExperts) -> Iterator[ExpertWeights]:
        core = _native.Layout(packed.layout.experts, list(packed.layout.numbers))
        spec = packed.spec
        for index in range(spec.num_experts):
            down = _unpack_one(core, packed.blob, index, 2, spec.down, packed.bias_dtypes[2], None)
            gate, up = (
                None
                if part is None
                else _unpack_one(core, packed.blob, index, p, part, packed.bias_dtypes[p], down.weight.perm)
                for p, part in enumerate((spec.gate, spec.up))
            )
            yield ExpertWeights(gate, up, down)

    def unpack_linear(self, packed: NativeLinear) -> LinearWeights:
        core = _native.Layout(1, list(packed.layout.numbers))
        return _unpack_one(core, packed.blob, 0, 1, packed.spec, packed.bias_dtype, None)


def open_experts(
    spec: ExpertsSpec, blob: torch.Tensor, bias_dtypes: tuple[torch.dtype | None, ...], isa: str, compute: str
) -> NativeExperts:
    """Experts on a buffer that is already packed: uint8 [total bytes], 64-byte aligned.

    Raises:
        BackendError: the buffer has another size or alignment, or this CPU lacks the row.
    """
    layout = NativeLayout.of_experts(spec)
    handle = experts_handle(layout, spec.activation, spec.shared_perm, isa, compute)
    _check_blob(layout, blob)
    return NativeExperts(spec, blob, layout, isa, compute, tuple(bias_dtypes), handle, blob.data_ptr())


def open_linear(
    spec: LinearSpec, blob: torch.Tensor, bias_dtype: torch.dtype | None, isa: str, compute: str
) -> NativeLinear:
    """A linear on a buffer that is already packed; see `open_experts`."""
    layout = NativeLayout.of_linear(spec)
    handle = linear_handle(layout, isa, compute)
    _check_blob(layout, blob)
    return NativeLinear(spec, blob, layout, isa, compute, bias_dtype, handle, blob.data_ptr())


def with_row(packed: NativeExperts | NativeLinear, isa: str, compute: str) -> NativeExperts | NativeLinear:
    """The same buffer run by another row."""
    if isinstance(packed, NativeExperts):
        return open_experts(packed.spec, packed.blob, packed.bias_dtypes, isa, compute)
    return open_linear(packed.spec, packed.blob, packed.bias_dtype, isa, compute)


def _check_blob(layout: NativeLayout, blob: torch.Tensor) -> None:
    want = _native.Layout(layout.experts, list(layout.numbers)).total_bytes
    if blob.dtype != torch.uint8 or blob.dim() != 1 or blob.numel() != want or not blob.is_contiguous():
        raise BackendError(f"packed buffer must be uint8 [{want}], not {blob.dtype} {tuple(blob.shape)}")
    if blob.data_ptr() % 64:
        raise BackendError("packed buffer must be aligned to 64 bytes")


def experts_handle(layout: NativeLayout, activation: Activation, shared_perm: bool, isa: str, compute: str):
    """The core's object for experts of these shapes.

    Raises:
        BackendError: the build lacks the row, or this CPU does.
    """
    try:
        core = _native.Layout(layout.experts, list(layout.numbers))
        kind = ACTIVATIONS[activation.name]
        return _native.Experts(core, isa, compute, kind, activation.alpha, activation.limit, shared_perm)
    except ValueError as error:
        raise BackendError(f"native: {error}") from error


def linear_handle(layout: NativeLayout, isa: str, compute: str):
    """The core's object for one linear; raises BackendError as `experts_handle` does."""
    try:
        return _native.Linear(_native.Layout(1, list(layout.numbers)), isa, compute)
    except ValueError as error:
        raise BackendError(f"native: {error}") from error


def run_experts(
    handle,
    address: int,
    hidden_size: int,
    num_experts: int,
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """One layer on real tensors; see `Backend.experts_forward`."""
    shape = x.shape
    if len(shape) != 2 or shape[1] != hidden_size:
        raise RoutingError(f"hidden states must be [tokens, {hidden_size}], not {tuple(shape)}")
    tokens = shape[0]
    ids_shape = top_k_index.shape
    if len(ids_shape) != 2 or ids_shape[0] != tokens or top_k_weights.shape != ids_shape:
        raise RoutingError(
            f"top_k_index {tuple(ids_shape)} and top_k_weights {tuple(top_k_weights.shape)} must both be "
            f"[tokens, top_k] with {tokens} tokens"
        )
    wide = top_k_index.dtype is torch.int64
    weight_type = WEIGHT_TYPES.get(top_k_weights.dtype)
    if weight_type is None or not (wide or top_k_index.dtype is torch.int32):
        raise RoutingError(
            f"top_k_index must be int32 or int64 and top_k_weights a float type, not {top_k_index.dtype} and "
            f"{top_k_weights.dtype}"
        )
    x_type = FLOAT_TYPES.get(x.dtype)
    if x_type is None or x.device.type != "cpu":
        raise BackendError(f"activations must be bfloat16, float16 or float32 on the CPU, not {x.dtype} on {x.device}")
    x_stride = x.stride()
    if x_stride[1] != 1:
        x = x.contiguous()
        x_stride = x.stride()
    y = torch.empty(shape, dtype=x.dtype)
    if not tokens:
        return y
    bad = handle.forward(
        address,
        torch.get_num_threads(),
        x_type,
        tokens,
        x.data_ptr(),
        x_stride[0],
        top_k_index.data_ptr(),
        wide,
        *top_k_index.stride(),
        top_k_weights.data_ptr(),
        weight_type,
        *top_k_weights.stride(),
        ids_shape[1],
        y.data_ptr(),
        hidden_size,
    )
    if bad >= 0:
        token, slot = divmod(bad, ids_shape[1])
        raise RoutingError(
            f"expert id {int(top_k_index[token, slot])} of token {token} is outside -1..{num_experts} "
            f"({num_experts} experts)"
        )
    return y


def run_linear(handle, address: int, in_features: int, out_features: int, x: torch.Tensor) -> torch.Tensor:
    """One linear on real tensors: x [..., K] -> [..., N] in x's dtype."""
    shape = x.shape
    if not shape or shape[-1] != in_features:
        raise BackendError(f"input must be [..., {in_features}], not {tuple(shape)}")
    x_type = FLOAT_TYPES.get(x.dtype)
    if x_type is None or x.device.type != "cpu":
        raise BackendError(f"activations must be bfloat16, float16 or float32 on the CPU, not {x.dtype} on {x.device}")
    y = torch.empty((*shape[:-1], out_features), dtype=x.dtype)
    if not y.numel():
        return y
    flat = x if x.dim() == 2 else x.reshape(-1, in_features)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    small = flat.shape[0] * in_features * out_features <= ALONE
    handle.forward(
        address,
        1 if small else torch.get_num_threads(),
        x_type,
        flat.shape[0],
        flat.data_ptr(),
        flat.stride(0),
        y.data_ptr(),
        out_features,
    )
    return y
