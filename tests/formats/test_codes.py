"""Stored words to canonical codes: the C++ core against the torch formulas, and these against one nibble at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from int4moe_ipex.formats import codes

needs_core = pytest.mark.skipif(codes._native is None, reason="the C++ core is not built here")
ANY = settings(max_examples=60, deadline=None)


@pytest.fixture
def by_torch(monkeypatch):
    monkeypatch.setattr(codes, "_native", None)


def random_words(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).integers(-(2**31), 2**31, shape, dtype=np.int32))


def nibble(word, index):
    return (int(word) >> (4 * index)) & 15


def pairs(rows):
    """Lists of codes to nibble pairs, low nibble first."""
    return torch.tensor([[r[c] | (r[c + 1] << 4) for c in range(0, len(r), 2)] for r in rows], dtype=torch.uint8)


def test_torch_rows_one_nibble_at_a_time(by_torch):
    words = random_words(0, 3, 3)
    perm = torch.from_numpy(np.random.default_rng(1).permutation(20).astype(np.int32))
    rows = [[nibble(words[n, k // 8], k % 8) for k in range(20)] for n in range(3)]
    assert torch.equal(codes.from_rows(words, 20), pairs(rows))
    assert torch.equal(codes.from_rows(words, 20, perm), pairs([[row[k] for k in perm] for row in rows]))


def test_torch_columns_one_nibble_at_a_time(by_torch):
    words = random_words(2, 3, 5)
    perm = torch.from_numpy(np.random.default_rng(3).permutation(24).astype(np.int32))
    rows = [[nibble(words[k // 8, n], k % 8) for k in range(24)] for n in range(5)]
    assert torch.equal(codes.from_columns(words), pairs(rows))
    assert torch.equal(codes.from_columns(words, perm), pairs([[row[k] for k in perm] for row in rows]))


def test_torch_awq_one_nibble_at_a_time(by_torch):
    words = random_words(4, 6, 2)
    place = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}  # row within a word -> nibble
    rows = [[nibble(words[k, n // 8], place[n % 8]) for k in range(6)] for n in range(16)]
    assert torch.equal(codes.from_awq(words), pairs(rows))


def both(function, *args):
    by_core = function(*args)
    core, codes._native = codes._native, None
    try:
        by_torch = function(*args)
    finally:
        codes._native = core
    assert by_core.dtype == torch.uint8 and by_core.is_contiguous()
    assert torch.equal(by_core, by_torch)


# Sizes around the core's tiles of 64 rows by 128 columns.
ROWS = st.one_of(st.integers(1, 20), st.integers(60, 70), st.integers(125, 140))
PAIRS = st.one_of(st.integers(1, 12), st.integers(60, 68), st.integers(120, 150))
SEED = st.integers(0, 2**32 - 1)


def order(seed, k):
    return torch.from_numpy(np.random.default_rng(seed).permutation(k).astype(np.int32))


@needs_core
@ANY
@given(n=ROWS, half=PAIRS, seed=SEED)
def test_rows_by_the_core(n, half, seed):
    both(codes.from_rows, random_words(seed, n, -(-half // 4)), 2 * half, order(seed, 2 * half))


@needs_core
@ANY
@given(n=ROWS, words=st.integers(1, 40), permuted=st.booleans(), seed=SEED)
def test_columns_by_the_core(n, words, permuted, seed):
    both(codes.from_columns, random_words(seed, words, n), order(seed, 8 * words) if permuted else None)


@needs_core
@ANY
@given(groups=st.integers(1, 20), half=PAIRS, seed=SEED)
def test_awq_by_the_core(groups, half, seed):
    both(codes.from_awq, random_words(seed, 2 * half, groups))


@needs_core
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        both(codes.from_awq, random_words(5, 256, 40))
        both(codes.from_columns, random_words(6, 32, 320), order(6, 256))
        both(codes.from_rows, random_words(7, 320, 32), 256, order(7, 256))
    finally:
        torch.set_num_threads(before)


@needs_core
def test_words_that_are_not_contiguous_or_not_aligned():
    both(codes.from_columns, random_words(8, 100, 16).t())
    raw = torch.from_numpy(np.random.default_rng(9).integers(0, 256, 4 * 16 * 20 + 4, dtype=np.uint8))
    both(codes.from_columns, raw[4:].view(torch.int32).view(16, 20))
