"""The store's files: layout on disk, and that there is a whole store or none, whatever happens."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from int4moe_ipex.checkpoint.files import Checkpoint
from int4moe_ipex.errors import StoreError
from int4moe_ipex.packing import store
from int4moe_ipex.packing.store import MANIFEST, Store, StoreWriter
from tests.real import EXAMPLE, REPO

EMPTY = {"dtype": "bfloat16", "layouts": {}, "modules": {}, "tensors": [], "tied": []}


def written(folder, tensors, source=EXAMPLE):
    with store.new_folder(folder) as temporary:
        writer = StoreWriter(temporary)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        store.copy_small_files(source, temporary, {"quant_method": store.QUANT_METHOD})
        writer.finish({**EMPTY, "source": store.fingerprint(Checkpoint.open(source))})
    return Store.open(folder)


TENSORS = {
    "three": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "wide": torch.arange(10, dtype=torch.float64).view(2, 5),
    "half": torch.full((3, 1), 1.5, dtype=torch.bfloat16),
    "none": torch.empty(0, 4, dtype=torch.float16),
    "strided": torch.arange(12, dtype=torch.int32).view(3, 4).t(),
    "scalar": torch.tensor(7, dtype=torch.int64),
}


def test_every_tensor_comes_back_and_lies_on_64_bytes(tmp_path):
    opened = written(tmp_path / "s", TENSORS)
    for name, tensor in TENSORS.items():
        found = opened.tensor(name)
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype and found.shape == tensor.shape
        if tensor.numel():
            assert found.data_ptr() % store.ALIGNMENT == 0, name
    assert opened.damaged() == []


def test_files_are_safetensors_for_others_too(tmp_path):
    written(tmp_path / "s", TENSORS)
    with safe_open(tmp_path / "s" / "packed-00001.safetensors", "pt") as file:
        names = file.keys()
        assert {name for name in names if not name.startswith("__")} == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_shards_are_cut_at_their_size(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 1000)
    tensors = {str(i): torch.full((600,), i, dtype=torch.uint8) for i in range(5)}
    opened = written(tmp_path / "s", tensors)
    assert len(opened.manifest["files"]) == 3
    assert all(torch.equal(opened.tensor(name), tensor) for name, tensor in tensors.items())


def test_a_name_is_stored_once(tmp_path):
    writer = StoreWriter(tmp_path)
    writer.add("a", torch.zeros(1))
    with pytest.raises(StoreError, match="a: would be stored twice"):
        writer.add("a", torch.zeros(1))


def test_small_files_come_along_and_labels_do_not(tmp_path):
    written(tmp_path / "s", TENSORS)
    names = {file.name for file in (tmp_path / "s").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "config.json", MANIFEST} <= names
    assert "quantize_config.json" not in names
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": store.QUANT_METHOD}
    assert config["model_type"] == json.loads((EXAMPLE / "config.json").read_text())["model_type"]


# ----------------------------------------------------------------------------------------------- a whole store or none


def listing(folder):
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_when_writing_fails(tmp_path, error):
    with pytest.raises(error), store.new_folder(tmp_path / "s") as temporary:
        (temporary / "half").write_bytes(b"x")
        raise error
    assert listing(tmp_path) == []


def test_a_killed_conversion_leaves_no_store_and_the_next_one_cleans_up(tmp_path):
    script = f"""
import os, signal
from int4moe_ipex.models.stored import write_store
def step(done, total, name):
    if name.endswith("layers.1.mlp.experts"):
        os.kill(os.getpid(), signal.SIGKILL)
write_store({str(EXAMPLE)!r}, {str(tmp_path / "s")!r}, backend="reference", progress=step)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, timeout=300)
    assert done.returncode == -signal.SIGKILL
    left = listing(tmp_path)
    assert len(left) == 1 and left[0].startswith(".s.partial-")
    with pytest.raises(StoreError, match="is no prepacked store"):
        Store.open(tmp_path / left[0])
    written(tmp_path / "s", TENSORS)
    assert listing(tmp_path) == ["s"]


@pytest.mark.parametrize("to", ["store", "compressed-tensors"])
def test_a_full_disk_is_one_sentence(tmp_path, to):
    write = {
        "store": "models.stored import write_store as write",
        "compressed-tensors": "models.export import write_compressed_tensors as write",
    }
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
from int4moe_ipex.errors import StoreError
from int4moe_ipex.{write[to]}
try:
    write({str(EXAMPLE)!r}, {str(tmp_path / "s")!r})
except StoreError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, timeout=300, capture_output=True, text=True)
    assert done.stdout.startswith(f"{tmp_path / 's'}: cannot be written: "), done.stderr
    assert "File too large" in done.stdout and done.stdout.count("\n") == 1
    assert listing(tmp_path) == []


def test_a_place_that_cannot_be_written_is_one_sentence():
    with pytest.raises(StoreError, match=r"^/sys/int4moe: cannot be made: "), store.new_folder(Path("/sys/int4moe")):
        pass


def test_an_existing_folder_is_kept(tmp_path):
    out = tmp_path / "s"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(StoreError, match="exists already"), store.new_folder(out):
        pass
    with pytest.raises(StoreError, match="was not made by int4moe convert"), store.new_folder(out, replace=True):
        pass
    assert listing(out) == ["precious"] and listing(tmp_path) == ["s"]


def test_an_older_store_gives_way_when_the_new_one_is_whole(tmp_path):
    written(tmp_path / "s", {"old": torch.zeros(1)})
    with pytest.raises(RuntimeError), store.new_folder(tmp_path / "s", replace=True):
        raise RuntimeError
    assert torch.equal(Store.open(tmp_path / "s").tensor("old"), torch.zeros(1))
    with store.new_folder(tmp_path / "s", replace=True) as temporary:
        (temporary / "new").write_text("x")
    assert listing(tmp_path) == ["s"] and listing(tmp_path / "s") == ["new"]


def test_a_store_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    written(tmp_path / "s", TENSORS)
    before = listing(tmp_path / "s")
    rename = os.rename

    def fails(source, target):
        if ".partial-" in str(source):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    refused = pytest.raises(StoreError, match="cannot be written: Input/output error")
    with refused, store.new_folder(tmp_path / "s", replace=True) as temporary:
        (temporary / "new").write_text("x")
    assert listing(tmp_path) == ["s"] and listing(tmp_path / "s") == before
    Store.open(tmp_path / "s")


# -------------------------------------------------------------------------------------------------- what is refused


def edit(folder, **changes):
    store.write_manifest(folder, {**json.loads((folder / MANIFEST).read_text()), **changes})


def test_wrong_stores_are_one_sentence_each(tmp_path):
    out = tmp_path / "s"
    written(out, TENSORS)
    good = (out / MANIFEST).read_text()
    weights = out / "packed-00001.safetensors"

    def refused():
        with pytest.raises(StoreError) as caught:
            Store.open(out)
        message = str(caught.value)
        assert "\n" not in message
        return message

    edit(out, version=1)
    assert (
        refused() == f"{out}: is a store of version 1, and this release reads version 2; convert the checkpoint again"
    )
    edit(out, version=2, format="other")
    assert "is not the manifest of a prepacked store" in refused()
    (out / MANIFEST).write_text(json.dumps({k: v for k, v in json.loads(good).items() if k != "modules"}))
    assert "lacks modules" in refused()
    (out / MANIFEST).write_text(good[:100])
    assert refused().startswith(f"{out / MANIFEST}: cannot be read: ")
    (out / MANIFEST).write_text("[1]")
    assert "is not the manifest of a prepacked store" in refused()
    (out / MANIFEST).write_text(good.replace('"bfloat16"', '"float16"'))
    assert "are not as they were written" in refused()
    (out / MANIFEST).write_text(good)
    config = (out / "config.json").read_text()
    (out / "config.json").write_text(config.replace("10000", "10001"))
    assert "are not as they were written" in refused()
    (out / "config.json").unlink()
    assert "are not as they were written" in refused()
    (out / "config.json").write_text(config)
    Store.open(out)
    os.truncate(weights, weights.stat().st_size - 64)
    assert refused().startswith(f"{weights}: has ") and "were written; convert again" in refused()
    weights.unlink()
    assert refused() == f"{weights}: is missing; convert the checkpoint again"
    (out / MANIFEST).unlink()
    assert "is no prepacked store (it has no int4moe_store.json)" in refused()


def test_a_changed_byte_is_seen_by_the_hash(tmp_path):
    opened = written(tmp_path / "s", TENSORS)
    weights = tmp_path / "s" / "packed-00001.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert opened.damaged() == ["packed-00001.safetensors"]
