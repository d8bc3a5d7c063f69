"""`int4moe inspect`: what a checkpoint holds and what is wrong with it, from its headers."""

from __future__ import annotations

import sys

import typer

from int4moe_ipex.cli.common import JsonOption, PathArgument, print_json


def command(app: typer.Typer) -> None:
    @app.command()
    def inspect(path: PathArgument, as_json: JsonOption = False) -> None:
        """Show the experts, formats and sizes of a checkpoint, layer by layer, without loading it.

        Exit status 1 means that problems were found which `load` would refuse.

        Example: int4moe inspect ./Qwen3-30B-A3B-GPTQ
        """
        from int4moe_ipex.models.summary import summarize

        summary = summarize(path)
        if as_json:
            print_json(summary.as_dict())
        else:
            _print(summary)
        if summary.problems:
            raise typer.Exit(1)


def size(nbytes: int) -> str:
    """Bytes for people: 3.9 MB, 1.2 GB (powers of ten, as disks are sold)."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


SHORT = {"compressed-tensors": "ct"}


def _row(group) -> tuple[str, ...]:
    if group.format == "dense":
        scheme, zeros, groups = f"{group.bits}-bit float", "", ""
    else:
        scheme = f"{SHORT.get(group.format, group.format)} int{group.bits}"
        zeros = ("sym" if group.symmetric else "asym") + f", {group.zero_convention}"
        groups = str(group.group_size) + (" act-order" if group.act_order else "")
    count = f"{group.count} x " if group.count > 1 else ""
    return (f"{count}{group.name}", f"{group.shape[0]} x {group.shape[1]}", scheme, groups, zeros, size(group.nbytes))


def _print(summary) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # A pipe or file has no width to fit into.
    console = Console(width=None if sys.stdout.isatty() else 140)
    support = "" if summary.supported else " (not supported yet)"
    console.print(
        f"[bold]{escape(summary.path)}[/bold]: {summary.model_type}{support}, "
        f"{summary.quant_method or 'not quantized'}, {size(summary.nbytes)}"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("module", "out x in", "scheme", "group", "zero points", "bytes"):
        table.add_column(title, justify="right" if title == "bytes" else "left", overflow="fold")
    for layer_names, layer in _alike(summary.layers):
        experts = f", {layer.experts} experts" if layer.experts else ""
        table.add_row(f"[bold]{layer_names}[/bold]{experts}", "", "", "", "", size(layer.nbytes))
        for group in layer.modules:
            name, *rest = _row(group)
            table.add_row(f"  {escape(name)}", *rest)
    for group in summary.other:
        table.add_row(*_row(group))
    console.print(table)
    for warning in summary.warnings:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}")
    for problem in summary.problems:
        console.print(f"[red]problem[/red] {escape(problem)}")


def _alike(layers: list) -> list[tuple[str, object]]:
    """Runs of layers that hold the same, under one heading such as `model.layers.0-47`."""
    runs: list[list] = []
    for layer in layers:
        if runs and runs[-1][-1].modules == layer.modules and runs[-1][-1].experts == layer.experts:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    named = []
    for run in runs:
        first, last = run[0].name, run[-1].name.rpartition(".")[2]
        named.append((first if len(run) == 1 else f"{first}-{last} (each)", run[0]))
    return named
