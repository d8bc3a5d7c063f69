"""Public case 15: truncated files, pickles, read-only folders, spaces in paths."""

import os
import stat

import pytest
import torch

import int4moe_ipex
from int4moe_ipex.errors import CheckpointError, UnsupportedFormatError
from tests import builders


def test_case_15_two_bytes_short(tmp_path):
    """marker#970."""
    file = builders.moe_checkpoint(tmp_path).folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is truncated"):
        int4moe_ipex.load(tmp_path)


def test_case_15_only_pickles(tmp_path):
    """pytorch#122476: a pickle runs code when it is opened."""
    builders.moe_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    marker = tmp_path / "marker"

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(marker),))

    torch.save({"model.norm.weight": Trap()}, tmp_path / "pytorch_model-00001-of-00001.bin")
    with pytest.raises(UnsupportedFormatError, match="pickled weights"):
        int4moe_ipex.load(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("shards", [1, 3])
def test_case_15_read_only_folder_with_a_space(tmp_path, shards):
    """huggingface_hub#2797."""
    folder = builders.moe_checkpoint(tmp_path / "my model", shards=shards).folder
    before = {name: (folder / name).stat().st_mtime_ns for name in os.listdir(folder)}
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        model = int4moe_ipex.load(folder)
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    finally:
        folder.chmod(0o755)
    assert {name: (folder / name).stat().st_mtime_ns for name in os.listdir(folder)} == before
