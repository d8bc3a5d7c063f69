"""Random canonical weights and an independent float64 computation of a MoE layer, for tests of every backend."""

from __future__ import annotations

import torch

from int4moe_ipex.canonical import CanonicalWeight, DenseWeight, dequantize, pack_codes
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.moe.experts import StoredExpert


def random_weight(
    gen: torch.Generator,
    out_features: int,
    in_features: int,
    group_size: int,
    symmetric: bool = True,
    act_order: bool = False,
    scales_dtype: torch.dtype = torch.bfloat16,
    perm: torch.Tensor | None = None,
) -> CanonicalWeight:
    groups = -(-in_features // group_size)
    codes = torch.randint(0, 16, (out_features, in_features), generator=gen, dtype=torch.uint8)
    scales = (torch.rand(out_features, groups, generator=gen) * 0.02 + 0.005).to(scales_dtype)
    zeros = None if symmetric else torch.randint(0, 16, (out_features, groups), generator=gen, dtype=torch.uint8)
    if act_order and perm is None:
        perm = torch.randperm(in_features, generator=gen).int()
    return CanonicalWeight(pack_codes(codes), scales, zeros, group_size, perm if act_order else None)


def random_expert(
    gen: torch.Generator,
    hidden: int,
    intermediate: int,
    group_size: int,
    symmetric: bool = True,
    act_order: bool = False,
    bias: bool = False,
    gate: bool = True,
    shared_perm: bool = True,
    scales_dtype: torch.dtype = torch.bfloat16,
) -> StoredExpert:
    """group_size is cut to the projection's in_features, as -1 would be."""
    perm = torch.randperm(hidden, generator=gen).int() if act_order and shared_perm else None

    def one(n: int, k: int, perm: torch.Tensor | None = None):
        weight = random_weight(gen, n, k, min(group_size, k), symmetric, act_order, scales_dtype, perm)
        return weight, torch.randn(n, generator=gen) * 0.1 if bias else None

    return StoredExpert(
        one(intermediate, hidden, perm) if gate else None,
        one(intermediate, hidden, perm),
        one(hidden, intermediate),
    )


def dense_expert(gen: torch.Generator, hidden: int, intermediate: int, dtype: torch.dtype) -> StoredExpert:
    def one(n: int, k: int):
        return DenseWeight((torch.randn(n, k, generator=gen) * 0.05).to(dtype)), None

    return StoredExpert(one(intermediate, hidden), one(intermediate, hidden), one(hidden, intermediate))


def exact_moe(
    experts: list[StoredExpert],
    activation: Activation,
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The layer slot by slot in float64, [T, H]; sentinels contribute nothing."""

    def apply(stored, rows: torch.Tensor) -> torch.Tensor:
        weight, bias = stored
        y = rows @ dequantize(weight).double().t()
        return y if bias is None else y + bias.double()

    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(top_k_index.shape[1]):
            expert = int(top_k_index[token, slot])
            if not 0 <= expert < len(experts):
                continue
            e = experts[expert]
            row = x[token].double()
            gate = None if e.gate is None else apply(e.gate, row)
            y = apply(e.down, activation.apply(gate, apply(e.up, row)))
            out[token] += y * top_k_weights[token, slot].double()
    return out


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative Frobenius error; 0 for two empty or all-zero tensors."""
    norm = exact.double().norm()
    difference = (y.double() - exact.double()).norm()
    return float(difference / norm) if norm else float(difference)
