"""Attention of the native core against torch's, in turn: one token over its cache, and whole prompts.

    python benchmarks/attention.py --heads 32 --kv-heads 4 --head-dim 128 --keys 64,256,1024,4096 --threads 2

INT4MOE_MAX_ISA=avx2 keeps the core to AVX2, ATEN_CPU_CAPABILITY=avx2 torch. Each call of one token has a cache that has
not been read for 256 MB of others, as in a decoding step.
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

from int4moe_ipex.models import attention, core_calls

COLD_BYTES = 256 << 20


class Module:
    is_causal = True


def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    attention.attention(Module, q, k, v, None)


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1])


def measure(tokens: int, keys: int, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a call, medians over rounds in turn."""
    size = 2 * args.kv_heads * keys * args.head_dim * 2
    copies = max(2, COLD_BYTES // size) if tokens == 1 else 1
    caches = [torch.randn(2, 1, args.kv_heads, keys, args.head_dim).bfloat16() for _ in range(copies)]
    q = torch.randn(1, args.heads, tokens, args.head_dim).bfloat16()
    systems: dict[str, Callable] = {"own": own, "torch": torchs}
    times: dict[str, list[float]] = {name: [] for name in systems}
    for run in systems.values():
        run(q, *caches[0])
    at = 0
    for _ in range(args.rounds):
        for name, run in systems.items():
            for _ in range(20 if tokens == 1 else 1):
                cache = caches[at := (at + 1) % copies]
                begin = time.perf_counter()
                run(q, *cache)
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--keys", default="64,256,1024,4096")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    if not attention.available():
        parser.error("needs the native core and a CPU with AVX2")
    torch.set_num_threads(args.threads)
    rows = []
    print(f"AVX-512: {'yes' if core_calls.wide() else 'no'}, {args.threads} threads; milliseconds")
    print(f"{'tokens':>7} {'keys':>6} {'own':>9} {'torch':>9} {'ratio':>6}  own")
    with torch.inference_mode():
        for prompt in (False, True):
            for keys in map(int, args.keys.split(",")):
                tokens = keys if prompt else 1
                t = measure(tokens, keys, args)
                rows.append({"tokens": tokens, "keys": keys, "seconds": t, "avx512": core_calls.wide()})
                if prompt:
                    rate = f"{2 * args.heads * args.head_dim * keys * (keys + 1) / t['own'] / 1e9:.0f} GFLOP/s"
                else:
                    rate = f"{4 * args.kv_heads * keys * args.head_dim / t['own'] / 1e9:.0f} GB/s"
                own_ms, torch_ms = t["own"] * 1e3, t["torch"] * 1e3
                print(f"{tokens:>7} {keys:>6} {own_ms:>9.3f} {torch_ms:>9.3f} {torch_ms / own_ms:>6.2f}  {rate}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
