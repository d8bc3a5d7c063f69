"""W4A8's error at sizes of real layers: the bound holds for every row, group size and kind of zero points."""

import pytest
import torch

from int4moe_ipex.bench.layer import LayerCase, build
from int4moe_ipex.bench.shapes import LayerShape
from int4moe_ipex.cpu import detect
from tests.backends.native.cases import ROWS, TOLERANCE, needs_core, run_config, skip_unless_row
from tests.weights import relative_error

pytestmark = needs_core
# Columns of an expert of Qwen3-30B-A3B, and one with the long rows of a Mixtral's down.
QWEN3 = LayerShape("qwen3", 2048, 768, 2, 2)
LONG = LayerShape("long", 256, 8192, 1, 1)
CASES = [
    LayerCase(QWEN3),
    LayerCase(QWEN3, asym=True),
    LayerCase(QWEN3, 32),
    LayerCase(QWEN3, 64, act_order=True),
    LayerCase(QWEN3, -1),
    LayerCase(LONG, asym=True),
    LayerCase(LONG, -1),
]


def name_of(case: LayerCase) -> str:
    kinds = "".join(f"-{kind}" for kind in ("asym", "act_order") if getattr(case, kind))
    return f"{case.shape.name}-g{case.group_size}{kinds}"


@pytest.mark.parametrize("isa", [isa for isa, compute in ROWS if compute == "w4a8"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_error_of_a_real_layer(isa, case):
    skip_unless_row(isa, "w4a8")
    engine = build(case, "native", run_config(isa, "w4a8", torch.bfloat16), detect())
    args = case.inputs(16, torch.bfloat16, seed=3)
    error = relative_error(engine.call(*args), case.reference(*args).double())
    assert error <= TOLERANCE["w4a8", torch.bfloat16]
