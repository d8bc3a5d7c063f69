"""This package running a whole checkpoint, asked one JSON object a line.

{"prefill": T} answers {"seconds": s} of a prompt of T tokens, {"decode": N, "context": C} those of N tokens after a
prompt of C (1 unless given), {"parts": T} the seconds of one decode step and of one prefill of T tokens by part of the
model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PART_STEPS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--compute", default="w4a16")
    args = parser.parse_args()
    import torch

    import int4moe_ipex
    from int4moe_ipex.bench.model import Session, breakdown, peak_rss_bytes

    torch.set_num_threads(args.threads)
    start = time.perf_counter()
    model = int4moe_ipex.load(args.path, backend="native", compute=args.compute)
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    paths = {path: len(modules) for path, modules in model.int4moe_report.paths.items()}
    about = {"load_seconds": time.perf_counter() - start, "paths": paths}
    print(json.dumps({"ready": True, **about}), flush=True)

    def prompt(tokens: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (1, tokens), generator=generator)

    def prefill(tokens: int) -> float:
        ids, session = prompt(tokens), Session(model)
        start = time.perf_counter()
        session.feed(ids)
        return time.perf_counter() - start

    def decode(tokens: int, context: int = 1) -> float:
        session = Session(model)
        session.feed(prompt(context))
        start = time.perf_counter()
        for _ in range(tokens):
            session.step()
        return time.perf_counter() - start

    def parts(tokens: int) -> dict:
        session = Session(model)
        session.feed(prompt(1))
        with breakdown(model, step=True) as step:
            for _ in range(PART_STEPS):
                session.step()
        with breakdown(model) as whole:
            Session(model).feed(prompt(tokens))
        return {"decode": {part: value / PART_STEPS for part, value in step.items()}, "prefill": dict(whole)}

    with torch.inference_mode():
        for line in sys.stdin:
            (what, tokens), *options = json.loads(line).items()
            if what == "parts":
                answer = parts(tokens) | {"peak_rss": peak_rss_bytes()}
            else:
                answer = {"seconds": {"prefill": prefill, "decode": decode}[what](tokens, **dict(options))}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
