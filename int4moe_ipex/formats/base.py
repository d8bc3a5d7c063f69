"""What every format module provides, and what the rest of the project knows of a quantized linear.

`formats.describe(checkpoint)` reads headers only and gives one `LinearInfo` for each linear of the checkpoint;
`formats.read_linear(checkpoint, info)` reads its bytes and gives the exact weight. Quirks die in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class LinearInfo:
    """One linear of a checkpoint, known from headers and labels alone.

    Attributes:
        name: its prefix in the checkpoint, e.g. `model.layers.0.mlp.experts.3.up_proj`.
        format: gptq, awq, compressed-tensors, or dense (a plain `.weight`).
        bits: 4 or 8 for quantized ones, 16 or 32 for dense ones (the width of the stored dtype).
        out_features, in_features: N and K.
        group_size: columns per scale, resolved (K for per-channel, per-tensor and -1); K for dense ones.
        symmetric: every zero point is the format's middle, by its label. `read_linear` trusts the stored zeros.
        zero_convention: in words for people: `z-1 (v1)`, `z (v2)`, `z`, `z+8 packed`, `none`.
        act_order: the file has a g_idx that may be other than trivial (its values decide, when read).
        scales_dtype: stored dtype of the scales; None for dense ones.
        has_bias: a bias [N] is stored beside it.
        tensors: suffix -> full tensor name, e.g. {"qweight": "...up_proj.qweight"}.
        nbytes: stored bytes of all its tensors.
        warnings: one line each, such as a label that disagrees with the data.
    """

    name: str
    format: str
    bits: int
    out_features: int
    in_features: int
    group_size: int
    symmetric: bool
    zero_convention: str
    act_order: bool
    scales_dtype: torch.dtype | None
    has_bias: bool
    tensors: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def is_int4(self) -> bool:
        return self.format != "dense" and self.bits == 4
