"""Without memory for its scratch the core raises MemoryError, and computes once there is some."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("int4moe_ipex._native")

# Each call wants more scratch than its tensors are large.
CALLS = {
    "dense_linear": """
        n = 1 << 20
        x, w, y = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((32, n), (1, n), (32, 1)))
        def call():
            tensors = x.data_ptr(), w.data_ptr(), None, 0, y.data_ptr()
            native._native.dense_linear(32, 1, n, *tensors, False, 2)
        expected = torch.full_like(y, n)
    """,
    "12 bits": """
        n = 1 << 23
        w, y = (torch.ones(n // 1024, 1024, dtype=torch.bfloat16) for _ in range(2))
        def call():
            native._native.Compact.pack(w.data_ptr(), n // 1024, 1024, 2).unpack(y.data_ptr())
        expected = w.clone()
    """,
    "attention": """
        n = 1 << 17
        q, k = torch.zeros(2, n), torch.zeros(2, n)
        v, y = torch.ones(2, 16), torch.empty(2, 16)
        tensors = q.data_ptr(), (0, 0, n), k.data_ptr(), (0, 0, n), v.data_ptr(), (0, 0, 16), y.data_ptr()
        def call():
            native._native.attention(2, 1, 1, 1, 2, 2, n, 16, *tensors, 1.0, False, 2)
        expected = torch.ones_like(y)
    """,
}

SCRIPT = """
import resource
import torch
from int4moe_ipex.backends import native
{call}
if not native._native.dense_available():
    print("not on this CPU")
    raise SystemExit
torch.ones(1 << 20).sum()  # starts torch's threads
pages = int(open("/proc/self/statm").read().split()[0])
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20), limits[1]))
try:
    call()
except MemoryError:
    print("MemoryError")
resource.setrlimit(resource.RLIMIT_AS, limits)
call()
assert torch.equal(y, expected), y
print("right")
"""


@pytest.mark.parametrize("name", CALLS)
def test_memory_error(name):
    script = SCRIPT.format(call=textwrap.dedent(CALLS[name]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if "not on this CPU" in done.stdout:
        pytest.skip("the kernels need AVX2")
    assert (done.returncode, done.stdout.split()) == (0, ["MemoryError", "right"]), done.stderr[-2000:]
