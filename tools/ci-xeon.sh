#!/usr/bin/env bash
# The native core on an emulated Xeon (Sapphire Rapids; tools/xeon_emulator): the C++ test program over every row of
# kernels, then the Python package with the AVX-512 and AMX rows that the selector chooses. No Xeon is needed; it runs
# as root on Debian or Ubuntu and installs what is missing with apt. PYTHON: an interpreter that has the package.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || { echo "no $python: run make setup, or set PYTHON" >&2; exit 2; }

missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v cmake >/dev/null || missing+=(cmake)
command -v make >/dev/null || missing+=(make)
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -q >/dev/null && apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
fi

echo "== the C++ test program, linked statically"
build=build/xeon
cmake -S . -B "$build" -DINT4MOE_PYTHON=OFF -DINT4MOE_TESTS=ON -DINT4MOE_STATIC=ON >/dev/null
cmake --build "$build" -j "$(nproc)" -- -s >/dev/null
# All batch sizes for the rows that need a Xeon; the others have theirs below.
time "$python" -m tools.xeon_emulator static "$build/native_tests" --quick --whole avx512 --whole amx --require avx2 \
  --require avx2_vnni --require avx512 --require amx

echo "== as a compiler without AMX builds it, on this CPU"
cmake -S . -B build/no-amx -DINT4MOE_PYTHON=OFF -DINT4MOE_TESTS=ON -DINT4MOE_COMPILER_HAS_AMX=OFF >/dev/null
cmake --build build/no-amx -j "$(nproc)" -- -s >/dev/null
build/no-amx/native_tests --without amx

echo "== the Python package"
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$stage/src/tests"
cp -r int4moe_ipex "$stage/src/"
# An installed package has its core elsewhere than a source tree.
core=$("$python" -c 'import torch; from int4moe_ipex import _native; print(_native.__file__)')
cp -u "$core" "$stage/src/int4moe_ipex/"
cp -r tests/__init__.py tests/weights.py tests/xeon "$stage/src/tests/"
checkpoint=examples/tiny-qwen3moe-gptq-sym-g128
cp -r "$checkpoint" "$stage/src/checkpoint"
"$python" -m tests.xeon.heldout "$checkpoint" examples/heldout.txt "$stage/src/heldout.json"
packages=()
for name in $("$python" -c 'import re, importlib.metadata as m, pathlib
text = pathlib.Path("pyproject.toml").read_text()
block = re.search(r"^dependencies = \[(.*?)\]", text, re.M | re.S).group(1)
print(*re.findall(r"\"([A-Za-z0-9_-]+)", block))'); do packages+=(--package "$name"); done
time "$python" -m tools.xeon_emulator python "${packages[@]}" --file "$stage/src" --env PYTHONPATH=/tmp/files/src:/site \
  --env OMP_NUM_THREADS=2 --timeout 1800 /tmp/files/src/tests/xeon/guest_suite.py \
  /tmp/files/src/checkpoint /tmp/files/src/heldout.json amx avx512
