"""Precedence, origins, rules, and the files of configs/."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from int4moe_ipex import config_sources
from int4moe_ipex.config import Config, shipped

AUTO = shipped()["auto"]


def test_defaults_are_those_of_auto_yaml():
    assert Config.load(environ={}).model_dump() == Config.load(AUTO, environ={}).model_dump()


def test_auto_yaml_shows_every_key_once_with_a_comment():
    def keys(data, prefix=()):
        for name, value in data.items():
            if isinstance(value, dict):
                yield from keys(value, (*prefix, name))
            else:
                yield (*prefix, name)

    shown = list(keys(yaml.safe_load(AUTO.read_text())))
    assert sorted(shown) == sorted([*config_sources.leaves(Config), ("rules",)])
    for line in AUTO.read_text().splitlines():
        if re.match(r" *[a-z_]+: [^ ]", line) and not line.startswith("rules"):
            assert "#" in line, line


@pytest.mark.parametrize("name", shipped())
def test_shipped_file_loads_by_name_and_by_path(name):
    by_name = Config.load(name, environ={})
    assert by_name.model_dump() == Config.load(shipped()[name], environ={}).model_dump()
    assert by_name.version == 1
    first = shipped()[name].read_text().splitlines()[0]
    assert first.startswith("# "), "say what the file is for"


def test_precedence_and_origins(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("isa: avx2\nbackend: native\ncompute: w4a8\nthreads:\n  count: 3\n  memory: interleave\n")
    environ = {"INT4MOE_CONFIG": str(file), "INT4MOE_BACKEND": "auto", "INT4MOE_THREADS_COUNT": "2", "INT4MOE_ISA": ""}
    config = Config.load(environ=environ, compute="w4a16", dtype=None)
    assert (config.isa, config.backend, config.compute, config.dtype) == ("avx2", "auto", "w4a16", "bfloat16")
    assert (config.threads.count, config.threads.memory) == (2, "interleave")
    origins = config.origins()
    assert origins["isa"] == f"{file}:1"
    assert origins["backend"] == "INT4MOE_BACKEND"
    assert origins["compute"] == "argument compute"
    assert origins["dtype"] == "default"
    assert origins["threads.count"] == "INT4MOE_THREADS_COUNT"
    assert origins["threads.memory"] == f"{file}:6"
    assert set(origins) == {".".join(p) for p in config_sources.leaves(Config)} | {"rules"}


def test_a_file_given_by_hand_outranks_the_variable(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("isa: avx2\n")
    assert Config.load(file, environ={"INT4MOE_CONFIG": "/no/such.yaml"}).isa == "avx2"


def test_a_section_argument_changes_its_keys_alone():
    config = Config.load({"threads": {"count": 4}}, environ={}, threads={"memory": "interleave"})
    assert (config.threads.count, config.threads.memory) == (4, "interleave")


def test_a_config_passes_through_and_takes_arguments():
    config = Config.load("avx2", environ={})
    assert Config.load(config, environ={"INT4MOE_ISA": "amx"}) is config
    changed = Config.load(config, environ={"INT4MOE_ISA": "amx"}, dtype="float32")
    assert (changed.isa, changed.dtype, config.dtype) == ("avx2", "float32", "bfloat16")
    assert changed.origins()["isa"].endswith("avx2.yaml:4")
    assert changed.origins()["dtype"] == "argument dtype"


def test_text_stays_text_in_variables():
    environ = {"INT4MOE_STORE_PATH": "12", "INT4MOE_SERVE_HOST": "on", "INT4MOE_GENERATION_DO_SAMPLE": "true"}
    config = Config.load(environ=environ)
    assert (config.store.path, config.serve.host, config.generation.do_sample) == ("12", "on", True)


def test_empty_file_means_defaults(tmp_path):
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert Config.load(file, environ={}).model_dump() == Config.load(environ={}).model_dump()


def test_mistyped_variable_is_told():
    told = config_sources.unknown_variables(Config, {"INT4MOE_BACKND": "torch", "INT4MOE_MAX_ISA": "avx2", "HOME": "/"})
    assert told == ["environment variable INT4MOE_BACKND has no effect; did you mean INT4MOE_BACKEND?"]


def test_rules_first_match_wins_and_inherit():
    config = Config.load(
        {
            "compute": "w4a8",
            "dtype": "float32",
            "rules": [
                {"match": "model.layers.0.*", "backend": "torch", "compute": "w4a16"},
                {"match": "*.experts", "isa": "avx2"},
            ],
        },
        environ={},
    )
    first = config.for_module("model.layers.0.mlp.experts")
    assert (first.backend, first.run.isa, first.run.compute, first.rule) == ("torch", "auto", "w4a16", 0)
    second = config.for_module("model.layers.1.mlp.experts")
    assert (second.backend, second.run.isa, second.run.compute, second.rule) == ("auto", "avx2", "w4a8", 1)
    other = config.for_module("model.layers.1.self_attn.q_proj")
    assert (other.run.isa, other.rule, other.run.dtype) == ("auto", None, torch.float32)


def test_bands_cover_all_token_counts_without_overlap():
    rules = [
        {"match": "*.experts", "min_tokens": 4, "max_tokens": 8, "backend": "torch"},
        {"match": "*.experts", "max_tokens": 5, "isa": "avx2"},
        {"match": "model.*", "min_tokens": 100, "compute": "w4a8"},
    ]
    config = Config.load({"rules": rules}, environ={})
    bands = config.bands("model.layers.0.mlp.experts")
    assert [(b.min_tokens, b.max_tokens, b.rule) for b in bands] == [
        (0, 3, 1),
        (4, 8, 0),
        (9, 99, None),
        (100, None, 2),
    ]
    for tokens in range(200):
        want = next(
            (i for i, r in enumerate(rules) if r.get("min_tokens", 0) <= tokens <= r.get("max_tokens", 10**9)), None
        )
        assert config.for_module("model.layers.0.mlp.experts", tokens).rule == want
    assert len(config.bands("lm_head")) == 1


def test_frozen():
    config = Config.load(environ={})
    with pytest.raises(ValueError):
        config.isa = "amx"


def test_paths_may_have_spaces_and_unicode(tmp_path):
    folder = tmp_path / "my ünit"
    folder.mkdir()
    file = folder / "a b.yaml"
    file.write_text("isa: avx2\n")
    assert Config.load(Path(file), environ={}).isa == "avx2"
