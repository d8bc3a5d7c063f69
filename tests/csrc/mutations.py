"""Breaks each kernel file on purpose, one line at a time, and expects the C++ test program to fail.

`python -m tests.csrc.mutations [NAME...]` builds the program once per mutation in a copy of the sources and runs it:
here when this CPU has the instructions, else on the emulated Xeon, all of those in one boot. Exit status 1 when a
mutation survives. Needs cmake and a C++ compiler; a few minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ISA = ROOT / "csrc/isa"


@dataclass(frozen=True)
class Mutation:
    """Replaces `old`, which occurs once in csrc/isa/`file`, by `new`; rows of `isa` have to notice."""

    file: str
    old: str
    new: str
    isa: str


MUTATIONS = (
    Mutation("scalar.cpp", "float(-zero_at(zeros, g, r)) * sums[g]", "float(zero_at(zeros, g, r)) * sums[g]", "scalar"),
    Mutation("scalar.cpp", "-zero_at(zeros, s.group, r)", "-zero_at(zeros, s.index, r)", "scalar"),
    Mutation("avx2_w4a16.cpp", "0x1p-12f", "0x1p-11f", "avx2"),
    Mutation("avx2_int16.cpp", 'INT4MOE_PAIR("8") TOKENS', 'INT4MOE_PAIR("7") TOKENS', "avx2"),
    Mutation("avx2_int16.cpp", "add_shifted(sums[0], sums256, 8)", "add_shifted(sums[0], sums256, 7)", "avx2"),
    Mutation("avx2_int16.cpp", "nearest(p.codes + stretch, last)", "last", "avx2"),
    Mutation("avx2_w4a8.cpp", "_mm256_srli_epi16(line, 4)", "_mm256_srli_epi16(line, 3)", "avx2"),
    Mutation("avx2_w4a8.cpp", "-8.0f * float(sum_lanes(sum))", "-7.0f * float(sum_lanes(sum))", "avx2"),
    Mutation("avx2_w4a8.cpp", "for (int l = 1;; ++l) {", "for (int l = 2;; ++l) {", "avx2"),
    Mutation("avx2_w4a8.cpp", "dot(sums[t][1], w1, v)", "dot(sums[t][1], w0, v)", "avx2_vnni"),
    Mutation("avx2_common.h", "_mm256_set1_ps(1.0f / 24)", "_mm256_set1_ps(1.0f / 23)", "avx2"),
    Mutation(
        "avx2_attention.cpp",
        "_mm256_permute2f128_ps(low, high, 0x31)",
        "_mm256_permute2f128_ps(low, high, 0x30)",
        "avx2",
    ),
    Mutation("avx512_attention.cpp", "_mm512_shuffle_f32x4(a, b, 0xdd)", "_mm512_shuffle_f32x4(a, b, 0xcd)", "avx512"),
    Mutation("avx2_dense.cpp", "short(0x87ff)", "short(0x8fff)", "avx2"),
    Mutation("avx512_dense.cpp", "_mm512_set1_epi16(15)", "_mm512_set1_epi16(7)", "avx512"),
    Mutation("dense_rows.h", " + beside(*w.compact, n, x)", "", "avx2"),
    Mutation("dense_rows.h", "+ within % 2 * Vector::kLanes + within / 2", "+ within", "avx2"),
    Mutation("attention_one.h", "scores[i] = kNone", "scores[i] = 0", "avx2"),
    Mutation("attention_rows.h", "sum = sum * factor +", "sum = sum +", "avx2"),
    Mutation("avx2_elementwise.cpp", "second[i] = b * c + a * s", "second[i] = b * c - a * s", "avx2"),
    Mutation("avx2_elementwise.cpp", "greatest(p + g * size, size)", "greatest(p, size)", "avx2"),
    Mutation("avx512_w4a16.cpp", "_mm512_srli_epi32(line, 28)", "_mm512_srli_epi32(line, 27)", "avx512"),
    Mutation("avx512_int16.cpp", "_mm512_srli_epi16(line, 12)", "_mm512_srli_epi16(line, 11)", "avx512"),
    Mutation("avx512_w4a8.cpp", "[b][t], high[b], c)", "[b][t], high[b], a)", "avx512"),
    Mutation("avx512_common.h", "_mm512_set1_ps(1.0f / 24)", "_mm512_set1_ps(1.0f / 23)", "avx512"),
    Mutation("w4a8_rows512.h", "127.0f / largest", "126.0f / largest", "avx512"),
    Mutation("w4a8_rows512.h", "m.heavy_tails ? 8 : 16", "m.heavy_tails ? 16 : 16", "avx512"),
    Mutation("int16_rows512.h", "32767.0f / largest", "32766.0f / largest", "avx512"),
    Mutation("amx_w4a16.cpp", "15u * one", "14u * one", "amx"),
    Mutation("amx_w4a16.cpp", "s.group < stretch ? kEnds | kFirst : kEnds", "kEnds", "amx"),
    Mutation("amx_w4a16.cpp", "_mm512_slli_epi32(codes, 15)", "_mm512_slli_epi32(codes, 14)", "amx"),
    Mutation("amx_w4a8.cpp", "_mm512_slli_epi32(codes, 7)", "_mm512_slli_epi32(codes, 6)", "amx"),
    Mutation("amx_common.h", "{index_++, group_,", "{group_, group_,", "amx"),
    Mutation("amx_common.h", "_tile_stored(2, sums + second, 64)", "_tile_stored(1, sums + second, 64)", "amx"),
    Mutation("amx_run.h", "if (before->count && before->blocks != now->blocks)", "if (false)", "amx"),
)


def mutate(mutation: Mutation, folder: Path) -> None:
    """Applies it to folder/csrc/isa.

    Raises:
        ValueError: the line is not there exactly once, so the list has to follow the sources.
    """
    path = folder / "csrc/isa" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times, not once")
    path.write_text(text.replace(mutation.old, mutation.new))


def runs_here(isa: str) -> bool:
    from int4moe_ipex.cpu import detect

    return detect().has(isa)


def _copy(folder: Path) -> None:
    shutil.copy(ROOT / "CMakeLists.txt", folder)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copytree(ROOT / "tests/csrc", folder / "tests/csrc")
    options = ["-DINT4MOE_PYTHON=OFF", "-DINT4MOE_TESTS=ON", "-DINT4MOE_STATIC=ON"]
    subprocess.run(["cmake", "-S", folder, "-B", folder / "build", *options], check=True, stdout=subprocess.DEVNULL)


def _build(folder: Path, target: Path) -> None:
    command = ["cmake", "--build", folder / "build", "--parallel", "2"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:  # warnings about what a mutation leaves unused are of no interest
        raise RuntimeError(done.stdout)
    shutil.copy(folder / "build/native_tests", target)


def build(mutations: list[Mutation], programs: Path) -> list[Path]:
    """The unchanged program first (`whole`), then one for each mutation, in `programs`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy(folder)
        built = [programs / "whole"]
        _build(folder, built[0])
        for number, mutation in enumerate(mutations):
            path = folder / "csrc/isa" / mutation.file
            before = path.read_text()
            mutate(mutation, folder)
            built.append(programs / f"mutant{number}")
            _build(folder, built[-1])
            path.write_text(before)
    return built


def run_here(program: Path, isa: str) -> int:
    return subprocess.run([program, "--quick", "--isa", isa], stdout=subprocess.DEVNULL).returncode


def run_emulated(programs: list[tuple[Path, str]]) -> list[int]:
    """The exit statuses of the programs, run one after the other on one emulated Xeon."""
    from tools.xeon_emulator.boot import Guest, run
    from tools.xeon_emulator.machine import Machine

    machine = Machine()
    machine.ensure()
    said: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "script"
        lines = [f"/files/{p.name} --quick --isa {isa} >/dev/null; echo status $?" for p, isa in programs]
        script.write_text("\n".join(lines) + "\n")
        guest = Guest(["/bin/sh", "/files/script"], [script, *(p for p, _ in programs)], timeout=900)
        run(machine, guest, said.append)
    return [int(line.split()[1]) for line in "".join(said).splitlines() if line.startswith("status ")]


def main(names: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not names or m.file in names]
    survivors = []
    with tempfile.TemporaryDirectory() as name:
        programs = build(chosen, Path(name))
        tasks = [(programs[0], isa) for isa in sorted({m.isa for m in chosen})]
        tasks += [(program, m.isa) for program, m in zip(programs[1:], chosen)]
        emulated = [task for task in tasks if not runs_here(task[1])]
        statuses = dict(zip(emulated, run_emulated(emulated))) if emulated else {}
        for program, isa in tasks:
            status = statuses[program, isa] if (program, isa) in statuses else run_here(program, isa)
            number = programs.index(program) - 1
            what = "unchanged" if number < 0 else f"{chosen[number].file}: {chosen[number].new}"
            good = (status == 0) if number < 0 else (status != 0)
            where = "emulated" if (program, isa) in statuses else "here"
            print(f"{'ok      ' if good else 'FAILED  '}{isa:8}{where:10}status {status:4} {what}", flush=True)
            if not good:
                survivors.append(what)
    print(f"{len(chosen)} mutations, {len(survivors)} not as expected")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
