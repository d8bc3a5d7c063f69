"""GPTQ: gptqmodel, AutoGPTQ, optimum, and AutoRound in its GPTQ packings.

| tensor | shape | dtype |
|---|---|---|
| qweight | [K * bits / 32, N] | int32, packed along K: row 8r+i is nibble i of word r |
| qzeros | [G, ceil(N * bits / 32)] | int32, packed along N |
| scales | [G, N] | float16, bfloat16 or float32 |
| g_idx | [K], optional | int32 or int64: group of each original column |
| bias | [N], optional | float |

`W[n, k] = (q[k, n] - z[g_idx[k], n]) * scales[g_idx[k], n]`.

Zeros are stored as z (v2) or as z - 1 (v1). gptqmodel subtracts 1 from every field of a word at once, as
`word - 0x11111111`, so a zero of 0 borrows from its neighbour; only adding on the whole word undoes that.
"""

from __future__ import annotations

import torch

from int4moe_ipex.canonical import SCALE_DTYPES, CanonicalWeight, DenseWeight, Weight
from int4moe_ipex.checkpoint.files import Checkpoint
from int4moe_ipex.errors import FormatError
from int4moe_ipex.formats import act_order, codes
from int4moe_ipex.formats.base import LinearInfo
from int4moe_ipex.formats.codes import row_major
from int4moe_ipex.formats.common import (
    Parts,
    check_bits,
    dense_8bit,
    groups_of,
    read_finite,
    resolve_group_size,
    unpack_words,
    zeros_or_none,
)

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "bias")
CONVENTIONS = {"v1": "z-1 (v1)", "v2": "z (v2)", None: "unknown"}
ONE_PER_FIELD = {4: 0x11111111, 8: 0x01010101}
MIDDLE = {4: 8, 8: 128}


def describe(parts: Parts, zeros: str | None) -> LinearInfo | None:
    """Checks the headers of one module. Problems go to `parts`; None if there are any.

    Args:
        parts: the module's tensors; its scheme must not be None.
        zeros: v1, v2, or None when no label says.
    """
    scheme = parts.scheme
    parts.only(*SUFFIXES)
    if not parts.require("qweight", "qzeros", "scales"):
        return None
    if not all([parts.dims("qweight", 2), parts.dims("qzeros", 2), parts.dims("scales", 2)]):
        return None
    rows, n = parts.shape("qweight")
    num_groups, scale_columns = parts.shape("scales")
    if scale_columns == 8 * n:
        parts.problem(
            "qweight",
            f"has shape {[rows, n]} beside scales {[num_groups, scale_columns]}, which is AWQ packing, "
            "but the label says GPTQ",
        )
        return None
    words = parts.shape("qzeros")[1]
    bits = next((b for b in (scheme.bits, 4, 8) if words == -(-n * b // 32)), scheme.bits)
    k = rows * 32 // bits
    group_size = resolve_group_size(scheme.group_size, k)
    parts.expect("qweight", (torch.int32,), (rows, n))
    parts.expect("scales", SCALE_DTYPES, (num_groups, n))
    parts.expect("qzeros", (torch.int32,), (num_groups, -(-n * bits // 32)))
    if "g_idx" in parts.headers:
        parts.expect("g_idx", (torch.int32, torch.int64), (k,))
    parts.expect_bias(n)
    if groups_of(k, group_size) != num_groups:
        parts.problem(
            "scales",
            f"has {num_groups} groups for {k} columns, but {scheme.source} says group_size {scheme.group_size}, "
            f"which makes {groups_of(k, group_size)}",
        )
    if zeros is None and not scheme.symmetric:
        parts.problem("qzeros", "are asymmetric and no label says whether they are stored minus one")
    if parts.problems:
        return None
    check_bits(parts, scheme, bits)
    return parts.info(
        "scales",
        format="gptq",
        bits=bits,
        out_features=n,
        in_features=k,
        group_size=group_size,
        symmetric=bool(scheme.symmetric),
        zero_convention=CONVENTIONS[zeros],
        act_order="g_idx" in parts.headers,
    )


def read(checkpoint: Checkpoint, info: LinearInfo) -> Weight:
    """The exact weight: canonical for 4 bits, dense float32 for 8.

    Raises:
        FormatError: scales that are not finite, zeros that contradict a symmetric label, an invalid g_idx.
    """
    qweight = checkpoint.tensor(info.tensors["qweight"])
    scales = read_finite(checkpoint, info.tensors["scales"], ("group", "row"))
    zeros = read_zeros(checkpoint, info)
    grouping = act_order.plain(info.group_size)
    if "g_idx" in info.tensors:
        name = info.tensors["g_idx"]
        grouping = act_order.from_g_idx(checkpoint.tensor(name), info.group_size, scales.shape[0], name)
    if info.bits == 8:
        columns = _column_groups(checkpoint, info)
        return DenseWeight(
            dense_8bit(codes.from_columns(qweight), None if zeros is None else zeros.t(), scales.t(), columns)
        )
    return CanonicalWeight(
        codes=codes.from_columns(qweight, grouping.perm),
        scales=row_major(grouping.take(scales.t())),
        zeros=None if zeros is None else zeros_or_none(grouping.take(zeros.t())),
        group_size=grouping.group_size,
        perm=grouping.perm,
    )


def read_zeros(checkpoint: Checkpoint, info: LinearInfo) -> torch.Tensor | None:
    """True zero points uint8 [G, N], or None when the label says symmetric: all are the middle then.

    Where the label says symmetric, the stored values tell v1 from v2 by themselves: all are one below the middle, or
    all are the middle. Files labelled v1 that hold v2 exist; the values win and the disagreement is reported.

    Raises:
        FormatError: labelled symmetric, but the stored zeros are neither.
    """
    name = info.tensors["qzeros"]
    qzeros = checkpoint.tensor(name)
    if not info.symmetric:
        if info.zero_convention == CONVENTIONS["v1"]:
            qzeros = _add_to_words(qzeros, ONE_PER_FIELD[info.bits])
        return unpack_words(qzeros, info.bits)[:, : info.out_features]
    stored = unpack_words(qzeros, info.bits)[:, : info.out_features]
    middle = MIDDLE[info.bits]
    first = int(stored[0, 0])
    if first not in (middle - 1, middle) or not bool((stored == first).all()):
        bad = ((stored != middle - 1) & (stored != middle)).nonzero()
        where = (
            f"group {int(bad[0, 0])}, row {int(bad[0, 1])} is {int(stored[tuple(bad[0].tolist())])}"
            if len(bad)
            else f"some are {middle - 1} and some {middle}"
        )
        raise FormatError(
            f"{name}: the label says symmetric, so all stored zero points must be {middle - 1} (v1) "
            f"or all {middle} (v2), but {where}"
        )
    found = "v1" if first == middle - 1 else "v2"
    if info.zero_convention not in (CONVENTIONS[found], CONVENTIONS[None]):
        checkpoint.warn(
            f"the label says that zero points are stored as {info.zero_convention}, but they are stored as "
            f"{CONVENTIONS[found]}; the tensors are believed",
            name,
        )
    return None


def _add_to_words(words: torch.Tensor, addend: int) -> torch.Tensor:
    """Adds modulo 2**32; computed in int64, since signed overflow is not defined to wrap."""
    total = (words.to(torch.int64) + addend) & 0xFFFFFFFF
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def _column_groups(checkpoint: Checkpoint, info: LinearInfo) -> torch.Tensor:
    if "g_idx" in info.tensors:
        return checkpoint.tensor(info.tensors["g_idx"]).long()
    return torch.div(torch.arange(info.in_features), info.group_size, rounding_mode="floor")
