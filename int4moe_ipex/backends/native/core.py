"""The C++ core, or why it is not here, and the numbers that stand for types and activations at its boundary."""

from __future__ import annotations

import torch

# torch has loaded its OpenMP runtime by now, and the core uses that one.
try:
    from int4moe_ipex import _native

    BUILD_PROBLEM = ""
except ImportError as error:
    _native = None
    BUILD_PROBLEM = f"the C++ core is not built here ({error}); install with a C++ compiler (g++ >= 11) to get it"

from int4moe_ipex.packing.layout import NativeLayout

# Numbers of csrc/core/layout.h.
FLOAT_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
WEIGHT_TYPES = FLOAT_TYPES | {torch.float64: 3}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3, "swiglu_clamped": 4}
LINE = 8  # columns of a line: groups are whole lines


def core_layout(layout: NativeLayout):
    """The core's object for a layout: its size in bytes, packing into a buffer and unpacking."""
    return _native.Layout(layout.experts, list(layout.numbers))
