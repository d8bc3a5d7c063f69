"""Pack canonical weights for the native core: GB/s of int4 codes on one thread, by group size, zeros and act-order.

    python benchmarks/packing.py [--shape qwen3-30b-a3b] [--experts 16] [--rounds 9]

`pack` is the C++ core alone, into memory that was touched before; `pack_experts` is the whole call of the backend, with
its checks and with fresh memory, which the operating system clears first. The target is 1 GB/s for each core.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import torch

from int4moe_ipex.backends.base import RunConfig
from int4moe_ipex.backends.native import NativeBackend
from int4moe_ipex.backends.native.core import core_layout
from int4moe_ipex.backends.native.packing import pack_projection
from int4moe_ipex.bench.layer import LayerCase
from int4moe_ipex.bench.shapes import layer_shape
from int4moe_ipex.packing.layout import NativeLayout, allocate

MADE = 4  # experts with weights of their own; others repeat them
KINDS = [(g, asym, order) for g in (128, 32) for asym in (False, True) for order in (False, True)]


def measure(case: LayerCase, rounds: int) -> tuple[float, float]:
    """Best seconds of the core's packing of all experts, and of one whole pack_experts."""
    spec = case.spec
    made = [case.expert(i) for i in range(MADE)]
    experts = [made[i % MADE] for i in range(spec.num_experts)]
    layout = NativeLayout.of_experts(spec)
    core = core_layout(layout)
    blob = allocate(core.total_bytes).fill_(0)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for index, expert in enumerate(experts):
            fold = expert.down.weight.perm
            for projection, linear in enumerate((expert.gate, expert.up, expert.down)):
                pack_projection(core, blob, index, projection, linear, None if projection == 2 else fold)
        best = min(best, time.perf_counter() - start)
    run = RunConfig(compute="w4a16", dtype=torch.bfloat16)
    start = time.perf_counter()
    NativeBackend().pack_experts(spec, iter(experts), run)
    return best, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = dataclasses.replace(layer_shape(args.shape), num_experts=args.experts)
    codes = args.experts * shape.weights_per_expert / 2
    print("| group | zeros | act-order | pack, GB/s | pack_experts, GB/s |\n|---|---|---|---|---|")
    for group, asym, order in KINDS:
        pack, whole = measure(LayerCase(shape, group, asym, order), args.rounds)
        words = f"| {group} | {'stored' if asym else '8'} | {'yes' if order else 'no'} "
        print(f"{words}| {codes / pack / 1e9:.2f} | {codes / whole / 1e9:.2f} |", flush=True)


if __name__ == "__main__":
    main()
