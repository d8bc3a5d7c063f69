"""Open a prepacked store in fresh processes: seconds until the model is there, until its first token, and whose memory.

    python benchmarks/make_checkpoint.py CHECKPOINT --shape qwen3-30b-a3b --layers 12 --vocab-size 32000
    int4moe convert CHECKPOINT STORE
    python benchmarks/open_store.py STORE --processes 2

Imports of torch and transformers are not counted. The memory is what /proc/PID/smaps says of the store's files while
all processes run: Rss is there once for all of them, Pss is each one's share of it, Private_Dirty is a copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

CHILD = """
import json, re, sys, time
import torch, torch._dynamo, transformers
import int4moe_ipex
import int4moe_ipex.models.stored
from transformers import AutoConfig, AutoModelForCausalLM

path, options, opens, new = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(path))]  # imports the family's module
seconds = []
for _ in range(opens):
    start = time.perf_counter()
    model = int4moe_ipex.load(path, options)
    seconds.append(time.perf_counter() - start)
ids = torch.arange(1, 5)[None]
marks = []
with torch.inference_mode():
    start = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    first = time.perf_counter() - start
    model.generate(input_ids=ids, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    start = time.perf_counter()
    model.generate(input_ids=ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    rate = new / (time.perf_counter() - start)
print("ready", flush=True)
sys.stdin.readline()
found = {"Rss": 0, "Pss": 0, "Private_Dirty": 0}
for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read()):
    if ".safetensors" in part.partition("\\n")[0]:
        for key, kb in re.findall(r"(?m)^(\\w+):\\s+(\\d+) kB", part):
            if key in found:
                found[key] += int(kb) * 1024
print(json.dumps({
    "open_seconds": seconds,
    "first_call_seconds": first,
    "tokens_per_second": rate,
    "packed_bytes": model.int4moe_report.packed_nbytes,
    "modules": sum(map(len, model.int4moe_report.paths.values())),
    "memory": found,
}), flush=True)
sys.stdin.readline()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="folder of the store (or of a checkpoint, for comparison)")
    parser.add_argument("--processes", type=int, default=1, help="started one after the other, alive together")
    parser.add_argument("--opens", type=int, default=3, help="openings per process")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--placement", choices=("mmap", "copy"), default="mmap")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    options = json.dumps({"store": {"placement": args.placement}})
    command = [sys.executable, "-c", CHILD, args.path, options, str(args.opens), str(args.new_tokens)]
    processes = []
    for _ in range(args.processes):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        if process.stdout.readline() != "ready\n":
            sys.exit(f"the process ended with status {process.wait()}")
    found = []
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
        found.append(json.loads(process.stdout.readline()))
    for process in processes:
        process.communicate("\n")
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for number, one in enumerate(found, 1):
        memory = ", ".join(f"{key} {value / 1e9:.2f} GB" for key, value in one["memory"].items())
        print(
            f"process {number}: {one['modules']} modules, {one['packed_bytes'] / 1e9:.2f} GB packed, opened in "
            f"{statistics.median(one['open_seconds']):.3f} s (first {one['open_seconds'][0]:.3f} s), first call "
            f"{one['first_call_seconds']:.2f} s, {one['tokens_per_second']:.1f} tokens/s; {memory}"
        )


if __name__ == "__main__":
    main()
