"""`int4moe verify`: proves that what runs is what the checkpoint says."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from int4moe_ipex.cli.common import (
    BackendOption,
    ComputeOption,
    ConfigOption,
    DtypeOption,
    JsonOption,
    PathArgument,
    import_transformers,
    load_with_progress,
    print_json,
)
from int4moe_ipex.cli.outputs import check_prompt


def command(app: typer.Typer) -> None:
    app.command("verify")(verify)


def verify(
    path: PathArgument,
    source: Annotated[Path | None, typer.Option(help="Checkpoint of a store that was moved since.")] = None,
    backend: BackendOption = None,
    dtype: DtypeOption = None,
    compute: ComputeOption = None,
    config: ConfigOption = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Also compare the logits after this text with float32.", callback=check_prompt),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every packed weight, bit for bit, and every module's output with the checkpoint's float32 reference.

    A store is compared with the checkpoint that it was made from, and its files with what was written.

    Exit status: 0 all equal, 1 something differs (each module is named), 2 the checkpoint cannot be loaded.

    Example: int4moe verify ./Qwen3-30B-A3B-GPTQ --backend native --prompt "The capital of France is"
    """
    from int4moe_ipex.config import Config
    from int4moe_ipex.folders import model_folder

    model_folder(path)
    settings = Config.load(config, backend=backend, dtype=dtype, compute=compute)
    import_transformers()
    from int4moe_ipex import verification
    from int4moe_ipex.models.loader import prepare
    from int4moe_ipex.models.stored import checkpoint_of

    checkpoint = checkpoint_of(path, source)
    model, tokenizer = load_with_progress(path, settings, as_json)
    results = []
    for result in chain(
        verification.stored_files(path, settings),
        verification.verify(model, prepare(checkpoint, settings), model.dtype),
    ):
        results.append(result)
        if not as_json and not result.good:
            _say(result)
    logits = None
    if prompt is not None:
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        have = verification.last_logits(model, tokens)
        dtype_of_model = model.dtype
        del model
        reference, _ = load_with_progress(checkpoint, Config.load("reference", environ={}), as_json)
        logits = verification.compare_logits(have, verification.last_logits(reference, tokens), dtype_of_model)
    good = all(r.good for r in results) and (logits is None or logits.good)
    if as_json:
        print_json(
            {
                "good": good,
                "modules": [asdict(r) for r in results],
                "logits": None if logits is None else logits.as_dict(),
            }
        )
    else:
        _print(results, logits, good)
    raise typer.Exit(0 if good else 1)


def _say(result: Any) -> None:
    from int4moe_ipex.verification import SHOWN

    shown = result.differs[:SHOWN]
    more = len(result.differs) - len(shown)
    print(f"DIFFERS {result.module} ({result.path})", file=sys.stderr)
    for sentence in shown:
        print(f"  {sentence}", file=sys.stderr)
    if more:
        print(f"  and {more} more", file=sys.stderr)


def _print(results: list[Any], logits: Any, good: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("path", no_wrap=True)
    for title in ("modules", "weights compared", "modules that differ", "largest output error", "limit"):
        table.add_column(title, justify="right")
    for path in dict.fromkeys(r.path for r in results):
        here = [r for r in results if r.path == path]
        errors = [(r.output_error, r.limit) for r in here if r.output_error is not None]
        error, limit = max(errors) if errors else (None, None)
        table.add_row(
            path,
            str(len(here)),
            str(sum(r.weights for r in here)),
            str(sum(not r.good for r in here)),
            "" if error is None else f"{error:.2g}",
            "" if limit is None else f"{limit:g}",
        )
    console = Console()
    console.print(table)
    if logits is not None:
        console.print(
            f"logits: KL divergence {logits.kl_divergence:.2g} (limit {logits.limit:g}), relative error "
            f"{logits.relative_error:.2g}, top 5 {logits.top5}, reference {logits.reference_top5}"
        )
    console.print(Text("verified" if good else "NOT verified", style="green" if good else "bold red"))
