"""Opening a checkpoint folder: shards, indexes, configs, mapped tensors."""

import json
import os
import stat
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from int4moe_ipex.checkpoint import Checkpoint
from int4moe_ipex.errors import CheckpointError, MissingTensorsError, UnsupportedFormatError
from tests import builders

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b.weight": torch.tensor([1.5, -2], dtype=torch.bfloat16),
    "c.qweight": torch.tensor([[-1, 2**31 - 1]], dtype=torch.int32),
    "d.empty": torch.empty(0, 4),
    "e.scalar": torch.tensor(7, dtype=torch.int64),
}


@pytest.mark.parametrize(("shards", "index"), [(1, False), (2, True), (3, True), (2, False)])
def test_tensors_come_back_from_any_sharding(tmp_path, shards, index):
    checkpoint = Checkpoint.open(builders.write(tmp_path, TENSORS, shards=shards, index=index))
    assert set(checkpoint.headers) == set(TENSORS)
    assert checkpoint.warnings == []
    for name, tensor in TENSORS.items():
        header = checkpoint.headers[name]
        assert (header.name, header.dtype, header.shape) == (name, tensor.dtype, tuple(tensor.shape))
        assert header.nbytes == tensor.nbytes and header.file.parent == tmp_path
        assert torch.equal(checkpoint.tensor(name), tensor) and checkpoint.tensor(name).dtype == tensor.dtype


def test_a_tensor_is_a_private_view_of_the_file(tmp_path):
    file = builders.write(tmp_path, TENSORS) / "model.safetensors"
    before = file.read_bytes()
    checkpoint = Checkpoint.open(tmp_path)
    view = checkpoint.tensor("a.weight")
    assert view.data_ptr() == checkpoint.tensor("a.weight").data_ptr()
    view.zero_()
    del checkpoint, view
    assert file.read_bytes() == before


def test_mapping_needs_no_anonymous_memory(tmp_path):
    save_file({"w": torch.ones(64 << 20, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys, re; from int4moe_ipex.checkpoint import Checkpoint\n"
        "def anon(): return int(re.search(r'RssAnon:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "c = Checkpoint.open(sys.argv[1]); c.tensor('w')[:8].sum(); before = anon()\n"
        "assert int(c.tensor('w').sum()) == 64 << 20\n"
        "print(anon() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 << 10  # KiB; the tensor has 65536


def test_unaligned_tensors_are_read(tmp_path):
    header = json.dumps(
        {
            "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "w": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    data = b"\x07" + torch.tensor([1.25, -3.0]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensor("w").tolist() == [1.25, -3.0] and checkpoint.tensor("byte").tolist() == [7]


def test_path_with_spaces_in_a_read_only_folder_stays_untouched(tmp_path):
    folder = builders.write(tmp_path / "my model", TENSORS, builders.gptq_label(), shards=2)
    listing = sorted(os.listdir(folder))
    stamps = [(folder / name).stat().st_mtime_ns for name in listing]
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IRGRP | stat.S_IXGRP)
    try:
        checkpoint = Checkpoint.open(str(folder))
        assert checkpoint.tensor("a.weight").sum() == 15
    finally:
        folder.chmod(0o755)
    assert sorted(os.listdir(folder)) == listing
    assert [(folder / name).stat().st_mtime_ns for name in listing] == stamps


def test_symbolic_links_are_followed(tmp_path):
    blobs = builders.write(tmp_path / "blobs", TENSORS)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for name in os.listdir(blobs):
        (folder / name).symlink_to(blobs / name)
    assert set(Checkpoint.open(folder).headers) == set(TENSORS)


def test_adapters_and_second_copies_are_not_the_model(tmp_path):
    builders.write(tmp_path, TENSORS)
    save_file(TENSORS, tmp_path / "consolidated.00.safetensors")
    save_file({"lora_A.weight": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    assert set(Checkpoint.open(tmp_path).headers) == set(TENSORS)


def test_any_file_name_will_do_without_an_index(tmp_path):
    builders.write(tmp_path, TENSORS)
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    assert set(Checkpoint.open(tmp_path).headers) == set(TENSORS)


# Folders that are wrong -----------------------------------------------------------------------------------------------


def refused(path, *words, error=CheckpointError):
    with pytest.raises(error) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    for word in words:
        assert word in message
    return caught.value


def test_no_folder(tmp_path):
    refused(tmp_path / "absent", "absent", "no such folder")


def test_a_file_instead_of_a_folder(tmp_path):
    builders.write(tmp_path, TENSORS)
    refused(tmp_path / "model.safetensors", "is a file")


def test_no_config(tmp_path):
    builders.write(tmp_path, TENSORS)
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "config.json", "does not exist")


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00\xff"])
def test_broken_config(tmp_path, content):
    builders.write(tmp_path, TENSORS)
    (tmp_path / "config.json").write_text(content)
    refused(tmp_path, "config.json")


def test_empty_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no .safetensors file")


def test_a_tensor_in_two_files_names_both(tmp_path):
    builders.write(tmp_path, TENSORS)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    save_file({"a.weight": torch.ones(1), "c.qweight": torch.ones(1)}, tmp_path / "two.safetensors")
    error = refused(tmp_path, "one.safetensors", "two.safetensors", error=MissingTensorsError)
    assert [problem.split(":")[0] for problem in error.problems] == ["a.weight", "c.qweight"]


def test_index_names_absent_files(tmp_path):
    builders.write(tmp_path, TENSORS, shards=3)
    for number in (2, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    refused(tmp_path, "index", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors")


def test_absent_shards_without_an_index(tmp_path):
    builders.write(tmp_path, TENSORS, shards=3, index=False)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "absent", "model-00002-of-00003.safetensors")


def edit_index(folder, change):
    file = folder / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_index_names_absent_and_misplaced_tensors(tmp_path):
    builders.write(tmp_path, TENSORS, shards=2)

    def change(content):
        other = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        content["weight_map"]["x.weight"] = other[0]
        content["weight_map"]["y.weight"] = other[1]
        here = content["weight_map"]["a.weight"]
        content["weight_map"]["a.weight"] = other[1 - other.index(here)]

    edit_index(tmp_path, change)
    error = refused(tmp_path, error=MissingTensorsError)
    assert [problem.split(":")[0] for problem in error.problems] == ["a.weight", "x.weight", "y.weight"]


def test_tensors_that_the_index_forgot_are_used_and_reported(tmp_path):
    builders.write(tmp_path, TENSORS, shards=2)
    edit_index(tmp_path, lambda content: content["weight_map"].pop("a.weight"))
    checkpoint = Checkpoint.open(tmp_path)
    assert "a.weight" in checkpoint.headers
    assert any("a.weight" in warning for warning in checkpoint.warnings)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "sub/../../x.safetensors"])
def test_index_that_points_out_of_the_folder(tmp_path, name):
    builders.write(tmp_path, TENSORS, shards=2)
    edit_index(tmp_path, lambda content: content["weight_map"].update({"a.weight": name}))
    refused(tmp_path, "outside the folder", "a.weight")


@pytest.mark.parametrize("name", ["model.bin", None, 3, ["a"]])
def test_index_that_names_no_safetensors(tmp_path, name):
    builders.write(tmp_path, TENSORS, shards=2)
    edit_index(tmp_path, lambda content: content["weight_map"].update({"a.weight": name}))
    refused(tmp_path, "not a .safetensors file", "a.weight")


def test_two_models_in_one_folder(tmp_path):
    builders.write(tmp_path, TENSORS, shards=2)
    save_file(TENSORS, tmp_path / "model.safetensors")
    refused(tmp_path, "model.safetensors", "remove one")


def test_pickles_are_refused_unopened(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    marker = tmp_path / "marker"

    class Trap:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    torch.save({"w": Trap()}, tmp_path / "pytorch_model.bin")
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert marker.exists()  # the trap works
    marker.unlink()
    refused(tmp_path, "pytorch_model.bin", "pickle", error=UnsupportedFormatError)
    assert not marker.exists()


def test_gguf_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "GGUF", "model-Q4_K_M.gguf", error=UnsupportedFormatError)


# The quantization config ----------------------------------------------------------------------------------------------


def test_config_json_wins_and_the_difference_is_reported(tmp_path):
    builders.write(tmp_path, TENSORS, {"quant_method": "gptq", "bits": 4, "group_size": 32, "meta": {"a": 1}})
    side = {"bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2", "meta": {"a": 2}}
    (tmp_path / "quantize_config.json").write_text(json.dumps(side))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.quantization["group_size"] == 32
    assert checkpoint.quantization["checkpoint_format"] == "gptq_v2"
    assert len(checkpoint.warnings) == 1
    for word in ("quantize_config.json", "group_size", "128", "32"):
        assert word in checkpoint.warnings[0]


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "awq"),
        ("quantization_config.json", {"quant_method": "auto-round", "bits": 4}, "auto-round"),
    ],
)
def test_side_files_alone(tmp_path, name, content, method):
    builders.write(tmp_path, TENSORS)
    (tmp_path / name).write_text(json.dumps(content))
    assert Checkpoint.open(tmp_path).quantization["quant_method"] == method


def test_nested_text_config_and_old_key(tmp_path):
    builders.write(tmp_path, TENSORS, config={"text_config": {"quantization_config": {"quant_method": "awq"}}})
    assert Checkpoint.open(tmp_path).quantization == {"quant_method": "awq"}
    builders.write(tmp_path, TENSORS, config={"compression_config": {"quant_method": "compressed-tensors"}})
    assert Checkpoint.open(tmp_path).quantization == {"quant_method": "compressed-tensors"}


def test_no_quantization(tmp_path):
    assert Checkpoint.open(builders.write(tmp_path, TENSORS)).quantization is None


def test_unknown_tensor(tmp_path):
    checkpoint = Checkpoint.open(builders.write(tmp_path, TENSORS))
    with pytest.raises(CheckpointError, match=r"no tensor z\.weight"):
        checkpoint.tensor("z.weight")
