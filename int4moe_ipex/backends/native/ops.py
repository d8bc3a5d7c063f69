"""`torch.ops.int4moe.experts` and `.linear`: the native core as torch operators, for torch.compile and torch.export.

Everything that an operator needs is in its arguments: the packed buffer as a tensor, the rest as numbers. Eager code
calls the core without them (run.py).
"""

from __future__ import annotations

import functools

import torch

from int4moe_ipex.backends.native.core import BUILD_PROBLEM, _native
from int4moe_ipex.backends.native.packed import check_buffer, experts_handle, linear_handle
from int4moe_ipex.backends.native.run import run_experts, run_linear
from int4moe_ipex.errors import BackendError
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.moe.gradients import no_gradient
from int4moe_ipex.packing.layout import NativeLayout

_library = torch.library.Library("int4moe", "DEF")
_library.define(
    "experts(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor packed, int experts, int[] layout, "
    "str activation, float alpha, float limit, bool shared_perm, str isa, str compute) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "linear(Tensor x, Tensor packed, int[] layout, str isa, str compute) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@functools.lru_cache(maxsize=1024)
def _experts_handle(experts, numbers, activation, alpha, limit, shared_perm, isa, compute):
    act = Activation(activation, alpha, limit)
    return experts_handle(NativeLayout(experts, numbers), act, shared_perm, isa, compute)


@functools.lru_cache(maxsize=1024)
def _linear_handle(numbers, isa, compute):
    return linear_handle(NativeLayout(1, numbers), isa, compute)


def _rows_columns(layout) -> tuple[int, int]:
    """Of up."""
    return layout[7], layout[8]


def _experts(
    x, top_k_index, top_k_weights, packed, experts, layout, activation, alpha, limit, shared_perm, isa, compute
):
    if _native is None:
        raise BackendError(BUILD_PROBLEM)
    handle = _experts_handle(experts, tuple(layout), activation, alpha, limit, shared_perm, isa, compute)
    check_buffer(NativeLayout(experts, tuple(layout)), packed)
    hidden = _rows_columns(layout)[1]
    return run_experts(handle, packed.data_ptr(), hidden, experts, x, top_k_index, top_k_weights)


def _experts_fake(x, top_k_index, top_k_weights, packed, experts, layout, *_):
    torch._check(x.dim() == 2, lambda: "hidden states must be [tokens, hidden_size]")
    return x.new_empty(x.shape)


def _linear(x, packed, layout, isa, compute):
    if _native is None:
        raise BackendError(BUILD_PROBLEM)
    handle = _linear_handle(tuple(layout), isa, compute)
    check_buffer(NativeLayout(1, tuple(layout)), packed)
    rows, columns = _rows_columns(layout)
    return run_linear(handle, packed.data_ptr(), columns, rows, x)


def _linear_fake(x, packed, layout, *_):
    return x.new_empty((*x.shape[:-1], _rows_columns(layout)[0]))


_library.impl("experts", _experts, "CPU")
_library.impl("linear", _linear, "CPU")
torch.library.register_fake("int4moe::experts", _experts_fake, lib=_library)
torch.library.register_fake("int4moe::linear", _linear_fake, lib=_library)
for _name in ("experts", "linear"):
    torch.library.register_autograd(f"int4moe::{_name}", no_gradient, lib=_library)


def call_experts(packed, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """The operator on a `NativeExperts`."""
    act = packed.spec.activation
    return torch.ops.int4moe.experts(
        x,
        top_k_index,
        top_k_weights,
        packed.blob,
        packed.layout.experts,
        packed.layout.numbers,
        act.name,
        act.alpha,
        act.limit,
        packed.spec.shared_perm,
        packed.isa,
        packed.compute,
    )


def call_linear(packed, x: torch.Tensor) -> torch.Tensor:
    """The operator on a `NativeLinear`."""
    return torch.ops.int4moe.linear(x, packed.blob, packed.layout.numbers, packed.isa, packed.compute)
