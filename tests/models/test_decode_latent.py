"""DeepSeek's decoding steps in one call: the bits of the fused modules, and what they notice."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

import int4moe_ipex
from int4moe_ipex.models import attention, decode, decode_plan, fused
from int4moe_ipex.models.cache import GrowingLayer, cache_keyword, growing_cache
from tests.models.decoding import both_ways, checkpoint, logits_of, module_by_module, one_more, tokens
from tests.models.test_decode_families import relative, unfuse
from tests.models.test_fused_latent import FAMILIES, SETTINGS

pytestmark = pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_the_modules(tmp_path, monkeypatch, steps, family, changes):
    model = int4moe_ipex.load(checkpoint(tmp_path, family, max_position_embeddings=400, **changes))
    ours = [logits_of(model, rows, prompt) for rows, prompt in ((1, 300), (3, 255), (32, 2))]
    assert steps == [1] * 6 + [3] * 6 + [32] * 6
    with module_by_module(model):
        theirs = [logits_of(model, rows, prompt) for rows, prompt in ((1, 300), (3, 255), (32, 2))]
    assert all(map(torch.equal, ours, theirs))
    monkeypatch.setattr(decode, "ALONE", 0)
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(logits_of(model, 3, 255), ours[1])
        finally:
            torch.set_num_threads(before)
    assert len(steps) == 30
    unfuse(model)
    assert relative(ours[1], logits_of(model, 3, 255)) < 5e-2


LEFT = {
    "other widths": {"kv_lora_rank": 16},
    "odd widths": {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8},
    "as many latent as turned": {"qk_rope_head_dim": 32},
    "a rotation that changes": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
}


@pytest.mark.parametrize("changes", LEFT.values(), ids=LEFT)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_goes_through_the_modules(tmp_path, steps, family, changes):
    model = int4moe_ipex.load(checkpoint(tmp_path, family, **changes))
    ours = logits_of(model, rows=2)
    assert not steps
    unfuse(model)
    assert relative(ours, logits_of(model, rows=2)) < 3e-2


def test_a_part_that_is_turned_goes_through_the_modules(tmp_path, steps):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = int4moe_ipex.load(checkpoint(tmp_path, "glm4_moe_lite", rope_parameters=rope))
    with pytest.raises(RuntimeError):  # transformers' own rotates all of it
        logits_of(model)
    assert not steps


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_halves_that_are_turned_go_through_the_modules(tmp_path, steps, family):
    model = int4moe_ipex.load(checkpoint(tmp_path, family))
    before = logits_of(model)
    model.config.rope_interleave = False
    ours = logits_of(model)
    assert len(steps) == 6 and not torch.equal(ours, before)
    unfuse(model)
    assert relative(ours, logits_of(model)) < 3e-2


def of_layer(change):
    """A change of the second layer, which has experts."""
    return lambda model: change(model.model.layers[1])


def of_attention(change):
    return of_layer(lambda layer: change(layer.self_attn))


def doubled(module):
    module.register_forward_hook(lambda module, args, out: 2 * out)


def dense(attn, name):
    old = getattr(attn, name)
    new = torch.nn.Linear(old.in_features, old.out_features, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    new.__class__ = fused.FusedLinear.over(torch.nn.Linear)
    setattr(attn, name, new)


def ones(attn):
    attn.q_b_proj.forward = lambda x: x.new_ones(2, 1, 192)


def expanding(attn):
    inner = attn.expand_kv
    attn.expand_kv = lambda latent, turned: inner(2 * latent, turned)


CHANGES = {  # whether a step still is one call
    "scaling": (of_attention(lambda a: setattr(a, "scaling", 0.5)), False),  # not that of the other layers
    "scaling of all": (lambda m: [setattr(x.self_attn, "scaling", 0.5) for x in m.model.layers], True),
    "a dense kv_b_proj": (of_attention(lambda a: dense(a, "kv_b_proj")), True),
    "a dense q_b_proj": (of_attention(lambda a: dense(a, "q_b_proj")), True),
    "another kv_b_proj": (
        lambda m: setattr(m.model.layers[1].self_attn, "kv_b_proj", m.model.layers[0].self_attn.kv_b_proj),
        True,
    ),
    "another pack": (
        lambda m: setattr(
            m.model.layers[1].self_attn.kv_b_proj, "packed", m.model.layers[0].self_attn.kv_b_proj.packed
        ),
        True,
    ),
    "a moved norm": (of_attention(lambda a: setattr(a.kv_a_layernorm.weight, "data", -a.kv_a_layernorm.weight)), True),
    "a norm of queries": (of_attention(lambda a: a.q_a_layernorm.weight.mul_(-2)), True),
    "eps": (of_attention(lambda a: setattr(a.kv_a_layernorm, "variance_epsilon", 0.5)), False),
    "a hook on kv_b_proj": (of_attention(lambda a: doubled(a.kv_b_proj)), False),
    "a hook on kv_a_proj": (of_attention(lambda a: doubled(a.kv_a_proj_with_mqa)), False),
    "a hook on a norm": (of_attention(lambda a: doubled(a.kv_a_layernorm)), False),
    "a forward of its own": (of_attention(ones), False),
    "an expansion of its own": (of_attention(expanding), False),
    "a factor": (of_layer(lambda x: setattr(x.mlp.gate, "routed_scaling_factor", 3.0)), True),
    "one group": (of_layer(lambda x: setattr(x.mlp.gate, "topk_group", 2)), True),
    "a moved router": (of_layer(lambda x: setattr(x.mlp.gate.weight, "data", -x.mlp.gate.weight)), True),
    "shared experts": (of_layer(lambda x: doubled(x.mlp.shared_experts)), False),
}


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("change, whole", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_changes_are_obeyed(tmp_path, monkeypatch, steps, family, change, whole, described):
    if not described:
        monkeypatch.setattr(decode_plan, "EXCHANGE", None)  # as torch before 2.10
    model = int4moe_ipex.load(checkpoint(tmp_path, family))
    before = logits_of(model, rows=2, prompt=1)
    with torch.no_grad():
        change(model)
    ours = logits_of(model, rows=2, prompt=1)
    assert steps == [2] * (12 if whole else 6)
    with module_by_module(model):
        assert torch.equal(logits_of(model, rows=2, prompt=1), ours)
    assert not torch.equal(ours, before)


def test_the_method_of_a_router_is_obeyed(tmp_path, steps):
    model = int4moe_ipex.load(checkpoint(tmp_path, "deepseek_v2"))
    before = logits_of(model, rows=7)
    model.model.layers[1].mlp.gate.topk_method = "greedy"
    ours = logits_of(model, rows=7)
    assert steps == [7] * 12 and not torch.equal(ours, before)
    unfuse(model)
    assert relative(ours, logits_of(model, rows=7)) < 3e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dense_weight_that_was_written_to_is_noticed(tmp_path, steps, family):
    model = int4moe_ipex.load(checkpoint(tmp_path, family))
    attn = model.model.layers[1].self_attn
    dense(attn, "kv_b_proj")
    seen = [one_more(model).logits]
    for change in (lambda w: w.mul_(-1.5), lambda w: setattr(w, "data", w.flip(0)), lambda w: w.requires_grad_(True)):
        with torch.no_grad():
            change(attn.kv_b_proj.weight)
        ours, theirs = both_ways(model, lambda: one_more(model).logits)
        assert torch.equal(ours, theirs)
        seen.append(ours)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert steps == [1] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_of_any_origin(tmp_path, monkeypatch, steps, family):
    from int4moe_ipex.models import cache as module

    monkeypatch.setattr(module, "FIRST", 4)
    model = int4moe_ipex.load(checkpoint(tmp_path, family))
    ours, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    want = logits_of(model, 2, steps=20, cache=ours)
    assert steps == [2] * 20 and all(type(layer) is GrowingLayer for layer in ours.layers)
    with module_by_module(model):
        assert torch.equal(logits_of(model, 2, steps=20, cache=other), want)
    for a, b in zip(ours.layers, other.layers):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    rest = tokens(2, 20).split(1, dim=1)[8:]
    for change in (
        lambda cache: None,
        lambda cache: cache.crop(-3),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: [setattr(x, "keys", x.keys.clone()) for x in cache.layers],
        lambda cache: [setattr(x, "values", 2 * x.values) for x in cache.layers],
    ):

        @torch.inference_mode()
        def run(change=change):
            cache = growing_cache(model)
            logits_of(model, 2, steps=8, cache=cache)
            change(cache)
            past = {cache_keyword(): cache, "use_cache": True}
            return torch.cat([model(t, **past).logits for t in rest], dim=1)

        steps.clear()
        ours, theirs = both_ways(model, run)
        assert torch.equal(ours, theirs) and steps == [2] * 20


def test_parts_of_a_step_are_timed(tmp_path, steps):
    model = int4moe_ipex.load(checkpoint(tmp_path, "deepseek_v3"))
    one_more(model)
    model.model._plan.decoder = model.model._plan.decoder.decoder  # not the spy
    with decode.timed(model) as seconds:
        one_more(model)
    assert set(seconds) == {"attention", "router", "experts"} and all(s > 0 for s in seconds.values())
