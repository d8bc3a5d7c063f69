"""What the format modules share: the parts of one linear, checks on headers, checks on values, nibbles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from int4moe_ipex.canonical import SCALE_DTYPES, SYMMETRIC_ZERO
from int4moe_ipex.checkpoint.files import Checkpoint, TensorHeader
from int4moe_ipex.checkpoint.scheme import ModuleScheme
from int4moe_ipex.errors import FormatError
from int4moe_ipex.formats.base import LinearInfo
from int4moe_ipex.formats.codes import row_major

FLOAT_DTYPES = (*SCALE_DTYPES, torch.float64)


# A router's own parameters, which may stand beside its quantized weight; they belong to the model, not to a format.
ROUTER_OWN = ("e_score_correction_bias",)


@dataclass
class Parts:
    """The stored tensors of one module, by suffix, and the problems found in them."""

    name: str
    headers: Mapping[str, TensorHeader]
    scheme: ModuleScheme | None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def require(self, *suffixes: str) -> bool:
        """Whether all are there; each missing one becomes a problem."""
        missing = [suffix for suffix in suffixes if suffix not in self.headers]
        self.problems += [f"{self.name}.{suffix}: is missing" for suffix in missing]
        return not missing

    def only(self, *known: str) -> None:
        unknown = [suffix for suffix in self.headers if suffix not in known and suffix not in ROUTER_OWN]
        self.problems += [f"{self.name}.{suffix}: is not a tensor of this format" for suffix in unknown]

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self.headers[suffix].shape

    def expect(self, suffix: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> None:
        """One of these dtypes and one of these shapes, or a problem."""
        header = self.headers[suffix]
        if header.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.problem(suffix, f"is {str(header.dtype).removeprefix('torch.')}, expected {wanted}")
        if header.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            self.problem(suffix, f"has shape {list(header.shape)}, expected {wanted}")

    def problem(self, suffix: str, text: str) -> None:
        self.problems.append(f"{self.name}.{suffix}: {text}")

    def expect_bias(self, out_features: int) -> None:
        if "bias" in self.headers:
            self.expect("bias", FLOAT_DTYPES, (out_features,))

    def dims(self, suffix: str, count: int) -> bool:
        """Whether the tensor has this many dimensions, none of them empty."""
        shape = self.shape(suffix)
        if len(shape) == count and all(shape):
            return True
        self.problem(suffix, f"has shape {list(shape)}, expected {count} non-empty dimensions")
        return False

    def info(self, scales: str, **facts: Any) -> LinearInfo:
        """What these tensors are, by the name of the scales and what its format says of them."""
        return LinearInfo(
            name=self.name,
            scales_dtype=self.headers[scales].dtype,
            has_bias="bias" in self.headers,
            tensors={suffix: header.name for suffix, header in self.headers.items()},
            nbytes=sum(header.nbytes for header in self.headers.values()),
            warnings=tuple(self.warnings),
            **facts,
        )


def groups_of(in_features: int, group_size: int) -> int:
    return -(-in_features // group_size)


def resolve_group_size(group_size: int, in_features: int) -> int:
    """-1 means one group; a group longer than the row is the row."""
    return in_features if group_size == -1 else min(group_size, in_features)


def check_bits(parts: Parts, scheme: ModuleScheme, stored_bits: int) -> None:
    if stored_bits != scheme.bits:
        parts.warnings.append(
            f"{scheme.source} says {scheme.bits} bits, the tensors hold {stored_bits}; these are used"
        )


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] to uint8 [R, C * 32 / bits], fields numbered from the low bits."""
    raw = row_major(words).view(torch.uint8)
    if bits == 8:
        return raw
    return torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)


def zeros_or_none(zeros: torch.Tensor) -> torch.Tensor | None:
    """Canonical zeros of a 4-bit weight: None when all of them are 8."""
    return None if bool((zeros == SYMMETRIC_ZERO).all()) else row_major(zeros)


def read_finite(checkpoint: Checkpoint, name: str, axes: tuple[str, ...]) -> torch.Tensor:
    """A float tensor of which every value is finite.

    Raises:
        FormatError: names the tensor, the first bad value and its index, in the words of `axes`.
    """
    values = checkpoint.tensor(name)
    # A sum is finite only if all its terms are. One that is not may have overflowed: then the terms are asked.
    if math.isfinite(values.sum(dtype=torch.promote_types(values.dtype, torch.float32))):
        return values
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        bad = (~finite).nonzero()
        index = bad[0].tolist()
        place = ", ".join(f"{axis} {position}" for axis, position in zip(axes, index)) or "its only value"
        raise FormatError(
            f"{name}: is {values[tuple(index)].item()} at {place} ({len(bad)} of {values.numel()} values are not "
            "finite); the file is damaged or its quantization overflowed"
        )
    return values


def dense_8bit(
    codes: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """float32 [N, K] from 8-bit codes [N, K], zeros (None: all 128) and scales [N, G], and each column's group [K].

    The product is exact for 16-bit scales: 9 bits times at most 11 fit into float32's 24.
    """
    middle = 128.0 if zeros is None else zeros.to(torch.float32)[:, columns]
    return (codes.to(torch.float32) - middle) * scales.to(torch.float32)[:, columns]
