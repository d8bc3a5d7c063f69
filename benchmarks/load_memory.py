"""Load a checkpoint in a fresh process: GB/s from a warm page cache, and the peak of anonymous memory.

    python benchmarks/make_checkpoint.py OUT --shape qwen3-30b-a3b --layers 6
    python benchmarks/load_memory.py OUT

The peak is what the process holds above a bare import of torch and transformers, sampled from outside. It is held
against the size of the loaded model, one decoder layer and 0.4 GB for buffers; the speed against 0.4 GB/s.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

MARGIN = 0.4e9
LEAST_RATE = 0.4e9
SAMPLE_SECONDS = 0.002

BARE = "import torch, transformers"
LOAD = """
import json, sys, time
import torch, transformers
import int4moe_ipex

path, options = sys.argv[1], json.loads(sys.argv[2])
start = time.perf_counter()
model = int4moe_ipex.load(path, **options)
seconds = time.perf_counter() - start
dense = {t.data_ptr(): t.numel() * t.element_size() for t in model.parameters()}
print(json.dumps({
    "seconds": seconds,
    "packed": model.int4moe_report.packed_nbytes,
    "dense": sum(dense.values()),
    "layers": model.config.get_text_config().num_hidden_layers,
    "paths": {path: len(modules) for path, modules in model.int4moe_report.paths.items()},
}))
"""


def anonymous(pid: int) -> int:
    """Bytes of anonymous memory of a process now; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def watch(*command: str) -> tuple[str, int]:
    """Standard output of a Python process, and its peak of anonymous memory."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(SAMPLE_SECONDS)
    output = process.stdout.read()
    if process.returncode:
        sys.exit(f"the process ended with status {process.returncode}")
    return output, peak


def warm(path: Path) -> int:
    """Reads every shard once; their bytes."""
    total = 0
    for shard in sorted(path.glob("*.safetensors")):
        with shard.open("rb", buffering=0) as file:
            while chunk := file.read(16 << 20):
                total += len(chunk)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compute", default="w4a16")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    options = {"backend": args.backend, "dtype": args.dtype, "compute": args.compute}
    stored = warm(args.path)
    if not stored:
        sys.exit(f"{args.path} holds no safetensors files")
    _, bare = watch("-c", BARE)
    output, peak = watch("-c", LOAD, str(args.path), json.dumps(options))
    found = json.loads(output.strip().splitlines()[-1])
    size = found["packed"] + found["dense"]
    layer = found["packed"] / found["layers"]
    result = {
        **found,
        "stored": stored,
        "rate": stored / found["seconds"],
        "peak_above_import": peak - bare,
        "allowed": size + layer + MARGIN,
        "within": peak - bare <= size + layer + MARGIN and stored / found["seconds"] >= LEAST_RATE,
    }
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"stored   {stored / 1e9:.2f} GB, loaded in {found['seconds']:.2f} s: {result['rate'] / 1e9:.2f} GB/s")
        print(f"in memory {found['packed'] / 1e9:.2f} GB packed and {found['dense'] / 1e9:.2f} GB dense")
        print(f"peak     {(peak - bare) / 1e9:.2f} GB above a bare import, {result['allowed'] / 1e9:.2f} GB allowed")
        for path, modules in found["paths"].items():
            print(f"path     {path}: {modules} modules")
    sys.exit(0 if result["within"] else 1)


if __name__ == "__main__":
    main()
