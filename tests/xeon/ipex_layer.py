"""IPEX's packed tier (AVX512-FP16 and AMX), unforced, against the reference."""

from __future__ import annotations

import torch

from int4moe_ipex import cpu
from int4moe_ipex.backends import ipex
from int4moe_ipex.backends.base import RunConfig
from int4moe_ipex.canonical import dequantize
from tests.backends.backend_matrix import REFERENCE, TOLERANCE, ExpertsCase, relative_error
from tests.xeon import layers

BACKEND = ipex.IpexBackend()
CASES = (
    ExpertsCase(64, 32, 32),  # deepseek_moe_woq, as the next
    ExpertsCase(64, 32, 32, symmetric=False, bias=True),
    ExpertsCase(64, 32, 32, act_order=True),  # expert by expert
    ExpertsCase(64, 64, 64, "gelu"),  # one group per row
)


def large_activations() -> str:
    """One token whose activations float16 cannot hold, through a linear and through the fused experts."""
    generator = torch.Generator().manual_seed(4)
    run = RunConfig()
    spec, stored = CASES[0].build(generator)
    x = torch.full((1, 64), 1e5).bfloat16()
    linear = BACKEND.pack_linear(spec.up, stored[0].up, run)
    assert linear.path == "ipex/packed/w4a16", linear.path
    worst = relative_error(BACKEND.linear_forward(linear, x), x.float() @ dequantize(stored[0].up.weight).t())
    packed, reference = (backend.pack_experts(spec, iter(stored), run) for backend in (BACKEND, REFERENCE))
    routing = torch.tensor([[2, 0]]), torch.tensor([[0.75, 0.25]])
    want = REFERENCE.experts_forward(reference, x.float(), *routing)
    worst = max(worst, relative_error(BACKEND.experts_forward(packed, x, *routing), want))
    assert worst <= TOLERANCE[run.dtype], f"relative error {worst:.1e}"
    return f"relative error {worst:.1e}"


def main() -> None:
    layers.step("IPEX", lambda: ipex.status()[1])
    lacking = ipex.PACKED_FLAGS - cpu.detect().flags
    layers.step("CPU", lambda: f"lacks {sorted(lacking)}" if lacking else "has what the packed tier needs")
    layers.step(
        "groups of 96, split",
        lambda: layers.linear(BACKEND, (48, 192, 96), RunConfig(), "ipex/packed/w4a16", TOLERANCE[torch.bfloat16]),
    )
    for dtype in (torch.bfloat16, torch.float32):
        run = RunConfig(dtype=dtype)
        for case in CASES:
            layers.step(
                f"{dtype}, {layers.words(case)}",
                lambda run=run, case=case: layers.experts(
                    BACKEND, case, run, "ipex/packed/w4a16", (1, 4, 9), TOLERANCE[run.dtype]
                ),
            )
    layers.step("activations of 1e5", large_activations)
    # More rows go through AMX's signed int8 product, which the emulator computes as unsigned.
    layers.step(
        "w4a8, one token",
        lambda: layers.experts(BACKEND, CASES[0], RunConfig(compute="w4a8"), "ipex/packed/w4a8", (1, 1, 1), 1.5e-2),
    )
    layers.finish()


if __name__ == "__main__":
    main()
