#!/usr/bin/env bash
# The onednn backend on the emulated Xeon: with AMX, and capped at AVX-512 (an image of about 3 GB).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/env-onednn.sh | tail -1)
"$python" -m tools.xeon_emulator python --package torch --package onednn --file int4moe_ipex --file tests \
  --memory-mb 3072 --timeout "${INT4MOE_XEON_TIMEOUT:-1800}" --env PYTHONPATH=/tmp/files:/site --env OMP_NUM_THREADS=1 \
  --env PYTHONFAULTHANDLER=1 --env "INT4MOE_ONEDNN_LIB=$(dirname "$(dirname "$python")")/lib/libdnnl.so.3" \
  /tmp/files/tests/xeon/onednn_layer.py
