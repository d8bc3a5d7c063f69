"""Timing on a machine that others use too: batches of calls, thrown away when other processes ran meanwhile.

Standard library only: the scripts in benchmarks/peers run this file in environments that have nothing of ours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FOREIGN_LIMIT = 0.06  # of all the machine's CPU time
BATCH_SECONDS = 0.4


def cpu_seconds() -> tuple[float, float]:
    """(busy seconds of the whole machine, of this process with all its threads) since some fixed moment."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    own = os.times()
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), own.user + own.system


@dataclass(frozen=True)
class Batch:
    """seconds of each call; foreign: the share of the machine's CPU time that others used meanwhile."""

    seconds: list[float]
    foreign: float

    @property
    def clean(self) -> bool:
        return self.foreign < FOREIGN_LIMIT


def run_batch(calls: Sequence[Callable[[], object]], seconds: float = BATCH_SECONDS) -> Batch:
    """Calls them in turn, again and again, for at least `seconds`; the first call warms up and does not count."""
    calls[0]()
    taken: list[float] = []
    busy, own = cpu_seconds()
    start = time.perf_counter()
    index = 1
    while True:
        call = calls[index % len(calls)]
        index += 1
        before = time.perf_counter()
        call()
        after = time.perf_counter()
        taken.append(after - before)
        if after - start > seconds:
            break
    busy_after, own_after = cpu_seconds()
    capacity = (after - start) * (os.cpu_count() or 1)
    foreign = ((busy_after - busy) - (own_after - own)) / capacity
    return Batch(taken, max(0.0, foreign))


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics; q in 0..1, values not empty."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def routing_count(tokens: int) -> int:
    """How many different routings to go through, so that no cache knows the next expert before it is asked for."""
    return max(5, min(61, 256 // tokens))
