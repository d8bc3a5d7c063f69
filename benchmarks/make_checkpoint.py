"""Write a synthetic INT4 checkpoint of a real model's shape, for loading, memory and speed measurements.

python benchmarks/make_checkpoint.py OUT --shape qwen3-30b-a3b --layers 6
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from int4moe_ipex.bench.shapes import MODELS, model_config
from int4moe_ipex.bench.synthetic import FORMATS, Scheme, write_checkpoint
from int4moe_ipex.errors import Int4MoeError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="folder to write")
    parser.add_argument("--shape", choices=list(MODELS), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="number of layers (default: the model's)")
    parser.add_argument("--experts", type=int, help="number of experts (default: the model's)")
    parser.add_argument("--vocab-size", type=int, help="vocabulary (default: the model's)")
    parser.add_argument("--format", choices=FORMATS, default="gptq")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--asym", action="store_true", help="zero points other than 8")
    parser.add_argument("--act-order", action="store_true", help="groups over a random order of the columns")
    parser.add_argument("--int4-head", action="store_true", help="quantize the language model's head as well")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of the dense tensors")
    parser.add_argument("--shard-mb", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="replace a model in that folder")
    args = parser.parse_args()
    config = model_config(args.shape)
    if args.experts:
        key = next(k for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in config)
        config[key] = args.experts
    if args.vocab_size:
        config["vocab_size"] = args.vocab_size
    start = time.perf_counter()
    try:
        size = write_checkpoint(
            args.path,
            config,
            Scheme(args.format, args.group_size, args.asym, args.act_order, args.int4_head),
            layers=args.layers,
            seed=args.seed,
            dtype=getattr(torch, args.dtype),
            shard_bytes=args.shard_mb << 20,
            overwrite=args.overwrite,
        )
    except Int4MoeError as error:
        sys.exit(str(error))
    print(f"{args.path}: {size / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
