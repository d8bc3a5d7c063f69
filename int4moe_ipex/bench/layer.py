"""One MoE layer with random weights on any backend: speed by number of tokens, and the error against float32."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from int4moe_ipex.backends.base import (
    Backend,
    ExpertsSpec,
    ExpertWeights,
    LinearSpec,
    LinearWeights,
    Packed,
    RunConfig,
)
from int4moe_ipex.backends.select import choose
from int4moe_ipex.bench.limits import Limits
from int4moe_ipex.bench.shapes import LayerShape
from int4moe_ipex.bench.timing import quantile, routing_count, run_batch
from int4moe_ipex.canonical import CanonicalWeight, dequantize
from int4moe_ipex.cpu import CpuFeatures

CODE_STD = math.sqrt((16**2 - 1) / 12)  # of a uniform 4-bit code
ERROR_TOKENS = 4  # tokens whose result is compared with the reference
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class LayerCase:
    """Random experts of a shape: expert e is the same whenever and wherever it is made.

    Attributes:
        group_size: columns per group; -1 is one group per row.
        asym: zero points 6..9 in place of 8.
        act_order: a random order of the columns, shared by gate and up of one expert.
        scales_dtype: dtype of the scales as a checkpoint would store them.
    """

    shape: LayerShape
    group_size: int = 128
    asym: bool = False
    act_order: bool = False
    scales_dtype: torch.dtype = torch.float16
    seed: int = 0

    @property
    def spec(self) -> ExpertsSpec:
        h, i = self.shape.hidden_size, self.shape.moe_intermediate_size
        up = self._linear_spec(i, h)
        return ExpertsSpec(self.shape.num_experts, h, i, up, up, self._linear_spec(h, i))

    def _group(self, k: int) -> int:
        return k if self.group_size == -1 else min(self.group_size, k)

    def _linear_spec(self, n: int, k: int) -> LinearSpec:
        return LinearSpec(k, n, self._group(k), not self.asym, self.act_order, self.scales_dtype)

    def expert(self, index: int) -> ExpertWeights:
        """Expert `index`; rows have about unit norm, so that activations keep their size."""
        rng = np.random.default_rng((self.seed, index))
        h, i = self.shape.hidden_size, self.shape.moe_intermediate_size
        orders = [torch.from_numpy(rng.permutation(k).astype(np.int32)) if self.act_order else None for k in (h, i)]
        gate, up = (self._linear(rng, i, h, orders[0]) for _ in range(2))
        return ExpertWeights(gate, up, self._linear(rng, h, i, orders[1]))

    def experts(self) -> Iterator[ExpertWeights]:
        """All experts, one at a time."""
        return (self.expert(index) for index in range(self.shape.num_experts))

    def _linear(self, rng: np.random.Generator, n: int, k: int, perm: torch.Tensor | None) -> LinearWeights:
        group = self._group(k)
        groups = -(-k // group)
        mean = 1 / (CODE_STD * math.sqrt(k))
        zeros = torch.from_numpy(rng.integers(6, 10, (n, groups), dtype=np.uint8)) if self.asym else None
        codes = np.frombuffer(bytearray(rng.bytes(n * k // 2)), dtype=np.uint8).reshape(n, k // 2)
        scales = torch.from_numpy(rng.uniform(0.75 * mean, 1.25 * mean, (n, groups))).to(self.scales_dtype)
        return LinearWeights(CanonicalWeight(torch.from_numpy(codes), scales, zeros, group, perm))

    def stored_bytes_per_expert(self) -> int:
        """Codes, scales and zeros of one expert as a checkpoint stores them."""
        total = 0
        for spec in (self.spec.gate, self.spec.up, self.spec.down):
            groups = -(-spec.in_features // spec.group_size) * spec.out_features
            total += spec.in_features * spec.out_features // 2 + groups * self.scales_dtype.itemsize
            total += 0 if spec.symmetric else (groups + 1) // 2
        return total

    def reference(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The layer in float32 by the one formula; x [T, H], index and weights [T, k] -> [T, H]."""
        x, weights = x.float(), weights.float()
        parts = torch.zeros(*index.shape, self.shape.hidden_size)
        for expert in index.unique().tolist():
            made = self.expert(expert)
            token, slot = (index == expert).nonzero(as_tuple=True)
            rows = x[token]
            h = self.spec.activation.apply(
                rows @ dequantize(made.gate.weight).t(), rows @ dequantize(made.up.weight).t()
            )
            parts[token, slot] = (h @ dequantize(made.down.weight).t()) * weights[token, slot].unsqueeze(1)
        return parts.sum(1)

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H] normal in `dtype`, ids [T, k] distinct within a token, weights [T, k] float32 of sum 1."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, self.shape.hidden_size, generator=generator).to(dtype)
        scores = torch.rand(tokens, self.shape.num_experts, generator=generator)
        weights, index = scores.softmax(-1).topk(self.shape.top_k, dim=-1)
        return x, index, weights / weights.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Engine:
    """A backend with the packed experts of one case."""

    backend: Backend
    packed: Packed
    run: RunConfig
    path: str
    case: LayerCase
    pack_seconds: float

    @property
    def label(self) -> str:
        return f"{self.backend.name} {self.run.compute}"

    def call(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.backend.experts_forward(self.packed, x, index, weights)

    def prepare(self, tokens: int, seed: int) -> tuple[list[Call], float]:
        """Calls with one routing each, ready to be timed, and the mean number of experts that one of them reads."""
        inputs = [self.case.inputs(tokens, self.run.dtype, seed + i) for i in range(routing_count(tokens))]
        hit = statistics.mean(index.unique().numel() for _, index, _ in inputs)
        return [lambda args=args: self.call(*args) for args in inputs], hit

    def error(self) -> float:
        """Relative Frobenius error of a few tokens against the float32 reference."""
        args = self.case.inputs(ERROR_TOKENS, self.run.dtype, seed=1 << 20)
        expected = self.case.reference(*args)
        return ((self.call(*args).float() - expected).norm() / expected.norm()).item()


def build(case: LayerCase, backend: str, run: RunConfig, cpu: CpuFeatures) -> Engine:
    """Packs the case's experts for a backend.

    Raises:
        BackendError: the backend cannot run the case; the message says why.
    """
    choice = choose(case.spec, cpu, run, backend)
    start = time.perf_counter()
    packed = choice.pack_experts(case.spec, case.experts())
    return Engine(choice.backend, packed, run, choice.path, case, time.perf_counter() - start)


@dataclass(frozen=True)
class Row:
    """One backend at one number of tokens; seconds and rates of the median call.

    Attributes:
        int4_rate: bytes/s of the int4 codes of the experts hit, read once per call.
        stored_rate: the same with scales and zeros.
        flop_rate: FLOP/s, 2 per weight and token.
        read_share: stored_rate over the measured read bandwidth; None when that was not measured.
        peak_share: flop_rate over the measured arithmetic ceiling of the path; None when not measured.
        error: relative Frobenius error against the float32 reference.
        noisy: batches that other processes disturbed and that were kept because time was up.
    """

    backend: str
    compute: str
    path: str
    tokens: int
    seconds: float
    p10: float
    p90: float
    samples: int
    int4_rate: float
    stored_rate: float
    flop_rate: float
    read_share: float | None
    peak_share: float | None
    error: float
    noisy: int = 0

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass
class _Samples:
    seconds: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    noisy: int = 0


def measure(
    engines: Sequence[Engine],
    tokens: int,
    *,
    rounds: int = 5,
    limits: Limits | None = None,
    read: Callable[[], float] | None = None,
    patience: float = 20.0,
    progress: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Times the engines in turn, `rounds` batches each, so that drift of the machine meets all of them.

    Args:
        limits: the machine's ceilings, measured beforehand.
        read: measures the read bandwidth again in each round; the rows' share is of the median.
        patience: seconds that may go into repeating disturbed batches; then they are kept and counted as noisy.
        progress: called after each batch.
    """
    errors = [engine.error() for engine in engines]
    found = [_Samples() for _ in engines]
    reads: list[float] = []
    repeat_until = time.monotonic() + patience
    for turn in range(rounds):
        if read is not None:
            reads.append(read())
        for engine, samples in zip(engines, found):
            calls, hit = engine.prepare(tokens, seed=1000 * turn)
            batch = run_batch(calls)
            while not batch.clean and time.monotonic() < repeat_until:
                batch = run_batch(calls)
            samples.seconds += batch.seconds
            samples.hits.append(hit)
            samples.noisy += not batch.clean
            progress()
    bandwidth = statistics.median(reads) if reads else limits.read if limits else None
    return [
        _row(engine, tokens, samples, error, bandwidth, limits)
        for engine, samples, error in zip(engines, found, errors)
    ]


def _row(
    engine: Engine, tokens: int, samples: _Samples, error: float, read: float | None, limits: Limits | None
) -> Row:
    case, hit = engine.case, statistics.mean(samples.hits)
    seconds = statistics.median(samples.seconds)
    stored = hit * case.stored_bytes_per_expert() / seconds
    flops = case.shape.flops(tokens) / seconds
    peak = None if limits is None else limits.peak(engine.path)
    return Row(
        backend=engine.backend.name,
        compute=engine.run.compute,
        path=engine.path,
        tokens=tokens,
        seconds=seconds,
        p10=quantile(samples.seconds, 0.1),
        p90=quantile(samples.seconds, 0.9),
        samples=len(samples.seconds),
        int4_rate=hit * case.shape.weights_per_expert / 2 / seconds,
        stored_rate=stored,
        flop_rate=flops,
        read_share=None if read is None else stored / read,
        peak_share=None if not peak else flops / peak,
        error=error,
        noisy=samples.noisy,
    )
