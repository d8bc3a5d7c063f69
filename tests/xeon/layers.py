"""For programs that run other libraries' backends on the emulated Xeon: small layers against the float32 reference.

No pytest there: every import costs a hundred times as much.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

import torch

from int4moe_ipex import cpu
from int4moe_ipex.backends.base import Backend, LinearSpec, LinearWeights, Rejected, RunConfig
from tests.backends.backend_matrix import REFERENCE, ExpertsCase, relative_error, same_linear
from tests.weights import random_weight

failures: list[str] = []


def step(what: str, check: Callable[[], str]) -> None:
    """Runs one check in a process of its own and prints how it ended; the rest still runs after a failure."""
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            outcome, status = check(), 0
        except Exception as error:
            outcome, status = f"FAILED {type(error).__name__}: {error}", 1
        print(f"{what}: {outcome} ({time.monotonic() - start:.0f} s)", flush=True)
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        print(f"{what}: FAILED by {signal.Signals(-status).name}; {_last_trap()}", flush=True)
    if status:
        failures.append(what)


def _last_trap() -> str:
    """What the kernel wrote of the last trap: the kind, the address and the library."""
    lines = []
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        while True:
            lines.append(os.read(log, 8192).decode(errors="replace").strip())
    except OSError:
        pass
    return next((line for line in reversed(lines) if "trap" in line), "the kernel says nothing of it")


def words(case: ExpertsCase) -> str:
    """What a case has beside its sizes."""
    kinds = ["asymmetric"] * (not case.symmetric) + ["act-order"] * case.act_order + ["bias"] * case.bias
    sizes = f"{case.hidden_size}x{case.intermediate_size}, groups of {case.group_size}"
    return ", ".join([sizes, *kinds, case.activation])


def finish() -> None:
    print(f"failed: {', '.join(failures)}" if failures else "all right", flush=True)
    sys.exit(bool(failures))


def experts(backend: Backend, case: ExpertsCase, run: RunConfig, path: str, tokens: Sequence[int], bound: float) -> str:
    """The layer on the path that is expected, for several numbers of tokens, and its weights back bit for bit."""
    generator = torch.Generator().manual_seed(7)
    spec, stored = case.build(generator)
    verdict = backend.support_experts(spec, cpu.detect(), run)
    assert not isinstance(verdict, Rejected), verdict
    packed = backend.pack_experts(spec, iter(stored), run)
    assert packed.path == verdict.path == path, (packed.path, verdict)
    reference = REFERENCE.pack_experts(spec, iter(stored), run)
    errors = []
    for count in tokens:
        x = torch.randn(count, case.hidden_size, generator=generator).to(run.dtype)
        ids = torch.stack([torch.randperm(case.num_experts, generator=generator)[:2] for _ in range(count)])
        weights = torch.rand(count, 2, generator=generator)
        y = backend.experts_forward(packed, x, ids, weights)
        errors.append(relative_error(y, REFERENCE.experts_forward(reference, x.float(), ids, weights)))
    empty = backend.experts_forward(packed, x[:0], ids[:0], weights[:0])
    assert empty.shape == (0, case.hidden_size), empty.shape
    for mine, expected in zip(backend.unpack_experts(packed), stored, strict=True):
        assert all(same_linear(getattr(mine, name), getattr(expected, name)) for name in ("gate", "up", "down"))
    worst = max(errors)
    assert worst <= bound, f"relative error {worst:.1e} on {path}"
    return f"{path}, relative error {worst:.1e} over {', '.join(map(str, tokens))} tokens"


def linear(backend: Backend, shape: tuple[int, int, int], run: RunConfig, path: str, bound: float) -> str:
    """One linear (out_features, in_features, group_size) with zero points, at one row and at nine."""
    generator = torch.Generator().manual_seed(8)
    weight = random_weight(generator, *shape, symmetric=False)
    packed = backend.pack_linear(LinearSpec.of(weight), LinearWeights(weight), run)
    assert packed.path == path, packed.path
    reference = REFERENCE.pack_linear(LinearSpec.of(weight), LinearWeights(weight), run)
    worst = 0.0
    for rows in (1, 9):
        x = torch.randn(rows, shape[1], generator=generator).to(run.dtype)
        want = REFERENCE.linear_forward(reference, x.float())
        worst = max(worst, relative_error(backend.linear_forward(packed, x), want))
    assert worst <= bound, f"relative error {worst:.1e} on {path}"
    return f"{path}, relative error {worst:.1e}"
