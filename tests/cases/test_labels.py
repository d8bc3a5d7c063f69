"""Public cases 8 to 10: labels that over-match, quantized routers, missing tensors."""

import numpy as np
import pytest
import torch

import int4moe_ipex
from int4moe_ipex.canonical import DenseWeight, dequantize
from int4moe_ipex.checkpoint import Checkpoint
from int4moe_ipex.errors import MissingTensorsError
from int4moe_ipex.formats import describe, read_linear
from tests import builders


def test_case_8_stored_tensors_outrank_the_skip_list(tmp_path):
    """vllm#49539, sglang#20439: "model.layers.1" also hit layer 10, "gate" also hit gate_proj."""

    moe = builders.moe_checkpoint(
        tmp_path,
        builders.awq_label(modules_to_not_convert=["model.layers.1", "gate"]),
        builders.awq,
        config=builders.qwen3_moe_config(num_hidden_layers=12, num_experts=2),
        change=layer_1_in_16_bits,
    )
    checkpoint = Checkpoint.open(tmp_path)
    infos = describe(checkpoint)
    for name, source in moe.linears.items():
        weight, _ = read_linear(checkpoint, infos[name])
        if name.startswith("model.layers.1."):
            assert isinstance(weight, DenseWeight) and weight.weight.dtype == torch.bfloat16
            assert infos[name].warnings == ()
            continue
        assert infos[name].is_int4 and torch.equal(dequantize(weight), source.weight)
        hit = name.startswith(("model.layers.10.", "model.layers.11.")) or "gate_proj" in name
        assert bool(infos[name].warnings) == hit, name
    assert all(infos[f"model.layers.{layer}.mlp.gate"].format == "dense" for layer in range(12))


def layer_1_in_16_bits(tensors):
    for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts.")]:
        module, _, suffix = name.rpartition(".")
        stored = tensors.pop(name)
        if suffix == "qweight":
            k, words = stored.shape
            tensors[f"{module}.weight"] = torch.ones(words * 8, k, dtype=torch.bfloat16)


def test_case_9_quantized_router(tmp_path):
    """auto-round#1776: mlp.gate of 8 experts with qweight [8, 8], qzeros [2, 1], scales [2, 8]."""
    source = builders.linear(np.random.default_rng(0), 8, 64, symmetric=False)
    tensors = {f"model.layers.0.mlp.gate.{suffix}": tensor for suffix, tensor in builders.gptq(source).items()}
    stored = {name.rpartition(".")[2]: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert (stored["qweight"], stored["qzeros"], stored["scales"]) == ((8, 8), (2, 1), (2, 8))
    checkpoint = Checkpoint.open(builders.write(tmp_path, tensors, builders.gptq_label(sym=False)))
    weight, _ = read_linear(checkpoint, describe(checkpoint)["model.layers.0.mlp.gate"])
    assert torch.equal(dequantize(weight), source.weight)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal((x @ dequantize(weight).t()).topk(2).indices, (x @ source.weight.t()).topk(2).indices)


@pytest.mark.parametrize("suffix", ["scales", "qweight", "qzeros"])
def test_case_10_a_missing_tensor_fails_the_load(tmp_path, suffix):
    """GPTQModel#3077, vllm#45212: one missing tensor ran as zeros."""
    dropped = [f"model.layers.0.mlp.experts.{expert}.{projection}.{suffix}" for expert, projection in MISSING]
    builders.moe_checkpoint(tmp_path, change=lambda tensors: [tensors.pop(name) for name in dropped])
    with pytest.raises(MissingTensorsError) as caught:
        int4moe_ipex.load(tmp_path)
    assert [problem.split(":")[0] for problem in caught.value.problems] == dropped


MISSING = [(1, "down_proj"), (3, "up_proj")]


def test_case_10_a_missing_expert_fails_the_load(tmp_path):
    def change(tensors):
        for name in [name for name in tensors if ".experts.3.up_proj." in name]:
            del tensors[name]

    builders.moe_checkpoint(tmp_path, change=change)
    with pytest.raises(MissingTensorsError, match=r"model\.layers\.0\.mlp\.experts\.3\.up_proj"):
        int4moe_ipex.load(tmp_path)
