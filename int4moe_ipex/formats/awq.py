"""AWQ gemm: AutoAWQ, gptqmodel, and AutoRound in its AWQ packing.

| tensor | shape | dtype |
|---|---|---|
| qweight | [K, N/8] | int32, packed along N in AWQ order |
| qzeros | [G, N/8] | int32, packed the same way |
| scales | [G, N] | float16, bfloat16 or float32 |
| bias | [N], optional | float |

Nibble i of word c holds column `8c + ORDER[i]`. `W[n, k] = (q[k, n] - z[k // g, n]) * scales[k // g, n]`; zeros are
stored as they are. Files with `zero_point: false` carry qzeros too.
"""

from __future__ import annotations

import torch

from int4moe_ipex.canonical import SCALE_DTYPES, CanonicalWeight
from int4moe_ipex.checkpoint.files import Checkpoint
from int4moe_ipex.formats import codes
from int4moe_ipex.formats.base import LinearInfo
from int4moe_ipex.formats.codes import row_major
from int4moe_ipex.formats.common import (
    Parts,
    read_finite,
    resolve_group_size,
    zeros_or_none,
)

SUFFIXES = ("qweight", "qzeros", "scales", "bias")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Nibble that holds column i: the inverse of ORDER.
NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


def describe(parts: Parts) -> LinearInfo | None:
    """Checks the headers of one module. Problems go to `parts`; None if there are any."""
    scheme = parts.scheme
    parts.only(*SUFFIXES)
    if not parts.require("qweight", "qzeros", "scales"):
        return None
    if not all([parts.dims("qweight", 2), parts.dims("qzeros", 2), parts.dims("scales", 2)]):
        return None
    k, words = parts.shape("qweight")
    num_groups, n = parts.shape("scales")
    if n == words:
        parts.problem(
            "qweight",
            f"has shape {[k, words]} beside scales {[num_groups, n]}, which is GPTQ packing, but the label says AWQ",
        )
        return None
    group_size = resolve_group_size(scheme.group_size, k)
    parts.expect("qweight", (torch.int32,), (k, n // 8))
    parts.expect("qzeros", (torch.int32,), (num_groups, n // 8))
    parts.expect("scales", SCALE_DTYPES, (num_groups, words * 8))
    parts.expect_bias(n)
    if group_size * num_groups != k:
        parts.problem(
            "scales",
            f"has {num_groups} groups for {k} columns, but {scheme.source} says group_size {scheme.group_size} "
            "(AWQ has no tail group)",
        )
    if k % 2:
        parts.problem("qweight", f"has an odd number of input features, {k}, which is out of scope")
    if parts.problems:
        return None
    return parts.info(
        "scales",
        format="awq",
        bits=4,
        out_features=n,
        in_features=k,
        group_size=group_size,
        symmetric=bool(scheme.symmetric),
        zero_convention="z",
        act_order=False,
    )


def read(checkpoint: Checkpoint, info: LinearInfo) -> CanonicalWeight:
    """The exact weight.

    Raises:
        FormatError: scales that are not finite.
    """
    scales = read_finite(checkpoint, info.tensors["scales"], ("group", "row"))
    zeros = unpack(checkpoint.tensor(info.tensors["qzeros"]))
    return CanonicalWeight(
        codes=codes.from_awq(checkpoint.tensor(info.tensors["qweight"])),
        scales=row_major(scales.t()),
        zeros=zeros_or_none(zeros.t()),
        group_size=info.group_size,
    )


def unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N/8] in AWQ order to uint8 [R, N] in column order."""
    raw = row_major(words).view(torch.uint8)
    nibbles = torch.stack((raw & 15, raw >> 4), dim=-1).view(words.shape[0], words.shape[1], 8)
    return nibbles[:, :, list(NIBBLE_OF_COLUMN)].flatten(1)
