"""Rows of the table timed against each other by tokens per expert, for `int4moe tune`."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from int4moe_ipex import tuning
from int4moe_ipex.backends.base import LinearSpec, Packed, RunConfig, Supported
from int4moe_ipex.backends.select import ANY, Choice, Row, Spec, choose, explain
from int4moe_ipex.bench.layer import LayerCase
from int4moe_ipex.bench.shapes import LayerShape
from int4moe_ipex.bench.timing import run_batch
from int4moe_ipex.cpu import CpuFeatures
from int4moe_ipex.errors import BackendError

# Half the experts of a Qwen3-30B-A3B layer: 150 MB, more than most last-level caches hold.
SHAPE = LayerShape("half a layer of Qwen3-30B-A3B", 2048, 768, 64, 8)
LINEARS = 24  # of 2048 x 2048: 50 MB, gone through in turn
LADDER = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 3
BATCH_SECONDS = 0.06

Progress = Callable[[int, int, str], None]
Call = Callable[[int], Callable[[], object]]


@dataclass(frozen=True)
class Candidate:
    """A row that can run here; call(tokens per expert) is one forward pass, ready to be timed."""

    row: str
    call: Call


def candidates(spec: Spec, cpu: CpuFeatures, run: RunConfig) -> list[Row]:
    """The rows that may be taken by themselves: supported here, and not among those marked slow, unless all are.

    Raises:
        BackendError: no row can run.
    """
    able = [row for row, verdict in explain(spec, cpu, run) if isinstance(verdict, Supported)]
    if not able:
        raise BackendError(f"no row of the table can run {run.compute} here; int4moe doctor says why")
    return [row for row in able if not row.slow] or able[:1]


def measure(
    kind: str,
    cpu: CpuFeatures,
    run: RunConfig,
    *,
    shape: LayerShape = SHAPE,
    ladder: Sequence[int] = LADDER,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> tuning.Entry:
    """Times every candidate at each number of tokens per expert (rows, for kind linear), in turns.

    Args:
        kind: experts or linear.
        run: compute and dtype; isa is left open.
        shape: the layer; for kind linear only its hidden_size counts.

    Raises:
        BackendError: no row can run.
    """
    case = LayerCase(shape)
    spec = case.spec if kind == "experts" else LinearSpec(shape.hidden_size, shape.hidden_size, 128, symmetric=True)
    rows = candidates(spec, cpu, run)
    seconds: dict[str, dict[int, float]] = {row.name: {} for row in rows}
    if len(rows) > 1:
        total = len(ladder) * rounds * len(rows)
        done = disturbed = 0
        made = _experts(case, rows, cpu, run) if kind == "experts" else _linears(spec, rows, cpu, run)
        for tokens in ladder:
            calls = {one.row: one.call(tokens) for one in made}
            for _ in range(rounds):
                for row, call in calls.items():
                    batch = run_batch([call], BATCH_SECONDS)
                    seconds[row][tokens] = min(*batch.seconds, seconds[row].get(tokens, math.inf))
                    done += 1
                    disturbed += not batch.clean
                    if progress is not None:
                        progress(done, total, f"{kind} {tokens} tokens {row}")
        crossings = tuning.decide(seconds)
    else:
        disturbed, total, crossings = 0, 1, ((None, rows[0].name),)
    dtype = str(run.dtype).removeprefix("torch.")
    return tuning.Entry(
        key=tuning.key_here(cpu, run.compute, dtype, kind),
        crossings=crossings,
        seconds={row: {str(t): s for t, s in times.items()} for row, times in seconds.items()},
        disturbed=disturbed / total,
        shape=shape.name if kind == "experts" else f"{shape.hidden_size} x {shape.hidden_size}",
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def _choice(spec: Spec, row: Row, cpu: CpuFeatures, run: RunConfig) -> Choice:
    return choose(spec, cpu, run if row.isa == ANY else replace(run, isa=row.isa), row.backend)


def _pack(choices: Sequence[tuple[str, Choice]], pack: Callable[[Choice], Packed]) -> list[tuple[str, Choice, Packed]]:
    """Packed once for each engine; the native core's rows share a buffer."""
    made: list[tuple[str, Choice, Packed]] = []
    native: Packed | None = None
    for name, choice in choices:
        if choice.backend.name == "native" and native is not None:
            from int4moe_ipex.backends.native import with_row

            made.append((name, choice, with_row(native, *choice.path.split("/")[1:])))
            continue
        packed = pack(choice)
        native = packed if choice.backend.name == "native" else native
        made.append((name, choice, packed))
    return made


def _experts(case: LayerCase, rows: Sequence[Row], cpu: CpuFeatures, run: RunConfig) -> list[Candidate]:
    choices = [(row.name, _choice(case.spec, row, cpu, run)) for row in rows]
    shape = case.shape

    def inputs(per_expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Every expert gets exactly this many tokens, and no token has an expert twice.
        tokens = -(-per_expert * shape.num_experts // shape.top_k)
        ids = (torch.arange(tokens).unsqueeze(1) * shape.top_k + torch.arange(shape.top_k)) % shape.num_experts
        x = torch.randn(tokens, shape.hidden_size, generator=torch.Generator().manual_seed(per_expert))
        return x.to(run.dtype), ids, torch.full(ids.shape, 1 / shape.top_k)

    def call(choice: Choice, packed: Packed) -> Call:
        def at(per_expert: int) -> Callable[[], object]:
            args = inputs(per_expert)
            return lambda: choice.backend.experts_forward(packed, *args)

        return at

    packs = _pack(choices, lambda choice: choice.pack_experts(case.spec, case.experts()))
    return [Candidate(name, call(choice, packed)) for name, choice, packed in packs]


def _linears(spec: LinearSpec, rows: Sequence[Row], cpu: CpuFeatures, run: RunConfig) -> list[Candidate]:
    choices = [(row.name, _choice(spec, row, cpu, run)) for row in rows]
    shape = LayerShape("", spec.in_features, spec.in_features, LINEARS, 1)
    weights = [LayerCase(shape).expert(index).up for index in range(LINEARS)]
    packs = [_pack(choices, lambda choice, weight=weight: choice.pack_linear(spec, weight)) for weight in weights]

    def call(number: int) -> Call:
        def at(tokens: int) -> Callable[[], object]:
            x = torch.randn(tokens, spec.in_features, generator=torch.Generator().manual_seed(tokens)).to(run.dtype)

            def once() -> None:
                for made in packs:
                    _, choice, packed = made[number]
                    choice.backend.linear_forward(packed, x)

            return once

        return at

    return [Candidate(name, call(number)) for number, (name, _) in enumerate(choices)]
