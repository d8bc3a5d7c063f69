"""What the fused modules share in calling the native core."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from int4moe_ipex.backends import native
from int4moe_ipex.cpu import detect
from int4moe_ipex.models.compact import CompactWeight
from int4moe_ipex.moe.linear import Int4Linear

DTYPES = {torch.bfloat16: 1, torch.float32: 2}  # csrc/core/layout.h
MAX_EXPERTS = 1024  # csrc/core/elementwise.cpp
OWN = frozenset({"_plan", "_tables", "_heads", "_compact"})  # what fused modules keep of others and of their tensors


class Fused:
    """A fused module; its class is made from a fusion and the class of transformers that it replaces."""

    @classmethod
    @functools.cache
    def over(fusion, cls: type) -> type:
        return type(f"Fused{cls.__name__}", (fusion, cls), {"__module__": fusion.__module__})

    def __getstate__(self) -> dict[str, Any]:
        """For copies of any sort, which find out by themselves what is kept of other modules and tensors."""
        return {name: value for name, value in vars(self).items() if name not in OWN}

    def __reduce_ex__(self, protocol: int) -> Any:
        """Copies and pickles name the two classes: the one made of them can be found nowhere."""
        made, bases = type(self), type(self).__bases__
        if len(bases) != 2 or made is not bases[0].over(bases[1]):
            return super().__reduce_ex__(protocol)  # somebody's subclass
        return _empty, bases, self.__getstate__()


def _empty(fusion: type[Fused], cls: type) -> Fused:
    made = fusion.over(cls)
    return made.__new__(made)


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


def is_untouched(module: nn.Module) -> bool:
    """Whether nobody would notice that a module's forward is not called: no hooks, global ones neither, no own one."""
    everywhere = vars(nn.modules.module)
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        or everywhere["_global_forward_hooks"]
        or everywhere["_global_forward_pre_hooks"]
    )


def own_output(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a linear makes of x, which the caller may change: a hook or another kind of module could keep it."""
    y = module(x)
    fresh = is_untouched(module) and (type(module) in (nn.Linear, Int4Linear) or isinstance(module, Fused))
    return y if fresh else y.clone()


def float_logits(router: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A router's logits [tokens, experts] from its float32 weight; x [tokens, hidden_size]."""
    tokens, weight = x.shape[0], router.weight
    if not (0 < tokens <= native._native.decode_rows and x.dtype is torch.bfloat16 and x.shape[1] % 32 == 0):
        return F.linear(x.float(), weight)
    logits = torch.empty(tokens, weight.shape[0], dtype=torch.float32)
    pointers = x.data_ptr(), weight.data_ptr(), logits.data_ptr()
    native._native.float_linear(tokens, *weight.shape, *pointers, torch.get_num_threads())
    return logits


def wide() -> bool:
    """Whether the core shall use vectors of 512 bits: this CPU has AVX-512, and INT4MOE_MAX_ISA allows it."""
    return detect().has("avx512")


def few_tokens(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, compact: CompactWeight | None = None
) -> torch.Tensor | None:
    """F.linear where the core has it and is faster: bfloat16, a few tokens, in_features a multiple of 32.

    compact: the same weight in 12 bits.
    """
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
        None if compact is None else compact.packed,
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        wide(),
        torch.get_num_threads(),
    )
    return y
