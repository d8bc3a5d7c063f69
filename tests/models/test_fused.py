"""Fused modules against the transformers modules that they replace, and the cases they must leave to those."""

import copy
import inspect
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
    Qwen3MoeTopKRouter,
)

import int4moe_ipex
from int4moe_ipex.backends import native
from int4moe_ipex.models import attention, fused
from tests.models.decoding import checkpoint
from tests.models.tiny import FAMILIES, stock_model
from tests.real import EXAMPLE

pytestmark = pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def as_fused(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    twin.__class__ = fused._fusion(twin).over(type(twin))
    return twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 50, 64), (2, 1, 5, 2048), (40, 1000)])
def test_rms_norm(dtype, shape):
    torch.manual_seed(1)
    stock = Qwen3MoeRMSNorm(shape[-1], eps=1e-5)
    stock.weight.data = torch.randn(shape[-1])
    stock = stock.to(dtype).requires_grad_(False)
    x = (torch.randn(shape) * 3).to(dtype)
    assert relative(as_fused(stock)(x), stock(x)) < TOLERANCE[dtype] / 4


def test_rms_norm_leaves_views_and_gradients_to_transformers():
    stock = Qwen3MoeRMSNorm(64)
    ours = as_fused(stock)
    x = torch.randn(64, 3).T
    assert torch.equal(ours(x), stock(x))
    ours(torch.randn(2, 64)).sum().backward()
    assert ours.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize("kind", ["qwen", "qwen, not normalised", "mixtral"])
def test_router(dtype, tokens, kind):
    torch.manual_seed(2)
    if kind == "mixtral":
        stock = MixtralTopKRouter(MixtralConfig(hidden_size=64, num_local_experts=8, num_experts_per_tok=2))
    else:
        config = Qwen3MoeConfig(hidden_size=64, num_experts=60, num_experts_per_tok=7, norm_topk_prob=kind == "qwen")
        stock = Qwen3MoeTopKRouter(config)
    stock.weight.data = torch.randn_like(stock.weight)
    stock = stock.to(dtype).requires_grad_(False)
    x = torch.randn(tokens, 64, dtype=dtype)
    logits, scores, ids = as_fused(stock)(x)
    want_logits, want_scores, want_ids = stock(x)
    assert relative(logits, want_logits) < TOLERANCE[dtype]
    assert scores.dtype == want_scores.dtype and ids.dtype == want_ids.dtype
    # Rounded logits may tie or swap; then both choices have the same probabilities.
    assert relative(scores, want_scores) < TOLERANCE[dtype]
    assert (ids == want_ids).float().mean() > (0.999 if dtype is torch.float32 else 0.9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_tables(dtype, monkeypatch):
    monkeypatch.setattr(fused, "FIRST_POSITIONS", 8)
    stock = Qwen3MoeRotaryEmbedding(Qwen3MoeConfig(hidden_size=64, num_attention_heads=4, head_dim=16))
    ours = as_fused(stock)
    x = torch.zeros(1, dtype=dtype)
    for positions in ([[0]], [[5, 6, 7], [1, 2, 3]], [[8]], [list(range(40))], [[1000, 3]], [[-1, 2]]):
        for a, b in zip(ours(x, torch.tensor(positions)), stock(x, torch.tensor(positions))):
            assert torch.equal(a, b) and a.dtype is dtype


def test_rotary_kinds_that_depend_on_the_length_stay():
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert fused._fusion(Qwen3MoeRotaryEmbedding(Qwen3MoeConfig(rope_parameters=scaled))) is None


def test_router_with_nan_still_gives_valid_ids():
    stock = Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=32, num_experts=6, num_experts_per_tok=3))
    ours = as_fused(stock.requires_grad_(False))
    _, scores, ids = ours(torch.full((2, 32), float("nan")))
    assert scores.isnan().all()
    assert all(sorted(set(row)) == sorted(row) and min(row) >= 0 and max(row) < 6 for row in ids.tolist())


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 8, 17, 32, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_dense_linear(tokens, bias):
    torch.manual_seed(3)
    stock = nn.Linear(96, 1301, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    ours = as_fused(stock)
    x = torch.randn(tokens, 1, 96, dtype=torch.bfloat16)
    want = F.linear(x.double(), stock.weight.double(), None if stock.bias is None else stock.bias.double())
    assert relative(ours(x), want) < 3e-3
    assert torch.equal(ours(x)[:1], ours(x[:1])) or tokens > native._native.dense_tokens


def forward_of(name: str) -> str:
    """The source of a transformers class's forward, without its names, comments and white space."""
    found = [module for key, module in sys.modules.items() if key.startswith("transformers.models.")]
    cls = next(vars(module)[name] for module in found if name in vars(module))
    family = re.sub("(RMSNorm|Attention|RotaryEmbedding|Top[kK]Router|MLP|SparseMoeBlock)$", "", name)
    source = re.sub(r'"""(.|\n)*?"""|#.*', "", inspect.getsource(cls.forward))
    return re.sub(r"\s+", " ", source).replace(family, "")


# MixtralTopKRouter keeps float32 scores, which the fused one tells by what it lacks.
ALIKE = [fused.NORMS, fused.ROTARY, fused.ROUTERS - {"MixtralTopKRouter"}, fused.SIGMOID_ROUTERS]
ALIKE += [fused.MLPS, fused.SHARED_EXPERT_BLOCKS]
ALIKE += [{"DeepseekV3Attention", "Glm4MoeLiteAttention"}, {"Qwen3MoeAttention", "Dots1Attention"}]


@pytest.mark.parametrize("names", ALIKE, ids=min)
def test_classes_that_one_module_stands_for_are_alike(names):
    """Equal word for word in the transformers that is installed, so that tests of one of them are tests of all."""
    for family in FAMILIES:
        stock_model(family)  # imports its classes
    assert len({forward_of(name) for name in names}) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_model_agrees_with_itself_unfused(dtype):
    model = int4moe_ipex.load(EXAMPLE, backend="native", dtype=dtype)
    names = set(model.int4moe_report.fused)
    assert {"Qwen3MoeRMSNorm", "Qwen3MoeTopKRouter", "Qwen3MoeAttention"} <= names
    ids = torch.randint(0, 500, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = model(ids).logits
        for module in model.modules():
            if isinstance(module, fused.Fused):
                module.__class__ = type(module).__bases__[1]
        model.config._attn_implementation = "sdpa"
        stock = model(ids).logits
    assert not torch.equal(ours, stock)  # they did run
    assert relative(ours, stock) < (1e-5 if dtype == "float32" else 3e-2)


def test_the_reference_backend_runs_transformers_own_modules():
    model = int4moe_ipex.load(EXAMPLE, backend="reference", dtype="float32")
    assert model.int4moe_report.fused == {}
    assert model.config._attn_implementation == "sdpa"


def test_a_cap_below_avx2_keeps_transformers_own_modules(monkeypatch):
    monkeypatch.setenv("INT4MOE_MAX_ISA", "scalar")
    model = int4moe_ipex.load(EXAMPLE, backend="native", dtype="float32")
    assert all(path.startswith("native/scalar/") for path in model.int4moe_report.paths)
    assert model.int4moe_report.fused == {} and model.config._attn_implementation == "sdpa"


def test_an_attention_implementation_that_was_asked_for_stays():
    model = int4moe_ipex.load(EXAMPLE, backend="native", dtype="float32", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    with torch.inference_mode():
        out = model(torch.tensor([[1, 2, 3]]), output_attentions=True)
    assert len(out.attentions) == model.config.num_hidden_layers


def test_left_padding_gives_what_the_prompt_alone_gives():
    model = int4moe_ipex.load(EXAMPLE, backend="native", dtype="float32")
    prompt = torch.tensor([[5, 17, 33, 80]])
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    with torch.inference_mode():
        alone = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, 4:]
        batch = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False)[0, 7:]
    assert alone.tolist() == batch.tolist()


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3"])
def test_what_a_hook_keeps_stays_as_it_was(tmp_path, family):
    model = int4moe_ipex.load(checkpoint(tmp_path, family))
    attn, kept = model.model.layers[0].self_attn, {}
    for name, module in attn.named_children():
        module.register_forward_hook(lambda m, i, y, name=name: kept.setdefault(name, (y, y.clone())) and None)
    with torch.inference_mode():
        model(torch.randint(3, 60, (1, 12)))
    assert kept and set(kept) >= {"o_proj"} | {name for name, _ in attn.named_children() if "norm" in name}
    for name, (y, copied) in kept.items():
        assert torch.equal(y, copied), name


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_what_a_hook_gives_stays_as_it_is(tmp_path, family):
    model = int4moe_ipex.load(checkpoint(tmp_path, family))
    attn = model.model.layers[0].self_attn
    query = getattr(attn, "q_b_proj", None) or attn.q_proj
    given = torch.randn(1, 8, query.out_features, dtype=torch.bfloat16)
    before, ids = given.clone(), torch.randint(3, 60, (1, 8))
    query.register_forward_hook(lambda *args: given)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, model(ids).logits)
    assert torch.equal(given, before)


def test_another_norm_in_the_place_of_a_heads_counts(tmp_path):
    class Twice(Qwen3MoeRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen3_moe"), dtype="float32")
    ids = torch.randint(3, 60, (1, 8))
    with torch.inference_mode():
        before = model(ids).logits
        for layer in model.model.layers:
            old = layer.self_attn.q_norm
            layer.self_attn.q_norm = Twice(old.weight.numel(), old.variance_epsilon).requires_grad_(False)
            layer.self_attn.q_norm.weight.copy_(old.weight)
        changed = model(ids).logits
        for layer in model.model.layers:
            twice = layer.self_attn.q_norm.weight * 2
            layer.self_attn.q_norm = as_fused(Qwen3MoeRMSNorm(old.weight.numel(), old.variance_epsilon))
            layer.self_attn.q_norm.weight = nn.Parameter(twice, requires_grad=False)
        same = model(ids).logits
    assert relative(changed, before) > 1e-3
    assert relative(changed, same) < 1e-5
