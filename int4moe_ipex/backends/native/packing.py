"""Canonical weights into a buffer of the core, checked against the spec first, and every bit of them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from int4moe_ipex.backends.base import ExpertsSpec, ExpertWeights, LinearSpec, LinearWeights
from int4moe_ipex.backends.native.core import FLOAT_TYPES, core_layout
from int4moe_ipex.backends.native.packed import NativeExperts, NativeLinear
from int4moe_ipex.canonical import CanonicalWeight
from int4moe_ipex.errors import BackendError
from int4moe_ipex.packing.layout import NativeLayout, allocate

PROJECTIONS = ("gate", "up", "down")
UP, DOWN = 1, 2  # their places; a linear is packed as an up


def fill_experts(
    spec: ExpertsSpec, experts: Iterable[ExpertWeights]
) -> tuple[torch.Tensor, tuple[torch.dtype | None, ...]]:
    """Packs expert by expert; memory peaks at the packed size and one expert.

    Returns the buffer, uint8 [total bytes], and the dtypes of the biases of gate, up and down.

    Raises:
        BackendError: an expert that is not what the spec says, or too few or too many of them.
    """
    core = core_layout(NativeLayout.of_experts(spec))
    buffer = allocate(core.total_bytes)
    dtypes: tuple[torch.dtype | None, ...] = ()
    count = 0
    for index, expert in enumerate(experts):
        if index >= spec.num_experts:
            raise BackendError(f"more than {spec.num_experts} experts were given")
        parts = (expert.gate, expert.up, expert.down)
        _check_expert(index, spec, parts)
        found = tuple(None if p is None or p.bias is None else p.bias.dtype for p in parts)
        if index and found != dtypes:
            raise BackendError(f"expert {index}: bias dtypes differ from those of expert 0")
        dtypes = found
        down_perm = expert.down.weight.perm
        down_perm = None if down_perm is None else down_perm.contiguous()
        for projection, linear in enumerate(parts):
            if linear is not None:
                pack_projection(core, buffer, index, projection, linear, None if projection == DOWN else down_perm)
        count = index + 1
    if count != spec.num_experts:
        raise BackendError(f"{count} experts were given, {spec.num_experts} announced")
    return buffer, dtypes


def fill_linear(spec: LinearSpec, linear: LinearWeights) -> torch.Tensor:
    """The buffer of one linear, uint8 [total bytes]; raises BackendError where it is not what the spec says."""
    _check("linear", spec, linear)
    core = core_layout(NativeLayout.of_linear(spec))
    buffer = allocate(core.total_bytes)
    pack_projection(core, buffer, 0, UP, linear, None)
    return buffer


def read_experts(packed: NativeExperts) -> Iterator[ExpertWeights]:
    """The experts as they were given to `fill_experts`."""
    core = core_layout(packed.layout)
    spec = packed.spec
    for index in range(spec.num_experts):
        down = _unpack_projection(core, packed.blob, index, DOWN, spec.down, packed.bias_dtypes[DOWN], None)
        gate, up = (
            None
            if part is None
            else _unpack_projection(core, packed.blob, index, p, part, packed.bias_dtypes[p], down.weight.perm)
            for p, part in enumerate((spec.gate, spec.up))
        )
        yield ExpertWeights(gate, up, down)


def read_linear(packed: NativeLinear) -> LinearWeights:
    """The linear as it was given to `fill_linear`."""
    return _unpack_projection(core_layout(packed.layout), packed.blob, 0, UP, packed.spec, packed.bias_dtype, None)


def _check_expert(index: int, spec: ExpertsSpec, parts: tuple[LinearWeights | None, ...]) -> None:
    for name, wanted, linear in zip(PROJECTIONS, (spec.gate, spec.up, spec.down), parts):
        if (wanted is None) != (linear is None):
            raise BackendError(f"expert {index}: {name} is {'missing' if linear is None else 'unexpected'}")
        if linear is not None:
            _check(f"expert {index} {name}", wanted, linear)


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


def _check_perm(where: str, perm: torch.Tensor | None) -> None:
    if perm is not None and not torch.equal(torch.sort(perm).values, torch.arange(perm.numel(), dtype=torch.int32)):
        raise BackendError(f"{where}: perm is not a permutation of 0..{perm.numel() - 1}")


def pack_projection(core, blob: torch.Tensor, expert: int, projection: int, linear: LinearWeights, row_perm) -> None:
    """One projection of one expert into the buffer; `row_perm` orders its rows as down's columns are."""
    weight = linear.weight
    kept = [weight.codes, weight.scales, weight.zeros, _floats(linear.bias), weight.perm]
    kept = [None if t is None else t.contiguous() for t in kept]
    core.pack(blob.data_ptr(), expert, projection, *map(_pointer, kept), _pointer(row_perm), torch.get_num_threads())


def _unpack_projection(
    core, blob: torch.Tensor, expert: int, projection: int, spec: LinearSpec, bias_dtype, row_perm
) -> LinearWeights:
    n, k, groups = spec.out_features, spec.in_features, -(-spec.in_features // spec.group_size)
    codes = torch.empty(n, k // 2, dtype=torch.uint8)
    scales = torch.empty(n, groups, dtype=spec.scales_dtype)
    zeros = None if spec.symmetric else torch.empty(n, groups, dtype=torch.uint8)
    bias = torch.empty(n, dtype=torch.float32) if spec.bias else None
    perm = torch.empty(k, dtype=torch.int32) if spec.act_order else None
    pointers = map(_pointer, (codes, scales, zeros, bias, perm))
    has_zeros = core.unpack(blob.data_ptr(), expert, projection, *pointers, _pointer(row_perm), torch.get_num_threads())
    if perm is not None and perm[0] < 0:
        perm = None
    weight = CanonicalWeight(codes, scales, zeros if has_zeros else None, spec.group_size, perm)
    return LinearWeights(weight, None if bias is None else bias.to(bias_dtype))


def _floats(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach().to(torch.float32).contiguous()


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
