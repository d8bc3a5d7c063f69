"""doctor's verdicts on machines that this one is not, and its exit status."""

import json

import pytest
from typer.testing import CliRunner

from int4moe_ipex import diagnosis, machine
from int4moe_ipex.backends import select
from int4moe_ipex.backends.base import Rejected, Supported
from int4moe_ipex.cli import app as cli
from int4moe_ipex.config import Config
from int4moe_ipex.cpu import ISA_FLAGS, CpuFeatures


@pytest.fixture
def doctor(monkeypatch):
    for name in ("INT4MOE_CONFIG", "INT4MOE_BACKEND", "INT4MOE_ISA", "INT4MOE_MAX_ISA"):
        monkeypatch.delenv(name, raising=False)
    return lambda *args: CliRunner().invoke(cli.build_app(), ["doctor", *args], catch_exceptions=False)


def isa(verdicts, name):
    return next(v for v in verdicts if v.isa == name)


def test_bare_metal_without_the_flags(monkeypatch):
    monkeypatch.setattr(machine, "cpuid_flags", lambda: None)
    monkeypatch.setattr(machine, "cpu_model", lambda: ("GenuineIntel", 6, 106))
    verdicts = machine.isas(CpuFeatures("Ice Lake", ISA_FLAGS["avx512"]))
    assert isa(verdicts, "avx512").usable and isa(verdicts, "avx512").blocked_by is None
    amx = isa(verdicts, "amx")
    assert (amx.usable, amx.blocked_by) == (False, "cpu")
    assert amx.reason == "this CPU lacks amx_int8, amx_tile"


def test_guest_of_a_sapphire_rapids_without_amx(monkeypatch):
    monkeypatch.setattr(machine, "cpuid_flags", lambda: None)
    monkeypatch.setattr(machine, "cpu_model", lambda: ("GenuineIntel", 6, 143))
    amx = isa(machine.isas(CpuFeatures("a Xeon", ISA_FLAGS["avx512"] | {"hypervisor"})), "amx")
    assert amx.blocked_by == "hypervisor"
    assert amx.reason.startswith("Sapphire Rapids has amx_int8, amx_tile, and the hypervisor hides it")


def test_flag_that_linux_has_off(monkeypatch):
    monkeypatch.setattr(machine, "cpuid_flags", lambda: set(machine.CPUID_BITS))
    assert isa(machine.isas(CpuFeatures("a Xeon", ISA_FLAGS["avx2"])), "avx512").blocked_by == "kernel"


def test_permission_and_cap(monkeypatch):
    whole = CpuFeatures("a Xeon", ISA_FLAGS["amx"])
    monkeypatch.setattr(machine, "amx_permitted", lambda: False)
    assert isa(machine.isas(whole), "amx").blocked_by == "permission"
    monkeypatch.setattr(machine, "amx_permitted", lambda: True)
    assert isa(machine.isas(whole), "amx").usable
    capped = isa(machine.isas(CpuFeatures("a Xeon", ISA_FLAGS["amx"], max_isa="avx2")), "avx512")
    assert (capped.blocked_by, capped.reason) == ("cap", "INT4MOE_MAX_ISA=avx2 caps it")


def test_every_needed_flag_has_a_cpuid_bit():
    needed = set().union(*ISA_FLAGS.values()) - {"fma", "f16c"}
    assert needed == set(machine.CPUID_BITS)


def test_cpuid_agrees_with_linux_where_both_can_be_read():
    raw = machine.cpuid_flags()
    if raw is None:
        pytest.skip("needs a readable /dev/cpu/0/cpuid")
    from int4moe_ipex.cpu import detect

    seen = detect().flags & set(machine.CPUID_BITS)
    assert seen <= raw


def test_this_machine(doctor):
    result = doctor("--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["can_run"] and found["problems"] == []
    assert [row["row"] for row in found["modules"][0]["rows"]] == [row.name for row in select.TABLE]
    assert all(row["reason"] or row["supported"] for row in found["modules"][0]["rows"])
    assert found["machine"]["memory_bytes"]["total"] > found["machine"]["memory_bytes"]["available"] > 0
    assert found["packages"]["torch"] and found["packages"]["transformers"]
    assert "Recommended" in doctor().stdout


def test_recommended_configuration_runs(doctor, tmp_path):
    found = json.loads(doctor("--json").stdout)
    file = tmp_path / "recommended.yaml"
    file.write_text(found["recommended"]["yaml"])
    assert doctor("--config", str(file)).exit_code == 0


def test_configuration_that_cannot_run_is_status_1_and_says_why(doctor, monkeypatch):
    monkeypatch.setattr("int4moe_ipex.cpu._cpuinfo", lambda: ("a CPU with AVX2", ISA_FLAGS["avx2"]))
    result = doctor("--config", "amx", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and not found["can_run"]
    assert "isa amx is asked for and this CPU lacks amx_int8" in found["problems"][0]
    assert doctor("--config", "amx").exit_code == 1


def test_wrong_configuration_is_status_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["int4moe", "doctor", "--config", "amxx"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2 and "no such configuration file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "name"),
    [("native/amx/w4a16", "amx"), ("native/avx512_bf16/w4a16", "avx512"), ("native/avx2/w4a16", "avx2")],
)
def test_recommends_the_shipped_file_of_the_best_row(monkeypatch, path, name):
    class Native:
        def support_experts(self, spec, cpu, run):
            return Supported(path) if run.isa == name else Rejected("another row")

    monkeypatch.setattr(select, "engine", lambda wanted: Native() if wanted == "native" else Rejected("not here"))
    cpu = CpuFeatures("a Xeon", ISA_FLAGS["amx"])
    recommended = diagnosis.recommend(cpu, [diagnosis.TYPICAL])
    assert recommended["name"] == name
    monkeypatch.setattr(machine, "nodes", lambda: {0: {0}, 1: {1}})
    text = diagnosis.recommend(cpu, [diagnosis.TYPICAL])["yaml"]
    assert text == f"version: 1\nbackend: native\nisa: {name}\nthreads:\n  memory: interleave\n"


def test_modules_of_a_checkpoint_are_asked_apart_where_rules_differ(checkpoints):
    config = Config.load({"rules": [{"match": "model.layers.0.*", "backend": "reference"}]}, environ={})
    found = diagnosis.diagnose(config, checkpoints / "gptq-sym-g128")
    by_path = {(m["module"], m["path"]) for m in found["modules"]}
    assert ("model.layers.0.mlp.experts", "reference/float32") in by_path
    assert any(name == "model.layers.1.mlp.experts" and path != "reference/float32" for name, path in by_path)
    assert sum(m["alike"] for m in found["modules"]) == 3 + 3 * 4
