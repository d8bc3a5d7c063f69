"""Int4Experts: packs of one spec, mixed layers, single linears, every activation, on the backends that run anywhere."""

import pytest
import torch

from int4moe_ipex.backends.base import RunConfig
from int4moe_ipex.canonical import DenseWeight, dequantize
from int4moe_ipex.cpu import detect
from int4moe_ipex.errors import BackendError, RoutingError, UnsupportedModelError
from int4moe_ipex.moe.activations import GATED, Activation
from int4moe_ipex.moe.experts import Int4Experts, StoredExpert
from int4moe_ipex.moe.linear import DenseLinear, build_linear
from tests.weights import dense_expert, exact_moe, random_expert, random_weight, relative_error

CPU = detect()
H, INTER, E, T, K = 64, 96, 5, 9, 3
FLOAT32 = RunConfig(dtype=torch.float32)


def routing(gen, experts=E):
    return torch.randint(0, experts, (T, K), generator=gen), torch.rand(T, K, generator=gen)


SILU = Activation()


def run(experts, activation=SILU, backend="reference", dtype=torch.float32, x=None, ids=None, weights=None):
    gen = torch.Generator().manual_seed(7)
    x = torch.randn(T, H, generator=gen) if x is None else x
    if ids is None:
        ids, weights = routing(gen, len(experts))
    exact = exact_moe(experts, activation, x.to(dtype), ids, weights)
    layer = Int4Experts(list(experts), activation, CPU, RunConfig(dtype=dtype), backend)
    return layer, layer(x.to(dtype), ids, weights), exact


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("gate", [True, False])
def test_activations(name, gate):
    gen = torch.Generator().manual_seed(0)
    experts = [random_expert(gen, H, INTER, 32, gate=gate, bias=True) for _ in range(E)]
    if name == "swiglu_clamped" and not gate:
        with pytest.raises(UnsupportedModelError, match="gate"):
            run(experts, Activation(name, limit=0.5))
        return
    _, y, exact = run(experts, Activation(name, limit=0.5))
    assert relative_error(y, exact) < 2e-6


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("shared_perm", [True, False])
def test_backends_agree_with_the_formula(backend, symmetric, act_order, shared_perm):
    gen = torch.Generator().manual_seed(1)
    experts = [random_expert(gen, H, INTER, 32, symmetric, act_order, True, shared_perm=shared_perm) for _ in range(E)]
    _, y, exact = run(experts, backend=backend)
    assert relative_error(y, exact) < 2e-6
    _, y, exact = run(experts, backend=backend, dtype=torch.bfloat16)
    assert relative_error(y, exact) < (4e-3 if backend == "reference" else 1e-2)


def test_torch_backend_gives_its_weights_back():
    gen = torch.Generator().manual_seed(2)
    experts = [random_expert(gen, H, INTER, 32, symmetric=False, act_order=True, bias=True) for _ in range(3)]
    layer, _, _ = run(experts, backend="torch")
    pack = layer.packs[0]
    for stored, back in zip(experts, pack.choice.backend.unpack_experts(pack.packed)):
        for name in ("gate", "up", "down"):
            weight, bias = getattr(stored, name)
            again = getattr(back, name)
            assert torch.equal(weight.codes, again.weight.codes)
            assert torch.equal(weight.scales, again.weight.scales)
            assert torch.equal(weight.zeros, again.weight.zeros)
            assert torch.equal(weight.perm, again.weight.perm)
            assert torch.equal(bias, again.bias)


def test_mixed_layer_8bit_16bit_and_other_group_sizes():
    gen = torch.Generator().manual_seed(3)
    experts = [random_expert(gen, H, INTER, 32), random_expert(gen, H, INTER, 16, symmetric=False)]
    experts += [dense_expert(gen, H, INTER, torch.bfloat16), random_expert(gen, H, INTER, 32, act_order=True)]
    half = random_expert(gen, H, INTER, 32)
    eight_bit = DenseWeight(torch.randint(-128, 128, (H, INTER), generator=gen).float() * 0.0019)
    experts.append(StoredExpert(half.gate, half.up, (eight_bit, None)))
    layer, y, exact = run(experts)
    assert [p.ids for p in layer.packs] == [(0, 3), (1,)] and sorted(layer.composed) == ["2", "4"]
    assert relative_error(y, exact) < 2e-6


def test_mixed_layer_sentinels_and_bad_ids():
    gen = torch.Generator().manual_seed(4)
    experts = [random_expert(gen, H, INTER, 32), dense_expert(gen, H, INTER, torch.float32)]
    x = torch.randn(3, H, generator=gen)
    ids = torch.tensor([[0, 2], [-1, 1], [1, 1]])
    weights = torch.tensor([[1.0, float("nan")], [float("nan"), 0.5], [0.25, 0.5]])
    layer, y, exact = run(experts, x=x, ids=ids, weights=weights)
    assert relative_error(y, exact) < 2e-6
    with pytest.raises(RoutingError, match="3"):
        layer(x, torch.full_like(ids, 3), weights)


def test_sixteen_bit_experts_stay_at_16_bits():
    gen = torch.Generator().manual_seed(5)
    layer, _, _ = run([dense_expert(gen, H, INTER, torch.bfloat16)] * 2, dtype=torch.bfloat16)
    assert layer.composed["0"].up.dense_weight.dtype == torch.bfloat16


def test_all_tokens_on_two_experts_leaves_no_stale_rows():
    gen = torch.Generator().manual_seed(6)
    experts = [random_expert(gen, H, INTER, 32) for _ in range(4)]
    ids = torch.tensor([[0, 1]] * T)
    _, y, exact = run(experts, ids=ids, weights=torch.rand(T, 2, generator=gen))
    assert not y.isnan().any() and relative_error(y, exact) < 2e-6


def test_forced_backend_that_cannot_run_says_why():
    gen = torch.Generator().manual_seed(7)
    with pytest.raises(BackendError, match="group_size 32, 64, 128, 256, not 48"):
        run([random_expert(gen, H, INTER, 48)], backend="torch")
    with pytest.raises(BackendError, match="unknown backend 'cuda'"):
        run([random_expert(gen, H, INTER, 32)], backend="cuda")


@pytest.mark.parametrize("shape", [(0, H), (2, 0, H), (3, H), (2, 3, H)])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_linear_shapes(shape, backend):
    gen = torch.Generator().manual_seed(8)
    weight, bias = random_weight(gen, 32, H, 32, symmetric=False, act_order=True), torch.randn(32, generator=gen)
    module = build_linear(weight, bias, CPU, FLOAT32, backend)
    x = torch.randn(shape, generator=gen)
    exact = x.double() @ dequantize(weight).double().t() + bias.double()
    y = module(x)
    assert y.shape == exact.shape and y.dtype == x.dtype
    assert relative_error(y, exact) < 2e-6


def test_dense_linear_keeps_every_bit():
    weight = torch.tensor([[1 + 2**-10, 2.0]], dtype=torch.float16)
    module = DenseLinear(weight, None, torch.bfloat16)
    assert module.compute_dtype == torch.float32
    assert module(torch.tensor([[1.0, 0.0]])).item() == 1 + 2**-10
