"""`int4moe config`: show what is in force and where it comes from, list the shipped files, export the schema."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer


def command(app: typer.Typer) -> None:
    group = typer.Typer(help="Show, list and describe configurations.", no_args_is_help=True)
    group.command("show")(show)
    group.command("list")(list_shipped)
    group.command("schema")(schema)
    app.add_typer(group, name="config")


def show(
    file: Annotated[str | None, typer.Argument(help="YAML file or a shipped name; default: INT4MOE_CONFIG.")] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print the configuration in force, after the file, the environment and the defaults.

    Example: INT4MOE_THREADS_COUNT=8 int4moe config show avx512 --origin
    """
    from rich.console import Console
    from rich.table import Table

    from int4moe_ipex.config import Config
    from int4moe_ipex.config_sources import unknown_variables

    config = Config.load(file)
    if origin:
        # Which rows are taken depends on the number of threads: torch is asked, and only then imported.
        from int4moe_ipex.cpu import detect
        from int4moe_ipex.diagnosis import tuned
    values, origins = _flat(config.model_dump(mode="json")), config.origins()
    if as_json:
        shown = {key: {"value": value, "origin": origins[key]} for key, value in values.items()} if origin else values
        if origin:
            shown["tuned"] = tuned(detect(), config)
        typer.echo(json.dumps(shown, indent=2))
    else:
        table = Table("key", "value", *(["origin"] if origin else []))
        for key, value in values.items():
            table.add_row(key, json.dumps(value), *([origins[key]] if origin else []))
        Console().print(table)
        if origin:
            used = tuned(detect(), config)
            for kind, words in used["in_use"].items():
                typer.echo(f"auto for {kind} is tuned: {words} ({used['file']})")
    for sentence in unknown_variables(Config, os.environ):
        typer.echo(f"warning: {sentence}", err=True)


def list_shipped() -> None:
    """List the configurations that come with the package, usable by name.

    Example: int4moe config list
    """
    from int4moe_ipex.config import shipped

    for name, file in shipped().items():
        first = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        typer.echo(f"{name:12} {first}")


def schema() -> None:
    """Print the JSON schema, for editors that check YAML.

    Example: int4moe config schema > int4moe.schema.json
    """
    from int4moe_ipex.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def _flat(data: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
