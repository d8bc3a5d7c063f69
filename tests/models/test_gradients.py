"""Autograd around int4 modules: what follows them trains, and nothing is cut off in silence."""

import pytest
import torch
from torch import nn

import int4moe_ipex
from int4moe_ipex.backends.native.ops import call_experts, call_linear
from int4moe_ipex.errors import BackendError
from tests.models.decoding import checkpoint, tokens
from tests.models.tiny import stock_model, write_checkpoint


class Adapter(nn.Module):
    """A linear with a trained one of low rank beside it."""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear = linear
        torch.manual_seed(1)
        self.a = nn.Parameter(0.1 * torch.randn(2, linear.in_features))
        self.b = nn.Parameter(0.1 * torch.randn(linear.out_features, 2))

    def forward(self, x):
        return self.linear(x) + (x @ self.a.T @ self.b.T).to(x.dtype)


def loss_of(model) -> torch.Tensor:
    return model(tokens(2, 7)).logits.float().square().mean()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3"])
def test_the_reference_has_stock_gradients(family, tmp_path):
    stock = stock_model(family)
    write_checkpoint(stock, family, tmp_path)
    model = int4moe_ipex.load(tmp_path, dtype="float32", backend="reference")
    expected = dict(stock.named_parameters())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for each in (stock, model):
        loss_of(each).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "deepseek_v3"])
def test_a_gradient_that_is_not_there_is_an_error(family, dtype, tmp_path):
    model = int4moe_ipex.load(checkpoint(tmp_path, family), backend="native", dtype=dtype)
    with torch.no_grad():
        expected = model(tokens(2, 7)).logits
    for name in ("embed_tokens", "layers.0.self_attn.o_proj", "layers.1.mlp.experts"):
        model.requires_grad_(False)
        module = model.model.get_submodule(name)
        if name == "embed_tokens":
            module.weight.requires_grad_(True)
        else:
            module.register_forward_pre_hook(lambda _, args: (args[0].requires_grad_(True), *args[1:]))
        logits = model(tokens(2, 7)).logits
        assert torch.nn.functional.cosine_similarity(logits.float().flatten(), expected.float().flatten(), 0) > 0.999
        with pytest.raises(BackendError, match="backend: reference"):
            logits.float().sum().backward()


def test_what_follows_the_last_int4_module_trains(tmp_path):
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen3_moe"), backend="native", dtype="float32")
    model.lm_head = Adapter(model.lm_head)
    before = loss_of(model)
    before.backward()
    with torch.no_grad():
        for parameter in model.lm_head.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    assert loss_of(model) < before


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "glm4_moe", "mixtral"])
def test_adapters_in_attention(family, tmp_path):
    """Rotation in place would change what autograd has noted."""
    model = int4moe_ipex.load(checkpoint(tmp_path, family), backend="native", dtype="float32")
    attention = model.model.layers[0].self_attn
    attention.o_proj = nn.Identity()
    x = torch.randn(1, 5, 64)
    embeddings = model.model.rotary_emb(x, torch.arange(5)[None])
    for name in ("q_proj", "k_proj"):
        setattr(attention, name, Adapter(getattr(attention, name)))
    grads = []
    for cls in (type(attention), type(attention).__bases__[1]):  # the latter is transformers' own
        attention.__class__ = cls
        attention.zero_grad()
        out = attention(x, position_embeddings=embeddings, attention_mask=None)[0]
        out.square().sum().backward()
        grads.append([p.grad for n, p in sorted(attention.named_parameters()) if n.endswith((".a", ".b"))])
    assert len(grads[0]) == 4
    for ours, expected in zip(*grads):
        assert expected.abs().max() > 0 and torch.allclose(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "glm4_moe"])
def test_head_norms_of_another_dtype(family, tmp_path):
    """They are no bfloat16 weights to read; transformers says so."""
    changes = {"use_qk_norm": True} if family == "glm4_moe" else {}
    model = int4moe_ipex.load(checkpoint(tmp_path, family, **changes), backend="native")
    attention = model.model.layers[0].self_attn
    attention.q_norm.float()
    attention.k_norm.float()
    with torch.no_grad(), pytest.raises(RuntimeError, match="same dtype"):
        model(tokens(1, 7))


def test_operators_have_none_either(tmp_path):
    """What torch.compile and torch.export call."""
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen3_moe"), backend="native", dtype="float32")
    layer = model.model.layers[0]
    x = torch.randn(3, 64, requires_grad=True)
    results = (
        call_linear(layer.self_attn.q_proj.packed, x),
        call_experts(layer.mlp.experts.packs[0].packed, x, torch.tensor([[0, 1]] * 3), torch.ones(3, 2)),
    )
    for y in results:
        with pytest.raises(BackendError, match="backend: reference"):
            y.sum().backward()
