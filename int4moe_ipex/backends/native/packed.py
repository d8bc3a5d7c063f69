"""Packed weights of the native backend: a buffer, its shapes and the core's object for the row that runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from int4moe_ipex.backends.base import ExpertsSpec, Immutable, LinearSpec
from int4moe_ipex.backends.native.core import ACTIVATIONS, _native, core_layout
from int4moe_ipex.errors import BackendError
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.packing.layout import NativeLayout


@dataclass(frozen=True, eq=False)
class _InOneBuffer(Immutable):
    """What is packed in one buffer, and the row that runs it."""

    spec: ExpertsSpec | LinearSpec
    blob: torch.Tensor
    layout: NativeLayout
    isa: str
    compute: str

    @property
    def path(self) -> str:
        return f"native/{self.isa}/{self.compute}"

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"packed": self.blob}


@dataclass(frozen=True, eq=False)
class NativeExperts(_InOneBuffer):
    """One layer's experts in one buffer. `handle` is the core's object; it holds shapes only, not the buffer."""

    spec: ExpertsSpec
    bias_dtypes: tuple[torch.dtype | None, ...]
    handle: object
    address: int


@dataclass(frozen=True, eq=False)
class NativeLinear(_InOneBuffer):
    """One linear in one buffer."""

    spec: LinearSpec
    bias_dtype: torch.dtype | None
    handle: object
    address: int


def open_experts(
    spec: ExpertsSpec, blob: torch.Tensor, bias_dtypes: tuple[torch.dtype | None, ...], isa: str, compute: str
) -> NativeExperts:
    """Experts on a buffer that is already packed: uint8 [total bytes], 64-byte aligned.

    Raises:
        BackendError: the buffer has another size or alignment, or this CPU lacks the row.
    """
    layout = NativeLayout.of_experts(spec)
    handle = experts_handle(layout, spec.activation, spec.shared_perm, isa, compute)
    check_buffer(layout, blob)
    return NativeExperts(spec, blob, layout, isa, compute, tuple(bias_dtypes), handle, blob.data_ptr())


def open_linear(
    spec: LinearSpec, blob: torch.Tensor, bias_dtype: torch.dtype | None, isa: str, compute: str
) -> NativeLinear:
    """A linear on a buffer that is already packed; see `open_experts`."""
    layout = NativeLayout.of_linear(spec)
    handle = linear_handle(layout, isa, compute)
    check_buffer(layout, blob)
    return NativeLinear(spec, blob, layout, isa, compute, bias_dtype, handle, blob.data_ptr())


def with_row(packed: NativeExperts | NativeLinear, isa: str, compute: str) -> NativeExperts | NativeLinear:
    """The same buffer run by another row."""
    if isinstance(packed, NativeExperts):
        return open_experts(packed.spec, packed.blob, packed.bias_dtypes, isa, compute)
    return open_linear(packed.spec, packed.blob, packed.bias_dtype, isa, compute)


def check_buffer(layout: NativeLayout, blob: torch.Tensor) -> None:
    """Raises BackendError unless the buffer is uint8 [total bytes] of the layout, aligned to 64 bytes."""
    want = core_layout(layout).total_bytes
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
        core = core_layout(layout)
        kind = ACTIVATIONS[activation.name]
        return _native.Experts(core, isa, compute, kind, activation.alpha, activation.limit, shared_perm)
    except ValueError as error:
        raise BackendError(f"native: {error}") from error


def linear_handle(layout: NativeLayout, isa: str, compute: str):
    """The core's object for one linear; raises BackendError as `experts_handle` does."""
    try:
        return _native.Linear(core_layout(layout), isa, compute)
    except ValueError as error:
        raise BackendError(f"native: {error}") from error
