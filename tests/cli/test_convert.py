"""convert as a user calls it: a store that generate, verify and doctor take, and a checkpoint for others."""

import json

import pytest

from int4moe_ipex.checkpoint.files import Checkpoint
from int4moe_ipex.models.loader import prepare
from int4moe_ipex.packing.store import Store
from tests.cli.test_cli import int4moe
from tests.real import EXAMPLE, expected


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    out = tmp_path_factory.mktemp("convert") / "s"
    done = json.loads(int4moe("convert", EXAMPLE, out, "--dtype", "float32", "--json").stdout)
    assert done["path"] == str(out) and sum(done["layouts"].values()) == 15 and done["bytes"] > 3e6
    return out


def test_generate_from_a_store(store):
    want = expected(EXAMPLE)
    result = json.loads(int4moe("generate", store, "--prompt", want["prompt"], "--max-new-tokens", 24, "--json").stdout)
    assert result["text"] == want["greedy_text"]


def test_verify_proves_a_store_and_finds_a_flipped_nibble_in_it(store):
    found = json.loads(int4moe("verify", store, "--prompt", "The statement is", "--json").stdout)
    assert found["good"] and found["logits"]["good"] and found["modules"][0]["path"] == "store"
    opened = Store.open(store)
    record = opened.manifest["modules"]["model.layers.1.self_attn.v_proj"]
    header = opened.files.headers[next(iter(record["tensors"].values()))]
    with open(header.file, "r+b") as file:
        file.seek(header.start)
        byte = file.read(1)
        file.seek(header.start)
        file.write(bytes([byte[0] ^ 0x10]))
    try:
        done = int4moe("verify", store, "--json", status=1)
        bad = {
            module["module"]: module["differs"] for module in json.loads(done.stdout)["modules"] if module["differs"]
        }
        assert set(bad) == {str(store), "model.layers.1.self_attn.v_proj"}
        assert "packed-00001.safetensors: its content is not what convert wrote" in bad[str(store)]
        assert bad["model.layers.1.self_attn.v_proj"][0].startswith("weight codes: 1 of ")
    finally:
        with open(header.file, "r+b") as file:
            file.seek(header.start)
            file.write(byte)


def test_doctor_knows_stores(store):
    found = json.loads(int4moe("doctor", store, "--json").stdout)
    assert found["can_run"] and sum(module["alike"] for module in found["modules"]) == 15
    done = int4moe("doctor", store, "--backend", "reference", status=1)
    assert "convert the checkpoint again" in " ".join(done.stdout.split())


def test_mistakes_are_one_sentence(store, tmp_path):
    done = int4moe("convert", EXAMPLE, store, status=2)
    assert done.stderr == f"int4moe: {store}: exists already; choose another folder, or replace it with --force\n"
    done = int4moe("convert", EXAMPLE, tmp_path / "no" / "such", status=2)
    place = tmp_path / "no"
    assert done.stderr == f"int4moe: {place / 'such'}: there is no folder {place}; make it first\n"
    done = int4moe("convert", EXAMPLE, tmp_path / "x", "--to", "compressed-tensors", "--dtype", "float32", status=2)
    assert "belong to a store" in done.stderr and not (tmp_path / "x").exists()
    done = int4moe("generate", store, "--prompt", "x", "--dtype", "bfloat16", status=2)
    assert "was prepared for dtype float32" in done.stderr and done.stderr.count("\n") == 1


def test_force_replaces_what_convert_wrote(tmp_path):
    int4moe("convert", EXAMPLE, tmp_path / "out")
    int4moe("convert", EXAMPLE, tmp_path / "out", "--force", "--to", "compressed-tensors")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert Checkpoint.open(tmp_path / "out").quantization["quant_method"] == "compressed-tensors"
    from int4moe_ipex.config import Config

    assert len(prepare(tmp_path / "out", Config.load({}, environ={})).plan.linears) == 12


def test_help_has_an_example():
    assert "int4moe convert ./" in int4moe("convert", "--help").stdout
