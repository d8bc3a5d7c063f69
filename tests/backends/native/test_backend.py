"""The native backend against the float64 layer: every row of kernels, and the rules of the backend protocol."""

import pytest
import torch

from int4moe_ipex.backends import native
from int4moe_ipex.backends.base import LinearSpec, LinearWeights, RunConfig
from int4moe_ipex.canonical import CanonicalWeight, dequantize
from int4moe_ipex.errors import RoutingError
from int4moe_ipex.moe.activations import GATED, Activation
from tests.backends.native.cases import (
    ROWS,
    TOLERANCE,
    assert_same,
    layer,
    layer_error,
    needs_core,
    pack,
    routing,
    run_config,
    skip_unless_row,
)
from tests.weights import random_weight, relative_error

pytestmark = needs_core
BACKEND = native.NativeBackend()


@pytest.fixture
def gen():
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize(("isa", "compute"), ROWS)
def test_literal_word(isa, compute):
    """W = [[1, 2, ..., 8] codes minus zero 3, scale 0.5] by hand: y = 0.5 * sum (code - 3) * x."""
    skip_unless_row(isa, compute)
    codes = torch.tensor([[0x21, 0x43, 0x65, 0x87]], dtype=torch.uint8)
    weight = CanonicalWeight(codes, torch.tensor([[0.5]]), torch.tensor([[3]], dtype=torch.uint8), 8)
    spec = LinearSpec.of(weight)
    packed = BACKEND.pack_linear(spec, LinearWeights(weight), run_config(isa, compute))
    x = torch.eye(8)
    expected = torch.tensor([[-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5]]).t()
    # W4A8 takes the zero point's part off in float32, scaled by 1/127: equal code and zero leave a rest.
    atol = 2e-7 if compute == "w4a8" else 0
    torch.testing.assert_close(BACKEND.linear_forward(packed, x), expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize(("isa", "compute"), ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 13, 40])
def test_layer(isa, compute, dtype, tokens, gen):
    skip_unless_row(isa, compute)
    spec, stored = layer(gen, 6, hidden=64, intermediate=96, group_size=32, symmetric=False)
    packed = pack(spec, stored, run_config(isa, compute, dtype))
    assert packed.path == f"native/{isa}/{compute}"
    ids, weights = routing(gen, tokens, 3, 6, dtype)
    x = torch.randn(tokens, 64, generator=gen).to(dtype)
    assert layer_error(spec, stored, packed, x, ids, weights) <= TOLERANCE[compute, dtype]


@pytest.mark.parametrize(("isa", "compute"), ROWS)
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("gate", [True, False])
def test_activations_and_biases(isa, compute, name, gate, gen):
    skip_unless_row(isa, compute)
    if name == "swiglu_clamped" and not gate:
        pytest.skip("swiglu_clamped needs a gate")
    act = Activation(name, limit=0.5)
    spec, stored = layer(gen, 3, act, hidden=40, intermediate=24, group_size=8, gate=gate, bias=True)
    packed = pack(spec, stored, run_config(isa, compute))
    ids, weights = routing(gen, 9, 2, 3)
    x = torch.randn(9, 40, generator=gen) * 4
    tolerance = 3e-2 if compute == "w4a8" and name == "relu2" else TOLERANCE[compute, torch.float32]
    assert layer_error(spec, stored, packed, x, ids, weights) <= tolerance


@pytest.mark.parametrize(("isa", "compute"), ROWS)
@pytest.mark.parametrize("shared", [True, False])
def test_act_order(isa, compute, shared, gen):
    skip_unless_row(isa, compute)
    kinds = {"hidden": 64, "intermediate": 48, "group_size": 16, "act_order": True, "shared_perm": shared}
    spec, stored = layer(gen, 4, symmetric=False, bias=True, **kinds)
    assert spec.shared_perm is shared
    packed = pack(spec, stored, run_config(isa, compute))
    ids, weights = routing(gen, 20, 2, 4)
    x = torch.randn(20, 64, generator=gen)
    assert layer_error(spec, stored, packed, x, ids, weights) <= TOLERANCE[compute, torch.float32]


@pytest.mark.parametrize("isa", [row[0] for row in ROWS if row[1] == "w4a16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_result_does_not_depend_on_the_batch_or_threads(isa, dtype, gen):
    skip_unless_row(isa, "w4a16")
    spec, stored = layer(gen, 4, hidden=64, intermediate=160, group_size=32, symmetric=False)
    packed = pack(spec, stored, run_config(isa, "w4a16", dtype))
    ids, weights = routing(gen, 230, 2, 4)
    x = torch.randn(230, 64, generator=gen).to(dtype)
    whole = BACKEND.experts_forward(packed, x, ids, weights)
    for part in (slice(0, 1), slice(3, 5), slice(7, 10), slice(11, 40), slice(50, 229)):
        assert torch.equal(BACKEND.experts_forward(packed, x[part], ids[part], weights[part]), whole[part])
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert torch.equal(BACKEND.experts_forward(packed, x, ids, weights), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("isa", "compute"), ROWS)
def test_what_is_not_finite_stays_so_in_its_token_alone(isa, compute, value, dtype, gen):
    skip_unless_row(isa, compute)
    spec, stored = layer(gen, 3, hidden=64, intermediate=32, group_size=32)
    packed = pack(spec, stored, run_config(isa, compute, dtype))
    x = torch.randn(3, 64, generator=gen).to(dtype)
    ids, weights = routing(gen, 3, 2, 3)
    clean = BACKEND.experts_forward(packed, x, ids, weights)
    x[1, 40] = value
    y = BACKEND.experts_forward(packed, x, ids, weights)
    assert not y[1].isfinite().any()
    assert torch.equal(y[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(("isa", "compute"), ROWS)
def test_activations_below_the_normal_numbers(isa, compute, gen):
    skip_unless_row(isa, compute)
    spec, stored = layer(gen, 2, hidden=32, intermediate=32, group_size=32)
    packed = pack(spec, stored, run_config(isa, compute))
    ids, weights = routing(gen, 2, 1, 2)
    y = BACKEND.experts_forward(packed, torch.full((2, 32), 1e-39), ids, weights)
    assert y.isfinite().all() and y.abs().max() < 1e-30


@pytest.mark.parametrize(("isa", "compute"), ROWS)
def test_sentinels_nan_weights_repeats_and_strides(isa, compute, gen):
    skip_unless_row(isa, compute)
    spec, stored = layer(gen, 4, hidden=32, intermediate=32, group_size=32)
    packed = pack(spec, stored, run_config(isa, compute))
    ids = torch.tensor([[0, 4, -1], [2, 2, 1], [-1, 4, 4], [3, 0, 3]])
    weights = torch.tensor([[0.5, float("nan"), float("nan")], [0.1, 0.2, 0.3], [float("nan")] * 3, [1.0, -2.0, 0.5]])
    x = torch.randn(4, 32, generator=gen)
    y = BACKEND.experts_forward(packed, x, ids, weights)
    assert (y[2] == 0).all()
    clean = torch.nan_to_num(weights)
    assert layer_error(spec, stored, packed, x, ids, clean) <= TOLERANCE[compute, torch.float32]
    assert torch.equal(BACKEND.experts_forward(packed, x, ids, clean), y)

    strided_ids = torch.empty(3, 8, dtype=torch.int32).t()[::2].copy_(ids)
    strided_weights = torch.empty(3, 4, dtype=torch.float64).t().copy_(weights)
    transposed = torch.empty(32, 4).t().copy_(x)
    wide = torch.empty(4, 50)[:, 5:37].copy_(x)
    for other in (transposed, wide):
        assert torch.equal(BACKEND.experts_forward(packed, other, strided_ids, strided_weights), y)


def test_no_tokens_and_bad_ids(gen):
    spec, stored = layer(gen, 4, hidden=32, intermediate=32, group_size=32)
    packed = pack(spec, stored, RunConfig(isa="scalar", dtype=torch.float32))
    empty = BACKEND.experts_forward(packed, torch.empty(0, 32), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert empty.shape == (0, 32)
    x, ids, weights = torch.randn(3, 32), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    for bad in (-2, 5, 2**40):
        ids[1, 1] = bad
        with pytest.raises(RoutingError, match=rf"expert id {bad} of token 1 is outside -1..4"):
            BACKEND.experts_forward(packed, x, ids, weights)
    with pytest.raises(RoutingError, match="must both be"):
        BACKEND.experts_forward(packed, x, ids[:2], weights)
    with pytest.raises(RoutingError, match="must be int32 or int64"):
        BACKEND.experts_forward(packed, x, ids.short(), weights)
    with pytest.raises(RoutingError, match="hidden states"):
        BACKEND.experts_forward(packed, x[:, :16], ids, weights)


@pytest.mark.parametrize(("isa", "compute"), ROWS)
@pytest.mark.parametrize("shape", [(20, 48, 16), (33, 34, 34), (16, 100, 32), (100, 24, 24), (7, 20, 8)])
def test_linear(isa, compute, shape, gen):
    skip_unless_row(isa, compute)
    n, k, g = shape
    weight = random_weight(gen, n, k, g, symmetric=False, act_order=True, scales_dtype=torch.float16)
    bias = torch.randn(n, generator=gen).half()
    packed = BACKEND.pack_linear(LinearSpec.of(weight, bias), LinearWeights(weight, bias), run_config(isa, compute))
    for lead in ((1,), (2, 3), (17,), (0, 4), ()):
        x = torch.randn(*lead, k, generator=gen)
        y = BACKEND.linear_forward(packed, x)
        exact = x.double() @ dequantize(weight).double().t() + bias.double()
        assert y.shape == (*lead, n)
        assert relative_error(y, exact) <= TOLERANCE[compute, torch.float32]
    again = BACKEND.unpack_linear(packed)
    assert_same(again, LinearWeights(weight, bias))
