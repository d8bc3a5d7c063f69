"""The AMX kernels: tile instructions by Intel's table, the vector loops around them by llvm-mca."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cost_model.loops import Loop, cycles, functions, innermost_loops

# Cycles: Intel 64 and IA-32 Architectures Optimization Reference Manual, the chapter on AMX (Sapphire Rapids).
TABLE = {"product": 16, "product_latency": 52, "load": 8, "load_latency": 45, "store": 16}
CPU = "sapphirerapids"
BLOCK_ROWS, TILE_TOKENS = 16, 16


@dataclass(frozen=True)
class Loops:
    """Cycles of the vector loops: decoding one line of one block, adding one vector of sums, gathering 64 bytes."""

    decode: float
    add: float
    gather: float


def _cheapest(loops: list[Loop], chosen: Callable[[Loop], bool], unit: Callable[[Loop], float]) -> float:
    """Of the copies that the compiler made of one loop (for one and two blocks or token tiles)."""
    return min(cycles(loop, CPU) / unit(loop) for loop in loops if chosen(loop))


def measure(binary: Path, is_decode: str, decodes: int, is_add: str, adds: int) -> Loops:
    """is_decode and is_add: mnemonics that only that loop has, so many for one line, or for one vector of sums."""
    loops = [loop for code in functions(binary).values() if code for loop in innermost_loops(code)]
    stores = [loop for loop in loops if loop.count(r"v.*") and not loop.count(r"td.*")]
    return Loops(
        decode=_cheapest(stores, lambda x: x.count(is_decode) >= decodes, lambda x: x.count(is_decode) / decodes),
        add=_cheapest(stores, lambda x: x.count(is_add) >= adds, lambda x: x.count(is_add) / adds),
        gather=_cheapest(
            stores,
            lambda x: x.count(r"v.*") == x.count(r"vmovdq.*") and x.count("vmovdqu64") > 0,
            lambda x: x.count(r"v.*") / 2,
        ),
    )


def rows(w4a16: Path, w4a8: Path, ghz: float, group: int) -> list[str]:
    """Table rows for 16, 32, 64 and 96 tokens of one expert, gathered or not."""
    kinds = (
        ("W4A16 (bfloat16)", measure(w4a16, "vpternlog[dq]", 3, "vfnmadd.*ps", 1), 32),
        ("W4A8 (int8)", measure(w4a8, "vpdpbusd", 1, "vcvtdq2ps", 1), 64),
    )
    found = []
    for what, loops, columns in kinds:
        for tokens in (16, 32, 64, 96):
            for gathered in (True, False):
                found.append(_row(what, loops, columns, tokens, gathered, ghz, group))
    return found


def _row(what: str, loops: Loops, columns: int, tokens: int, gathered: bool, ghz: float, group: int) -> str:
    """One segment: a group of two blocks for all tokens. `columns`: of one tile."""
    steps = group // columns
    token_tiles = tokens // TILE_TOKENS
    products = 2 * steps * token_tiles * TABLE["product"]
    # Steps of up to two token tiles; between two steps nothing of the tile unit is assumed to overlap.
    passes = -(-token_tiles // 2)
    sums = 2 * token_tiles
    exposed = passes * (TABLE["load_latency"] + TABLE["product_latency"]) + sums * TABLE["store"]
    # Fewer than four independent sums wait for each other's latency.
    waiting = sum(
        max(0, TABLE["product_latency"] - 2 * min(2, token_tiles - 2 * p) * TABLE["product"]) * steps
        for p in range(passes)
    )
    tile = products + exposed + waiting
    vector = 2 * (group / 8) * loops.decode + sums * TILE_TOKENS * loops.add
    vector += tokens * steps * loops.gather if gathered else 0
    apart, together = tile + vector, max(tile, vector)
    operations = 2 * 2 * BLOCK_ROWS * group * tokens
    flops = operations / together * ghz
    read = 2 * BLOCK_ROWS * group / 2 / together * ghz
    return (
        f"| {what} | {tokens} | {'yes' if gathered else 'no'} | {products} | {tile:.0f} | {vector:.0f} "
        f"| {products / apart:.0%} | {products / together:.0%} | {flops:.0f} | {read:.1f} |"
    )
