"""Rows of the core, as (instruction set, compute): which this build has, which this CPU runs, which a wish gets."""

from __future__ import annotations

from int4moe_ipex.backends.base import Rejected, RunConfig
from int4moe_ipex.backends.native.core import BUILD_PROBLEM, FLOAT_TYPES, _native
from int4moe_ipex.cpu import ISA_ORDER, CpuFeatures


def status() -> tuple[bool, str]:
    """Whether the C++ core is built here, and the rows that this CPU runs or what is missing."""
    if _native is None:
        return False, BUILD_PROBLEM
    return True, ", ".join(f"{isa}/{compute}" for (isa, compute), usable in rows().items() if usable)


def rows() -> dict[tuple[str, str], bool]:
    """(isa, compute) of every row of this build, narrow to wide -> whether the core may run it on this CPU."""
    if _native is None:
        return {}
    return {(isa, compute): state == "usable" for isa, compute, state in _native.rows()}


def pick(cpu: CpuFeatures, run: RunConfig) -> tuple[str, str] | Rejected:
    """The widest row for `run` that this build has and this CPU runs, at most run.isa."""
    if _native is None:
        return Rejected(BUILD_PROBLEM)
    if run.isa not in ("auto", *ISA_ORDER):
        return Rejected(f"unknown instruction set {run.isa!r}; known: auto, {', '.join(ISA_ORDER)}")
    if run.dtype not in FLOAT_TYPES:
        return Rejected(f"activations must be bfloat16, float16 or float32, not {run.dtype}")
    if run.isa != "auto" and not cpu.has(run.isa):
        missing = cpu.missing(run.isa)
        lack = f"this CPU lacks {', '.join(missing)}" if missing else f"INT4MOE_MAX_ISA={cpu.max_isa} caps it"
        return Rejected(f"isa {run.isa} is asked for and {lack}")
    known = rows()
    if run.isa == "amx" and known.get(("amx", run.compute)) is False:
        return Rejected("the kernel refuses the permission for AMX tiles (arch_prctl ARCH_REQ_XCOMP_PERM)")
    cap = ISA_ORDER.index(cpu.best_isa if run.isa == "auto" else run.isa)
    # The scalar row is for tests: it is never taken unless it is asked for.
    lowest = 0 if run.isa == "scalar" else 1
    for isa in reversed(ISA_ORDER[lowest : cap + 1]):
        if known.get((isa, run.compute)) and cpu.has(isa):
            return isa, run.compute
    if not any(compute == run.compute for _, compute in known):
        return Rejected(f"computes w4a16 or w4a8, not {run.compute}")
    return Rejected(
        "needs a CPU with AVX2, FMA and F16C" if cap == 0 else f"this build has no {run.compute} row for it"
    )
