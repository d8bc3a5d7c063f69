"""Reports: the JSON's fields, the table, the comparison with a baseline, the plot."""

from __future__ import annotations

import io
import json

import pytest
import torch

from int4moe_ipex.bench import report
from int4moe_ipex.bench.layer import LayerCase, Row
from int4moe_ipex.bench.limits import Limits
from int4moe_ipex.bench.shapes import layer_shape
from int4moe_ipex.cpu import CpuFeatures
from int4moe_ipex.errors import ConfigError

CPU = CpuFeatures("Some CPU", frozenset())


def make(seconds: float = 0.002, group_size: int = 128) -> dict:
    rows = [
        Row(
            "native",
            "w4a16",
            "native/avx2/w4a16",
            tokens,
            seconds * tokens,
            1e-3,
            3e-3,
            9,
            1e10,
            2e10,
            3e9,
            0.5,
            0.1,
            1e-3,
        )
        for tokens in (1, 4)
    ]
    case = LayerCase(layer_shape("64x32x8x2"), group_size, act_order=True)
    return report.as_dict(case, report.machine(CPU, 2, "avx2"), Limits(4e10, 3e10, 6e10), torch.bfloat16, rows)


def test_json_round_trip_and_table():
    result = json.loads(json.dumps(make()))
    assert result["layer"]["act_order"] is True and result["layer"]["dtype"] == "bfloat16"
    assert result["limits"] == {"read": 4e10, "fma": 3e10, "int8": 6e10, "bf16": 0.0}
    from rich.console import Console

    out = io.StringIO()
    report.print_rows(result, Console(file=out, width=160))
    text = out.getvalue()
    for part in ("act-order", "Some CPU, 2 threads, avx2", "40.0 GB/s", "native/avx2/w4a16", "2.000", "50%", "1.0e-03"):
        assert part in text


def test_compare_takes_the_ratio_of_the_shares_of_the_ceilings(tmp_path):
    file = tmp_path / "before.json"
    slower_machine = make(0.004)  # twice the time at the same shares
    slower_machine["rows"][1] |= {"read_share": 0.3, "peak_share": 0.4}
    file.write_text(json.dumps(slower_machine))
    changes = report.compare(report.read_json(file), make(0.002))
    assert [(c.tokens, c.ratio, c.by_share) for c in changes] == [(1, 1.0, True), (4, 0.5 / 0.4, True)]
    assert not any(c.regressed(0.0) for c in changes)


def test_compare_takes_times_where_ceilings_are_unknown():
    before, now = make(0.002), make(0.0023)
    for row in before["rows"]:
        row["peak_share"] = None
    change = report.compare(before, now)[0]
    assert change.ratio == pytest.approx(0.87, abs=0.01) and not change.by_share
    assert change.regressed(0.1) and not change.regressed(0.2)


def test_compare_refuses_another_layer_or_another_file(tmp_path):
    with pytest.raises(ConfigError, match="another layer"):
        report.compare(make(group_size=32), make())
    with pytest.raises(ConfigError, match="not a layer report"):
        report.compare({"schema": 0}, make())
    with pytest.raises(ConfigError, match="no row"):
        report.compare(make() | {"rows": []}, make())
    with pytest.raises(ConfigError, match="cannot read"):
        report.read_json(tmp_path / "absent.json")


def test_plot_writes_an_svg_with_every_line(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(make(), tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert text.lstrip().startswith("<?xml") and "native/avx2/w4a16" in text
