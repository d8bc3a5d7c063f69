"""Where the real checkpoints are: INT4MOE_CHECKPOINTS, else ../shared/checkpoints; one is in the repository."""

from __future__ import annotations

import json
import os
from pathlib import Path

REPO = Path(__file__).parents[1]
ROOT = Path(os.environ.get("INT4MOE_CHECKPOINTS", REPO.parent / "shared" / "checkpoints"))
EXAMPLE = REPO / "examples" / "tiny-qwen3moe-gptq-sym-g128"
HELDOUT = REPO / "examples" / "heldout.txt"
REASON = f"no checkpoints at {ROOT}; set INT4MOE_CHECKPOINTS"


def checkpoints() -> list[Path]:
    """The carried example and whatever is at ROOT, each with an expected.json."""
    found = sorted(p.parent for p in ROOT.glob("*/expected.json")) if ROOT.is_dir() else []
    return [EXAMPLE, *(p for p in found if p.name != "gptq-sym-g128")]


def expected(path: Path) -> dict:
    return json.loads((path / "expected.json").read_text())
