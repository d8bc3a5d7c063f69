#!/usr/bin/env bash
# The whole suite on torch 2.8.0, the oldest that is supported, and with it the ipex backend on IPEX 2.8.0.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/env-ipex.sh | tail -1)
PATH=$(dirname "$python"):$PATH tools/build-native.sh "$python" >/dev/null
PYTHONPATH=$PWD "$python" -m pytest -q -n 2 tests "$@"
