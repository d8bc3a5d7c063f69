"""Real checkpoints, written by the real quantizers, against an independent reference (expected.json)."""

import math

import pytest
import torch
from transformers import AutoTokenizer

import int4moe_ipex
from int4moe_ipex.backends import ipex, onednn, select
from int4moe_ipex.models import run
from tests.real import HELDOUT, REASON, ROOT, checkpoints, expected

# (backend, dtype, compute) -> how far the held-out perplexity may be from expected.json
BOUNDS = {
    ("reference", "float32", "w4a16"): 0.001,
    ("torch", "bfloat16", "w4a16"): 0.3,
    ("native", "float32", "w4a16"): 0.05,
    ("native", "bfloat16", "w4a16"): 0.3,
    ("native", "bfloat16", "w4a8"): 0.3,
    ("ipex", "float32", "w4a16"): 0.01,
    ("ipex", "bfloat16", "w4a16"): 0.3,
    ("onednn", "float32", "w4a16"): 0.01,
    ("onednn", "bfloat16", "w4a16"): 0.3,
}
OPTIONAL = {"ipex": ipex.status, "onednn": onednn.status}


def test_the_shared_checkpoints_are_there():
    if not ROOT.is_dir():
        pytest.skip(REASON)
    assert len(checkpoints()) >= 7


@pytest.mark.parametrize("path", checkpoints(), ids=lambda p: p.name)
@pytest.mark.parametrize("way", BOUNDS, ids="/".join)
def test_heldout_perplexity(path, way):
    backend, dtype, compute = way
    if backend not in select.available():
        pytest.skip(f"the {backend} backend cannot be imported here")
    usable, why = OPTIONAL.get(backend, lambda: (True, ""))()
    if not usable:
        pytest.skip(why)
    model = int4moe_ipex.load(path, backend=backend, dtype=dtype, compute=compute)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(HELDOUT.read_text(), add_special_tokens=False).input_ids
    value, tokens = run.perplexity(model, ids)
    assert tokens == 6528 and math.isfinite(value)
    assert abs(value - expected(path)["heldout_perplexity"]) <= BOUNDS[way]
    used = set(model.int4moe_report.paths)
    assert all(name.startswith(backend) for name in used)


@pytest.mark.parametrize("path", checkpoints(), ids=lambda p: p.name)
def test_logits_and_greedy_text_on_the_reference(path):
    want = expected(path)
    model = int4moe_ipex.load(path, backend="reference", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        logits = model(input_ids=tokenizer(want["prompt"], return_tensors="pt").input_ids).logits[0, -1]
    torch.testing.assert_close(logits[:8], torch.tensor(want["last_token_logits_first8"]), rtol=0, atol=1e-4)
    assert logits.topk(5).indices.tolist() == want["last_token_top5_ids"]
    result = run.generate(model, tokenizer, want["prompt"], len(want["greedy_ids"]))
    assert result.token_ids == want["greedy_ids"]
    assert result.text == want["greedy_text"]
