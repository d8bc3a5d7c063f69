"""A model from a prepacked store gives the bits that the checkpoint gives, or the store is refused in a sentence."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file

import int4moe_ipex
from int4moe_ipex.backends import ipex, onednn, select
from int4moe_ipex.backends.base import ExpertsSpec, LinearSpec
from int4moe_ipex.config import Config
from int4moe_ipex.errors import BackendError, ConfigError, StoreError
from int4moe_ipex.models import stored
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.packing import records
from int4moe_ipex.packing.store import MANIFEST, Store, write_manifest
from tests.models.tiny import FAMILIES, stock_model, write_checkpoint
from tests.real import EXAMPLE, REPO, checkpoints

HAVE = select.available()
OPTIONAL = {"ipex": ipex.status, "onednn": onednn.status}


def needs(backend):
    return pytest.mark.skipif(backend not in HAVE, reason=f"the {backend} backend cannot be imported here")


def logits(model, vocab=1000):
    tokens = torch.arange(7 * 11, dtype=torch.int64).view(7, 11) * 13 % min(vocab, model.config.vocab_size)
    with torch.inference_mode():
        return model(input_ids=tokens).logits


def settings(**options):
    return Config.load({}, environ={}, **options)


# -------------------------------------------------------------------------------------------------------- same bits


@needs("native")
@pytest.mark.parametrize("path", checkpoints(), ids=lambda path: path.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_native_layout_gives_the_same_bits(tmp_path, path, dtype):
    options = settings(backend="native", dtype=dtype)
    want = int4moe_ipex.load(path, options)
    written = stored.write_store(path, tmp_path / "s", options)
    assert set(written.layouts) <= {records.NATIVE}
    model = int4moe_ipex.load(tmp_path / "s", options)
    assert torch.equal(logits(model), logits(want))
    assert model.int4moe_report.paths == want.int4moe_report.paths
    assert model.int4moe_report.packed_nbytes == want.int4moe_report.packed_nbytes


@pytest.mark.parametrize("backend", ["reference", "torch", "ipex", "onednn"])
@pytest.mark.parametrize("path", checkpoints(), ids=lambda path: path.name)
def test_other_engines_are_stored_canonically_and_packed_when_opened(tmp_path, path, backend):
    here, problem = OPTIONAL[backend]() if backend in OPTIONAL else (True, "")
    if not here:
        pytest.skip(problem)
    options = settings(backend=backend)
    try:
        want = int4moe_ipex.load(path, options)
    except BackendError as error:
        with pytest.raises(BackendError, match=re.escape(str(error))):
            stored.write_store(path, tmp_path / "s", options)
        assert not (tmp_path / "s").exists()
        return
    written = stored.write_store(path, tmp_path / "s", options)
    used = {name.partition("/")[0] for name in want.int4moe_report.paths}
    assert set(written.layouts) == ({records.CANONICAL} if used else set())
    assert torch.equal(logits(int4moe_ipex.load(tmp_path / "s", options)), logits(want))


@needs("native")
def test_canonical_records_are_packed_for_any_engine(tmp_path):
    stored.write_store(EXAMPLE, tmp_path / "s", settings(backend="reference"))
    options = settings(backend="native")
    assert torch.equal(logits(int4moe_ipex.load(tmp_path / "s", options)), logits(int4moe_ipex.load(EXAMPLE, options)))


@needs("native")
def test_one_store_runs_every_row_and_compute(tmp_path):
    stored.write_store(EXAMPLE, tmp_path / "s", settings(backend="native"))
    for isa, compute in (("scalar", "w4a16"), ("avx2", "w4a16"), ("auto", "w4a8")):
        options = settings(backend="native", isa=isa, compute=compute)
        model = int4moe_ipex.load(tmp_path / "s", options)
        assert all(compute in path for path in model.int4moe_report.paths)
        assert torch.equal(logits(model), logits(int4moe_ipex.load(EXAMPLE, options)))


@needs("native")
def test_ranges_of_tokens_share_one_stored_pack(tmp_path):
    options = settings(backend="native", rules=[{"match": "*.experts", "min_tokens": 4, "compute": "w4a8"}])
    written = stored.write_store(EXAMPLE, tmp_path / "s", options)
    plain = stored.write_store(EXAMPLE, tmp_path / "plain", settings(backend="native"))
    assert written.layouts == plain.layouts
    assert abs(written.nbytes - plain.nbytes) < 100_000
    model = int4moe_ipex.load(tmp_path / "s", options)
    assert torch.equal(logits(model), logits(int4moe_ipex.load(EXAMPLE, options)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path, family):
    write_checkpoint(stock_model(family), family, tmp_path / "c", router=True)
    options = settings(dtype="float32", on_unsupported="fallback")
    stored.write_store(tmp_path / "c", tmp_path / "s", options)
    want = logits(int4moe_ipex.load(tmp_path / "c", options), 64)
    assert torch.equal(logits(int4moe_ipex.load(tmp_path / "s", options), 64), want)


def test_tied_heads_stay_tied(tmp_path):
    write_checkpoint(stock_model("qwen3_moe", tie_word_embeddings=True), "qwen3_moe", tmp_path / "c")
    stored.write_store(tmp_path / "c", tmp_path / "s", settings(dtype="float32"))
    model = int4moe_ipex.load(tmp_path / "s", settings(dtype="float32"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model, 64), logits(int4moe_ipex.load(tmp_path / "c", settings(dtype="float32")), 64))


def test_mixed_layers_keep_their_dense_experts(tmp_path):
    write_checkpoint(stock_model("qwen3_moe"), "qwen3_moe", tmp_path / "c")
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    for name, shape in (("0.mlp.experts.2.down_proj", (64, 32)), ("1.mlp.experts.0.gate_proj", (32, 64))):
        for suffix in ("packed", "scale", "shape"):
            del tensors[f"model.layers.{name}.weight_{suffix}"]
        tensors[f"model.layers.{name}.weight"] = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    save_file(tensors, tmp_path / "c" / "model.safetensors")
    for dtype in ("float32", "bfloat16"):
        options = settings(dtype=dtype)
        stored.write_store(tmp_path / "c", tmp_path / "s", options, force=True)
        model = int4moe_ipex.load(tmp_path / "s", options)
        assert list(model.model.layers[0].mlp.experts.composed) == ["2"]
        assert torch.equal(logits(model, 64), logits(int4moe_ipex.load(tmp_path / "c", options), 64))


def test_copies_in_memory_give_the_same_bits(tmp_path):
    stored.write_store(EXAMPLE, tmp_path / "s", settings())
    copied = int4moe_ipex.load(tmp_path / "s", settings(store={"placement": "copy"}))
    want = logits(int4moe_ipex.load(tmp_path / "s", settings()))
    shutil.rmtree(tmp_path / "s")
    assert torch.equal(logits(copied), want)


def test_from_pretrained_takes_a_store(tmp_path):
    from transformers import AutoModelForCausalLM

    stored.write_store(EXAMPLE, tmp_path / "s", settings())
    int4moe_ipex.register()
    try:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "s")
    finally:
        int4moe_ipex.unregister()
    assert torch.equal(logits(model), logits(int4moe_ipex.load(EXAMPLE)))


def test_specs_survive_json():
    gate = LinearSpec(64, 32, 16, symmetric=False, act_order=True, scales_dtype=torch.bfloat16, bias=True)
    down = LinearSpec(32, 64, 32, symmetric=True, scales_dtype=torch.float32)
    activation = Activation("swiglu_clamped", alpha=1.5, limit=6.0)
    experts = ExpertsSpec(5, 64, 32, gate, gate, down, activation, shared_perm=False)
    for spec in (gate, down, experts, ExpertsSpec(5, 64, 32, None, gate, down)):
        assert records.spec_from_json(json.loads(json.dumps(records.spec_to_json(spec)))) == spec


# ---------------------------------------------------------------------------------------------------------- refused


@pytest.fixture
def made(tmp_path):
    """A copy of the example checkpoint and its store."""
    source = tmp_path / "c"
    shutil.copytree(EXAMPLE, source)
    stored.write_store(source, tmp_path / "s", settings())
    return source, tmp_path / "s"


def refusal(path, config=None, error=StoreError):
    with pytest.raises(error) as caught:
        int4moe_ipex.load(path, settings() if config is None else config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_changed_source_is_refused(made):
    source, store = made
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(1, 1))
    want = (
        f"{store}: was packed from another state of {source} (model.safetensors has another content); convert it again"
    )
    assert refusal(store) == want
    assert refusal(source, settings(store={"path": str(store)})) == want
    weights.write_bytes(data[:-1])
    assert "model.safetensors has another size" in refusal(store)
    weights.unlink()
    assert "model.safetensors is missing" in refusal(store)


def test_a_changed_config_is_a_changed_source(made):
    source, store = made
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 2}))
    assert "config.json has another size" in refusal(store)


def test_a_source_that_was_only_touched_or_moved_is_taken(made):
    source, store = made
    want = logits(int4moe_ipex.load(source, settings()))
    os.utime(source / "model.safetensors", ns=(1, 1))
    assert torch.equal(logits(int4moe_ipex.load(store, settings())), want)
    source.rename(source.with_name("moved"))
    assert torch.equal(logits(int4moe_ipex.load(store, settings())), want)
    model = int4moe_ipex.load(source.with_name("moved"), settings(store={"path": str(store)}))
    assert torch.equal(logits(model), want)


def test_the_store_of_another_checkpoint_is_refused(made, tmp_path):
    write_checkpoint(stock_model("qwen3_moe"), "qwen3_moe", tmp_path / "other")
    assert "was packed from another state of" in refusal(tmp_path / "other", settings(store={"path": str(made[1])}))


def test_two_stores_at_once_are_a_contradiction(made, tmp_path):
    assert "give one of them" in refusal(made[1], settings(store={"path": str(tmp_path)}), ConfigError)
    int4moe_ipex.load(made[1], settings(store={"path": str(made[1])}))


def change_manifest(store, change):
    manifest = json.loads((store / MANIFEST).read_text())
    change(manifest)
    write_manifest(store, manifest)


@needs("native")
def test_another_version_of_the_layout_is_refused(made):
    def other(manifest):
        manifest["layouts"] = {"n16k8/7": 15}
        for record in manifest["modules"].values():
            for part in record.get("packs", [record]):
                part["layout"] = "n16k8/7"

    change_manifest(made[1], other)
    assert refusal(made[1]) == (
        f"{made[1]}: holds weights in layout n16k8/7, and this release has n16k8/1 and canonical/1; "
        "convert the checkpoint again"
    )


def test_records_that_do_not_fit_name_store_and_module(made):
    name = "model.layers.1.self_attn.q_proj"
    change_manifest(made[1], lambda manifest: manifest["modules"][name]["spec"].update(colour="red"))
    assert refusal(made[1]).startswith(f"{made[1]}: {name}: the manifest describes weights in words that this release")
    change_manifest(made[1], lambda manifest: manifest["modules"][name].pop("spec"))
    assert (
        refusal(made[1])
        == f"{made[1]}: {name}: its record cannot be read (KeyError: 'spec'); convert the checkpoint again"
    )


def test_a_truncated_file_is_refused(made):
    weights = made[1] / "packed-00001.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    assert refusal(made[1]).startswith(f"{weights}: has ")


@needs("native")
def test_native_weights_are_not_run_by_another_engine(made):
    sentence = "the weights are packed for the native backend (n16k8/1), and reference/float32 is to run"
    assert sentence in refusal(made[1], settings(backend="reference"))
    assert sentence in stored.problems_of(Store.open(made[1]), settings(backend="reference"))[0]
    assert stored.problems_of(Store.open(made[1]), settings()) == []


def test_another_dtype_is_refused_when_it_is_asked_for(tmp_path):
    stored.write_store(EXAMPLE, tmp_path / "s", settings(dtype="float32"))
    message = refusal(tmp_path / "s", settings(dtype="bfloat16"))
    assert "was prepared for dtype float32, and argument dtype asks for bfloat16" in message
    assert int4moe_ipex.load(tmp_path / "s", settings()).dtype == torch.float32


def test_a_store_is_not_converted_again_nor_written_over_its_checkpoint(made):
    with pytest.raises(StoreError, match="is a store already"):
        stored.write_store(made[1], made[1].with_name("t"))
    with pytest.raises(StoreError, match="is the checkpoint itself"):
        stored.write_store(made[0], made[0], force=True)
    assert (made[0] / "model.safetensors").exists()


def test_a_checkpoint_that_changes_meanwhile_is_noticed(made, tmp_path):
    def touch(done, total, name):
        if name.endswith("experts"):
            os.utime(made[0] / "model.safetensors", ns=(done, done))

    with pytest.raises(StoreError, match="changed while it was being converted"):
        stored.write_store(made[0], tmp_path / "t", settings(), progress=touch)
    assert not (tmp_path / "t").exists()


# ------------------------------------------------------------------------------------------------------------ memory


@needs("native")
def test_two_processes_share_the_pages(tmp_path):
    stored.write_store(EXAMPLE, tmp_path / "s", settings(backend="native"))
    script = f"""
    import re, sys, torch, int4moe_ipex
    model = int4moe_ipex.load({str(tmp_path / "s")!r}, {{"backend": "native"}})
    with torch.inference_mode():
        model(input_ids=torch.arange(200).view(2, 100))
    print("ready", flush=True)
    sys.stdin.readline()
    found = {{}}
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read()):
        if "packed-00001.safetensors" in part:
            for key, kb in re.findall(r"(?m)^(\\w+):\\s+(\\d+) kB", part):
                found[key] = found.get(key, 0) + int(kb)
    print(found["Rss"], found["Pss"], found["Private_Dirty"], flush=True)
    sys.stdin.readline()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPO}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        found = [tuple(map(int, process.stdout.readline().split())) for process in processes]
    finally:
        for process in processes:
            process.communicate("\n", timeout=60)
    size = (tmp_path / "s" / "packed-00001.safetensors").stat().st_size // 1024
    for rss, pss, dirty in found:
        assert dirty == 0
        assert rss > 0.8 * size, "the weights were copied somewhere else"
        assert pss <= 0.55 * rss
