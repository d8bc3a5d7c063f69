"""DeepSeek's modules, fused, against transformers' own: routers, rotation, and attention over latents."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as lite

import int4moe_ipex
from int4moe_ipex.backends import native
from int4moe_ipex.models import attention, core_calls, fused
from int4moe_ipex.models.cache import cache_keyword, growing_cache
from int4moe_ipex.models.fused_latent import FusedLatentAttention
from int4moe_ipex.serve.batch import BatchModel, prefill
from tests.models.decoding import checkpoint, logits_of, module_by_module, one_more, tokens
from tests.models.test_decode_families import unfuse

pytestmark = pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")

FAMILIES = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite"}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
BOUND = {"float32": 1e-5, "bfloat16": 3e-2}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def as_fused(module: torch.nn.Module) -> torch.nn.Module:
    twin = copy.deepcopy(module)
    twin.__class__ = fused._fusion(twin).over(type(twin))
    return twin


@pytest.fixture
def over_latents(monkeypatch):
    """How many sequences each attention over latents had."""
    seen = []
    whole = FusedLatentAttention._over_latents

    def spy(self, query, *rest):
        seen.append(len(query))
        return whole(self, query, *rest)

    monkeypatch.setattr(FusedLatentAttention, "_over_latents", spy)
    return seen


def router(family: str, **changes):
    torch.manual_seed(6)
    sizes = {"n_routed_experts": 12, "num_experts_per_tok": 4, "hidden_size": 64, "routed_scaling_factor": 2.5}
    if family == "deepseek_v2":
        made = v2.DeepseekV2TopkRouter(v2.DeepseekV2Config(**sizes | changes))
    else:
        made = v3.DeepseekV3TopkRouter(v3.DeepseekV3Config(**sizes | changes))
        made.e_score_correction_bias.uniform_(-0.2, 0.2)
    made.weight.data = torch.randn_like(made.weight) / 8
    return made.requires_grad_(False)


ROUTERS = {
    "greedy": ("deepseek_v2", {"topk_method": "greedy"}),
    "two of four groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "one of three": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}),
    "experts alone": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 12, "topk_group": 5}),
    "all groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 6, "topk_group": 6}),
    "sigmoids": ("deepseek_v3", {"n_group": 4, "topk_group": 2}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, 33, 300])
@pytest.mark.parametrize("kind", ROUTERS)
def test_routers(dtype, count, kind):
    family, changes = ROUTERS[kind]
    stock = router(family, **changes)
    x = torch.randn(1, count, 64).to(dtype)
    logits, scores, ids = as_fused(stock)(x)
    want_logits, want_scores, want_ids = stock(x)
    assert [t.dtype for t in (logits, scores, ids)] == [t.dtype for t in (want_logits, want_scores, want_ids)]
    assert relative(logits, want_logits) < 1e-6
    assert torch.equal(ids.sort(-1).values, want_ids.sort(-1).values)  # transformers' own are in no order
    want_scores = want_scores.gather(1, want_ids.argsort(-1))
    assert relative(scores.gather(1, ids.argsort(-1)), want_scores) < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        lambda r: setattr(r, "weight", torch.nn.Parameter(r.weight.bfloat16(), requires_grad=False)),
        lambda r: setattr(r, "weight", torch.nn.Parameter(r.weight.clone())),
        lambda r: setattr(r, "topk_group", 1),  # too few experts: transformers takes some of weight 0
    ],
    ids=["bfloat16", "trained", "too few"],
)
def test_what_a_router_leaves_to_transformers(monkeypatch, change):
    stock = router("deepseek_v2", topk_method="group_limited_greedy", n_group=6, topk_group=2)
    change(stock)
    monkeypatch.setattr(native._native, "softmax_top_k", None)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(as_fused(stock)(x), stock(x)))


def test_a_router_with_nan_still_gives_valid_ids():
    stock = router("deepseek_v2", topk_method="group_limited_greedy", n_group=3, topk_group=2)
    _, scores, ids = as_fused(stock)(torch.full((2, 64), float("nan")))
    assert scores.isnan().all()
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 12 for row in ids.tolist())


def rotary(family: str, rope: dict):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "qk_rope_head_dim": 16, "max_position_embeddings": 64}
    if family == "deepseek_v2":
        return v2.DeepseekV2RotaryEmbedding(v2.DeepseekV2Config(**sizes, rope_parameters=rope))
    if family == "glm4_moe_lite":
        return lite.Glm4MoeLiteRotaryEmbedding(lite.Glm4MoeLiteConfig(**sizes, rope_parameters=rope))
    return v3.DeepseekV3RotaryEmbedding(v3.DeepseekV3Config(**sizes, rope_parameters=rope))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e4}, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_tables(monkeypatch, family, rope, dtype):
    monkeypatch.setattr(fused, "FIRST_POSITIONS", 8)
    stock = rotary(family, rope)
    assert stock.attention_scaling == 1.0 or rope is YARN
    ours, x = as_fused(stock), torch.zeros(1, dtype=dtype)
    for positions in ([[0]], [[5, 6, 7], [1, 2, 3]], [[8]], [list(range(40))], [[1000, 3]], [[-1, 2]]):
        got, want = ours(x, torch.tensor(positions)), stock(x, torch.tensor(positions))
        for a, b in zip(*((t,) if type(t) is torch.Tensor else t for t in (got, want)), strict=True):
            assert torch.equal(a, b) and a.dtype is b.dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_kinds_that_depend_on_the_length_stay(family):
    assert fused._fusion(rotary(family, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})) is None


SETTINGS = {
    "plain": {},
    "yarn": {"rope_parameters": YARN},
    "queries in one": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "eight heads": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "ten heads": {"num_attention_heads": 10, "num_key_value_heads": 10, "hidden_size": 160},
    "wide values": {"v_head_dim": 48},
    "no groups": {"n_group": 1, "topk_group": 1},
}


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_agrees_with_itself_unfused(tmp_path, over_latents, family, changes, dtype):
    model = int4moe_ipex.load(checkpoint(tmp_path, family, **changes), dtype=dtype, backend="native")
    parts = {"RMSNorm", "RotaryEmbedding", "TopkRouter", "MLP", "Attention"}
    assert {FAMILIES[family] + part for part in parts} <= set(model.int4moe_report.fused)
    shapes = [(1, 5), (2, 2), (7, 12), (32, 3)]
    with module_by_module(model):
        ours = [logits_of(model, *shape, steps=4) for shape in shapes]
    assert over_latents == [rows for rows, _ in shapes for _ in range(8)]
    unfuse(model)
    stock = [logits_of(model, *shape, steps=4) for shape in shapes]
    for a, b in zip(ours, stock):
        assert not torch.equal(a, b)  # they did run
        assert relative(a, b) < BOUND[dtype]


def hook(model):
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: 2 * out)


def of_attention(change):
    return lambda model: [change(layer.self_attn) for layer in model.model.layers]


def replace(attn):
    attn.kv_b_proj = torch.nn.Sequential(attn.kv_b_proj)


LEFT = {
    "other widths": ({"kv_lora_rank": 16}, lambda model: None),
    "halves that are turned": ({"rope_interleave": False}, lambda model: None),
    "odd widths": ({"qk_nope_head_dim": 24, "qk_rope_head_dim": 8}, lambda model: None),
    "a hook on kv_b_proj": ({}, hook),
    "another kv_b_proj": ({}, of_attention(replace)),
    "a forward of its own": ({}, of_attention(lambda a: setattr(a.kv_b_proj, "forward", a.kv_b_proj.forward))),
    "sdpa": ({}, lambda model: setattr(model.config, "_attn_implementation", "sdpa")),
    "eager": ({}, lambda model: setattr(model.config, "_attn_implementation", "eager")),
}


@pytest.mark.parametrize("changes, change", LEFT.values(), ids=LEFT)
def test_what_is_expanded_as_transformers_does(tmp_path, over_latents, changes, change):
    model = int4moe_ipex.load(checkpoint(tmp_path, "deepseek_v3", **changes), dtype="float32")
    change(model)
    ours = logits_of(model, rows=2)
    assert not over_latents
    unfuse(model)
    assert relative(ours, logits_of(model, rows=2)) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_chunks_and_float16(tmp_path, over_latents, family, dtype):
    model = int4moe_ipex.load(checkpoint(tmp_path, family), dtype=dtype)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0

    @torch.inference_mode()
    def run():
        past = {cache_keyword(): growing_cache(model), "use_cache": True}
        first = model(tokens(2, 7), attention_mask=mask[:, :7], **past).logits
        second = model(tokens(2, 4), attention_mask=mask[:, :11], **past).logits
        return torch.cat([first, second, model(tokens(2, 1), attention_mask=mask, **past).logits], dim=1)[1:]

    ours = run()
    assert not over_latents
    unfuse(model)
    assert relative(ours, run()) < BOUND[dtype]
    half = int4moe_ipex.load(tmp_path, dtype="float16")
    with torch.inference_mode():
        ours = logits_of(half)
        unfuse(half)
        assert torch.equal(ours, logits_of(half)) and not over_latents


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_change_are_noticed(tmp_path, over_latents, family):
    model = int4moe_ipex.load(checkpoint(tmp_path, family))
    for layer in model.model.layers:
        old = layer.self_attn.kv_b_proj
        new = torch.nn.Linear(old.in_features, old.out_features, bias=False, dtype=torch.bfloat16)
        new.__class__ = fused.FusedLinear.over(torch.nn.Linear)
        layer.self_attn.kv_b_proj = new.requires_grad_(False)

    def changed(weight):
        with torch.no_grad():
            weight.mul_(-1.5)

    def moved(weight):
        weight.data = weight.flip(0)

    def run():
        with module_by_module(model):
            return logits_of(model)

    seen = [run()]
    for change in (changed, moved):
        for layer in model.model.layers:
            change(layer.self_attn.kv_b_proj.weight)
        seen.append(run())
        assert relative(seen[-1], seen[-2]) > 0.05
    assert len(over_latents) == 36
    for name in ("kv_b_proj", "kv_a_layernorm"):
        for layer in model.model.layers:
            getattr(layer.self_attn, name).weight.requires_grad_(True)
        with torch.enable_grad():
            one_more.__wrapped__(model)
        assert len(over_latents) == 36
        for layer in model.model.layers:
            getattr(layer.self_attn, name).weight.requires_grad_(False)
    unfuse(model)
    assert relative(seen[-1], logits_of(model)) < 3e-2


def test_gradients_reach_a_projection(tmp_path):
    model = int4moe_ipex.load(checkpoint(tmp_path, "deepseek_v3"), dtype="float32")
    attn = model.model.layers[0].self_attn
    attn.q_b_proj, attn.o_proj = torch.nn.Linear(32, 4 * 48, bias=False), torch.nn.Linear(4 * 16, 64)
    x = torch.randn(1, 1, 64)
    embeddings = model.model.rotary_emb(x, torch.tensor([[0]]))
    ours, _ = attn(x, position_embeddings=embeddings, attention_mask=None)
    ours.sum().backward()
    assert attn.q_b_proj.weight.grad is not None
    unfuse(model)
    theirs, _ = attn(x, position_embeddings=embeddings, attention_mask=None)
    assert relative(ours.detach(), theirs.detach()) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_of_any_origin(tmp_path, over_latents, family):
    model = int4moe_ipex.load(checkpoint(tmp_path, family))
    model.model.layers[0].register_forward_hook(lambda *args: None)  # steps go through the modules
    want = logits_of(model, rows=2)
    assert torch.equal(logits_of(model, rows=2, cache=DynamicCache(config=model.config)), want)

    @torch.inference_mode()
    def cropped(crop):
        cache = growing_cache(model)
        past = {cache_keyword(): cache, "use_cache": True}
        model(tokens(2, 5), **past)
        for t in tokens(2, 6).split(1, dim=1)[:3]:
            model(t, **past)
        crop(cache)
        return torch.cat([model(t, **past).logits for t in tokens(2, 6).split(1, dim=1)[3:]], dim=1)

    assert torch.equal(cropped(lambda cache: None), want[:, 3:])

    def longer(cache):
        model(tokens(2, 1), **{cache_keyword(): cache, "use_cache": True})
        cache.crop(-1)

    assert torch.equal(cropped(longer), want[:, 3:])
    assert torch.equal(cropped(lambda cache: cache.reorder_cache(torch.tensor([0, 1]))), want[:, 3:])

    def cloned(cache):
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    assert torch.equal(cropped(cloned), want[:, 3:]) and over_latents


def test_latents_lie_beside_what_is_turned(tmp_path):
    model = int4moe_ipex.load(checkpoint(tmp_path, "deepseek_v3"))
    cache = growing_cache(model)
    with torch.inference_mode():
        model(tokens(2, 5), **{cache_keyword(): cache, "use_cache": True})
    for layer in cache.layers:
        keys, values = layer.keys, layer.values
        assert keys.shape == (2, 1, 5, 32) and values.shape == (2, 1, 5, 16)
        assert keys.stride() == values.stride() and keys.data_ptr() + 32 * 2 == values.data_ptr()
    plain = growing_cache(int4moe_ipex.load(checkpoint(tmp_path / "qwen", "qwen3_moe")))
    plain.update(torch.ones(1, 1, 3, 16), torch.ones(1, 1, 3, 16), 0)
    assert plain.layers[0].keys.stride(-2) == 16


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_of_a_server_have_the_bits_of_each_alone(tmp_path, family, backend):
    model = int4moe_ipex.load(checkpoint(tmp_path, family), backend=backend)
    batch = BatchModel(model, 4)
    prompts = [list(range(3, 3 + n)) for n in (1, 7, 20)]
    with torch.inference_mode():
        caches = [prefill(model, prompt)[1] for prompt in prompts]
        for step in range(3):
            positions = torch.tensor([len(p) + step for p in prompts])
            logits = batch.step(torch.full((3,), 9), positions, caches)
        for row, prompt in enumerate(prompts):
            cache = prefill(model, prompt)[1]
            for step in range(3):
                alone = batch.step(torch.tensor([9]), torch.tensor([len(prompt) + step]), [cache])
            assert torch.equal(alone[0], logits[row])


@pytest.mark.parametrize("count, heads, rows, columns", [(1, 1, 16, 32), (3, 5, 40, 64), (70, 3, 512, 128)])
@pytest.mark.parametrize("threads", [1, 3])
def test_head_products(count, heads, rows, columns, threads):
    torch.manual_seed(7)
    x = torch.randn(count, heads, columns + 8, dtype=torch.bfloat16)[..., :columns]
    w = torch.randn(heads, rows, columns, dtype=torch.bfloat16)
    y = torch.full((count, heads, rows + 5), 7.0, dtype=torch.bfloat16)
    out = y[..., :rows]

    def run(x, out):
        views = x.data_ptr(), x.stride()[:2], w.data_ptr(), out.data_ptr(), out.stride()[:2]
        native._native.head_linear(len(x), heads, rows, columns, *views, core_calls.wide(), threads)

    run(x, out)
    want = torch.einsum("thk,hnk->thn", x.double(), w.double())
    assert relative(out, want) < 3e-3 and (y[..., rows:] == 7).all()
    for t in range(count):
        alone = torch.empty(1, heads, rows, dtype=torch.bfloat16)
        run(x[t : t + 1], alone)
        assert torch.equal(alone[0], out[t])
