"""Speed of turning stored tensors into canonical weights, per format: GB/s of stored int4 bytes, best of 15 passes.

    python benchmarks/read_formats.py --threads 1

Per format, writes one layer of Qwen3-30B-A3B with 16 experts into a temporary folder and reads the experts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from int4moe_ipex import formats
from int4moe_ipex.bench.shapes import model_config
from int4moe_ipex.bench.synthetic import Scheme, write_checkpoint
from int4moe_ipex.checkpoint import Checkpoint

SCHEMES = {
    "gptq sym g128": Scheme(),
    "gptq asym g128": Scheme(asym=True),
    "gptq asym g32": Scheme(asym=True, group_size=32),
    "gptq act-order g128": Scheme(act_order=True),
    "gptq act-order g32": Scheme(act_order=True, group_size=32),
    "awq asym g128": Scheme("awq", asym=True),
    "compressed-tensors sym g128": Scheme("compressed-tensors"),
    "compressed-tensors asym g128": Scheme("compressed-tensors", asym=True),
    "compressed-tensors g_idx g128": Scheme("compressed-tensors", act_order=True),
}
PASSES = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    config = model_config("qwen3-30b-a3b") | {"num_experts": 16, "vocab_size": 1024}
    for name, scheme in SCHEMES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder) / "model", config, scheme, layers=1)
            rate = read(Path(folder) / "model")
        print(f"{name:32} {rate / 1e9:6.2f} GB/s", flush=True)


def read(folder: Path) -> float:
    """Bytes per second over the experts of a checkpoint, from a warm page cache."""
    checkpoint = Checkpoint.open(folder)
    linears = [info for info in formats.describe(checkpoint).values() if info.is_int4 and ".experts." in info.name]
    seconds = []
    for _ in range(PASSES):
        start = time.perf_counter()
        for info in linears:
            formats.read_linear(checkpoint, info)
        seconds.append(time.perf_counter() - start)
    return sum(info.nbytes for info in linears) / min(seconds)


if __name__ == "__main__":
    main()
