"""What one instruction asks of a core: units, registers, memory. Of x86-64 in AT&T syntax, as the kernels use it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from benchmarks.cost_model.loops import Instruction

TILE_ROWS = 16
GENERAL = ("rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", *(f"r{i}" for i in range(8, 16)))
# Cycles of a load from the first-level cache and of a store until a load can have it.
LOAD, VECTOR_LOAD, STORE = 5, 7, 5
# Intel's table of the tile instructions (Optimization Reference Manual, Sapphire Rapids): (cycles, latency).
PRODUCT, TILE_LOAD, TILE_STORE = (16, 52), (8, 45), (16, 20)

_NAMES = {n: r for r in GENERAL[:8] for n in (r, "e" + r[1:], r[1:], r[1:].rstrip("x") + "l")}
_NAMES |= {f"r{i}{s}": f"r{i}" for i in range(8, 16) for s in ("", "d", "w", "b")}
_MEMORY = re.compile(r"(?P<disp>-?0x[0-9a-f]+|-?\d+)?\((?P<base>%\w+)?(?:,(?P<index>%\w+)(?:,(?P<scale>\d))?)?\)")
_VECTOR_STORES = re.compile(r"v?mov.*|vp?extract.*|vpmov.*|vcvtps2ph")
_VECTOR_LOADS = re.compile(r"v?mov.*|vp?broadcast.*")
_KEEPS_RESULT = re.compile(r"vfn?m(add|sub)\d.*|vpdp.*|vpternlog.*|vperm[ti]2.*")
_LATENCIES = ((r"vpmull[dq]", 10), (r"vpdp.*", 5), (r"v(p?mul|pmadd|f|cvt|add|sub|max|min|rndscale).*", 4))
_SLOW = {"imul": 3, "idiv": 14, "div": 14}


@dataclass(frozen=True)
class Action:
    """What an instruction does.

    Attributes:
        slots: of dispatch and of the reorder buffer.
        load, work, store: (unit, operations, cycles from the last of them to the result), or None. What is loaded is
            worked on, and the result stored.
        reads, around, writes: registers: operands, those of the address, results.
        address: the memory operand as (base, index, scale, displacement).
        rows: that many rows of 64 bytes, `index` apart; 0 for one operand.
    """

    slots: int
    load: tuple[str, int, int] | None = None
    work: tuple[str, int, int] | None = None
    store: tuple[str, int, int] | None = None
    reads: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    address: tuple[str, str, int, int] | None = None
    rows: int = 0


def register(name: str) -> str | None:
    """The register that `%name` is a part of; vectors are v0 to v31."""
    name = re.sub(r"\{.*", "", name).lstrip("%")
    if match := re.fullmatch(r"[xyz]mm(\d+)", name):
        return f"v{match.group(1)}"
    return name if re.fullmatch(r"tmm\d|k\d", name) else _NAMES.get(name)


@cache
def action(i: Instruction) -> Action:
    parts = [part for part in re.split(r",(?![^(]*\))", i.operands) if part]
    memory = next((m for p in parts if not p.startswith("%") and (m := _MEMORY.search(p))), None)
    address, around = None, ()
    if memory:
        base, index = (register(memory[g]) or "" if memory[g] else "" for g in ("base", "index"))
        around = tuple(r for r in (base, index) if r)
        address = (base, index, int(memory["scale"] or 1), int(memory["disp"] or "0", 0))
    found = [r for p in parts if not _MEMORY.search(p) and (r := register(p))]
    if i.mnemonic.startswith(("tile", "tdp", "ldtile")):
        return _tile(i.mnemonic, found, around, address)
    if i.mnemonic.startswith(("v", "k")):
        return _vector(i, parts, found, around, address)
    return _plain(i.mnemonic, parts, found, around, address)


def _tile(name: str, found: list[str], around: tuple[str, ...], address) -> Action:
    if name.startswith("tileload"):
        load = ("load", TILE_ROWS, TILE_LOAD[1] - TILE_LOAD[0] + 1)
        return Action(TILE_ROWS, load=load, around=around, writes=tuple(found), address=address, rows=TILE_ROWS)
    if name.startswith("tilestore"):
        store = ("wide store", TILE_ROWS, TILE_STORE[1] - TILE_STORE[0] + 1)
        return Action(TILE_ROWS, store=store, reads=tuple(found), around=around, address=address, rows=TILE_ROWS)
    if name.startswith("tdp"):
        return Action(1, work=("tile", 1, PRODUCT[1]), reads=tuple(found), writes=(found[-1],))
    return Action(1, writes=tuple(found))  # tilezero, and the configuration


def _vector(i: Instruction, parts: list[str], found: list[str], around: tuple[str, ...], address) -> Action:
    name = i.mnemonic
    stores = address is not None and not parts[-1].startswith("%") and bool(_VECTOR_STORES.fullmatch(name))
    masks = [f"k{m}" for m in re.findall(r"\{%k(\d)\}", i.operands)]
    zeroes = re.fullmatch(r"vp?xor.*", name) and len(found) == 3 and len(set(found)) == 1
    reads = list(found) if stores or _KEEPS_RESULT.fullmatch(name) else found[:-1]
    if masks and "{z}" not in i.operands and not stores:
        reads += found[-1:]
    load = ("load", 1, VECTOR_LOAD) if address and not stores else None
    moved = not masks and name.startswith("vmov") and all(r.startswith("v") for r in found)
    idle = zeroes or (address and _VECTOR_LOADS.fullmatch(name)) or (not address and moved) or not found
    work, slots = None, 1
    if not idle:
        latency = next((n for pattern, n in _LATENCIES if re.fullmatch(pattern, name)), 1)
        operations = 2 if re.fullmatch(r"vpmull[dq]", name) else 1
        slots = operations
        work = ("vector", operations, 3 if any(r in GENERAL for r in found) else latency)
    store = ("wide store" if "%zmm" in i.operands else "store", 1, STORE) if stores else None
    reads = () if zeroes else tuple(dict.fromkeys([*reads, *masks]))
    return Action(slots, load, work, store, reads, around, () if stores else tuple(found[-1:]), address)


def _plain(name: str, parts: list[str], found: list[str], around: tuple[str, ...], address) -> Action:
    if name.startswith("prefetch"):
        return Action(1, load=("load", 1, 1), around=around)
    if name == "lea":
        return Action(1, work=("plain", 1, 1), reads=around, writes=tuple(found))
    if name in ("push", "call"):
        return Action(1, store=("store", 1, STORE), reads=tuple(found))
    if name in ("pop", "ret"):
        return Action(1, load=("load", 1, LOAD), writes=tuple(found))
    if name.startswith(("nop", "endbr", "leave", "data16", "cs")) or (name == "xchg" and len(set(found)) == 1):
        return Action(1)
    if name.startswith("j"):
        return Action(1, work=("plain", 1, 1), reads=("flags",))
    moves = bool(re.fullmatch(r"mov.*|set.*", name))
    compares = name.startswith(("cmp", "test", "bt"))
    stores = address is not None and not parts[-1].startswith("%") and not compares
    zeroes = name == "xor" and len(found) == 2 and found[0] == found[1]
    reads = [] if zeroes else list(found[:-1] if moves and not stores else found)
    if re.match(r"cmov|set|adc|sbb", name):
        reads.append("flags")
    writes = [] if stores or compares else found[-1:]
    if not moves and not name.startswith(("cmov", "not")):
        writes.append("flags")
    idle = zeroes or (moves and address is not None)
    return Action(
        4 if name in ("idiv", "div") else 1,
        ("load", 1, LOAD) if address and not (stores and moves) else None,
        None if idle else ("plain", 1, _SLOW.get(name, 1)),
        ("store", 1, STORE) if stores else None,
        tuple(dict.fromkeys(reads)),
        around,
        tuple(writes),
        address,
    )
