"""Copies of a loaded model: packed weights are shared, everything else is its own, nothing refers to the first one."""

import copy
import gc
import io
import pickle

import pytest
import torch

import int4moe_ipex
from int4moe_ipex.errors import Int4MoeError, MissingTensorsError, UnsupportedModelError
from int4moe_ipex.moe.experts import Int4Experts
from tests.models.decoding import both_ways, checkpoint, logits_of

FAMILIES = ("qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
def test_deepcopy(family, tmp_path):
    model = int4moe_ipex.load(checkpoint(tmp_path, family))
    before = logits_of(model, rows=2)  # the plan and the tables of this model are made
    twin = copy.deepcopy(model)
    assert {type(m) for m in twin.modules()} == {type(m) for m in model.modules()}
    shared = [
        (a.packs[0].packed, b.packs[0].packed)
        for a, b in zip(model.modules(), twin.modules())
        if isinstance(a, Int4Experts)
    ]
    assert shared and all(a is b for a, b in shared)
    # Each follows its own weights from now on.
    with torch.no_grad():
        twin.model.norm.weight.mul_(2)
        model.model.layers[0].input_layernorm.weight.neg_()
    ours, modules = both_ways(model, lambda: logits_of(model, rows=2))
    assert torch.equal(ours, modules) and not torch.equal(ours, before)
    model = None
    gc.collect()
    with torch.no_grad():
        twin.model.norm.weight.div_(2)
    ours, modules = both_ways(twin, lambda: logits_of(twin, rows=2))
    assert torch.equal(ours, before) and torch.equal(modules, before)


def test_copy_takes_steps(tmp_path, steps):
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen3_moe"))
    expected = logits_of(model)
    assert len(steps) == 6
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin), expected) and len(steps) == 12
    shallow = copy.copy(twin.model)
    assert shallow.layers is twin.model.layers and type(shallow) is type(twin.model)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pickles_are_refused(family, backend, tmp_path):
    model = int4moe_ipex.load(checkpoint(tmp_path, family), backend=backend)
    for write in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(UnsupportedModelError, match="int4moe convert"):
            write(model)


def test_pickles_of_fused_modules(tmp_path):
    """Modules without packed weights are pickled as any are."""
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen3_moe"))
    x = torch.randn(1, 3, 64).bfloat16()
    for module in (model.lm_head, model.model.norm, model.model.layers[0].mlp.gate):
        again = pickle.loads(pickle.dumps(module))
        assert type(again) is type(module)
        ours, its = module(x), again(x)
        assert all(map(torch.equal, ours, its)) if isinstance(ours, tuple) else torch.equal(ours, its)


def test_rotary_tables_of_replaced_frequencies(tmp_path):
    """Frequencies that get the address of earlier ones do not get their tables."""
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen3_moe"))
    rotary, x, positions = model.model.rotary_emb, torch.zeros(1, 2, 64).bfloat16(), torch.tensor([[0, 1]])
    memory = rotary.inv_freq.numpy().copy()
    for _ in range(2):
        rotary.inv_freq = torch.from_numpy(memory)
        cos, _ = rotary(x, positions)
        assert torch.equal(cos[0, 1], torch.cat((rotary.inv_freq, rotary.inv_freq)).cos().bfloat16())
        memory *= 2


def test_errors_are_pickled():
    """A worker process sends them to its parent so."""
    for error in (MissingTensorsError("model.safetensors", ["a", "b"]), Int4MoeError("why")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
