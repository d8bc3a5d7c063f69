"""`int4moe tune`: measures which row of the table is fastest here by tokens per expert, and keeps it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from int4moe_ipex.cli.common import ComputeOption, ConfigOption, DtypeOption, JsonOption, print_json, progress_bar

DISTURBED = 0.25  # share of batches from which a measurement is not worth keeping


def command(app: typer.Typer) -> None:
    app.command("tune")(tune)


def tune(
    compute: ComputeOption = None,
    dtype: DtypeOption = None,
    config: ConfigOption = None,
    threads: Annotated[
        str | None, typer.Option(help="Numbers of threads to measure, such as 8,16; default: the configuration's.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and show, and write nothing.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Forget what was measured, and do nothing else.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the crossing points between rows of the table by tokens per expert, and keep them for this machine.

    Takes half a minute and is worth it on a quiet machine alone. The file is $INT4MOE_TUNE_FILE (off: none), else
    ~/.cache/int4moe/tune.json; it counts where a configuration leaves backend and isa at auto. Rows differ in the
    last bits of their results, so that with crossings these depend on how many tokens come at once.

    Example: int4moe tune --threads 8,16
    """
    import torch

    from int4moe_ipex import threads as binding
    from int4moe_ipex import tuning
    from int4moe_ipex.backends.base import RunConfig
    from int4moe_ipex.bench import crossings
    from int4moe_ipex.config import Config
    from int4moe_ipex.cpu import detect
    from int4moe_ipex.errors import ConfigError

    file = tuning.file_of()
    if clear:
        if file is not None:
            file.unlink(missing_ok=True)
        return
    if file is None and not dry_run:
        raise ConfigError(f"{tuning.VARIABLE} is off, so that nothing would be kept; unset it or add --dry-run")
    settings = Config.load(config, compute=compute, dtype=dtype)
    binding.apply(settings.threads)
    cpu, run = detect(), RunConfig("auto", settings.compute, getattr(torch, settings.dtype))
    start = time.perf_counter()
    entries = []
    for count in _counts(threads) or [torch.get_num_threads()]:
        torch.set_num_threads(count)
        for kind in ("experts", "linear"):
            with progress_bar(f"{count} threads", as_json) as step:
                entries.append(crossings.measure(kind, cpu, run, progress=step))
    seconds = time.perf_counter() - start
    if not dry_run:
        tuning.write(file, {entry.key: entry for entry in entries})
    if as_json:
        kept = None if dry_run else str(file)
        print_json({"file": kept, "seconds": round(seconds, 1), "entries": [entry.as_dict() for entry in entries]})
    else:
        _print(entries)
        print(f"measured in {seconds:.0f} s" + ("" if dry_run else f", kept in {file}"))


def _counts(text: str | None) -> list[int]:
    from int4moe_ipex.errors import ConfigError

    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--threads is a list of numbers such as 8,16, not {text!r}")
    return [int(part) for part in parts]


def _print(entries: list) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for entry in entries:
        key = entry.key
        console.print(f"[bold]{key.kind}[/bold], {key.compute}, {key.dtype}, {key.threads} threads, {entry.shape}")
        counts = list(next(iter(entry.seconds.values())))
        if counts:
            table = Table(title="milliseconds by tokens per expert", title_justify="left")
            table.add_column("row", no_wrap=True)
            for count in counts:
                table.add_column(count, justify="right")
            best = {count: min(times[count] for times in entry.seconds.values()) for count in counts}
            for row, times in entry.seconds.items():
                table.add_row(row, *(f"{'[bold]' * (times[c] == best[c])}{times[c] * 1e3:.2f}" for c in counts))
            console.print(table)
        console.print(f"{entry.in_words()}\n")
    if max(entry.disturbed for entry in entries) > DISTURBED:
        console.print("[yellow]Other processes took CPU time meanwhile: measure again on a quiet machine.[/yellow]")
