"""How a system under test talks to run.py: one process each, asked in turn, one JSON object per line.

A process prints {"ready": true, "name", "error", ...}, then answers each {"tokens": T, "seconds": s} on its standard
input with {"times": [seconds of each call], "foreign": share of the machine that others used}, until input ends.
Standard library only: these files run in environments that hold nothing but the system under test.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def _timing():
    """The package's timing module by its path, without the package (whose dependencies are not here)."""
    path = Path(__file__).resolve().parents[2] / "int4moe_ipex" / "bench" / "timing.py"
    spec = importlib.util.spec_from_file_location("int4moe_timing", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


timing = _timing()


@dataclass(frozen=True)
class Layer:
    """The layer that every system runs: sizes, columns per group, zero points other than 8, act-order."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    group_size: int
    asym: bool
    act_order: bool
    threads: int

    def arguments(self) -> list[str]:
        flags = [f"--{name}" for name, on in (("asym", self.asym), ("act-order", self.act_order)) if on]
        sizes = ("hidden", "intermediate", "experts", "top_k", "group_size", "threads")
        return [f"--{name.replace('_', '-')}={getattr(self, name)}" for name in sizes] + flags


def parse(description: str, **options: dict) -> tuple[Layer, argparse.Namespace]:
    """The layer from the command line; options are a system's own, name -> keywords of add_argument."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("hidden", "intermediate", "experts", "top_k", "group_size", "threads"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    parser.add_argument("--asym", action="store_true")
    parser.add_argument("--act-order", action="store_true")
    for name, keywords in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)
    args = parser.parse_args()
    own = vars(args)
    return Layer(**{name: own.pop(name) for name in Layer.__dataclass_fields__}), args


def refuse(reason: str) -> None:
    """Says in one line why this system cannot run the layer, and ends the process."""
    print(json.dumps({"ready": False, "reason": reason}), flush=True)
    sys.exit(0)


def routing(layer: Layer, tokens: int, seed: int) -> list[list[int]]:
    """tokens x top_k expert ids, distinct within a token."""
    rng = random.Random(seed)
    return [rng.sample(range(layer.experts), layer.top_k) for _ in range(tokens)]


def serve(layer: Layer, prepare: Callable[[int, list[list[int]]], Callable[[], object]], about: dict) -> None:
    """Answers until standard input ends. prepare(tokens, ids) gives one call of the layer, ready to be timed."""
    print(json.dumps({"ready": True, **about}), flush=True)
    seed = 0
    for line in sys.stdin:
        request = json.loads(line)
        tokens = request["tokens"]
        calls = []
        for _ in range(timing.routing_count(tokens)):
            seed += 1
            calls.append(prepare(tokens, routing(layer, tokens, seed)))
        batch = timing.run_batch(calls, request["seconds"])
        print(json.dumps({"times": batch.seconds, "foreign": batch.foreign}), flush=True)
