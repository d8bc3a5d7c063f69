"""What this machine's CPU can do, as far as choosing a backend needs it.

`detect()` reads /proc/cpuinfo (which hides what the hypervisor or XCR0 hides); `INT4MOE_MAX_ISA` caps it. The
native core checks CPUID, XCR0 and the AMX permission again by itself before it runs an instruction.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from int4moe_ipex.errors import ConfigError

# Ordered from narrow to wide; each needs all flags of its row (Linux's names).
ISA_FLAGS: dict[str, frozenset[str]] = {
    "scalar": frozenset(),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx2_vnni": frozenset({"avx2", "fma", "f16c", "avx_vnni"}),
    "avx512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}),
    "amx": frozenset(
        {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} | {"amx_tile", "amx_int8"}
    ),
}
ISA_ORDER = tuple(ISA_FLAGS)
# arch/x86/include/uapi/asm/prctl.h; 158 is arch_prctl, 18 the state component of AMX tile data.
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class CpuFeatures:
    """model_name, flags (Linux's names), and the cap that INT4MOE_MAX_ISA puts on `isas`."""

    model_name: str
    flags: frozenset[str]
    max_isa: str = "amx"

    def has(self, isa: str) -> bool:
        """Whether this CPU has the instruction set and the cap allows it."""
        if isa not in ISA_FLAGS:
            raise ConfigError(f"unknown instruction set {isa!r}; known: {', '.join(ISA_ORDER)}")
        return ISA_ORDER.index(isa) <= ISA_ORDER.index(self.max_isa) and ISA_FLAGS[isa] <= self.flags

    def missing(self, isa: str) -> list[str]:
        """The flags that `isa` needs and this CPU lacks, sorted."""
        return sorted(ISA_FLAGS[isa] - self.flags)

    @property
    def best_isa(self) -> str:
        return max((isa for isa in ISA_ORDER if self.has(isa)), key=ISA_ORDER.index)


@functools.cache
def _cpuinfo() -> tuple[str, frozenset[str]]:
    name, flags = "unknown CPU", frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name, flags
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags = frozenset(value.split())
            break
    return name, flags


def detect() -> CpuFeatures:
    """The machine's features, capped by the environment variable INT4MOE_MAX_ISA.

    Raises:
        ConfigError: INT4MOE_MAX_ISA names no known instruction set.
    """
    name, flags = _cpuinfo()
    cap = os.environ.get("INT4MOE_MAX_ISA", "amx").lower() or "amx"
    if cap not in ISA_FLAGS:
        raise ConfigError(f"INT4MOE_MAX_ISA={cap!r} is not one of {', '.join(ISA_ORDER)}")
    return CpuFeatures(model_name=name, flags=flags, max_isa=cap)


def amx_permitted() -> bool:
    """Asks the kernel for AMX tile data, once and for the process, as every user of AMX has to."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
