"""The `int4moe` command. Each verb lives in a module of its own and is imported only when it is called for."""

from __future__ import annotations

import importlib

import typer

# verb -> module that defines `command(app)`, which adds the verb (or a group of verbs) to the app
VERBS: tuple[str, ...] = ()


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
    build_app()()
