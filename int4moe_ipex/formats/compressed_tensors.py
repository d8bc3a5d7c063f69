"""compressed-tensors pack-quantized: llm-compressor, and AutoRound in its llm_compressor packing.

| tensor | shape | dtype |
|---|---|---|
| weight_packed | [N, ceil(K * bits / 32)] | int32, packed along K; a field is the code plus 2**(bits-1) |
| weight_scale | [N, G], [N, 1] (channel), [1] (tensor) | float16, bfloat16 or float32 |
| weight_shape | [2] | int64 or int32: N, K |
| weight_zero_point | [ceil(N * bits / 32), G] | int32, packed along N, same offset; int8 as is for strategy tensor |
| weight_g_idx | [K], optional | group of each original column; all -1 means unset |
| bias | [N], optional | float |

`W = (u - zu) * s` with the stored fields u and zu: the offsets cancel. Without a zero point zu is the offset.
"""

from __future__ import annotations

import torch

from int4moe_ipex.canonical import SCALE_DTYPES, CanonicalWeight, DenseWeight, Weight
from int4moe_ipex.checkpoint.files import Checkpoint
from int4moe_ipex.checkpoint.scheme import ModuleScheme
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

SUFFIXES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "bias")


def describe(parts: Parts, checkpoint: Checkpoint) -> LinearInfo | None:
    """Checks the headers of one module and the two numbers of its weight_shape. Problems go to `parts`; None if any."""
    parts.only(*SUFFIXES)
    needed = ["weight_packed", "weight_scale", "weight_shape"]
    if parts.scheme is not None and parts.scheme.symmetric is False:
        needed.append("weight_zero_point")
    if not parts.require(*needed) or not parts.dims("weight_packed", 2):
        return None
    parts.expect("weight_shape", (torch.int64, torch.int32), (2,))
    if parts.problems:
        return None
    n, k = checkpoint.tensor(parts.headers["weight_shape"].name).tolist()
    rows, words = parts.shape("weight_packed")
    # A word holds 4 codes of 8 bits or 8 of 4, so one that is not full may be either: the label is asked first.
    labelled = 4 if parts.scheme is None else parts.scheme.bits
    bits = next((b for b in (labelled, 4, 8) if k > 0 and -(-k * b // 32) == words), None)
    if n != rows or bits is None:
        parts.problem(
            "weight_shape", f"says {[n, k]}, which weight_packed {[rows, words]} does not hold in 4 or 8 bits"
        )
        return None
    scheme = parts.scheme or _scheme_from_shapes(parts, n, k, bits)
    if scheme is None:
        return None
    group_size = k if scheme.strategy != "group" else resolve_group_size(scheme.group_size, k)
    num_groups = _check_scale(parts, scheme, n, k, group_size)
    parts.expect("weight_packed", (torch.int32,), (n, words))
    if "weight_zero_point" in parts.headers:
        if scheme.strategy == "tensor":
            parts.expect("weight_zero_point", (torch.int8,), (1,), (), (1, 1))
        else:
            parts.expect("weight_zero_point", (torch.int32,), (-(-n * bits // 32), num_groups))
        if scheme.symmetric:
            parts.warnings.append(f"{scheme.source} says symmetric, but a weight_zero_point is stored and used")
    if "weight_g_idx" in parts.headers:
        parts.expect("weight_g_idx", (torch.int32, torch.int64), (k,))
    parts.expect_bias(n)
    if k % 2:
        parts.problem("weight_shape", f"says an odd number of input features, {k}, which is out of scope")
    if parts.problems:
        return None
    check_bits(parts, scheme, bits)
    return parts.info(
        "weight_scale",
        format="compressed-tensors",
        bits=bits,
        out_features=n,
        in_features=k,
        group_size=group_size,
        symmetric="weight_zero_point" not in parts.headers,
        zero_convention="z+8 packed" if "weight_zero_point" in parts.headers else "none",
        act_order="weight_g_idx" in parts.headers,
    )


def _scheme_from_shapes(parts: Parts, n: int, k: int, bits: int) -> ModuleScheme | None:
    """What the shapes alone say, for a module that no label covers."""
    shape = parts.shape("weight_scale")
    if shape in ((1,), (), (1, 1)):
        return ModuleScheme(bits, -1, None, "tensor", "its tensors")
    if len(shape) == 2 and shape[0] == n and shape[1] and k % shape[1] == 0:
        return ModuleScheme(bits, k // shape[1], None, "group", "its tensors")
    parts.problem("weight_scale", f"has shape {list(shape)}, which does not divide {[n, k]}, and no label covers it")
    return None


def _check_scale(parts: Parts, scheme: ModuleScheme, n: int, k: int, group_size: int) -> int:
    num_groups = groups_of(k, group_size)
    if scheme.strategy == "tensor":
        parts.expect("weight_scale", SCALE_DTYPES, (1,), (), (1, 1))
        return 1
    shape = parts.shape("weight_scale")
    if scheme.strategy == "group" and (k % group_size or shape != (n, num_groups)):
        stored = f", which is group_size {k // shape[1]}" if len(shape) == 2 and shape[1] and k % shape[1] == 0 else ""
        parts.problem(
            "weight_scale",
            f"has shape {list(shape)} for a weight of {[n, k]}{stored}, but {scheme.source} says group_size "
            f"{scheme.group_size}",
        )
    parts.expect("weight_scale", SCALE_DTYPES, shape if scheme.strategy == "group" else (n, 1))
    return num_groups


def read(checkpoint: Checkpoint, info: LinearInfo) -> Weight:
    """The exact weight: canonical for 4 bits, dense float32 for 8.

    Raises:
        FormatError: scales that are not finite, an invalid weight_g_idx, a zero point outside the code range.
    """
    n, k = info.out_features, info.in_features
    packed = checkpoint.tensor(info.tensors["weight_packed"])
    scales = read_finite(checkpoint, info.tensors["weight_scale"], ("row", "group"))
    scales = scales.reshape(-1, 1).expand(n, 1) if scales.numel() == 1 else scales
    num_groups = scales.shape[1]
    zeros = _read_zeros(checkpoint, info, n, num_groups)
    grouping = _read_grouping(checkpoint, info, num_groups)
    if info.bits == 8:
        raw = packed.view(torch.uint8)[:, :k]
        return DenseWeight(dense_8bit(raw, zeros, scales, _column_groups(info, grouping)))
    return CanonicalWeight(
        codes=codes.from_rows(packed, k, grouping.perm),
        scales=row_major(grouping.take(scales)),
        zeros=None if zeros is None else zeros_or_none(grouping.take(zeros)),
        group_size=grouping.group_size,
        perm=grouping.perm,
    )


def _read_zeros(checkpoint: Checkpoint, info: LinearInfo, n: int, num_groups: int) -> torch.Tensor | None:
    """Stored fields zu as uint8 [N, G], or None when there is no zero point."""
    if "weight_zero_point" not in info.tensors:
        return None
    name = info.tensors["weight_zero_point"]
    stored = checkpoint.tensor(name)
    if stored.dtype == torch.int8:
        low, high = (-8, 7) if info.bits == 4 else (-128, 127)
        value = int(stored.item())
        if not low <= value <= high:
            raise FormatError(f"{name}: is {value}, outside {low}..{high} of {info.bits}-bit codes")
        return torch.full((n, num_groups), value - low, dtype=torch.uint8)
    return unpack_words(stored.t(), info.bits).t()[:n]


def _read_grouping(checkpoint: Checkpoint, info: LinearInfo, num_groups: int) -> act_order.Grouping:
    if "weight_g_idx" not in info.tensors:
        return act_order.plain(info.group_size)
    name = info.tensors["weight_g_idx"]
    g_idx = checkpoint.tensor(name)
    if bool((g_idx == -1).all()):
        return act_order.plain(info.group_size)
    return act_order.from_g_idx(g_idx, info.group_size, num_groups, name)


def _column_groups(info: LinearInfo, grouping: act_order.Grouping) -> torch.Tensor:
    """The stored group of each original column."""
    canonical = torch.div(torch.arange(info.in_features), grouping.group_size, rounding_mode="floor")
    stored = canonical if grouping.groups is None else grouping.groups[canonical]
    if grouping.perm is None:
        return stored
    columns = torch.empty_like(stored)
    columns[grouping.perm.long()] = stored
    return columns
