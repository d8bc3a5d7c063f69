"""Counts of experts against what a stock transformers model's routers choose."""

import pytest
import torch

import int4moe_ipex
from int4moe_ipex.config import Config
from int4moe_ipex.errors import ConfigError, Int4MoeError
from int4moe_ipex.models import expert_use
from int4moe_ipex.models.expert_use import ExpertUse
from tests.models.tiny import stock_model, write_checkpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("use")
    stock = stock_model("qwen3_moe")
    write_checkpoint(stock, "qwen3_moe", folder)
    return stock, int4moe_ipex.load(folder, Config.load({}, environ={}, dtype="float32"))


def test_counts_are_what_the_routers_choose(models, monkeypatch):
    stock, model = models
    tokens = (torch.arange(50) * 7 % 63 + 1).tolist()  # token 0 pads: its routers see a tie of all experts
    monkeypatch.setattr(expert_use, "WINDOW", 20)
    want = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
    for start in (0, 20, 40):
        part = torch.tensor([tokens[start : start + 20]])
        with torch.inference_mode():
            logits = stock(input_ids=part, output_router_logits=True).router_logits
        for total, layer in zip(want, logits):
            total += torch.bincount(layer.topk(2).indices.reshape(-1), minlength=4)
    steps = []
    found = expert_use.expert_use(model, tokens, lambda *step: steps.append(step[:2]))
    assert [layer.counts for layer in found] == [total.tolist() for total in want]
    assert [layer.module for layer in found] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert sum(found[0].counts) == 2 * 50 and steps == [(20, 50), (40, 50), (50, 50)]


def test_hooks_are_gone_afterwards_and_after_an_error(models):
    _, model = models
    experts = model.model.layers[0].mlp.experts
    expert_use.expert_use(model, [1, 2])
    assert not experts._forward_pre_hooks
    with pytest.raises((IndexError, RuntimeError)):  # by torch's release
        expert_use.expert_use(model, [10**6])
    assert not experts._forward_pre_hooks


def test_mistakes(models):
    with pytest.raises(Int4MoeError, match="has no tokens"):
        expert_use.expert_use(models[1], [])
    with pytest.raises(Int4MoeError, match="no MoE layer"):
        expert_use.expert_use(torch.nn.Linear(1, 1), [1])


def test_balance_and_share():
    assert ExpertUse("a", [5, 5, 5, 5]).balance == pytest.approx(1)
    assert ExpertUse("a", [20, 0, 0, 0]).balance == 0
    assert 0 < ExpertUse("a", [10, 5, 5, 0]).balance < 1
    one = ExpertUse("a", [10, 5, 5, 0])
    assert one.used == 3 and [expert_use.share(one, e) for e in range(4)] == [2, 1, 1, 0]


def test_plot_writes_an_svg_and_says_when_it_cannot(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    use = [ExpertUse("a", [3, 1]), ExpertUse("b", [0, 0])]
    expert_use.plot(use, "a title", tmp_path / "use.svg")
    assert "<svg" in (tmp_path / "use.svg").read_text()
    with pytest.raises(ConfigError, match="cannot be written"):
        expert_use.plot(use, "a title", tmp_path / "no" / "use.svg")
