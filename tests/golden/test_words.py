"""Literal packed words and the floats that they mean, computed by hand from each format's rule.

No packing code runs here: these fail when a reader and its builder drift together. Every scale is a power of two.
"""

import pytest
import torch

from int4moe_ipex.canonical import dequantize
from int4moe_ipex.checkpoint import Checkpoint
from int4moe_ipex.formats import describe, read_linear
from tests import builders

UP, DOWN = 0x76543210, 0x01234567  # codes 0..7 and 7..0, from the low nibble up
HIGH = 0xFEDCBA98  # codes 8..15


def words(rows):
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def floats(rows, dtype=torch.float16):
    return torch.tensor(rows, dtype=dtype)


def weight_of(folder, tensors, label):
    checkpoint = Checkpoint.open(builders.one_linear(folder, tensors, label))
    weight, _ = read_linear(checkpoint, describe(checkpoint)["m"])
    return weight, dequantize(weight)


def gptq(folder, qweight, qzeros, scales, g_idx=None, **label):
    tensors = {"qweight": words(qweight), "qzeros": words(qzeros), "scales": scales}
    if g_idx is not None:
        tensors["g_idx"] = torch.tensor(g_idx, dtype=torch.int32)
    return weight_of(folder, tensors, builders.gptq_label(**label))


def test_gptq_v1_symmetric(tmp_path):
    weight, w = gptq(tmp_path, [[UP] * 4 + [DOWN] * 4], [[0x77777777]], floats([[0.5] * 8]), group_size=8)
    assert w[:4].tolist() == [[-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]] * 4
    assert w[4:].tolist() == [[-0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -3.5, -4.0]] * 4
    assert weight.zeros is None and weight.perm is None
    assert weight.codes[0].tolist() == [0x10, 0x32, 0x54, 0x76]  # low nibble = even column


def test_gptq_v2_asymmetric_zeros_along_n(tmp_path):
    label = {"group_size": 8, "sym": False, "checkpoint_format": "gptq_v2"}
    weight, w = gptq(tmp_path, [[UP] * 8], [[HIGH]], floats([[0.25, 0.5, 1, 2, 4, 8, 16, 32]]), **label)
    assert weight.zeros.flatten().tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert w[0].tolist() == [-2.0, -1.75, -1.5, -1.25, -1.0, -0.75, -0.5, -0.25]
    assert w[7].tolist() == [-480.0, -448.0, -416.0, -384.0, -352.0, -320.0, -288.0, -256.0]


def test_gptq_v1_asymmetric_zeros(tmp_path):
    # stored z - 1 = 0..7, so z = 1..8
    weight, w = gptq(tmp_path, [[UP] * 8], [[UP]], floats([[1.0] * 8]), group_size=8, sym=False)
    assert weight.zeros.flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert w[0].tolist() == [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert w[7].tolist() == [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0]


@pytest.mark.parametrize(
    ("stored", "zeros"),
    [
        # 0x88888808 - 0x11111111: row 1's zero of 0 borrowed from row 2. Adding 1 to each nibble would give row 2 a 7.
        (0x777776F7, [8, 0, 8, 8, 8, 8, 8, 8]),
        # 0x00000010 - 0x11111111: every row from 2 on has borrowed, and the last borrow left the word.
        (0xEEEEEEFF, [0, 1, 0, 0, 0, 0, 0, 0]),
        # 0x00000000 - 0x11111111
        (0xEEEEEEEF, [0, 0, 0, 0, 0, 0, 0, 0]),
        # 0x0FFFFFFF - 0x11111111: the borrow of row 7 leaves the word, the sign bit is set
        (0xFEEEEEEE, [15, 15, 15, 15, 15, 15, 15, 0]),
    ],
)
def test_gptq_v1_borrowed_zero_nibble(tmp_path, stored, zeros):
    weight, w = gptq(tmp_path, [[DOWN] * 8], [[stored]], floats([[2.0] * 8]), group_size=8, sym=False)
    assert weight.zeros.flatten().tolist() == zeros
    assert w[:, 0].tolist() == [2.0 * (7 - zero) for zero in zeros]


def test_gptq_groups_along_k(tmp_path):
    # group 0 of rows 0..7: zeros 0..7; group 1: zeros 8..15
    scales = floats([[1.0] * 8, [0.5] * 8])
    label = {"group_size": 8, "sym": False, "checkpoint_format": "gptq_v2"}
    _, w = gptq(tmp_path, [[UP] * 8, [HIGH] * 8], [[UP], [HIGH]], scales, **label)
    assert w[3].tolist() == [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]


def test_gptq_act_order(tmp_path):
    g_idx = [0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0]
    scales = floats([[1.0] * 8, [0.25] * 8])
    weight, w = gptq(
        tmp_path, [[UP] * 8, [HIGH] * 8], [[0x77777777], [0x77777777]], scales, g_idx, group_size=8, desc_act=True
    )
    expected = [-8.0, -1.75, -6.0, -1.25, -4.0, -0.75, -2.0, -0.25, 0.0, 1.0, 0.5, 3.0, 1.0, 5.0, 1.5, 7.0]
    assert w.tolist() == [expected] * 8
    assert weight.perm.tolist() == [0, 2, 4, 6, 9, 11, 13, 15, 1, 3, 5, 7, 8, 10, 12, 14]
    assert weight.codes[0].tolist() == [0x20, 0x64, 0xB9, 0xFD, 0x31, 0x75, 0xA8, 0xEC]


def test_gptq_tail_group(tmp_path):
    # K = 40, groups of 32: columns 32..39 are the tail group, with its own scale
    scales = floats([[2.0] * 8, [0.125] * 8])
    _, w = gptq(tmp_path, [[UP] * 8] * 4 + [[HIGH] * 8], [[0x77777777], [0x77777777]], scales)
    assert w[5, :8].tolist() == [-16.0, -14.0, -12.0, -10.0, -8.0, -6.0, -4.0, -2.0]
    assert w[5, 24:32].tolist() == [-16.0, -14.0, -12.0, -10.0, -8.0, -6.0, -4.0, -2.0]
    assert w[5, 32:].tolist() == [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875]


def test_gptq_8bit_v1(tmp_path):
    # bytes along K: 0x83828180 is codes 128..131; zeros 0x7F stored minus one are 128
    _, w = gptq(
        tmp_path,
        [[0x83828180 - 2**32] * 8, [0x007F01FF] * 8],
        [[0x7F7F7F7F] * 2],
        floats([[0.5] * 8]),
        bits=8,
        group_size=8,
    )
    assert w.tolist() == [[0.0, 0.5, 1.0, 1.5, 63.5, -63.5, -0.5, -64.0]] * 8


def test_awq_order(tmp_path):
    # nibbles from the low end: 0 2 4 6 1 3 5 7, which AWQ gives to columns 0 2 4 6 1 3 5 7
    tensors = {
        "qweight": words([[0x75316420], [0xFDB9ECA8]]),
        "qzeros": words([[0x75316420]]),
        "scales": floats([[1.0, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]]),
    }
    weight, w = weight_of(tmp_path, tensors, builders.awq_label(group_size=2))
    assert weight.zeros.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    # column n holds codes n and n + 8, its zero is n
    assert w.tolist() == [[0.0, 8.0]] * 4 + [[0.0, 4.0]] * 4
    assert weight.codes.flatten().tolist() == [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]


def test_compressed_tensors_symmetric(tmp_path):
    tensors = {
        "weight_packed": words([[UP], [HIGH]]),
        "weight_scale": floats([[0.5], [4.0]], torch.bfloat16),
        "weight_shape": torch.tensor([2, 8]),
    }
    weight, w = weight_of(tmp_path, tensors, builders.ct_label({"group_size": 8}))
    assert weight.zeros is None
    assert w.tolist() == [
        [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5],
        [0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0],
    ]


def test_compressed_tensors_zero_points_of_12_rows(tmp_path):
    # signed zero points -8..3 by row are stored as 0..11; the upper half of the second word is padding, filled here
    tensors = {
        "weight_packed": words([[UP, HIGH]] * 12),
        "weight_scale": floats([[1.0, 0.5]] * 12, torch.bfloat16),
        "weight_shape": torch.tensor([12, 16]),
        "weight_zero_point": words([[UP, UP], [0xDEADBA98, 0xBEEFBA98]]),
    }
    label = builders.ct_label({"group_size": 8, "symmetric": False})
    weight, w = weight_of(tmp_path, tensors, label)
    assert weight.zeros.tolist() == [[n, n] for n in range(12)]
    assert w[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5]
    assert w[11].tolist() == [
        -11.0, -10.0, -9.0, -8.0, -7.0, -6.0, -5.0, -4.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0
    ]  # fmt: skip


def test_compressed_tensors_columns_that_fill_no_word(tmp_path):
    # K = 10: the last word holds two codes and padding, filled here
    tensors = {
        "weight_packed": words([[UP, 0xABCDEF98]]),
        "weight_scale": floats([[2.0]], torch.float32),
        "weight_shape": torch.tensor([1, 10]),
    }
    _, w = weight_of(tmp_path, tensors, builders.ct_label({"strategy": "channel", "group_size": None}))
    assert w.tolist() == [[-16.0, -14.0, -12.0, -10.0, -8.0, -6.0, -4.0, -2.0, 0.0, 2.0]]


def test_compressed_tensors_per_tensor_zero_point_is_signed(tmp_path):
    tensors = {
        "weight_packed": words([[UP], [DOWN]]),
        "weight_scale": floats([0.5]),
        "weight_shape": torch.tensor([2, 8]),
        "weight_zero_point": torch.tensor([-5], dtype=torch.int8),
    }
    label = builders.ct_label({"strategy": "tensor", "group_size": None, "symmetric": False})
    weight, w = weight_of(tmp_path, tensors, label)
    # signed code of field u is u - 8, so W = (u - 8 + 5) / 2
    assert weight.zeros.tolist() == [[3], [3]]
    assert w[0].tolist() == [-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]
    assert w[1].tolist() == [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5]


def test_compressed_tensors_g_idx(tmp_path):
    tensors = {
        "weight_packed": words([[UP]]),
        "weight_scale": floats([[1.0, 16.0]]),
        "weight_shape": torch.tensor([1, 8]),
        "weight_g_idx": torch.tensor([1, 1, 0, 0, 0, 0, 1, 1], dtype=torch.int32),
    }
    weight, w = weight_of(tmp_path, tensors, builders.ct_label({"group_size": 4, "actorder": "group"}))
    assert w.tolist() == [[-128.0, -112.0, -6.0, -5.0, -4.0, -3.0, -32.0, -16.0]]
    assert weight.perm.tolist() == [2, 3, 4, 5, 0, 1, 6, 7]


@pytest.mark.parametrize(
    ("packing", "stored"),
    [("auto_round:auto_gptq", 0x07777770), ("auto_round:gptqmodel", 0x18888881), ("auto_round", 0x18888881)],
)
def test_auto_round_zeros_by_packing(tmp_path, packing, stored):
    # auto_gptq stores z - 1 and clamps it at 0, so a zero of 0 comes back as 1; the others store z
    tensors = {"qweight": words([[UP] * 8]), "qzeros": words([[stored]]), "scales": floats([[1.0] * 8])}
    label = builders.auto_round_label(packing_format=packing, group_size=8, sym=False)
    weight, w = weight_of(tmp_path, tensors, label)
    assert weight.zeros.flatten().tolist() == [1, 8, 8, 8, 8, 8, 8, 1]
    assert w[7].tolist() == [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_auto_round_awq_packing(tmp_path):
    tensors = {
        "qweight": words([[0x75316420], [0x75316420]]),
        "qzeros": words([[0x88888888]]),
        "scales": floats([[1.0] * 8]),
    }
    label = builders.auto_round_label(packing_format="auto_round:auto_awq", group_size=2, sym=False)
    _, w = weight_of(tmp_path, tensors, label)
    assert w[:, 0].tolist() == [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0]
