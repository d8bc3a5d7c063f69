"""Packing for the core: every bit comes back, the size stays, and what contradicts the spec is refused."""

import pytest
import torch

from int4moe_ipex.backends.base import LinearWeights, RunConfig
from int4moe_ipex.backends.native import NativeBackend
from int4moe_ipex.errors import BackendError
from tests.backends.native.cases import assert_same, layer, layer_error, needs_core, pack, routing

pytestmark = needs_core
BACKEND = NativeBackend()


@pytest.fixture
def gen():
    return torch.Generator().manual_seed(7)


def test_unpack_gives_every_bit_back(gen):
    """Also when only some experts have zeros or a permutation."""
    kinds = {"hidden": 40, "intermediate": 56, "group_size": 16, "bias": True}
    spec, stored = layer(gen, 2, symmetric=False, act_order=True, **kinds)
    stored.append(layer(gen, 1, **kinds)[1][0])
    spec = type(spec)(**{**vars(spec), "num_experts": 3, "shared_perm": True})
    packed = pack(spec, stored, RunConfig(isa="scalar", dtype=torch.float32))
    for expert, original in zip(BACKEND.unpack_experts(packed), stored, strict=True):
        for name in ("gate", "up", "down"):
            assert_same(getattr(expert, name), LinearWeights(*getattr(original, name)))
    ids, weights = routing(gen, 5, 3, 3)
    assert layer_error(spec, stored, packed, torch.randn(5, 40, generator=gen), ids, weights) <= 2e-5


@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_size(group_size, symmetric, gen):
    spec, stored = layer(gen, 2, hidden=512, intermediate=384, group_size=group_size, symmetric=symmetric)
    packed = pack(spec, stored, RunConfig(isa="scalar", dtype=torch.float32))
    stored_bytes = sum(w.nbytes for e in stored for w, _ in e.projections())
    assert packed.blob.numel() <= 1.03 * stored_bytes


def test_weights_that_contradict_the_spec(gen):
    spec, stored = layer(gen, 2, hidden=32, intermediate=32, group_size=32)
    run = RunConfig(isa="scalar", dtype=torch.float32)
    _, other = layer(gen, 1, hidden=32, intermediate=32, group_size=32, symmetric=False)
    with pytest.raises(BackendError, match="expert 1 gate: zero points that the spec does not announce"):
        pack(spec, [stored[0], other[0]], run)
    _, other = layer(gen, 1, hidden=32, intermediate=32, group_size=16)
    with pytest.raises(BackendError, match="expert 1 gate: group_size 16 instead of 32"):
        pack(spec, [stored[0], other[0]], run)
    with pytest.raises(BackendError, match="1 experts were given, 2 announced"):
        pack(spec, stored[:1], run)
    with pytest.raises(BackendError, match="more than 2 experts"):
        pack(spec, [*stored, stored[0]], run)
