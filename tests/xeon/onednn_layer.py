"""oneDNN on the emulated Xeon: the rows that it takes with AMX, and capped at AVX-512.

The emulator reads wrong bytes for two instructions of oneDNN's int4 decompression (benchmarks/ipex_onednn.md), which
zero points, and bfloat16 in groups of more than 16, depend on: such layers are left to CPUs.
"""

from __future__ import annotations

import os

import torch

from int4moe_ipex.backends import onednn
from int4moe_ipex.backends.base import RunConfig
from int4moe_ipex.backends.onednn.matmul import session
from tests.backends.backend_matrix import TOLERANCE, ExpertsCase
from tests.xeon import layers

BACKEND = onednn.OneDnnBackend()
SIXTEEN = ExpertsCase(64, 32, 16, act_order=True, bias=True)
# (ONEDNN_MAX_CPU_ISA, activations, layer, path)
CASES = (
    ("ALL", torch.bfloat16, SIXTEEN, "onednn/avx10_1_512_amx/bf16"),
    ("ALL", torch.float32, SIXTEEN, "onednn/avx512_core/f32"),
    ("ALL", torch.float32, ExpertsCase(64, 64, 32, "gelu"), "onednn/avx512_core/f32"),
    ("AVX512_CORE_BF16", torch.bfloat16, SIXTEEN, "onednn/avx512_core_bf16/bf16"),
)


def capped(cap: str, check):
    """Each step is a process of its own, which loads oneDNN after this."""

    def run() -> str:
        os.environ["ONEDNN_MAX_CPU_ISA"] = cap
        return check()

    return run


def main() -> None:
    layers.step("oneDNN", lambda: onednn.status()[1])
    for cap in dict.fromkeys(case[0] for case in CASES):
        layers.step(f"engine, {cap}", capped(cap, lambda: session().library.effective_isa))
    for cap, dtype, case, path in CASES:
        layers.step(
            f"{cap}, {dtype}, {layers.words(case)}",
            capped(
                cap,
                lambda dtype=dtype, case=case, path=path: layers.experts(
                    BACKEND, case, RunConfig(dtype=dtype), path, (1, 9), TOLERANCE[dtype]
                ),
            ),
        )
    layers.finish()


if __name__ == "__main__":
    main()
