"""Routing: which tokens go to which expert, and in which order their results are added.

Used by every backend that runs experts one after another; the native core does the same in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from int4moe_ipex.errors import RoutingError

# Tokens per pass: bounds the float32 scratch of [tokens, top_k, hidden_size] for long prompts.
CHUNK_TOKENS = 1024


def check_routing(
    x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Checks the three tensors against each other and gives the ids as int64 [T, k].

    Args:
        x: [T, hidden_size].
        top_k_index: [T, k], int32 or int64. -1 and num_experts mark slots that contribute nothing
            (transformers uses num_experts for experts of other ranks).
        top_k_weights: [T, k], any float dtype.

    Raises:
        RoutingError: wrong shapes or dtypes, or an id outside -1..num_experts.
    """
    if x.dim() != 2:
        raise RoutingError(f"hidden states must be [tokens, hidden_size], not {tuple(x.shape)}")
    if top_k_index.dim() != 2 or top_k_index.shape != top_k_weights.shape or top_k_index.shape[0] != x.shape[0]:
        raise RoutingError(
            f"top_k_index {tuple(top_k_index.shape)} and top_k_weights {tuple(top_k_weights.shape)} must both be "
            f"[tokens, top_k] with {x.shape[0]} tokens"
        )
    if top_k_index.dtype not in (torch.int32, torch.int64) or not top_k_weights.dtype.is_floating_point:
        raise RoutingError(
            f"top_k_index must be int32 or int64 and top_k_weights a float type, not {top_k_index.dtype} and "
            f"{top_k_weights.dtype}"
        )
    ids = top_k_index.long()
    if ids.numel():
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < -1 or high > num_experts:
            bad = low if low < -1 else high
            raise RoutingError(f"expert id {bad} is outside -1..{num_experts} ({num_experts} experts)")
    return ids


def group_by_expert(ids: torch.Tensor, num_experts: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(expert, slots) for each expert that has work; slots are indices into the flattened [T * k] ids, ascending.

    Idle experts and the sentinels -1 and num_experts do not appear.
    """
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=num_experts + 2).tolist()
    start = counts[0]
    for expert in range(num_experts):
        count = counts[expert + 1]
        if count:
            yield expert, order[start : start + count]
        start += count


def run_grouped(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    num_experts: int,
    expert_forward: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Runs each expert once on all of its tokens and adds the weighted results in the order of k, in float32.

    Args:
        expert_forward: (expert, x[m, H]) -> y[m, H], any float dtype; m >= 1.

    Returns:
        [T, H] in x's dtype.

    Raises:
        RoutingError: see `check_routing`.
    """
    ids = check_routing(x, top_k_index, top_k_weights, num_experts)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    k = ids.shape[1]
    for start in range(0, x.shape[0], CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        tokens = x[part]
        weights = top_k_weights[part].reshape(-1, 1).float()
        slots = torch.zeros(tokens.shape[0] * k, x.shape[1])
        for expert, where in group_by_expert(ids[part], num_experts):
            slots[where] = expert_forward(expert, tokens[where // k]).float() * weights[where]
        out[part] = sum_slots(slots.view(tokens.shape[0], k, x.shape[1])).to(x.dtype)
    return out


def sum_slots(slots: torch.Tensor) -> torch.Tensor:
    """Weighted results of each slot, float32 [T, k, H], added in the order of k -> [T, H]."""
    total = torch.zeros(slots.shape[0], slots.shape[2])
    for slot in range(slots.shape[1]):
        total += slots[:, slot]
    return total
