"""For all tests. One with a parameter `isa` gets that marker, so that `pytest -m avx512` chooses it."""

import os

# What `int4moe tune` has measured on a machine must not decide what its tests run.
os.environ["INT4MOE_TUNE_FILE"] = "off"
# Several test processes share the cores: OpenMP threads that spin between regions would take them from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ISA_MARKERS = ("scalar", "avx2", "avx2_vnni", "avx512", "amx")


def pytest_collection_modifyitems(items):
    for item in items:
        callspec = getattr(item, "callspec", None)
        isa = callspec.params.get("isa") if callspec else None
        if isa in ISA_MARKERS:
            item.add_marker(isa)
