"""What single families have of their own, in the modules and in a decoding step in one call."""

import copy

import pytest
import torch
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeTopkRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeMLP, Qwen2MoeSparseMoeBlock

import int4moe_ipex
from int4moe_ipex.backends import native
from int4moe_ipex.models import attention, decode, decode_plan, fused
from int4moe_ipex.models.core_calls import Fused
from tests.models.decoding import both_ways, checkpoint, logits_of, module_by_module, one_more, tokens

pytestmark = pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def unfuse(model):
    """transformers' own modules and attention, in place."""
    for module in model.modules():
        if isinstance(module, Fused):
            module.__class__ = next(
                c for c in type(module).__mro__ if c.__module__.startswith(("transformers.", "torch."))
            )
    model.config._attn_implementation = "sdpa"


FUSED = {
    "olmoe": {"OlmoeRMSNorm", "OlmoeTopKRouter", "OlmoeAttention"},
    "qwen2_moe": {"Qwen2MoeAttention", "Qwen2MoeTopKRouter", "Qwen2MoeMLP", "Qwen2MoeSparseMoeBlock"},
    "glm4_moe": {"Glm4MoeAttention", "Glm4MoeTopkRouter", "Glm4MoeMLP", "Glm4MoeRMSNorm"},
    "deepseek_v2": {"DeepseekV2Attention", "DeepseekV2TopkRouter", "DeepseekV2MLP", "DeepseekV2RMSNorm"},
    "glm4_moe_lite": {"Glm4MoeLiteAttention", "Glm4MoeLiteTopkRouter", "Glm4MoeLiteMLP", "Glm4MoeLiteRMSNorm"},
    "deepseek_v3": {"DeepseekV3Attention", "DeepseekV3TopkRouter", "DeepseekV3MLP", "DeepseekV3RMSNorm"},
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 40), (300, 100)])
def test_mlp(dtype, shape):
    torch.manual_seed(4)
    stock = Qwen2MoeMLP(Qwen2MoeConfig(hidden_size=32), intermediate_size=shape[1]).to(dtype).requires_grad_(False)
    x = torch.randn(shape[0], 1, 32, dtype=dtype) * 4
    ours = as_fused(stock)(x)
    assert ours.shape == x.shape and relative(ours, stock(x)) < (1e-6 if dtype is torch.float32 else 6e-3)


def as_fused(module: torch.nn.Module) -> torch.nn.Module:
    twin = copy.deepcopy(module)
    twin.__class__ = fused._fusion(twin).over(type(twin))
    return twin


def test_every_bfloat16_of_silu():
    """Next to what is exact, but for results so small that e^-x is beyond float32."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite()]
    ours, up = torch.empty_like(gate), torch.ones_like(gate)
    pointers = gate.data_ptr(), up.data_ptr(), ours.data_ptr()
    native._native.gated_silu(fused.DTYPES[gate.dtype], 1, gate.numel(), *pointers, 2)
    exact = (gate.double() * torch.sigmoid(gate.double())).float()
    off = (ours.float() - exact).abs()
    assert (off <= exact.abs() * 2**-8 + 2e-37).all()
    want = exact.bfloat16()
    assert (ours != want).float().mean() < 1e-3
    limits = torch.tensor([float("inf"), float("-inf"), float("nan"), 300.0, -300.0], dtype=torch.bfloat16)
    ours, up = torch.empty_like(limits), torch.ones_like(limits)
    native._native.gated_silu(1, 1, 5, limits.data_ptr(), up.data_ptr(), ours.data_ptr(), 1)
    assert ours[0] == float("inf") and ours[2].isnan() and ours[3] == 300 and ours[4].abs() < 1e-30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_shared_expert_block(dtype, tokens):
    torch.manual_seed(5)
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_experts_per_tok": 2}
    config = Qwen2MoeConfig(hidden_size=64, num_experts=6, **sizes)
    stock = Qwen2MoeSparseMoeBlock(config)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    stock = stock.to(dtype).eval().requires_grad_(False)
    x = torch.randn(1, tokens, 64, dtype=dtype) * 2
    ours, theirs = as_fused(stock)(x), stock(x)
    assert ours.shape == theirs.shape and relative(ours, theirs) < (1e-6 if dtype is torch.float32 else 4e-3)
    stock.shared_expert_gate.weight.data.zero_()
    assert relative(as_fused(stock)(x), theirs) > 0.01
    grown = as_fused(stock).requires_grad_(True)
    grown(x).float().sum().backward()
    assert grown.shared_expert_gate.weight.grad is not None and grown.shared_expert.up_proj.weight.grad is not None


def of_block(change):
    """A change of the second layer of a tiny qwen2_moe, which has experts and a shared one; the first has none."""
    return lambda model: change(model.model.layers[1].mlp)


def relu(mlp):
    mlp.act_fn = torch.nn.ReLU()


def doubled(module):
    module.register_forward_hook(lambda module, args, out: 2 * out)


def subclass(cls):
    return type(cls.__name__, (cls,), {"forward": lambda self, x: 2 * cls.forward(self, x)})


UNUSUAL = {
    "a hook on an activation": of_block(lambda m: doubled(m.shared_expert.act_fn)),
    "a hook on the shared expert": of_block(lambda m: doubled(m.shared_expert)),
    "a hook on its score": of_block(lambda m: doubled(m.shared_expert_gate)),
    "a hook on its down_proj": of_block(lambda m: doubled(m.shared_expert.down_proj)),
    "a hook on the experts": of_block(lambda m: doubled(m.experts)),
    "another activation": of_block(lambda m: relu(m.shared_expert)),
    "another activation of a dense layer": lambda m: relu(m.model.layers[0].mlp),
    "a hook in a dense layer": lambda m: doubled(m.model.layers[0].mlp.up_proj),
    "a hook on a dense layer": lambda m: doubled(m.model.layers[0].mlp),
    "a shared expert of another kind": of_block(lambda m: setattr(m, "shared_expert", torch.nn.Identity())),
    "a score of another kind": of_block(
        lambda m: setattr(m, "shared_expert_gate", torch.nn.Sequential(m.shared_expert_gate, torch.nn.Softplus()))
    ),
    "a subclass": of_block(lambda m: setattr(m, "__class__", subclass(type(m)))),
    "a forward of its own": of_block(lambda m: setattr(m.shared_expert, "forward", lambda x: 2 * x)),
    "a score that is trained": of_block(lambda m: m.shared_expert_gate.weight.requires_grad_(True)),
}


@pytest.mark.parametrize("change", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("before", [True, False])
def test_what_is_unusual_goes_through_the_modules(tmp_path, steps, change, before):
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen2_moe"))
    plain = logits_of(model)
    assert len(steps) == 6
    if not before:
        model = int4moe_ipex.load(tmp_path)
    change(model)
    ours = logits_of(model)
    assert len(steps) == 6
    with module_by_module(model):
        assert torch.equal(logits_of(model), ours)
    assert torch.equal(ours, plain) == (change is UNUSUAL["a score that is trained"])


USUAL = {
    "norm_topk_prob": of_block(lambda m: setattr(m.gate, "norm_topk_prob", not m.gate.norm_topk_prob)),
    "top_k": of_block(lambda m: setattr(m.gate, "top_k", 3)),
    "a moved score": of_block(lambda m: setattr(m.shared_expert_gate.weight, "data", -m.shared_expert_gate.weight)),
    "a changed score": of_block(lambda m: m.shared_expert_gate.weight.mul_(-2)),
    "another shared expert": lambda m: setattr(m.model.layers[1].mlp, "shared_expert", exchanged(m)),
    "no experts": lambda m: setattr(m.model.layers[1], "mlp", m.model.layers[0].mlp),
    "a dense linear": of_block(lambda m: setattr(m.shared_expert, "up_proj", dense(m.shared_expert.up_proj))),
}


def dense(old):
    new = torch.nn.Linear(old.in_features, old.out_features, bias=True, dtype=torch.bfloat16).requires_grad_(False)
    new.__class__ = fused.FusedLinear.over(torch.nn.Linear)
    return new


def exchanged(model):
    shared = model.model.layers[1].mlp.shared_expert
    shared.gate_proj, shared.up_proj = shared.up_proj, shared.gate_proj
    return shared


@pytest.mark.parametrize("change", USUAL.values(), ids=USUAL)
def test_changed_settings_and_parts_are_obeyed(tmp_path, steps, change):
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen2_moe"))
    before = logits_of(model, rows=3)
    with torch.no_grad():
        change(model)
    ours = logits_of(model, rows=3)
    assert steps == [3] * 12 and not torch.equal(ours, before)
    with module_by_module(model):
        assert torch.equal(logits_of(model, rows=3), ours)


def test_layers_that_slide_go_through_the_modules(tmp_path, steps):
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen2_moe", use_sliding_window=True, sliding_window=4))
    logits_of(model)
    assert not steps
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen2_moe"))
    one_more(model)
    assert steps == [1]
    model.config.layer_types[1] = "sliding_attention"
    assert model.model.plan().decoder is None


def test_without_caching_the_modules_say_what_is_returned(tmp_path, steps):
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen2_moe"))
    ours, theirs = both_ways(model, lambda: one_more(model, use_cache=False))
    assert torch.equal(ours.logits, theirs.logits) and ours.past_key_values is theirs.past_key_values and not steps


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("family", FUSED)
def test_threads_change_nothing(tmp_path, monkeypatch, steps, family, threads):
    model = int4moe_ipex.load(checkpoint(tmp_path, family))
    ours = {rows: logits_of(model, rows) for rows in (1, 3, 8)}
    monkeypatch.setattr(decode, "ALONE", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(torch.equal(logits_of(model, rows), logits) for rows, logits in ours.items())
    finally:
        torch.set_num_threads(before)
    assert len(steps) == 36


@pytest.mark.parametrize("family", FUSED)
def test_sequences_of_a_server_have_the_bits_of_each_alone(tmp_path, steps, family):
    from int4moe_ipex.serve.batch import BatchModel, prefill

    model = int4moe_ipex.load(checkpoint(tmp_path, family))
    batch = BatchModel(model, 4)
    prompts = [list(range(3, 3 + n)) for n in (1, 7, 20)]
    with torch.inference_mode():
        caches = [prefill(model, prompt)[1] for prompt in prompts]
        logits = batch.step(torch.full((3,), 9), torch.tensor([len(p) for p in prompts]), caches)
        assert steps == [3]
        for row, prompt in enumerate(prompts):
            cache = prefill(model, prompt)[1]
            assert torch.equal(batch.step(torch.tensor([9]), torch.tensor([len(prompt)]), [cache])[0], logits[row])


GLM = {"n_routed_experts": 12, "num_experts_per_tok": 4, "hidden_size": 64}
GROUPS = {"one group": (1, 1), "two of four": (4, 2), "one of three": (3, 1), "all": (6, 6)}


def glm_router(groups: int, chosen: int, **changes) -> Glm4MoeTopkRouter:
    torch.manual_seed(6)
    changes = {"n_group": groups, "topk_group": chosen, "routed_scaling_factor": 2.5} | changes
    router = Glm4MoeTopkRouter(Glm4MoeConfig(**GLM | changes))
    router.weight.data = torch.randn_like(router.weight) / 8
    router.e_score_correction_bias.uniform_(-0.2, 0.2)
    return router.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 33, 300])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_sigmoid_router(dtype, tokens, groups, normalise):
    stock = glm_router(*groups, norm_topk_prob=normalise)
    x = torch.randn(1, tokens, 64).to(dtype)
    logits, scores, ids = as_fused(stock)(x)
    want_logits, want_scores, want_ids = stock(x)
    assert [t.dtype for t in (logits, scores, ids)] == [t.dtype for t in (want_logits, want_scores, want_ids)]
    assert relative(logits, want_logits) < 1e-6
    assert torch.equal(ids.sort(-1).values, want_ids.sort(-1).values)  # transformers' own are in no order
    want_scores = want_scores.gather(1, want_ids.argsort(-1))
    assert relative(scores.gather(1, ids.argsort(-1)), want_scores) < 1e-6


def test_the_bias_chooses_and_does_not_weigh():
    router = glm_router(1, 1, norm_topk_prob=False)
    router.e_score_correction_bias.zero_()[:4] = 2.0
    _, scores, ids = as_fused(router)(torch.randn(7, 64))
    assert set(ids.flatten().tolist()) == {0, 1, 2, 3} and (scores < 2.5).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda r: setattr(r, "weight", torch.nn.Parameter(r.weight.bfloat16(), requires_grad=False)),
        lambda r: setattr(r, "weight", torch.nn.Parameter(r.weight.clone())),
        lambda r: setattr(r, "topk_group", 1),  # too few experts: transformers takes some of weight 0 or less
    ],
    ids=["bfloat16", "trained", "too few"],
)
def test_what_a_sigmoid_router_leaves_to_transformers(monkeypatch, change):
    stock = glm_router(6, 2)
    change(stock)
    monkeypatch.setattr(native._native, "sigmoid_top_k", None)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(as_fused(stock)(x), stock(x)))


def test_sigmoid_router_with_nan_still_gives_valid_ids():
    _, scores, ids = as_fused(glm_router(3, 2))(torch.full((2, 64), float("nan")))
    assert scores.isnan().all()
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 12 for row in ids.tolist())


SIZES = {
    "half of a head": {"head_dim": 32},
    "a quarter": {"head_dim": 32, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
    "whole heads": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    "norms of heads": {"use_qk_norm": True},
    "biases": {"attention_bias": True},
    "no shared group": {"n_group": 1, "topk_group": 1},
    "scores as they are": {"norm_topk_prob": False, "routed_scaling_factor": 1.7},
    "all dense but one": {"first_k_dense_replace": 2, "num_hidden_layers": 3},
}


@pytest.mark.parametrize("changes", SIZES.values(), ids=SIZES)
def test_settings_of_glm(tmp_path, steps, changes):
    rope = changes.get("rope_parameters")
    changes = changes if rope is None else changes | {"rope_parameters": rope | {"rope_theta": 10000.0}}
    model = int4moe_ipex.load(checkpoint(tmp_path, "glm4_moe", **changes))
    ours = logits_of(model, rows=3)
    assert steps == [3] * 6
    with module_by_module(model):
        assert torch.equal(logits_of(model, rows=3), ours)
    unfuse(model)
    assert relative(ours, logits_of(model, rows=3)) < 5e-2


def rounded(mlp):
    mlp.gate.weight = torch.nn.Parameter(-mlp.gate.weight.bfloat16(), requires_grad=False)


def negated(module, args, out):
    return out[0], -out[1], out[2]


GLM_CHANGES = {  # whether a step still is one call
    "n_group": (of_block(lambda m: setattr(m.gate, "num_group", 1)), True),
    "topk_group": (of_block(lambda m: setattr(m.gate, "topk_group", 2)), True),
    "factor": (of_block(lambda m: setattr(m.gate, "routed_scaling_factor", 3.0)), True),
    "norm_topk_prob": (of_block(lambda m: setattr(m.gate, "norm_topk_prob", False)), True),
    "a changed bias": (of_block(lambda m: m.gate.e_score_correction_bias.copy_(torch.arange(8.0))), True),
    "a moved bias": (of_block(lambda m: setattr(m.gate, "e_score_correction_bias", torch.arange(8.0))), True),
    "a moved weight": (of_block(lambda m: setattr(m.gate.weight, "data", -m.gate.weight)), True),
    "a rounded weight": (of_block(rounded), False),
    "a hook on the router": (of_block(lambda m: m.gate.register_forward_hook(negated)), False),
    "a hook on shared experts": (of_block(lambda m: doubled(m.shared_experts)), False),
    "shared experts of another kind": (of_block(lambda m: setattr(m, "shared_experts", torch.nn.Identity())), False),
}


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("change, whole", GLM_CHANGES.values(), ids=GLM_CHANGES)
def test_changes_of_glm_are_obeyed(tmp_path, monkeypatch, steps, change, whole, described):
    if not described:
        monkeypatch.setattr(decode_plan, "EXCHANGE", None)  # as torch before 2.10
    model = int4moe_ipex.load(checkpoint(tmp_path, "glm4_moe"))
    before = logits_of(model, rows=2)
    with torch.no_grad():
        change(model)
    ours = logits_of(model, rows=2)
    assert steps == [2] * (12 if whole else 6)
    with module_by_module(model):
        assert torch.equal(logits_of(model, rows=2), ours)
    assert not torch.equal(ours, before)
