"""The only definition of what an int4 weight is.

Every format is translated into a `CanonicalWeight`, every backend packs from one, and every path is tested
against `dequantize`. Nothing else in the project knows how a weight is computed from its codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from int4moe_ipex.errors import FormatError

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SYMMETRIC_ZERO = 8


@dataclass(frozen=True, eq=False)
class CanonicalWeight:
    """One int4 linear `y = x @ W.T`, with W of shape [out_features N, in_features K].

    Attributes:
        codes: uint8 [N, K/2]; the low nibble of byte b is column 2b, the high nibble column 2b+1.
        scales: [N, G] in the dtype that the checkpoint stored (float16, bfloat16 or float32), values untouched.
        zeros: uint8 [N, G] with values 0..15, or None when every zero point is 8.
        group_size: columns per group, 1 <= group_size <= K; G = ceil(K / group_size), the last group may be shorter.
        perm: int32 [K] or None. Canonical column j is the original column perm[j]; groups are contiguous in
            canonical order. None means the identity.

    `W[n, perm[j]] = (code[n, j] - zero[n, j // group_size]) * scale[n, j // group_size]`, in float32.

    Raises:
        FormatError: a shape, dtype or value that breaks these rules.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    perm: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise FormatError(f"codes must be uint8 [N, K/2], not {self.codes.dtype} {tuple(self.codes.shape)}")
        n, k = self.out_features, self.in_features
        if not 1 <= self.group_size <= k:
            raise FormatError(f"group_size {self.group_size} is not within 1..{k} (in_features)")
        grid = (n, self.num_groups)
        if self.scales.dtype not in SCALE_DTYPES or tuple(self.scales.shape) != grid:
            raise FormatError(
                f"scales must be float [N, G] = {grid}, not {self.scales.dtype} {tuple(self.scales.shape)}"
            )
        if self.zeros is not None and (self.zeros.dtype != torch.uint8 or tuple(self.zeros.shape) != grid):
            raise FormatError(f"zeros must be uint8 [N, G] = {grid}, not {self.zeros.dtype} {tuple(self.zeros.shape)}")
        if self.perm is not None and (self.perm.dtype != torch.int32 or tuple(self.perm.shape) != (k,)):
            raise FormatError(f"perm must be int32 [K] = ({k},), not {self.perm.dtype} {tuple(self.perm.shape)}")

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 2

    @property
    def num_groups(self) -> int:
        return -(-self.in_features // self.group_size)

    @property
    def symmetric(self) -> bool:
        return self.zeros is None

    @property
    def nbytes(self) -> int:
        """Bytes as a checkpoint stores them: codes and scales, and zeros at 4 bits each."""
        zeros = 0 if self.zeros is None else (self.zeros.numel() + 1) // 2
        return self.codes.numel() + self.scales.numel() * self.scales.element_size() + zeros


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """One linear that is not 4-bit: weight [N, K] in a float dtype wide enough to hold it exactly."""

    weight: torch.Tensor

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


Weight = CanonicalWeight | DenseWeight


def unpack_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/2] nibble pairs to uint8 [N, K], one code per byte."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def pack_codes(values: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] codes 0..15 to uint8 [N, K/2] nibble pairs.

    Raises:
        FormatError: K is odd.
    """
    if values.shape[-1] % 2:
        raise FormatError(f"in_features must be even, not {values.shape[-1]}")
    return values[..., 0::2] | (values[..., 1::2] << 4)


def expand_groups(per_group: torch.Tensor, group_size: int, in_features: int) -> torch.Tensor:
    """[N, G] to [N, K]: each group's value repeated over its columns; the tail group is cut at K."""
    return per_group.repeat_interleave(group_size, dim=1)[:, :in_features]


def dequantize(weight: Weight) -> torch.Tensor:
    """The weight as float32 [N, K] in the original column order. This is the one formula."""
    if isinstance(weight, DenseWeight):
        return weight.weight.to(torch.float32)
    k = weight.in_features
    codes = unpack_codes(weight.codes).to(torch.float32)
    scales = expand_groups(weight.scales.to(torch.float32), weight.group_size, k)
    if weight.zeros is None:
        values = (codes - SYMMETRIC_ZERO) * scales
    else:
        values = (codes - expand_groups(weight.zeros.to(torch.float32), weight.group_size, k)) * scales
    if weight.perm is None:
        return values
    original = torch.empty_like(values)
    original[:, weight.perm.long()] = values
    return original
