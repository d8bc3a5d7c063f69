"""`int4moe bench` end to end on a tiny layer and a tiny checkpoint."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from int4moe_ipex.bench.synthetic import Scheme, write_checkpoint
from int4moe_ipex.cli.app import build_app
from int4moe_ipex.errors import BackendError, ConfigError

from .test_synthetic import TINY

LAYER = ["bench", "layer", "--shape", "64x32x8x2", "--group-size", "32", "--backend", "reference", "--rounds", "1"]


@pytest.fixture(autouse=True)
def short_batches(monkeypatch):
    from int4moe_ipex.bench import layer, timing

    monkeypatch.setattr(layer, "run_batch", lambda calls: timing.run_batch(calls, 0.01))


def invoke(*args: str):
    result = CliRunner().invoke(build_app(), list(args))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_layer_writes_a_report_and_compares_with_it(tmp_path):
    file = tmp_path / "a.json"
    first = invoke(*LAYER, "--tokens", "1,3", "--compute", "w4a16,w4a8", "--dtype", "float32", "--json", str(file))
    assert first.exit_code == 0 and "reference/float32" in first.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["tokens"] for row in rows] == [1, 3] and all(row["error"] < 1e-6 for row in rows)
    slow = json.loads(file.read_text())
    for row in slow["rows"]:
        row["seconds"] *= 1e-6  # a baseline that nothing can match
        row["read_share"] = None
    file.write_text(json.dumps(slow))
    again = invoke(*LAYER, "--tokens", "3", "--dtype", "float32", "--compare", str(file), "--noise", "0.5")
    assert again.exit_code == 1 and "against the baseline" in again.output
    assert "slower than the baseline by more than 50%: reference/float32" in again.stderr
    for row in slow["rows"]:
        row["seconds"] *= 1e12  # and one that nothing can miss
    file.write_text(json.dumps(slow))
    assert invoke(*LAYER, "--tokens", "3", "--dtype", "float32", "--compare", str(file)).exit_code == 0
    with pytest.raises(ConfigError, match="no row"):
        invoke(*LAYER, "--tokens", "2", "--dtype", "float32", "--compare", str(file))


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="positive numbers"):
        invoke(*LAYER, "--tokens", "1,x")
    with pytest.raises(ConfigError, match="unknown layer shape"):
        invoke("bench", "layer", "--shape", "nonesuch")
    with pytest.raises(BackendError, match="w4a8"):
        invoke(*LAYER, "--compute", "w4a8")


def test_model_measures_a_checkpoint(tmp_path):
    write_checkpoint(tmp_path, TINY, Scheme("gptq", 32))
    sizes = ("--prompt-tokens", "12", "--new-tokens", "4")
    result = invoke("bench", "model", str(tmp_path), *sizes, "--backend", "reference", "--json")
    found = json.loads(result.stdout)
    assert found["decode_rate"] > 0 and found["prefill_rate"] > 0 and len(found["decode_seconds"]) == 4
    assert {"experts", "attention", "router", "norms", "lm_head", "other"} <= found["decode_parts"].keys()
    assert 0 < found["outside_experts"] < 1
    assert found["packed_bytes"] > 0 and found["peak_rss_bytes"] > found["packed_bytes"]
