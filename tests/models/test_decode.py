"""A decoding step in one call against the same step module by module: equal bits."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicCache

import int4moe_ipex
from int4moe_ipex.backends import native
from int4moe_ipex.models import attention, decode
from int4moe_ipex.models.cache import GrowingLayer, cache_keyword, growing_cache
from tests.models.decoding import checkpoint, logits_of, module_by_module, tokens
from tests.real import EXAMPLE, checkpoints

pytestmark = pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")


@pytest.mark.parametrize("compute", ["w4a16", "w4a8"])
@pytest.mark.parametrize("rows", [1, 2, 7, 32])
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"]
)
def test_bits_of_the_modules(tmp_path, steps, family, rows, compute):
    model = int4moe_ipex.load(checkpoint(tmp_path, family), compute=compute)
    ours = logits_of(model, rows)
    assert steps == [rows] * 6
    with module_by_module(model):
        assert torch.equal(logits_of(model, rows), ours)
    assert len(steps) == 6


INT4 = [path for path in checkpoints() if "quantization_config" in (path / "config.json").read_text()]


@pytest.mark.parametrize("path", INT4, ids=lambda p: p.name)
def test_real_checkpoints(steps, path):
    """Act-order, asymmetric zeros, groups of 32, and what the quantizers left dense."""
    model = int4moe_ipex.load(path)
    ours = logits_of(model, steps=12)
    assert len(steps) == 12
    with module_by_module(model):
        assert torch.equal(logits_of(model, steps=12), ours)


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_threads_change_nothing(monkeypatch, steps, threads):
    model = int4moe_ipex.load(EXAMPLE)
    ours = logits_of(model)
    monkeypatch.setattr(decode, "ALONE", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(logits_of(model), ours)
    finally:
        torch.set_num_threads(before)
    assert len(steps) == 12


def test_dense_linears_with_and_without_bias(tmp_path, steps):
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen3_moe"))
    for layer in model.model.layers:
        attn = layer.self_attn
        for name in ("q_proj", "v_proj", "o_proj"):
            old = getattr(attn, name)
            new = torch.nn.Linear(old.in_features, old.out_features, bias=name != "o_proj", dtype=torch.bfloat16)
            setattr(attn, name, new.requires_grad_(False))
    from int4moe_ipex.models.fused import fuse

    fuse(model)
    ours = logits_of(model, rows=4)
    assert steps == [4] * 6
    with module_by_module(model):
        assert torch.equal(logits_of(model, rows=4), ours)


def test_a_cache_of_transformers_own_grows_in_place(steps):
    model = int4moe_ipex.load(EXAMPLE)
    cache = DynamicCache(config=model.config)
    ours = logits_of(model, cache=cache)
    assert len(steps) == 6 and all(type(layer) is GrowingLayer for layer in cache.layers)
    assert cache.get_seq_length() == 11
    with module_by_module(model):
        other = DynamicCache(config=model.config)
        assert torch.equal(logits_of(model, cache=other), ours)
    for a, b in zip(cache.layers, other.layers):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def test_a_cropped_cache_and_a_full_one(monkeypatch, steps):
    """A step writes behind the last token that counts, and finds room when the buffers are full."""
    from int4moe_ipex.models import cache as module

    monkeypatch.setattr(module, "FIRST", 4)
    model = int4moe_ipex.load(EXAMPLE)
    cache, past = growing_cache(model), None
    logits_of(model, cache=cache, steps=20)
    past = {cache_keyword(): cache, "use_cache": True}
    with torch.inference_mode():
        cache.crop(-20)
        again = model(tokens(1, 20)[:, :1], **past).logits
    assert len(steps) == 21
    assert torch.equal(again, logits_of(model, steps=20)[:, :1])


def test_sequences_of_different_lengths_have_the_bits_of_each_alone(steps):
    from int4moe_ipex.serve.batch import BatchModel, prefill

    model = int4moe_ipex.load(EXAMPLE)
    batch = BatchModel(model, 8)
    prompts = [list(range(3, 3 + n)) for n in (1, 7, 40, 64, 65)]
    with torch.inference_mode():
        caches = [prefill(model, prompt)[1] for prompt in prompts]
        for i in range(4):
            positions = torch.tensor([len(p) + i for p in prompts])
            logits = batch.step(torch.full((5,), 9 + i), positions, caches)
        assert steps == [5] * 4
        for row, prompt in enumerate(prompts):
            cache = prefill(model, prompt)[1]
            for i in range(4):
                alone = batch.step(torch.tensor([9 + i]), torch.tensor([len(prompt) + i]), [cache])
            assert torch.equal(alone[0], logits[row])
            assert torch.equal(cache.layers[1].keys, caches[row].layers[1].keys)


def test_a_copied_cache_has_buffers_of_its_own(steps):
    model = int4moe_ipex.load(EXAMPLE)
    cache = growing_cache(model)
    logits_of(model, cache=cache)
    kept = [layer.keys.clone() for layer in cache.layers]
    twin = copy.deepcopy(cache)
    past = {cache_keyword(): twin, "use_cache": True}
    with torch.inference_mode():
        for token in tokens(1, 4).split(1, dim=1):
            model(token, **past)
    assert len(steps) == 10 and twin.get_seq_length() == 15 and cache.get_seq_length() == 11
    assert all(torch.equal(a.keys, b) for a, b in zip(cache.layers, kept))
    assert not torch.equal(twin.layers[0]._buffers[0][..., 11:15, :], cache.layers[0]._buffers[0][..., 11:15, :])


@pytest.mark.parametrize("sampling", [{"num_beams": 3}, {"do_sample": True, "top_k": 5}, {}])
def test_generate(steps, sampling):
    model = int4moe_ipex.load(EXAMPLE)
    ids = tokens(1, 6)

    def run():
        torch.manual_seed(0)
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, **sampling)

    ours = run()
    assert len(steps) >= 8
    with module_by_module(model):
        assert torch.equal(run(), ours)


def test_other_dtypes_go_through_the_modules(steps):
    model = int4moe_ipex.load(EXAMPLE, dtype="float32")
    logits_of(model)
    assert not steps


def test_a_table_of_paths_by_tokens(steps):
    rules = [
        {"match": "*", "min_tokens": 4, "backend": "native", "compute": "w4a8"},
        {"match": "*", "backend": "native", "compute": "w4a16"},
    ]
    model = int4moe_ipex.load(EXAMPLE, {"version": 1, "rules": rules})
    ours = logits_of(model)
    assert steps == [1] * 6
    with module_by_module(model):
        assert torch.equal(logits_of(model), ours)
    logits_of(model, rows=4)
    assert steps == [1] * 6


def test_other_backends_go_through_the_modules(steps):
    logits_of(int4moe_ipex.load(EXAMPLE, backend="torch"))
    assert not steps


def test_its_own_clock():
    model = int4moe_ipex.load(EXAMPLE)
    with decode.timed(model) as seconds:
        logits_of(model)
    assert set(seconds) == set(decode.PARTS) and all(taken > 0 for taken in seconds.values())
    with decode.timed(model) as again:
        pass
    assert set(again.values()) == {0}
    with module_by_module(model), decode.timed(model) as none:
        assert none is None


def test_the_core_refuses_caches_that_do_not_fit():
    caches = native._native.DecodeCaches(1, 1, b"", GrowingLayer, True)
    with pytest.raises(ValueError, match="caches"):
        native._native.Decoder(32, 2, 2, 16, False, 16).step(0, 0, 0, 1, caches, 1)
    layer = GrowingLayer()
    layer.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16))
    kind = layer.place[: 6 * 8]
    full = native._native.DecodeCaches(1, 1, kind, GrowingLayer, True)
    assert not full.complete() and full.add([layer]) and full.complete() and full.lengths == [3]
    with pytest.raises(ValueError, match="caches"):
        native._native.Decoder(32, 2, 2, 16, False, 16).step(0, 0, 0, 1, full, 1)
    for layers, rows in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="row"):
            native._native.DecodeCaches(layers, rows, kind, GrowingLayer, True)
