"""Where the oneDNN library is looked for, and what is said when it cannot be used; runs everywhere."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from int4moe_ipex import diagnosis
from int4moe_ipex.backends.onednn import library
from int4moe_ipex.config import Config
from int4moe_ipex.errors import BackendError


@pytest.fixture
def fresh(monkeypatch):
    """A process in which no oneDNN was looked for, found or named."""
    monkeypatch.setattr(library, "_choice", library._Choice())
    monkeypatch.delenv(library.VARIABLE, raising=False)
    return monkeypatch


def test_configuration_comes_before_the_variable(fresh, tmp_path):
    first, second = tmp_path / "first.so", tmp_path / "second.so"
    first.touch(), second.touch()
    fresh.setenv(library.VARIABLE, str(second))
    assert library._find() == (str(second), f"the environment variable {library.VARIABLE}")
    library.configure(str(first))
    assert library._find() == (str(first), "onednn.lib of the configuration")


def test_package_comes_before_the_system(fresh, tmp_path):
    fresh.setattr(library, "_packaged", lambda: tmp_path / "libdnnl.so.3")
    assert library._find() == (str(tmp_path / "libdnnl.so.3"), "the package onednn")
    fresh.setattr(library, "_packaged", lambda: None)
    assert library._find() == ("libdnnl.so.3", "the system")


def test_a_named_file_is_not_fallen_back_from(fresh, tmp_path):
    library.configure(str(tmp_path / "none.so"))
    with pytest.raises(BackendError, match=r"none.so is no file \(from onednn.lib of the configuration\)"):
        library.load()
    ok, line = library.status()
    assert not ok and "none.so is no file" in line


def test_a_file_that_is_no_library(fresh, tmp_path):
    path = tmp_path / "libdnnl.so"
    path.write_bytes(b"text")
    library.configure(str(path))
    assert library.status()[0] is False
    with pytest.raises(BackendError, match=r"libdnnl.so does not load"):
        library.load()


def test_another_library_is_no_onednn(fresh):
    with pytest.raises(BackendError, match=r"has no dnnl_engine_create: it is no oneDNN 3\.10"):
        library.Library("libc.so.6")


def test_nowhere_says_how_to_get_it(fresh):
    fresh.setattr(library, "_packaged", lambda: None)
    fresh.setattr(library, "SONAME", "libdnnl-that-is-nowhere.so.3")
    ok, line = library.status()
    assert not ok and "pip install onednn==2026.1.0" in line and "\n" not in line


def test_doctor_looks_where_the_configuration_says(fresh, tmp_path):
    path = tmp_path / "none.so"
    found = diagnosis.diagnose(Config.load({"onednn": {"lib": str(path)}}, environ={}))
    assert found["libraries"]["onednn"] == {
        "available": False,
        "detail": f"{path} is no file (from onednn.lib of the configuration)",
    }


def test_one_process_one_library(fresh):
    class Loaded:
        path = "/lib/libdnnl.so.3"

    library._choice.loaded = Loaded()
    library.configure(None)
    library.configure("/lib/libdnnl.so.3")
    with pytest.raises(BackendError, match="needs a new process"):
        library.configure("/opt/libdnnl.so.3")


def test_importing_the_backend_loads_nothing():
    script = """
        from int4moe_ipex.backends import onednn, select
        select.available()
        assert "dnnl" not in open("/proc/self/maps").read().replace("/onednn/", "")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)
