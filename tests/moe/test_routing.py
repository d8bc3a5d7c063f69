"""Grouping tokens by expert: idle experts, empty batches, sentinels, repeated ids, strides."""

import pytest
import torch

from int4moe_ipex.errors import RoutingError
from int4moe_ipex.moe import routing
from int4moe_ipex.moe.routing import group_by_expert, run_grouped


def scale_by_id(expert, rows):
    return rows * (expert + 1)


def test_groups_only_experts_with_work():
    ids = torch.tensor([[2, 0], [2, -1], [4, 2]])  # 4 experts: -1 and 4 are sentinels
    groups = {expert: slots.tolist() for expert, slots in group_by_expert(ids, 4)}
    assert groups == {0: [1], 2: [0, 2, 5]}


def test_weighted_sum_by_hand():
    x = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    ids = torch.tensor([[0, 1], [1, 1]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    y = run_grouped(x, ids, weights, 2, scale_by_id)
    assert y.tolist() == [[1.0, 2.0], [60.0, 120.0]]


@pytest.mark.parametrize("sentinel", [-1, 3])
def test_sentinels_contribute_nothing_even_with_nan_weight(sentinel):
    x = torch.ones(1, 4)
    y = run_grouped(x, torch.tensor([[1, sentinel]]), torch.tensor([[1.0, float("nan")]]), 3, scale_by_id)
    assert y.tolist() == [[2.0] * 4]


@pytest.mark.parametrize("bad", [-2, 4, 2**31])
def test_other_ids_are_an_error_and_do_not_wrap(bad):
    with pytest.raises(RoutingError, match=str(bad)):
        run_grouped(torch.ones(1, 4), torch.tensor([[0, bad]]), torch.ones(1, 2), 3, scale_by_id)


def test_empty_batch_keeps_shape_and_dtype():
    x = torch.ones(0, 4, dtype=torch.bfloat16)
    y = run_grouped(x, torch.zeros(0, 2, dtype=torch.int64), torch.ones(0, 2), 3, scale_by_id)
    assert y.shape == (0, 4) and y.dtype == torch.bfloat16


def test_chunks_change_nothing(monkeypatch):
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(37, 8, generator=gen)
    ids = torch.randint(-1, 5, (37, 3), generator=gen)
    weights = torch.rand(37, 3, generator=gen)
    whole = run_grouped(x, ids, weights, 4, scale_by_id)
    monkeypatch.setattr(routing, "CHUNK_TOKENS", 5)
    assert torch.equal(run_grouped(x, ids, weights, 4, scale_by_id), whole)


def test_dtypes_and_strides_are_bit_equal():
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=gen)
    wide = torch.randint(0, 4, (6, 6), generator=gen)
    weights = torch.rand(6, 3, generator=gen)
    ids = wide[:, ::2]
    plain = run_grouped(x.t().contiguous(), ids.contiguous(), weights, 4, scale_by_id)
    assert torch.equal(run_grouped(x.t(), ids, weights, 4, scale_by_id), plain)
    assert torch.equal(run_grouped(x.t(), ids.int(), weights, 4, scale_by_id), plain)


@pytest.mark.parametrize(
    ("x", "ids", "weights"),
    [
        (torch.ones(2, 3, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)),
        (torch.ones(2, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)),
        (torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 2)),
        (torch.ones(2, 4), torch.zeros(2, 1), torch.ones(2, 1)),
        (torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.int64)),
    ],
)
def test_wrong_shapes_and_dtypes(x, ids, weights):
    with pytest.raises(RoutingError):
        run_grouped(x, ids, weights, 2, scale_by_id)
