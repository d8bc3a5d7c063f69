"""Each real checkpoint against the bf16 original that it was quantized from."""

import pytest

from int4moe_ipex.canonical import dequantize
from int4moe_ipex.checkpoint import Checkpoint
from int4moe_ipex.formats import describe, read_linear
from tests import real

# Largest relative error of any linear that each quantizer left; a swapped nibble or a wrong zero exceeds 0.5.
LARGEST_ERROR = {
    "autoround-sym-g128": 0.11,
    "awq-gemm-asym-g32": 0.09,
    "ct-asym-g32": 0.09,
    "ct-sym-g128-static": 0.17,
    "gptq-asym-desc-act-g32": 0.12,
    "gptq-sym-g128": 0.16,
}

pytestmark = pytest.mark.skipif(not real.ROOT.is_dir(), reason=real.REASON)


@pytest.mark.parametrize("name", LARGEST_ERROR)
def test_every_linear_is_near_the_original(name):
    original = Checkpoint.open(real.ROOT / "tiny-qwen3moe-bf16")
    checkpoint = Checkpoint.open(real.ROOT / name)
    infos = describe(checkpoint)
    assert len(infos) == 161  # 3 layers of 4 attention projections, a router and 16 * 3 experts; embeddings, head
    assert sum(info.is_int4 for info in infos.values()) == 3 * (4 + 48)
    for linear, info in infos.items():
        weight, bias = read_linear(checkpoint, info)
        expected = original.tensor(f"{linear}.weight").float()
        error = (dequantize(weight) - expected).norm() / expected.norm()
        assert bias is None and error <= LARGEST_ERROR[name], linear
        assert (weight.out_features, weight.in_features) == (info.out_features, info.in_features)
        if not info.is_int4:
            assert error == 0 or name.startswith(("autoround", "awq"))
