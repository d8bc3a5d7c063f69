"""What single families have of their own, in the modules and in a decoding step in one call."""

import pytest
import torch

import int4moe_ipex
from int4moe_ipex.models import attention, fused
from tests.models.decoding import both_ways, checkpoint, logits_of, module_by_module, one_more, tokens

pytestmark = pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def unfuse(model):
    """transformers' own modules and attention, in place."""
    for module in model.modules():
        if type(module).__module__ == fused.__name__:
            module.__class__ = next(
                c for c in type(module).__mro__ if c.__module__.startswith(("transformers.", "torch."))
            )
    model.config._attn_implementation = "sdpa"


FUSED = {
    "olmoe": {"OlmoeRMSNorm", "OlmoeTopKRouter", "OlmoeAttention"},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FUSED)
def test_a_family_agrees_with_itself_unfused(tmp_path, family, dtype):
    model = int4moe_ipex.load(checkpoint(tmp_path, family), dtype=dtype, backend="native")
    assert FUSED[family] <= set(model.int4moe_report.fused)
    with torch.inference_mode():
        ours = model(tokens(2, 30)).logits
        unfuse(model)
        stock = model(tokens(2, 30)).logits
    assert not torch.equal(ours, stock)  # they did run
    assert relative(ours, stock) < (1e-5 if dtype == "float32" else 3e-2)


def test_norms_of_all_heads_are_not_those_of_each(tmp_path, steps):
    model = int4moe_ipex.load(checkpoint(tmp_path, "olmoe"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.copy_(torch.linspace(0.5, 2, 64))
            layer.self_attn.k_norm.weight.copy_(torch.linspace(2, 0.5, 32))
    ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs) and steps == [1]


@pytest.mark.parametrize("before", [True, False])
def test_clipped_projections_go_through_the_modules(tmp_path, steps, before):
    model = int4moe_ipex.load(checkpoint(tmp_path, "olmoe", clip_qkv=0.25 if before else None))
    if not before:
        logits_of(model)
        assert len(steps) == 6
        model.config.clip_qkv = 0.25
        steps.clear()
    clipped = logits_of(model)
    assert not steps
    model.config.clip_qkv = None
    assert not torch.equal(logits_of(model), clipped)
    model.config.clip_qkv = 0.25
    with module_by_module(model):
        assert torch.equal(logits_of(model), clipped)
    unfuse(model)
    assert relative(clipped, logits_of(model)) < 3e-2


def test_a_norm_of_all_heads_is_watched(tmp_path, steps):
    model = int4moe_ipex.load(checkpoint(tmp_path, "olmoe"))
    before = one_more(model).logits
    seen = []
    handle = model.model.layers[1].self_attn.q_norm.register_forward_hook(
        lambda module, args, out: seen.append(out.shape)
    )
    assert torch.equal(one_more(model).logits, before)
    handle.remove()
    assert seen == [(1, 6, 64), (1, 1, 64)] and steps == [1]
    model.model.layers[1].self_attn.k_norm.variance_epsilon = 0.5
    ours, theirs = both_ways(model, lambda: one_more(model).logits)
    assert torch.equal(ours, theirs) and not torch.equal(ours, before)
