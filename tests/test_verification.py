"""verify finds what was broken on purpose, names the module, and passes what is right."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import int4moe_ipex
from int4moe_ipex import formats, verification
from int4moe_ipex.backends import select
from int4moe_ipex.backends.base import Rejected, Supported
from int4moe_ipex.cli import app as cli
from int4moe_ipex.config import Config
from int4moe_ipex.cpu import detect
from int4moe_ipex.diagnosis import TYPICAL
from int4moe_ipex.models import loader
from int4moe_ipex.models.stored import checkpoint_of, write_store

ROOT = Path(os.environ.get("INT4MOE_CHECKPOINTS", Path(__file__).parents[2] / "shared" / "checkpoints"))
pytestmark = pytest.mark.skipif(not ROOT.is_dir(), reason=f"no checkpoints at {ROOT}; set INT4MOE_CHECKPOINTS")
ASYM = ROOT / "gptq-asym-desc-act-g32"
EXPERT = "model.layers.1.mlp.experts.5"


def backends():
    """Those that this environment has."""
    for name in ("reference", "torch", "native"):
        engine = select.engine(name)
        verdict = engine
        if not isinstance(engine, Rejected):
            verdict = engine.support_experts(TYPICAL, detect(), Config.load({}, environ={}).for_module("*").run)
        reason = "" if isinstance(verdict, Supported) else verdict.reason
        yield pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=f"{name}: {reason}"))


def flip_a_nibble(weight, **_):
    codes = weight.codes.clone()
    codes[3, 7] ^= 0x40
    return dataclasses.replace(weight, codes=codes)


def shift_a_zero(weight, **_):
    zeros = weight.zeros.clone()
    zeros[2, 1] = (zeros[2, 1] + 1) % 16
    return dataclasses.replace(weight, zeros=zeros)


def shift_all_zeros(weight, **_):
    return dataclasses.replace(weight, zeros=(weight.zeros + 1) % 16)


def double_a_scale(weight, **_):
    scales = weight.scales.clone()
    scales[0, 0] *= 2
    return dataclasses.replace(weight, scales=scales)


def load_with(monkeypatch, change, names, **options):
    """The model as if reading had gone wrong for the linears in `names`."""
    read = formats.read_linear

    def wrong(checkpoint, info):
        weight, bias = read(checkpoint, info)
        return (change(weight, checkpoint=checkpoint, info=info), bias) if info.name in names else (weight, bias)

    monkeypatch.setattr(loader.formats, "read_linear", wrong)
    model = int4moe_ipex.load(ASYM, Config.load({}, environ={}, **options))
    monkeypatch.setattr(loader.formats, "read_linear", read)
    settings = Config.load({}, environ={}, **options)
    return list(verification.verify(model, loader.prepare(ASYM, settings), getattr(torch, settings.dtype)))


@pytest.mark.parametrize("backend", backends())
def test_untouched_is_good(monkeypatch, backend):
    results = load_with(monkeypatch, None, (), backend=backend, dtype="float32")
    assert all(r.good for r in results), [r.differs for r in results if not r.good]
    assert sum(r.weights for r in results if r.path != "dense") == 3 * (4 + 16 * 3)
    assert {r.module for r in results} >= {"model.layers.2.mlp.experts", "model.layers.0.self_attn.o_proj"}


@pytest.mark.parametrize("backend", ["reference"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (flip_a_nibble, "expert 5 up_proj codes: 1 of 32768 differ, first at row 3, column 15: "),
        (shift_a_zero, "expert 5 up_proj zero points: "),
        (shift_all_zeros, "expert 5 up_proj zero points: 1024 of 1024 differ, first at row 0, column 0: "),
        (double_a_scale, "expert 5 up_proj scales: 1 of 1024 differ, first at row 0, column 0: "),
    ],
)
def test_wrong_weight_is_named(monkeypatch, backend, change, sentence):
    results = load_with(monkeypatch, change, (f"{EXPERT}.up_proj",), backend=backend)
    bad = [r for r in results if not r.good]
    assert [r.module for r in bad] == ["model.layers.1.mlp.experts"]
    assert bad[0].differs[0].startswith(sentence)


@pytest.mark.parametrize("backend", backends())
def test_one_nibble_is_found_in_every_layout(monkeypatch, backend):
    results = load_with(monkeypatch, flip_a_nibble, (f"{EXPERT}.down_proj",), backend=backend)
    assert [r.module for r in results if not r.good] == ["model.layers.1.mlp.experts"]


@pytest.mark.parametrize("backend", backends())
def test_swapped_gate_and_up_are_called_so(monkeypatch, backend):
    read = formats.read_linear
    other = {f"{EXPERT}.gate_proj": f"{EXPERT}.up_proj", f"{EXPERT}.up_proj": f"{EXPERT}.gate_proj"}
    infos = formats.describe(formats.Checkpoint.open(ASYM))

    def swap(weight, checkpoint, info):
        return read(checkpoint, infos[other[info.name]])[0]

    results = load_with(monkeypatch, swap, other, backend=backend)
    bad = [r for r in results if not r.good]
    assert [r.module for r in bad] == ["model.layers.1.mlp.experts"]
    assert bad[0].differs[0] == "expert 5 gate_proj and up_proj are swapped"
    assert bad[0].output_error > bad[0].limit


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("change", [flip_a_nibble, shift_a_zero, "swap gate and up"])
def test_stores_are_proved_too(tmp_path, monkeypatch, backend, change):
    """A store that was packed wrongly is whole by its hashes, and found by comparing it with its checkpoint."""
    read = formats.read_linear
    names = {f"{EXPERT}.gate_proj": f"{EXPERT}.up_proj", f"{EXPERT}.up_proj": f"{EXPERT}.gate_proj"}
    infos = formats.describe(formats.Checkpoint.open(ASYM))

    def wrong(checkpoint, info):
        if change == "swap gate and up":
            return read(checkpoint, infos[names.get(info.name, info.name)])
        weight, bias = read(checkpoint, info)
        return (change(weight) if info.name == f"{EXPERT}.up_proj" else weight), bias

    settings = Config.load({}, environ={}, backend=backend)
    monkeypatch.setattr(formats, "read_linear", wrong)
    write_store(ASYM, tmp_path / "s", settings)
    monkeypatch.setattr(formats, "read_linear", read)
    model = int4moe_ipex.load(tmp_path / "s", settings)
    results = list(verification.stored_files(tmp_path / "s", settings))
    assert [r.good for r in results] == [True]
    results += verification.verify(model, loader.prepare(checkpoint_of(tmp_path / "s"), settings), torch.bfloat16)
    bad = [r for r in results if not r.good]
    assert [r.module for r in bad] == ["model.layers.1.mlp.experts"]
    if change == "swap gate and up":
        assert bad[0].differs[0] == "expert 5 gate_proj and up_proj are swapped"
    else:
        assert bad[0].differs[0].startswith("expert 5 up_proj ")


def test_a_kernel_that_computes_wrongly_is_found_though_the_bytes_are_right(monkeypatch):
    from int4moe_ipex.backends.reference import ReferenceBackend

    right = ReferenceBackend.linear_forward
    monkeypatch.setattr(ReferenceBackend, "linear_forward", lambda self, packed, x: right(self, packed, x) * 1.05)
    results = load_with(monkeypatch, None, (), backend="reference")
    bad = {r.module: r for r in results if not r.good}
    assert len(bad) == 12 and all("self_attn" in name for name in bad)
    for result in bad.values():
        assert result.differs[0].startswith("output for 1 rows is off by 0.0")
        assert 0.04 < result.output_error < 0.06


def test_dense_parameters_are_compared_too():
    settings = Config.load({}, environ={}, backend="reference")
    model = int4moe_ipex.load(ASYM, settings)
    model.model.layers[0].input_layernorm.weight.data[3] += 1
    results = list(verification.verify(model, loader.prepare(ASYM, settings), torch.bfloat16))
    assert [r.differs for r in results if not r.good] == [["model.layers.0.input_layernorm.weight differs"]]


def test_verb(monkeypatch):
    def run(*args):
        return CliRunner().invoke(cli.build_app(), ["verify", str(ASYM), *args], catch_exceptions=False)

    result = run("--backend", "reference", "--dtype", "float32", "--prompt", "The statement is", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["good"] and found["logits"]["good"]
    assert found["logits"]["top5"] == found["logits"]["reference_top5"]
    read = formats.read_linear

    def wrong(checkpoint, info):
        weight, bias = read(checkpoint, info)
        return (flip_a_nibble(weight), bias) if info.name == f"{EXPERT}.down_proj" else (weight, bias)

    real = int4moe_ipex.models.loader.load

    def load(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(loader.formats, "read_linear", wrong)
            return real(*args, **kwargs)

    monkeypatch.setattr(int4moe_ipex.models.loader, "load", load)
    result = run("--backend", "reference")
    assert result.exit_code == 1
    assert "DIFFERS model.layers.1.mlp.experts" in result.stderr
    assert "expert 5 down_proj codes: 1 of " in result.stderr and "NOT verified" in result.stdout
