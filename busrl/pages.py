"""Places where a reader opens what texts of busrl name: a page (`docs/serve.md`), or a file of `configs/`.

In a clone both are files, and a text stays as it is. A wheel has the files of configs/ as package data and no pages:
there a page is an address, in the files of configs/ too, since setup.py builds them so. Talks to nothing and knows
nothing of who prints: all of them use `opened`.
"""

from __future__ import annotations

import re
from pathlib import Path

SITE = "https://busrl.readthedocs.io/latest/"  # of the newest version; a placeholder: nothing is published there yet
SOURCE = "https://github.com/busrl/busrl"  # a placeholder too
PACKAGE = Path(__file__).parent
CONFIGS = (PACKAGE / "configs").resolve()  # in a clone, where that is a link, configs/ at its root
IS_CLONE = (PACKAGE.parent / "pyproject.toml").is_file() and (PACKAGE.parent / "docs").is_dir()
PAGE = re.compile(r"(?<![\w/.~-])docs/([a-z0-9/-]+)\.md\b")
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?://|#)([^)\s]+)")  # of Markdown, with no address
FILE = re.compile(r"(?<![\w/.~-])configs/[a-z0-9-]+(?:\.fit)?\.(?:toml|jsonl|json)\b")


def opened(text: str, is_clone: bool = IS_CLONE) -> str:
    """The text with each page and each file of configs/ under the name by which this reader can open it; a longer path
    that ends like one is the reader's own."""
    if is_clone:
        return text
    return FILE.sub(lambda name: str(shipped(Path(name[0]))), addressed(text))


def addressed(text: str) -> str:
    """The text with the address of each page in place of its file."""
    return PAGE.sub(rf"{SITE}\1/", text)


def published(readme: str) -> str:
    """README.md as an index of packages shows it, where a link to a file of the repository leads nowhere."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}{SOURCE}/{kind}/HEAD/{link[2]}"

    return LINK.sub(absolute, addressed(readme))


def shipped(path: Path) -> Path:
    """The file that a command or a text names: the reader's, else for `configs/NAME` the one that came with busrl."""
    ours = CONFIGS / path.name
    return ours if path.parts == ("configs", path.name) and not path.exists() and ours.is_file() else path
