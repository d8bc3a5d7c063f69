"""inspect as a tree, of a store, and with the use of experts."""

import io
import json

import pytest
from rich.console import Console

from int4moe_ipex.cli import heatmap
from int4moe_ipex.models.expert_use import ExpertUse
from tests.cli.test_cli import int4moe
from tests.real import EXAMPLE, HELDOUT


def test_a_tree_with_sizes():
    lines = int4moe("inspect", EXAMPLE).stdout.splitlines()
    (experts,) = (number for number, line in enumerate(lines) if line[:3] in ("├─ ", "└─ ") and "mlp.experts.*" in line)
    assert lines[experts].endswith(" kB")
    inside = lines[experts + 1 : experts + 4]
    assert all("─ 16 x " in line and line[3:6] in ("├─ ", "└─ ") for line in inside)
    sizes = [float(line.split()[-2]) for line in (lines[experts], *inside)]
    assert sizes[0] == pytest.approx(sum(sizes[1:]), abs=0.2)


def test_a_store(tmp_path):
    int4moe("convert", EXAMPLE, tmp_path / "s", "--backend", "reference")
    text = int4moe("inspect", tmp_path / "s").stdout
    assert "prepacked store for bfloat16" in text and "mlp.experts: 16 experts, canonical/1" in text
    found = json.loads(int4moe("inspect", tmp_path / "s", "--json").stdout)
    assert found["source"] == str(EXAMPLE) and len(found["modules"]) == 15 and found["layouts"] == {"canonical/1": 15}
    assert sum(module["nbytes"] for module in found["modules"]) + found["other_nbytes"] <= found["nbytes"]


def test_routing_of_a_prompt(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot = tmp_path / "use.svg"
    done = int4moe("inspect", EXAMPLE, "--routing", "--prompt", "The statement is used to", "--plot", plot, "--json")
    found = json.loads(done.stdout)
    assert found["tokens"] == 5 and [sum(layer["counts"]) for layer in found["layers"]] == [20, 20, 20]
    assert "<svg" in plot.read_text()
    text = int4moe("inspect", EXAMPLE, "--routing", "--text", HELDOUT).stdout
    assert "layer 0" in text and "16/16 used" in text and "use against even use" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--routing"], "--routing needs a text: either --prompt or --text"),
        (["--routing", "--text", "no/such"], "no/such: cannot be read: "),
        (["--prompt", "x"], "--prompt, --text and --plot of inspect belong to --routing"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence):
    done = int4moe("inspect", EXAMPLE, *arguments, status=2)
    assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_cells_are_shared_where_the_terminal_is_narrow():
    console = Console(width=60, record=True, file=io.StringIO())
    counts = [0] * 128
    counts[100] = 7
    heatmap.show(console, [ExpertUse("model.layers.3.mlp.experts", counts)], 7)
    lines = console.export_text().splitlines()
    assert lines[0] == "7 tokens, 128 experts, 10 in a cell"
    assert lines[1].startswith("layer 3     ··········◆·· 1/128 used, expert 100 x128.0")
