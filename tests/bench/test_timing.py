"""Batches, quantiles and the share of the machine that others used."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from int4moe_ipex.bench import timing


def test_a_batch_goes_through_the_calls_in_turn_and_drops_the_first():
    seen = []
    calls = [lambda i=i: (seen.append(i), time.sleep(0.002)) for i in range(3)]
    batch = timing.run_batch(calls, seconds=0.02)
    assert seen[:5] == [0, 1, 2, 0, 1]
    assert len(batch.seconds) == len(seen) - 1
    assert min(batch.seconds) >= 0.002 and 0 <= batch.foreign <= 1.5


def test_cpu_time_of_other_processes_is_seen():
    code = "import time; end = time.time() + 1.0\nwhile time.time() < end: pass"
    busy, own = timing.cpu_seconds()
    subprocess.run([sys.executable, "-c", code], check=True)
    busy_after, own_after = timing.cpu_seconds()
    # The child ran for a second and was ours to wait for, yet counts as another process.
    assert (busy_after - busy) - (own_after - own) > 0.3


@pytest.mark.parametrize(("q", "expected"), [(0, 1), (0.5, 2.5), (1, 4), (0.25, 1.75)])
def test_quantiles(q, expected):
    assert timing.quantile([4, 1, 3, 2], q) == pytest.approx(expected)


def test_few_tokens_get_many_routings():
    assert [timing.routing_count(t) for t in (1, 16, 512)] == [61, 16, 5]
