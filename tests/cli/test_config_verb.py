import json

import pytest
from typer.testing import CliRunner

from int4moe_ipex.cli import app as cli


@pytest.fixture
def run(monkeypatch):
    monkeypatch.delenv("INT4MOE_CONFIG", raising=False)
    return lambda *args: CliRunner().invoke(cli.build_app(), list(args), catch_exceptions=False)


def test_show_with_origin(run, monkeypatch):
    monkeypatch.setenv("INT4MOE_THREADS_COUNT", "3")
    shown = json.loads(run("config", "show", "avx2", "--origin", "--json").stdout)
    assert shown["threads.count"] == {"value": 3, "origin": "INT4MOE_THREADS_COUNT"}
    assert shown["isa"]["value"] == "avx2" and shown["isa"]["origin"].endswith("avx2.yaml:4")
    assert shown["dtype"]["origin"].endswith("avx2.yaml:6")
    assert shown["store.path"] == {"value": None, "origin": "default"}
    assert "INT4MOE_THREADS_COUNT" in run("config", "show", "--origin").stdout


def test_show_warns_of_a_mistyped_variable(run, monkeypatch):
    monkeypatch.setenv("INT4MOE_BACKND", "torch")
    assert "did you mean INT4MOE_BACKEND?" in run("config", "show").stderr


def test_list_names_every_shipped_file(run):
    out = run("config", "list").stdout
    assert {line.split()[0] for line in out.splitlines()} >= {"auto", "amx", "avx512", "avx2", "ipex", "onednn"}


def test_schema_knows_every_section_and_refuses_other_keys(run):
    schema = json.loads(run("config", "schema").stdout)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["backend"]["enum"][0] == "auto"
    assert schema["$defs"]["Rule"]["required"] == ["match"]
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        assert all("description" in key for key in section["properties"].values())


def test_wrong_configuration_is_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["int4moe", "config", "show", "avx51"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("int4moe: avx51: no such configuration file")
