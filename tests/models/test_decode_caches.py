"""What a decoding step in one call notices of its cache: every change is obeyed in the very next step."""

import gc
import sys

import pytest
import torch
from transformers.cache_utils import DynamicLayer

import int4moe_ipex
from int4moe_ipex.backends import native
from int4moe_ipex.models import attention
from int4moe_ipex.models import cache as caches
from int4moe_ipex.models.cache import GrowingLayer, cache_keyword, growing_cache, kind_of
from tests.models.decoding import both_ways, logits_of, tokens
from tests.real import EXAMPLE

pytestmark = pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")


class Doubling(GrowingLayer):
    def update(self, keys, values, *args, **kwargs):
        return super().update(keys, values * 2, *args, **kwargs)


def doubled(owner):
    """Puts an `update` of its own on a cache or a layer."""
    inner = owner.update
    owner.update = lambda keys, values, *args, **kwargs: inner(keys, values * 2, *args, **kwargs)


def replace_class(cache):
    cache.layers[1].__class__ = Doubling


def replace_layer(cache):
    old, new = cache.layers[1], DynamicLayer()
    new.update(2 * old.keys, old.values)
    cache.layers[1] = new


def replace_layers(cache):
    cache.layers = list(reversed(cache.layers))


def shorten(cache):
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]


CHANGES = {
    "an update on a layer": (lambda cache: doubled(cache.layers[1]), 0),
    "an update on the cache": (doubled, 0),
    "another class": (replace_class, 0),
    "a tuple": (lambda cache: setattr(cache, "layers", tuple(cache.layers)), 0),
    "a layer twice": (lambda cache: cache.layers.__setitem__(1, cache.layers[0]), 0),
    "offloading": (lambda cache: setattr(cache, "offloading", True), 0),
    "one layer of another length": (lambda cache: cache.layers[1].crop(-2), 0),
    "a layer of transformers' own": (replace_layer, 3),
    "another list": (replace_layers, 3),
    "fewer tokens": (lambda cache: cache.crop(-2), 3),
    "other tokens": (shorten, 3),
    "more sequences": (lambda cache: cache.batch_repeat_interleave(2), 3),
    "nothing": (lambda cache: None, 3),
}


@pytest.mark.parametrize("change, in_one_call", CHANGES.values(), ids=CHANGES)
def test_changes_are_obeyed(steps, change, in_one_call):
    model = int4moe_ipex.load(EXAMPLE)

    @torch.inference_mode()
    def run():
        cache = growing_cache(model)
        logits_of(model, cache=cache, steps=2)
        before = len(steps)
        change(cache)
        try:
            rows = cache.layers[0].keys.shape[0]
            past = {cache_keyword(): cache, "use_cache": True}
            return torch.cat([model(t, **past).logits for t in tokens(rows, 3).split(1, dim=1)]), len(steps) - before
        except (RuntimeError, AssertionError) as error:  # torch without CUDA offloads nothing
            return torch.tensor([len(str(error))]), len(steps) - before

    (ours, in_one), (theirs, none) = both_ways(model, run)
    assert torch.equal(ours, theirs) and (in_one, none) == (in_one_call, 0)


def test_more_layers_or_fewer_go_through_the_modules(steps):
    model = int4moe_ipex.load(EXAMPLE)
    for change in (lambda layers: layers.pop(), lambda layers: layers.append(GrowingLayer())):
        cache = growing_cache(model)
        logits_of(model, cache=cache, steps=1)
        before = len(steps)
        change(cache.layers)
        try:
            with torch.no_grad():
                model(tokens(1, 1), **{cache_keyword(): cache})
        except IndexError:
            assert len(cache.layers) < model.config.num_hidden_layers
        assert len(steps) == before


def test_keys_and_values_are_seen_as_they_are_after_every_step(steps):
    model = int4moe_ipex.load(EXAMPLE)
    cache = growing_cache(model)
    past = {cache_keyword(): cache, "use_cache": True}
    with torch.inference_mode():
        model(tokens(1, 4), **past)
        seen = []
        for count, token in enumerate(tokens(1, 6).split(1, dim=1)):
            model(token, **past)
            layer = cache.layers[1]
            assert layer.length == layer.get_seq_length() == 5 + count
            assert layer.keys is layer.keys and layer.keys.shape[2] == layer.values.shape[2] == 5 + count
            seen.append((layer.keys, layer.keys.clone()))
    assert len(steps) == 6 and all(torch.equal(*pair) for pair in seen)


def layer_of(length: int, rows: int = 1, heads: int = 2, head_dim: int = 8, dtype=torch.bfloat16) -> GrowingLayer:
    layer = GrowingLayer()
    keys = torch.zeros(rows, heads, length, head_dim, dtype=dtype)
    layer.update(keys, keys)
    return layer


KIND = kind_of((torch.bfloat16, 2, 8), (torch.bfloat16, 2, 8))


def found(*layers, rows: int = 1, kind: bytes = KIND, inference: bool = False):
    return native._native.DecodeCaches(len(layers), rows, kind, GrowingLayer, inference), list(layers)


def test_what_the_core_takes(monkeypatch):
    monkeypatch.setattr(caches, "FIRST", 4)
    for layers in ([layer_of(3), layer_of(3)], [layer_of(0), layer_of(0)], [layer_of(9, rows=2), layer_of(9, rows=2)]):
        rows = layers[0].keys.shape[0]
        ours, layers = found(*layers, rows=rows)
        length = layers[0].length
        assert ours.add(layers) and ours.complete() and ours.lengths == [length] * rows
        ours.extend()
        assert [layer.length for layer in layers] == [length + 1] * 2 and layers[0].keys.shape[2] == length + 1


def uninitialised():
    layer = layer_of(3)
    layer.is_initialized = False
    return layer


def with_set_keys():
    layer = layer_of(3)
    layer.keys = layer.keys.clone()
    return layer


def short():
    layer = layer_of(3)
    layer.place = layer.place[:-8]
    return layer


@torch.inference_mode()
def made_in_inference_mode():
    return layer_of(3)


UNFIT = {
    "other heads": lambda: layer_of(3, heads=1),
    "other head_dim": lambda: layer_of(3, head_dim=16),
    "other dtype": lambda: layer_of(3, dtype=torch.float16),
    "a dtype that the core does not know": lambda: layer_of(3, dtype=torch.float64),
    "other length": lambda: layer_of(4),
    "more rows": lambda: layer_of(3, rows=2),
    "new": GrowingLayer,
    "uninitialised": uninitialised,
    "set keys": with_set_keys,
    "short": short,
    "in inference mode": made_in_inference_mode,
    "no layer": lambda: None,
}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("make", UNFIT.values(), ids=UNFIT)
def test_what_the_core_refuses(make, at):
    layers = [layer_of(3), layer_of(3)]
    ours, _ = found(*layers)
    layers[at] = make()
    assert not ours.add(layers) and ours.lengths == [] and not ours.complete()
    assert ours.add([layer_of(3), layer_of(3)]) and ours.complete()  # nothing of the first is left


def test_a_full_layer_is_refused_until_there_is_room(monkeypatch):
    monkeypatch.setattr(caches, "FIRST", 4)
    layer = layer_of(1)
    for length in range(1, layer.room):
        ours, layers = found(layer)
        assert ours.add(layers) and ours.lengths == [length]
        ours.extend()
    ours, layers = found(layer)
    assert layer.length == layer.room and not ours.add(layers)
    layer.reserve(layer.length + 1)
    assert ours.add(layers)


def test_layers_made_in_inference_mode_are_taken_there():
    assert found(made_in_inference_mode(), inference=True)[0].add([made_in_inference_mode()])


def test_a_layer_twice_is_not_complete():
    layer = layer_of(3)
    ours, layers = found(layer, layer)
    assert ours.add(layers) and not ours.complete()
    ours, layers = found(layer, rows=2)
    assert ours.add(layers) and not ours.complete() and ours.add(layers) and not ours.complete()
    assert not ours.add([layer_of(3)])  # as many as there are rows


def test_a_cache_that_changes_meanwhile_is_an_error():
    ours, layers = found(layer_of(3), layer_of(3))
    assert ours.add(layers)
    layers[1].keys = layers[1].keys.clone()
    with pytest.raises(RuntimeError, match="changed"):
        ours.extend()


def test_steps_hold_on_to_nothing():
    layers = [layer_of(3), layer_of(3)]
    full = [layer_of(3), layer_of(4)]

    def use():
        ours, _ = found(*layers)
        assert ours.add(layers) and ours.complete()
        ours.extend()
        ours, _ = found(*full)
        assert not ours.add(full)

    def counts():
        held = [layers, full, GrowingLayer, KIND, *layers, *full]
        held += [vars(layer) for layer in held[4:]] + [layer.place for layer in held[4:]]
        held += ["length", "place", "update", "is_initialized"]
        return [sys.getrefcount(thing) for thing in held]

    use()
    gc.collect()
    before = counts()
    for _ in range(50):
        use()
    gc.collect()
    assert max(after - count for after, count in zip(counts(), before)) < 5
