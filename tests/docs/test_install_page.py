"""The extras: the page's table says what pyproject.toml has, none repeats another, and each package names its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from busrl.pages import SITE, SOURCE
from busrl.system.imports import EXTRAS

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)
import tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_MAINTAINERS = {"test", "lint"}


def names(requirements: list[str]) -> set[str]:
    """Packages and extras of busrl that these requirements name."""
    brought: set[str] = set()
    for text in requirements:
        own = re.fullmatch(r"busrl\[([a-z0-9,-]+)\]", text)
        brought |= set(own[1].split(",")) if own else {re.split(r"[<>=;\[ ]", text)[0]}
    return brought


REQUIRED = {"(none)": names(PROJECT["dependencies"]) - {"tomli"}} | {
    extra: names(texts) for extra, texts in PROJECT["optional-dependencies"].items() if extra not in FOR_MAINTAINERS
}


def test_the_table_of_extras_says_what_each_brings() -> None:
    table = (ROOT / "docs/install.md").read_text().split("## Extras")[1].split("\n\n")[1]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert {row[0]: set(re.split(r", | and ", row[1])) for row in rows} == REQUIRED


def test_no_extra_brings_just_what_another_brings() -> None:
    brought = [frozenset(packages) for packages in REQUIRED.values()]
    assert len(brought) == len(set(brought)) and all(brought)


def test_a_missing_package_names_an_extra_that_brings_it() -> None:
    wrong = [
        (package, extra) for package, extra in EXTRAS.items() if package.replace("_", "-") not in
        {name.replace("_", "-") for name in REQUIRED[extra]}
    ]
    assert not wrong


def test_the_metadata_of_the_package_leads_to_the_site() -> None:
    assert PROJECT["urls"]["Documentation"] == SITE and PROJECT["urls"]["Source"] == SOURCE
    assert f"repo_url: {PROJECT['urls']['Source']}\n" in (ROOT / "mkdocs.yml").read_text()


def test_every_extra_that_a_text_names_exists() -> None:
    known = set(PROJECT["optional-dependencies"])
    files = [*(ROOT / "busrl").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "Makefile"]
    texts = {path.name: re.findall(r"(?:busrl|-e '\.)\[([a-z0-9,]+)\]", path.read_text()) for path in files}
    named = {(name, extra) for name, extras in texts.items() for text in extras for extra in text.split(",")}
    assert named and not [pair for pair in named if pair[1] not in known]
