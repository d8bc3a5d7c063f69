"""Will it run here, how, and what would be better: the facts and verdicts that `int4moe doctor` prints."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from int4moe_ipex import machine, tuning
from int4moe_ipex.backends import onednn
from int4moe_ipex.backends.base import ExpertsSpec, LinearSpec, Supported
from int4moe_ipex.backends.select import Choice, Spec, choose, describe, explain
from int4moe_ipex.config import Config
from int4moe_ipex.cpu import CpuFeatures, detect
from int4moe_ipex.errors import BackendError, CheckpointError
from int4moe_ipex.formats.base import LinearInfo
from int4moe_ipex.packing.store import Store, is_store

# A layer of Qwen3-30B-A3B, group_size 128, symmetric: the question when no checkpoint is given.
TYPICAL_UP = LinearSpec(in_features=2048, out_features=768, group_size=128, symmetric=True)
TYPICAL_DOWN = LinearSpec(in_features=768, out_features=2048, group_size=128, symmetric=True)
TYPICAL = ExpertsSpec(128, 2048, 768, gate=TYPICAL_UP, up=TYPICAL_UP, down=TYPICAL_DOWN)

PACKAGES = ("torch", "transformers", "safetensors", "intel-extension-for-pytorch", "onednn", "fastapi", "uvicorn")


@dataclass(frozen=True)
class Question:
    """Modules that are asked about together because they are alike."""

    modules: tuple[str, ...]
    spec: Spec


def diagnose(config: Config, checkpoint: Path | None = None, cpu: CpuFeatures | None = None) -> dict[str, Any]:
    """Everything about this machine, the configuration on it, and each row of the table.

    Args:
        config: the configuration at hand.
        checkpoint: asks about its modules (from its headers alone) instead of a typical layer.

    Raises:
        CheckpointError and its kinds: the checkpoint cannot be described.
        StoreError: a store that is damaged or of another version.
    """
    cpu = cpu or detect()
    onednn.configure(config.onednn.lib)
    problems: list[str] = []
    if checkpoint is not None and is_store(checkpoint):
        from int4moe_ipex.models.stored import problems_of

        problems = problems_of(Store.open(checkpoint), config)
    questions = (
        questions_of(checkpoint, config) if checkpoint is not None else [Question(("a typical MoE layer",), TYPICAL)]
    )
    answers = [_answer(question, config, cpu) for question in questions]
    recommended = recommend(cpu, [question.spec for question in questions])
    return {
        "version": importlib.import_module("int4moe_ipex").__version__,
        "machine": machine.summary(cpu),
        "isas": [vars(verdict) for verdict in machine.isas(cpu)],
        "packages": versions(),
        "libraries": libraries(),
        "tuning": tuned(cpu, config),
        "config": {key: origin for key, origin in config.origins().items() if origin != "default"},
        "modules": answers,
        "problems": [*problems, *(a["error"] for a in answers if a["error"])],
        "recommended": recommended,
        "can_run": not problems and all(a["error"] is None for a in answers),
    }


def tuned(cpu: CpuFeatures, config: Config) -> dict[str, Any]:
    """Where measured crossings are kept, and which of them the configuration at hand uses: kind -> words."""
    file = tuning.file_of()
    used = {}
    for kind in ("experts", "linear"):
        entry = tuning.entry_here(cpu, config.compute, config.dtype, kind)
        if entry is not None and config.backend == config.isa == "auto":
            used[kind] = entry.in_words()
    return {"file": None if file is None else str(file), "entries": len(tuning.read(file)), "in_use": used}


def _answer(question: Question, config: Config, cpu: CpuFeatures) -> dict[str, Any]:
    name = question.modules[0]
    bands = config.bands(name)
    wish = bands[0]
    # What each row could do, whatever backend and isa the configuration asks for.
    rows = [
        {
            "row": row.name,
            "supported": isinstance(verdict, Supported),
            "path": verdict.path if isinstance(verdict, Supported) else None,
            "reason": verdict.note if isinstance(verdict, Supported) else verdict.reason,
            "limits": row.limits,
        }
        for row, verdict in explain(question.spec, cpu, replace(wish.run, isa="auto"))
    ]
    chosen: Choice | None = None
    error: str | None = None
    try:
        chosen = choose(question.spec, cpu, wish.run, bands)
    except BackendError as problem:
        error = f"{name}: {problem}"
    return {
        "module": name,
        "alike": len(question.modules),
        "what": describe(question.spec),
        "path": chosen.path if chosen else None,
        "error": error,
        "rows": rows,
    }


def recommend(cpu: CpuFeatures, specs: Iterable[Spec]) -> dict[str, Any]:
    """The configuration to start with: the shipped file of the best row here, and what NUMA asks for."""
    specs = list(specs)
    try:
        paths = [choose(spec, cpu, Config.load({}, environ={}).for_module("*").run).path for spec in specs]
    except BackendError as problem:
        return {"name": None, "yaml": "", "why": str(problem)}
    first = paths[0].split("/")
    name = first[1].partition("_")[0] if first[0] == "native" else "auto"
    name = name if name in ("amx", "avx512", "avx2") and len({p.split("/")[0] for p in paths}) == 1 else "auto"
    nodes = machine.nodes()
    lines = ["version: 1"]
    why = [f"{paths[0]} is the best row that runs here"]
    if name == "auto":
        lines.append("backend: auto")
    else:
        lines += ["backend: native", f"isa: {name}"]
    if len(nodes) > 1:
        lines += ["threads:", "  memory: interleave"]
        why.append(f"{len(nodes)} NUMA nodes: interleave for one process, or one process per node with numa_node")
    if machine.huge_pages() == "never":
        why.append("transparent huge pages are off: `madvise` in /sys/kernel/mm/transparent_hugepage/enabled is faster")
    return {"name": name, "yaml": "\n".join(lines) + "\n", "why": "; ".join(why)}


def questions_of(checkpoint: Path, config: Config) -> list[Question]:
    """The distinct int4 modules of a checkpoint or store, from its headers alone; experts first.

    Raises:
        CheckpointError and its kinds, UnsupportedModelError: as `load` does.
    """
    alike: dict[tuple[Spec, tuple], list[str]] = {}

    def add(name: str, spec: Spec) -> None:
        # Modules that the configuration treats differently are asked about apart.
        wish = tuple((b.backend, b.run, b.min_tokens) for b in config.bands(name))
        alike.setdefault((spec, wish), []).append(name)

    if is_store(checkpoint):
        from int4moe_ipex.models.stored import specs_of

        for name, spec in sorted(specs_of(Store.open(checkpoint)), key=lambda item: isinstance(item[1], LinearSpec)):
            add(name, spec)
        return _questions(checkpoint, alike)
    from int4moe_ipex.models.loader import prepare

    prepared = prepare(checkpoint, config)
    for plan in prepared.plan.experts:
        groups: dict[tuple[LinearSpec, ...], int] = {}
        for trio in plan.experts:
            if all(info.is_int4 for info in trio):
                specs = tuple(linear_spec(info) for info in trio)
                groups[specs] = groups.get(specs, 0) + 1
            else:
                for info in trio:
                    if info.is_int4:
                        add(plan.module, linear_spec(info))
        for (gate, up, down), count in groups.items():
            spec = ExpertsSpec(count, up.in_features, up.out_features, gate, up, down, prepared.activation)
            add(plan.module, spec)
    for name, info in prepared.plan.linears:
        if info.is_int4:
            add(name, linear_spec(info))
    return _questions(checkpoint, alike)


def _questions(checkpoint: Path, alike: dict[tuple[Spec, tuple], list[str]]) -> list[Question]:
    if not alike:
        raise CheckpointError(f"{checkpoint}: has no int4 module")
    return [Question(tuple(names), spec) for (spec, _), names in alike.items()]


def linear_spec(info: LinearInfo) -> LinearSpec:
    """What headers say of an int4 linear; the stored zeros and permutation decide when they are read."""
    return LinearSpec(
        in_features=info.in_features,
        out_features=info.out_features,
        group_size=info.group_size,
        symmetric=info.symmetric,
        act_order=info.act_order,
        scales_dtype=info.scales_dtype,
        bias=info.has_bias,
    )


def versions() -> dict[str, str | None]:
    """Installed versions, without importing anything but Python's own metadata."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def libraries() -> dict[str, dict[str, Any]]:
    """For each engine that needs something beyond torch: whether it is there, and which one or how to get it."""
    found = {}
    for name in ("native", "ipex", "onednn"):
        try:
            status = importlib.import_module(f"int4moe_ipex.backends.{name}").status
        except (ImportError, AttributeError) as error:
            found[name] = {"available": False, "detail": str(error)}
            continue
        available, detail = status()
        found[name] = {"available": available, "detail": detail}
    return found
