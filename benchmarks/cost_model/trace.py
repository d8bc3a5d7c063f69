"""The instructions of one call of an AMX or AVX-512 kernel, in the order in which they run: see trace.cpp."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.cost_model.loops import Instruction, functions
from benchmarks.cost_model.pipeline import Step, steps

ROOT = Path(__file__).parents[2]
RECORD = struct.Struct("<17Q")


@dataclass(frozen=True)
class Call:
    """A call of multiply for `tokens` rows of activations and `blocks` blocks of 16 rows by `columns`.

    Attributes:
        gathered: rows of activations lie apart, as they do for gate and up.
        heavy_tails: the matrix is down.
        zeros: zero points are stored.
    """

    compute: str
    tokens: int
    blocks: int
    columns: int
    group: int
    gathered: bool = False
    heavy_tails: bool = False
    zeros: bool = False
    isa: str = "amx"

    @property
    def words(self) -> list[str]:
        flags = (self.gathered, self.heavy_tails, self.zeros)
        numbers = (self.tokens, self.blocks, self.columns, self.group, *map(int, flags))
        return [self.isa, self.compute, *map(str, numbers)]


class Tracer:
    """Builds the program against the core of a build folder and runs it. Needs g++, objdump and AVX-512 VNNI."""

    def __init__(self, build: Path, folder: Path):
        libraries = sorted(build.rglob("libint4moe_core.a"))
        if not libraries:
            sys.exit(f"no libint4moe_core.a in {build}: build with cmake first, or name another folder")
        self.program = folder / "trace"
        source = Path(__file__).with_name("trace.cpp")
        command = [
            "g++",
            "-std=c++17",
            "-O1",
            "-no-pie",
            f"-I{ROOT / 'csrc'}",
            source,
            libraries[0],
            "-o",
            self.program,
        ]
        subprocess.run([*command, "-ldl", "-pthread"], check=True)

    @cached_property
    def code(self) -> dict[int, Instruction]:
        named = functions(self.program).items()
        return {i.address: i for name, body in named if "int4moe::" in name for i in body}

    def steps(self, call: Call) -> list[Step]:
        """
        Raises:
            subprocess.CalledProcessError: this CPU cannot run the call; the program says why.
        """
        out = subprocess.run([self.program, *call.words], check=True, stdout=subprocess.PIPE).stdout
        return list(steps(self.code, RECORD.iter_unpack(out)))
