"""The ipex backend with IPEX 2.8.0 on torch 2.8.0 (`make env-ipex`)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter

import pytest
import torch

from int4moe_ipex import cpu
from int4moe_ipex.backends import ipex
from int4moe_ipex.backends.base import ExpertWeights, LinearSpec, LinearWeights, Rejected, RunConfig, Supported
from int4moe_ipex.canonical import CanonicalWeight, dequantize
from int4moe_ipex.errors import BackendError, RoutingError
from tests.backends.backend_matrix import (
    TOLERANCE,
    ExpertsCase,
    check_experts,
    check_linear,
    experts_cases,
    linear_cases,
    relative_error,
)
from tests.weights import random_weight

available, how = ipex.status()
pytestmark = [pytest.mark.ipex, pytest.mark.skipif(not available, reason=how)]

BACKEND = ipex.IpexBackend()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HAS_PACKED_TIER = cpu.detect().flags >= ipex.PACKED_FLAGS


def forced(dtype: torch.dtype = torch.float32, compute: str = "w4a16") -> RunConfig:
    return RunConfig(dtype=dtype, compute=compute, forced=True)


def pack(weight: CanonicalWeight, run: RunConfig, bias: torch.Tensor | None = None) -> ipex.IpexLinear:
    return BACKEND.pack_linear(LinearSpec.of(weight, bias), LinearWeights(weight, bias), run)


def raw_context(weight: CanonicalWeight, lowp: int, group_size: int | None = None):
    ipex._load()
    group_size = weight.group_size if group_size is None else group_size
    prepack = torch.ops.ipex_prepack.weight_only_qlinear_prepack_int4
    return prepack(weight.codes, weight.scales, weight.zeros, None, None, None, group_size, lowp, 0, False, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_matrix(dtype):
    counts = Counter(check_linear(BACKEND, case, forced(dtype), TOLERANCE[dtype]) for case in linear_cases())
    assert counts[""] < sum(counts.values()) / 4, counts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_matrix(dtype):
    counts = Counter(check_experts(BACKEND, case, forced(dtype), TOLERANCE[dtype]) for case in experts_cases())
    assert counts[""] < sum(counts.values()) / 4, counts


def test_words_by_hand():
    # Row 0: codes 0..7 then 8..15 (low nibble first), zero 3, scale 1/4 and zero 8, scale 1/2.
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]] * 2, dtype=torch.uint8)
    scales = torch.tensor([[0.25, 0.5]] * 2, dtype=torch.float16)
    zeros = torch.tensor([[3, 8]] * 2, dtype=torch.uint8)
    packed = pack(CanonicalWeight(codes, scales, zeros, 8), forced())
    got = BACKEND.linear_forward(packed, torch.eye(16))[:, 0]
    want = [-0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1, 0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    assert got.tolist() == want


def test_fused_operator_runs_silu_experts_and_only_those():
    generator = torch.Generator().manual_seed(0)
    for case, fused in (
        (ExpertsCase(64, 32, 32), True),
        (ExpertsCase(64, 32, 32, bias=True), True),
        (ExpertsCase(64, 32, 32, "gelu"), False),
        (ExpertsCase(64, 32, 32, act_order=True), False),
        (ExpertsCase(64, 32, 32, gate=False), False),
        (ExpertsCase(64, 48, 16), False),
    ):
        spec, experts = case.build(generator)
        assert BACKEND.pack_experts(spec, iter(experts), forced()).fused == fused, case


@pytest.mark.skipif(HAS_PACKED_TIER, reason="this CPU has IPEX's packed tier")
def test_reference_tier_runs_only_when_forced():
    weight = random_weight(torch.Generator().manual_seed(1), 64, 128, 32, symmetric=True)
    spec = LinearSpec.of(weight)
    refused = BACKEND.support_linear(spec, cpu.detect(), RunConfig())
    assert isinstance(refused, Rejected) and "avx512_fp16" in refused.reason and "backend: ipex" in refused.reason
    taken = BACKEND.support_linear(spec, cpu.detect(), forced())
    assert taken == Supported("ipex/reference/float32", "dequantises the whole weight on every call")
    w4a8 = BACKEND.support_linear(spec, cpu.detect(), forced(compute="w4a8"))
    assert isinstance(w4a8, Rejected) and "packed tier" in w4a8.reason


def test_packed_tier_is_promised_where_the_flags_are(monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(ipex, "amx_permitted", lambda: True)
    xeon = cpu.CpuFeatures("Xeon", ipex.PACKED_FLAGS | {"avx2", "fma"})
    spec = LinearSpec(256, 64, 32, symmetric=True)
    assert BACKEND.support_linear(spec, xeon, RunConfig()) == Supported("ipex/packed/w4a16")
    assert BACKEND.support_linear(spec, xeon, RunConfig(compute="w4a8")) == Supported("ipex/packed/w4a8")
    small = BACKEND.support_linear(LinearSpec(40, 64, 32, symmetric=True), xeon, RunConfig())
    assert isinstance(small, Rejected) and "powers of two from 16" in small.reason
    capped = BACKEND.support_linear(spec, xeon, RunConfig(isa="avx2"))
    assert isinstance(capped, Rejected) and "ATEN_CPU_CAPABILITY" in capped.reason
    monkeypatch.setattr(ipex, "amx_permitted", lambda: False)
    refused = BACKEND.support_linear(spec, xeon, RunConfig())
    assert isinstance(refused, Rejected) and "permission for AMX" in refused.reason
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx512")
    lower = BACKEND.support_linear(spec, xeon, RunConfig())
    assert isinstance(lower, Rejected) and "ATEN_CPU_CAPABILITY lifted" in lower.reason


@pytest.mark.skipif(HAS_PACKED_TIER, reason="this CPU has IPEX's packed tier")
def test_the_reference_tier_is_never_taken_for_the_packed_one():
    weight = random_weight(torch.Generator().manual_seed(1), 64, 128, 32, symmetric=True)
    with pytest.raises(BackendError, match="did not choose its packed tier"):
        pack(weight, RunConfig())
    with pytest.raises(BackendError, match="did not choose its packed tier"):
        pack(weight, forced(compute="w4a8"))


def test_group_size_that_is_no_power_of_two_is_split():
    weight = random_weight(torch.Generator().manual_seed(2), 32, 192, 96, symmetric=False)
    packed = pack(weight, forced())
    assert packed.context.get_scales().shape == (32, 6)
    assert torch.equal(BACKEND.unpack_linear(packed).weight.scales, weight.scales)


def test_a_group_that_no_power_of_two_divides_is_rejected():
    verdict = BACKEND.support_linear(LinearSpec(10, 48, 5, symmetric=True), cpu.detect(), forced())
    assert isinstance(verdict, Rejected) and "group_size 5" in verdict.reason


def test_a_single_row_is_rejected():
    verdict = BACKEND.support_linear(LinearSpec(64, 1, 32, symmetric=True), cpu.detect(), forced())
    assert isinstance(verdict, Rejected) and "single output row" in verdict.reason


def test_one_group_per_row_is_given_as_no_groups():
    weight = random_weight(torch.Generator().manual_seed(3), 64, 128, 128, symmetric=False)
    with pytest.raises(IndexError):  # what IPEX does with it as it stands
        raw_context(weight, ipex.LOWP_NONE)
    x = torch.randn(2, 128)
    y = BACKEND.linear_forward(pack(weight, forced()), x)
    assert relative_error(y, x @ dequantize(weight).t()) < 2e-5


def test_large_activations_do_not_overflow():
    weight = random_weight(torch.Generator().manual_seed(4), 64, 128, 32, symmetric=True)
    x = torch.full((1, 128), 1e5).bfloat16()
    context = raw_context(weight, ipex.LOWP_BF16)  # it is float16 below five rows
    for rows in (1, ipex.BF16_ROWS - 1, ipex.BF16_ROWS):
        y = torch.ops.torch_ipex.ipex_woq_linear(x.expand(rows, -1).contiguous(), context.get_data_handle())
        assert y.isfinite().all() == (rows == ipex.BF16_ROWS), rows
    y = BACKEND.linear_forward(pack(weight, forced(torch.bfloat16)), x)
    assert relative_error(y, x.float() @ dequantize(weight).t()) < TOLERANCE[torch.bfloat16]


def test_experts_get_rows_until_the_bfloat16_mode_is_one():
    more = ipex._missing_rows(torch.tensor([3, 0, 3, 7, 7, 7, 7, 7, 7]), 5)
    assert more.tolist() == [0] * 4 + [3] * 3
    assert not ipex._missing_rows(torch.tensor([3, 0]), 1).numel()


def test_float16_down_may_pass_65504_before_its_routing_weight():
    # Intermediate 64 (32 of them), code - zero 4, scale 16: 131072 before the weight of 1/16.
    up = CanonicalWeight(torch.full((32, 32), 0x99, dtype=torch.uint8), torch.ones(32, 2).half(), None, 32)
    gate = up
    down = CanonicalWeight(torch.full((64, 16), 0xCC, dtype=torch.uint8), torch.full((64, 1), 16.0).half(), None, 32)
    expert = ExpertWeights(LinearWeights(gate), LinearWeights(up), LinearWeights(down))
    case = ExpertsCase(64, 32, 32, num_experts=1)
    spec, _ = case.build(torch.Generator())
    packed = BACKEND.pack_experts(spec, iter([expert]), forced(torch.float16))
    x = torch.full((1, 64), 1 / 8).half()  # gate = up = 8: silu(8) * 8 = 63.98
    y = BACKEND.experts_forward(packed, x, torch.tensor([[0, -1]]), torch.tensor([[1 / 16, 0.0]]))
    assert y.isfinite().all() and abs(y.float() - 8192).max() < 8


def test_wrong_expert_ids_never_reach_ipex():
    spec, experts = ExpertsCase(64, 32, 32).build(torch.Generator().manual_seed(5))
    packed = BACKEND.pack_experts(spec, iter(experts), forced())
    for bad in (4 + 1, -2, 2**31):
        with pytest.raises(RoutingError, match=str(bad)):
            BACKEND.experts_forward(packed, torch.zeros(1, 64), torch.tensor([[0, bad]]), torch.ones(1, 2))


def test_the_contexts_outlive_what_they_were_made_from():
    generator = torch.Generator().manual_seed(6)
    case = ExpertsCase(64, 32, 32, symmetric=False, bias=True)
    spec, experts = case.build(generator)
    x, ids, weights = torch.randn(4, 64), torch.tensor([[0, 1], [2, 3], [1, 1], [3, 0]]), torch.rand(4, 2)
    packed = BACKEND.pack_experts(spec, iter(experts), forced())
    before = BACKEND.experts_forward(packed, x, ids, weights)
    for expert in experts:
        for linear in (expert.gate, expert.up, expert.down):
            linear.weight.codes.zero_()
            linear.weight.scales.zero_()
            linear.bias.zero_()
    del experts, expert, linear
    assert torch.equal(BACKEND.experts_forward(packed, x, ids, weights), before)


def test_only_the_native_library_is_loaded():
    script = """
        import sys, torch, transformers
        from int4moe_ipex import cpu
        from int4moe_ipex.backends import ipex
        from int4moe_ipex.backends.base import LinearSpec, LinearWeights, RunConfig
        from int4moe_ipex.canonical import CanonicalWeight
        backend, spec = ipex.IpexBackend(), LinearSpec(64, 16, 32, True)
        backend.support_linear(spec, cpu.detect(), RunConfig(forced=True))
        maps = lambda: open("/proc/self/maps").read()
        assert "libintel-ext" not in maps(), "loaded before it was used"
        weight = CanonicalWeight(torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 2).half(), None, 32)
        backend.pack_linear(spec, LinearWeights(weight), RunConfig(forced=True))
        assert "libintel-ext" in maps()
        assert "intel_extension_for_pytorch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)
