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


@dataclass(frozen=True)
class Segment:
    """One segment, a group of two blocks for all tokens of an expert: cycles of its parts, and what they give."""

    what: str
    tokens: int
    gathered: bool
    group: int
    products: float
    tile: float
    vector: float

    @property
    def apart(self) -> float:
        """Share of the tile peak when vector instructions never run beside the tile unit."""
        return self.products / (self.tile + self.vector)

    @property
    def beside(self) -> float:
        """Share of the tile peak when they do."""
        return self.products / max(self.tile, self.vector)

    def row(self, ghz: float) -> str:
        codes = 2 * BLOCK_ROWS * self.group
        seconds = max(self.tile, self.vector) / ghz
        return (
            f"| {self.what} | {self.tokens} | {'yes' if self.gathered else 'no'} | {self.products} | {self.tile:.0f} "
            f"| {self.vector:.0f} | {self.apart:.0%} | {self.beside:.0%} | {2 * codes * self.tokens / seconds:.0f} "
            f"| {codes / 2 / seconds:.1f} |"
        )


def segments(w4a16: Path, w4a8: Path, group: int) -> list[Segment]:
    """For 16, 32, 64 and 96 tokens of one expert, gathered or not."""
    kinds = (
        ("W4A16 (bfloat16)", measure(w4a16, "vpternlog[dq]", 3, "vfnmadd.*ps", 1), 32),
        ("W4A8 (int8)", measure(w4a8, "vpdpbusd", 1, "vcvtdq2ps", 1), 64),
    )
    return [
        segment(what, loops, columns, tokens, gathered, group)
        for what, loops, columns in kinds
        for tokens in (16, 32, 64, 96)
        for gathered in (True, False)
    ]


def segment(what: str, loops: Loops, columns: int, tokens: int, gathered: bool, group: int) -> Segment:
    """`columns`: of one tile of weights."""
    steps = group // columns
    token_tiles = tokens // TILE_TOKENS
    products = 2 * steps * token_tiles * TABLE["product"]
    # Passes of up to two token tiles; between two passes nothing of the tile unit is assumed to overlap.
    passes = -(-token_tiles // 2)
    sums = 2 * token_tiles
    exposed = passes * (TABLE["load_latency"] + TABLE["product_latency"]) + sums * TABLE["store"]
    # Fewer than four independent sums wait for each other's latency.
    sums_of_pass = [2 * min(2, token_tiles - 2 * p) for p in range(passes)]
    waiting = sum(max(0, TABLE["product_latency"] - n * TABLE["product"]) * steps for n in sums_of_pass)
    vector = 2 * (group / 8) * loops.decode + sums * TILE_TOKENS * loops.add
    vector += tokens * steps * loops.gather if gathered else 0
    return Segment(what, tokens, gathered, group, products, products + exposed + waiting, vector)
