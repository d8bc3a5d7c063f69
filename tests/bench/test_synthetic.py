"""The synthetic checkpoint writer: published names, exact shapes, sane values, streaming shards."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

import int4moe_ipex
from int4moe_ipex.bench.shapes import LAYERS, MODELS, layer_shape, model_config
from int4moe_ipex.bench.synthetic import Scheme, write_checkpoint
from int4moe_ipex.errors import ConfigError
from tests.models.tiny import COMMON, FAMILIES

TINY = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}


def read(path):
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            tensors |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    return tensors


def nibbles(words: torch.Tensor) -> torch.Tensor:
    return torch.stack([(words >> (4 * i)) & 15 for i in range(8)], dim=-1)


def test_gptq_has_every_tensor_of_an_expert_and_v1_zeros(tmp_path):
    size = write_checkpoint(tmp_path, TINY, Scheme("gptq", 32))
    tensors = read(tmp_path)
    prefix = "model.layers.1.mlp.experts.3"
    assert tensors[f"{prefix}.gate_proj.qweight"].shape == (8, 32)
    assert tensors[f"{prefix}.gate_proj.qzeros"].shape == (2, 4)
    assert tensors[f"{prefix}.down_proj.scales"].shape == (1, 64)
    assert set(nibbles(tensors[f"{prefix}.up_proj.qzeros"]).flatten().tolist()) == {7}
    assert tensors[f"{prefix}.gate_proj.g_idx"].tolist() == [0] * 32 + [1] * 32
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    assert "model.layers.0.self_attn.q_proj.qweight" in tensors and "lm_head.weight" in tensors
    assert size == sum(t.nbytes for t in tensors.values())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["quantization_config"]["sym"] is True


def test_asymmetric_zeros_and_act_order(tmp_path):
    write_checkpoint(tmp_path, TINY, Scheme("gptq", 32, asym=True, act_order=True))
    tensors = read(tmp_path)
    prefix = "model.layers.0.mlp.experts.0"
    assert set(nibbles(tensors[f"{prefix}.gate_proj.qzeros"]).flatten().tolist()) <= {5, 6, 7, 8}
    gate, up = (tensors[f"{prefix}.{n}_proj.g_idx"] for n in ("gate", "up"))
    other = tensors["model.layers.0.mlp.experts.1.gate_proj.g_idx"]
    assert torch.equal(gate, up) and not torch.equal(gate, other)
    assert gate.bincount().tolist() == [32, 32] and gate.tolist() != sorted(gate.tolist())


HEADS = {"gptq": "lm_head.qweight", "compressed-tensors": "lm_head.weight_packed"}


@pytest.mark.parametrize("format, tensor", HEADS.items())
def test_a_quantized_head_loads_as_int4(tmp_path, format, tensor):
    write_checkpoint(tmp_path, TINY | {"vocab_size": 304}, Scheme(format, 32, head=True))
    tensors = read(tmp_path)
    assert tensor in tensors and "lm_head.weight" not in tensors
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"].get("lm_head", True) is True
    model = int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    assert any("lm_head" in modules for modules in model.int4moe_report.paths.values())
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_awq_and_compressed_tensors_layouts(tmp_path):
    write_checkpoint(tmp_path / "awq", TINY, Scheme("awq", 32, asym=True))
    awq = read(tmp_path / "awq")["model.layers.0.mlp.experts.0.down_proj.qweight"]
    assert awq.shape == (32, 8)
    write_checkpoint(tmp_path / "ct", TINY, Scheme("compressed-tensors", -1, asym=True, act_order=True))
    ct = read(tmp_path / "ct")
    prefix = "model.layers.0.mlp.experts.0.up_proj"
    assert ct[f"{prefix}.weight_packed"].shape == (32, 8) and ct[f"{prefix}.weight_scale"].shape == (32, 1)
    assert ct[f"{prefix}.weight_zero_point"].shape == (4, 1) and ct[f"{prefix}.weight_shape"].tolist() == [32, 64]
    assert ct[f"{prefix}.weight_g_idx"].tolist() == [0] * 64


def test_shards_have_an_index_that_names_every_tensor(tmp_path):
    size = write_checkpoint(tmp_path, TINY, Scheme(), shard_bytes=30_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == size
    for file in files:
        with safe_open(tmp_path / file, "pt") as f:
            assert all(index["weight_map"][name] == file for name in f.keys())  # noqa: SIM118


def test_mixtral_has_its_published_names(tmp_path):
    config = {k: v for k, v in TINY.items() if k not in ("moe_intermediate_size", "head_dim", "num_experts")}
    write_checkpoint(tmp_path, config | {"model_type": "mixtral", "num_local_experts": 4}, Scheme())
    tensors = read(tmp_path)
    assert tensors["model.layers.0.block_sparse_moe.experts.3.w2.qweight"].shape == (16, 64)
    assert "model.layers.0.block_sparse_moe.gate.weight" in tensors


# family -> a tensor that only the published names have
PUBLISHED = {
    "minimax_m2": "model.layers.1.block_sparse_moe.experts.3.w2.qweight",
    "kimi_k2": "model.layers.1.mlp.experts.7.down_proj.qweight",
    "qwen3_next": "model.layers.0.linear_attn.in_proj_qkvz.qweight",
    "phimoe": "model.layers.0.block_sparse_moe.gate.weight",
    "mimo_v2_flash": "model.layers.1.self_attn.attention_sink_bias",
}


@pytest.mark.parametrize("family", [f for f, tiny in FAMILIES.items() if tiny.holder is None and f != "gpt_oss"])
def test_every_family_loads_and_is_finite(tmp_path, family):
    config = COMMON | FAMILIES[family].config | {"vocab_size": 304, "model_type": family}
    write_checkpoint(tmp_path, config, Scheme("gptq", 16))
    model = int4moe_ipex.load(tmp_path, backend="reference", dtype="float32")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[1, 5, 9, 33]])).logits
    assert 0.01 < logits.std() < 100


@pytest.mark.parametrize("family, tensor", PUBLISHED.items())
def test_published_names(tmp_path, family, tensor):
    config = COMMON | FAMILIES[family].config | {"vocab_size": 304, "model_type": family}
    write_checkpoint(tmp_path, config, Scheme("gptq", 16))
    assert tensor in read(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family


def test_any_id_of_the_vocabulary_decodes(tmp_path):
    from transformers import AutoTokenizer

    write_checkpoint(tmp_path, TINY, Scheme())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == TINY["vocab_size"]
    assert tokenizer.decode(tokenizer("def f(x):\n").input_ids) == "def f(x):\n"
    assert all(tokenizer.decode([i]) for i in (1, 255, 299))


def test_a_folder_that_holds_a_model_is_left_alone(tmp_path):
    write_checkpoint(tmp_path, TINY, Scheme())
    with pytest.raises(ConfigError, match="already holds"):
        write_checkpoint(tmp_path, TINY, Scheme())
    write_checkpoint(tmp_path, TINY, Scheme("awq"), overwrite=True)
    assert "model.layers.0.mlp.experts.0.up_proj.g_idx" not in read(tmp_path)


def test_impossible_schemes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no act-order"):
        Scheme("awq", act_order=True)
    with pytest.raises(ConfigError, match="head"):
        Scheme("awq", head=True)
    with pytest.raises(ConfigError, match="unknown format"):
        Scheme("marlin")
    with pytest.raises(ConfigError, match="by eights"):
        write_checkpoint(tmp_path, TINY | {"moe_intermediate_size": 36}, Scheme())


@pytest.mark.parametrize("name", [*MODELS, *LAYERS])
def test_every_named_shape_has_a_layer(name):
    shape = layer_shape(name)
    assert shape.top_k < shape.num_experts and shape.hidden_size % 32 == 0
    if name in MODELS:
        assert model_config(name)["hidden_size"] == shape.hidden_size


def test_shapes_given_by_sizes():
    shape = layer_shape("64x32x8x2")
    assert (shape.hidden_size, shape.moe_intermediate_size, shape.num_experts, shape.top_k) == (64, 32, 8, 2)
    assert shape.flops(3) == 2 * 3 * 2 * 3 * 64 * 32
    for bad in ("64x32x8", "64x32x2x8", "qwen"):
        with pytest.raises(ConfigError, match="unknown layer shape"):
            layer_shape(bad)
