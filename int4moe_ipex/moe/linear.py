"""Linears as torch modules: int4 through a backend, and dense ones that keep every bit of their weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from int4moe_ipex.backends.base import LinearSpec, LinearWeights, Packed, RunConfig
from int4moe_ipex.backends.select import Choice, Wish, choose
from int4moe_ipex.canonical import CanonicalWeight, Weight
from int4moe_ipex.cpu import CpuFeatures
from int4moe_ipex.moe.gradients import refuse_gradients


class Int4Linear(nn.Module):
    """`y = x @ W.T + bias` with an int4 weight: x [..., in_features] -> [..., out_features] in x's dtype.

    The packed weight is a plain attribute, not a parameter or buffer: `.to(dtype)` must not touch its scales.
    """

    def __init__(self, choice: Choice, packed: Packed):
        super().__init__()
        self.in_features, self.out_features = packed.spec.in_features, packed.spec.out_features
        self.backend = choice.backend
        self.choice = choice
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return refuse_gradients(self.backend.linear_forward(self.packed, x), x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, path={self.packed.path}"


class DenseLinear(nn.Module):
    """A linear whose weight is not 4-bit, computed in a dtype that holds both weight and activations exactly.

    Args:
        weight: [out_features, in_features] in the dtype that represents it exactly.
        bias: [out_features] or None.
        dtype: the activations' dtype; the computation runs in `torch.promote_types(weight.dtype, dtype)`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype):
        super().__init__()
        compute = torch.promote_types(weight.dtype, dtype)
        self.out_features, self.in_features = weight.shape
        self.compute_dtype = compute
        self.dense_weight = weight.to(compute)
        self.dense_bias = None if bias is None else bias.to(compute)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.compute_dtype), self.dense_weight, self.dense_bias).to(x.dtype)

    def extra_repr(self) -> str:
        dtype = str(self.compute_dtype).removeprefix("torch.")
        return f"in_features={self.in_features}, out_features={self.out_features}, dense {dtype}"


def build_linear(
    weight: Weight,
    bias: torch.Tensor | None,
    cpu: CpuFeatures,
    run: RunConfig,
    backend: Wish = "auto",
) -> Int4Linear | DenseLinear:
    """The module for one linear: int4 weights through the chosen backend, others dense.

    Raises:
        BackendError: no allowed backend can run it.
    """
    if not isinstance(weight, CanonicalWeight):
        return DenseLinear(weight.weight, bias, run.dtype)
    spec = LinearSpec.of(weight, bias)
    choice = choose(spec, cpu, run, backend)
    return Int4Linear(choice, choice.pack_linear(spec, LinearWeights(weight, bias)))
