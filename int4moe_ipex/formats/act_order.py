"""From a stored g_idx (group of each original column) to contiguous groups and a column permutation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from int4moe_ipex.errors import FormatError


@dataclass(frozen=True)
class Grouping:
    """How canonical columns and groups come from the stored ones.

    Attributes:
        perm: int32 [K], canonical column j is original column perm[j]; None for the identity.
        group_size: columns per canonical group.
        groups: int64, the stored group of each canonical group; None for the identity.
    """

    perm: torch.Tensor | None
    group_size: int
    groups: torch.Tensor | None

    def take(self, per_group: torch.Tensor) -> torch.Tensor:
        """Stored [N, G] values for the canonical groups."""
        return per_group if self.groups is None else per_group[:, self.groups]


def plain(group_size: int) -> Grouping:
    return Grouping(None, group_size, None)


def from_g_idx(g_idx: torch.Tensor, group_size: int, num_groups: int, name: str) -> Grouping:
    """The grouping that a g_idx [K] describes. Its values decide, not any flag.

    Groups of the size that the label says (the tail group may be any of them) keep that size. Groups of other sizes are
    cut into equal pieces of their greatest common divisor, which repeat their scale and zero: still exact.

    Raises:
        FormatError: a value outside 0..G-1, or a group without columns (what an unset g_idx looks like).
    """
    in_features = g_idx.numel()
    trivial = torch.div(torch.arange(in_features), group_size, rounding_mode="floor")
    if torch.equal(g_idx.long(), trivial):
        return plain(group_size)
    index = g_idx.long()
    outside = (index < 0) | (index >= num_groups)
    if bool(outside.any()):
        column = int(outside.nonzero()[0])
        raise FormatError(
            f"{name}: column {column} is in group {int(index[column])}, but there are groups 0..{num_groups - 1} only"
        )
    counts = torch.bincount(index, minlength=num_groups)
    if bool((counts == 0).any()):
        empty = int((counts == 0).nonzero()[0])
        raise FormatError(f"{name}: no column is in group {empty} of {num_groups}; the g_idx was never filled in")
    full = counts == group_size
    short = (~full).nonzero().flatten()
    if len(short) == 0 or (len(short) == 1 and int(counts[short]) < group_size):
        order = torch.arange(num_groups) if len(short) == 0 else torch.cat((full.nonzero().flatten(), short))
        size = group_size
    else:
        size = math.gcd(*counts.tolist())
        order = torch.repeat_interleave(torch.arange(num_groups), counts // size)
    rank = torch.empty(num_groups, dtype=torch.long)
    rank[torch.unique_consecutive(order)] = torch.arange(num_groups)
    perm = torch.argsort(rank[index], stable=True)
    identity = torch.equal(perm, torch.arange(in_features))
    same_groups = torch.equal(order, torch.arange(num_groups))
    return Grouping(None if identity else perm.to(torch.int32), size, None if same_groups else order)
