"""Public cases 1 to 3: zero points that fluent garbage came from. Every scale is 2**-6, so results are exact."""

import logging

import numpy as np
import pytest
import torch

from int4moe_ipex.canonical import dequantize
from int4moe_ipex.checkpoint import Checkpoint
from int4moe_ipex.errors import FormatError, MissingTensorsError
from int4moe_ipex.formats import describe, read_linear
from tests import builders

SCALE = 2.0**-6
UP = 0x76543210


def read_all(folder):
    checkpoint = Checkpoint.open(folder)
    infos = {name: info for name, info in describe(checkpoint).items() if ".experts." in name}
    return checkpoint, {name: dequantize(read_linear(checkpoint, info)[0]) for name, info in infos.items()}


def fixture_t(folder, change, label, store=builders.gptq, **kwargs):
    return builders.moe_checkpoint(folder, label, store, change=change, **kwargs).folder


def fill(suffix, value):
    def change(tensors):
        for name, tensor in tensors.items():
            if name.endswith(f".{suffix}"):
                tensor.fill_(value)

    return change


def both(*changes):
    def change(tensors):
        for one in changes:
            one(tensors)

    return change


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", [0x77777777, 0x88888888 - 2**32])
def test_case_1_v2_zeros_labelled_v1(tmp_path, caplog, label, stored):
    """vllm#38966: all 0x88888888 under `checkpoint_format: gptq` and `sym: true` decoded with a zero of 9."""
    folder = fixture_t(
        tmp_path, both(fill("qweight", UP), fill("qzeros", stored)), builders.gptq_label(checkpoint_format=label)
    )
    with caplog.at_level(logging.WARNING):
        checkpoint, weights = read_all(folder)
    assert len(weights) == 12
    for weight in weights.values():
        expected = (torch.arange(weight.shape[1]) % 8 - 8) * SCALE
        assert torch.equal(weight, expected.expand_as(weight))
    disagree = (label == "gptq") != (stored == 0x77777777)
    assert any("zero points are stored" in text for text in checkpoint.warnings) == disagree
    # once, not for each of the 12 modules
    assert sum("zero points are stored" in record.message for record in caplog.records) == disagree


@pytest.mark.parametrize("stored", [0x77777776, 0x78777777, 0x66666666, 0x99999999 - 2**32, 0x77777778, 0])
def test_case_1_any_other_zero_under_sym_is_an_error(tmp_path, stored):
    folder = fixture_t(tmp_path, fill("qzeros", stored), builders.gptq_label())
    with pytest.raises(FormatError, match=r"experts\.0\.\w+\.qzeros: the label says symmetric"):
        read_all(folder)


def test_case_2_awq_order_and_a_zero_of_0(tmp_path):
    """vllm#48552, GPTQModel#2350, #2352: AWQ experts read in GPTQ order, a zero of 0 wrapped to 15."""
    # nibble 4 holds column 1 and nibble 5 holds column 3
    word = 0x88088888 - 2**32
    folder = fixture_t(
        tmp_path, both(fill("qweight", 0x75316420), fill("qzeros", word)), builders.awq_label(), builders.awq
    )
    _, weights = read_all(folder)
    for weight in weights.values():
        column = torch.arange(weight.shape[0]) % 8
        zero = torch.where(column == 3, 0, 8)
        assert torch.equal(weight, ((column - zero) * SCALE)[:, None].expand_as(weight))


def test_case_3_zero_points_of_12_rows(tmp_path):
    """transformers#47430: experts lost their weight_zero_point."""
    tensors = builders.compressed_tensors(
        builders.linear(np.random.default_rng(0), 12, 64, scale=SCALE), symmetric=False
    )
    padded = torch.tensor([[UP, UP], [0x7FFFBA98, 0x1234BA98]], dtype=torch.int32)
    tensors["weight_zero_point"] = padded  # -8..3 by row; the upper half of the second word is padding
    label = builders.ct_label({"symmetric": False})
    checkpoint = Checkpoint.open(builders.one_linear(tmp_path / "a", tensors, label))
    weight, _ = read_linear(checkpoint, describe(checkpoint)["m"])
    assert weight.zeros.tolist() == [[row, row] for row in range(12)]
    del tensors["weight_zero_point"]
    checkpoint = Checkpoint.open(builders.one_linear(tmp_path / "b", tensors, label))
    with pytest.raises(MissingTensorsError, match=r"m\.weight_zero_point: is missing"):
        describe(checkpoint)
