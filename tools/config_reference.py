"""docs/config.md from config.py: `python tools/config_reference.py` writes it, `--check` says whether it is current."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from int4moe_ipex.config import json_schema  # noqa: E402

OUT = ROOT / "docs" / "config.md"
HEAD = """# Configuration

Written by `python tools/config_reference.py` from `int4moe_ipex/config.py`; do not edit.

One YAML file describes a deployment. A file needs only the keys that differ from the defaults;
[configs/auto.yaml](../configs/auto.yaml) has all of them. `--config` takes a path or the name of a file that comes with
the package (`int4moe config list`).

What wins, from weakest to strongest: defaults, the file (`--config`, else `INT4MOE_CONFIG`), environment variables,
options of the command line and keyword arguments of `load`. `int4moe config show --origin` prints every value in force
and where it came from.

An unknown key, a wrong type or an impossible combination is one sentence that names file, line and the nearest key.
`int4moe config schema` prints a JSON schema for editors.
"""


def kind(schema: dict[str, Any]) -> str:
    """A value's type in words."""
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        return " \\| ".join(kind(option) for option in schema["anyOf"])
    names = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true \\| false",
        "null": "null",
    }
    text = names[schema["type"]]
    bounds = [
        f"{words} {schema[key]:g}"
        for key, words in (
            ("minimum", "from"),
            ("exclusiveMinimum", "above"),
            ("maximum", "to"),
            ("exclusiveMaximum", "below"),
        )
        if key in schema
    ]
    return " ".join([text, *bounds])


def rows(properties: dict[str, Any], prefix: str, variables: bool) -> list[str]:
    lines = []
    for key, schema in properties.items():
        if "$ref" in schema or schema.get("type") == "array":
            continue
        default = json.dumps(schema["default"]) if "default" in schema else "required"
        cells = [f"`{prefix}{key}`", kind(schema), default, schema["description"]]
        if variables:
            cells.append("`INT4MOE_" + f"{prefix}{key}".upper().replace(".", "_") + "`")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def section(title: str, text: str, lines: list[str], variables: bool = True) -> list[str]:
    header = ["key", "values", "default", "meaning", *(["variable"] if variables else [])]
    table = [f"| {' | '.join(header)} |", f"| {' | '.join(['---'] * len(header))} |", *lines]
    return ["", f"## {title}", "", *([text, ""] if text else []), *table]


def text() -> str:
    """The whole page."""
    schema = json_schema()
    parts = [HEAD.rstrip(), *section("Top level", "", rows(schema["properties"], "", True))]
    for key, value in schema["properties"].items():
        if "$ref" in value:
            found = schema["$defs"][value["$ref"].rpartition("/")[2]]
            parts += section(f"`{key}`", found["description"], rows(found["properties"], f"{key}.", True))
    rule = schema["$defs"]["Rule"]
    parts += section("`rules`", "A list. " + rule["description"], rows(rule["properties"], "", False), variables=False)
    return "\n".join([*parts, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when the page is out of date"
    )
    if parser.parse_args().check:
        if not OUT.exists() or OUT.read_text(encoding="utf-8") != text():
            print(f"{OUT} is out of date: run python tools/config_reference.py", file=sys.stderr)
            return 1
        return 0
    OUT.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
