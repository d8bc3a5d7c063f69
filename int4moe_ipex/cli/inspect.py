"""`int4moe inspect`: what a checkpoint holds and what is wrong with it, from its headers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from int4moe_ipex.cli.common import (
    BackendOption,
    ConfigOption,
    JsonOption,
    PathArgument,
    load_with_progress,
    print_json,
    progress_bar,
)
from int4moe_ipex.cli.outputs import check_plot, check_prompt, read_text
from int4moe_ipex.errors import ConfigError
from int4moe_ipex.folders import model_folder

if TYPE_CHECKING:
    from rich.console import Console


def command(app: typer.Typer) -> None:
    app.command("inspect")(inspect)


def inspect(
    path: PathArgument,
    routing: Annotated[
        bool, typer.Option("--routing", help="Load it, and show how often each expert is taken for a text.")
    ] = False,
    prompt: Annotated[str | None, typer.Option(help="The text for --routing.", callback=check_prompt)] = None,
    text: Annotated[Path | None, typer.Option(help="A file with the text for --routing.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the map of --routing into this file (svg, png, pdf).")] = None,
    backend: BackendOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the experts, formats and sizes of a checkpoint or store as a tree, without loading it.

    Exit status 1 means that problems were found which `load` would refuse.

    Example: int4moe inspect ./Qwen3-30B-A3B-GPTQ

    Example: int4moe inspect ./Qwen3-30B-A3B-GPTQ --routing --prompt "The statement is used to" --plot use.svg
    """
    if routing:
        _routing(path, _text(prompt, text), plot, config, backend, as_json)
        return
    if prompt is not None or text is not None or plot is not None:
        raise ConfigError("--prompt, --text and --plot of inspect belong to --routing")
    model_folder(path)
    from int4moe_ipex.packing.store import is_store

    if is_store(path):
        from int4moe_ipex.models.summary import summarize_store

        found = summarize_store(path)
        if as_json:
            print_json(found.as_dict())
        else:
            _print_store(found)
        return
    from int4moe_ipex.models.summary import summarize

    summary = summarize(path)
    if as_json:
        print_json(summary.as_dict())
    else:
        _print(summary)
    if summary.problems:
        raise typer.Exit(1)


def _text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ConfigError("--routing needs a text: either --prompt or --text")
    return prompt if file is None else read_text(file)


def _routing(path: Path, text: str, plot: Path | None, config: Path | None, backend: str | None, as_json: bool) -> None:
    check_plot(plot)
    model, tokenizer = load_with_progress(path, config, as_json, backend=backend)
    from int4moe_ipex.models import expert_use

    tokens = tokenizer(text).input_ids
    with progress_bar("routing", as_json) as step:
        use = expert_use.expert_use(model, tokens, step)
    if plot is not None:
        expert_use.plot(use, f"{path.name}: {len(tokens)} tokens", plot)
    if as_json:
        print_json({"tokens": len(tokens), "layers": [layer.as_dict() for layer in use]})
        return
    from int4moe_ipex.cli.heatmap import show

    show(_console(), use, len(tokens))


def size(nbytes: int) -> str:
    """Bytes for people: 3.9 MB, 1.2 GB (powers of ten, as disks are sold)."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


SHORT = {"compressed-tensors": "ct"}


def _row(group: Any) -> tuple[str, ...]:
    if group.format == "dense":
        scheme, zeros, groups = f"{group.bits}-bit float", "", ""
    else:
        scheme = f"{SHORT.get(group.format, group.format)} int{group.bits}"
        zeros = ("sym" if group.symmetric else "asym") + f", {group.zero_convention}"
        groups = str(group.group_size) + (" act-order" if group.act_order else "")
    return (f"{group.shape[0]} x {group.shape[1]}", scheme, groups, zeros, size(group.nbytes))


def _console() -> Console:
    from rich.console import Console

    # A pipe or file has no width to fit into.
    return Console(width=None if sys.stdout.isatty() else 140)


def _print(summary: Any) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = _console()
    support = "" if summary.supported else " (not supported)"
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
        for guides, name, group in _branches(layer.modules):
            if isinstance(group, int):
                table.add_row(f"{guides}{escape(name)}", "", "", "", "", size(group))
            else:
                count = f"{group.count} x " if group.count > 1 else ""
                table.add_row(f"{guides}{count}{escape(name)}", *_row(group))
    for group in summary.other:
        table.add_row(group.name, *_row(group))
    console.print(table)
    for warning in summary.warnings:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}")
    for problem in summary.problems:
        console.print(f"[red]problem[/red] {escape(problem)}")


def _branches(groups: list) -> Iterator[tuple[str, str, Any]]:
    """A layer's modules as the lines of a tree: (guides, name, group), and (guides, name, bytes) for each block."""
    blocks: dict[str, list] = {}
    for group in groups:
        blocks.setdefault(group.name.rpartition(".")[0], []).append(group)
    for block, inside in blocks.items():
        last_block = block == list(blocks)[-1]
        if not block:
            for group in inside:
                yield "└─ " if last_block and group is inside[-1] else "├─ ", group.name, group
            continue
        yield "└─ " if last_block else "├─ ", block, sum(group.nbytes for group in inside)
        for group in inside:
            guides = ("   " if last_block else "│  ") + ("└─ " if group is inside[-1] else "├─ ")
            yield guides, group.name.rpartition(".")[2], group


def _print_store(found: Any) -> None:
    from rich.markup import escape
    from rich.tree import Tree

    layouts = ", ".join(f"{count} modules in layout {layout}" for layout, count in found.layouts.items())
    tree = Tree(
        f"[bold]{escape(found.path)}[/bold]: prepacked store for {found.dtype}, {size(found.nbytes)}; {layouts}"
    )
    tree.add(f"made from {escape(found.source)}")
    layers: dict[str, list] = {}
    for module in found.modules:
        layers.setdefault(module.layer, []).append(module)
    for layer, modules in layers.items():
        branch = tree.add(f"[bold]{escape(layer)}[/bold] {size(sum(module.nbytes for module in modules))}")
        for module in modules:
            branch.add(f"{escape(module.name)}: {module.what}, {size(module.nbytes)}")
    tree.add(f"all other parameters {size(found.other_nbytes)}")
    _console().print(tree)


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
