"""What a decoding step in one call has to leave to the modules, or has to notice."""

import copy
import pickle

import pytest
import torch
from transformers.cache_utils import DynamicCache

import int4moe_ipex
from int4moe_ipex.models import attention
from int4moe_ipex.models.cache import cache_keyword, growing_cache
from tests.models.decoding import both_ways, logits_of, module_by_module, one_more, tokens
from tests.real import EXAMPLE

pytestmark = pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")


def test_a_mask_that_masks_goes_through_the_modules(steps):
    model = int4moe_ipex.load(EXAMPLE)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    past = {cache_keyword(): growing_cache(model), "use_cache": True}
    with torch.inference_mode():
        model(tokens(2, 5), attention_mask=mask[:, :5], **past)
        model(tokens(2, 1), attention_mask=mask, **past)
    assert not steps


def test_wishes_for_more_than_logits_are_met(steps):
    model = int4moe_ipex.load(EXAMPLE)
    past = {cache_keyword(): growing_cache(model), "use_cache": True}
    with torch.inference_mode():
        model(tokens(1, 5), **past)
        out = model(tokens(1, 1), output_hidden_states=True, output_router_logits=True, **past)
        assert len(out.hidden_states) == model.config.num_hidden_layers + 1 and out.router_logits
        assert not steps
        model(tokens(1, 1), **past)
    assert steps == [1]


def test_hooks_see_their_modules(steps):
    model = int4moe_ipex.load(EXAMPLE)
    logits_of(model)
    called = []
    handle = model.model.layers[1].mlp.experts.register_forward_hook(lambda *args: called.append(1))
    logits_of(model)
    handle.remove()
    assert len(called) == 7 and len(steps) == 6


def test_a_replaced_module_is_used(steps):
    model = int4moe_ipex.load(EXAMPLE)
    before = logits_of(model)

    class Doubled(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    attn = model.model.layers[0].self_attn
    attn.o_proj = Doubled(attn.o_proj)
    after = logits_of(model)
    assert len(steps) == 6 and not torch.equal(before, after)
    attn.o_proj = attn.o_proj.inner
    assert torch.equal(logits_of(model), before) and len(steps) == 12


def test_an_overridden_forward_is_used(steps):
    model = int4moe_ipex.load(EXAMPLE)
    before = logits_of(model)
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    assert not torch.equal(logits_of(model), before) and len(steps) == 6


def test_changed_and_moved_weights_are_used(steps):
    model = int4moe_ipex.load(EXAMPLE)
    before = logits_of(model)
    gate = model.model.layers[0].mlp.gate
    gate.weight.data = -gate.weight.data
    ours = logits_of(model)
    assert len(steps) == 12 and not torch.equal(ours, before)
    with module_by_module(model):
        assert torch.equal(logits_of(model), ours)


def test_a_cache_with_an_update_of_its_own_is_asked():
    class Doubling(DynamicCache):
        def update(self, keys, values, *args, **kwargs):
            return super().update(keys, values * 2, *args, **kwargs)

    model = int4moe_ipex.load(EXAMPLE)
    ours, theirs = both_ways(model, lambda: one_more(model, Doubling(config=model.config)).logits)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "heads, head_dim, dtype", [(1, 64, torch.bfloat16), (2, 32, torch.bfloat16), (2, 64, torch.float32)]
)
def test_a_cache_of_another_model_is_refused_by_the_modules(steps, heads, head_dim, dtype):
    model = int4moe_ipex.load(EXAMPLE)
    cache = DynamicCache()
    for layer in range(model.config.num_hidden_layers):
        keys = torch.zeros(1, heads, 9, head_dim, dtype=dtype)
        cache.update(keys, keys, layer)
    with pytest.raises(RuntimeError), torch.no_grad():
        model(tokens(1, 1), cache=cache)
        assert dtype is not torch.float32  # torch may take another dtype
        raise AssertionError
    assert not steps


@pytest.mark.parametrize("before", [True, False])
def test_tokens_dropped_from_a_cache_stay_dropped(before):
    model = int4moe_ipex.load(EXAMPLE)

    @torch.no_grad()
    def run():
        cache = DynamicCache(config=model.config)
        model(tokens(1, 6), cache=cache)
        if not before:
            model(tokens(1, 1), cache=cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]
        return torch.cat([model(tokens(1, 1), cache=cache).logits for _ in range(3)])

    ours, theirs = both_ways(model, run)
    assert torch.equal(ours, theirs)


def test_tensors_taken_from_a_cache_keep_what_they_hold(steps):
    model = int4moe_ipex.load(EXAMPLE)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(tokens(1, 4), cache=cache)
        for token in (1, 2, 3):
            model(torch.tensor([[token]]), cache=cache)
        kept = [(layer.keys, layer.values) for layer in cache.layers]
        want = model(torch.tensor([[9]]), cache=copy.deepcopy(cache)).logits
        twin = copy.copy(cache)
        twin.layers = [copy.copy(layer) for layer in cache.layers]
        model(torch.tensor([[7]]), cache=twin)
        cache.crop(-3)
        for token in (4, 5, 6):
            model(torch.tensor([[token]]), cache=cache)
        for layer, (keys, values) in zip(cache.layers, kept):
            layer.keys, layer.values = keys, values
        assert torch.equal(model(torch.tensor([[9]]), cache=cache).logits, want)
    assert len(steps) == 9


def test_pickled_caches_hold_their_tokens_alone():
    model = int4moe_ipex.load(EXAMPLE)
    cache = growing_cache(model)
    logits_of(model, cache=cache)
    data = pickle.dumps(cache)
    assert len(data) < 3 * sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    again = pickle.loads(data)
    again.layers[0].values.zero_()
    with torch.inference_mode():
        model(tokens(1, 1), **{cache_keyword(): again})
    assert not again.layers[0].values[:, :, :11].any() and cache.layers[0].values[:, :, :11].any()


def test_keys_and_values_of_different_lengths_are_an_error():
    model = int4moe_ipex.load(EXAMPLE)
    cache = growing_cache(model)
    logits_of(model, cache=cache)
    cache.layers[1].values = cache.layers[1].values[:, :, :2]
    with pytest.raises(ValueError, match=r"keys .* values"), torch.inference_mode():
        model(tokens(1, 1), **{cache_keyword(): cache})


def test_a_turn_in_inference_mode_and_one_without(steps):
    model = int4moe_ipex.load(EXAMPLE)

    def run():
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(tokens(1, 5), cache=cache)
            model(tokens(1, 1), cache=cache)
        with torch.no_grad():
            model(tokens(1, 3), cache=cache)
            return model(tokens(1, 1), cache=cache).logits

    ours, theirs = both_ways(model, run)
    assert torch.equal(ours, theirs) and len(steps) == 2


@pytest.mark.parametrize("length", [0, 1, 6, 7, 20])
def test_masks_of_ones_of_any_length(length):
    model = int4moe_ipex.load(EXAMPLE)

    def run():
        try:
            return one_more(model, attention_mask=torch.ones(1, length, dtype=torch.int64)).logits
        except (RuntimeError, IndexError) as error:
            return torch.tensor([len(str(error))])

    ours, theirs = both_ways(model, run)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.model.layers[0].mlp.gate, "top_k", 1),
        lambda m: setattr(m.model.layers[0].mlp.gate, "norm_topk_prob", False),
        lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.5),
        lambda m: setattr(m.model.layers[1].input_layernorm, "variance_epsilon", 0.5),
        lambda m: setattr(m.model.layers[0].self_attn, "layer_idx", 1),
        lambda m: setattr(m.model.rotary_emb, "attention_scaling", 2.0),
        lambda m: m.model.rotary_emb.inv_freq.mul_(2),
        lambda m: m.model.layers.append(m.model.layers[0]),
        lambda m: setattr(m.config, "num_hidden_layers", 2),
    ],
    ids=[
        "top_k",
        "norm_topk_prob",
        "scaling",
        "eps",
        "layer_idx",
        "attention_scaling",
        "inv_freq",
        "more",
        "fewer",
    ],
)
def test_changed_settings_are_obeyed(change):
    model = int4moe_ipex.load(EXAMPLE)
    before = one_more(model).logits
    with torch.no_grad():
        change(model)
    ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, before) or len(model.model.layers) > model.config.num_hidden_layers


def test_another_attention_is_taken(steps):
    model = int4moe_ipex.load(EXAMPLE)
    one_more(model)
    assert steps == [1]
    model.set_attn_implementation("sdpa")
    ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs) and steps == [1]


def test_layers_that_changed_places():
    model = int4moe_ipex.load(EXAMPLE)
    one_more(model)
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs)


def test_a_class_that_was_patched_is_obeyed(monkeypatch):
    from int4moe_ipex.moe.experts import Int4Experts

    model = int4moe_ipex.load(EXAMPLE)
    before = one_more(model).logits
    inner = Int4Experts.forward
    monkeypatch.setattr(Int4Experts, "forward", lambda self, *args: 0 * inner(self, *args))
    ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs) and not torch.equal(ours, before)


def test_subclasses_compute_what_they_say(steps):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = int4moe_ipex.load(EXAMPLE)
    attn = model.model.layers[0].self_attn
    old = attn.o_proj
    attn.o_proj = Doubled(old.in_features, old.out_features, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs) and not steps
    attn.o_proj = old
    cls = type(model.model.layers[0])
    model.model.layers[0].__class__ = type(cls.__name__, (cls,), {"forward": lambda self, x, **kwargs: 2 * x})
    ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs) and not steps


def test_weights_that_are_trained_go_through_the_modules(steps):
    model = int4moe_ipex.load(EXAMPLE)
    model.model.layers[1].input_layernorm.weight.requires_grad_(True)
    cache = growing_cache(model)
    for _ in range(3):
        model(tokens(1, 1), cache=cache)
    assert not steps


def test_what_a_hook_got_from_the_embedding_stays(steps):
    model = int4moe_ipex.load(EXAMPLE)
    seen = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: seen.append(out))
    one_more(model)
    token = int(tokens(1, 1))
    assert steps == [1] and torch.equal(seen[-1][0, 0], model.model.embed_tokens.weight[token])


def test_other_returns():
    model = int4moe_ipex.load(EXAMPLE)
    assert one_more(model, output_router_logits=True).router_logits
    with torch.no_grad():
        cache = growing_cache(model)
        model(tokens(1, 4), cache=cache)
        assert isinstance(model.model(tokens(1, 1), cache=cache, return_dict=False), tuple)


def test_positions_beyond_what_the_model_was_made_for(steps):
    model = int4moe_ipex.load(EXAMPLE)
    one_more(model, position_ids=torch.tensor([[1_000_000]]))
    assert not steps and model.model.rotary_emb._tables[1].shape[0] <= model.config.max_position_embeddings


def test_no_positions_are_an_error():
    model = int4moe_ipex.load(EXAMPLE)
    with pytest.raises(RuntimeError), torch.no_grad():
        model(tokens(1, 8), position_ids=torch.empty(1, 0, dtype=torch.int64))


def test_a_model_that_went_to_float32_and_came_back(steps):
    model = int4moe_ipex.load(EXAMPLE)
    model.float()
    logits_of(model)
    model.bfloat16()
    logits_of(model, steps=80)
    assert len(steps) > 10
