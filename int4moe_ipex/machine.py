"""Facts about this machine for people: caches, NUMA, memory, and what blocks each instruction set.

Nothing here decides what runs (cpu.py and the backends do); `int4moe doctor` shows it.
"""

from __future__ import annotations

import os
import platform
import struct
from dataclasses import dataclass
from pathlib import Path

from int4moe_ipex.cpu import ISA_ORDER, CpuFeatures, amx_permitted
from int4moe_ipex.threads import nodes

SYSTEM = Path("/sys/devices/system")

# Linux flag -> (CPUID leaf, subleaf, register, bit), for what an ISA of ours needs (Intel SDM volume 2A, CPUID).
CPUID_BITS = {
    "avx2": (7, 0, "ebx", 5),
    "avx512f": (7, 0, "ebx", 16),
    "avx512dq": (7, 0, "ebx", 17),
    "avx512bw": (7, 0, "ebx", 30),
    "avx512vl": (7, 0, "ebx", 31),
    "avx512_vnni": (7, 0, "ecx", 11),
    "amx_tile": (7, 0, "edx", 24),
    "amx_int8": (7, 0, "edx", 25),
    "avx_vnni": (7, 1, "eax", 4),
}
# Intel family 6 models with AMX: Sapphire Rapids, Emerald Rapids, Granite Rapids and its D line.
INTEL_AMX_MODELS = {143: "Sapphire Rapids", 207: "Emerald Rapids", 173: "Granite Rapids", 174: "Granite Rapids-D"}


@dataclass(frozen=True)
class IsaVerdict:
    """Whether one instruction set can be used here; blocked_by is cpu, hypervisor, kernel, permission, cap or None."""

    isa: str
    usable: bool
    blocked_by: str | None = None
    reason: str = ""


def isas(cpu: CpuFeatures) -> list[IsaVerdict]:
    """Each instruction set of cpu.ISA_ORDER with what blocks it."""
    return [_isa(cpu, isa) for isa in ISA_ORDER]


def _isa(cpu: CpuFeatures, isa: str) -> IsaVerdict:
    missing = cpu.missing(isa)
    if missing:
        return IsaVerdict(isa, False, *_missing(cpu, isa, missing))
    if isa == "amx" and not amx_permitted():
        reason = "the kernel refuses the permission for AMX tiles (arch_prctl ARCH_REQ_XCOMP_PERM)"
        return IsaVerdict(isa, False, "permission", reason)
    if not cpu.has(isa):
        return IsaVerdict(isa, False, "cap", f"INT4MOE_MAX_ISA={cpu.max_isa} caps it")
    return IsaVerdict(isa, True)


def _missing(cpu: CpuFeatures, isa: str, missing: list[str]) -> tuple[str, str]:
    shown = ", ".join(missing)
    raw = cpuid_flags()
    if raw is not None and set(missing) <= raw:
        return "kernel", f"CPUID has {shown}, and Linux has it off (XCR0, or a boot option such as clearcpuid)"
    vendor, family, model = cpu_model()
    hidden = isa == "amx" and vendor == "GenuineIntel" and family == 6 and model in INTEL_AMX_MODELS
    if hidden:
        return "hypervisor", f"{INTEL_AMX_MODELS[model]} has {shown}, and the hypervisor hides it: ask for it in the VM"
    if "hypervisor" in cpu.flags:
        return "hypervisor", f"this guest does not see {shown}: the CPU lacks it, or the hypervisor hides it"
    return "cpu", f"this CPU lacks {shown}"


def cpuid_flags() -> set[str] | None:
    """Which of CPUID_BITS the CPU itself reports, through Linux's cpuid device; None where it cannot be read."""
    try:
        with open("/dev/cpu/0/cpuid", "rb", buffering=0) as device:
            registers = {}
            for leaf, subleaf in {(leaf, subleaf) for leaf, subleaf, _, _ in CPUID_BITS.values()}:
                device.seek(leaf | subleaf << 32)
                registers[leaf, subleaf] = dict(
                    zip(("eax", "ebx", "ecx", "edx"), struct.unpack("<4I", device.read(16)))
                )
    except (OSError, struct.error):
        return None
    return {flag for flag, (leaf, sub, reg, bit) in CPUID_BITS.items() if registers[leaf, sub][reg] >> bit & 1}


def cpu_model() -> tuple[str, int, int]:
    """(vendor_id, cpu family, model) of /proc/cpuinfo; ("", 0, 0) where there is none."""
    fields: dict[str, str] = {}
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if not line.strip():
            break
        fields[key.strip()] = value.strip()
    return fields.get("vendor_id", ""), int(fields.get("cpu family", 0)), int(fields.get("model", 0))


def caches() -> list[dict[str, object]]:
    """Data and unified caches of the first CPU: level, bytes, and how many CPUs share one."""
    from int4moe_ipex.config import parse_cpus

    found = []
    for folder in sorted((SYSTEM / "cpu/cpu0/cache").glob("index*")):
        kind, size = _read(folder / "type"), _read(folder / "size")
        if kind in ("Data", "Unified") and size:
            shared = _read(folder / "shared_cpu_list")
            unit = {"K": 1024, "M": 1024**2, "G": 1024**3}.get(size[-1], 1)
            found.append(
                {
                    "level": int(_read(folder / "level") or 0),
                    "bytes": int(size.rstrip("KMG")) * unit,
                    "shared_by_cpus": len(parse_cpus(shared)) if shared else 1,
                }
            )
    return found


def memory() -> dict[str, int]:
    """Bytes of memory, total and available."""
    values = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        values[key] = value.split()
    return {
        "total": int(values.get("MemTotal", ["0"])[0]) * 1024,
        "available": int(values.get("MemAvailable", ["0"])[0]) * 1024,
    }


def huge_pages() -> str:
    """The setting of transparent huge pages: always, madvise or never; weights use them with the first two."""
    text = _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return next((word.strip("[]") for word in text.split() if word.startswith("[")), "unknown")


def hypervisor(cpu: CpuFeatures) -> str | None:
    """The hypervisor's name as far as it tells, `unknown`, or None on bare metal."""
    if "hypervisor" not in cpu.flags:
        return None
    vendor = _read(Path("/sys/devices/virtual/dmi/id/sys_vendor"))
    return vendor or _read(Path("/sys/hypervisor/type")) or "unknown"


def summary(cpu: CpuFeatures) -> dict[str, object]:
    """Everything but the instruction sets, as plain data."""
    vendor, family, model = cpu_model()
    return {
        "model_name": cpu.model_name,
        "vendor": vendor,
        "family": family,
        "model": model,
        "hypervisor": hypervisor(cpu),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "numa_nodes": {str(node): len(cpus) for node, cpus in nodes().items()},
        "caches": caches(),
        "memory_bytes": memory(),
        "huge_pages": huge_pages(),
        "kernel": platform.release(),
    }


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def peak_rss_bytes() -> int:
    """VmHWM of this process; /proc's figure, which starts anew at exec, unlike getrusage's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
