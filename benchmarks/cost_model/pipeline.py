"""A core with a tile unit, out of order: the cycles that it takes for the instructions that a kernel really runs.

Instructions are dispatched in the order of the program, a few a cycle, into a reorder buffer of limited size; they
start once what they read is there and their unit is free, and leave in order. Every branch is foreseen, and all data is
in the first-level cache.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.cost_model.actions import GENERAL, PRODUCT, Action, action
from benchmarks.cost_model.loops import Instruction

LINE, WORD = 64, 8
# Ports: two for vector instructions of 512 bits, two for loads, one store of 64 bytes a cycle beside one of less.
PORTS = {"vector": 2, "load": 2, "wide store": 1, "store": 1, "plain": 5}
FUSED_WITH_JUMP = ("cmp", "test", "add", "sub", "dec", "inc", "and")


@dataclass(frozen=True)
class Core:
    """What is assumed of a core: Golden Cove, as far as it is known.

    Attributes:
        width: instructions dispatched a cycle.
        reorder: entries of the reorder buffer.
        waiting: entries for those that have not started.
        rename: whether a tile that is written anew is another register; if not, the write waits for all readers.
    """

    width: int = 6
    reorder: int = 512
    waiting: int = 97
    rename: bool = True


@dataclass(frozen=True)
class Step:
    """An instruction that was run, with the memory of its operand: lines of 64 bytes, and words of 8 if smaller."""

    action: Action
    mnemonic: str
    lines: tuple[int, ...] = ()
    words: tuple[int, ...] = ()


def steps(code: dict[int, Instruction], trace: Iterable[tuple[int, ...]]) -> Iterator[Step]:
    """Follows a trace, (program counter, general registers in the machine's order), through the code."""
    for counter, *values in trace:
        i = code.get(counter)
        if i is None:
            continue
        does = action(i)
        if does.address is None:
            yield Step(does, i.mnemonic)
            continue
        registers = dict(zip(GENERAL, values))
        base, index, scale, displacement = does.address
        at, across = registers.get(base, 0) + displacement, registers.get(index, 0) * scale
        if does.rows:
            touched = {(at + row * across + byte) // LINE for row in range(does.rows) for byte in (0, LINE - 1)}
            yield Step(does, i.mnemonic, tuple(sorted(touched)))
            continue
        at += across
        size = LINE if "zmm" in i.operands and "broadcast" not in i.mnemonic else 32 if "ymm" in i.operands else 8
        words = () if size == LINE else tuple(range(at // WORD, (at + size - 1) // WORD + 1))
        yield Step(does, i.mnemonic, tuple(range(at // LINE, (at + size - 1) // LINE + 1)), words)


class _Unit:
    """Ports that start one operation a cycle each; what comes later in the program may take an earlier free cycle."""

    def __init__(self, ports: int):
        self.ports = ports
        self.taken: dict[int, int] = {}
        self.full: dict[int, int] = {}  # of a full cycle: one further on that may be free

    def start(self, at: int, operations: int = 1) -> tuple[int, int]:
        """The cycles from `at` on of the first and the last operation."""
        first = last = self._one(at)
        for _ in range(operations - 1):
            last = self._one(at)
        return first, last

    def _one(self, at: int) -> int:
        passed = []
        while at in self.full:
            passed.append(at)
            at = self.full[at]
        for t in passed:
            self.full[t] = at
        self.taken[at] = self.taken.get(at, 0) + 1
        if self.taken[at] == self.ports:
            self.full[at] = at + 1
        return at


class _TileUnit:
    """One product at a time; one that comes later in the program may take a gap."""

    def __init__(self):
        self.starts: list[int] = []

    def start(self, at: int, _: int) -> tuple[int, int]:
        for place in range(bisect.bisect_right(self.starts, at - PRODUCT[0]), len(self.starts)):
            if self.starts[place] - at >= PRODUCT[0]:
                break
            at = self.starts[place] + PRODUCT[0]
        bisect.insort(self.starts, at)
        del self.starts[:-64]
        return at, at


class _Memory:
    """When what was stored can be loaded: lines that were stored whole, and words."""

    def __init__(self):
        self.lines: dict[int, int] = {}
        self.words: dict[int, int] = {}
        self.in_line: dict[int, int] = {}  # the latest word of a line

    def ready(self, step: Step) -> int:
        whole = max((self.lines.get(line, 0) for line in step.lines), default=0)
        if step.words:
            return max(whole, *(self.words.get(word, 0) for word in step.words))
        return max((whole, *(self.in_line.get(line, 0) for line in step.lines)))

    def store(self, step: Step, at: int) -> None:
        for line in step.lines:
            if step.words:
                self.in_line[line] = max(self.in_line.get(line, 0), at)
            else:
                self.lines[line] = at
        for word in step.words:
            self.words[word] = at


class _Front:
    """Dispatch in order: a width, a reorder buffer, and entries for what has not started."""

    def __init__(self, core: Core):
        self.core = core
        self.now = self.slots = self.used = self.left = 0
        self.buffer: deque[tuple[int, int]] = deque()
        self.starts: list[int] = []

    def _wait(self, until: int) -> None:
        if until > self.now:
            self.now, self.slots = until, 0

    def dispatch(self, need: int) -> int:
        """The first cycle in which the instruction may start."""
        self.slots += need
        self.now += self.slots // self.core.width
        self.slots %= self.core.width
        while self.buffer and self.used + need > self.core.reorder:
            left, slots = self.buffer.popleft()
            self.used -= slots
            self._wait(left)
        while self.starts and self.starts[0] <= self.now:
            heapq.heappop(self.starts)
        while len(self.starts) >= self.core.waiting:
            self._wait(heapq.heappop(self.starts))
        return self.now + 1

    def keep(self, need: int, first: int, done: int) -> None:
        """It is in the buffer until it and all before it are done."""
        heapq.heappush(self.starts, first)
        self.left = max(self.left, done)
        self.buffer.append((self.left, need))
        self.used += need


def simulate(trace: Iterable[Step], core: Core) -> int:
    """Cycles until the last instruction has left."""
    units: dict[str, _Unit | _TileUnit] = {name: _Unit(ports) for name, ports in PORTS.items()}
    units["tile"] = _TileUnit()
    ready: dict[str, int] = {}
    read_until: dict[str, int] = {}
    memory, front, before = _Memory(), _Front(core), ""
    for step in trace:
        does = step.action
        fused = step.mnemonic.startswith("j") and before.startswith(FUSED_WITH_JUMP)
        before = step.mnemonic
        if fused:
            continue
        earliest = front.dispatch(does.slots)
        around = max((earliest, *(ready.get(r, 0) for r in does.around)))
        at = max((around, *(ready.get(r, 0) for r in does.reads)))
        if not core.rename:
            for r in does.writes:
                if r.startswith("tmm") and r not in does.reads:
                    around = max(around, read_until.get(r, 0), ready.get(r, 0))
                    at = max(at, around)
        first, reading = None, at
        if does.load:
            unit, operations, latency = does.load
            first, last = units[unit].start(max(around, memory.ready(step)), operations)
            at = max(at, last + latency)
        for part in (does.work, does.store):
            if part:
                unit, operations, latency = part
                reading, last = units[unit].start(at, operations)
                first = reading if first is None else first
                at = last + latency
        for r in does.reads:
            read_until[r] = max(
                read_until.get(r, 0), reading + (PRODUCT[0] if does.work and does.work[0] == "tile" else 1)
            )
        for r in does.writes:
            ready[r] = at
        if does.store:
            memory.store(step, at)
        front.keep(does.slots, at if first is None else first, at)
    return front.left
