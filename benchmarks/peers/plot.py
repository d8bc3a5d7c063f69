"""Draw run.py's report: how many times as fast as one system the others are, by tokens per call.

python benchmarks/peers/plot.py layer.json layer.svg --base ggml-q4_0 --systems own-w4a16,own-w4a8,ggml-q4_0,torch
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

# ours in blues, peers in warm colours and grey
COLORS = {"own-w4a16": "#0b6e99", "own-w4a8": "#5fb3d4", "own-w4a16-f32": "#08445f"}
PEERS = ("#d1495b", "#edae49", "#8d6b4f", "#66a182", "#9a9a9a", "#5d4a66")


def speedups(report: dict, base: str, names: list[str], path: Path) -> None:
    """Grouped bars, one group per number of tokens; the label below a system is its own name for itself."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    seconds = {(row["system"], row["tokens"]): row["seconds"] for row in report["rows"]}
    labels = {row["system"]: row["name"] for row in report["rows"]}
    counts = sorted({row["tokens"] for row in report["rows"]})
    names = [name for name in names if name in labels]
    figure, axes = pyplot.subplots(figsize=(8, 4))
    width = 0.84 / len(names)
    free = iter(PEERS * 2)
    for index, name in enumerate(names):
        places = [at - 0.42 + (index + 0.5) * width for at in range(len(counts))]
        heights = [seconds[base, count] / seconds[name, count] for count in counts]
        bars = axes.bar(places, heights, width * 0.92, label=labels[name], color=COLORS.get(name) or next(free))
        axes.bar_label(bars, [f"{height:.1f}" for height in heights], fontsize=6)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel("tokens per call")
    axes.set_ylabel(f"times as fast as {labels[base]}")
    layer, machine = report["layer"], report["machine"]
    axes.set_title(
        f"One MoE layer of {layer['shape']}, int4, {machine['threads']} threads, {machine['isa']} ({machine['cpu']})",
        fontsize=9,
    )
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", default="ggml-q4_0")
    parser.add_argument("--systems", help="default: all of the report")
    args = parser.parse_args()
    report = json.loads(args.report.read_text())
    every = list(dict.fromkeys(row["system"] for row in report["rows"]))
    speedups(report, args.base, args.systems.split(",") if args.systems else every, args.out)


if __name__ == "__main__":
    main()
