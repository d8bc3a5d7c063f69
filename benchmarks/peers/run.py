"""Time one MoE layer on several systems in turn, so that drift of the machine meets all of them alike.

    python benchmarks/peers/run.py --dir DIR --shape qwen3-30b-a3b --tokens 1,16,64 --systems own-w4a16,ggml-q4_0

DIR is where install.py put the systems. Each keeps its process alive with its weights in memory; in each round each
system runs one batch, and ratios are taken within rounds. Batches that other processes disturbed are run again. A name
may say how its layer differs from the others': own-w4a16:g32, own-w4a8:asym, own-w4a16:g32:act-order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import protocol  # noqa: E402
import torch  # noqa: E402

from int4moe_ipex.bench import limits  # noqa: E402
from int4moe_ipex.bench.layer import LayerCase  # noqa: E402
from int4moe_ipex.bench.report import wide_console  # noqa: E402
from int4moe_ipex.bench.shapes import LayerShape, layer_shape  # noqa: E402
from int4moe_ipex.cpu import detect  # noqa: E402
from int4moe_ipex.errors import BackendError, Int4MoeError  # noqa: E402

# name -> (environment under DIR, command). {isa} is avx2 or native; OURS is this interpreter.
OURS = "ours"
SYSTEMS: dict[str, tuple[str, list[str]]] = {
    "own-w4a16": (OURS, ["own_layer.py", "--compute=w4a16"]),
    "own-w4a16-f32": (OURS, ["own_layer.py", "--compute=w4a16", "--dtype=float32"]),
    "own-w4a8": (OURS, ["own_layer.py", "--compute=w4a8"]),
    "ggml-q4_0": ("ggml", ["ggml_layer_{isa}", "--type=q4_0"]),
    "ggml-q4_0-plain": ("ggml", ["ggml_layer_{isa}", "--type=q4_0", "--plain"]),
    "ggml-q4_1": ("ggml", ["ggml_layer_{isa}", "--type=q4_1"]),
    "ggml-q4_K": ("ggml", ["ggml_layer_{isa}", "--type=q4_K"]),
    "torch": (OURS, ["torch_layer.py"]),
    "openvino": ("openvino", ["openvino_layer.py", "--precision=f32"]),
    "openvino-bf16": ("openvino", ["openvino_layer.py", "--precision=bf16"]),
    "kt-llamafile": ("kt", ["kt_layer.py", "--kind=llamafile"]),
    "kt-raw": ("kt", ["kt_layer.py", "--kind=raw"]),
    "kt-gptq": ("kt", ["kt_layer.py", "--kind=gptq"]),
}
DEFAULT = "own-w4a16,own-w4a8,ggml-q4_0,ggml-q4_K,torch"
# What keeps each system to AVX2 on a wider machine (ggml is built twice; OpenVINO cannot be kept).
AVX2_ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "avx2", "INT4MOE_MAX_ISA": "avx2", "KT_KERNEL_CPU_VARIANT": "avx2"}


class SystemFailedError(Exception):
    """A system refused the layer or ended; the message says why."""


def variant(name: str, layer: protocol.Layer) -> protocol.Layer:
    """The layer with the changes that a system's name asks for.

    Raises:
        ValueError: a change that is not known.
    """
    for change in name.split(":")[1:]:
        if change in ("asym", "act-order"):
            layer = replace(layer, **{change.replace("-", "_"): True})
        elif change[:1] == "g" and change[1:].isdigit():
            layer = replace(layer, group_size=int(change[1:]))
        else:
            raise ValueError(f"{name}: {change!r} is not asym, act-order or g<columns per group>")
    return layer


class System:
    """One live process."""

    def __init__(self, name: str, directory: Path, layer: protocol.Layer, isa: str):
        environment, command = SYSTEMS[name.split(":")[0]]
        layer = variant(name, layer)
        program, *options = [part.format(isa="avx2" if isa == "avx2" else "native") for part in command]
        if program.endswith(".py"):
            python = sys.executable if environment == OURS else str(directory / environment / "bin" / "python")
            start = [python, str(HERE / program)]
        else:
            start = [str(directory / environment / program)]
        env = os.environ | {"OMP_NUM_THREADS": str(layer.threads)} | (AVX2_ENVIRONMENT if isa == "avx2" else {})
        self.name = name
        self.layer = layer
        self.own = name.startswith("own-")
        try:
            self.process = subprocess.Popen(
                [*start, *layer.arguments(), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
                env=env,
            )
        except OSError as error:
            raise SystemFailedError(f"{name}: cannot be started, run install.py first: {error}") from error
        self.about = self._answer()
        if not self.about["ready"]:
            raise SystemFailedError(f"{name}: {self.about['reason']}")

    def _answer(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):  # some systems print notices of their own
                return json.loads(line)
        raise SystemFailedError(f"{self.name}: ended with status {self.process.wait()}")

    def batch(self, tokens: int, seconds: float) -> protocol.timing.Batch:
        self.process.stdin.write(json.dumps({"tokens": tokens, "seconds": seconds}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        return protocol.timing.Batch(answer["times"], answer["foreign"])

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start_all(names: list[str], directory: Path, layer: protocol.Layer, isa: str) -> list[System]:
    """The systems that can run the layer; why the others cannot goes to stderr."""

    def start(name: str) -> System | Exception:
        try:
            return System(name, directory, layer, isa)
        except (SystemFailedError, ValueError) as error:
            return error

    with ThreadPoolExecutor(len(names)) as pool:
        started = list(pool.map(start, names))
    for one in started:
        if isinstance(one, Exception):
            print(one, file=sys.stderr)
    return [one for one in started if isinstance(one, System)]


@dataclass
class Result:
    """All calls of one system at one number of tokens, and the median of each round."""

    seconds: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    noisy: int = 0


def measure(systems: list[System], tokens: int, args: argparse.Namespace, read) -> tuple[dict[str, Result], float]:
    """Results by system, and the median read bandwidth of the rounds (0 when it is not measured)."""
    results = {system.name: Result() for system in systems}
    reads = []
    repeat_until = time.monotonic() + args.patience
    for _ in range(args.rounds):
        reads.append(read())
        for system in systems:
            batch = system.batch(tokens, args.seconds)
            while not batch.clean and time.monotonic() < repeat_until:
                batch = system.batch(tokens, args.seconds)
            result = results[system.name]
            result.seconds += batch.seconds
            result.rounds.append(statistics.median(batch.seconds))
            result.noisy += not batch.clean
    return results, statistics.median(reads)


def stored_bytes(layer: protocol.Layer) -> int:
    """Codes, scales and zeros of one expert."""
    shape = LayerShape("peer", layer.hidden, layer.intermediate, layer.experts, layer.top_k)
    return LayerCase(shape, layer.group_size, layer.asym, layer.act_order).stored_bytes_per_expert()


def rows_of(systems, tokens: int, results: dict[str, Result], read: float, peaks, layer) -> list[dict]:
    """One row per system; speedup is against the peer that was fastest at this number of tokens."""
    peers = [s.name for s in systems if not s.own] or [systems[0].name]
    fastest = min(peers, key=lambda name: statistics.median(results[name].seconds))
    hit = layer.experts * (1 - (1 - layer.top_k / layer.experts) ** tokens)
    weights = 3 * layer.hidden * layer.intermediate
    rows = []
    for system in systems:
        result = results[system.name]
        seconds = statistics.median(result.seconds)
        ratios = [a / b for a, b in zip(results[fastest].rounds, result.rounds)]
        flops = 2 * tokens * layer.top_k * weights / seconds
        peak = peaks.peak(system.about["name"].removeprefix("int4moe ")) if peaks and system.own else None
        rows.append(
            {
                "system": system.name,
                "name": system.about["name"],
                "isa": system.about.get("isa", ""),
                "error": system.about["error"],
                "tokens": tokens,
                "seconds": seconds,
                "p10": protocol.timing.quantile(result.seconds, 0.1),
                "p90": protocol.timing.quantile(result.seconds, 0.9),
                "int4_rate": hit * weights / 2 / seconds,
                "flop_rate": flops,
                "read_share": hit * stored_bytes(system.layer) / seconds / read if read and system.own else None,
                "peak_share": flops / peak if peak else None,
                "speedup": statistics.median(ratios),
                "speedup_min": min(ratios),
                "speedup_max": max(ratios),
                "against": fastest,
                "rounds": len(result.rounds),
                "noisy": result.noisy,
            }
        )
    return rows


def show(rows: list[dict]) -> None:
    from rich.table import Table

    table = Table()
    left = ("system", "runs")
    for column in (*left, "tokens", "ms", "p10-p90", "GB/s int4", "of read", "GFLOP/s", "of peak", "error", "speed"):
        table.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        percent = ["" if row[key] is None else f"{row[key]:.0%}" for key in ("read_share", "peak_share")]
        spread = f"{row['speedup']:.2f}x ({row['speedup_min']:.2f}-{row['speedup_max']:.2f})"
        table.add_row(
            row["system"],
            row["name"],
            str(row["tokens"]),
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['p10'] * 1e3:.2f}-{row['p90'] * 1e3:.2f}",
            f"{row['int4_rate'] / 1e9:.1f}",
            percent[0],
            f"{row['flop_rate'] / 1e9:.0f}",
            percent[1],
            f"{row['error']:.1e}",
            spread + (" noisy" if row["noisy"] else ""),
        )
    wide_console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=os.environ.get("INT4MOE_PEERS_DIR"), help="of install.py")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--experts", type=int, help="fewer experts than the shape's, where memory is short")
    parser.add_argument("--tokens", default="1,4,16,64,512")
    parser.add_argument("--systems", default=DEFAULT, help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--asym", action="store_true")
    parser.add_argument("--act-order", action="store_true")
    parser.add_argument("--isa", choices=("avx2", "auto"), default="avx2", help="avx2 keeps every system to AVX2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one batch")
    parser.add_argument("--patience", type=float, default=20, help="seconds for repeating disturbed batches")
    parser.add_argument("--json", type=Path, help="write the report; plot.py draws it")
    args = parser.parse_args()
    names = args.systems.split(",")
    unknown = [name for name in names if name.split(":")[0] not in SYSTEMS]
    if unknown:
        sys.exit(f"unknown systems {', '.join(unknown)}; known: {', '.join(SYSTEMS)}")
    if args.dir is None and any(SYSTEMS[name.split(":")[0]][0] != OURS for name in names):
        sys.exit("--dir (or INT4MOE_PEERS_DIR) says where install.py put the systems")
    try:
        shape = layer_shape(args.shape)
    except Int4MoeError as error:
        sys.exit(str(error))
    layer = protocol.Layer(
        shape.hidden_size,
        shape.moe_intermediate_size,
        args.experts or shape.num_experts,
        shape.top_k,
        args.group_size,
        args.asym,
        args.act_order,
        args.threads,
    )
    torch.set_num_threads(args.threads)
    systems = start_all(names, args.dir, layer, args.isa)
    isa = "avx2" if args.isa == "avx2" else detect().best_isa
    try:
        peaks = limits.measure_limits(args.threads, isa)
        read = lambda: limits.measure_read(args.threads)  # noqa: E731
        print(f"ceilings: FMA {peaks.fma / 1e9:.0f} GFLOP/s, int8 {peaks.int8 / 1e9:.0f} Gop/s ({isa})")
    except BackendError as error:
        peaks, read = None, lambda: 0.0
        print(f"ceilings are not measured: {error}", file=sys.stderr)
    rows, reads = [], {}
    report = {
        "layer": {"shape": args.shape, **layer.__dict__},
        "machine": {"cpu": detect().model_name, "isa": isa, "threads": args.threads},
        "read": reads,
        "peaks": None if peaks is None else {"fma": peaks.fma, "int8": peaks.int8},
        "rows": rows,
    }
    try:
        for tokens in map(int, args.tokens.split(",")):
            results, reads[tokens] = measure(systems, tokens, args, read)
            some = rows_of(systems, tokens, results, reads[tokens], peaks, layer)
            print(f"{tokens} tokens, read bandwidth {reads[tokens] / 1e9:.1f} GB/s")
            show(some)
            rows += some
            if args.json:
                args.json.write_text(json.dumps(report, indent=1))
    finally:
        for system in systems:
            system.close()


if __name__ == "__main__":
    main()
