"""`int4moe perplexity`: how well a checkpoint predicts a text, on any backend."""

from __future__ import annotations

import sys
from pathlib import Path
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
from int4moe_ipex.cli.outputs import read_text


def command(app: typer.Typer) -> None:
    @app.command()
    def perplexity(
        path: PathArgument,
        text: Annotated[Path, typer.Option(help="UTF-8 text file.")],
        window: Annotated[int, typer.Option(min=1, help="Tokens per window.")] = 128,
        max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text that are used at most.")] = 8192,
        backend: BackendOption = None,
        dtype: DtypeOption = None,
        compute: ComputeOption = None,
        config: ConfigOption = None,
        as_json: JsonOption = False,
    ) -> None:
        """Measure perplexity on a text: disjoint windows, logits in float32.

        Example: int4moe perplexity ./checkpoint --text heldout.txt --backend reference --dtype float32 --json
        """
        from rich.console import Console
        from rich.progress import Progress

        content = read_text(text)
        model, tokenizer = load_with_progress(path, config, as_json, backend=backend, dtype=dtype, compute=compute)
        from int4moe_ipex.models import run

        ids = tokenizer(content, add_special_tokens=False).input_ids
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=as_json or not sys.stderr.isatty()) as bar:
            task = bar.add_task("windows", total=None)
            value, tokens = run.perplexity(
                model, ids, window, max_tokens, lambda done, total: bar.update(task, completed=done, total=total)
            )
        if as_json:
            print_json({"perplexity": value, "tokens": tokens, "paths": paths_summary(model.int4moe_report)})
        else:
            Console().print(f"perplexity {value:.4f} over {tokens} tokens")
