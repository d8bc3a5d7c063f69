"""The one table that chooses a backend, keeping the reason of every row it rejects.

`choose` walks `TABLE` from the top: the first row that the configuration allows, this CPU can run and the backend
supports for the module wins; where the configuration leaves backend and isa open, rows that `int4moe tune` has measured
to be faster here are asked first. A forced backend or instruction set that cannot run is an error, unless the
configuration says `on_unsupported: fallback`. Slower rows that are taken for want of a better one are logged once.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from int4moe_ipex import tuning
from int4moe_ipex.backends.base import Backend, ExpertsSpec, LinearSpec, Packed, Rejected, RunConfig, Supported, Verdict
from int4moe_ipex.cpu import CpuFeatures
from int4moe_ipex.errors import BackendError

if TYPE_CHECKING:
    from int4moe_ipex.config import ModuleConfig

log = logging.getLogger(__name__)

Spec = ExpertsSpec | LinearSpec
# What the configuration says of a module: a backend's name, `auto`, or the bands of `Config.bands(name)`.
Wish: TypeAlias = "str | Sequence[ModuleConfig]"
ANY = "any"
NOT_ASKED = "the configuration asks for "


@dataclass(frozen=True)
class Row:
    """One way to run a module. isa is `any` where the library below picks its instructions by itself.

    limits says in words what the row takes, for people; the backend's own `support_*` decides.
    """

    backend: str
    isa: str
    compute: tuple[str, ...]
    limits: str
    slow: bool = False

    @property
    def name(self) -> str:
        return self.backend if self.isa == ANY else f"{self.backend}/{self.isa}"


# In order of preference.
TABLE: tuple[Row, ...] = (
    Row("native", "amx", ("w4a16", "w4a8"), "any group size that is a multiple of 8, act-order, biases"),
    Row("native", "avx512", ("w4a16", "w4a8"), "any group size that is a multiple of 8, act-order, biases"),
    Row("native", "avx2_vnni", ("w4a8",), "any group size that is a multiple of 8, act-order, biases"),
    Row("native", "avx2", ("w4a16", "w4a8"), "any group size that is a multiple of 8, act-order, biases"),
    Row("ipex", ANY, ("w4a16", "w4a8"), "torch 2.8 and IPEX 2.8; packed kernels need AMX and AVX512-FP16"),
    Row("onednn", ANY, ("w4a16",), "libdnnl 3.10 or later; group size a multiple of 16 that divides K"),
    Row("torch", ANY, ("w4a16",), "group size 32, 64, 128 or 256 that divides K; N a multiple of 16", slow=True),
    Row("native", "scalar", ("w4a16", "w4a8"), "any x86-64; for tests", slow=True),
    Row("reference", ANY, ("w4a16",), "everything, in float32; dequantises on every call", slow=True),
)

_BACKENDS = {
    "native": ("int4moe_ipex.backends.native", "NativeBackend"),
    "ipex": ("int4moe_ipex.backends.ipex", "IpexBackend"),
    "onednn": ("int4moe_ipex.backends.onednn", "OneDnnBackend"),
    "torch": ("int4moe_ipex.backends.torch_int4", "TorchInt4Backend"),
    "reference": ("int4moe_ipex.backends.reference", "ReferenceBackend"),
}


@dataclass(frozen=True)
class Choice:
    """The backend that runs a module, the path it named, and (row, reason) for each row tried before it.

    run is what the module is packed with: the wish as far as this choice grants it.
    """

    backend: Backend
    path: str
    rejected: tuple[tuple[str, str], ...] = ()
    run: RunConfig | None = None
    note: str = ""

    def pack_experts(self, spec: ExpertsSpec, experts: Iterable) -> Packed:
        return self.backend.pack_experts(spec, experts, self.run)

    def pack_linear(self, spec: LinearSpec, linear) -> Packed:
        return self.backend.pack_linear(spec, linear, self.run)


@functools.cache
def engine(name: str) -> Backend | Rejected:
    """The backend of that name, imported now; Rejected where its module cannot be imported."""
    module, attribute = _BACKENDS[name]
    try:
        return getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        return Rejected(f"cannot be imported: {error}")


def available() -> dict[str, Backend]:
    """Every backend that imports, by name, in order of preference."""
    found = {row.backend: engine(row.backend) for row in TABLE}
    return {name: backend for name, backend in found.items() if not isinstance(backend, Rejected)}


def ask(row: Row, spec: Spec, cpu: CpuFeatures, run: RunConfig, backend: str = "auto") -> Verdict:
    """What one row says to a module, with the reason in one sentence."""
    if backend not in ("auto", row.backend):
        return Rejected(f"{NOT_ASKED}backend {backend}")
    if run.compute not in row.compute:
        return Rejected(f"computes {' or '.join(row.compute)}, not {run.compute}")
    if row.isa != ANY:
        if run.isa not in ("auto", row.isa):
            return Rejected(f"{NOT_ASKED}isa {run.isa}")
        if not cpu.has(row.isa):
            return Rejected(lacks(cpu, row.isa))
        run = replace(run, isa=row.isa)
    one = engine(row.backend)
    if isinstance(one, Rejected):
        return one
    run = replace(run, forced=backend == row.backend)
    verdict = (
        one.support_experts(spec, cpu, run) if isinstance(spec, ExpertsSpec) else one.support_linear(spec, cpu, run)
    )
    if isinstance(verdict, Supported) and row.isa != ANY and not _runs(row.isa, verdict.path):
        return Rejected(f"has no kernel of its own for {row.isa} here (it would run {verdict.path})")
    return verdict


def _runs(isa: str, path: str) -> bool:
    """Whether a path such as `native/avx512_bf16/w4a16` is of that instruction set."""
    return any(part.startswith(isa) for part in path.split("/"))


def lacks(cpu: CpuFeatures, isa: str) -> str:
    """Why this CPU does not offer an instruction set."""
    missing = cpu.missing(isa)
    if missing:
        return f"this CPU lacks {', '.join(missing)}"
    return f"INT4MOE_MAX_ISA={cpu.max_isa} caps it"


def explain(spec: Spec, cpu: CpuFeatures, run: RunConfig, backend: str = "auto") -> list[tuple[Row, Verdict]]:
    """Every row with its verdict, in order of preference; the first Supported is what `choose` takes."""
    return [(row, ask(row, spec, cpu, run, backend)) for row in TABLE]


def choose(
    spec: Spec,
    cpu: CpuFeatures,
    run: RunConfig,
    backend: Wish = "auto",
    on_unsupported: str = "error",
) -> Choice:
    """The first row that supports the module.

    Args:
        spec, cpu: the module, and the machine.
        run: isa, compute and dtype that are asked for.
        backend: a backend's name, `auto`, or the bands of `Config.bands(name)`: what the configuration says of the
            module, by tokens per expert. Bands replace isa, compute and on_unsupported; dtype stays run's.
        on_unsupported: `error`, or `fallback` to the next row when what is forced cannot run.

    Raises:
        BackendError: what is forced, or every row, rejects it; the message has each reason.
    """
    if isinstance(backend, str):
        return _choose(spec, cpu, run, backend, on_unsupported)
    chosen = []
    for band in backend:
        wish = replace(band.run, dtype=run.dtype)
        for last, prefer in _preferences(spec, cpu, wish, band):
            chosen.append((last, _choose(spec, cpu, wish, band.backend, band.on_unsupported, prefer)))
    if len({(choice.path, choice.run) for _, choice in chosen}) == 1:
        return chosen[0][1]
    from int4moe_ipex.backends.by_tokens import ByTokensBackend

    engine_by_tokens = ByTokensBackend(tuple(chosen))
    rejected = tuple(dict.fromkeys(reason for _, choice in chosen for reason in choice.rejected))
    return Choice(engine_by_tokens, engine_by_tokens.path, rejected, chosen[0][1].run)


def _preferences(
    spec: Spec, cpu: CpuFeatures, run: RunConfig, band: ModuleConfig
) -> Sequence[tuple[int | None, str | None]]:
    """(last number of tokens, name of the row to ask first) within a band: measured on this machine, or nothing."""
    if band.backend == "auto" and run.isa == "auto":
        kind = "experts" if isinstance(spec, ExpertsSpec) else "linear"
        entry = tuning.entry_here(cpu, run.compute, str(run.dtype).removeprefix("torch."), kind)
        if entry is not None:
            return tuning.clip(entry.crossings, band.min_tokens, band.max_tokens)
    return ((band.max_tokens, None),)


def _choose(
    spec: Spec, cpu: CpuFeatures, run: RunConfig, backend: str, on_unsupported: str, prefer: str | None = None
) -> Choice:
    if backend != "auto" and backend not in _BACKENDS:
        raise BackendError(f"unknown backend {backend!r}; known: auto, {', '.join(_BACKENDS)}")
    wishes = [(run, backend)]
    if on_unsupported == "fallback":
        wishes += [
            (run, "auto"),
            (replace(run, isa="auto"), "auto"),
            (replace(run, isa="auto", compute="w4a16"), "auto"),
        ]
    failed: list[str] = []
    for wish, name in dict.fromkeys(wishes):
        if wish.isa != "auto" and not cpu.has(wish.isa):
            failed.append(f"isa {wish.isa} is asked for and {lacks(cpu, wish.isa)}")
            continue
        rejected: list[tuple[str, str]] = []
        # What was measured to be fastest here is asked first; the rest keeps its order.
        for row in sorted(TABLE, key=lambda row: row.name != prefer):
            verdict = ask(row, spec, cpu, wish, name)
            if isinstance(verdict, Supported):
                choice = Choice(
                    engine(row.backend), verdict.path, tuple(rejected), _granted(wish, row, name), verdict.note
                )
                _tell(choice, row, failed, name)
                return choice
            rejected.append((row.name, verdict.reason))
        failed.append("; ".join(f"{row}: {why}" for row, why in rejected if not why.startswith(NOT_ASKED)))
    raise BackendError(f"no row of the table can run {describe(spec)}: " + "; then: ".join(dict.fromkeys(failed)))


def _granted(wish: RunConfig, row: Row, backend: str) -> RunConfig:
    isa = wish.isa if row.isa == ANY else row.isa
    return replace(wish, isa=isa, forced=backend != "auto")


def _tell(choice: Choice, row: Row, failed: list[str], backend: str) -> None:
    """Logs what the user would not expect: a wish that was not granted, or a slow row taken by itself."""
    if failed:
        _warn((choice.path, backend), f"what is asked for cannot run ({failed[0]}); running {choice.path} instead")
    elif backend == "auto" and row.slow:
        native = dict.fromkeys(reason for name, reason in choice.rejected if name.startswith("native/"))
        # Rows for other CPUs or another compute are not what the user misses.
        why = "; ".join([r for r in native if not r.startswith(("this CPU lacks", "computes"))] or native)
        _warn((choice.path, backend), f"running {choice.path}, which is slower than the native core ({why})")


_told: set[tuple[str, str]] = set()


def _warn(subject: tuple[str, str], sentence: str) -> None:
    """Once per subject and process: a model has thousands of modules."""
    if subject not in _told:
        _told.add(subject)
        log.warning(sentence)


def describe(spec: Spec) -> str:
    """A module in words: `128 experts 2048x768, group_size 128, symmetric`."""
    linear = spec.up if isinstance(spec, ExpertsSpec) else spec
    words = [f"group_size {linear.group_size}", "symmetric" if linear.symmetric else "asymmetric"]
    words += ["act-order"] * linear.act_order + ["bias"] * linear.bias
    if isinstance(spec, ExpertsSpec):
        hidden, inner = spec.hidden_size, spec.intermediate_size
        size = f"{spec.num_experts} experts of hidden_size {hidden}, moe_intermediate_size {inner}"
    else:
        size = f"a linear of in_features {spec.in_features}, out_features {spec.out_features}"
    return f"{size}, {', '.join(words)}"
