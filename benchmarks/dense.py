"""Bfloat16 linears of the native core, plain and in 12 bits, against torch's, in turn.

    python benchmarks/dense.py --rows 60000 --columns 2048 --tokens 1,2,4,8,16,32 --threads 2

INT4MOE_MAX_ISA=avx2 keeps the core to AVX2, ONEDNN_MAX_CPU_ISA=avx2 torch. The weight has to be larger than caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from int4moe_ipex.bench.limits import measure_read
from int4moe_ipex.models import attention
from int4moe_ipex.models.compact import CompactWeight
from int4moe_ipex.models.core_calls import few_tokens, wide


def measure(systems: dict[str, Callable], x: torch.Tensor, rounds: int) -> dict[str, float]:
    """Seconds of a call, medians over rounds in turn."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds + 1):
        for name, run in systems.items():
            begin = time.perf_counter()
            run(x)
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(t[1:]) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60000)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--tokens", default="1,2,4,8,16,32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    if not attention.available():
        parser.error("needs the native core and a CPU with AVX2")
    torch.set_num_threads(args.threads)
    weight = (torch.randn(args.rows, args.columns) * 0.02).bfloat16()
    begin = time.perf_counter()
    compact = CompactWeight.of(weight)
    packing = time.perf_counter() - begin
    if compact is None:
        parser.error("these weights cannot be packed: columns have to be a multiple of 32, at most 32768")
    share = compact.packed.nbytes / weight.nbytes
    print(f"AVX-512: {'yes' if wide() else 'no'}, {args.threads} threads; packed in {packing:.2f} s to {share:.1%}")
    systems = {
        "plain": lambda x: few_tokens(x, weight, None),
        "12 bits": lambda x: few_tokens(x, weight, None, compact),
        "torch": lambda x: F.linear(x, weight),
    }
    rows = []
    print(f"{'tokens':>7}" + "".join(f"{name + ', ms':>13}" for name in systems) + f"{'memory, GB/s':>14}")
    with torch.inference_mode():
        for tokens in map(int, args.tokens.split(",")):
            memory = measure_read(args.threads) / 1e9
            t = measure(systems, torch.randn(tokens, args.columns).bfloat16(), args.rounds)
            rows.append({"tokens": tokens, "seconds": t, "memory_gb_s": memory, "avx512": wide()})
            print(f"{tokens:>7}" + "".join(f"{t[name] * 1e3:>13.2f}" for name in systems) + f"{memory:>14.0f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
