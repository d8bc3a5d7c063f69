#!/usr/bin/env bash
# Canonical weights against compressed-tensors, gptqmodel, AutoRound and AutoAWQ themselves, bit for bit.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/env-formats.sh | tail -1)
PYTHONPATH=. "$python" -m pytest -q -n 2 tests/formats_env
