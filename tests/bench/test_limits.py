"""The machine's measured ceilings, where the native core is built."""

from __future__ import annotations

import pytest

from int4moe_ipex.bench.limits import Limits, measure_limits
from int4moe_ipex.cpu import detect
from int4moe_ipex.errors import BackendError


def test_each_path_has_its_ceiling():
    limits = Limits(read=1, fma=2, int8=3, bf16=4)
    assert limits.peak("native/avx2/w4a16") == limits.peak("torch/bfloat16") == 2
    assert limits.peak("native/avx512/w4a8") == 3
    assert limits.peak("native/avx512_bf16/w4a16") == 4
    assert limits.peak("native/amx/w4a16") is None
    assert Limits(1, 2, 3).peak("native/avx512_bf16/w4a16") == 2


def test_measured_limits_are_plausible():
    native = pytest.importorskip("int4moe_ipex._native", reason="the native core is not built")
    cpu = detect()
    if not cpu.has("avx2"):
        pytest.skip("this CPU lacks AVX2")
    limits = measure_limits(1, "avx2", size=64 << 20)
    # Bounds that any x86-64 core of the last ten years keeps; they catch a wrong unit or a loop optimised away.
    assert 5e8 < limits.read < 1e12
    assert 5e9 < limits.fma < 5e11
    assert 1.2 < limits.int8 / limits.fma < 8
    assert native.measure_peak(1, "nonesuch") < 0


def test_an_isa_that_this_cpu_lacks_is_refused():
    pytest.importorskip("int4moe_ipex._native", reason="the native core is not built")
    if detect().has("avx512"):
        pytest.skip("this CPU has AVX-512")
    with pytest.raises(BackendError, match="avx512"):
        measure_limits(1, "avx512")
