"""What the AMX kernels are predicted to give: calls as the layer makes them, followed and simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.cost_model.actions import PRODUCT
from benchmarks.cost_model.pipeline import Core, Step, simulate
from benchmarks.cost_model.trace import Call, Tracer

BLOCK_ROWS = 16
TOKENS = (16, 32, 64, 96)
NAMES = {"w4a16": "W4A16 (16-bit)", "w4a8": "W4A8"}
# The first is what rates are computed from.
CORES = (Core(), Core(rename=False), Core(reorder=384), Core(reorder=384, rename=False))
# Qwen3-30B-A3B: gate and up in blocks of 4 by 2048 columns, down in blocks of 8 by 768.
UP = Call("w4a16", 64, 4, 2048, 128, gathered=True)
DOWN = Call("w4a16", 64, 8, 768, 128, heavy_tails=True)


def is_tile(step: Step) -> bool:
    return step.mnemonic.startswith(("tile", "tdp"))


def one_after_the_other(followed: list[Step]) -> int:
    """Cycles if tile instructions ran beside no others, nor those of a set of sums beside those of the next."""
    cycles = simulate([s for s in followed if not is_tile(s)], CORES[0])
    sums: list[Step] = []
    for step in filter(is_tile, followed):
        if step.mnemonic == "tilezero" and sums and sums[-1].mnemonic == "tilestored":
            cycles += simulate(sums, CORES[0])
            sums = []
        sums.append(step)
    return cycles + simulate(sums, CORES[0])


@dataclass(frozen=True)
class Predicted:
    """A call with its cycles on each of CORES, and with nothing of it beside anything else (`apart`)."""

    call: Call
    instructions: int
    products: int
    cycles: tuple[int, ...]
    apart: int

    def share(self, cycles: int) -> float:
        """Of the time in which the tile unit works."""
        return self.products * PRODUCT[0] / cycles

    def rate(self, ghz: float) -> float:
        """GFLOP/s of a core."""
        return 2 * BLOCK_ROWS * self.call.blocks * self.call.columns * self.call.tokens * ghz / self.cycles[0]

    def row(self, ghz: float) -> str:
        read = BLOCK_ROWS * self.call.blocks * self.call.columns / 2 * ghz / self.cycles[0]
        shares = " | ".join(f"{self.share(n):.0%}" for n in (*self.cycles, self.apart))
        part = "down" if self.call.heavy_tails else "gate, up"
        per_product = self.instructions / self.products
        return (
            f"| {NAMES[self.call.compute]} | {part} | {self.call.tokens} | {per_product:.0f} | {shares} "
            f"| {self.rate(ghz):.0f} | {read:.1f} |"
        )


def predict(tracer: Tracer, call: Call) -> Predicted:
    followed = tracer.steps(call)
    products = sum(s.mnemonic.startswith("tdp") for s in followed)
    cycles = tuple(simulate(followed, core) for core in CORES)
    return Predicted(call, len(followed), products, cycles, one_after_the_other(followed))


def layer(tracer: Tracer, compute: str, tokens: int = 64, **changes) -> tuple[Predicted, Predicted]:
    """(up, down) of a layer; gate is as up."""
    return tuple(predict(tracer, replace(part, compute=compute, tokens=tokens, **changes)) for part in (UP, DOWN))


def layer_rate(up: Predicted, down: Predicted, ghz: float) -> float:
    """GFLOP/s of gate, up and down together, which are as large as each other."""
    return 3 / (2 / up.rate(ghz) + 1 / down.rate(ghz))


def layer_share(up: Predicted, down: Predicted, core: int = 0) -> float:
    """Of the tile peak over gate, up and down."""
    shares = [part.share(part.cycles[core]) for part in (up, down)]
    return 3 / (2 / shares[0] + 1 / shares[1])


def few_tokens(tracer: Tracer, compute: str) -> list[str]:
    """Cycles of the vector kernel for 2 to 8 tokens and of tiles, which take over at 5, for up."""
    rows = []
    for tokens in (2, 4, 5, 8):
        call = replace(UP, compute=compute, tokens=tokens)
        vector = simulate(tracer.steps(replace(call, isa="avx512")), CORES[0])
        tiles = f"{simulate(tracer.steps(call), CORES[0])}" if tokens > 4 else "-"
        rows.append(f"| {NAMES[compute]} | {tokens} | {vector} | {tiles} |")
    return rows
