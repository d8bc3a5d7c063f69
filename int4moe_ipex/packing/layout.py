"""The native core's packed layout "n16k8", as numbers that say everything about a packed buffer.

A packed layer is one uint8 buffer (one record per expert, see csrc/core/layout.h for its bytes) and one `NativeLayout`.
The bytes are the same on every machine; what runs on them is chosen when they are opened.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from int4moe_ipex.backends.base import ExpertsSpec, LinearSpec

NAME = "n16k8"
VERSION = 1
SCALE_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
HUGE_PAGE = 2 << 20
_ABSENT = (0,) * 7


def _numbers(spec: LinearSpec | None) -> tuple[int, ...]:
    if spec is None:
        return _ABSENT
    return (
        spec.out_features,
        spec.in_features,
        spec.group_size,
        SCALE_TYPES[spec.scales_dtype],
        int(not spec.symmetric),
        int(spec.bias),
        int(spec.act_order),
    )


@dataclass(frozen=True)
class NativeLayout:
    """Shapes of a packed buffer.

    Attributes:
        experts: records in the buffer; 1 for a single linear.
        numbers: for gate, up and down in turn (rows, columns, group_size, scale type, has zeros, has bias, has
            permutation); all 0 for a projection that is not there. A single linear has up only.
    """

    experts: int
    numbers: tuple[int, ...]

    @classmethod
    def of_experts(cls, spec: ExpertsSpec) -> NativeLayout:
        return cls(spec.num_experts, _numbers(spec.gate) + _numbers(spec.up) + _numbers(spec.down))

    @classmethod
    def of_linear(cls, spec: LinearSpec) -> NativeLayout:
        return cls(1, _ABSENT + _numbers(spec) + _ABSENT)


def allocate(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes], zeroed, aligned to 2 MiB and on transparent huge pages where the kernel gives them.

    Small buffers are ordinary memory, 64-byte aligned.
    """
    if nbytes < HUGE_PAGE:
        room = torch.zeros(nbytes + 64, dtype=torch.uint8)
        start = -room.data_ptr() % 64
        return room[start : start + nbytes]
    size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    # The tensor keeps the mapping alive. Private, because shared anonymous memory gets no huge pages by default.
    region = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + nbytes]
