"""Layer cases are reproducible, their reference is the canonical formula, and rows add up."""

from __future__ import annotations

import pytest
import torch

from int4moe_ipex.backends.base import RunConfig
from int4moe_ipex.bench import layer as bench
from int4moe_ipex.bench.limits import Limits
from int4moe_ipex.bench.shapes import layer_shape
from int4moe_ipex.canonical import dequantize
from int4moe_ipex.cpu import detect
from int4moe_ipex.errors import BackendError

SHAPE = layer_shape("64x32x8x2")
FLOAT32 = RunConfig(dtype=torch.float32)


@pytest.mark.parametrize("options", [{}, {"asym": True}, {"act_order": True, "asym": True}, {"group_size": -1}])
def test_an_expert_is_the_same_each_time_and_matches_its_spec(options):
    case = bench.LayerCase(SHAPE, **({"group_size": 32} | options))
    one, again, other = case.expert(3), case.expert(3), case.expert(4)
    assert torch.equal(dequantize(one.gate.weight), dequantize(again.gate.weight))
    assert not torch.equal(one.gate.weight.codes, other.gate.weight.codes)
    assert not torch.equal(one.gate.weight.codes, one.up.weight.codes)
    for name in ("gate", "up", "down"):
        weight, spec = getattr(one, name).weight, getattr(case.spec, name)
        assert (weight.in_features, weight.out_features, weight.group_size) == (
            spec.in_features,
            spec.out_features,
            spec.group_size,
        )
        assert weight.symmetric == spec.symmetric and (weight.perm is not None) == spec.act_order
    total = sum(getattr(one, name).weight.nbytes for name in ("gate", "up", "down"))
    assert case.stored_bytes_per_expert() == total


def test_gate_and_up_of_one_expert_share_their_order():
    expert = bench.LayerCase(SHAPE, 32, act_order=True).expert(0)
    assert torch.equal(expert.gate.weight.perm, expert.up.weight.perm)
    assert sorted(expert.gate.weight.perm.tolist()) == list(range(64))


def test_the_reference_is_the_layer_written_out():
    case = bench.LayerCase(SHAPE, 32, asym=True)
    x, index, weights = case.inputs(3, torch.float32, seed=5)
    expected = torch.zeros(3, 64)
    for t in range(3):
        for slot in range(2):
            e = case.expert(int(index[t, slot]))
            gate, up = dequantize(e.gate.weight) @ x[t], dequantize(e.up.weight) @ x[t]
            expected[t] += weights[t, slot] * (dequantize(e.down.weight) @ (gate * gate.sigmoid() * up))
    torch.testing.assert_close(case.reference(x, index, weights), expected)
    assert 0.05 < expected.std() < 2  # activations keep their size


def test_inputs_route_each_token_to_distinct_experts_anew():
    case = bench.LayerCase(SHAPE)
    _, first, weights = case.inputs(20, torch.bfloat16, seed=1)
    _, second, _ = case.inputs(20, torch.bfloat16, seed=2)
    assert all(len(set(row)) == SHAPE.top_k for row in first.tolist())
    assert not torch.equal(first, second)
    torch.testing.assert_close(weights.sum(-1), torch.ones(20))


def test_a_row_holds_rates_of_the_median_and_shares_of_the_limits():
    case = bench.LayerCase(SHAPE, 32)
    engine = bench.build(case, "reference", FLOAT32, detect())
    (row,) = bench.measure([engine], 4, rounds=1, limits=Limits(1e9, 2e9, 3e9), patience=0)
    assert row.error < 1e-6
    assert row.p10 <= row.seconds <= row.p90 and row.samples >= 1
    assert row.flop_rate == pytest.approx(2 * 4 * 2 * 3 * 64 * 32 / row.seconds)
    assert row.peak_share == pytest.approx(row.flop_rate / 2e9)
    assert row.read_share == pytest.approx(row.stored_rate / 1e9)
    hit = row.int4_rate * row.seconds / (3 * 64 * 32 / 2)
    assert 2 <= hit <= 8
    assert row.stored_rate == pytest.approx(hit * case.stored_bytes_per_expert() / row.seconds)


def test_a_wrong_backend_shows_in_the_error(monkeypatch):
    case = bench.LayerCase(SHAPE, 32)
    engine = bench.build(case, "reference", FLOAT32, detect())
    right = engine.error()
    forward = type(engine.backend).experts_forward
    monkeypatch.setattr(type(engine.backend), "experts_forward", lambda self, *args: forward(self, *args) * 1.01)
    assert right < 1e-6 and engine.error() == pytest.approx(0.01, rel=1e-2)


def test_a_backend_that_cannot_run_the_case_is_refused():
    with pytest.raises(BackendError, match="w4a8"):
        bench.build(bench.LayerCase(SHAPE, 32), "reference", RunConfig(compute="w4a8"), detect())
