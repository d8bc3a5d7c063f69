"""What is wrong with a call is said in one sentence, before anything that takes seconds is imported or measured."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.real import EXAMPLE, REPO

ENTRY = """
import sys
sys.argv = ["int4moe", *sys.argv[1:]]
from int4moe_ipex.cli import main
try:
    main()
finally:
    print("imported torch" if "torch" in sys.modules else "lean", file=sys.stderr)
"""


# Says so when `main` has begun, by the first import that it makes.
SAYS_READY = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Says:
    def find_spec(self, name, *_):
        if name == "int4moe_ipex.cli.app":
            print("ready", flush=True)
sys.meta_path.insert(0, Says())
"""


def call(*arguments):
    """(exit status, lines on stderr)."""
    command = [sys.executable, "-c", ENTRY, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "nowhere", "--prompt", "x"), "nowhere: no such folder"),
        (("generate", "tests", "--prompt", "x"), "config.json: does not exist"),
        (("generate", EXAMPLE, "--prompt", "x", "--dtype", "bf16"), "dtype must be bfloat16, float16 or float32"),
        (("perplexity", EXAMPLE, "--text", "nope.txt"), "nope.txt: cannot be read: No such file or directory"),
        (("perplexity", EXAMPLE, "--text", EXAMPLE / "model.safetensors"), "model.safetensors: is no text in UTF-8"),
        (("inspect", "nowhere"), "nowhere: no such folder"),
        (("inspect", EXAMPLE, "--routing", "--prompt", "x", "--plot", "x.gif"), "has to end in .svg, .png or .pdf"),
        (("inspect", EXAMPLE, "--routing", "--text", "nope.txt"), "nope.txt: cannot be read"),
        (("doctor", "nowhere"), "nowhere: no such folder"),
        (("verify", "nowhere"), "nowhere: no such folder"),
        (("convert", "nowhere", "x.store"), "nowhere: no such folder"),
        (("bench", "layer", "--json", "nodir/x.json"), "--json nodir/x.json: there is no folder"),
        (("bench", "layer", "--json", "tests"), "--json tests: is a folder; name a file"),
        (("bench", "layer", "--plot", "x.gif"), "--plot x.gif: the file's name has to end in"),
        (("bench", "model", "nowhere"), "nowhere: no such folder"),
        (("serve", "nowhere", "--port", "0"), "nowhere: no such folder"),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, tuple) else "",
)
def test_a_wrong_call_is_said_at_once(arguments, said):
    if arguments[:2] == ("serve", "nowhere"):
        pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'int4moe_ipex[serve]'")
    if "--plot" in arguments:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'int4moe_ipex[plot]'")
    status, lines = call(*arguments)
    assert status == 2 and len(lines) == 2, lines
    assert lines[0].startswith("int4moe: ") and said in lines[0]
    assert lines[1] == "lean" or arguments[:2] == ("bench", "model")


def test_a_file_without_permission_is_one_sentence(tmp_path):
    if os.geteuid() == 0:
        folder = tmp_path / "config.json"  # root may read everything, but no folder as a file
        folder.mkdir()
        said = "Is a directory"
    else:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "config.json").chmod(0)
        said = "Permission denied"
    status, lines = call("inspect", tmp_path)
    assert status == 2 and lines[0].startswith(f"int4moe: {tmp_path}") and said in lines[0] and len(lines) == 2


def test_the_version():
    done = subprocess.run([sys.executable, "-m", "int4moe_ipex", "--version"], capture_output=True, text=True)
    import int4moe_ipex

    assert (done.returncode, done.stdout) == (0, f"int4moe_ipex {int4moe_ipex.__version__}\n")


def test_a_reader_that_goes_away_is_no_traceback():
    script = f"{sys.executable} -m int4moe_ipex config schema | head -n 1"
    done = subprocess.run(["bash", "-c", script], cwd=REPO, capture_output=True, text=True)
    assert done.stdout == "{\n" and "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.5, 1.0, 2.0])
def test_ctrl_c_ends_a_start_without_a_traceback(seconds, tmp_path):
    """At whatever moment it comes; libraries that are being imported may not swallow it."""
    command = [sys.executable, "-c", SAYS_READY + ENTRY, "convert", str(EXAMPLE), str(tmp_path / "store")]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert "Traceback" not in said
    left = list(tmp_path.iterdir())
    assert process.returncode in (0, 130, -signal.SIGINT)
    assert left == [tmp_path / "store"] if process.returncode == 0 else left in ([], [tmp_path / "store"])
