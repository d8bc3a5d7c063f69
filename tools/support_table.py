"""docs/support.md from the code: `python tools/support_table.py` writes it, `--check` says whether it is up to date.

Everything is asked of the code that decides at load time: the table of rows, each backend's own check of a linear, and
the list of refused formats. Nothing depends on the machine that runs this.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from int4moe_ipex.backends import ipex, onednn, torch_int4  # noqa: E402
from int4moe_ipex.backends.base import LinearSpec  # noqa: E402
from int4moe_ipex.backends.native.backend import linear_problem  # noqa: E402
from int4moe_ipex.backends.onednn.backend import GROUP_STEP  # noqa: E402
from int4moe_ipex.backends.select import ANY, TABLE  # noqa: E402
from int4moe_ipex.checkpoint.refuse import METHODS  # noqa: E402
from int4moe_ipex.cpu import ISA_FLAGS  # noqa: E402
from int4moe_ipex.models.families import FAMILIES, REFUSED, Family  # noqa: E402

OUT = ROOT / "docs" / "support.md"
# A linear of the sizes that published models have.
IN, OUT_FEATURES = 2048, 768


def spec(group: int, symmetric: bool, act_order: bool = False) -> LinearSpec:
    return LinearSpec(IN, OUT_FEATURES, IN if group == -1 else group, symmetric, act_order)


def variants() -> list[tuple[str, list[LinearSpec]]]:
    """(words, linears) of what quantizers write."""
    both = (True, False)
    groups = (32, 64, 128)
    return [
        ("GPTQ, groups of 32, 64 or 128", [spec(g, s) for g in groups for s in both]),
        ("GPTQ, one group per channel", [spec(-1, s) for s in both]),
        ("GPTQ with act-order", [spec(g, s, True) for g in groups for s in both]),
        ("GPTQ, groups of 16", [spec(16, s) for s in both]),
        ("AWQ (gemm), groups of 32, 64 or 128", [spec(g, False) for g in groups]),
        ("compressed-tensors, groups of 32, 64 or 128", [spec(g, s) for g in groups for s in both]),
        ("compressed-tensors, one group per channel", [spec(-1, s) for s in both]),
        ("compressed-tensors with act-order", [spec(g, s, True) for g in groups for s in both]),
        ("AutoRound, packed as GPTQ or AWQ", [spec(g, s) for g in groups for s in both]),
    ]


def _onednn(linear: LinearSpec) -> str | None:
    return "groups" if math.gcd(linear.group_size, linear.in_features) % GROUP_STEP else None


CHECKS: dict[str, Callable[[LinearSpec], str | None]] = {
    "native": lambda linear: linear_problem("linear", linear),
    "ipex": lambda linear: ipex.IpexBackend._reject(linear, True),
    "onednn": _onednn,
    "torch": torch_int4._reject,
    "reference": lambda linear: None,
}


def verdict(backend: str, linears: list[LinearSpec]) -> str:
    taken = [CHECKS[backend](linear) is None for linear in linears]
    return "yes" if all(taken) else "some" if any(taken) else "no"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _family(family: Family) -> str:
    return f"`{family.model_type}`" + (f" (quantized by {' or '.join(family.methods)})" if family.methods else "")


def text() -> str:
    """The whole page."""
    assert onednn is not None
    backends = list(dict.fromkeys(row.backend for row in TABLE))
    rows = [
        [
            f"`{row.name}`" + (" (slow)" if row.slow else ""),
            " ".join(f"`{c}`" for c in row.compute),
            "any" if row.isa == ANY else ", ".join(sorted(ISA_FLAGS[row.isa])) or "none",
            row.limits,
        ]
        for row in TABLE
    ]
    formats = [[words, *(verdict(b, linears) for b in backends)] for words, linears in variants()]
    refused = sorted(set(METHODS.values()), key=str.lower)
    return "\n".join(
        [
            "# What is supported",
            "",
            "Written by `python tools/support_table.py` from the code that decides at load time; do not edit.",
            "",
            "## Rows of the table, in order of preference",
            "",
            "The first row that the configuration allows, the CPU can run and the backend supports for a module wins.",
            "`int4moe doctor PATH` gives each row's verdict for your machine and checkpoint.",
            "",
            *table(["row", "compute", "CPU flags it needs", "takes"], rows),
            "",
            "## Formats by backend",
            "",
            f"For a linear of {OUT_FEATURES} x {IN}. `native` runs the same formats on each instruction set above;",
            "`some` depends on the group size, as the table above says.",
            "",
            *table(["format", *(f"`{b}`" for b in backends)], formats),
            "",
            "8-bit GPTQ and 16-bit modules may stand beside int4 ones; they run as dense weights, exactly.",
            "",
            "## Model families",
            "",
            ", ".join(_family(FAMILIES[name]) for name in sorted(FAMILIES)) + ".",
            "",
            "Of a checkpoint with an image encoder the language model alone is loaded, and layers of multi-token",
            "prediction are left unread. Not taken:",
            "",
            *(f"- `{name}`: {why}" for name, why in REFUSED.items()),
            "",
            "## Refused by name",
            "",
            ", ".join(refused) + ".",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when the page is out of date"
    )
    if parser.parse_args().check:
        current = OUT.read_text(encoding="utf-8") if OUT.exists() else ""
        if current != text():
            print(f"{OUT} is out of date: run python tools/support_table.py", file=sys.stderr)
            return 1
        return 0
    OUT.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
