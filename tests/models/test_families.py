"""Every family against stock transformers with the same weights: logits, greedy ids, shared experts, routers."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import int4moe_ipex
from int4moe_ipex.errors import MissingTensorsError, UnsupportedModelError
from int4moe_ipex.models import attention
from int4moe_ipex.models.cache import cache_keyword, growing_cache
from int4moe_ipex.models.families import FAMILIES as SUPPORTED
from int4moe_ipex.models.families import REFUSED, family_of
from int4moe_ipex.models.register import is_ours
from int4moe_ipex.models.summary import summarize
from tests.models.tiny import FAMILIES, GATED, MIXTRAL, stock_model, write_checkpoint

IDS = torch.tensor([[1, 5, 9, 33, 60, 7, 7, 2, 41, 13]])


def logits(model):
    with torch.inference_mode():
        return model(input_ids=IDS).logits.float()


def test_every_supported_family_is_tested():
    assert set(FAMILIES) == set(SUPPORTED)


@pytest.fixture(params=["reference", "native"])
def backend(request):
    if request.param == "native" and not attention.available():
        pytest.skip("no native core here, or a CPU without AVX2")
    return request.param


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_equal_stock_transformers(family, backend, tmp_path):
    stock = stock_model(family)
    write_checkpoint(stock, family, tmp_path)
    model = int4moe_ipex.load(tmp_path, backend=backend, dtype="float32")
    expected = logits(stock)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    new = stock.generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), new)
    torch.testing.assert_close(step_by_step(model), expected, rtol=1e-4, atol=1e-4)
    assert model.config.model_type == stock.config.model_type
    assert any("experts" in name for names in model.int4moe_report.paths.values() for name in names)


SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize("family", ["gpt_oss", "mimo_v2_flash", "exaone_moe", "afmoe", "dots1"])
def test_windows_shorter_than_the_text(family, backend, tmp_path):
    stock = stock_model(family, **SLIDING)
    write_checkpoint(stock, family, tmp_path)
    model = int4moe_ipex.load(tmp_path, backend=backend, dtype="float32")
    expected = logits(stock)
    wide = stock_model(family, **SLIDING | {"sliding_window": 64})
    write_checkpoint(wide, family, tmp_path / "wide")
    torch.testing.assert_close(logits(wide)[:, :4], expected[:, :4], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(wide)[:, 4:], expected[:, 4:], atol=1e-3)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step_by_step(model), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def step_by_step(model):
    """The logits of all positions, one token at a time through a cache."""
    past = {cache_keyword(): growing_cache(model), "use_cache": True}
    return torch.cat([model(input_ids=token, **past).logits.float() for token in IDS.split(1, dim=1)], dim=1)


@pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bfloat16_is_as_near_as_transformers_own_modules(family, tmp_path):
    """The median over tokens: where the choice of experts flips, one of them is far off."""
    stock = stock_model(family)
    write_checkpoint(stock, family, tmp_path)
    expected = logits(stock)

    def error(ours):
        return ((ours - expected).norm(dim=-1) / expected.norm(dim=-1)).median()

    theirs = error(logits(int4moe_ipex.load(tmp_path, backend="reference", dtype="bfloat16")))
    model = int4moe_ipex.load(tmp_path, backend="native", dtype="bfloat16")
    assert model.int4moe_report.fused
    for ours in (logits(model), step_by_step(model)):
        assert error(ours) < 1.5 * theirs + 0.01


# Of the others it has no causal language model by their model_type or, of gpt_oss, no names for single experts.
READ_BY_TRANSFORMERS = [f for f, tiny in FAMILIES.items() if not tiny.renamed_type and f != "gpt_oss"]


@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_names_are_those_that_transformers_reads(family, tmp_path):
    """The names that these tests give to tensors, but for those of int4 ones."""
    stock = stock_model(family)
    write_checkpoint(stock, family, tmp_path, dense=True)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) <= set(FAMILIES[family].unread)
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_dense_tensors_have_the_dtypes_of_transformers_loader(family, dtype, tmp_path):
    stock = stock_model(family)
    write_checkpoint(stock, family, tmp_path / "dense", dense=True)
    write_checkpoint(stock, family, tmp_path / "int4")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=dtype).state_dict()
    ours = int4moe_ipex.load(tmp_path / "int4", backend="reference", dtype=dtype).state_dict()
    assert ours and {name: tensor.dtype for name, tensor in ours.items()} == {name: theirs[name].dtype for name in ours}


@pytest.mark.parametrize("renamed", [True, False])
@pytest.mark.parametrize("family", [family for family, tiny in FAMILIES.items() if tiny.names == MIXTRAL])
def test_other_names_of_projections(family, renamed, tmp_path):
    """AutoRound and llm-compressor: the block's old name, the projections' new ones. And transformers' own."""
    stock = stock_model(family)
    write_checkpoint(stock, family, tmp_path, naming=(FAMILIES[family].renames if renamed else (), GATED))
    model = int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "hunyuan_v1_moe", "phimoe", "afmoe", "ernie4_5_moe"])
def test_quantized_router(family, tmp_path):
    stock = stock_model(family)
    write_checkpoint(stock, family, tmp_path, router=True)
    model = int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-4)


def test_tied_head_without_a_copy(tmp_path):
    stock = stock_model("qwen3_moe", tie_word_embeddings=True)
    write_checkpoint(stock, "qwen3_moe", tmp_path)
    model = int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("differs", [True, False])
def test_tied_head_with_a_copy(tmp_path, differs):
    stock = stock_model("qwen3_moe", tie_word_embeddings=True)
    expected = None
    write_checkpoint(stock, "qwen3_moe", tmp_path)
    expected = logits(stock)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + float(differs)
    save_file(tensors, tmp_path / "model.safetensors")
    model = int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert any("lm_head.weight differs" in w for w in model.int4moe_report.warnings) == differs


def test_bfloat16_keeps_what_transformers_keeps_in_float32(tmp_path):
    stock = stock_model("deepseek_v3")
    write_checkpoint(stock, "deepseek_v3", tmp_path)
    model = int4moe_ipex.load(tmp_path, backend="reference", dtype=torch.bfloat16)
    gate = model.model.layers[1].mlp.gate
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(gate.e_score_correction_bias, stock.model.layers[1].mlp.gate.e_score_correction_bias)
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert not logits(model).isnan().any()


def test_extra_prediction_layers_are_left_unread(tmp_path):
    stock = stock_model("deepseek_v3")
    write_checkpoint(stock, "deepseek_v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(64, 128)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    tensors["model.layers.1.mlp.experts.9.up_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensorsError, match=r"experts\.9\.up_proj\.weight: unknown"):
        int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# (family, a tensor that is taken away)
MISSING = [
    ("minimax_m2", "model.layers.1.block_sparse_moe.e_score_correction_bias"),
    ("minimax_m2", "model.layers.0.block_sparse_moe.experts.3.w3.weight_packed"),
    ("ernie4_5_moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias"),
    ("kimi_k25", "language_model.model.layers.1.mlp.experts.7.down_proj.weight_scale"),
    ("qwen3_next", "model.layers.0.linear_attn.A_log"),
    ("qwen3_5_moe", "model.language_model.layers.0.linear_attn.in_proj_qkv.weight_packed"),
    ("mimo_v2_flash", "model.layers.1.self_attn.attention_sink_bias"),
    ("phimoe", "model.layers.0.block_sparse_moe.gate.weight"),
    ("qwen2_moe", "model.layers.0.self_attn.q_proj.bias"),
    ("gpt_oss", "model.layers.1.mlp.experts.2.up_proj.bias"),
]


@pytest.mark.parametrize(("family", "name"), MISSING)
def test_missing_and_unknown_tensors_have_their_published_names(family, name, tmp_path):
    write_checkpoint(stock_model(family), family, tmp_path)
    extra = f"{name.rpartition('.')[0]}s.extra"
    edit(tmp_path, lambda tensors: (tensors.pop(name), tensors.update({extra: torch.zeros(1)})))
    with pytest.raises(MissingTensorsError) as error:
        int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    assert sorted(line.partition(":")[0] for line in error.value.problems) == sorted([name, extra])


def test_kimi_k2_of_another_architecture_is_refused(tmp_path):
    write_checkpoint(stock_model("kimi_k2"), "kimi_k2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["KimiLinearForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match=r"kimi_k2.*DeepseekV3ForCausalLM.*KimiLinear"):
        int4moe_ipex.load(tmp_path)


@pytest.mark.parametrize("family", ["kimi_k25", "qwen3_5_moe"])
def test_quantization_may_be_said_of_the_language_model_alone(family, tmp_path):
    write_checkpoint(stock_model(family), family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_ours(tmp_path)
    model = int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    assert not hasattr(model.config, "quantization_config")
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_families_that_are_asked_for_say_why_not(family):
    with pytest.raises(UnsupportedModelError, match=re.escape(f"{family!r} is not supported: {REFUSED[family]}")):
        family_of({"model_type": family})


def test_gpt_oss_of_other_tools_is_refused(tmp_path):
    write_checkpoint(stock_model("gpt_oss"), "gpt_oss", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "compressed-tensors"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"gpt_oss.*auto-round.*compressed-tensors"):
        int4moe_ipex.load(tmp_path)
    assert any("auto-round" in problem for problem in summarize(tmp_path).problems)


def test_experts_of_another_kind_are_refused(tmp_path, monkeypatch):
    """Should transformers change what a family's experts compute."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    stock = stock_model("qwen3_moe")
    write_checkpoint(stock, "qwen3_moe", tmp_path)
    made = modeling_qwen3_moe.Qwen3MoeExperts.__init__

    def transposed(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.is_transposed = True

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeExperts, "__init__", transposed)
    with pytest.raises(UnsupportedModelError, match=r"Qwen3MoeExperts.*is_transposed"):
        int4moe_ipex.load(tmp_path)


@pytest.mark.parametrize("model_type", ["llama4", "llama", None])
def test_other_families_are_refused_by_name(tmp_path, model_type):
    stock = stock_model("qwen3_moe")
    write_checkpoint(stock, "qwen3_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = model_type
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=repr(model_type)):
        int4moe_ipex.load(tmp_path)
