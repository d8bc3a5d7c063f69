"""The one table that chooses a backend, keeping the reason of every row it rejects."""

from __future__ import annotations

from dataclasses import dataclass, replace

from int4moe_ipex.backends.base import Backend, ExpertsSpec, LinearSpec, RunConfig, Supported
from int4moe_ipex.cpu import CpuFeatures
from int4moe_ipex.errors import BackendError


@dataclass(frozen=True)
class Choice:
    """The backend that runs a module, the path it named, and (row, reason) for each row tried before it."""

    backend: Backend
    path: str
    rejected: tuple[tuple[str, str], ...] = ()


def available() -> dict[str, Backend]:
    """Every backend by name, in order of preference."""
    from int4moe_ipex.backends.reference import ReferenceBackend
    from int4moe_ipex.backends.torch_int4 import TorchInt4Backend

    return {b.name: b for b in (TorchInt4Backend(), ReferenceBackend())}


def choose(spec: ExpertsSpec | LinearSpec, cpu: CpuFeatures, run: RunConfig, backend: str = "auto") -> Choice:
    """The first backend (or the forced one) that supports the module.

    Raises:
        BackendError: the forced backend, or every backend, rejects it; the message has each reason.
    """
    table = available()
    if backend != "auto" and backend not in table:
        raise BackendError(f"unknown backend {backend!r}; known: auto, {', '.join(table)}")
    run = replace(run, forced=backend != "auto")
    rejected: list[tuple[str, str]] = []
    for name in table if backend == "auto" else (backend,):
        engine = table[name]
        ask = engine.support_experts if isinstance(spec, ExpertsSpec) else engine.support_linear
        verdict = ask(spec, cpu, run)
        if isinstance(verdict, Supported):
            return Choice(engine, verdict.path, tuple(rejected))
        rejected.append((name, verdict.reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise BackendError(f"no backend can run {spec}: {reasons}")
