"""Random linears through a builder and a reader: the weight comes back bit for bit, whatever the shape."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from int4moe_ipex.canonical import CanonicalWeight, DenseWeight, dequantize
from int4moe_ipex.checkpoint import Checkpoint
from int4moe_ipex.formats import compressed_tensors_config, describe, read_linear, to_compressed_tensors
from tests import builders

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
ANY = settings(max_examples=40, deadline=None)


def read_back(tensors, label):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint.open(builders.one_linear(Path(folder), tensors, label))
        info = describe(checkpoint)["m"]
        weight, bias = read_linear(checkpoint, info)
        assert (weight.out_features, weight.in_features) == (info.out_features, info.in_features)
        if isinstance(weight, CanonicalWeight):
            for tensor in (weight.codes, weight.scales, weight.zeros, weight.perm):
                assert tensor is None or tensor.stride() == torch.empty(tensor.shape).stride()
        return weight, None if bias is None else bias.clone(), dequantize(weight)


def check(source, tensors, label):
    weight, bias, values = read_back(tensors, label)
    assert torch.equal(values, source.weight)
    assert torch.equal(bias, source.bias) if source.bias is not None else bias is None
    return weight


@st.composite
def sources(draw, rows, columns, tail=True, act_order=None, bits=(4, 8)):
    n, k = draw(rows), draw(columns)
    sizes = st.integers(1, k) if tail else st.sampled_from([g for g in range(1, k + 1) if k % g == 0])
    return builders.linear(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        n,
        k,
        draw(st.one_of(st.just(-1), sizes)),
        symmetric=draw(st.booleans()),
        act_order=draw(st.booleans()) if act_order is None else act_order,
        scales_dtype=draw(DTYPES),
        bits=draw(st.sampled_from(bits)),
        bias=draw(st.booleans()),
    )


def is_symmetric(source):
    return bool((source.zeros == 2 ** (source.bits - 1)).all())


@ANY
@given(
    source=sources(st.integers(1, 40), st.integers(1, 12).map(lambda words: words * 8)),
    zeros=st.sampled_from(["v1", "v2"]),
    sixty_four=st.booleans(),
)
def test_gptq(source, zeros, sixty_four):
    tensors = builders.gptq(source, zeros, g_idx_dtype=torch.int64 if sixty_four else torch.int32)
    if zeros == "v1":
        stored = tensors["qzeros"]
        assert stored.dtype == torch.int32
    label = builders.gptq_label(
        bits=source.bits,
        group_size=source.group_size,
        sym=is_symmetric(source),
        checkpoint_format={"v1": "gptq", "v2": "gptq_v2"}[zeros],
    )
    weight = check(source, tensors, label)
    if source.bits == 8:
        assert isinstance(weight, DenseWeight) and weight.weight.dtype == torch.float32
        return
    k = source.shape[1]
    assert weight.group_size == source.group_size
    assert (weight.perm is None) == (source.group_of == [column // source.group_size for column in range(k)])
    assert (weight.zeros is None) == bool((source.zeros == 8).all())
    assert weight.scales.dtype == source.scales.dtype


@ANY
@given(
    source=sources(
        st.integers(1, 6).map(lambda words: words * 8), st.integers(1, 40).map(lambda x: 2 * x), False, False, (4,)
    )
)
def test_awq(source):
    label = builders.awq_label(group_size=source.group_size, zero_point=not is_symmetric(source))
    weight = check(source, builders.awq(source), label)
    assert weight.perm is None and weight.group_size == source.group_size


@ANY
@given(source=sources(st.integers(1, 40), st.integers(1, 50).map(lambda x: 2 * x), tail=False), g_idx=st.booleans())
def test_compressed_tensors(source, g_idx):
    k = source.shape[1]
    natural = source.group_of == [column // source.group_size for column in range(k)]
    g_idx = g_idx or not natural
    symmetric = is_symmetric(source)
    strategy = "channel" if source.group_size == k and not g_idx else "group"
    tensors = builders.compressed_tensors(source, symmetric, strategy, g_idx)
    label = builders.ct_label(
        {"num_bits": source.bits, "symmetric": symmetric, "strategy": strategy, "group_size": source.group_size}
    )
    weight = check(source, tensors, label)
    if source.bits == 4:
        assert (weight.perm is None) == natural


@ANY
@given(data=st.data(), groups=st.integers(1, 6))
def test_any_g_idx_without_empty_groups(data, groups):
    """Groups of unequal sizes, which no label can describe, still give (q - z[g]) * s[g]."""
    k = data.draw(st.integers(max(1, -(-groups // 8)), 10)) * 8
    rest = data.draw(st.lists(st.integers(0, groups - 1), min_size=k - groups, max_size=k - groups))
    group_of = data.draw(st.permutations([*range(groups), *rest]))
    size = -(-k // groups)
    if -(-k // size) != groups:  # no group_size makes this many groups of so many columns
        return
    source = builders.linear(np.random.default_rng(data.draw(st.integers(0, 99))), 8, k, size, symmetric=False)
    source.group_of = list(group_of)
    label = builders.gptq_label(group_size=size, sym=False, desc_act=True)
    check(source, builders.gptq(source), label)


@ANY
@given(source=sources(st.integers(1, 40), st.integers(1, 12).map(lambda words: words * 8), tail=False, bits=(4,)))
def test_export_to_compressed_tensors(source):
    label = builders.gptq_label(group_size=source.group_size, sym=is_symmetric(source), checkpoint_format="gptq_v2")
    weight, bias, values = read_back(builders.gptq(source, "v2"), label)
    exported = to_compressed_tensors(weight, bias)
    again, bias_again, values_again = read_back(exported, compressed_tensors_config({"m": weight}))
    assert torch.equal(values, values_again)
    assert torch.equal(weight.codes, again.codes) and torch.equal(weight.scales, again.scales)
    assert weight.scales.dtype == again.scales.dtype
    assert (weight.zeros is None and again.zeros is None) or torch.equal(weight.zeros, again.zeros)
    assert (weight.perm is None and again.perm is None) or torch.equal(weight.perm, again.perm)
    assert bias is None or torch.equal(bias, bias_again)
