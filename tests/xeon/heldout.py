"""The start of the held-out text for the emulated Xeon, prepared where transformers imports fast.

`python -m tests.xeon.heldout CHECKPOINT TEXT OUT.json` writes the token ids and the perplexity that transformers' model
of the checkpoint has over them in float32, with this package's reference backend. The reference's perplexity over the
whole text is held to expected.json by tests/models/test_real_checkpoints.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import int4moe_ipex
from int4moe_ipex.cli.common import load_tokenizer
from int4moe_ipex.models import run

WINDOW = 128
TOKENS = 2 * WINDOW


@dataclass(frozen=True)
class Heldout:
    """token_ids: one more than is scored. perplexity: in float32, over disjoint windows of WINDOW tokens."""

    token_ids: list[int]
    perplexity: float

    @classmethod
    def read(cls, file: Path) -> Heldout:
        return cls(**json.loads(file.read_text()))


def prepare(checkpoint: Path, text: Path) -> Heldout:
    tokenizer = load_tokenizer(checkpoint)
    # run.perplexity leaves the last window out unless a token more follows it.
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids[: TOKENS + 2]
    model = int4moe_ipex.load(checkpoint, backend="reference", dtype="float32")
    value, scored = run.perplexity(model, ids, WINDOW)
    assert scored == TOKENS, scored
    return Heldout(ids, value)


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(asdict(prepare(Path(sys.argv[1]), Path(sys.argv[2])))))
