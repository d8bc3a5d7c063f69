#!/usr/bin/env bash
# Benchmarks on a runner: tools/bench-runner.sh FOLDER ISA. Compares with FOLDER's reports and fails on a regression
# beyond the noise; a report that is not there yet is written (delete one to take a new baseline).
# NODE: the NUMA node to stay on (default 0, where numactl is installed). NOISE: default 0.1.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1 isa=$2
mkdir -p "$folder"
pin=()
if command -v numactl >/dev/null; then pin=(numactl "--cpunodebind=${NODE:-0}" "--membind=${NODE:-0}"); fi
failed=0
for compute in w4a16 w4a8; do
  report=bench-$isa-$compute.json baseline=$folder/$isa-$compute.json
  compare=()
  if [ -e "$baseline" ]; then compare=(--compare "$baseline" --noise "${NOISE:-0.1}"); fi
  "${pin[@]}" .venv/bin/int4moe bench layer --isa "$isa" --compute "$compute" --tokens 1,4,16,64,512 --json "$report" \
    "${compare[@]}" || failed=1
  if [ ! -e "$baseline" ] && [ -e "$report" ]; then cp "$report" "$baseline"; echo "new baseline: $baseline"; fi
done
exit $failed
