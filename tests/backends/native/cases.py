"""Builders for tests of the native backend: a packed layer, its exact result, and errors."""

from __future__ import annotations

import pytest
import torch

from int4moe_ipex.backends import native
from int4moe_ipex.backends.base import LinearWeights, RunConfig
from int4moe_ipex.cpu import detect
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.moe.experts import experts_spec
from tests.weights import exact_moe, random_expert, relative_error

needs_core = pytest.mark.skipif(native._native is None, reason=f"no native core: {native.BUILD_PROBLEM}")

# Rows of this build that this machine runs, as (isa, compute); others are skipped by name.
ROWS = [(isa, compute) for isa in ("scalar", "avx2", "avx512", "amx") for compute in ("w4a16", "w4a8")]
ROWS.append(("avx2_vnni", "w4a8"))
TOLERANCE = {
    ("w4a16", torch.float32): 2e-5,
    ("w4a16", torch.bfloat16): 4e-3,
    ("w4a16", torch.float16): 1e-3,
    ("w4a8", torch.float32): 1.5e-2,
    ("w4a8", torch.bfloat16): 1.5e-2,
    ("w4a8", torch.float16): 1.5e-2,
}


def skip_unless_row(isa: str, compute: str) -> None:
    if not native.rows().get((isa, compute)) or not detect().has(isa):
        pytest.skip(f"this CPU or build has no {isa}/{compute}")


def run_config(isa: str, compute: str, dtype: torch.dtype = torch.float32) -> RunConfig:
    return RunConfig(isa=isa, compute=compute, dtype=dtype)


def layer(gen: torch.Generator, experts: int, activation: Activation | None = None, **kinds):
    """(spec, stored experts); kinds as for `random_expert`."""
    stored = [random_expert(gen, **kinds) for _ in range(experts)]
    return experts_spec(stored, activation or Activation()), stored


def pack(spec, stored, run: RunConfig):
    return native.NativeBackend().pack_experts(spec, (e.weights() for e in stored), run)


def routing(gen: torch.Generator, tokens: int, top_k: int, experts: int, dtype: torch.dtype = torch.float32):
    ids = torch.stack([torch.randperm(experts, generator=gen)[:top_k] for _ in range(tokens)]) if tokens else None
    ids = torch.empty(0, top_k, dtype=torch.int64) if ids is None else ids
    return ids, torch.rand(tokens, top_k, generator=gen).to(dtype)


def layer_error(spec, stored, packed, x, ids, weights) -> float:
    exact = exact_moe(stored, spec.activation, x, ids, weights)
    return relative_error(native.NativeBackend().experts_forward(packed, x, ids, weights), exact)


def assert_same(found: LinearWeights, stored: LinearWeights) -> None:
    """Equal to the bit, dtypes included."""
    for name in ("codes", "scales", "zeros", "perm"):
        a, b = getattr(found.weight, name), getattr(stored.weight, name)
        assert (a is None) == (b is None), name
        if b is not None:
            assert a.dtype == b.dtype and torch.equal(a, b), name
    assert found.weight.group_size == stored.weight.group_size
    assert (found.bias is None) == (stored.bias is None)
    if stored.bias is not None:
        assert found.bias.dtype == stored.bias.dtype and torch.equal(found.bias, stored.bias)
