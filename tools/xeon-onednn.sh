#!/usr/bin/env bash
# The onednn backend on the emulated Xeon: with AMX, and capped at AVX-512 (two boots, an image of about 3 GB).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/env-onednn.sh | tail -1)
guest() { # guest CAP PATH-OF-BFLOAT16 PATH-OF-FLOAT32
  "$python" -m tools.xeon_emulator python --package torch --package onednn --file int4moe_ipex --file tests \
    --memory-mb 3072 --timeout "${INT4MOE_XEON_TIMEOUT:-1800}" --env PYTHONPATH=/tmp/files:/site --env OMP_NUM_THREADS=1 --env PYTHONFAULTHANDLER=1 \
    --env "INT4MOE_ONEDNN_LIB=$(dirname "$(dirname "$python")")/lib/libdnnl.so.3" --env "ONEDNN_MAX_CPU_ISA=$1" \
    /tmp/files/tests/xeon/onednn_layer.py "$2" "$3"
}
guest ALL onednn/avx10_1_512_amx/bf16 onednn/avx512_core/f32
guest AVX512_CORE_BF16 onednn/avx512_core_bf16/bf16 onednn/avx512_core/f32
