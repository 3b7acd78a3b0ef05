"""Puts the files of `changes/` together: the section of CHANGELOG.md of the next release.

    python tools/changelog.py                     # print it
    python tools/changelog.py --release 0.2.0     # write it into CHANGELOG.md and remove the files

A file has one entry, `KIND: text` on one line or two. Knows nothing of versions but the one that it is given.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("added", "changed", "fixed", "removed")
LONGEST = 150
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\.md")
ENTRY = re.compile(rf"({'|'.join(KINDS)}): (\S[^\n]*(?:\n\S[^\n]*)?)\n")


class FormatError(Exception):
    """A file of `changes/` that is no entry; the message says why and what to do."""


def fragments(folder: Path) -> list[Path]:
    """The files with an entry, in the order of their names."""
    return sorted(path for path in folder.iterdir() if path.name not in ("README.md", ".gitkeep"))


def entry_of(path: Path) -> tuple[str, str]:
    """Kind and text of one file; FormatError if it is no entry."""
    if not NAME.fullmatch(path.name):
        raise FormatError(f"{path.name}: a name is lower case with dashes and ends in .md, as `monitor-colours.md`")
    text = path.read_text()
    match = ENTRY.fullmatch(text)
    if match is None:
        raise FormatError(f"{path.name}: write `KIND: text` on one line or two; KIND is one of {', '.join(KINDS)}")
    longest = max(map(len, text.splitlines()))
    if longest > LONGEST:
        raise FormatError(f"{path.name}: a line has {longest} characters; at most {LONGEST}")
    return match[1], " ".join(match[2].split("\n"))


def section(title: str, entries: Sequence[tuple[str, str]]) -> str:
    """The section of a release: its entries by kind."""
    lines = [f"## {title}"]
    for kind in KINDS:
        texts = [text for name, text in entries if name == kind]
        lines += ["", f"### {kind.capitalize()}", *(f"- {text}" for text in texts)] if texts else []
    return "\n".join(lines) + "\n"


def with_release(changelog: str, release: str) -> str:
    """The changelog with that section before all others."""
    head, mark, rest = changelog.partition("\n## ")
    return f"{head}\n{release}{mark}{rest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", metavar="VERSION", help="write the section of this version and remove the files")
    options = parser.parse_args()
    paths = fragments(ROOT / "changes")
    try:
        entries = [entry_of(path) for path in paths]
    except FormatError as problem:
        print(f"changes/{problem}", file=sys.stderr)
        return 1
    if not options.release:
        print(section("Next release", entries), end="")
        return 0
    changelog = ROOT / "CHANGELOG.md"
    release = section(f"{options.release} ({time.strftime('%Y-%m-%d')})", entries)
    changelog.write_text(with_release(changelog.read_text(), release))
    for path in paths:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
