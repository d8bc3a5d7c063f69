"""tune as a user calls it, on a layer that is small enough for a test."""

import json

import pytest
import torch
from typer.testing import CliRunner

from int4moe_ipex import tuning
from int4moe_ipex.backends import select
from int4moe_ipex.bench import crossings
from int4moe_ipex.bench.shapes import LayerShape
from int4moe_ipex.cli import app as cli
from int4moe_ipex.cpu import detect


@pytest.fixture
def run(monkeypatch, tmp_path):
    for name in ("INT4MOE_CONFIG", "INT4MOE_BACKEND", "INT4MOE_ISA", "INT4MOE_THREADS_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "tune.json"))
    small = (LayerShape("a small layer", 128, 128, 4, 2), (1, 4), 1)
    monkeypatch.setattr(
        crossings.measure, "__kwdefaults__", dict(zip(("shape", "ladder", "rounds"), small), progress=None)
    )
    before = torch.get_num_threads()
    yield lambda *args: CliRunner().invoke(cli.build_app(), list(args))
    torch.set_num_threads(before)


def test_measured_values_are_kept_and_shown(run, tmp_path):
    if "native" not in select.available() or not detect().has("avx2"):
        pytest.skip("needs the native core and a CPU with AVX2")
    threads = torch.get_num_threads()
    assert json.loads(run("doctor", "--json").stdout)["tuning"]["in_use"] == {}
    assert "int4moe tune measures them" in run("doctor").stdout
    found = json.loads(run("tune", "--json").stdout)
    assert found["file"] == str(tmp_path / "tune.json") and found["seconds"] > 0
    assert [entry["key"]["kind"] for entry in found["entries"]] == ["experts", "linear"]
    assert all(entry["key"]["threads"] == threads for entry in found["entries"])
    tuned = json.loads(run("doctor", "--json").stdout)["tuning"]
    assert set(tuned["in_use"]) == {"experts", "linear"}
    assert "auto for experts is tuned: native/" in run("config", "show", "--origin").stdout
    assert json.loads(run("config", "show", "--origin", "--json").stdout)["tuned"] == tuned
    assert json.loads(run("doctor", "--json", "--backend", "native").stdout)["tuning"]["in_use"] == {}
    assert "none in use" in " ".join(run("doctor", "--backend", "native").stdout.split())
    assert run("tune", "--clear").exit_code == 0 and not (tmp_path / "tune.json").exists()


def test_several_numbers_of_threads_and_no_file(run, tmp_path):
    result = run("tune", "--threads", "1,2", "--dry-run")
    assert result.exit_code == 0 and "1 threads" in result.stdout and "2 threads" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_one_sentence(run, monkeypatch, capsys):
    for args, sentence in (
        (["--threads", "1,x"], "--threads is a list of numbers such as 8,16, not '1,x'"),
        (["--compute", "w8a8"], "compute must be w4a16 or w4a8, not 'w8a8'"),
    ):
        monkeypatch.setattr("sys.argv", ["int4moe", "tune", *args])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        error = capsys.readouterr().err
        assert caught.value.code == 2 and sentence in error and error.count("\n") == 1
    monkeypatch.setenv(tuning.VARIABLE, "off")
    monkeypatch.setattr("sys.argv", ["int4moe", "tune"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "INT4MOE_TUNE_FILE is off, so that nothing would be kept" in capsys.readouterr().err


def test_help_has_an_example(run):
    assert "int4moe tune --threads" in run("tune", "--help").stdout
