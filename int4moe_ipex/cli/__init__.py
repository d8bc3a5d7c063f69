"""`int4moe`: one file per verb, imported only when its verb runs."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Runs the command line; Ctrl-C ends it with exit status 130 and no traceback, whenever it comes."""
    try:
        from int4moe_ipex.cli import app

        app.main()
    except KeyboardInterrupt:
        import sys

        print("int4moe: interrupted", file=sys.stderr)
        sys.exit(130)
