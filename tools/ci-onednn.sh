#!/usr/bin/env bash
# The onednn backend and its binding, what every backend has to hold, and real checkpoints on it, with PyPI's oneDNN.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/env-onednn.sh | tail -1)
PYTHONPATH=$PWD "$python" -m pytest -q -n 2 tests/backends tests/models/test_real_checkpoints.py \
  tests/models/test_stored.py -k onednn "$@"
