"""The list of mutations follows the sources: each line is there once, and each file of kernels has one."""

import re

import pytest

from tests.csrc.mutations import ISA, MUTATIONS, Mutation, mutate


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.file)
def test_line_is_there_once(mutation):
    assert (ISA / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new


def test_every_file_of_kernels_has_one():
    defines = re.compile(r"^const Kernels k", re.MULTILINE)
    kernels = {path.name for path in ISA.glob("*.cpp") if defines.search(path.read_text())}
    assert kernels <= {m.file for m in MUTATIONS}


def test_a_line_that_is_gone_is_an_error(tmp_path):
    (tmp_path / "csrc/isa").mkdir(parents=True)
    (tmp_path / "csrc/isa/scalar.cpp").write_text("nothing")
    with pytest.raises(ValueError, match="0 times, not once"):
        mutate(Mutation("scalar.cpp", "something", "else", "scalar"), tmp_path)
