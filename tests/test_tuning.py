"""Crossings: how they are decided, kept, and taken by the table."""

import dataclasses
import json

import pytest
import torch

import int4moe_ipex
from int4moe_ipex import tuning
from int4moe_ipex.backends import select
from int4moe_ipex.backends.base import RunConfig
from int4moe_ipex.backends.by_tokens import PackedByTokens
from int4moe_ipex.bench import crossings
from int4moe_ipex.bench.layer import LayerCase
from int4moe_ipex.bench.shapes import LayerShape
from int4moe_ipex.config import Config
from int4moe_ipex.cpu import detect
from int4moe_ipex.errors import ConfigError
from tests.real import EXAMPLE

NATIVE = "native" in select.available() and detect().has("avx2")
needs_native = pytest.mark.skipif(not NATIVE, reason="needs the native core and a CPU with AVX2")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "tune.json"))
    return tmp_path / "tune.json"


def entry(found, kind="experts", **changes):
    key = tuning.key_here(detect(), "w4a16", "bfloat16", kind)
    return tuning.Entry(dataclasses.replace(key, **changes), found, {}, 0.0, "a layer", "today")


def keep(file, *entries):
    tuning.write(file, {one.key: one for one in entries})


# --------------------------------------------------------------------------------------------------------- deciding


def test_crossings_lie_between_the_numbers_that_were_measured():
    seconds = {
        "native/amx": {1: 2.0, 4: 2.0, 16: 1.0, 64: 1.0},
        "native/avx512": {1: 1.0, 4: 1.5, 16: 2.0, 64: 4.0},
    }
    assert tuning.decide(seconds) == ((8, "native/avx512"), (None, "native/amx"))


def test_the_table_stands_within_the_margin():
    seconds = {"native/amx": {1: 1.0, 8: 1.0}, "native/avx512": {1: 0.96, 8: 0.97}}
    assert tuning.decide(seconds) == ((None, "native/amx"),)


def test_weights_are_held_by_one_engine():
    seconds = {
        "native/amx": {1: 1.0, 8: 1.0, 64: 1.0},
        "native/avx512": {1: 0.5, 8: 2.0, 64: 2.0},
        "onednn": {1: 1.0, 8: 1.0, 64: 0.9},
    }
    assert tuning.decide(seconds) == ((2, "native/avx512"), (None, "native/amx"))
    assert tuning.decide({**seconds, "onednn": {1: 0.6, 8: 0.6, 64: 0.6}}) == ((None, "onednn"),)


def test_clipping_to_a_band():
    found = ((4, "a"), (16, "b"), (None, "c"))
    assert tuning.clip(found, 0, None) == found
    assert tuning.clip(found, 5, 10) == ((10, "b"),)
    assert tuning.clip(found, 0, 4) == ((4, "a"),)
    assert tuning.clip(found, 3, 16) == ((4, "a"), (16, "b"))
    assert tuning.clip(found, 17, 20) == ((20, "c"),)


# ---------------------------------------------------------------------------------------------------------- keeping


def test_where_the_file_is():
    assert tuning.file_of({"INT4MOE_TUNE_FILE": "off"}) is None
    assert str(tuning.file_of({"INT4MOE_TUNE_FILE": "/x/y.json"})) == "/x/y.json"
    assert str(tuning.file_of({"XDG_CACHE_HOME": "/c"})) == "/c/int4moe/tune.json"
    assert tuning.file_of({}).parts[-3:] == (".cache", "int4moe", "tune.json")


def test_a_user_without_a_home_has_no_tuned_values(monkeypatch):
    import pwd

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    assert tuning.read(tuning.file_of({})) == {}


def test_entries_are_kept_side_by_side_and_replaced_by_key(file):
    one, other = entry(((3, "native/avx2"), (None, "native/avx512"))), entry(((None, "native/avx2"),), threads=77)
    keep(file, one)
    keep(file, other)
    assert tuning.read(file) == {one.key: one, other.key: other}
    newer = entry(((None, "native/avx512"),))
    keep(file, newer)
    assert tuning.read(file) == {newer.key: newer, other.key: other}
    assert [path.name for path in file.parent.iterdir()] == ["tune.json"]


@pytest.mark.parametrize(
    "change", [{"cpu": "another"}, {"version": "0.0.1"}, {"threads": 77}, {"max_isa": "scalar"}, {"dtype": "float32"}]
)
def test_another_machine_version_or_number_of_threads_does_not_count(file, change):
    keep(file, entry(((None, "native/avx2"),), **change))
    assert tuning.entry_here(detect(), "w4a16", "bfloat16", "experts") is None


def test_wrong_files_are_one_sentence(file):
    keep(file, entry(((None, "native/avx2"),)))
    good = json.loads(file.read_text())
    for change in ({"version": 2}, {"entries": [{**good["entries"][0], "crossings": [[4, "native/avx2"]]}]}):
        file.write_text(json.dumps({**good, **change}))
        with pytest.raises(ConfigError, match=r"tune\.json: cannot be read: .*; remove it or run int4moe tune again"):
            tuning.read(file)
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"tune\.json: lacks 'format'"):
        tuning.read(file)


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"file/tune\.json: cannot be written: "):
        keep(tmp_path / "file" / "tune.json", entry(((None, "native/avx2"),)))


# ---------------------------------------------------------------------------------------------------------- choosing

CASE = LayerCase(LayerShape("small", 64, 32, 4, 2), group_size=32)


def choose(**options):
    settings = Config.load({}, environ={}, **options)
    bands = settings.bands("model.layers.0.mlp.experts")
    return select.choose(CASE.spec, detect(), bands[0].run, bands)


@needs_native
def test_the_table_takes_what_was_measured(file):
    plain = choose()
    keep(file, entry(((3, "native/avx2"), (None, "reference"))))
    tuned = choose()
    assert tuned.path == "native/avx2/w4a16 up to 3 tokens, reference/float32"
    assert choose(backend="native").path == plain.path
    assert choose(compute="w4a8").path.endswith("w4a8")
    with_rule = choose(rules=[{"match": "*", "min_tokens": 2, "backend": "reference"}])
    assert with_rule.path == "native/avx2/w4a16 up to 1 tokens, reference/float32"


@needs_native
def test_rows_of_the_native_core_share_one_pack(file):
    keep(file, entry(((1, "native/avx2"), (None, "native/scalar"))))
    choice = choose()
    packed = choice.pack_experts(CASE.spec, CASE.experts())
    assert isinstance(packed, PackedByTokens) and len(packed.parts) == 2
    assert len(packed.tensors()) == 1
    for tokens, isa in ((2, "avx2"), (40, "scalar")):
        args = CASE.inputs(tokens, torch.bfloat16, seed=tokens)
        alone = choose(backend="native", isa=isa)
        want = alone.backend.experts_forward(alone.pack_experts(CASE.spec, CASE.experts()), *args)
        assert torch.equal(choice.backend.experts_forward(packed, *args), want)


@needs_native
def test_a_row_that_cannot_run_the_module_is_passed_over(file):
    plain = choose()
    keep(file, entry(((None, "onednn"),)), entry(((None, "no such row"),), "linear"))
    spec = dataclasses.replace(CASE.spec, up=dataclasses.replace(CASE.spec.up, act_order=True, group_size=8))
    bands = Config.load({}, environ={}).bands("x")
    assert select.choose(spec, detect(), bands[0].run, bands).path == plain.path
    assert select.choose(CASE.spec.up, detect(), bands[0].run, bands).path.startswith("native/")


@needs_native
def test_a_model_and_its_store_run_with_crossings(file, tmp_path):
    from int4moe_ipex.models.stored import write_store

    keep(
        file,
        entry(((2, "native/avx2"), (None, "native/scalar"))),
        entry(((8, "native/avx2"), (None, "native/scalar")), "linear"),
    )
    settings = Config.load({}, environ={})
    model = int4moe_ipex.load(EXAMPLE, settings)
    assert "native/avx2/w4a16 up to 2 tokens, native/scalar/w4a16" in model.int4moe_report.paths
    write_store(EXAMPLE, tmp_path / "s", settings)
    tokens = torch.arange(60).view(2, 30)
    with torch.inference_mode():
        want = model(input_ids=tokens).logits
        assert torch.equal(int4moe_ipex.load(tmp_path / "s", settings)(input_ids=tokens).logits, want)


# --------------------------------------------------------------------------------------------------------- measuring


@needs_native
@pytest.mark.parametrize("kind", ["experts", "linear"])
def test_measuring_a_small_layer(kind):
    run = RunConfig("auto", "w4a16", torch.bfloat16)
    steps = []
    small = LayerShape("small", 128, 128, 4, 2)
    found = crossings.measure(
        kind, detect(), run, shape=small, ladder=(1, 4), rounds=1, progress=lambda *step: steps.append(step)
    )
    rows = [row.name for row in crossings.candidates(CASE.spec, detect(), run)]
    assert list(found.seconds) == rows and found.crossings[-1][0] is None
    assert {row for _, row in found.crossings} <= set(rows)
    if len(rows) > 1:
        assert all(set(times) == {"1", "4"} and min(times.values()) > 0 for times in found.seconds.values())
        assert steps[-1][0] == steps[-1][1] == 2 * len(rows)
    assert found.key == tuning.key_here(detect(), "w4a16", "bfloat16", kind)
