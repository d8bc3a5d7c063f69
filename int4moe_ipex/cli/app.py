"""The `int4moe` command. Each verb lives in a module of its own and is imported only when it is called for."""

from __future__ import annotations

import importlib

import typer

# verb -> module that defines `command(app)`, which adds the verb (or a group of verbs) to the app
VERBS: tuple[str, ...] = ("config",)


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="int4moe",
        help="INT4 Mixture-of-Experts models on x86 CPUs.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    for verb in VERBS:
        importlib.import_module(f"int4moe_ipex.cli.{verb}").command(app)
    return app


def main() -> None:
    """The console script. An error that this package raises on purpose is one line on stderr and exit status 2."""
    from int4moe_ipex.errors import Int4MoeError

    try:
        build_app()()
    except Int4MoeError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None
