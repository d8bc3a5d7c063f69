"""What a plan of decoding in one call notices of its model, in the very next look, and what it holds on to."""

import gc
import sys
import weakref

import pytest
import torch

import int4moe_ipex
from int4moe_ipex.backends import native
from int4moe_ipex.models import attention, decode_plan
from int4moe_ipex.models.cache import cache_keyword, growing_cache
from int4moe_ipex.models.decode_plan import make_plan
from tests.models.decoding import both_ways, checkpoint, one_more

pytestmark = pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")


@pytest.fixture(params=["torch describes tensors", "torch describes none"])
def exchange(request, monkeypatch):
    """Both ways to see a weight: torch before 2.10 has the second alone."""
    if request.param == "torch describes none":
        monkeypatch.setattr(decode_plan, "EXCHANGE", None)
    elif decode_plan.EXCHANGE is None:
        pytest.skip("this torch describes none")


def linears(model):
    """Two square dense linears in the first layer."""
    for name in ("q_proj", "o_proj"):
        old = getattr(model.model.layers[0].self_attn, name)
        new = torch.nn.Linear(old.in_features, old.out_features, bias=False, dtype=torch.bfloat16)
        setattr(model.model.layers[0].self_attn, name, new.requires_grad_(False))
    return model


@pytest.fixture
def model(tmp_path):
    return linears(int4moe_ipex.load(checkpoint(tmp_path, "qwen3_moe")))


def of_layer(change):
    """A change of the second layer."""
    return lambda model: change(model.model.layers[1])


def of_data(change):
    """A change of what the first layer's q_proj holds, which stays where it is."""

    def apply(model):
        weight = model.model.layers[0].self_attn.q_proj.weight
        assert weight.shape[0] == weight.shape[1]
        weight.data = change(weight.data)

    return apply


def replace_pack(layer):
    old = layer.mlp.experts.packs[0]
    new = object.__new__(type(old))
    vars(new).update(vars(old))
    layer.mlp.experts.packs[0] = new


CHANGES = {
    "a module": of_layer(lambda m: setattr(m.self_attn, "q_norm", type(m.self_attn.k_norm)(16))),
    "no module": of_layer(lambda m: delattr(m.mlp, "gate")),
    "a layer": lambda m: m.model.layers.__setitem__(1, m.model.layers[0]),
    "more layers": lambda m: m.model.layers.append(m.model.layers[0]),
    "fewer layers": lambda m: m.model.layers.__delitem__(1),
    "a class": of_layer(lambda m: setattr(m.mlp, "__class__", type("Other", (type(m.mlp),), {}))),
    "another pack": of_layer(lambda m: setattr(m.self_attn.v_proj, "packed", object())),
    "another pack of experts": of_layer(lambda m: setattr(m.mlp.experts.packs[0], "packed", object())),
    "replaced packs": of_layer(replace_pack),
    "more packs": of_layer(lambda m: m.mlp.experts.packs.append(m.mlp.experts.packs[0])),
    "a part of the experts": of_layer(lambda m: setattr(m.mlp.experts.packs[0], "local", torch.zeros(6))),
    "experts of linears": of_layer(lambda m: m.mlp.experts.composed.add_module("0", torch.nn.Identity())),
    "moved": lambda m: setattr(m.model.layers[1].mlp.gate.weight, "data", m.model.layers[1].mlp.gate.weight.clone()),
    "another parameter": of_layer(
        lambda m: setattr(m.mlp.gate, "weight", torch.nn.Parameter(m.mlp.gate.weight.clone(), requires_grad=False))
    ),
    "no parameter": of_layer(lambda m: m.post_attention_layernorm._parameters.clear()),
    "a bias": lambda m: setattr(m.model.layers[0].self_attn.o_proj, "bias", torch.nn.Parameter(torch.zeros(64))),
    "strides": of_data(lambda data: data.t()),
    "shape": of_data(lambda data: data[:8]),
    "dimensions": of_data(lambda data: data.view(-1)),
    "more dimensions": of_data(lambda data: data[None]),
    "dtype": of_data(lambda data: data.view(torch.float16)),
    "a gradient": of_layer(lambda m: m.self_attn.k_norm.weight.requires_grad_(True)),
    "dropout": of_layer(lambda m: m.self_attn.train()),
    "jitter": of_layer(lambda m: setattr(m.mlp, "training", True)),
    "a window": of_layer(lambda m: setattr(m.self_attn, "sliding_window", 8)),
    "a window of all": lambda m: setattr(m.config, "sliding_window", 8),
    "scaling": of_layer(lambda m: setattr(m.self_attn, "scaling", 0.5)),
    "top_k": of_layer(lambda m: setattr(m.mlp.gate, "top_k", torch.tensor(1))),
    "layer_idx": of_layer(lambda m: setattr(m.self_attn, "layer_idx", 0)),
    "eps": of_layer(lambda m: setattr(m.self_attn.k_norm, "variance_epsilon", 0.5)),
    "no eps": of_layer(lambda m: delattr(m.input_layernorm, "variance_epsilon")),
    "fewer layers used": lambda m: setattr(m.config, "num_hidden_layers", 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_noticed(exchange, model, change):
    plan = make_plan(model.model)
    assert plan.decoder is not None and plan.holds() and not plan.watched
    with torch.no_grad():
        change(model)
    assert not plan.holds()


def another_row(model):
    embedding = model.model.embed_tokens
    model.model.embed_tokens = torch.nn.Embedding.from_pretrained(embedding.weight.flip(0))


END_CHANGES = {
    "another embedding": another_row,
    "a moved embedding": lambda m: setattr(m.model.embed_tokens.weight, "data", m.model.embed_tokens.weight.flip(0)),
    "a shorter embedding": lambda m: setattr(m.model.embed_tokens.weight, "data", m.model.embed_tokens.weight[:60]),
    "a largest norm": lambda m: setattr(m.model.embed_tokens, "max_norm", 0.01),
    "another norm": lambda m: setattr(m.model, "norm", torch.nn.RMSNorm(64, 0.5).bfloat16().requires_grad_(False)),
    "no norm": lambda m: setattr(m.model, "norm", torch.nn.Identity()),
    "a moved norm": lambda m: setattr(m.model.norm.weight, "data", 2 * m.model.norm.weight),
    "a class": lambda m: setattr(m.model.norm, "__class__", torch.nn.Identity),
    "eps": lambda m: setattr(m.model.norm, "variance_epsilon", 0.5),
    "a gradient": lambda m: m.model.embed_tokens.weight.requires_grad_(True),
}


@pytest.mark.parametrize("name", END_CHANGES)
def test_changes_before_and_after_the_layers_are_noticed(exchange, steps, model, name):
    plan = make_plan(model.model)
    assert plan.holds() and plan.whole
    before = one_more(model).logits
    with torch.no_grad():
        END_CHANGES[name](model)
    assert not plan.holds()
    ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs) and len(steps) == 2
    assert torch.equal(ours, before) == (name in ("a gradient", "a shorter embedding"))


def doubled(module):
    inner = module.forward
    module.forward = lambda x: 2 * inner(x)


END_WATCHES = {
    "an embedding's hook": lambda m: m.embed_tokens.register_forward_hook(lambda module, args, out: 2 * out),
    "an embedding's hook before": lambda m: m.embed_tokens.register_forward_pre_hook(lambda module, args: args[0] // 2),
    "an embedding's forward": lambda m: doubled(m.embed_tokens),
    "a norm's hook": lambda m: m.norm.register_forward_hook(lambda module, args, out: 2 * out),
    "a norm's hook before": lambda m: m.norm.register_forward_pre_hook(lambda module, args: 0 * args[0]),
    "a norm's forward": lambda m: doubled(m.norm),
}


@pytest.mark.parametrize("watch", END_WATCHES.values(), ids=END_WATCHES)
def test_what_watches_before_and_after_the_layers_is_called(steps, model, watch):
    before = one_more(model).logits
    plan = model.model._plan
    watch(model.model)
    ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs) and not torch.equal(ours, before)
    assert len(steps) == 2 and model.model._plan is plan and not plan.whole


def test_an_embedding_that_was_patched_is_obeyed(steps, model, monkeypatch):
    before = one_more(model).logits
    inner = torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, ids: 2 * inner(self, ids))
    ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs) and not torch.equal(ours, before)
    monkeypatch.undo()
    assert torch.equal(one_more(model).logits, before) and model.model._plan.whole


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.float32])
@pytest.mark.parametrize("token", [0, 63, 64, -1])
def test_ids_that_are_none_of_the_embedding_are_errors_as_ever(model, token, dtype):
    def run():
        cache = growing_cache(model)
        with torch.no_grad():
            model(torch.tensor([[5, 6, 7]]), **{cache_keyword(): cache})
            try:
                return model(torch.tensor([[token]], dtype=dtype), **{cache_keyword(): cache}).logits, None
            except (IndexError, RuntimeError) as error:
                return None, str(error)

    (ours, mine), (theirs, other) = both_ways(model, run)
    assert mine == other and (ours is None or torch.equal(ours, theirs))
    assert (mine is None) == (token in (0, 63) and dtype in (torch.int32, torch.int64))


def test_a_patched_class_is_noticed(exchange, model, monkeypatch):
    plan = make_plan(model.model)
    cls = type(model.model.layers[0].mlp.gate)
    monkeypatch.setattr(cls, "forward", lambda self, x: None)
    assert not plan.holds()
    monkeypatch.undo()
    assert plan.holds()


def test_equal_values_are_no_change(exchange, model):
    plan = make_plan(model.model)
    router, norm = model.model.layers[1].mlp.gate, model.model.layers[1].input_layernorm
    router.top_k, norm.variance_epsilon = float(router.top_k), torch.tensor(norm.variance_epsilon, dtype=torch.float64)
    model.model.layers[0].self_attn.q_proj.weight.neg_()  # in place
    assert plan.holds() and not plan.watched


WATCHES = {
    "a hook": of_layer(lambda m: m.mlp.experts.register_forward_hook(print)),
    "a hook before": of_layer(lambda m: m.self_attn.q_norm.register_forward_pre_hook(print)),
    "a hook of the layers": lambda m: m.model.rotary_emb.register_forward_hook(print),
    "other hooks": of_layer(lambda m: setattr(m.mlp, "_forward_hooks", {0: print})),
    "a hook of all": lambda m: torch.nn.modules.module.register_module_forward_hook(print),
    "a hook of all before": lambda m: torch.nn.modules.module.register_module_forward_pre_hook(print),
}


@pytest.mark.parametrize("watch", WATCHES.values(), ids=WATCHES)
def test_hooks_are_noticed(model, watch):
    plan = make_plan(model.model)
    assert plan.holds() and not plan.watched
    handle = watch(model)
    try:
        assert plan.holds() and plan.watched and make_plan(model.model).watched
    finally:
        if handle is not None:
            handle.remove()
    if handle is not None:
        assert plan.holds() and not plan.watched


def test_a_forward_of_its_own_is_noticed(model):
    plan = make_plan(model.model)
    layer = model.model.layers[1]
    layer.forward = layer.forward
    assert plan.holds() and plan.watched
    del layer.forward
    assert plan.holds() and not plan.watched


def test_hooks_that_transformers_leaves_in_place_do_not_count(model):
    assert one_more(model, output_hidden_states=True).hidden_states
    assert any(module._forward_hooks for module in model.model.modules())
    plan = make_plan(model.model)
    assert plan.holds() and not plan.watched
    handle = model.model.layers[0].register_forward_hook(print)
    assert plan.holds() and plan.watched
    handle.remove()


def test_changed_pieces_of_weights_are_obeyed(exchange, model):
    before = one_more(model).logits
    weight = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight.data = weight.data.t()
        ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs) and not torch.equal(ours, before)


def test_errors_of_what_is_compared_are_raised(model):
    class Odd:
        def __ne__(self, other):
            raise LookupError("odd")

    plan = make_plan(model.model)
    model.model.layers[1].mlp.gate.top_k = Odd()
    with pytest.raises(LookupError, match="odd"):
        plan.holds()


def counts(model, *others):
    held = [None, decode_plan._watched, model.config, vars(torch.nn.modules.module), *others]
    for module in model.modules():
        held += [module, type(module), vars(module), module._modules, module._parameters, module._forward_hooks]
        held += list(vars(module)) + list(module._modules) + list(module._parameters.values())
    held += [model.model.layers[1].mlp.experts.packs[0], type(model.model.layers[0]).forward]
    return {id(thing): sys.getrefcount(thing) for thing in held}


def test_plans_hold_on_to_nothing_once_they_are_dropped(exchange, model):
    layer, equal, other = model.model.layers[1], 2.0, 3.0
    hooks = layer._forward_hooks

    def use():
        plan = make_plan(model.model)
        for top_k, holds in ((2, True), (equal, True), (other, False), (2, True)):
            layer.mlp.gate.top_k = top_k
            assert plan.holds() == holds
        layer.forward = layer.forward
        assert plan.holds() and plan.watched
        del layer.forward
        handle = layer.register_forward_hook(print)
        assert plan.holds() and plan.watched
        handle.remove()
        assert plan.holds() and not plan.watched

    use()
    gc.collect()
    before = counts(model, equal, other, hooks)
    for _ in range(10):
        use()
    gc.collect()
    after = counts(model, equal, other, hooks)
    assert len(before) == len(after) > 100
    # None is everywhere, and comes and goes with whatever else runs.
    grown = {thing: after[thing] - count for thing, count in before.items() if after[thing] - count > 5}
    assert set(grown) <= {id(None)} and grown.get(id(None), 0) < 100


def test_a_model_with_a_plan_is_collected(exchange, tmp_path):
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen3_moe"))
    one_more(model)
    assert model.model._plan.decoder is not None
    model.model.layers[0].back = [model]
    gone = [weakref.ref(thing) for thing in (model, model.model.layers[0].mlp.gate.weight)]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_guard_of_nothing_and_wrong_arguments():
    guard = native._native.Guard(None, None)
    assert guard.look() == decode_plan.FITS and not guard.sees_weights()
    with pytest.raises(KeyError, match="absent"):
        guard.hooks({}, "absent")
    with pytest.raises(ValueError, match="PyCapsule"):
        native._native.Guard(None, 3)
    with pytest.raises(ValueError, match="tensors"):
        guard.weight({"w": torch.zeros(1)}, "w", 0, 0)
    if decode_plan.EXCHANGE is not None:
        guard = native._native.Guard(None, decode_plan.EXCHANGE)
        with pytest.raises(ValueError, match="dimensions"):
            guard.weight({"w": torch.zeros(1, 1, 1)}, "w", 0, 0)
