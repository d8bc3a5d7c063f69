"""The cases that every backend is put through, each against the reference backend: right, or rejected with a reason.

`linear_cases` and `experts_cases` cross shapes, group sizes (tail groups and whole rows among them), zeros, act-order,
biases, scale dtypes and activations; `check_linear` and `check_experts` run one of them on one backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from int4moe_ipex import cpu
from int4moe_ipex.backends.base import (
    Backend,
    ExpertsSpec,
    ExpertWeights,
    LinearSpec,
    LinearWeights,
    Rejected,
    RunConfig,
)
from int4moe_ipex.backends.reference import ReferenceBackend
from int4moe_ipex.moe.activations import GATED, Activation
from tests.weights import random_weight

REFERENCE = ReferenceBackend()
# Relative Frobenius error against the float32 reference that W4A16 may have, by the activations' dtype.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 4e-3}
# (out_features, in_features, group_size)
LINEARS = (
    (64, 128, 32),
    (96, 256, 128),
    (128, 128, 128),  # one group
    (32, 64, 16),
    (20, 64, 32),  # rows: no multiple of 16
    (33, 96, 32),
    (64, 192, 96),  # group size: no power of two
    (64, 80, 32),  # tail group of 16
    (40, 40, 32),  # tail group of 8
    (16, 12, 6),
    (48, 10, 5),
    (2, 64, 64),
    (1, 64, 32),
)
# (hidden_size, intermediate_size, group_size)
EXPERTS = ((64, 32, 32), (128, 96, 32), (64, 128, 64), (64, 64, 64), (64, 40, 32), (96, 192, 96), (80, 32, 16))
TOKENS = (0, 1, 3, 5, 33)


@dataclass(frozen=True)
class LinearCase:
    out_features: int
    in_features: int
    group_size: int
    symmetric: bool
    act_order: bool
    bias: bool
    scales_dtype: torch.dtype

    def build(self, generator: torch.Generator) -> LinearWeights:
        weight = random_weight(
            generator,
            self.out_features,
            self.in_features,
            self.group_size,
            symmetric=self.symmetric,
            act_order=self.act_order,
            scales_dtype=self.scales_dtype,
        )
        bias = torch.randn(self.out_features, generator=generator).to(torch.bfloat16) if self.bias else None
        return LinearWeights(weight, bias)


def linear_cases() -> Iterator[LinearCase]:
    for shape in LINEARS:
        for symmetric in (True, False):
            for act_order, bias, dtype in (
                (False, False, torch.float16),
                (True, True, torch.bfloat16),
                (False, True, torch.float32),
            ):
                yield LinearCase(*shape, symmetric, act_order, bias, dtype)


@dataclass(frozen=True)
class ExpertsCase:
    """mixed: experts differ in zeros and permutation, as one pack may hold them."""

    hidden_size: int
    intermediate_size: int
    group_size: int
    activation: str = "silu"
    gate: bool = True
    symmetric: bool = True
    act_order: bool = False
    shared_perm: bool = True
    bias: bool = False
    mixed: bool = False
    num_experts: int = 4

    def build(self, generator: torch.Generator) -> tuple[ExpertsSpec, list[ExpertWeights]]:
        h, i = self.hidden_size, self.intermediate_size

        def linear(n: int, k: int, plain: bool, perm: torch.Tensor | None = None) -> LinearWeights:
            weight = random_weight(
                generator,
                n,
                k,
                min(self.group_size, k),
                symmetric=self.symmetric or plain,
                act_order=self.act_order and not plain,
                perm=perm,
            )
            return LinearWeights(weight, torch.randn(n, generator=generator).half() if self.bias else None)

        experts = []
        for index in range(self.num_experts):
            plain = self.mixed and index % 2 == 0
            up = linear(i, h, plain)
            gate = linear(i, h, plain, up.weight.perm if self.shared_perm else None) if self.gate else None
            experts.append(ExpertWeights(gate, up, linear(h, i, plain)))

        def spec(name: str) -> LinearSpec:
            one = getattr(experts[-1], name)
            return LinearSpec.of(one.weight, one.bias)

        return ExpertsSpec(
            num_experts=self.num_experts,
            hidden_size=h,
            intermediate_size=i,
            gate=spec("gate") if self.gate else None,
            up=spec("up"),
            down=spec("down"),
            activation=Activation(self.activation),
            shared_perm=self.shared_perm,
        ), experts


def experts_cases() -> Iterator[ExpertsCase]:
    for shape in EXPERTS:
        yield ExpertsCase(*shape)
        yield ExpertsCase(*shape, symmetric=False, act_order=True)
        yield ExpertsCase(*shape, symmetric=False, bias=True, mixed=True)
        yield ExpertsCase(*shape, act_order=True, shared_perm=False, mixed=True, bias=True)
    for activation in GATED:
        yield ExpertsCase(64, 32, 32, activation, symmetric=False, bias=activation == "swiglu_clamped")
        if activation != "swiglu_clamped":
            yield ExpertsCase(64, 32, 32, activation, gate=False, act_order=True)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((y.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def _assert_close(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float, what: str) -> None:
    """All token counts together within the tolerance, and each with outputs enough to average over within twice that.

    A few outputs may nearly cancel out, and then have no meaningful relative error of their own.
    """
    for y, expected in zip(got, want):
        if y.numel() > 64:
            error = relative_error(y, expected)
            assert error <= 2 * tolerance, f"{what} with {y.shape[0]} tokens: relative error {error:.1e}"
    error = relative_error(torch.cat(got), torch.cat(want))
    assert error <= tolerance, f"{what}: relative error {error:.1e}"


def same_linear(a: LinearWeights | None, b: LinearWeights | None) -> bool:
    if a is None or b is None:
        return a is b

    def same(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
        return x is y if x is None or y is None else x.dtype == y.dtype and torch.equal(x, y)

    names = ("codes", "scales", "zeros", "perm")
    return (
        a.weight.group_size == b.weight.group_size
        and same(a.bias, b.bias)
        and all(same(getattr(a.weight, name), getattr(b.weight, name)) for name in names)
    )


def check_linear(backend: Backend, case: LinearCase, run: RunConfig, tolerance: float) -> str:
    """Asserts that the backend is right on the case; returns the path that ran, or "" where it was rejected."""
    generator = torch.Generator().manual_seed(hash((case.out_features, case.in_features)) % 2**31)
    linear = case.build(generator)
    spec = LinearSpec.of(linear.weight, linear.bias)
    verdict = backend.support_linear(spec, cpu.detect(), run)
    if isinstance(verdict, Rejected):
        assert len(verdict.reason) > 20, case
        return ""
    packed = backend.pack_linear(spec, linear, run)
    assert packed.path == verdict.path
    expected = REFERENCE.pack_linear(spec, linear, run)
    got, want = [], []
    for tokens in TOKENS:
        x = torch.randn(tokens, case.in_features, generator=generator).to(run.dtype)
        got.append(backend.linear_forward(packed, x))
        assert got[-1].dtype == x.dtype and got[-1].shape == (tokens, case.out_features)
        want.append(REFERENCE.linear_forward(expected, x.float()))
    _assert_close(got, want, tolerance, f"{case} on {packed.path}")
    wide = torch.randn(2, case.in_features, 3, generator=generator).to(run.dtype).transpose(1, 2)
    assert torch.equal(backend.linear_forward(packed, wide), backend.linear_forward(packed, wide.contiguous())), case
    assert same_linear(backend.unpack_linear(packed), linear), f"{case}: unpacked weights differ"
    return packed.path


def check_experts(backend: Backend, case: ExpertsCase, run: RunConfig, tolerance: float) -> str:
    """As `check_linear`, for the experts of a layer: random routing with sentinels and repeated ids in it."""
    generator = torch.Generator().manual_seed(hash((case.hidden_size, case.intermediate_size)) % 2**31)
    spec, experts = case.build(generator)
    verdict = backend.support_experts(spec, cpu.detect(), run)
    if isinstance(verdict, Rejected):
        assert len(verdict.reason) > 20, case
        return ""
    packed = backend.pack_experts(spec, iter(experts), run)
    assert packed.path == verdict.path
    expected = REFERENCE.pack_experts(spec, iter(experts), run)
    got, want = [], []
    for tokens in TOKENS:
        x = torch.randn(tokens, case.hidden_size, generator=generator).to(run.dtype)
        ids = torch.randint(-1, case.num_experts + 1, (tokens, 3), generator=generator)
        weights = torch.rand(tokens, 3, generator=generator).masked_fill(
            (ids < 0) | (ids == case.num_experts), torch.nan
        )
        got.append(backend.experts_forward(packed, x, ids, weights))
        assert got[-1].dtype == x.dtype and got[-1].shape == x.shape
        want.append(REFERENCE.experts_forward(expected, x.float(), ids, weights))
    _assert_close(got, want, tolerance, f"{case} on {packed.path}")
    unpacked = list(backend.unpack_experts(packed))
    assert len(unpacked) == len(experts)
    for mine, stored in zip(unpacked, experts):
        for name in ("gate", "up", "down"):
            assert same_linear(getattr(mine, name), getattr(stored, name)), f"{case}: unpacked {name} differs"
    assert all(isinstance(tensor, torch.Tensor) for tensor in packed.tensors().values())
    return packed.path
