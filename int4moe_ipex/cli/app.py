"""The `int4moe` command. Each verb lives in a module of its own and is imported only when it is called for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from int4moe_ipex.errors import Int4MoeError

# Each is a module of this package with `command(app)`, which adds its verb (or a group of verbs) to the app.
VERBS: tuple[str, ...] = (
    "inspect",
    "doctor",
    "generate",
    "perplexity",
    "verify",
    "convert",
    "tune",
    "config",
    "bench",
    "serve",
)


def build_app(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """The typer application with these verbs."""
    app = typer.Typer(
        name="int4moe",
        help="INT4 Mixture-of-Experts models on x86 CPUs.\n\nExample: int4moe generate PATH --prompt TEXT",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def top(
        version: Annotated[
            bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
        ] = False,
    ) -> None:
        pass

    for verb in verbs:
        importlib.import_module(f"int4moe_ipex.cli.{verb}").command(app)
    return app


def _version(asked: bool) -> None:
    if asked:
        from int4moe_ipex import __version__

        print(f"int4moe_ipex {__version__}")
        raise typer.Exit


def main() -> None:
    """Runs the command; an error of this package, or of a file, is one message on stderr and exit status 2."""
    asked = sys.argv[1:2]
    try:
        # Help and completion name every verb; a verb that is called for needs itself alone.
        build_app(asked if set(asked) <= set(VERBS) and asked else VERBS)()
    except Int4MoeError as error:
        print(f"int4moe: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # What reads the output has gone, such as head; nothing more can be said to it, also not at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        # Of a file that was named, such as one without permission; any other is a fault of ours, with its traceback.
        if not isinstance(error.filename, str | Path) or error.strerror is None:
            raise
        print(f"int4moe: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
