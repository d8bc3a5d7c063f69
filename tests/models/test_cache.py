"""The growing cache gives what transformers' own gives, through growth, cropping, reordering and reset."""

import pytest
import torch
from transformers import DynamicCache, Qwen3MoeConfig

import int4moe_ipex
from int4moe_ipex.models import cache as caches
from int4moe_ipex.models.cache import GrowingLayer, cache_keyword, growing_cache
from tests.real import EXAMPLE


class Model:
    config = Qwen3MoeConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def pair():
    return growing_cache(Model), DynamicCache(config=Model.config)


def feed(both, tokens: int, batch: int = 2):
    for layer in range(2):
        k, v = torch.randn(batch, 2, tokens, 8), torch.randn(batch, 2, tokens, 8)
        ours, stock = (c.update(k.clone(), v.clone(), layer) for c in both)
        for a, b in zip(ours, stock):
            assert torch.equal(a, b)


def test_growth(monkeypatch):
    monkeypatch.setattr(caches, "FIRST", 4)
    both = pair()
    for tokens in (3, 1, 1, 9, 1, 40, 1):
        feed(both, tokens)
    assert both[0].get_seq_length() == both[1].get_seq_length() == 56


def test_no_copy_for_a_token_that_fits():
    cache = growing_cache(Model)
    k = torch.randn(1, 2, 5, 8)
    first = cache.update(k, k, 0)[0].data_ptr()
    assert all(cache.update(k[:, :, :1], k[:, :, :1], 0)[0].data_ptr() == first for _ in range(20))


def test_crop_reorder_and_reset():
    both = pair()
    feed(both, 6)
    for c in both:
        c.crop(-2)
    feed(both, 3)
    for c in both:
        c.reorder_cache(torch.tensor([1, 0]))
    feed(both, 1)
    for c in both:
        c.batch_select_indices(torch.tensor([1]))
    feed(both, 2, batch=1)
    for c in both:
        c.reset()
    feed(both, 4)


def test_tokens_that_do_not_fit_are_treated_as_by_transformers():
    for heads, head_dim in ((1, 8), (2, 4)):
        both = pair()
        feed(both, 3)
        for cache in both:
            with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
                cache.update(torch.zeros(2, heads, 1, head_dim), torch.zeros(2, heads, 1, head_dim), 0)
    both = pair()
    feed(both, 3)
    wide = torch.randn(2, 2, 1, 8, dtype=torch.float64)
    ours, stock = (c.update(wide, wide, 0) for c in both)
    assert ours[0].dtype is torch.float64 and all(torch.equal(a, b) for a, b in zip(ours, stock))


def test_two_sequences_never_share_a_buffer():
    k = torch.randn(1, 2, 3, 8)
    one, two = growing_cache(Model), growing_cache(Model)
    one.update(k, k, 0)
    before = one.layers[0].keys.clone()
    two.update(k + 1, k, 0)
    assert torch.equal(one.layers[0].keys, before)


def test_layers_of_other_kinds_stay():
    class Sliding:
        config = Qwen3MoeConfig(num_hidden_layers=2, use_sliding_window=True, sliding_window=4, max_window_layers=0)

    kinds = {type(layer) for layer in growing_cache(Sliding).layers}
    stock = {type(layer) for layer in DynamicCache(config=Sliding.config).layers}
    assert kinds == {GrowingLayer if s.__name__ == "DynamicLayer" else s for s in stock}


def test_generate_with_either_cache():
    model = int4moe_ipex.load(EXAMPLE, backend="reference", dtype="float32")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    stock = model.generate(ids, max_new_tokens=8, do_sample=False)
    ours = model.generate(ids, max_new_tokens=8, do_sample=False, **{cache_keyword(): growing_cache(model)})
    assert torch.equal(stock, ours)
    beams = model.generate(ids, max_new_tokens=5, num_beams=3, do_sample=False)
    growing = {cache_keyword(): growing_cache(model)}
    assert torch.equal(beams, model.generate(ids, max_new_tokens=5, num_beams=3, do_sample=False, **growing))
