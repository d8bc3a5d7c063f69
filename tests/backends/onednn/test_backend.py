"""The onednn backend on whatever oneDNN is found (`make env-onednn`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from int4moe_ipex import cpu
from int4moe_ipex.backends import onednn
from int4moe_ipex.backends.base import ExpertWeights, LinearSpec, LinearWeights, Rejected, RunConfig, Supported
from int4moe_ipex.backends.onednn.matmul import ROWS, session
from int4moe_ipex.canonical import CanonicalWeight, dequantize
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

available, how = onednn.status()
pytestmark = [pytest.mark.onednn, pytest.mark.skipif(not available, reason=how)]

BACKEND = onednn.OneDnnBackend()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AVX2 = {"INT4MOE_MAX_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2"}


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pack(weight: CanonicalWeight, dtype: torch.dtype = torch.float32):
    return BACKEND.pack_linear(LinearSpec.of(weight), LinearWeights(weight), RunConfig(dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_matrix(dtype):
    run = RunConfig(dtype=dtype)
    counts = Counter(check_linear(BACKEND, case, run, TOLERANCE[dtype]) for case in linear_cases())
    assert counts[""] < sum(counts.values()) / 3, counts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_matrix(dtype):
    run = RunConfig(dtype=dtype)
    counts = Counter(check_experts(BACKEND, case, run, TOLERANCE[dtype]) for case in experts_cases())
    assert counts[""] < sum(counts.values()) / 3, counts


def test_words_by_hand():
    # Each row: codes 0..15 (low nibble first) and again; zero 3, scale 1/4, then zero 8, scale 1/2.
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2] * 2, dtype=torch.uint8)
    scales = torch.tensor([[0.25, 0.5]] * 2, dtype=torch.float16)
    zeros = torch.tensor([[3, 8]] * 2, dtype=torch.uint8)
    got = BACKEND.linear_forward(pack(CanonicalWeight(codes, scales, zeros, 16)), torch.eye(32))[:, 0]
    want = [(k - 3) / 4 for k in range(16)] + [(k - 8) / 2 for k in range(16)]
    assert got.tolist() == want


def test_every_number_of_rows_is_padded_to_the_next_size():
    weight = random_weight(gen(1), 48, 64, 32, symmetric=False)
    packed, want = pack(weight), dequantize(weight)
    for rows in (*range(1, 20), 511, 512, 513, 1030):
        x = torch.randn(rows, 64, generator=gen(rows))
        y = BACKEND.linear_forward(packed, x)
        assert y.shape == (rows, 48) and relative_error(y, x @ want.t()) < 2e-5, rows
    used = {rows for problem, rows in session()._kept if problem == packed.problem}
    assert used <= set(ROWS)


def test_primitives_are_kept_within_their_bound(monkeypatch):
    from int4moe_ipex.backends.onednn import matmul

    monkeypatch.setattr(matmul, "MAX_PRIMITIVES", 4)
    weight = random_weight(gen(2), 32, 64, 32)
    packed, want = pack(weight), dequantize(weight)
    for rows in (1, 2, 3, 4, 6, 8, 1, 6):
        x = torch.randn(rows, 64, generator=gen(rows))
        assert relative_error(BACKEND.linear_forward(packed, x), x @ want.t()) < 2e-5
    kept = session()._kept
    while len(kept) > 4:  # what other tests left
        kept.popitem(last=False)
    assert [rows for _, rows in kept][-2:] == [1, 6]


def test_codes_are_the_canonical_ones_without_a_copy():
    weight = random_weight(gen(3), 64, 128, 32)
    assert pack(weight).codes.data_ptr() == weight.codes.data_ptr()


def test_what_only_the_reference_implementation_takes_is_rejected():
    small = BACKEND.support_linear(LinearSpec(40, 64, 32, symmetric=True), cpu.detect(), RunConfig())
    assert isinstance(small, Rejected) and "multiples of 16" in small.reason
    w4a8 = BACKEND.support_linear(LinearSpec(64, 64, 32, symmetric=True), cpu.detect(), RunConfig(compute="w4a8"))
    assert isinstance(w4a8, Rejected) and "w4a16" in w4a8.reason


def test_a_cap_below_what_onednn_runs_is_rejected():
    bits = session().library.get_effective_cpu_isa()
    verdict = BACKEND.support_linear(LinearSpec(64, 64, 32, symmetric=True), cpu.detect(), RunConfig(isa="avx2"))
    if bits & ~0x7:
        assert isinstance(verdict, Rejected) and "INT4MOE_MAX_ISA" in verdict.reason
    else:
        assert isinstance(verdict, Supported)


def test_path_names_instruction_set_and_source_type():
    spec = LinearSpec(64, 64, 32, symmetric=True)
    isa = session().library.effective_isa
    f32 = BACKEND.support_linear(spec, cpu.detect(), RunConfig(dtype=torch.float32))
    assert f32.path in ("onednn/avx2/f32", "onednn/avx512_core/f32")
    bf16 = BACKEND.support_linear(spec, cpu.detect(), RunConfig())
    assert bf16.path == (f"onednn/{isa}/bf16" if session().library.get_effective_cpu_isa() & 0x80 else f32.path)


def test_float16_down_may_pass_65504_before_its_routing_weight():
    # Intermediate 64 (32 of them), code - zero 4, scale 16: 131072 before the weight of 1/16.
    up = CanonicalWeight(torch.full((32, 32), 0x99, dtype=torch.uint8), torch.ones(32, 2).half(), None, 32)
    down = CanonicalWeight(torch.full((64, 16), 0xCC, dtype=torch.uint8), torch.full((64, 1), 16.0).half(), None, 32)
    expert = ExpertWeights(LinearWeights(up), LinearWeights(up), LinearWeights(down))
    spec, _ = ExpertsCase(64, 32, 32, num_experts=1).build(gen(0))
    packed = BACKEND.pack_experts(spec, iter([expert]), RunConfig(dtype=torch.float16))
    x = torch.full((1, 64), 1 / 8).half()  # gate = up = 8: silu(8) * 8 = 63.98
    y = BACKEND.experts_forward(packed, x, torch.tensor([[0, -1]]), torch.tensor([[1 / 16, 0.0]]))
    assert y.isfinite().all() and abs(y.float() - 8192).max() < 8


@pytest.mark.skipif(os.environ.get("INT4MOE_MAX_ISA") == "avx2", reason="this is the run with the cap")
def test_the_same_with_a_cap_at_avx2():
    # oneDNN takes its cap once per process: this file runs again in another one.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "matrix or path or cap"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env={**os.environ, **AVX2}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "9 passed" in done.stdout or "8 passed" in done.stdout, done.stdout[-500:]
