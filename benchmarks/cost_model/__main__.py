"""Predicted rates of the AVX-512 and AMX kernels on Xeons, from the compiled code: writes benchmarks/cost_model.md.

`python -m benchmarks.cost_model [BUILD]`, where BUILD is a build folder of CMake with the object files (default
build/xeon, which tools/ci-xeon.sh makes). Needs objdump and llvm-mca of LLVM 17 or later (apt-get install llvm-19).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cost_model import amx
from benchmarks.cost_model.loops import cycles, functions, innermost_loops

ROOT = Path(__file__).parents[2]
CPUS = ("icelake-server", "sapphirerapids")
GHZ = 2.5  # of heavy AVX-512 and AMX work on all cores; rates scale with it
GROUP = 128
LINE_BYTES, LINE_WEIGHTS = 64, 128
# Scale, conversion, multiply-add, load and store of one sum at the end of a group: about 6 uops on two vector ports.
GROUP_CYCLES = 3


@dataclass(frozen=True)
class Kernel:
    """A row's inner loop: `dots` instructions named `dot` for one line of one block and one token."""

    file: str
    what: str
    dot: str
    dots: int


KERNELS = (
    Kernel("avx512_w4a16", "W4A16 float32", r"vfmadd231ps", 8),
    Kernel("avx512_int16", "W4A16 16-bit (int16, VNNI)", r"vpdpwssd", 4),
    Kernel("avx512_w4a8", "W4A8 (int8, VNNI)", r"vpdpbusd", 2),
)
TILES = ((4, 1), (4, 4), (2, 12))  # blocks, tokens: one token, the middle, many tokens


def object_file(build: Path, name: str) -> Path:
    found = sorted(build.rglob(f"{name}.cpp.o"))
    if not found:
        sys.exit(f"no object file of {name} in {build}: build with cmake first, or name another folder")
    return found[0]


def vector_rows(build: Path) -> list[str]:
    rows = []
    for kernel in KERNELS:
        code = functions(object_file(build, kernel.file))
        for blocks, tokens in TILES:
            body = next(c for name, c in code.items() if f"tile<{blocks}, {tokens}>" in name)
            loop = max(innermost_loops(body), key=lambda found: found.count(kernel.dot))
            lines = loop.count(kernel.dot) / (kernel.dots * blocks * tokens)
            unit = lines * blocks  # lines of one block in an iteration
            instructions = len(loop.body) / (unit * LINE_WEIGHTS)
            for cpu in CPUS:
                per_line = cycles(loop, cpu) / unit + GROUP_CYCLES * tokens / (GROUP / 8)
                read = LINE_BYTES * (1 + 2 * 16 / (GROUP / 8 * LINE_BYTES)) / per_line * GHZ
                flops = 2 * LINE_WEIGHTS * tokens / per_line * GHZ
                rows.append(
                    f"| {kernel.what} | {tokens} | {cpu} | {instructions:.2f} | {loop.spills} | {per_line:.1f} "
                    f"| {read:.1f} | {flops:.0f} |"
                )
    return rows


def main(arguments: list[str]) -> None:
    build = ROOT / (arguments[0] if arguments else "build/xeon")
    template = (Path(__file__).parent / "template.md").read_text()
    segments, fine = amx.segments(object_file(build, "amx_w4a16"), object_file(build, "amx_w4a8"), GROUP)
    at_target = [s for s in segments if s.tokens == 64 and s.what.startswith("W4A16")]
    filled = template.format(
        ghz=GHZ,
        group=GROUP,
        group_cycles=GROUP_CYCLES,
        vector="\n".join(vector_rows(build)),
        amx="\n".join(s.row(GHZ) for s in segments),
        beside=f"{min(s.beside for s in at_target):.0%}",
        layer_w4a16=f"{amx.layer_rate(segments, 'W4A16 (bfloat16)', 64, GHZ):.0f}",
        layer_w4a8=f"{amx.layer_rate(segments, 'W4A8 (int8)', 64, GHZ):.0f}",
        layer_fine=f"{amx.layer_rate(fine, 'W4A8 (int8)', 64, GHZ):.0f}",
        apart=f"{min(s.apart for s in at_target):.0%} to {max(s.apart for s in at_target):.0%}",
        **amx.TABLE,
    )
    target = ROOT / "benchmarks/cost_model.md"
    target.write_text(filled)
    print(target)


if __name__ == "__main__":
    main(sys.argv[1:])
