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
    """Cycles of the vector loops: decoding one line of one block, adding one vector of sums, gathering 64 bytes.

    Attributes:
        add: where a group begins.
        more: for a further segment of the group.
    """

    decode: float
    add: float
    gather: float
    more: float = 0


def _cheapest(loops: list[Loop], chosen: Callable[[Loop], bool], unit: Callable[[Loop], float]) -> float:
    """Of the copies that the compiler made of one loop (for one and two blocks or token tiles)."""
    return min((cycles(loop, CPU) / unit(loop) for loop in loops if chosen(loop)), default=0)


def measure(binary: Path, is_decode: str, decodes: int, is_add: str, fused: int) -> Loops:
    """The loops of a kernel by what only they have.

    Args:
        is_decode: mnemonics of decoding, `decodes` of them for one line.
        is_add: a mnemonic that occurs once for each vector of sums that is added, with `fused` multiply-adds where a
            group begins and one less in its further segments.
    """
    loops = [loop for code in functions(binary).values() if code for loop in innermost_loops(code)]
    vector = [loop for loop in loops if loop.count(r"v.*") and not loop.count(r"td.*")]

    def adds(fused_each: int) -> float:
        return _cheapest(
            vector,
            lambda x: x.count(is_add) > 0 and x.count(r"vfn?madd.*ps") == fused_each * x.count(is_add),
            lambda x: x.count(is_add),
        )

    return Loops(
        decode=_cheapest(vector, lambda x: x.count(is_decode) >= decodes, lambda x: x.count(is_decode) / decodes),
        add=adds(fused),
        more=adds(fused - 1),
        gather=_cheapest(
            vector,
            lambda x: x.count(r"v.*") == x.count(r"vmovdq.*") and x.count("vmovdqu64") > 0,
            lambda x: x.count(r"v.*") / 2,
        ),
    )


@dataclass(frozen=True)
class Segment:
    """A group of two blocks for all tokens of an expert: cycles of its parts, and what they give."""

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

    def rate(self, ghz: float) -> float:
        """GFLOP/s of a core when vector instructions run beside the tile unit."""
        return 4 * BLOCK_ROWS * self.group * self.tokens * ghz / max(self.tile, self.vector)

    def row(self, ghz: float) -> str:
        codes = 2 * BLOCK_ROWS * self.group
        seconds = max(self.tile, self.vector) / ghz
        return (
            f"| {self.what} | {self.tokens} | {'yes' if self.gathered else 'no'} | {self.products} | {self.tile:.0f} "
            f"| {self.vector:.0f} | {self.apart:.0%} | {self.beside:.0%} | {self.rate(ghz):.0f} "
            f"| {codes / 2 / seconds:.1f} |"
        )


def segments(w4a16: Path, w4a8: Path, group: int) -> tuple[list[Segment], list[Segment]]:
    """For 16, 32, 64 and 96 tokens of one expert; gathered (gate and up) or not (down).

    Returns:
        What the kernels do, and W4A8 as it would be with segments of 64 columns in gate and up as well.
    """
    bfloat16 = measure(w4a16, "vpternlog[dq]", 3, "vfnmadd.*ps", 2)
    int8 = measure(w4a8, "vpaddb", 2, "vcvtdq2ps", 2)
    cases = [(tokens, gathered) for tokens in (16, 32, 64, 96) for gathered in (True, False)]
    wide = [segment("W4A16 (bfloat16)", bfloat16, 32, tokens, gathered, group) for tokens, gathered in cases]
    name, fine = "W4A8 (int8)", group // 64
    done = [segment(name, int8, 64, tokens, gathered, group, 1 if gathered else fine) for tokens, gathered in cases]
    return wide + done, [segment(name, int8, 64, tokens, gathered, group, fine) for tokens, gathered in cases]


def layer_rate(found: list[Segment], what: str, tokens: int, ghz: float) -> float:
    """GFLOP/s of gate, up and down together."""
    up, down = (next(s for s in found if (s.what, s.tokens, s.gathered) == (what, tokens, g)) for g in (True, False))
    return 3 / (2 / up.rate(ghz) + 1 / down.rate(ghz))


def segment(what: str, loops: Loops, columns: int, tokens: int, gathered: bool, group: int, parts: int = 1) -> Segment:
    """`columns`: of one tile of weights; `parts`: segments of the group, each with sums of its own."""
    steps = group // parts // columns
    token_tiles = tokens // TILE_TOKENS
    products = 2 * steps * token_tiles * TABLE["product"]
    # Passes of up to two token tiles; between two passes nothing of the tile unit is assumed to overlap.
    passes = -(-token_tiles // 2)
    sums = 2 * token_tiles
    exposed = passes * (TABLE["load_latency"] + TABLE["product_latency"]) + sums * TABLE["store"]
    # Fewer than four independent sums wait for each other's latency.
    sums_of_pass = [2 * min(2, token_tiles - 2 * p) for p in range(passes)]
    waiting = sum(max(0, TABLE["product_latency"] - n * TABLE["product"]) * steps for n in sums_of_pass)
    tile = parts * (products + exposed + waiting)
    vector = 2 * (group / 8) * loops.decode + sums * TILE_TOKENS * (loops.add + (parts - 1) * loops.more)
    vector += tokens * parts * steps * loops.gather if gathered else 0
    return Segment(what, tokens, gathered, group, parts * products, tile, vector)
