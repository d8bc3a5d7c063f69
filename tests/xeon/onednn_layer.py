"""oneDNN on the emulated Xeon: the row of each source type that the cap in ONEDNN_MAX_CPU_ISA leaves."""

from __future__ import annotations

import sys

import torch

from int4moe_ipex.backends import onednn
from int4moe_ipex.backends.base import RunConfig
from int4moe_ipex.backends.onednn.matmul import session
from tests.backends.backend_matrix import TOLERANCE, ExpertsCase
from tests.xeon import layers

BACKEND = onednn.OneDnnBackend()
CASES = (ExpertsCase(64, 32, 32), ExpertsCase(64, 64, 32, symmetric=False, act_order=True, bias=True))


def main() -> None:
    """Arguments: the path that bfloat16 and the path that float32 activations are expected to take."""
    paths = dict(zip((torch.bfloat16, torch.float32), sys.argv[1:], strict=True))
    layers.step("oneDNN", lambda: onednn.status()[1])
    layers.step("engine", lambda: session().library.effective_isa)
    for dtype, path in paths.items():
        for case in CASES:
            layers.step(
                f"{dtype}, {layers.words(case)}",
                lambda dtype=dtype, case=case, path=path: layers.experts(
                    BACKEND, case, RunConfig(dtype=dtype), path, (1, 9), TOLERANCE[dtype]
                ),
            )
    layers.finish()


if __name__ == "__main__":
    main()
