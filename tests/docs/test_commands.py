"""Every `busrl` command in a block of a page is one: its verb, options and the keys that it sets exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from busrl.cli.command import parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reports")]
LISTS = ("process", "reward.part", "data.source", "validation.set", "faults.crash", "faults.bus")


def commands(text: str) -> Iterator[list[str]]:
    """Arguments of each `busrl` in the blocks of a page that are in a shell's language, or in none."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S):
        if language in ("", "sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"(\S*/)?busrl |.*(&&|;|\bdo) busrl ", line):
                    yield from (words[1:] for words in simple(line) if words[0].rpartition("/")[2] == "busrl")


def simple(line: str) -> Iterator[list[str]]:
    """The commands of a shell's line, without comments, pipes and loops."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for ends, words in groupby(lexer, lambda word: set(word) <= set("();<>|&")):
        command = [word for word in words if word != "do"]
        if command and not ends:
            yield command


def known_keys() -> set[str]:
    keys, table = set(), ""
    for path in (ROOT / "configs").glob("reference*.toml"):
        for line in path.read_text().splitlines():
            if head := re.match(r"#?\s*\[+([\w.]+)\]", line):
                table = head[1]
            elif entry := re.match(r"#?\s*([a-z_]+) = ", line):
                keys.add(f"{table}.{entry[1]}")
    return keys


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_of_a_page_is_one_that_busrl_takes(page: Path) -> None:
    keys = known_keys()
    for arguments in commands(page.read_text()):
        told = io.StringIO()
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            try:
                options = parser(arguments).parse_args(arguments)
            except SystemExit as ended:
                assert ended.code == 0, f"{page.name}: busrl {shlex.join(arguments)}\n{told.getvalue()}"
                continue
        for setting in getattr(options, "set", None) or []:
            key = str(setting).partition("=")[0]
            assert key in keys or key.startswith(LISTS), f"{page.name}: {key} is no key"
