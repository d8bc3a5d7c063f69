"""The plain decoder against transformers' model of the same checkpoint."""

import pytest
import torch

import int4moe_ipex
from int4moe_ipex.backends.base import RunConfig
from int4moe_ipex.models import run
from tests.real import EXAMPLE, HELDOUT
from tests.xeon.decoder import Decoder
from tests.xeon.heldout import WINDOW, prepare

FLOAT32 = RunConfig(dtype=torch.float32)


def test_logits_are_those_of_transformers():
    ids = torch.tensor([prepare(EXAMPLE, HELDOUT).token_ids[:96]]).view(2, 48)
    model = int4moe_ipex.load(EXAMPLE, backend="reference", dtype="float32")
    with torch.inference_mode():
        want = model(input_ids=ids, use_cache=False).logits
        got = Decoder(EXAMPLE, FLOAT32, "reference")(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_perplexity_is_that_of_transformers():
    heldout = prepare(EXAMPLE, HELDOUT)
    value, _ = run.perplexity(Decoder(EXAMPLE, FLOAT32, "reference"), heldout.token_ids, WINDOW)
    assert value == pytest.approx(heldout.perplexity, abs=1e-3)
