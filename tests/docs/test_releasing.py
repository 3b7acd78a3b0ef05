"""What a release rests on: the version stands once, the changelog has it, and issue forms ask for what answers them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import busrl

if sys.version_info < (3, 11):
    import tomli as tomllib
else:
    import tomllib

ROOT = Path(__file__).resolve().parents[2]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"


def test_the_version_stands_in_the_package_alone() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version", "readme"] and "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "busrl.__version__"}
    released = busrl.__version__.removesuffix(".dev0")
    assert f"## {released}" in (ROOT / "CHANGELOG.md").read_text() or released != busrl.__version__


@pytest.mark.parametrize(("form", "asked"), [("wrong.yml", {"done", "happened", "doctor", "report"}),
                                             ("missing.yml", {"wanted", "looked"})])
def test_a_form_asks_for_what_answers_an_issue(form: str, asked: set[str]) -> None:
    content: dict[str, Any] = yaml.safe_load((FORMS / form).read_text())
    required = {part["id"] for part in content["body"] if part.get("validations", {}).get("required")}
    assert content["name"] and content["description"] and required == asked
    labels = {part.get("id"): part["attributes"].get("label") for part in content["body"]}
    assert labels["doctor"] == "busrl doctor --json"
