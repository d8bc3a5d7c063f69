"""Stored words to canonical codes, by the C++ core where it is built and by torch where it is not.

The torch formulas define the result; the core moves the same nibbles, an order of magnitude faster.
"""

from __future__ import annotations

import torch

try:
    from int4moe_ipex import _native
except ImportError:
    _native = None

# Numbers of csrc/core/unpack.h.
ROWS, COLUMNS, AWQ = 0, 1, 2


def from_rows(words: torch.Tensor, in_features: int, perm: torch.Tensor | None = None) -> torch.Tensor:
    """compressed-tensors: int32 [N, ceil(K/8)], nibble i of word r is column 8r+i, to uint8 [N, K/2].

    Without a permutation the result is a view of `words` where the rows fill their words.
    """
    if perm is not None and _native is not None:
        return _by_core(ROWS, words, words.shape[0], in_features, perm)
    codes = row_major(row_major(words).view(torch.uint8)[:, : in_features // 2])
    return codes if perm is None else permute_codes(codes, perm)


def from_columns(words: torch.Tensor, perm: torch.Tensor | None = None) -> torch.Tensor:
    """GPTQ: int32 [K/8, N], nibble i of word r is column 8r+i, to uint8 [N, K/2]."""
    if _native is not None:
        return _by_core(COLUMNS, words, words.shape[1], words.shape[0] * 8, perm)
    # Bytes of a little-endian word are nibble pairs in column order already, so a transpose of words is all.
    codes = row_major(words.t()).view(torch.uint8)
    return codes if perm is None else permute_codes(codes, perm)


def from_awq(words: torch.Tensor) -> torch.Tensor:
    """AWQ: int32 [K, N/8], nibble i of word c is row 8c + {0,2,4,6,1,3,5,7}[i], to uint8 [N, K/2]."""
    k, groups = words.shape
    if _native is not None:
        return _by_core(AWQ, words, groups * 8, k, None)
    raw = row_major(words).view(torch.uint8)
    even, odd = raw[0::2], raw[1::2]
    low, high = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)
    # Byte 2a+b of a word holds rows 4b+a (low nibble) and 4b+2+a (high nibble).
    pairs = torch.stack((low, high), dim=-1).view(k // 2, groups, 2, 2, 2)
    return row_major(pairs.permute(1, 3, 4, 2, 0).reshape(groups * 8, k // 2))


def permute_codes(codes: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """Nibble pairs [N, K/2] in stored order to nibble pairs in canonical order: column j is stored column perm[j]."""
    low = codes[:, perm.long() >> 1] >> ((perm & 1) << 2).to(torch.uint8)
    return (low[:, 0::2] & 15) | (low[:, 1::2] << 4)


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a row-major's own strides. `contiguous()` keeps odd strides of dimensions of size 1, which can
    neither be viewed as bytes nor be trusted by code that reads strides."""
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * size)
    if tensor.stride() == tuple(strides[-tensor.dim() :]):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _by_core(packing: int, words: torch.Tensor, n: int, k: int, perm: torch.Tensor | None) -> torch.Tensor:
    words = row_major(words)
    perm = None if perm is None else row_major(perm)
    codes = torch.empty(n, k // 2, dtype=torch.uint8)
    _native.canonical_codes(
        packing,
        words.data_ptr(),
        n,
        k,
        0 if perm is None else perm.data_ptr(),
        codes.data_ptr(),
        torch.get_num_threads(),
    )
    return codes
