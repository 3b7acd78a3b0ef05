"""The site of docs/ (mkdocs.yml): pages of a readable length, all in the navigation; tasks two clicks from the index.

A strict build looks at links, anchors and orphans, where `make docs` has installed mkdocs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from busrl.pages import SITE
from tools.docs import hooks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text()
MOST_WORDS = 2500
LONGER = {
    "messages.md": "a table of every message, made by tools/reference/protocol_page: looked things up in, not read",
}
README_LINES = 120
A_MINUTE = 200  # words that somebody reads in a section before what they look for
LEAD_WORDS = 80  # before the first command or snippet of a page for users
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name != "reports")
# What somebody looks for, as the index calls it, and what the page has that tells it.
TASKS = [
    ("KL", ("learner.kl_coef", "model.reference")),
    ("Weights & Biases", ("sinks.project", "`wandb`")),
    ("ssh", ("hosts.start", "\"ssh\"")),
    ("samples", ("samples.jsonl", "version_runs")),
    ("engine of my own", ("## An engine", "TRANSPORTS")),
    ("exit codes", ("| 128 + n |",)),
    ("DAPO", ("| `dapo` |",)),
    ("LoRA", ("`lora.rank > 0`",)),
    ("several GPUs", ("ranks = 2", "`tensor = 2`")),
    ("full disk", ("## When the disk is full",)),
]


def test_the_readme_is_one_screen_of_120_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_at_most_2500_words_or_a_reason(name: str) -> None:
    words = len((DOCS / name).read_text().split())
    assert (words > MOST_WORDS) == (name in LONGER), f"{name}: {words} words"


def test_every_page_stands_once_in_the_navigation() -> None:
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", CONFIG, flags=re.M)
    assert sorted(listed) == PAGES


def pages_for_users() -> list[str]:
    """Pages of the navigation from Guide to Reference; those of Design and Figures are read, not done."""
    listed = CONFIG.partition("  - Guide:")[2].partition("  - Design:")[0]
    return re.findall(r": (\S+\.md)$", listed, flags=re.M)


@pytest.mark.parametrize("name", pages_for_users())
def test_a_page_for_users_begins_with_what_they_type(name: str) -> None:
    before, fence, _ = (DOCS / name).read_text().partition("```")
    assert fence and len(before.split()) <= LEAD_WORDS, "put the command that a reader came for under the title"


def targets(text: str, page: Path) -> list[Path]:
    links = re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", text)
    return [(page.parent / link).resolve() for link in links if "://" not in link]


@pytest.mark.parametrize(("task", "told"), TASKS, ids=[task for task, _ in TASKS])
def test_a_task_is_two_clicks_from_the_index(task: str, told: tuple[str, ...]) -> None:
    index = DOCS / "README.md"
    rows = [line for line in index.read_text().splitlines() if line.startswith("|") and task in line]
    near = [page for line in rows for page in targets(line, index)]
    assert near, f"the index does not say {task!r}"
    pages = [*near, *(page for first in near for page in targets(first.read_text(), first))]
    assert any(all(words in page.read_text() for words in told) for page in pages), [page.name for page in pages]


def asked() -> list[tuple[str, list[str], str, str]]:
    """Rows of the index's first table: what somebody wants, the keys and commands for it, and page and heading."""
    table = (DOCS / "README.md").read_text().partition("## Often asked\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| \[[^\]]+\]\(([^)#]+)#([^)]+)\) \|$", table, flags=re.M)
    assert len(rows) == table.count("\n| "), "a row has three columns, the last one a link to a heading"
    return [(want, re.findall(r"`([^`]+)`", keys), page, anchor) for want, keys, page, anchor in rows]


@pytest.mark.parametrize(("want", "keys", "page", "anchor"), asked(), ids=[want for want, *_ in asked()])
def test_what_is_often_asked_is_one_click_and_a_minute_away(want: str, keys: list[str], page: str, anchor: str) -> None:
    parts = re.split(r"^#+ (.+)$", (DOCS / page).read_text(), flags=re.M)
    slugs = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in parts[1::2]]
    from_there = parts[2 * slugs.index(anchor) + 1 :]
    near = " ".join(" ".join(from_there).split()[:A_MINUTE])
    assert keys and not [key for key in keys if key not in near], near


@pytest.mark.parametrize(("link", "address"), [
    ("[a](ring.md#fates)", "[a](ring.md#fates)"),
    ("[a](#here)", "[a](#here)"),
    ("![a](monitor.png)", "![a](monitor.png)"),
    ("[a](https://x.org/y)", "[a](https://x.org/y)"),
    ("[a](missing.md)", "[a](missing.md)"),
    ("[a](../configs/reference.toml)", "[a](https://forge/busrl/blob/main/configs/reference.toml)"),
    ("[a](../benchmarks/README.md#gone)", "[a](https://forge/busrl/blob/main/benchmarks/README.md#gone)"),
    ("[a](reports/)", "[a](https://forge/busrl/tree/main/docs/reports)"),
])
def test_links_out_of_the_site_lead_to_the_repository(link: str, address: str) -> None:
    assert hooks.led_out(link, "operating.md", "https://forge/busrl") == address


def test_a_list_or_table_behind_text_begins_a_block() -> None:
    text = "a text\n- one\n- two\n  more\n- three\n```\nx\n- no list\n```\nfigures\n| a |\n|---|".splitlines()
    assert "\n".join(hooks.separated(text)) == (
        "a text\n\n- one\n- two\n  more\n- three\n```\nx\n- no list\n```\nfigures\n\n| a |\n|---|"
    )


def test_every_key_of_every_topology_stands_in_a_table_of_the_site() -> None:
    files = [f"configs/{path.name}" for path in sorted((ROOT / "configs").glob("reference*.toml"))]
    [named] = hooks.KEYS.findall((DOCS / "keys.md").read_text())
    assert sorted(named.split()) == files
    told = re.findall(r"^\| `(\w+)`", "\n".join(hooks.key_tables(files)), flags=re.M)
    text = "".join((ROOT / name).read_text() for name in files)
    assert sorted(told) == sorted(re.findall(r"^#?(\w+) = ", text, flags=re.M))


@pytest.mark.long
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    beside = ROOT / ".venv" / "docs" / "bin" / "mkdocs"
    program = str(beside) if beside.exists() else shutil.which("mkdocs")
    if program is None:
        pytest.skip("mkdocs is not installed: `make docs` does that")
    command = [program, "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    built = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site").rglob("*.html")}
    assert {Path(name).with_suffix("") / "index.html" for name in PAGES if "README" not in name} <= built


def test_printed_addresses_are_those_under_which_a_version_is_published() -> None:
    [address] = re.findall(r"^site_url: (\S+)", CONFIG, flags=re.M)
    assert f"{address}latest/" == SITE and "canonical_version: latest" in CONFIG
    assert "--update-aliases 0.1 latest" in (DOCS / "releasing.md").read_text()
