"""What the fused modules share in calling the native core."""

from __future__ import annotations

import torch
from torch import nn

from int4moe_ipex.backends import native

DTYPES = {torch.bfloat16: 1, torch.float32: 2}  # csrc/core/layout.h
MAX_EXPERTS = 1024  # csrc/core/elementwise.cpp


def plain(*tensors: torch.Tensor) -> bool:
    """Whether the core may read these: dense CPU tensors of one dtype it knows, outside tracing and autograd."""
    if torch.compiler.is_compiling():
        return False
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        return False
    for t in tensors:
        kind = type(t)
        if kind is not torch.Tensor and kind is not nn.Parameter:
            return False
        if t.dtype is not dtype or t.requires_grad or not t.is_contiguous() or t.device.type != "cpu":
            return False
    return True


def few_tokens(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """F.linear where the core has it and is faster: bfloat16, a few tokens, in_features a multiple of 32."""
    rows, columns = weight.shape
    tokens = x.numel() // columns
    if not (0 < tokens <= native._native.dense_tokens and columns % 32 == 0 and x.dtype is torch.bfloat16):
        return None
    if not (plain(x, weight) if bias is None else plain(x, weight, bias)):
        return None
    y = torch.empty(*x.shape[:-1], rows, dtype=x.dtype)
    native._native.dense_linear(
        tokens,
        rows,
        columns,
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y
