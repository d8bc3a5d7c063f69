"""`int4moe bench`: one MoE layer on any backend against the machine's ceilings, or a whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from int4moe_ipex.cli.common import BackendOption, ComputeOption, ConfigOption, DtypeOption, JsonOption, PathArgument
from int4moe_ipex.cli.outputs import check_output, check_plot


def command(app: typer.Typer) -> None:
    group = typer.Typer(help="Measure one MoE layer or a whole model.", no_args_is_help=True)
    group.command("layer")(layer)
    group.command("model")(model)
    app.add_typer(group, name="bench")


def layer(
    shape: Annotated[
        str, typer.Option(help="A model's name, such as qwen3-30b-a3b, or HIDDENxINTERMEDIATExEXPERTSxTOPK.")
    ] = "qwen3-30b-a3b",
    tokens: Annotated[str, typer.Option(help="Tokens per call, comma-separated.")] = "1,4,16,64,512",
    backend: Annotated[str, typer.Option(help="Backends, comma-separated.")] = "native",
    compute: Annotated[str, typer.Option(help="w4a16, w4a8 or both, comma-separated.")] = "w4a16",
    dtype: Annotated[str, typer.Option(help="Activations: bfloat16, float16 or float32.")] = "bfloat16",
    group_size: Annotated[int, typer.Option(help="Columns per group; -1 is one group per row.")] = 128,
    asym: Annotated[bool, typer.Option("--asym", help="Zero points other than 8.")] = False,
    act_order: Annotated[bool, typer.Option("--act-order", help="Groups over a random order of the columns.")] = False,
    isa: Annotated[str, typer.Option(help="auto, scalar, avx2, avx2_vnni, avx512 or amx.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Batches of each backend, in turn.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a plot here (svg, png, pdf).")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="An earlier --json report; fail when a row is slower than there by --noise.")
    ] = None,
    noise: Annotated[float, typer.Option(min=0, help="Share by which two runs of the same code may differ.")] = 0.1,
) -> None:
    """Time one MoE layer with random weights and a new random routing at each call.

    Each backend runs in each compute mode that it has. Shares are of the read bandwidth and of the arithmetic peak
    that are measured in the same run (float32 FMA for w4a16, int8 dot products for w4a8). "noisy" marks rows that
    other processes disturbed. --compare takes the ratio of the shares, so that the machine's own drift cancels, and
    that of the times where the ceilings are unknown.

    Example: int4moe bench layer --shape mixtral-8x7b --tokens 1,16,128 --backend native,torch --compute w4a16,w4a8
    """
    check_output("--json", json_file)
    check_plot(plot_file)
    import torch

    from int4moe_ipex.backends.base import RunConfig
    from int4moe_ipex.bench import layer as bench
    from int4moe_ipex.bench import limits, report
    from int4moe_ipex.bench.shapes import layer_shape
    from int4moe_ipex.cpu import detect
    from int4moe_ipex.errors import BackendError

    baseline = report.read_json(compare) if compare else None
    case = bench.LayerCase(layer_shape(shape), group_size, asym, act_order)
    counts = _numbers(tokens)
    if threads is not None:
        torch.set_num_threads(threads)
    threads = torch.get_num_threads()
    cpu = detect()
    activations = _one_of("dtype", dtype, ("bfloat16", "float16", "float32"))
    wishes = [
        (name, RunConfig(isa=isa if name == "native" else "auto", compute=mode, dtype=getattr(torch, activations)))
        for name in _words(backend)
        for mode in _words(compute)
    ]
    used_isa = cpu.best_isa if isa == "auto" else isa
    try:
        ceilings = limits.measure_limits(threads, used_isa)
    except BackendError:
        ceilings = None
    rows = []
    with torch.inference_mode(), _bar("packing", len(wishes) + len(counts) * rounds * len(wishes)) as step:
        engines, refused = [], {}
        for name, run in wishes:
            try:
                engines.append(bench.build(case, name, run, cpu))
            except BackendError as error:
                refused.setdefault(name, []).append(error)
            step(f"packed for {name}")
        for name, errors in refused.items():
            if name not in {engine.backend.name for engine in engines}:
                raise errors[0]
        for count in counts:
            read = None if ceilings is None else (lambda: limits.measure_read(threads))
            rows += bench.measure(
                engines,
                count,
                rounds=rounds,
                limits=ceilings,
                read=read,
                progress=lambda count=count: step(f"{count} tokens"),
            )
    about = report.machine(cpu, threads, used_isa)
    result = report.as_dict(case, about, ceilings, getattr(torch, activations), rows)
    report.print_rows(result)
    if json_file:
        json_file.write_text(json.dumps(result, indent=1))
    if plot_file:
        report.plot(result, plot_file)
    if baseline:
        _print_changes(report.compare(baseline, result), noise)


def model(
    path: PathArgument,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt (random ids).")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Prefills.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's.")] = None,
    backend: BackendOption = None,
    dtype: DtypeOption = None,
    compute: ComputeOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prefill and decode tokens per second of a checkpoint, peak memory, and what a decode step's time goes to.

    Example: int4moe bench model ./Qwen3-30B-A3B-GPTQ --prompt-tokens 512 --new-tokens 64
    """
    import dataclasses
    import time

    import torch

    from int4moe_ipex.bench import model as bench
    from int4moe_ipex.cli.common import load_with_progress, paths_summary, print_json

    if threads is not None:
        torch.set_num_threads(threads)
    start = time.perf_counter()
    loaded, _ = load_with_progress(path, config, as_json, backend=backend, dtype=dtype, compute=compute)
    load_seconds = time.perf_counter() - start
    result = bench.measure(loaded, prompt_tokens, new_tokens, repeat)
    paths = paths_summary(loaded.int4moe_report)
    if as_json:
        extra = {"load_seconds": load_seconds, "outside_experts": result.outside_experts, "paths": paths}
        print_json({**dataclasses.asdict(result), **extra, "threads": torch.get_num_threads()})
        return
    _print_model(result, load_seconds, paths)


def _print_model(result, load_seconds: float, paths: list[dict]) -> None:
    from rich.table import Table

    from int4moe_ipex.bench.report import wide_console
    from int4moe_ipex.bench.timing import FOREIGN_LIMIT
    from int4moe_ipex.cli.inspect import size

    console = wide_console()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("prefill", f"{result.prefill_rate:.1f} tokens/s ({result.prompt_tokens} tokens)")
    table.add_row("decode", f"{result.decode_rate:.1f} tokens/s ({result.new_tokens} tokens)")
    table.add_row("loading", f"{load_seconds:.1f} s, {size(result.packed_bytes)} packed")
    table.add_row("memory", f"{size(result.peak_rss_bytes)} at peak")
    for entry in paths:
        table.add_row("path", f"{entry['path']}: {entry['modules']} modules")
    console.print(table)
    parts = Table("part", "decode ms", "share", "prefill ms", "share")
    decode, prefill = result.decode_parts, result.prefill_parts
    for part in sorted(decode, key=decode.get, reverse=True):
        cells = [part]
        for by in (decode, prefill):
            value = by.get(part, 0.0)
            cells += [f"{value * 1e3:.2f}", f"{value / sum(by.values()):.0%}"]
        parts.add_row(*cells)
    console.print(parts)
    if result.foreign > FOREIGN_LIMIT:
        console.print(
            f"[yellow]Other processes took {result.foreign:.0%} of the machine's CPU time meanwhile: "
            "measure again on a quiet machine.[/yellow]"
        )


def _print_changes(changes, noise: float) -> None:
    from rich.table import Table

    from int4moe_ipex.bench.report import wide_console

    table = Table("tokens", "path", "before ms", "now ms", "times as fast", "by", title="against the baseline")
    for change in changes:
        cells = (f"{change.before * 1e3:.3f}", f"{change.now * 1e3:.3f}", f"{change.ratio:.2f}")
        table.add_row(str(change.tokens), change.path, *cells, "share of the ceiling" if change.by_share else "time")
    wide_console().print(table)
    slower = [change for change in changes if change.regressed(noise)]
    if slower:
        names = ", ".join(f"{c.path} at {c.tokens} ({c.ratio:.2f})" for c in slower)
        typer.echo(f"slower than the baseline by more than {noise:.0%}: {names}", err=True)
        raise typer.Exit(1)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    from int4moe_ipex.errors import ConfigError

    words = _words(text)
    if not words or not all(word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"--tokens wants positive numbers separated by commas, not {text!r}")
    return [int(word) for word in words]


def _one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    from int4moe_ipex.errors import ConfigError

    if value not in known:
        raise ConfigError(f"--{option} {value!r} is not one of {', '.join(known)}")
    return value


def _bar(title: str, total: int):
    """A progress bar on stderr, for terminals only; yields step(description)."""
    import sys
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def shown():
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task(title, total=total)
            yield lambda description: progress.update(task, advance=1, description=description)

    return shown()
