"""Which threads run a region: torch's, as a second pool would spin on the cores of the first."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("int4moe_ipex._native", reason="the C++ core is not built")

OPENMP = "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()
needs_openmp = pytest.mark.skipif(not OPENMP, reason="this torch is built without OpenMP")

COUNT = """
import os, torch
from int4moe_ipex import _native
torch.set_num_threads(2)
torch.ones(1 << 22).add_(1)
before = len(os.listdir("/proc/self/task"))
_native.measure_read_bandwidth(2, 1 << 22)
print(len(os.listdir("/proc/self/task")) - before)
"""
FORKED = """
import os, torch
from int4moe_ipex import _native
child = os.fork()
if child == 0:
    os._exit(0 if _native.thread_runtime() == "threads" else 1)
print(_native.thread_runtime(), os.waitpid(child, 0)[1])
"""


def answer(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@needs_openmp
def test_regions_run_on_the_threads_that_torch_has():
    assert answer(COUNT) == ["0"]


@needs_openmp
def test_a_forked_child_has_threads_of_its_own():
    assert answer(FORKED) == ["openmp", "0"]
