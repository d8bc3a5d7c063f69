"""A checkpoint written again as compressed-tensors holds the same weights, bit for bit, and computes the same."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import int4moe_ipex
from int4moe_ipex import formats
from int4moe_ipex.canonical import CanonicalWeight
from int4moe_ipex.checkpoint.files import Checkpoint
from int4moe_ipex.config import Config
from int4moe_ipex.errors import FormatError, StoreError
from int4moe_ipex.models import export
from int4moe_ipex.models.stored import write_store
from int4moe_ipex.verification import differences
from tests import builders
from tests.models.tiny import stock_model, write_checkpoint
from tests.real import EXAMPLE, checkpoints


def assert_same(source, out):
    old, new = Checkpoint.open(source), Checkpoint.open(out)
    assert new.quantization["quant_method"] == "compressed-tensors" and new.warnings == []
    infos, written = formats.describe(old), formats.describe(new)
    assert set(written) == set(infos)
    for name, info in infos.items():
        assert differences(name, formats.read_linear(new, written[name]), formats.read_linear(old, info)) == []
    linears = {tensor for info in infos.values() for tensor in info.tensors.values()}
    for name in set(old.headers) - linears:
        assert torch.equal(new.tensor(name), old.tensor(name))
    return written


@pytest.mark.parametrize("path", [p for p in checkpoints() if "bf16" not in p.name], ids=lambda path: path.name)
def test_real_checkpoints(tmp_path, path):
    written = export.write_compressed_tensors(path, tmp_path / "ct")
    infos = assert_same(path, tmp_path / "ct")
    assert written.layouts["int4"] == sum(info.is_int4 for info in infos.values())
    assert bool(written.warnings) == ("desc-act" in path.name)
    assert list(Checkpoint.open(tmp_path / "ct").quantization["config_groups"]) == ["group_0"]
    settings = Config.load({}, environ={}, backend="reference", dtype="float32")
    tokens = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        want, have = (int4moe_ipex.load(p, settings)(input_ids=tokens).logits for p in (path, tmp_path / "ct"))
    assert torch.equal(have, want)


def test_shards_have_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 1 << 20)
    export.write_compressed_tensors(EXAMPLE, tmp_path / "ct")
    index = json.loads((tmp_path / "ct" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "ct").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    assert_same(EXAMPLE, tmp_path / "ct")


def test_eight_bit_linears_become_what_they_mean(tmp_path):
    import numpy as np

    source = builders.linear(np.random.default_rng(0), 16, 64, 32, True, bits=8)
    label = builders.gptq_label(bits=8, sym=True, group_size=32)
    builders.one_linear(tmp_path / "c", builders.gptq(source, "v1"), label)
    (tmp_path / "c" / "config.json").write_text(json.dumps({"quantization_config": label}))
    export.write_compressed_tensors(tmp_path / "c", tmp_path / "ct")
    new = Checkpoint.open(tmp_path / "ct")
    assert torch.equal(new.tensor("m.weight"), source.weight) and new.quantization is None
    with pytest.raises(FormatError, match="has no quantized linear; there is nothing to convert"):
        export.write_compressed_tensors(tmp_path / "ct", tmp_path / "again")


def test_a_tail_group_is_refused_by_name_and_leaves_nothing(tmp_path, monkeypatch):
    read = formats.read_linear

    def with_tail(checkpoint, info):
        weight, bias = read(checkpoint, info)
        if not isinstance(weight, CanonicalWeight):
            return weight, bias
        groups = -(-weight.in_features // 96)
        return dataclasses.replace(weight, group_size=96, scales=weight.scales[:, :1].repeat(1, groups)), bias

    monkeypatch.setattr(formats, "read_linear", with_tail)
    with pytest.raises(FormatError, match=r"^model\.layers\.0\..*: 256 input features in groups of 96 leave a tail"):
        export.write_compressed_tensors(EXAMPLE, tmp_path / "ct")
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_not_exported(tmp_path):
    write_store(EXAMPLE, tmp_path / "s", Config.load({}, environ={}))
    with pytest.raises(StoreError, match="is a store; give the checkpoint"):
        export.write_compressed_tensors(tmp_path / "s", tmp_path / "ct")


def test_mixed_groups_are_labelled_by_module(tmp_path):
    write_checkpoint(stock_model("qwen3_moe"), "qwen3_moe", tmp_path / "c")
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj"
    tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"][:, :1].contiguous()
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    weights = {**groups["group_0"]["weights"], "strategy": "channel", "group_size": None}
    groups["group_1"] = {"targets": [name], "weights": weights}
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "c" / "model.safetensors")
    export.write_compressed_tensors(tmp_path / "c", tmp_path / "ct")
    infos = assert_same(tmp_path / "c", tmp_path / "ct")
    assert infos[name].group_size == 64 and infos["model.layers.1.mlp.experts.2.up_proj"].group_size == 16
