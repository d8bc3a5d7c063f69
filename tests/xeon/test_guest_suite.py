"""The emulated Xeon's suite on this machine, for what its CPU has."""

from pathlib import Path

import pytest

from int4moe_ipex.backends import native
from int4moe_ipex.cpu import detect
from tests.xeon import guest_suite

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("isa", ["avx2", "avx512", "amx"])
def test_suite(isa):
    if not native.rows().get((isa, "w4a16")) or not detect().has(isa):
        pytest.skip(f"this CPU or build has no {isa}")
    for name, check in guest_suite.checks(EXAMPLES, [isa]):
        if name != "refused permission":
            check()
