"""A whole model of the same shape, random weights: this package and llama.cpp (Q4_0) in turn.

    python benchmarks/peers/model.py --dir DIR --layers 12 --threads 2

DIR is where install.py put llama.cpp; the two model files are written below it when absent (about 4 GB each for 12
layers of qwen3-30b-a3b). Both have int4 embeddings-to-logits heads unless --head says otherwise: q4_0 for llama.cpp and
a GPTQ head for ours; "default" is what each side's users have, Q6_K and 16 bits. Decoding starts from an
empty context unless --context says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from run import AVX2_ENVIRONMENT  # noqa: E402

from int4moe_ipex.bench.limits import measure_read  # noqa: E402
from int4moe_ipex.bench.shapes import MODELS  # noqa: E402


def checked(*command: object, **options) -> str:
    """Standard output of a command that has to succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with status {done.returncode}")
    return done.stdout


def write_models(directory: Path, shape: str, layers: int, head: str) -> tuple[Path, Path]:
    """(checkpoint, gguf), written when absent."""
    fields = MODELS[shape]
    models = directory / "models"
    models.mkdir(parents=True, exist_ok=True)
    checkpoint = models / f"{shape}-{layers}-{head}"
    if not (checkpoint / "config.json").exists():
        flags = ("--int4-head",) if head == "int4" else ()
        script = ROOT / "benchmarks" / "make_checkpoint.py"
        checked(sys.executable, script, checkpoint, "--shape", shape, "--layers", layers, *flags, "--overwrite")
    file = models / f"{shape}-{layers}-{head}.gguf"
    if not file.exists():
        sizes = {
            "hidden": fields["hidden_size"],
            "intermediate": fields["moe_intermediate_size"],
            "experts": fields["num_experts"],
            "top-k": fields["num_experts_per_tok"],
            "layers": layers,
            "vocab": fields["vocab_size"],
            "heads": fields["num_attention_heads"],
            "kv-heads": fields["num_key_value_heads"],
            "head-dim": fields["head_dim"],
            "head": "q4_0" if head == "int4" else "q6_K",
        }
        part = file.with_suffix(".part")
        options = [f"--{name}={value}" for name, value in sizes.items()]
        checked(directory / "gguf" / "bin" / "python", HERE / "write_gguf.py", part, *options)
        part.rename(file)
    return checkpoint, file


class Live:
    """A process that holds a model in memory and answers one JSON object a line."""

    def __init__(self, *command: object, env: dict):
        self.command = list(map(str, command))
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env
        )
        self.about = self._answer()

    def _answer(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        sys.exit(f"{' '.join(self.command)} ended with status {self.process.wait()}")

    def ask(self, what: str, tokens: int, **options: int) -> dict:
        self.process.stdin.write(json.dumps({what: tokens} | options) + "\n")
        return self._answer()

    def rate(self, what: str, tokens: int, **options: int) -> float:
        """Tokens per second."""
        return tokens / self.ask(what, tokens, **options)["seconds"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="of install.py")
    parser.add_argument("--shape", choices=[n for n, f in MODELS.items() if f["model_type"] == "qwen3_moe"])
    parser.set_defaults(shape="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--head", choices=("int4", "default"), default="int4")
    parser.add_argument("--compute", default="w4a16,w4a8")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--isa", choices=("avx2", "auto"), default="avx2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=1, help="tokens before those that are decoded (up to 8000)")
    parser.add_argument("--write-only", action="store_true", help="write the model files and stop")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    directory = args.dir.resolve()
    checkpoint, file = write_models(directory, args.shape, args.layers, args.head)
    if args.write_only:
        return
    isa = "avx2" if args.isa == "avx2" else "native"
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads)} | (AVX2_ENVIRONMENT if isa == "avx2" else {})
    report = {
        "layers": args.layers,
        "head": args.head,
        "isa": isa,
        "threads": args.threads,
        "context": args.context,
        "rows": [],
    }
    llama = Live(directory / "ggml" / f"llama_model_{isa}", file, args.threads, env=env)
    for compute in args.compute.split(","):
        options = (f"--threads={args.threads}", f"--compute={compute}")
        own = Live(sys.executable, HERE / "own_model.py", checkpoint, *options, env=env)
        sides = {"ours": own, "llama": llama}
        memory: list[float] = []  # GB/s that the threads read, before each round of decoding
        rates: dict[str, dict[str, list[float]]] = {side: {"prefill": [], "decode": []} for side in sides}
        for live in sides.values():  # first touch of every page
            live.ask("prefill", args.prompt_tokens)
        for _ in range(args.rounds):
            for side, live in sides.items():
                rates[side]["prefill"].append(live.rate("prefill", args.prompt_tokens))
            memory.append(measure_read(args.threads) / 1e9)
            for side, live in sides.items():
                rates[side]["decode"].append(live.rate("decode", args.new_tokens, context=args.context))
        parts = own.ask("parts", args.prompt_tokens)
        own.close()
        print(f"{compute} ({', '.join(own.about['paths'])}), {args.layers} layers, head {args.head}, {isa}")
        for what in ("decode", "prefill"):
            ours, theirs = (rates[side][what] for side in sides)
            a, b = statistics.median(ours), statistics.median(theirs)
            ratio = statistics.median(x / y for x, y in zip(ours, theirs))
            share = 1 - parts[what].get("experts", 0.0) / sum(parts[what].values())
            each = " ".join(f"{x / y:.2f}" for x, y in zip(ours, theirs))
            print(f"  {what:8} {a:7.1f} tok/s, llama.cpp {b:7.1f}: {ratio:.2f}x; outside the experts {share:.0%}")
            print(
                f"           rounds {each}"
                + (f"; memory {' '.join(f'{m:.0f}' for m in memory)} GB/s" if what == "decode" else "")
            )
            shown = sorted(parts[what].items(), key=lambda item: -item[1])
            print("           " + ", ".join(f"{part} {value * 1e3:.2f} ms" for part, value in shown))
        report["rows"].append({"compute": compute, "rates": rates, "memory_gb_s": memory, "parts": parts, **own.about})
    llama.close()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
