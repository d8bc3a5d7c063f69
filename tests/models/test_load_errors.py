"""Every tensor at fault is named, all at once, and before anything is read or packed."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import int4moe_ipex
from int4moe_ipex import formats
from int4moe_ipex.errors import BackendError, CheckpointError, FormatError, MissingTensorsError, UnsupportedModelError
from tests.models.tiny import stock_model, write_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    write_checkpoint(stock_model("qwen3_moe"), "qwen3_moe", tmp_path)
    return tmp_path


@pytest.fixture
def nothing_is_read(monkeypatch):
    def read(*args):
        raise AssertionError("a weight was read before the headers were checked")

    monkeypatch.setattr(formats, "read_linear", read)


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


EXPERT = "model.layers.1.mlp.experts.3"


def test_every_kind_of_problem_is_named_at_once(checkpoint, nothing_is_read):
    tensors_gone = [f"{EXPERT}.up_proj.weight_scale", f"{EXPERT}.down_proj.weight_packed"]
    modules_gone = ["model.layers.0.mlp.experts.0.gate_proj", "model.layers.1.self_attn.k_proj"]
    misshaped = "model.layers.0.mlp.experts.1.up_proj.weight_scale"

    def edit(tensors):
        for name in list(tensors):
            if name in (*tensors_gone, "model.norm.weight") or name.startswith(tuple(modules_gone)):
                del tensors[name]
        tensors[misshaped] = tensors[misshaped][:, :1].clone()
        tensors["model.layers.1.mlp.experts.9.up_proj.weight"] = torch.zeros(32, 64)

    change(checkpoint, edit)
    duplicated = "model.layers.1.mlp.experts.2.up_proj.weight_packed"
    kept = load_file(checkpoint / "model.safetensors")[duplicated]
    save_file({duplicated: kept}, checkpoint / "other.safetensors")
    with pytest.raises(MissingTensorsError) as error:
        int4moe_ipex.load(checkpoint)
    expected = [*tensors_gone, *modules_gone, misshaped, duplicated, "model.norm.weight"]
    expected.append("model.layers.1.mlp.experts.9.up_proj.weight")
    named = [line.partition(":")[0].removesuffix(".weight") for line in error.value.problems]
    assert sorted(named) == sorted(name.removesuffix(".weight") for name in expected)


def test_missing_modules_are_all_named(checkpoint, nothing_is_read):
    prefixes = [f"{EXPERT}.up_proj", "model.layers.0.self_attn.k_proj"]
    change(
        checkpoint, lambda t: [t.pop(n) for n in list(t) if n.startswith(tuple(prefixes)) or n == "model.norm.weight"]
    )
    with pytest.raises(MissingTensorsError) as error:
        int4moe_ipex.load(checkpoint)
    assert len(error.value.problems) == 3
    for name in (*prefixes, "model.norm.weight"):
        assert any(name in line and "missing" in line for line in error.value.problems)


def test_unknown_tensors_are_all_named(checkpoint, nothing_is_read):
    extra = {"model.layers.1.mlp.experts.4.up_proj.weight": torch.zeros(32, 64), "model.extra": torch.zeros(1)}
    change(checkpoint, lambda t: t.update(extra))
    with pytest.raises(MissingTensorsError) as error:
        int4moe_ipex.load(checkpoint)
    assert sorted(line.partition(":")[0] for line in error.value.problems) == sorted(extra)


def test_wrong_shapes_are_named_with_both_shapes(checkpoint, nothing_is_read):
    config = json.loads((checkpoint / "config.json").read_text())
    config["moe_intermediate_size"] = 48
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(MissingTensorsError, match=r"experts\.0\.up_proj.*\[32, 64\].*\[48, 64\]"):
        int4moe_ipex.load(checkpoint)


def test_duplicated_expert_in_two_files(checkpoint, nothing_is_read):
    tensors = load_file(checkpoint / "model.safetensors")
    twice = {n: t for n, t in tensors.items() if n.startswith(EXPERT)}
    save_file(twice, checkpoint / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.3"):
        int4moe_ipex.load(checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_name_expert_and_index(checkpoint, value):
    def edit(tensors):
        tensors[f"{EXPERT}.up_proj.weight_scale"][5, 1] = value

    change(checkpoint, edit)
    with pytest.raises(FormatError, match=rf"{EXPERT}\.up_proj\.weight_scale.*5.*1"):
        int4moe_ipex.load(checkpoint, backend="reference")


def test_pickles_are_refused_unopened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(CheckpointError, match="safetensors"):
        int4moe_ipex.load(tmp_path)


def test_forced_backend_that_cannot_run_names_the_module(checkpoint):
    with pytest.raises(BackendError, match="group_size"):
        int4moe_ipex.load(checkpoint, backend="torch")


def test_packed_models_are_not_saved_without_their_experts(checkpoint, tmp_path):
    model = int4moe_ipex.load(checkpoint, backend="reference")
    with pytest.raises(UnsupportedModelError, match="int4moe convert"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": {}},
        {"rms_norm_eps": "x"},
        {"rope_parameters": {"rope_type": "frobnicate", "rope_theta": 1.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"dtype": "float31"},
        {"id2label": 3},
    ],
    ids=str,
)
def test_values_that_transformers_refuses_name_the_file(checkpoint, changes):
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError) as caught:
        int4moe_ipex.load(checkpoint)
    message = str(caught.value)
    assert message.startswith(f"{file}: transformers makes no model of it: ") and "\n" not in message


@pytest.mark.parametrize("model_type", [["qwen3_moe"], None, 1, "qwen99_moe"])
def test_model_types_that_are_none(checkpoint, model_type):
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type}))
    with pytest.raises(UnsupportedModelError, match="is not supported"):
        int4moe_ipex.load(checkpoint)
