"""The one formula, on words worked by hand."""

import pytest
import torch

from int4moe_ipex.canonical import CanonicalWeight, DenseWeight, dequantize, pack_codes, unpack_codes
from int4moe_ipex.errors import FormatError


def test_hand_computed_words():
    # Bytes 0x10 0x32: codes 0 1 2 3. Two groups of two columns; zeros 1 and 3; scales 2 and 0.5.
    weight = CanonicalWeight(
        codes=torch.tensor([[0x10, 0x32]], dtype=torch.uint8),
        scales=torch.tensor([[2.0, 0.5]], dtype=torch.float16),
        zeros=torch.tensor([[1, 3]], dtype=torch.uint8),
        group_size=2,
    )
    assert dequantize(weight).tolist() == [[-2.0, 0.0, -0.5, 0.0]]


def test_symmetric_zero_is_eight_and_the_tail_group_is_short():
    # Codes 8 9 A B F 0, groups of four: columns 4 and 5 use the second scale.
    weight = CanonicalWeight(
        codes=torch.tensor([[0x98, 0xBA, 0x0F]], dtype=torch.uint8),
        scales=torch.tensor([[1.0, 4.0]], dtype=torch.bfloat16),
        zeros=None,
        group_size=4,
    )
    assert dequantize(weight).tolist() == [[0.0, 1.0, 2.0, 3.0, 28.0, -32.0]]


def test_perm_puts_canonical_columns_back():
    # Canonical columns 0..3 are original columns 2, 0, 3, 1.
    weight = CanonicalWeight(
        codes=torch.tensor([[0x98, 0xBA]], dtype=torch.uint8),
        scales=torch.tensor([[1.0, 10.0]], dtype=torch.float32),
        zeros=None,
        group_size=2,
        perm=torch.tensor([2, 0, 3, 1], dtype=torch.int32),
    )
    assert dequantize(weight).tolist() == [[1.0, 30.0, 0.0, 20.0]]


def test_codes_round_trip():
    values = torch.arange(16, dtype=torch.uint8).repeat(3, 2)
    assert torch.equal(unpack_codes(pack_codes(values)), values)
    with pytest.raises(FormatError, match="even"):
        pack_codes(values[:, :3])


@pytest.mark.parametrize(
    "change",
    [
        {"codes": torch.zeros(2, 4)},
        {"scales": torch.zeros(2, 3, dtype=torch.float16)},
        {"scales": torch.zeros(2, 2, dtype=torch.int32)},
        {"zeros": torch.zeros(2, 1, dtype=torch.uint8)},
        {"group_size": 0},
        {"group_size": 9},
        {"perm": torch.zeros(8, dtype=torch.int64)},
    ],
)
def test_broken_shapes_are_refused(change):
    good = {
        "codes": torch.zeros(2, 4, dtype=torch.uint8),
        "scales": torch.ones(2, 2, dtype=torch.float16),
        "zeros": torch.zeros(2, 2, dtype=torch.uint8),
        "group_size": 4,
        "perm": torch.arange(8, dtype=torch.int32),
    }
    CanonicalWeight(**good)
    with pytest.raises(FormatError):
        CanonicalWeight(**(good | change))


def test_dense_weights_are_only_widened():
    weight = DenseWeight(torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16))
    assert dequantize(weight).dtype == torch.float32
    assert dequantize(weight).tolist() == [[1.5, -2.0]]
