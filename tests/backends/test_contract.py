"""What every backend that imports here has to hold, on the same inputs: the contract of backends/base.py."""

import pytest
import torch

from int4moe_ipex.backends import select
from int4moe_ipex.backends.base import RunConfig
from int4moe_ipex.canonical import CanonicalWeight, dequantize, pack_codes
from int4moe_ipex.cpu import detect
from int4moe_ipex.errors import BackendError, RoutingError
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.moe.experts import Int4Experts, StoredExpert
from int4moe_ipex.moe.linear import build_linear
from tests.weights import exact_moe, random_expert, random_weight, relative_error

CPU = detect()
SILU = Activation()
H, INTER, E, K = 64, 96, 4, 2
# Relative Frobenius error; torch's op rounds scales and intermediate results to bfloat16.
BFLOAT16_BOUND = {"torch": 1.2e-2}

pytestmark = pytest.mark.parametrize("backend", list(select.available()))


def or_skip(make, *args):
    try:
        return make(*args)
    except BackendError as error:
        pytest.skip(f"rejected with its reason: {error}")


def build(backend, experts, dtype=torch.float32, activation=SILU):
    return or_skip(Int4Experts, list(experts), activation, CPU, RunConfig(dtype=dtype), backend)


def some(seed=0, count=E, **kinds):
    gen = torch.Generator().manual_seed(seed)
    return [random_expert(gen, H, INTER, **{"group_size": 32, **kinds}) for _ in range(count)], gen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_error_bounds(backend, dtype, tokens):
    experts, gen = some(symmetric=False, act_order=True, bias=True)
    layer = build(backend, experts, dtype)
    x = torch.randn(tokens, H, generator=gen).to(dtype)
    ids = torch.randint(0, E, (tokens, K), generator=gen)
    weights = torch.rand(tokens, K, generator=gen)
    y = layer(x, ids, weights)
    assert y.dtype == dtype and y.shape == x.shape
    bound = 2e-5 if dtype == torch.float32 else BFLOAT16_BOUND.get(backend, 4e-3)
    assert relative_error(y, exact_moe(experts, SILU, x, ids, weights)) <= bound


@pytest.mark.parametrize("group_size", [16, 32, 64, 96, 128])
def test_group_sizes_with_tails(backend, group_size):
    experts, gen = some(1, group_size=group_size, symmetric=False)
    layer = build(backend, experts)
    x, ids = torch.randn(5, H, generator=gen), torch.randint(0, E, (5, K), generator=gen)
    weights = torch.rand(5, K, generator=gen)
    assert relative_error(layer(x, ids, weights), exact_moe(experts, SILU, x, ids, weights)) <= 2e-5


def test_sentinels_repeats_and_nan_weights(backend):
    experts, gen = some(2)
    layer = build(backend, experts)
    x = torch.randn(4, H, generator=gen)
    ids = torch.tensor([[0, -1], [E, 3], [2, 2], [-1, E]])
    weights = torch.tensor([[0.5, float("nan")], [float("nan"), 1.0], [0.25, 0.5], [float("nan"), float("nan")]])
    y = layer(x, ids, weights)
    assert relative_error(y, exact_moe(experts, SILU, x, ids, weights)) <= 2e-5
    assert torch.equal(y[3], torch.zeros(H))


@pytest.mark.parametrize("bad", [-2, E + 1, 2**31, -(2**40)])
def test_ids_outside_are_an_error(backend, bad):
    experts, _ = some(3)
    layer = build(backend, experts)
    with pytest.raises(RoutingError):
        layer(torch.zeros(1, H), torch.tensor([[0, bad]]), torch.ones(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_batch(backend, dtype):
    experts, _ = some(4)
    y = build(backend, experts, dtype)(
        torch.zeros(0, H, dtype=dtype), torch.zeros(0, K, dtype=torch.int64), torch.zeros(0, K)
    )
    assert y.shape == (0, H) and y.dtype == dtype


def test_ids_and_strides_are_bit_equal(backend):
    experts, gen = some(5)
    layer = build(backend, experts)
    x = torch.randn(H, 6, generator=gen).t()
    wide = torch.randint(0, E, (6, 2 * K), generator=gen)
    heavy = torch.rand(K, 6, generator=gen).t()
    plain = layer(x.contiguous(), wide[:, ::2].contiguous(), heavy.contiguous())
    assert torch.equal(layer(x, wide[:, ::2], heavy), plain)
    assert torch.equal(layer(x, wide[:, ::2].int(), heavy), plain)


def test_all_tokens_on_two_experts_leave_no_stale_rows(backend):
    experts, gen = some(6)
    layer = build(backend, experts)
    x, weights = torch.randn(3, H, generator=gen), torch.rand(3, K, generator=gen)
    layer(torch.full((9, H), float("nan")), torch.full((9, K), 3), torch.ones(9, K))  # leaves NaN in any scratch
    ids = torch.tensor([[0, 1]] * 3)
    assert relative_error(layer(x, ids, weights), exact_moe(experts, SILU, x, ids, weights)) <= 2e-5


def test_float16_does_not_overflow_before_the_routing_weight(backend):
    # h = 64 in each of 32 columns; down has q - 8 = 4 and scale 16: 131072 before the weight of 1/16.
    def constant(n, k, code, scale):
        codes = pack_codes(torch.full((n, k), code, dtype=torch.uint8))
        return CanonicalWeight(codes, torch.full((n, 1), scale, dtype=torch.float16), None, k), None

    hidden = intermediate = 32
    up = constant(intermediate, hidden, 9, 2.0)  # x of one 1 gives 2
    gate = constant(intermediate, hidden, 9, 32.0)  # 32, and silu(32) = 32: h = 64
    experts = [StoredExpert(gate, up, constant(hidden, intermediate, 12, 16.0))] * 2
    layer = build(backend, experts, torch.float16)
    x = torch.zeros(1, hidden, dtype=torch.float16)
    x[0, 0] = 1
    y = layer(x, torch.tensor([[0, 1]]), torch.tensor([[0.0625, 0.0]]))
    assert torch.equal(y, torch.full_like(y, 8192.0))


def test_unpacked_weights_are_the_canonical_ones(backend):
    experts, _ = some(7, symmetric=False, act_order=True, bias=True)
    layer = build(backend, experts)
    for pack in layer.packs:
        for stored, back in zip(experts, pack.choice.backend.unpack_experts(pack.packed), strict=True):
            for name in ("gate", "up", "down"):
                weight, bias = getattr(stored, name)
                again = getattr(back, name)
                for part in ("codes", "scales", "zeros", "perm"):
                    assert torch.equal(getattr(weight, part), getattr(again.weight, part)), (name, part)
                assert weight.scales.dtype == again.weight.scales.dtype
                assert torch.equal(bias, again.bias)


@pytest.mark.parametrize("shape", [(0, H), (1, H), (2, 0, H), (2, 3, H)])
def test_linear(backend, shape):
    gen = torch.Generator().manual_seed(8)
    weight, bias = random_weight(gen, 48, H, 32, False, True), torch.randn(48, generator=gen)
    module = or_skip(build_linear, weight, bias, CPU, RunConfig(dtype=torch.float32), backend)
    x = torch.randn(shape, generator=gen)
    exact = x.double() @ dequantize(weight).double().t() + bias.double()
    y = module(x)
    assert y.shape == exact.shape and y.dtype == x.dtype
    assert relative_error(y, exact) <= 2e-5
    back = module.backend.unpack_linear(module.packed)
    assert torch.equal(back.weight.codes, weight.codes) and torch.equal(back.bias, bias)
