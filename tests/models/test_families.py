"""Every family against stock transformers with the same weights: logits, greedy ids, shared experts, routers."""

import pytest
import torch

import int4moe_ipex
from int4moe_ipex.errors import MissingTensorsError, UnsupportedModelError
from int4moe_ipex.models.families import FAMILIES as SUPPORTED
from tests.models.tiny import FAMILIES, stock_model, write_checkpoint

IDS = torch.tensor([[1, 5, 9, 33, 60, 7, 7, 2, 41, 13]])


def logits(model):
    with torch.inference_mode():
        return model(input_ids=IDS).logits.float()


def test_every_supported_family_is_tested():
    assert set(FAMILIES) == set(SUPPORTED)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_equal_stock_transformers(family, tmp_path):
    stock = stock_model(family)
    write_checkpoint(stock, family, tmp_path)
    model = int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-4)
    expected = stock.generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), expected)
    assert any("experts" in name for names in model.int4moe_report.paths.values() for name in names)


@pytest.mark.parametrize("experts", ["mlp.experts", "block_sparse_moe.experts"])
def test_mixtral_in_its_other_namings(tmp_path, experts):
    """transformers' own names; and AutoRound's, which mix the block's old name with the projections' new ones."""
    stock = stock_model("mixtral")
    write_checkpoint(stock, "mixtral", tmp_path, naming=(experts, ("gate_proj", "up_proj", "down_proj")))
    model = int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
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
    from safetensors.torch import load_file, save_file

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
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(64, 128)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    tensors["model.layers.1.mlp.experts.9.up_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensorsError, match=r"experts\.9\.up_proj\.weight: unknown"):
        int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")


@pytest.mark.parametrize("model_type", ["gpt_oss", "llama", None])
def test_other_families_are_refused_by_name(tmp_path, model_type):
    stock = stock_model("qwen3_moe")
    write_checkpoint(stock, "qwen3_moe", tmp_path)
    import json

    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = model_type
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=repr(model_type)):
        int4moe_ipex.load(tmp_path)
