"""What a verb imports: nothing that takes seconds before it is needed, and nothing that is never needed."""

import subprocess
import sys

import pytest

from tests.real import EXAMPLE

SLOW = {"torch", "transformers", "numpy", "matplotlib", "yaml", "pydantic", "rich.console"}
ENTRY = """
import sys
sys.argv = ["int4moe", *sys.argv[1:]]
from int4moe_ipex.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def imported(*arguments: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", ENTRY, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_the_list_of_verbs_needs_no_library():
    script = "import sys; from int4moe_ipex.cli.app import build_app; build_app(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not SLOW & set(done.stdout.split())


def test_a_verb_does_not_import_the_others():
    assert not {f"int4moe_ipex.cli.{verb}" for verb in ("bench", "doctor", "serve")} & imported("config", "show")


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (("generate", "--help"), {"torch", "transformers", "numpy"}),
        (("config", "show"), {"torch", "transformers", "numpy"}),
        (("inspect", str(EXAMPLE)), {"transformers", "matplotlib"}),
        (("doctor",), {"transformers", "matplotlib"}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_libraries_that_a_verb_does_not_need(arguments, absent):
    assert not absent & imported(*arguments)
