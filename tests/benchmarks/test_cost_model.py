"""The loops that the cost model looks at, and its core out of order, on code written here."""

import shutil
import subprocess

import pytest

from benchmarks.cost_model import amx
from benchmarks.cost_model.actions import PRODUCT, TILE_LOAD, TILE_STORE, action
from benchmarks.cost_model.loops import Instruction, Loop, cycles, find_mca, functions, innermost_loops
from benchmarks.cost_model.pipeline import Core, simulate, steps


def code(*lines):
    """(mnemonic, operands) or (mnemonic, operands, target) at addresses 0, 1, 2, ..."""
    return [Instruction(at, line[0], line[1], line[2] if len(line) > 2 else None) for at, line in enumerate(lines)]


def followed(*lines, rax=0, rcx=0):
    """The steps of straight code with these registers."""
    program = {i.address: i for i in code(*lines)}
    return list(steps(program, ((at, rax, rcx, *[0] * 14) for at in program)))


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


@pytest.mark.parametrize(
    ("line", "reads", "around", "writes", "parts"),
    [
        (("vfmadd213ps", "(%rbx),%zmm3,%zmm1"), {"v3", "v1"}, {"rbx"}, ("v1",), ("load", "vector", None)),
        (("vpslld", "$0x8,0x400(%r13),%zmm3"), set(), {"r13"}, ("v3",), ("load", "vector", None)),
        (("vbroadcastss", "(%r12),%zmm6"), set(), {"r12"}, ("v6",), ("load", None, None)),
        (("vmovaps", "%zmm0,0x40(%rbx)"), {"v0"}, {"rbx"}, (), (None, None, "wide store")),
        (("vpxor", "%xmm1,%xmm1,%xmm1"), set(), set(), ("v1",), (None, None, None)),
        (("mov", "%rax,0x8(%rsp,%rcx,4)"), {"rax"}, {"rsp", "rcx"}, (), (None, None, "store")),
        (("add", "0x8(%rsp),%edx"), {"rdx"}, {"rsp"}, ("rdx", "flags"), ("load", "plain", None)),
        (("cmp", "%rax,(%rdx)"), {"rax"}, {"rdx"}, ("flags",), ("load", "plain", None)),
        (("lea", "0x40(%rax,%rcx,2),%rdx"), {"rax", "rcx"}, set(), ("rdx",), (None, "plain", None)),
        (("tileloadd", "(%rax,%rcx,1),%tmm6"), set(), {"rax", "rcx"}, ("tmm6",), ("load", None, None)),
        (("tilestored", "%tmm0,(%rax,%rcx,1)"), {"tmm0"}, {"rax", "rcx"}, (), (None, None, "wide store")),
        (("tdpbuud", "%tmm6,%tmm4,%tmm0"), {"tmm6", "tmm4", "tmm0"}, set(), ("tmm0",), (None, "tile", None)),
    ],
)
def test_what_an_instruction_does(line, reads, around, writes, parts):
    does = action(code(line)[0])
    assert (set(does.reads), set(does.around), does.writes) == (reads, around, writes)
    assert tuple(part and part[0] for part in (does.load, does.work, does.store)) == parts


def test_products_of_one_sum_wait_for_each_other_and_others_only_for_the_unit():
    chain = followed(*[("tdpbuud", "%tmm6,%tmm4,%tmm0")] * 8)
    assert simulate(chain, Core()) == pytest.approx(8 * PRODUCT[1], abs=5)
    apart = followed(*[("tdpbuud", f"%tmm6,%tmm4,%tmm{n % 4}") for n in range(40)])
    assert simulate(apart, Core()) == pytest.approx(40 * PRODUCT[0] + PRODUCT[1], abs=PRODUCT[0] + 5)


def test_a_tile_that_is_not_renamed_waits_for_its_readers():
    lines = [
        ("tileloadd", "(%rax,%rcx,1),%tmm6"),
        ("tdpbuud", "%tmm6,%tmm5,%tmm0"),
        ("tdpbuud", "%tmm6,%tmm5,%tmm1"),
    ] * 12
    many = followed(*lines, rcx=64)
    renamed, in_place = simulate(many, Core()), simulate(many, Core(rename=False))
    assert renamed < in_place
    assert in_place >= 12 * (TILE_LOAD[1] + 2 * PRODUCT[0])


def test_vectors_run_beside_products_unless_the_reorder_buffer_is_full():
    tiles = [("tdpbuud", "%tmm6,%tmm4,%tmm0")] * 4
    vectors = [("vpaddd", f"%zmm1,%zmm2,%zmm{3 + n % 20}") for n in range(300)]
    alone = simulate(followed(*tiles), Core())
    assert simulate(followed(*vectors), Core()) == pytest.approx(150, abs=5)  # two ports
    assert simulate(followed(*tiles, *vectors), Core()) == pytest.approx(alone, abs=5)
    assert simulate(followed(*tiles, *vectors), Core(reorder=64)) > alone + 90


def test_those_that_wait_for_a_unit_hold_up_the_rest():
    waiting = [("vpaddd", "%zmm1,%zmm0,%zmm0")] * 200  # a chain, one a cycle
    tile = [("tdpbuud", "%tmm6,%tmm4,%tmm0")]
    assert simulate(followed(*waiting, *tile), Core(waiting=10)) > simulate(followed(*waiting, *tile), Core()) + 20


def test_a_load_waits_for_the_store_to_its_address():
    store, load = ("vmovaps", "%zmm0,(%rax)"), ("vmovaps", "{}(%rax),%zmm1")
    slow = [("vpmulld", "%zmm1,%zmm1,%zmm0")]
    same = followed(*slow, store, (load[0], load[1].format("0x0")), rax=4096)
    other = followed(*slow, store, (load[0], load[1].format("0x40")), rax=4096)
    assert simulate(same, Core()) == pytest.approx(simulate(other, Core()) + 7, abs=2)


def test_words_of_one_line_do_not_wait_for_each_other():
    chain = [("imul", "%rcx,%rcx")] * 10
    apart = followed(*chain, ("mov", "%rcx,0x8(%rax)"), ("mov", "0x10(%rax),%rdx"), ("imul", "%rdx,%rdx"), rax=4096)
    same = followed(*chain, ("mov", "%rcx,0x8(%rax)"), ("mov", "0x8(%rax),%rdx"), ("imul", "%rdx,%rdx"), rax=4096)
    line = followed(*chain, ("mov", "%rcx,0x8(%rax)"), ("vmovaps", "(%rax),%zmm0"), rax=4096)
    assert simulate(apart, Core()) + 5 < min(simulate(same, Core()), simulate(line, Core()))


def test_a_tile_store_gives_all_its_rows():
    lines = [("tdpbuud", "%tmm6,%tmm4,%tmm0"), ("tilestored", "%tmm0,(%rax,%rcx,1)"), ("vmovaps", "0x3c0(%rax),%zmm1")]
    done = simulate(followed(*lines, rax=4096, rcx=64), Core())
    assert done >= PRODUCT[1] + TILE_STORE[1]


def test_sums_one_after_the_other_take_all_their_latencies():
    sums = [("tilezero", "%tmm0"), ("tdpbuud", "%tmm6,%tmm4,%tmm0"), ("tilestored", "%tmm0,(%rax,%rcx,1)")]
    work = [("vpaddd", "%zmm1,%zmm2,%zmm3")] * 100
    many = followed(*(sums + work) * 5, rax=4096, rcx=64)
    apart = amx.one_after_the_other(many)
    assert apart >= 5 * (PRODUCT[1] + TILE_STORE[1]) + 5 * 100 / 2
    assert simulate(many, Core()) < apart
