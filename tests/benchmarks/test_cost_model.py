"""The loops that the cost model looks at, on code written here."""

import shutil
import subprocess

import pytest

from benchmarks.cost_model import amx
from benchmarks.cost_model.loops import Instruction, Loop, cycles, find_mca, functions, innermost_loops


def code(*lines):
    """(mnemonic, operands) or (mnemonic, operands, target) at addresses 0, 1, 2, ..."""
    return [Instruction(at, line[0], line[1], line[2] if len(line) > 2 else None) for at, line in enumerate(lines)]


def test_innermost_of_nested_loops():
    body = code(
        ("xor", "%eax,%eax"),
        ("vpxor", "%zmm0,%zmm0,%zmm0"),
        ("vpdpwssd", "%zmm1,%zmm2,%zmm0"),
        ("jne", "", 2),
        ("vmovaps", "%zmm0,0x40(%rsp)"),
        ("jne", "", 1),
        ("ret", ""),
    )
    (loop,) = innermost_loops(body)
    assert [i.address for i in loop.body] == [2, 3]
    assert loop.count("vpdpw.*") == 1 and loop.spills == 0
    assert Loop(tuple(body)).spills == 1


def test_functions_of_an_object_file(tmp_path):
    if not shutil.which("objdump") or not shutil.which("g++"):
        pytest.skip("needs g++ and objdump (binutils)")
    source = tmp_path / "sum.cpp"
    source.write_text("int sum(const int* x, int n) { int s = 0; while (n--) s += *x++; return s; }\n")
    subprocess.run(["g++", "-O1", "-c", source, "-o", tmp_path / "sum.o"], check=True)
    (name,) = [n for n in functions(tmp_path / "sum.o") if n.startswith("sum(")]
    (loop,) = innermost_loops(functions(tmp_path / "sum.o")[name])
    assert loop.count("add.*") >= 1 and loop.body[-1].target == loop.body[0].address


def test_llvm_mca_counts_a_chain():
    try:
        mca = find_mca()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    loop = Loop(tuple(code(("vfmadd231ps", "%zmm1,%zmm2,%zmm0"))))
    assert cycles(loop, "icelake-server", mca) == pytest.approx(4, rel=0.05)  # the latency of a multiply-add


def test_tiles_are_never_above_their_peak():
    found = amx.segment("W4A16", amx.Loops(decode=0, add=0, gather=0), 32, 64, False, 128)
    assert found.products == 2 * 4 * 4 * amx.TABLE["product"]
    assert found.tile > found.products and found.beside == found.apart == found.products / found.tile
    busy = amx.segment("W4A16", amx.Loops(decode=30, add=4, gather=2), 32, 64, True, 128)
    assert busy.vector == 2 * 16 * 30 + 8 * 16 * 4 + 64 * 4 * 2
    assert busy.apart < busy.beside == busy.products / busy.vector


def test_a_group_in_two_segments_has_the_costs_of_each():
    loops = amx.Loops(decode=4, add=3, gather=1, more=2)
    whole, cut = (amx.segment("W4A8", loops, 64, 64, True, 128, parts) for parts in (1, 2))
    half = amx.segment("W4A8", loops, 64, 64, True, 64)
    assert (cut.products, cut.tile) == (whole.products, 2 * half.tile) and cut.tile > whole.tile
    assert cut.vector == whole.vector + 8 * 16 * loops.more
    assert amx.layer_rate([whole, amx.segment("W4A8", loops, 64, 64, False, 128)], "W4A8", 64, 2.5) > whole.rate(2.5)
