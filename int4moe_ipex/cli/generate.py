"""`int4moe generate`: text from a checkpoint, with tokens per second and the path that ran."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from int4moe_ipex.cli.common import (
    BackendOption,
    ComputeOption,
    ConfigOption,
    DtypeOption,
    JsonOption,
    PathArgument,
    load_with_progress,
    paths_summary,
    print_json,
)
from int4moe_ipex.cli.outputs import check_prompt


def command(app: typer.Typer) -> None:
    @app.command()
    def generate(
        path: PathArgument,
        prompt: Annotated[str, typer.Option(help="Text to continue.", callback=check_prompt)],
        max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
        backend: BackendOption = None,
        dtype: DtypeOption = None,
        compute: ComputeOption = None,
        config: ConfigOption = None,
        sample: Annotated[
            bool, typer.Option("--sample", help="Sample by generation_config.json; else greedy.")
        ] = False,
        as_json: JsonOption = False,
    ) -> None:
        """Generate text from a checkpoint.

        Example: int4moe generate ./Qwen3-30B-A3B-GPTQ --prompt "The statement is used to" --max-new-tokens 32
        """
        model, tokenizer = load_with_progress(path, config, as_json, backend=backend, dtype=dtype, compute=compute)
        from int4moe_ipex.machine import peak_rss_bytes
        from int4moe_ipex.models import run

        result = run.generate(model, tokenizer, prompt, max_new_tokens, do_sample=sample)
        paths = paths_summary(model.int4moe_report)
        if as_json:
            print_json({**dataclasses.asdict(result), "peak_rss_bytes": peak_rss_bytes(), "paths": paths})
            return
        _print(prompt, result, paths)


def _print(prompt: str, result, paths: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from int4moe_ipex.machine import peak_rss_bytes

    console = Console()
    console.print(Text(prompt, style="dim") + Text(result.text))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("prompt", f"{result.prompt_tokens} tokens, prefill {result.prefill_tokens_per_second:.1f} tokens/s")
    decode = result.decode_tokens_per_second
    rate = "" if decode is None else f", decode {decode:.1f} tokens/s"
    table.add_row("new", f"{len(result.token_ids)} tokens{rate}")
    table.add_row("memory", f"{peak_rss_bytes() / 2**20:.0f} MiB at peak")
    for entry in paths:
        why = "; ".join(entry["rejected"]) or "first choice of the table"
        table.add_row("path", Text(f"{entry['path']}: {entry['modules']} modules ({why})"))
    console.print()
    console.print(table)
