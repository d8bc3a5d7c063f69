"""Predicted rates of the AVX-512 and AMX kernels on Xeons, from the compiled code: writes benchmarks/cost_model.md.

`python -m benchmarks.cost_model [BUILD]`, where BUILD is a build folder of CMake with the object files (default
build/xeon, which tools/ci-xeon.sh makes). Needs g++, objdump, llvm-mca of LLVM 17 or later (apt-get install llvm-19),
and a CPU with AVX-512 VNNI, on which the AMX kernels are followed; a few minutes.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cost_model import actions, amx
from benchmarks.cost_model.loops import cycles, functions, innermost_loops
from benchmarks.cost_model.trace import Tracer

ROOT = Path(__file__).parents[2]
CPUS = ("icelake-server", "sapphirerapids")
GHZ = 2.5  # of heavy AVX-512 and AMX work on all cores; rates scale with it
GROUP = 128
LINE_BYTES, LINE_WEIGHTS = 64, 128
# Scale, conversion, multiply-add, load and store of one sum at the end of a group: about 6 uops on two vector ports.
GROUP_CYCLES = 3


@dataclass(frozen=True)
class Kernel:
    """A row's inner loop: `dots` instructions named `dot` for one line of one block and one token.

    Attributes:
        tiles: (blocks, tokens) of a call with one token, with some, and with many.
    """

    file: str
    what: str
    dot: str
    dots: int
    tiles: tuple[tuple[int, int], ...]


KERNELS = (
    Kernel("avx512_w4a16", "W4A16 float32", r"vfmadd231ps", 8, ((4, 1), (4, 4), (2, 12))),
    Kernel("avx512_int16", "W4A16 16-bit (int16, VNNI)", r"vpdpwssd", 4, ((1, 1), (2, 4), (2, 6))),
    Kernel("avx512_w4a8", "W4A8 (int8, VNNI)", r"vpdpbusd", 2, ((1, 1), (1, 4), (2, 12))),
)
TILE_TABLE = {"product": actions.PRODUCT, "load": actions.TILE_LOAD, "store": actions.TILE_STORE}


def object_file(build: Path, name: str) -> Path:
    found = sorted(build.rglob(f"{name}.cpp.o"))
    if not found:
        sys.exit(f"no object file of {name} in {build}: build with cmake first, or name another folder")
    return found[0]


def vector_rows(build: Path) -> list[str]:
    rows = []
    for kernel in KERNELS:
        code = functions(object_file(build, kernel.file))
        for blocks, tokens in kernel.tiles:
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


def amx_fields(build: Path) -> dict[str, str]:
    """What the template says of AMX."""
    with tempfile.TemporaryDirectory() as folder:
        tracer = Tracer(build, Path(folder))
        layers = {(c, t): amx.layer(tracer, c, t) for c in amx.NAMES for t in amx.TOKENS}
        target, w4a8 = layers["w4a16", 64], layers["w4a8", 64]
        groups = {group: amx.layer(tracer, "w4a16", group=group) for group in (32, 64)}
        zeros = amx.layer(tracer, "w4a16", zeros=True)
        fine = (amx.predict(tracer, amx.replace(amx.UP, compute="w4a8", heavy_tails=True)), w4a8[1])
        few = [row for compute in amx.NAMES for row in amx.few_tokens(tracer, compute)]
    shares = [amx.layer_share(*target, core) for core in range(len(amx.CORES))]
    return {
        "amx": "\n".join(part.row(GHZ) for parts in layers.values() for part in parts),
        "few": "\n".join(few),
        "share": f"{shares[0]:.0%}",
        "share_in_place": f"{shares[1]:.0%}",
        "share_small": f"{shares[2]:.0%}",
        "share_worst": f"{shares[3]:.0%}",
        "apart": f"{3 / sum(n / part.share(part.apart) for n, part in zip((2, 1), target)):.0%}",
        "share_zeros": f"{amx.layer_share(*zeros):.0%}",
        "layer_w4a16": f"{amx.layer_rate(*target, GHZ):.0f}",
        "layer_w4a8": f"{amx.layer_rate(*w4a8, GHZ):.0f}",
        "layer_fine": f"{amx.layer_rate(*fine, GHZ):.0f}",
        **{f"layer_g{group}": f"{amx.layer_rate(*parts, GHZ):.0f}" for group, parts in groups.items()},
        **{name: str(pair[0]) for name, pair in TILE_TABLE.items()},
        **{f"{name}_latency": str(pair[1]) for name, pair in TILE_TABLE.items()},
    }


def main(arguments: list[str]) -> None:
    build = ROOT / (arguments[0] if arguments else "build/xeon")
    template = (Path(__file__).parent / "template.md").read_text()
    filled = template.format(
        ghz=GHZ, group=GROUP, group_cycles=GROUP_CYCLES, vector="\n".join(vector_rows(build)), **amx_fields(build)
    )
    target = ROOT / "benchmarks/cost_model.md"
    target.write_text(filled)
    print(target)


if __name__ == "__main__":
    main(sys.argv[1:])
