"""The table: order, reasons, what is forced, fallbacks, and choices by tokens per expert."""

import logging

import pytest
import torch

from int4moe_ipex.backends import select
from int4moe_ipex.backends.base import (
    ExpertsSpec,
    ExpertWeights,
    LinearSpec,
    LinearWeights,
    Rejected,
    RunConfig,
    Supported,
)
from int4moe_ipex.backends.by_tokens import ByTokensBackend
from int4moe_ipex.backends.reference import ReferenceBackend
from int4moe_ipex.backends.torch_int4 import TorchInt4Backend
from int4moe_ipex.canonical import CanonicalWeight
from int4moe_ipex.config import Config
from int4moe_ipex.cpu import ISA_FLAGS, CpuFeatures
from int4moe_ipex.errors import BackendError

AVX512 = CpuFeatures("a CPU with AVX-512", ISA_FLAGS["avx512"])
AVX2 = CpuFeatures("a CPU with AVX2", ISA_FLAGS["avx2"])
AMX = CpuFeatures("a CPU with AMX", ISA_FLAGS["amx"])
LINEAR = LinearSpec(in_features=64, out_features=32, group_size=32, symmetric=True)
ODD = LinearSpec(in_features=48, out_features=20, group_size=24, symmetric=False)


class FakeNative:
    """Says what a native core with AVX2 and AVX-512 kernels would; group_size 24 is beyond it."""

    name = "native"

    def support_linear(self, spec, cpu, run):
        if spec.group_size == 24:
            return Rejected("group_size 24 is no multiple of 16")
        isa = "avx512" if run.isa in ("avx512", "amx") else run.isa
        return Supported(f"native/{isa}/{run.compute}")


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    found = {
        "native": FakeNative(),
        "ipex": Rejected("not installed"),
        "onednn": Rejected("not installed"),
        "torch": TorchInt4Backend(),
        "reference": ReferenceBackend(),
    }
    monkeypatch.setattr(select, "engine", found.__getitem__)
    monkeypatch.setattr(select, "_told", set())
    return found


def test_first_row_that_fits_wins_and_reasons_are_kept():
    choice = select.choose(LINEAR, AVX512, RunConfig())
    assert choice.path == "native/avx512/w4a16"
    assert dict(choice.rejected) == {
        "native/amx": "this CPU lacks amx_int8, amx_tile",
    }
    assert choice.run.isa == "avx512"


def test_row_without_a_kernel_of_its_own_is_not_taken_for_another():
    choice = select.choose(LINEAR, AMX, RunConfig())
    assert choice.path == "native/avx512/w4a16"
    assert dict(choice.rejected)["native/amx"] == (
        "has no kernel of its own for amx here (it would run native/avx512/w4a16)"
    )


def test_cap_of_the_environment_is_a_reason():
    capped = CpuFeatures("capped", ISA_FLAGS["avx512"], max_isa="avx2")
    choice = select.choose(LINEAR, capped, RunConfig())
    assert choice.path == "native/avx2/w4a16"
    assert dict(choice.rejected)["native/avx512"] == "INT4MOE_MAX_ISA=avx2 caps it"


def test_asked_isa_takes_its_row():
    assert select.choose(LINEAR, AVX512, RunConfig(isa="avx2")).path == "native/avx2/w4a16"


def test_slower_row_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert select.choose(ODD, AVX512, RunConfig()).path == "reference/float32"
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1
    assert messages[0].startswith("running reference/float32, which is slower than the native core (")
    assert "group_size 24 is no multiple of 16" in messages[0]


def test_forced_slow_backend_is_not_logged(caplog):
    assert select.choose(LINEAR, AVX512, RunConfig(), "reference").path == "reference/float32"
    assert not caplog.records


@pytest.mark.parametrize(
    ("spec", "run", "backend", "reason"),
    [
        (ODD, RunConfig(), "native", "group_size 24 is no multiple of 16"),
        (LINEAR, RunConfig(), "onednn", "onednn: not installed"),
        (LINEAR, RunConfig(compute="w4a8"), "torch", "computes w4a16, not w4a8"),
        (LINEAR, RunConfig(isa="amx"), "native", "isa amx is asked for and this CPU lacks amx_int8, "),
        (LINEAR, RunConfig(isa="amx"), "auto", "isa amx is asked for and this CPU lacks amx_int8, "),
        (LINEAR, RunConfig(), "fast", "unknown backend 'fast'; known: auto, native, ipex, onednn, torch, reference"),
    ],
)
def test_forced_and_unavailable_is_an_error(spec, run, backend, reason):
    with pytest.raises(BackendError) as caught:
        select.choose(spec, AVX512, run, backend)
    assert reason in str(caught.value)
    assert select.NOT_ASKED not in str(caught.value)


def test_error_describes_the_module():
    with pytest.raises(BackendError, match="linear of in_features 48, out_features 20, group_size 24, asymmetric: "):
        select.choose(ODD, AVX512, RunConfig(), "torch")


@pytest.mark.parametrize(
    ("spec", "run", "backend", "path"),
    [
        (ODD, RunConfig(), "native", "reference/float32"),
        (LINEAR, RunConfig(), "onednn", "native/avx512/w4a16"),
        (LINEAR, RunConfig(isa="amx"), "native", "native/avx512/w4a16"),
        (ODD, RunConfig(compute="w4a8"), "native", "reference/float32"),
    ],
)
def test_fallback_takes_the_next_row_and_says_so_once(spec, run, backend, path, caplog):
    for _ in range(2):
        assert select.choose(spec, AVX512, run, backend, on_unsupported="fallback").path == path
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("what is asked for cannot run (")


def test_backend_sees_whether_it_was_forced(engines):
    seen = []

    class Ipex:
        def support_linear(self, spec, cpu, run):
            seen.append(run.forced)
            return Supported("ipex/reference/float32") if run.forced else Rejected("slow here")

    engines["ipex"] = Ipex()
    assert select.choose(ODD, AVX512, RunConfig()).path == "reference/float32"
    choice = select.choose(ODD, AVX512, RunConfig(), "ipex")
    assert (choice.path, choice.run.forced, seen) == ("ipex/reference/float32", True, [False, True])


def test_explain_has_every_row():
    verdicts = select.explain(LINEAR, AVX2, RunConfig())
    assert [row for row, _ in verdicts] == list(select.TABLE)
    first = next(row.name for row, verdict in verdicts if isinstance(verdict, Supported))
    assert first == "native/avx2"


def test_table_names_only_known_backends_and_isas():
    assert {row.backend for row in select.TABLE} == set(select._BACKENDS)
    assert {row.isa for row in select.TABLE} <= {*ISA_FLAGS, select.ANY}
    assert len({row.name for row in select.TABLE}) == len(select.TABLE)


def test_import_failure_is_a_reason_and_not_an_exception(monkeypatch):
    monkeypatch.undo()  # the fixture's engine
    monkeypatch.setitem(select._BACKENDS, "native", ("int4moe_ipex.backends.no_such", "X"))
    select.engine.cache_clear()
    try:
        assert isinstance(select.engine("native"), Rejected)
        assert "native" not in select.available()
    finally:
        select.engine.cache_clear()


# ------------------------------------------------------------------------------------------------ by tokens per expert


def weight(n, k, seed, group=32):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    scales = (torch.rand(n, k // group, generator=g) * 0.02 + 0.01).to(torch.float16)
    zeros = torch.randint(0, 16, (n, k // group), generator=g, dtype=torch.uint8)
    return LinearWeights(CanonicalWeight(codes, scales, zeros, group))


def bands(rules, name="model.layers.0.mlp.experts"):
    return Config.load({"rules": rules}, environ={}).bands(name)


def test_equal_bands_are_one_choice():
    rules = [{"match": "*", "min_tokens": 4, "backend": "reference"}, {"match": "*", "backend": "reference"}]
    choice = select.choose(LINEAR, AVX512, RunConfig(dtype=torch.float32), bands(rules))
    assert choice.path == "reference/float32" and not isinstance(choice.backend, ByTokensBackend)


def test_linear_is_chosen_by_its_rows():
    rules = [{"match": "*", "max_tokens": 4, "backend": "torch"}, {"match": "*", "backend": "reference"}]
    choice = select.choose(LINEAR, AVX512, RunConfig(dtype=torch.float32), bands(rules))
    assert choice.path == "torch/float32 up to 4 tokens, reference/float32"
    linear = weight(32, 64, 1)
    packed = choice.pack_linear(LinearSpec.of(linear.weight), linear)
    one = TorchInt4Backend()
    alone = one.pack_linear(packed.spec, linear, RunConfig(dtype=torch.float32))
    other = ReferenceBackend().pack_linear(packed.spec, linear, RunConfig())
    for rows in (0, 1, 4, 5, 9):
        x = torch.randn(rows, 64)
        y = choice.backend.linear_forward(packed, x)
        want = one.linear_forward(alone, x) if rows <= 4 else ReferenceBackend().linear_forward(other, x)
        assert torch.equal(y, want)
        assert packed.at(max(rows, 1))[0].path == ("torch/float32" if rows <= 4 else "reference/float32")
    again = choice.backend.unpack_linear(packed)
    assert torch.equal(again.weight.codes, linear.weight.codes)
    assert {name.split(".")[0] for name in packed.tensors()} == {"torch/float32", "reference/float32"}


def test_experts_are_chosen_by_mean_tokens_and_see_all_experts():
    rules = [{"match": "*", "max_tokens": 2, "backend": "torch"}, {"match": "*", "backend": "reference"}]
    experts = [
        ExpertWeights(weight(32, 64, 3 * e), weight(32, 64, 3 * e + 1), weight(64, 32, 3 * e + 2)) for e in range(4)
    ]
    up, down = LinearSpec.of(experts[0].up.weight), LinearSpec.of(experts[0].down.weight)
    spec = ExpertsSpec(4, 64, 32, up, up, down)
    choice = select.choose(spec, AVX512, RunConfig(dtype=torch.float32), bands(rules))
    engine = choice.backend
    packed = choice.pack_experts(spec, iter(experts))
    full = ReferenceBackend().pack_experts(spec, iter(experts), RunConfig())
    for tokens, path in ((1, "torch/float32"), (4, "torch/float32"), (6, "reference/float32")):
        x = torch.randn(tokens, 64)
        ids = torch.randint(0, 4, (tokens, 2))
        weights = torch.rand(tokens, 2)
        y = engine.experts_forward(packed, x, ids, weights)
        want = ReferenceBackend().experts_forward(full, x, ids, weights)
        assert packed.at(max(1, tokens * 2 // 4))[0].path == path
        torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-3)
    assert len(list(engine.unpack_experts(packed))) == 4
