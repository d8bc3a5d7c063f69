"""What the ipex backend says when IPEX is missing or does not fit; runs everywhere."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from int4moe_ipex import cpu
from int4moe_ipex.backends import ipex
from int4moe_ipex.backends.base import LinearSpec, Rejected, RunConfig
from int4moe_ipex.errors import BackendError


class Package:
    def __init__(self, version: str, folder: Path):
        self.version, self.folder = version, folder

    def locate_file(self, path: str) -> Path:
        return self.folder / path


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Pretends that a version of IPEX is installed beside a version of torch; None for no IPEX."""

    def pretend(version: str | None, torch_version: str = "2.8.0+cpu", library: bool = False):
        def distribution(name: str):
            assert name == ipex.PACKAGE
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return Package(version, tmp_path)

        if library:
            (tmp_path / ipex.LIBRARY).parent.mkdir(parents=True)
            (tmp_path / ipex.LIBRARY).write_bytes(b"no library")
        monkeypatch.setattr(importlib.metadata, "distribution", distribution)
        monkeypatch.setattr(torch, "__version__", torch_version)
        ipex._find.cache_clear()
        ipex._load.cache_clear()

    yield pretend
    monkeypatch.undo()
    ipex._find.cache_clear()
    ipex._load.cache_clear()


@pytest.mark.parametrize(
    ("version", "torch_version", "words"),
    [
        (None, "2.8.0", "not installed: pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0"),
        ("2.7.0", "2.7.0+cpu", "only 2.8.0"),
        ("2.8.0", "2.13.0+cpu", "needs torch 2.8.0 exactly, and torch 2.13.0"),
        ("2.8.0+cpu", "2.8.0+cu128", "install it again"),
    ],
)
def test_each_misfit_is_one_sentence(installed, version, torch_version, words):
    installed(version, torch_version)
    found, line = ipex.status()
    assert not found and words in line and "\n" not in line
    verdict = ipex.IpexBackend().support_linear(LinearSpec(64, 32, 32, True), cpu.detect(), RunConfig(forced=True))
    assert verdict == Rejected(line)


def test_a_library_that_does_not_load_is_an_error_of_ours(installed):
    installed("2.8.0", library=True)
    with pytest.raises(BackendError, match=r"libintel-ext-pt-cpu.so does not load"):
        ipex._load()
