"""The native backend: our C++ core (csrc/), one call per MoE layer, on AVX2, AVX-512 or AMX.

The packed layout does not depend on the instruction set. Rows (instruction set, compute) are chosen when packing, and
the core checks the CPU again before it runs one.

W4A16 multiplies float32 activations in float32. Activations of 16 bits become int16 with one scale per token and group
(finer than their own rounding), and sums within a group are exact, so that rows of AVX2, AVX-512 VNNI and AMX agree to
the bit; `csrc/isa/avx2_int16.cpp`, `csrc/isa/int16_rows512.h`.

W4A8 makes activations int8 with one scale per token and segment of a group: 32 columns, on AVX-512 and AMX 128 and for
down 64 (its input has heavier tails), which keeps the relative error of a layer below 1.5e-2; `csrc/isa/avx2_w4a8.cpp`,
`csrc/isa/w4a8_rows512.h`. Rows of AVX2 and AVX-VNNI agree to the bit, and so do AVX-512 and AMX.

core.py loads the core, rows.py picks one of its rows, packing.py fills its buffers and reads them back, packed.py holds
them, run.py calls it, ops.py makes that torch operators, and backend.py is the protocol of `backends/base.py`.
"""

from int4moe_ipex.backends.native.backend import NativeBackend
from int4moe_ipex.backends.native.core import BUILD_PROBLEM, FLOAT_TYPES, _native
from int4moe_ipex.backends.native.packed import (
    NativeExperts,
    NativeLinear,
    experts_handle,
    linear_handle,
    open_experts,
    open_linear,
    with_row,
)
from int4moe_ipex.backends.native.rows import rows, status

__all__ = [
    "BUILD_PROBLEM",
    "FLOAT_TYPES",
    "NativeBackend",
    "NativeExperts",
    "NativeLinear",
    "_native",
    "experts_handle",
    "linear_handle",
    "open_experts",
    "open_linear",
    "rows",
    "status",
    "with_row",
]
