"""Bfloat16 weights in 12 bits: the same weights, and only for as long as they are."""

import copy
import pickle

import pytest
import torch
from torch import nn

import int4moe_ipex
from int4moe_ipex.config import Config
from int4moe_ipex.models import attention, compact, fused, stored
from int4moe_ipex.models.compact import compact_of, make_compact
from tests.models.decoding import checkpoint, logits_of, module_by_module
from tests.models.test_fused import as_fused, relative

pytestmark = pytest.mark.skipif(not attention.available(), reason="no native core here, or a CPU without AVX2")


@pytest.fixture
def small_ones_too(monkeypatch):
    monkeypatch.setattr(compact, "WORTH", 1)


def linear(rows: int = 1301, columns: int = 160, **kwargs) -> nn.Module:
    torch.manual_seed(rows + columns)
    stock = nn.Linear(columns, rows, dtype=torch.bfloat16, **kwargs).requires_grad_(False)
    nn.init.normal_(stock.weight, std=0.02)
    return as_fused(stock)


def unpacked(module: nn.Module) -> torch.Tensor:
    out = torch.empty_like(module.weight)
    compact_of(module).packed.unpack(out.data_ptr())
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


@pytest.mark.parametrize("columns", [32, 96, 128, 160, 2048])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 13, 32])
def test_the_same_product(small_ones_too, columns, tokens):
    ours = linear(columns=columns)
    x = torch.randn(tokens, columns, dtype=torch.bfloat16)
    plain = ours(x)
    assert make_compact([ours])[0] == 1 and compact_of(ours) is not None
    assert torch.equal(bits(unpacked(ours)), bits(ours.weight))
    assert relative(ours(x), x.double() @ ours.weight.double().T + ours.bias.double()) < 3e-3
    assert relative(ours(x), plain) < 1e-3  # what lies beside a row is added at its end
    assert torch.equal(torch.cat([ours(row) for row in x.split(1)]), ours(x))


def test_bytes_are_counted(small_ones_too):
    linears = [linear(), linear(256, 2048, bias=False)]
    count, nbytes = make_compact(linears)
    assert count == 2
    words = sum(1.5 * m.weight.shape[0] * -(-m.weight.shape[1] // 128) * 128 for m in linears)
    assert words < nbytes < 1.05 * words


def test_what_stays_as_it_is():
    small, infinite, odd = linear(64, 64), linear(4096, 256), linear(8192, 80)
    infinite.weight[7, 7] = float("inf")
    spread = linear(4096, 256)
    spread.weight.copy_(torch.randn(4096, 256) * torch.exp2(torch.randint(-60, 60, (4096, 256))))
    other = nn.Linear(256, 4096).requires_grad_(False)
    assert make_compact([small, infinite, odd, spread, other]) == (0, 0)
    assert all(compact_of(m) is None for m in (small, infinite, odd, spread, other))


@torch.inference_mode()
def test_weights_that_nobody_counts_changes_of(small_ones_too):
    made = linear()
    assert made.weight.is_inference() and make_compact([made]) == (0, 0) and compact_of(made) is None


def test_memory_of_a_weight_that_has_a_copy_is_not_used_again(small_ones_too):
    ours, x = linear(20000, 64, bias=False), torch.randn(1, 64, dtype=torch.bfloat16)
    rows = torch.arange(20000)[:, None] < 3
    make_compact([ours])
    for value in range(1, 7):
        ours.weight = nn.Parameter(torch.where(rows, value, ours.weight), requires_grad=False)
        assert compact_of(ours) is None or torch.equal(unpacked(ours), ours.weight)
        assert relative(ours(x), x.double() @ ours.weight.double().T) < 3e-3
        if value % 2:
            make_compact([ours])


def test_a_view_in_another_shape_is_another_weight(small_ones_too):
    ours = linear(4096, 256, bias=False)
    make_compact([ours])
    ours.weight.data = ours.weight.data.view(-1, 32)
    assert compact_of(ours) is None
    x = torch.randn(1, 32, dtype=torch.bfloat16)
    assert relative(ours(x), x.double() @ ours.weight.double().T) < 3e-3


def test_copies_made_anew(small_ones_too, tmp_path):
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen3_moe"))
    head = model.lm_head
    x = torch.randn(1, head.in_features, dtype=torch.bfloat16)
    head.weight.data[7] = 0.5  # nothing tells of it
    int4moe_ipex.refresh(model)
    assert compact_of(head) is not None
    assert relative(head(x), x.double() @ head.weight.double().T) < 3e-3


@pytest.mark.parametrize("how", ["in place", "merged", "another tensor", "another parameter", "loaded"])
def test_a_changed_weight_counts(small_ones_too, how):
    ours, x = linear(bias=False), torch.randn(1, 160, dtype=torch.bfloat16)
    make_compact([ours])
    with torch.no_grad():
        if how == "in place":
            ours.weight.mul_(2)
        elif how == "merged":  # as adapters are
            ours.weight.data += 0.1 * torch.randn_like(ours.weight)
        elif how == "another tensor":
            ours.weight.data = ours.weight.data * 2
        elif how == "another parameter":
            ours.weight = nn.Parameter(ours.weight * 2, requires_grad=False)
        else:
            ours.load_state_dict({"weight": ours.weight * 2})
    assert compact_of(ours) is None
    assert relative(ours(x), x.double() @ ours.weight.double().T) < 3e-3


def test_a_copy_has_a_weight_of_its_own(small_ones_too):
    ours, x = linear(), torch.randn(1, 160, dtype=torch.bfloat16)
    make_compact([ours])
    twin = copy.deepcopy(ours)
    assert compact_of(twin) is None and compact_of(ours) is not None
    assert relative(twin(x), ours(x)) < 1e-3
    twin = pickle.loads(pickle.dumps(ours))
    assert compact_of(twin) is None and torch.equal(twin.weight, ours.weight)


def dense_attention(tmp_path):
    """A model with bfloat16 linears in its attention and head."""
    model = int4moe_ipex.load(checkpoint(tmp_path, "qwen3_moe"))
    for layer in model.model.layers:
        for name in ("q_proj", "o_proj"):
            old = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, linear(old.out_features, old.in_features, bias=name == "q_proj"))
    fused.fuse(model)
    return model


@pytest.mark.parametrize("rows", [1, 2, 7, 32])
def test_a_step_in_one_call(small_ones_too, tmp_path, steps, rows):
    model = dense_attention(tmp_path)
    plain = logits_of(model, rows)
    linears = [m for m in model.modules() if isinstance(m, fused.FusedLinear)]
    assert make_compact(linears)[0] == len(linears) == 2 * len(model.model.layers) + 1
    del model.model._plan
    ours = logits_of(model, rows)
    assert steps == [rows] * 12
    with module_by_module(model):
        assert torch.equal(logits_of(model, rows), ours)
    assert relative(ours, plain) < 1e-2
    # The next step sees that a weight is another, and what torch does not count after the next prompt.
    before = ours
    for write in (
        lambda: model.model.layers[0].self_attn.q_proj.weight.mul_(4),
        lambda: model.model.layers[0].self_attn.o_proj.weight.data.mul_(4),
    ):
        with torch.no_grad():
            write()
        changed = logits_of(model, rows)
        assert relative(changed, before) > 1e-2
        with module_by_module(model):
            assert torch.equal(logits_of(model, rows), changed)
        before = changed


def test_the_configuration_decides(small_ones_too, tmp_path):
    path = checkpoint(tmp_path, "qwen3_moe")
    model = int4moe_ipex.load(path)
    report = model.int4moe_report
    assert report.compact_linears == 1 and compact_of(model.lm_head) is not None
    assert 1.5 * model.lm_head.weight.numel() <= report.compact_nbytes
    plain = int4moe_ipex.load(path, bfloat16_weights="plain")
    assert plain.int4moe_report.compact_linears == plain.int4moe_report.compact_nbytes == 0
    assert compact_of(plain.lm_head) is None
    assert relative(logits_of(model), logits_of(plain)) < 1e-2


def test_a_store_gives_them_too(small_ones_too, tmp_path):
    path = checkpoint(tmp_path / "checkpoint", "qwen3_moe")
    stored.write_store(path, tmp_path / "store", Config.load())
    assert int4moe_ipex.load(tmp_path / "store").int4moe_report.compact_linears == 1
