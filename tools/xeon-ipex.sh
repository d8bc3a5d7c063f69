#!/usr/bin/env bash
# IPEX's packed tier on the emulated Xeon, which has the AVX512-FP16 and AMX that it needs (an image of about 7 GB).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/env-ipex.sh | tail -1)
"$python" -m tools.xeon_emulator python --package torch --package intel-extension-for-pytorch \
  --file int4moe_ipex --file tests --memory-mb 4096 --timeout "${INT4MOE_XEON_TIMEOUT:-1800}" \
  --env PYTHONPATH=/tmp/files:/site --env OMP_NUM_THREADS=1 --env PYTHONFAULTHANDLER=1 /tmp/files/tests/xeon/ipex_layer.py
