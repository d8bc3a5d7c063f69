"""Binding is process-wide, so each case runs in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from int4moe_ipex.threads import nodes

CODE = """
import json, os, sys
from int4moe_ipex.config import Config
from int4moe_ipex import threads
threads.apply(Config.load(json.loads(sys.argv[1]), environ={}).threads)
import torch
torch.ones(64, 64) @ torch.ones(64, 64)
tasks = {t: sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")}
policy = open("/proc/self/numa_maps").read().split()[1] if os.path.exists("/proc/self/numa_maps") else ""
print(json.dumps({"threads": torch.get_num_threads(), "cpus": list(tasks.values()), "policy": policy}))
"""


def run(section):
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps({"threads": section})], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_one_cpu():
    cpu = min(os.sched_getaffinity(0))
    status, out, err = run({"cpus": str(cpu)})
    assert status == 0, err
    told = json.loads(out)
    assert told["threads"] == 1 and all(cpus == [cpu] for cpus in told["cpus"])


def test_count_without_binding():
    status, out, err = run({"count": 1})
    assert status == 0, err
    told = json.loads(out)
    assert told["threads"] == 1 and sorted(os.sched_getaffinity(0)) in told["cpus"]


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"cpus": "100000"}, "threads: CPUs 100000 are not there for this process, which may use "),
        ({"numa_node": 99}, "threads.numa_node 99: this machine has 0"),
    ],
)
def test_what_is_not_there_is_an_error(section, sentence):
    status, _, err = run(section)
    assert status == 1 and f"ConfigError: {sentence}" in err


@pytest.mark.parametrize("section", [{"memory": "interleave"}, {"numa_node": 0}])
def test_memory_policy_is_set_or_refused_clearly(section):
    status, out, err = run(section)
    if status:
        assert "the kernel refuses a memory policy" in err
    else:
        policy = json.loads(out)["policy"]
        assert policy == "" or policy.startswith("interleave" if "memory" in section else "bind")


def test_nodes_cover_the_cpus_of_this_process():
    assert os.sched_getaffinity(0) <= set().union(*nodes().values())
