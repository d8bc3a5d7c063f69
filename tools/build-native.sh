#!/usr/bin/env bash
# Builds the C++ core into the source tree (int4moe_ipex/_native*.so), for running from a checkout with PYTHONPATH.
# tools/build-native.sh [PYTHON] [cmake options]; PYTHON needs nanobind, and cmake and ninja have to be on PATH.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
[ $# -gt 0 ] && shift
cmake -S "$root" -B "$root/build/inplace" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" \
  -DINT4MOE_INPLACE="$root/int4moe_ipex" "$@"
cmake --build "$root/build/inplace"
