"""Threads, CPUs and NUMA memory of this process, as the configuration's `threads` section says.

Applied once, before weights are packed: memory lands where the thread that first writes it is allowed to take it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from int4moe_ipex.config import Threads, parse_cpus
from int4moe_ipex.errors import ConfigError

NODES = Path("/sys/devices/system/node")
# include/uapi/linux/mempolicy.h, and the x86-64 system call table.
MPOL_BIND, MPOL_INTERLEAVE = 2, 3
SYS_SET_MEMPOLICY = 238


def nodes() -> dict[int, set[int]]:
    """NUMA node -> its CPUs, for nodes that have any; one node 0 where the kernel tells nothing."""
    found = {}
    for folder in NODES.glob("node[0-9]*"):
        try:
            text = (folder / "cpulist").read_text().strip()
        except OSError:
            continue
        if text:
            found[int(folder.name[4:])] = parse_cpus(text)
    return dict(sorted(found.items())) or {0: set(range(os.cpu_count() or 1))}


def apply(threads: Threads) -> None:
    """Binds the process and sets the number of threads of torch's (and so the native core's) OpenMP pool.

    Raises:
        ConfigError: a CPU or node that this process may not use, or a memory policy that the kernel refuses.
    """
    cpus = None
    if threads.numa_node != "none":
        known = nodes()
        if threads.numa_node not in known:
            raise ConfigError(f"threads.numa_node {threads.numa_node}: this machine has {_listed(known)}")
        cpus = known[threads.numa_node]
    elif threads.cpus is not None:
        cpus = parse_cpus(threads.cpus)
    if cpus is not None:
        _bind(cpus)
    if threads.numa_node != "none":
        _policy(MPOL_BIND, {threads.numa_node}, "threads.numa_node")
    elif threads.memory == "interleave":
        _policy(MPOL_INTERLEAVE, set(nodes()), "threads.memory interleave")
    count = threads.count if threads.count != "auto" else None if cpus is None else len(cpus)
    if count is not None:
        import torch

        torch.set_num_threads(count)


def _bind(cpus: set[int]) -> None:
    allowed = os.sched_getaffinity(0)
    if not cpus <= allowed:
        raise ConfigError(
            f"threads: CPUs {_listed(cpus - allowed)} are not there for this process, which may use {_listed(allowed)}"
        )
    # Threads that exist already (an OpenMP pool that has run) do not inherit: each is bound by itself.
    for task in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(task), cpus)
        except ProcessLookupError:
            continue


def _policy(mode: int, on: set[int], key: str) -> None:
    mask = sum(1 << node for node in on)
    words = (ctypes.c_ulong * 16)(*((mask >> (64 * i)) & (2**64 - 1) for i in range(16)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(SYS_SET_MEMPOLICY, mode, ctypes.byref(words), ctypes.c_ulong(16 * 64)):
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"{key}: the kernel refuses a memory policy ({reason}); containers need CAP_SYS_NICE for it")


def _listed(numbers) -> str:
    return ", ".join(str(n) for n in sorted(numbers)) or "none"
