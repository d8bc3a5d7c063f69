"""Calls of the core on real tensors, checked first: it takes addresses and trusts them."""

from __future__ import annotations

import torch

from int4moe_ipex.backends.native.core import FLOAT_TYPES, WEIGHT_TYPES
from int4moe_ipex.errors import BackendError, RoutingError

ALONE = 1 << 18  # products of a linear that one thread computes as fast as two: a region costs 2 us, reading as much 5


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
