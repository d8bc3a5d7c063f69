"""Bench results for people (table, plot), for programs (JSON), and against an earlier run."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from int4moe_ipex import __version__
from int4moe_ipex.bench.layer import LayerCase, Row
from int4moe_ipex.bench.limits import Limits
from int4moe_ipex.cpu import CpuFeatures
from int4moe_ipex.errors import ConfigError
from int4moe_ipex.plots import import_pyplot, save

SCHEMA = 1
COLORS = ("#0b6e99", "#d1495b", "#66a182", "#edae49", "#5d4a66", "#8d6b4f")


def machine(cpu: CpuFeatures, threads: int, isa: str) -> dict:
    """What has to be known of the machine to read the figures."""
    return {
        "cpu": cpu.model_name,
        "isa": isa,
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "int4moe_ipex": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def as_dict(case: LayerCase, about: dict, limits: Limits | None, dtype: torch.dtype, rows: Sequence[Row]) -> dict:
    """The JSON report: SI units (seconds, bytes/s, FLOP/s)."""
    shape = case.shape
    return {
        "schema": SCHEMA,
        "kind": "layer",
        "machine": about,
        "limits": None if limits is None else asdict(limits),
        "layer": {
            "shape": shape.name,
            "hidden_size": shape.hidden_size,
            "moe_intermediate_size": shape.moe_intermediate_size,
            "num_experts": shape.num_experts,
            "top_k": shape.top_k,
            "group_size": case.group_size,
            "asym": case.asym,
            "act_order": case.act_order,
            "dtype": str(dtype).removeprefix("torch."),
        },
        "rows": [row.as_dict() for row in rows],
    }


def print_rows(report: dict, console=None) -> None:
    """The table, with the ceilings and the case above it."""
    from rich.table import Table

    console = console or wide_console()
    layer, about, limits = report["layer"], report["machine"], report["limits"]
    flags = "".join(f", {name.replace('_', '-')}" for name in ("asym", "act_order") if layer[name])
    console.print(
        f"{layer['shape']}: hidden {layer['hidden_size']}, intermediate {layer['moe_intermediate_size']}, "
        f"{layer['num_experts']} experts, top {layer['top_k']}, group_size {layer['group_size']}{flags}, "
        f"{layer['dtype']}"
    )
    console.print(f"{about['cpu']}, {about['threads']} threads, {about['isa']}")
    if limits:
        console.print(
            f"measured ceilings: read {limits['read'] / 1e9:.1f} GB/s, FMA {limits['fma'] / 1e9:.0f} GFLOP/s, "
            f"int8 {limits['int8'] / 1e9:.0f} Gop/s"
        )
    table = Table()
    columns = ("tokens", "path", "ms", "p10-p90", "GB/s int4", "of read", "GFLOP/s", "of peak", "rel. error", "calls")
    for column in columns:
        table.add_column(column, justify="left" if column == "path" else "right")
    for row in report["rows"]:
        table.add_row(
            str(row["tokens"]),
            row["path"],
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['p10'] * 1e3:.2f}-{row['p90'] * 1e3:.2f}",
            f"{row['int4_rate'] / 1e9:.1f}",
            _percent(row["read_share"]),
            f"{row['flop_rate'] / 1e9:.1f}",
            _percent(row["peak_share"]),
            f"{row['error']:.1e}",
            f"{row['samples']}{' noisy' if row['noisy'] else ''}",
        )
    console.print(table)
    if not limits:
        console.print("the machine's ceilings were not measured: the native core is not built")


def wide_console():
    """A console whose tables are not folded when the output goes to a file or a pipe."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


@dataclass(frozen=True)
class Change:
    """One row of both reports.

    Attributes:
        before, now: seconds of the median call.
        ratio: how many times as fast it is now: of the shares of the machine's ceilings where both reports have
            them, so that a machine that is slower today is not a regression; of the times otherwise.
        by_share: ratio is of shares.
    """

    path: str
    tokens: int
    before: float
    now: float
    ratio: float
    by_share: bool

    def regressed(self, noise: float) -> bool:
        """Slower by more than `noise`, a share such as 0.1."""
        return self.ratio < 1 / (1 + noise)


def compare(baseline: dict, report: dict) -> list[Change]:
    """Rows that both reports have (same path and tokens).

    Raises:
        ConfigError: the reports are of different layers or have no row in common, so that a ratio would say nothing.
    """
    if baseline.get("schema") != SCHEMA or baseline.get("kind") != "layer":
        raise ConfigError("the baseline is not a layer report of this version")
    if baseline["layer"] != report["layer"]:
        raise ConfigError(f"the baseline is of another layer: {baseline['layer']}")
    before = {(row["path"], row["tokens"]): row for row in baseline["rows"]}
    changes = [_change(before[key], row) for row in report["rows"] if (key := (row["path"], row["tokens"])) in before]
    if not changes:
        raise ConfigError("the baseline has no row of the paths and tokens that were measured now")
    return changes


def _change(before: dict, now: dict) -> Change:
    shares = _ceiling_share(before), _ceiling_share(now)
    by_share = all(shares)
    ratio = shares[1] / shares[0] if by_share else before["seconds"] / now["seconds"]
    return Change(now["path"], now["tokens"], before["seconds"], now["seconds"], ratio, by_share)


def _ceiling_share(row: dict) -> float | None:
    """The share of the ceiling that the row is nearer to; None unless both were measured."""
    shares = row["read_share"], row["peak_share"]
    return max(shares) if all(shares) else None


def read_json(path: str | Path) -> dict:
    """A report that was written by --json.

    Raises:
        ConfigError: it cannot be read or is not JSON.
    """
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the baseline: {error}") from error


def plot(report: dict, path: str | Path) -> None:
    """`plot_rates` of a report, one line per path; format by the file's suffix. Raises ConfigError as `save` does."""
    times: dict[str, dict[int, float]] = {}
    for row in report["rows"]:
        times.setdefault(row["path"], {})[row["tokens"]] = row["seconds"]
    layer, about = report["layer"], report["machine"]
    title = f"One MoE layer of {layer['shape']}, groups of {layer['group_size']}\n"
    title += f"{about['cpu']}, {about['threads']} threads"
    if any(row["noisy"] for row in report["rows"]):
        title += "; other processes ran meanwhile"
    plot_rates({name: {t: t / s for t, s in by.items()} for name, by in times.items()}, title, path)


def plot_rates(rates: dict[str, dict[int, float]], title: str, path: str | Path) -> None:
    """Layer-tokens per second over tokens per call, both logarithmic.

    Args:
        rates: name -> tokens per call -> tokens per second.
    """
    pyplot = import_pyplot()
    from matplotlib import ticker

    figure, axes = pyplot.subplots(figsize=(7, 4))
    ticks = sorted({tokens for by in rates.values() for tokens in by})
    for index, (name, by) in enumerate(rates.items()):
        points = sorted(by.items())
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        axes.plot(xs, ys, marker="o", label=name, color=COLORS[index % len(COLORS)])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel("tokens per call")
    axes.set_ylabel("tokens per second")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    save(figure, path)
