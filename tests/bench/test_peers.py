"""benchmarks/peers end to end where nothing has to be installed: this package and torch's op on a tiny layer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from int4moe_ipex.cpu import detect

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"


def script(name: str, *args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, PEERS / name, *args]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def test_the_layer_runs_on_ours_and_torch_in_turn_and_is_drawn(tmp_path):
    pytest.importorskip("int4moe_ipex._native", reason="the native core is not built")
    if detect().best_isa == "scalar":
        pytest.skip("this CPU lacks AVX2")
    report, plot = tmp_path / "layer.json", tmp_path / "layer.svg"
    systems = "own-w4a16,own-w4a16:g32:asym,own-w4a8:act-order,torch,own-w4a16:g7x"
    options = ("--shape", "256x128x8x2", "--tokens", "1,5", "--systems", systems, "--json", report)
    done = script("run.py", *options, "--rounds", 2, "--seconds", 0.01, "--patience", 0, "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert "own-w4a16:g7x: 'g7x' is not" in done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [(row["system"], row["tokens"]) for row in rows] == [
        (name, tokens) for tokens in (1, 5) for name in systems.split(",")[:-1]
    ]
    for row in rows:
        assert row["seconds"] > 0 and row["rounds"] == 2 and row["against"] == "torch"
        assert 0 < row["error"] < (2e-2 if "w4a8" in row["system"] else 5e-3)
    assert rows[3]["speedup"] == 1 and rows[1]["speedup"] == pytest.approx(
        (rows[1]["speedup_min"] + rows[1]["speedup_max"]) / 2
    )
    if pytest.importorskip("matplotlib"):
        drawn = script("plot.py", report, plot, "--base", "torch")
        assert drawn.returncode == 0, drawn.stderr
        assert "times as fast as torch" in plot.read_text()


def test_mistakes_are_named(tmp_path):
    assert "unknown systems nonesuch" in script("run.py", "--systems", "nonesuch").stderr
    assert "unknown systems nonesuch" in script("install.py", tmp_path, "--only", "nonesuch").stderr
    absent = script("run.py", "--dir", tmp_path, "--systems", "openvino", "--shape", "64x32x8x2")
    assert "run install.py first" in absent.stderr
