"""The pages lead somewhere: links exist, and keys, defaults and files that they name are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tomllib

from busrl.algorithms.advantages import ADVANTAGES
from busrl.algorithms.losses import LOSSES
from busrl.topology import schema

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "benchmarks/README.md",
           "changes/README.md")
PAGES = [  # reports are made by tools/gpu_check.py
    *(ROOT / name for name in OUTSIDE),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reports"),
]
ALGORITHMS = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("algorithms", "beyond-groups", "step"))
CONCEPTS = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("concepts", "ways"))


MADE_BY_READERS = {"tests/algorithms/test_median.py"}


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_of_the_repository(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    left, seen = [ROOT / "README.md"], set()
    while left:
        page = left.pop()
        if page in seen:
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", page.read_text())
        left += [(page.parent / link).resolve() for link in links if not link.startswith("http")]
    assert not set(PAGES) - seen


def default_of(key: str) -> Any:
    """The declared default of `table.key`."""
    table, name = key.split(".")
    [declared] = [field.type for field in fields(schema.Topology) if field.name == table]
    cls = getattr(schema, str(declared), None)
    if cls is None:  # a table of another module of the configuration
        cls = type(next(field.default for field in fields(schema.Topology) if field.name == table))
    [default] = [field.default for field in fields(cls) if field.name == name]
    return default


@pytest.mark.parametrize(
    ("key", "said"), re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| ([-\d.]+) \|", ALGORITHMS, flags=re.M)
)
def test_a_default_on_the_algorithms_page_is_that_of_the_code(key: str, said: str) -> None:
    assert default_of(key) == float(said)


def test_the_algorithms_page_lists_every_loss_and_estimator_and_marks_defaults() -> None:
    for names, key in ((ADVANTAGES, "learner.advantage"), (LOSSES, "learner.loss")):
        for name in names:
            assert re.search(rf"^\| `{name}`( \(default\))? \|", ALGORITHMS, flags=re.M), name
        assert f"| `{default_of(key)}` (default) |" in ALGORITHMS


def test_every_key_on_the_algorithms_page_is_a_key_of_a_topology() -> None:
    shown = "\n".join(path.read_text() for path in sorted((ROOT / "configs").glob("reference*.toml")))
    keys: set[str] = set()
    table = ""
    for line in shown.splitlines():
        if head := re.match(r"#?\[+([a-z_.]+)\]", line):
            table = head.group(1)
        elif entry := re.match(r"#?([a-z_]+) = ", line):
            keys.add(f"{table}.{entry.group(1)}")
    tables = {key.rsplit(".", 1)[0] for key in keys}
    named = {name for name in re.findall(r"`([a-z_]+\.[a-z_]+)\b", ALGORITHMS) if name.split(".")[0] in tables}
    assert named and not named - keys - tables  # a key of a table in a table is cut to that table


def test_every_file_that_the_concepts_page_names_exists() -> None:
    named = re.findall(r"`(?:busrl/)?([a-z_]+/[a-z_/]*(?:\.py)?)`", CONCEPTS)
    assert len(named) > 10
    assert not [name for name in named if not any((ROOT / base / name).exists() for base in ("busrl", "."))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    files = set(re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", text)) - MADE_BY_READERS
    bases = (ROOT / "busrl", ROOT, page.parent)
    assert not {name for name in files if not any((base / name).is_file() for base in bases)}
    for name in set(re.findall(r"`(busrl(?:\.[a-z_0-9]+)+)\b", text)) - {"busrl.json"}:
        *package, last = name.split(".")  # the last name may be one in a module
        places = [ROOT.joinpath(*package, last), ROOT.joinpath(*package, f"{last}.py"),
                  ROOT.joinpath(*package).with_suffix(".py"), ROOT.joinpath(*package, "__init__.py")]
        assert any(place.exists() for place in places), f"{page.name}: {name}"


def test_the_topology_of_the_readme_is_read() -> None:
    [text] = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    tables = tomllib.loads(text)
    assert {field.name for field in fields(schema.Topology)} >= set(tables)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_cell_of_a_table_is_longer_than_30_words(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    assert not [cell for cell in cells if len(cell.split()) > 30]
