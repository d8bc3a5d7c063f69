"""`int4moe`: one file per verb, imported only when its verb runs."""

from int4moe_ipex.cli.app import main

__all__ = ["main"]
