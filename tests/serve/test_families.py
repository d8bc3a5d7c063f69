"""Decoding several sequences together, for every family: as each of them alone, or refused by name."""

import copy

import pytest
import torch

import int4moe_ipex
from int4moe_ipex.errors import UnsupportedModelError
from int4moe_ipex.models import attention
from int4moe_ipex.serve.batch import BatchModel, prefill
from tests.models.tiny import FAMILIES, stock_model, write_checkpoint

PROMPTS = ([1, 5, 9], [33, 60, 7, 7, 41], [13])
ONE_BY_ONE = {"qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "lfm2_moe", "mimo_v2_flash", "gpt_oss"}


@pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")
@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_rows_are_as_alone(family, tmp_path):
    write_checkpoint(stock_model(family), family, tmp_path)
    model = int4moe_ipex.load(tmp_path, backend="native", dtype="bfloat16")
    if family in ONE_BY_ONE:
        with pytest.raises(UnsupportedModelError, match="max_running to 1"):
            BatchModel(model, 3)
        return
    batch = BatchModel(model, 3)
    caches = [prefill(model, prompt)[1] for prompt in PROMPTS]
    alone = [copy.deepcopy(cache) for cache in caches]
    for tokens in ([3, 4, 5], [20, 30, 40]):
        positions = torch.tensor([cache.get_seq_length() for cache in caches])
        together = batch.step(torch.tensor(tokens), positions, caches)
        for row, cache in enumerate(alone):
            one = batch.step(torch.tensor(tokens[row : row + 1]), positions[row : row + 1], [cache])
            assert torch.equal(one[0], together[row])
