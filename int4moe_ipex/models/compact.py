"""Bfloat16 weights in 12 bits beside themselves, exactly (csrc/core/compact.h).

Of a few tokens a dense linear takes as long as reading its weight, and the heads of most checkpoints are bfloat16.
Their exponents lie so close together that four bits tell them apart: a copy of that kind is read in three quarters of
the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from int4moe_ipex.backends import native

WORTH = 1 << 19  # weights from which on a linear is not a matter of its caller's time


class CompactWeight:
    """A copy of one weight, valid for as long as the weight is what it was made of.

    Attributes:
        packed: the core's object.
        source: the weight as it was, with its memory: another one could come to lie there.
        version: what `version_of` said of it.
    """

    def __init__(self, packed: Any, weight: torch.Tensor):
        self.packed = packed
        self.source, self.version = weight.detach(), version_of(weight)

    @classmethod
    def of(cls, weight: torch.Tensor) -> CompactWeight | None:
        """A copy of a weight [out_features, in_features], or None where it cannot be or does not pay.

        That is another dtype than bfloat16, in_features not a multiple of 32 or above 32768, a value that is not
        finite, exponents far apart, or a weight made in inference mode, whose changes nobody counts.

        Raises:
            MemoryError: there is not enough for it.
        """
        rows, columns = weight.shape
        dense = weight.dtype is torch.bfloat16 and weight.is_contiguous() and weight.device.type == "cpu"
        if not dense or columns % 32 or weight.is_inference():
            return None
        packed = native._native.Compact.pack(weight.data_ptr(), rows, columns, torch.get_num_threads())
        return None if packed is None else cls(packed, weight)

    def holds(self, weight: torch.Tensor) -> bool:
        source = self.source
        same = weight.data_ptr() == source.data_ptr() and weight.dtype is source.dtype and weight.shape == source.shape
        return same and weight.stride() == source.stride() and version_of(weight) == self.version


def version_of(weight: torch.Tensor) -> tuple[int | None, int]:
    """How often a dense tensor was changed in place, as far as torch counts that, and a sample of its bytes.

    torch does not count what is written through `weight.data`, as adapters do when they are merged, nor in tensors made
    in inference mode.
    """
    sample = native._native.sample(weight.data_ptr(), weight.nbytes) if weight.is_contiguous() else 0
    return changes_of(weight), sample


def changes_of(weight: torch.Tensor) -> int | None:
    return None if weight.is_inference() else weight._version


def compact_of(module: nn.Module) -> CompactWeight | None:
    """The copy of this linear's weight as it is now."""
    kept = vars(module).get("_compact")
    if kept is not None and not kept.holds(module.weight):
        kept = vars(module)["_compact"] = None
    return kept


def make_compact(linears: Iterable[nn.Module]) -> tuple[int, int]:
    """Gives large bfloat16 linears a copy where it pays; how many have one now, and its bytes in all.

    Raises:
        MemoryError: there is not enough for the copies.
    """
    count = nbytes = 0
    for module in linears:
        compact = CompactWeight.of(module.weight) if module.weight.numel() >= WORTH else None
        if compact is not None:
            vars(module)["_compact"] = compact
            count, nbytes = count + 1, nbytes + compact.packed.nbytes
    return count, nbytes


def refresh(model: nn.Module) -> None:
    """Makes the copies in 12 bits of a loaded model anew, after its bfloat16 weights were changed.

    Copies of weights that are seen to be others are no longer used, which costs speed alone. Needed is this after a few
    values were written through `weight.data`, as peft does when it merges trained tokens: nothing tells of those.

    Raises:
        MemoryError: there is not enough for the copies.
    """
    linears = [module for module in model.modules() if "_compact" in vars(module)]
    for module in linears:
        vars(module)["_compact"] = None
    make_compact(linears)
