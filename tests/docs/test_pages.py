"""The pages say what the code does: generated ones are current, links lead somewhere, examples are accepted."""

import re
from pathlib import Path

import pytest
import yaml

from int4moe_ipex.config import Config
from tools import config_reference, support_table

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@pytest.mark.parametrize("page", [support_table, config_reference], ids=lambda page: page.OUT.name)
def test_generated_pages_are_current(page):
    name = f"python tools/{Path(page.__file__).name}"
    assert page.OUT.read_text(encoding="utf-8") == page.text(), f"out of date: run {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    for link in links:
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configurations_on_pages_are_valid(page):
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        Config.load(yaml.safe_load(block), environ={})


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index


def test_every_folder_is_on_the_map():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for file in (ROOT / "int4moe_ipex").glob("*/__init__.py"):
        assert f"`int4moe_ipex/{file.parent.name}/`" in text
