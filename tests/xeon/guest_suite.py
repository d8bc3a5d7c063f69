"""The Python package on one CPU from end to end: selection, packing, a layer, a checkpoint's perplexity.

Runs as a script on the emulated Xeon, where pytest would take too long, and under pytest on this machine for the
instruction sets that it has (test_guest_suite.py): `python -m tests.xeon.guest_suite CHECKPOINT HELDOUT ISA...`, where
HELDOUT is what heldout.py made of the checkpoint, and the first ISA is what the selector has to choose by itself.
Nothing here imports transformers, which takes an emulated CPU more than ten minutes; hence decoder.py.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from int4moe_ipex import diagnosis
from int4moe_ipex.backends import native
from int4moe_ipex.backends.base import RunConfig
from int4moe_ipex.backends.select import choose
from int4moe_ipex.config import Config
from int4moe_ipex.cpu import detect
from int4moe_ipex.errors import BackendError
from int4moe_ipex.models import run
from int4moe_ipex.moe.activations import Activation
from int4moe_ipex.moe.experts import experts_spec
from int4moe_ipex.packing.layout import NativeLayout
from tests.weights import exact_moe, random_expert, relative_error
from tests.xeon.decoder import Decoder
from tests.xeon.heldout import WINDOW, Heldout

# (compute, activations) -> how far the perplexity may be from float32's.
PERPLEXITIES = {
    ("w4a16", torch.float32): 0.05,
    ("w4a16", torch.bfloat16): 0.3,
    ("w4a8", torch.bfloat16): 0.3,
}
# tests/csrc has the fine bounds; these are the design's.
BOUNDS = {("w4a16", torch.bfloat16): 4e-3, ("w4a16", torch.float16): 1e-3, ("w4a16", torch.float32): 2e-5}
W4A8_BOUND = 1.5e-2
DENY = Path("/sys/module/tiles/parameters/deny")  # of the emulated machine's kernel


@contextmanager
def capped(isa: str):
    before = os.environ.get("INT4MOE_MAX_ISA")
    os.environ["INT4MOE_MAX_ISA"] = isa
    try:
        yield
    finally:
        os.environ.pop("INT4MOE_MAX_ISA")
        if before is not None:
            os.environ["INT4MOE_MAX_ISA"] = before


def check_selection(isa: str) -> None:
    """With the cap at `isa`, every kind of activations and compute gets its row without being asked for it."""
    with capped(isa):
        for compute in ("w4a16", "w4a8"):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                choice = choose(diagnosis.TYPICAL, detect(), RunConfig(compute=compute, dtype=dtype))
                assert choice.path == f"native/{isa}/{compute}", choice


def check_layer(isa: str, compute: str, dtype: torch.dtype) -> None:
    """A layer packed by the selector's choice against float64, with tails, zero points, biases and act-order."""
    gen = torch.Generator().manual_seed(3)
    kinds = {"hidden": 72, "intermediate": 56, "group_size": 24, "symmetric": False, "act_order": True, "bias": True}
    stored = [random_expert(gen, **kinds) for _ in range(3)]
    spec = experts_spec(stored, Activation())
    with capped(isa):
        choice = choose(spec, detect(), RunConfig(compute=compute, dtype=dtype))
        packed = choice.pack_experts(spec, (e.weights() for e in stored))
    assert packed.path == f"native/{isa}/{compute}", packed.path
    ids = torch.stack([torch.randperm(3, generator=gen)[:2] for _ in range(20)])
    weights = torch.rand(20, 2, generator=gen).to(dtype)
    x = torch.randn(20, 72, generator=gen).to(dtype)
    y = choice.backend.experts_forward(packed, x, ids, weights)
    error = relative_error(y, exact_moe(stored, spec.activation, x, ids, weights))
    bound = W4A8_BOUND if compute == "w4a8" else BOUNDS[compute, dtype]
    assert error <= bound, f"relative error {error:.2e} above {bound:.1e}"
    assert torch.equal(choice.backend.experts_forward(packed, x[7:9], ids[7:9], weights[7:9]), y[7:9])


def check_perplexity(checkpoint: Path, heldout: Heldout, isa: str, compute: str, dtype: torch.dtype) -> None:
    with capped(isa):
        model = Decoder(checkpoint, RunConfig(compute=compute, dtype=dtype))
    assert model.paths == {f"native/{isa}/{compute}"}, model.paths
    value, _ = run.perplexity(model, heldout.token_ids, WINDOW)
    bound = PERPLEXITIES[compute, dtype]
    assert abs(value - heldout.perplexity) <= bound, f"perplexity {value:.4f}, in float32 {heldout.perplexity:.4f}"


def check_forced_and_missing() -> None:
    """What the core may not run is an error before any instruction of it."""
    layout = NativeLayout.of_linear(diagnosis.TYPICAL_UP)
    for (isa, compute), usable in native.rows().items():
        if usable:
            continue
        try:
            native.linear_handle(layout, isa, compute)
        except BackendError as error:
            assert "lacks what" in str(error)
        else:
            raise AssertionError(f"{isa}/{compute} was given out although this CPU lacks it")


def check_refused_permission() -> None:
    """In a child that the kernel refuses tiles: the next row is chosen, doctor says why, forcing AMX is an error."""
    DENY.write_text("1")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _without_permission()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    DENY.write_text("0")
    assert status == 0, "see above"


def _without_permission() -> None:
    assert not native.rows()["amx", "w4a16"] and native.rows()["avx512", "w4a16"]
    found = diagnosis.diagnose(Config.load(None))
    assert [m["path"] for m in found["modules"]] == ["native/avx512/w4a16"], found["modules"]
    amx = next(isa for isa in found["isas"] if isa["isa"] == "amx")
    assert not amx["usable"] and amx["blocked_by"] == "permission", amx
    row = next(r for r in found["modules"][0]["rows"] if r["row"] == "native/amx")
    assert not row["supported"] and "permission" in row["reason"], row
    try:
        choose(diagnosis.TYPICAL, detect(), RunConfig(isa="amx"), "native")
    except BackendError as error:
        assert "permission" in str(error), error
    else:
        raise AssertionError("a forced AMX row was chosen without permission")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checks(checkpoint: Path, heldout: Heldout, isas: list[str]) -> list[tuple[str, Callable[[], None]]]:
    """Every check by name. The one of the refused permission is first: later ones use tiles."""
    found: list[tuple[str, Callable[[], None]]] = []
    if DENY.exists():
        found.append(("refused permission", check_refused_permission))
    found.append(("forced and missing", check_forced_and_missing))
    for isa in isas:
        found.append((f"{isa} selection", lambda isa=isa: check_selection(isa)))
        for compute in ("w4a16", "w4a8"):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                name = f"{isa} {compute} layer {name_of(dtype)}"
                found.append((name, lambda i=isa, c=compute, d=dtype: check_layer(i, c, d)))
        for compute, dtype in PERPLEXITIES:
            name = f"{isa} {compute} perplexity {name_of(dtype)}"
            found.append((name, lambda i=isa, c=compute, d=dtype: check_perplexity(checkpoint, heldout, i, c, d)))
    return found


def main(checkpoint: str, heldout: str, *isas: str) -> int:
    torch.set_num_threads(2)
    print(f"torch {torch.__version__}, {detect().model_name}, best {detect().best_isa}", flush=True)
    if detect().best_isa != isas[0]:
        print(f"FAILED: this CPU's best instruction set is not {isas[0]}")
        return 1
    failed = 0
    todo = checks(Path(checkpoint), Heldout.read(Path(heldout)), list(isas))
    for name, check in todo:
        start = time.monotonic()
        try:
            check()
            print(f"ok      {name} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    print(f"{len(todo)} checks of the package, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
