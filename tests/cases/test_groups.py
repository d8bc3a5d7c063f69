"""Public cases 4 to 7: group sizes, tail groups, group indices, act-order."""

import numpy as np
import pytest
import torch

from int4moe_ipex.canonical import dequantize
from int4moe_ipex.checkpoint import Checkpoint
from int4moe_ipex.errors import FormatError, MissingTensorsError
from int4moe_ipex.formats import describe, read_linear
from tests import builders

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def read_one(folder, tensors, label):
    checkpoint = Checkpoint.open(builders.one_linear(folder, tensors, label))
    weight, _ = read_linear(checkpoint, describe(checkpoint)["m"])
    return weight, dequantize(weight)


def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_4_group_of_96(tmp_path, dtype):
    """sglang#38573, vllm#41511: a group size of 128 was assumed."""
    source = builders.linear(rng(), 16, 192, 96, scales_dtype=dtype)
    source.scales[:, 0], source.scales[:, 1] = 2**-6, 2**-3
    tensors = builders.compressed_tensors(source)
    weight, values = read_one(tmp_path / "a", tensors, builders.ct_label({"group_size": 96}))
    assert weight.group_size == 96 and torch.equal(values, source.weight)
    codes = torch.tensor(source.codes - 8)
    assert torch.equal(values[:, :96], codes[:, :96] * 2**-6) and torch.equal(values[:, 96:], codes[:, 96:] * 2**-3)
    with pytest.raises(MissingTensorsError, match=r"group_size 96, but config_groups\.group_0 says group_size 128"):
        read_one(tmp_path / "b", tensors, builders.ct_label({"group_size": 128}))


@pytest.mark.parametrize(("store", "label"), [(builders.gptq, builders.gptq_label), (builders.awq, builders.awq_label)])
def test_case_4_other_formats_quote_both(tmp_path, store, label):
    tensors = store(builders.linear(rng(), 16, 192, 48))
    with pytest.raises(MissingTensorsError, match=r"m\.scales: has 4 groups for 192 columns, but .* group_size 64"):
        read_one(tmp_path, tensors, label(group_size=64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_4_minus_one_is_the_whole_row(tmp_path, dtype):
    """IPEX#832: -1 crashed. Scales are [1, N]."""
    source = builders.linear(rng(), 16, 192, -1, scales_dtype=dtype)
    tensors = builders.gptq(source)
    assert tensors["scales"].shape == (1, 16)
    minus_one, explicit = (
        read_one(tmp_path / str(size), tensors, builders.gptq_label(group_size=size)) for size in (-1, 192)
    )
    assert torch.equal(minus_one[1], source.weight) and torch.equal(explicit[1], source.weight)
    assert minus_one[0].group_size == explicit[0].group_size == 192
    assert minus_one[0].scales.dtype == dtype


def test_case_5_tail_group(tmp_path):
    """vllm#43227, vllm#49591: the tail group was dropped by a floor."""
    gate, down = builders.linear(rng(), 40, 64, scale=2**-6), builders.linear(rng(), 64, 40, scale=2**-6)
    down.scales[:, 1] = 2**-3
    tensors = builders.gptq(down)
    assert tensors["qweight"].shape == (5, 64) and tensors["scales"].shape == (2, 64)
    for g_idx in (True, False):
        weight, values = read_one(tmp_path / f"down{g_idx}", builders.gptq(down, g_idx=g_idx), builders.gptq_label())
        assert weight.perm is None and torch.equal(values, down.weight)
        assert torch.equal(values[:, 32:], torch.tensor(down.codes[:, 32:] - 8) * 2**-3)
    assert torch.equal(read_one(tmp_path / "gate", builders.gptq(gate), builders.gptq_label())[1], gate.weight)


def test_case_5_rows_that_fill_no_word(tmp_path):
    source = builders.linear(rng(), 20, 64, symmetric=False)
    label = builders.ct_label({"symmetric": False})
    assert torch.equal(read_one(tmp_path / "ct", builders.compressed_tensors(source, False), label)[1], source.weight)
    label = builders.gptq_label(sym=False)
    assert torch.equal(read_one(tmp_path / "gptq", builders.gptq(source), label)[1], source.weight)


SHUFFLED = [k * 7 % 64 // 32 for k in range(64)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize(
    ("g_idx", "outcome"),
    [
        (None, "plain"),
        ([k // 32 for k in range(64)], "plain"),
        ([-1] * 64, "unset"),
        ([0] * 64, "error"),
        (SHUFFLED, "shuffled"),
        ([2 if k == 5 else k // 32 for k in range(64)], "error"),
        ([-1 if k == 5 else k // 32 for k in range(64)], "error"),
    ],
    ids=["absent", "trivial", "all -1", "all 0", "shuffled", "one out of range", "one -1"],
)
def test_case_6_g_idx(tmp_path, layout, dtype, g_idx, outcome):
    """compressed-tensors#761, neural-compressor#2204, auto-round#267."""
    source = builders.linear(rng(), 16, 64, symmetric=False)
    if outcome == "shuffled":
        source.group_of = g_idx
    if layout == "gptq":
        tensors, label, suffix = builders.gptq(source, g_idx=False), builders.gptq_label(sym=False), "g_idx"
    else:
        tensors, suffix = builders.compressed_tensors(source, symmetric=False), "weight_g_idx"
        label = builders.ct_label({"symmetric": False, "actorder": "group"})
    if g_idx is not None:
        tensors[suffix] = torch.tensor(g_idx, dtype=dtype)
    if outcome == "error" or (outcome == "unset" and layout == "gptq"):
        with pytest.raises(FormatError, match=rf"m\.{suffix}: (column|no column)"):
            read_one(tmp_path, tensors, label)
        return
    weight, values = read_one(tmp_path, tensors, label)
    assert torch.equal(values, source.weight)
    assert (weight.perm is None) == (outcome != "shuffled")


def test_case_7_each_projection_has_its_own_order(tmp_path):
    """vllm#11528, vllm#41161: experts shared or lost their permutation."""

    def make(generator, module, n, k):
        source = builders.linear(generator, n, k, symmetric=False, act_order=".2." in module)
        if ".1." in module:
            source.group_of = [(k - 1 - column) // 32 for column in range(k)]
        return source

    label = builders.gptq_label(desc_act=True, sym=False)
    moe = builders.moe_checkpoint(
        tmp_path, label, make=make, config=builders.qwen3_moe_config(moe_intermediate_size=64), seed=3
    )
    checkpoint = Checkpoint.open(tmp_path)
    infos = describe(checkpoint)
    perms = {}
    for name, source in moe.linears.items():
        weight, _ = read_linear(checkpoint, infos[name])
        assert torch.equal(dequantize(weight), source.weight), name
        perms[name] = None if weight.perm is None else weight.perm.tolist()
    assert all(perm is None for name, perm in perms.items() if ".0." in name.replace("layers.0.", ""))
    second = [perm for name, perm in perms.items() if "experts.2." in name]
    assert len({tuple(perm) for perm in second}) == 3


@pytest.mark.parametrize("actorder", ["weight", "static"])
def test_case_7_static_order_leaves_plain_groups(tmp_path, actorder):
    source = builders.linear(rng(), 16, 64)
    weight, values = read_one(tmp_path, builders.compressed_tensors(source), builders.ct_label({"actorder": actorder}))
    assert weight.perm is None and torch.equal(values, source.weight)
