"""The emulated Xeon's suite on this machine, for what its CPU has."""

import subprocess
import sys

import pytest

from int4moe_ipex.backends import native
from int4moe_ipex.cpu import detect
from tests.real import EXAMPLE, HELDOUT, REPO
from tests.xeon import guest_suite
from tests.xeon.heldout import prepare


@pytest.mark.parametrize("isa", ["avx2", "avx512", "amx"])
def test_suite(isa):
    if not native.rows().get((isa, "w4a16")) or not detect().has(isa):
        pytest.skip(f"this CPU or build has no {isa}")
    for name, check in guest_suite.checks(EXAMPLE, prepare(EXAMPLE, HELDOUT), [isa]):
        if name != "refused permission":
            check()


def test_imports_no_transformers():
    code = "import sys, tests.xeon.guest_suite; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0
