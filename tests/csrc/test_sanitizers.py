"""The C++ test program (this folder's sources) built plainly and under sanitizers: every row of kernels, whole layers,
several callers at once, a forked child.

    INT4MOE_SANITIZERS=1 python -m pytest tests/csrc/test_sanitizers.py

Not part of every run, because it compiles the core three times.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What each build adds to the flags of the compiler, as CMake's INT4MOE_SANITIZE takes it.
BUILDS = {"plain": "", "address-undefined": "address,undefined", "thread": "thread"}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def _compiler() -> str:
    name = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if name is None:
        pytest.skip("no C++ compiler (c++, g++ or clang++) on PATH")
    return name


def _skip_unless_possible(sanitize: str, folder: Path) -> None:
    for tool in ("cmake", "ninja"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not on PATH")
    compiler = _compiler()
    if not sanitize:
        return
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [compiler, f"-fsanitize={sanitize}", str(source), "-o", str(folder / "empty")]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"{compiler} has no runtime library for -fsanitize={sanitize}")
    if subprocess.run([str(folder / "empty")], capture_output=True).returncode:
        pytest.skip(f"programs built with -fsanitize={sanitize} do not start on this kernel")


@pytest.mark.skipif("INT4MOE_SANITIZERS" not in os.environ, reason="compiles for minutes: set INT4MOE_SANITIZERS=1")
@pytest.mark.parametrize("name", BUILDS)
def test_program(name, tmp_path):
    _skip_unless_possible(BUILDS[name], tmp_path)
    # Kept between runs, so that only what changed is compiled again.
    build = ROOT / "build" / f"tests-{name}"
    flags = ["-DINT4MOE_PYTHON=OFF", "-DINT4MOE_TESTS=ON", f"-DINT4MOE_SANITIZE={BUILDS[name]}"]
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *flags]
    for command in (configure, ["cmake", "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    quick = [] if name == "plain" else ["--quick"]
    done = subprocess.run(
        [str(build / "native_tests"), *quick], capture_output=True, text=True, env=os.environ | ENVIRONMENT
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " 0 failed" in done.stdout.splitlines()[-1]
