"""A checkpoint whose layer mixes 4-bit, 8-bit and 16-bit experts, loaded whole: logits of stock transformers."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import int4moe_ipex
from tests import builders

IDS = torch.tensor([[1, 5, 9, 33, 60, 7, 7, 2, 41, 13, 17, 22, 63, 0]])
EXPERTS = "model.layers.0.mlp.experts"


def make(rng, module, n, k):
    """Expert 0 has 8 bits, expert 2 has 8 bits in down alone, expert 3 is act-ordered; expert 1 becomes 16-bit."""
    eight = ".experts.0." in module or module.endswith("experts.2.down_proj")
    scale = 2**-10 if eight else 2**-6
    return builders.linear(rng, n, k, scale=scale, bits=8 if eight else 4, act_order=".experts.3." in module)


def sixteen_bit(linears):
    def change(tensors):
        for name in [name for name in tensors if name.startswith(f"{EXPERTS}.1.")]:
            del tensors[name]
        for name, source in linears.items():
            if ".experts.1." in name:
                tensors[f"{name}.weight"] = source.weight.bfloat16()

    return change


def written(folder):
    label = builders.gptq_label(
        desc_act=True,
        dynamic={
            r"+:.*\.experts\.0\.": {"bits": 8},
            r".*\.experts\.2\.down_proj": {"bits": 8},
            r"-:.*\.experts\.1\.": {},
            r"-:.*\.self_attn\.": {},
        },
    )
    config = builders.qwen3_moe_config(moe_intermediate_size=64, num_experts_per_tok=3)
    linears = {}

    def remember(rng, module, n, k):
        linears[module] = make(rng, module, n, k)
        return linears[module]

    builders.moe_checkpoint(folder, label, make=remember, config=config, change=lambda t: sixteen_bit(linears)(t))
    return linears


def stock(folder, linears):
    """transformers' own model in float32, its experts set to the truth."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    tensors = builders.qwen3_moe_rest(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    experts = model.get_submodule(EXPERTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(EXPERTS):
                parameter.copy_(tensors[name])
        for expert in range(config["num_experts"]):
            gate, up, down = (linears[f"{EXPERTS}.{expert}.{p}"].weight for p in ("gate_proj", "up_proj", "down_proj"))
            experts.gate_up_proj[expert] = torch.cat((gate, up))
            experts.down_proj[expert] = down
    return model


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_logits_equal_stock_transformers(tmp_path, backend):
    linears = written(tmp_path)
    # 4-bit codes times a power of two are exact in bfloat16, so the 16-bit expert loses nothing either
    assert all(torch.equal(s.weight.bfloat16().float(), s.weight) for n, s in linears.items() if ".experts.1." in n)
    with torch.inference_mode():
        expected = stock(tmp_path, linears)(IDS).logits
        model = int4moe_ipex.load(tmp_path, backend=backend, dtype="float32")
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    layer = model.get_submodule(EXPERTS)
    assert sorted(layer.composed) == ["0", "1", "2"]
    assert [pack.ids for pack in layer.packs] == [(3,)]
    assert layer.composed["1"].up.dense_weight.dtype == torch.float32  # float32 activations ask for it
    assert model.int4moe_report.warnings == []


def test_what_inspect_says_of_the_mixture(tmp_path):
    from int4moe_ipex.models.summary import summarize

    written(tmp_path)
    summary = summarize(tmp_path)
    assert summary.problems == [] and summary.layers[0].experts == 4
    kinds = {(group.format, group.bits) for group in summary.layers[0].modules if ".experts." in f".{group.name}"}
    assert kinds == {("gptq", 4), ("gptq", 8), ("dense", 16)}
