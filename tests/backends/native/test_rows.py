"""Which row of the core a wish gets on a CPU, and the reasons of those it does not."""

import pytest

from int4moe_ipex.backends import native
from int4moe_ipex.backends.base import LinearSpec, Rejected, RunConfig, Supported
from int4moe_ipex.cpu import ISA_FLAGS, CpuFeatures
from int4moe_ipex.errors import BackendError
from int4moe_ipex.packing.layout import NativeLayout
from tests.backends.native.cases import needs_core

pytestmark = needs_core
BACKEND = native.NativeBackend()


def test_support_and_reasons():
    spec = LinearSpec(64, 32, 32, True)
    avx2 = CpuFeatures("AVX2", ISA_FLAGS["avx2"])
    if native.rows().get(("avx2", "w4a16")):
        assert BACKEND.support_linear(spec, avx2, RunConfig()) == Supported("native/avx2/w4a16")
        assert BACKEND.support_linear(spec, avx2, RunConfig(compute="w4a8")) == Supported("native/avx2/w4a8")
    old = CpuFeatures("SSE2", frozenset())
    assert BACKEND.support_linear(spec, old, RunConfig()) == Rejected("needs a CPU with AVX2, FMA and F16C")
    assert BACKEND.support_linear(spec, old, RunConfig(isa="scalar")) == Supported("native/scalar/w4a16")
    verdict = BACKEND.support_linear(spec, avx2, RunConfig(isa="avx512"))
    assert isinstance(verdict, Rejected) and "this CPU lacks avx512_vnni, avx512bw" in verdict.reason
    capped = CpuFeatures("capped", ISA_FLAGS["avx2"], max_isa="scalar")
    verdict = BACKEND.support_linear(spec, capped, RunConfig(isa="avx2"))
    assert verdict == Rejected("isa avx2 is asked for and INT4MOE_MAX_ISA=scalar caps it")
    odd_group = LinearSpec(64, 32, 12, True)
    assert "group_size 12 is neither" in BACKEND.support_linear(odd_group, avx2, RunConfig(isa="scalar")).reason


def test_core_refuses_what_the_cpu_lacks():
    """Also when Python's view of the CPU is wrong."""
    missing = [row for row, usable in native.rows().items() if not usable]
    layout = NativeLayout.of_linear(LinearSpec(64, 32, 32, True))
    with pytest.raises(BackendError, match="no kernels for riscv/w4a16"):
        native.linear_handle(layout, "riscv", "w4a16")
    for isa, compute in missing:
        with pytest.raises(BackendError, match="lacks what"):
            native.linear_handle(layout, isa, compute)
