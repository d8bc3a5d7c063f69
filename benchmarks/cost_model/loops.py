"""Innermost loops of a compiled function, and llvm-mca's prediction for one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

JUMP = re.compile(r"^j[a-z]+$")


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly, AT&T syntax: address, mnemonic, operands, and where it jumps to or None."""

    address: int
    mnemonic: str
    operands: str
    target: int | None

    @property
    def text(self) -> str:
        # llvm-mca looks at no jump's target.
        return f"{self.mnemonic} 0" if self.target is not None else f"{self.mnemonic} {self.operands}"


@dataclass(frozen=True)
class Loop:
    """A loop without a loop in it."""

    body: tuple[Instruction, ...]

    def count(self, pattern: str) -> int:
        """Instructions whose mnemonic matches the whole pattern."""
        return sum(bool(re.fullmatch(pattern, i.mnemonic)) for i in self.body)

    @property
    def mnemonics(self) -> Counter:
        return Counter(i.mnemonic for i in self.body)

    @property
    def spills(self) -> int:
        """Vector registers that are kept on the stack."""
        return sum("zmm" in i.operands and bool(re.search(r"\(%rsp|\(%rbp", i.operands)) for i in self.body)


def functions(binary: Path) -> dict[str, list[Instruction]]:
    """Every function of an object file by its demangled name.

    Raises:
        FileNotFoundError: no objdump (binutils).
    """
    command = ["objdump", "-d", "--no-show-raw-insn", "-C", "-w", str(binary)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if match := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            current = found.setdefault(match.group(1), [])
        elif match := re.match(r"^\s+([0-9a-f]+):\s+(\S+)\s*(.*)$", line):
            address, mnemonic, operands = match.groups()
            operands = re.sub(r"\s*[#<].*$", "", operands).strip()
            target = int(operands, 16) if JUMP.match(mnemonic) and re.fullmatch("[0-9a-f]+", operands) else None
            current.append(Instruction(int(address, 16), mnemonic, operands, target))
    return found


def innermost_loops(code: list[Instruction]) -> list[Loop]:
    """Regions from a jump's target to the jump that contain no other such region."""
    first = code[0].address
    spans = [(i.target, i.address) for i in code if i.target is not None and first <= i.target <= i.address]
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [Loop(tuple(i for i in code if a <= i.address <= b)) for a, b in sorted(set(inner))]


def find_mca() -> str:
    """llvm-mca of LLVM 17 or later: older ones have no model of Sapphire Rapids.

    Raises:
        FileNotFoundError: there is none; the message says what to install.
    """
    for version in range(25, 16, -1):
        if path := shutil.which(f"llvm-mca-{version}"):
            return path
    raise FileNotFoundError("no llvm-mca of LLVM 17 or later: apt-get install llvm-19")


def cycles(loop: Loop, cpu: str, mca: str | None = None) -> float:
    """Cycles of one iteration in a steady state, with all data in the L1 cache."""
    text = "\n".join(i.text for i in loop.body)
    iterations = 200
    command = [mca or find_mca(), "-mtriple=x86_64", f"-mcpu={cpu}", f"-iterations={iterations}", "-json"]
    done = subprocess.run(command, input=text + "\n", capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout)["CodeRegions"][0]["SummaryView"]
    return summary["TotalCycles"] / iterations
