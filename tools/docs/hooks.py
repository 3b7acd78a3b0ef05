"""What mkdocs does with each page of docs/ before it builds it, so that a forge and the site show the same Markdown.

Called by mkdocs (`hooks` of mkdocs.yml); knows nothing of what the pages are about.
- A link to a file that is no page of the site leads to that file in the repository.
- A list or a table that follows a line of text begins a block of its own, as on a forge.
- A formula between dollar signs becomes MathML, which browsers draw without a script.
- `<!-- keys: FILE ... -->` becomes a table of keys for each table of these topologies, which a forge shows as files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PICTURES = (".png", ".svg")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
ITEM = re.compile(r"(- |\d+\. )")
CODE = re.compile(r"(`[^`]+`)")
KEYS = re.compile(r"<!-- keys: (.+) -->")
TABLE = re.compile(r"#?(\[+)([\w.]+)\]+(?:  # (.*))?")
KEY = re.compile(r"#?(\w+) = (.*?)  # (.*)")
PAGE = re.compile(r"\bdocs/([a-z-]+)\.md\b")
FORMULA = re.compile(r"(\$\$?)([^$]+)\1")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Text of a page as the site reads it."""
    address = config["repo_url"].rstrip("/")
    text = KEYS.sub(lambda files: "\n".join(key_tables(files[1].split())), markdown)
    return "\n".join(separated(rewritten(text.splitlines(), page.file.src_uri, address))) + "\n"


def key_tables(files: Iterable[str]) -> Iterator[str]:
    """A section for each table of the topologies: keys, defaults, meanings. A table may come in two parts."""
    about: dict[str, str] = {}
    rows: dict[str, list[str]] = {}
    for line in (line for file in files for line in (ROOT / file).read_text().splitlines()):
        if table := TABLE.fullmatch(line):
            name = f"{table[1]}{table[2]}{']' * len(table[1])}"
            about[name] = table[3] or about.get(name, "")
        elif key := KEY.fullmatch(line):
            value, meaning = key[2].replace("|", "\\|"), PAGE.sub(r"[\1](\1.md)", key[3]).replace("|", "\\|")
            rows.setdefault(name, []).append(f"| `{key[1]}` | `{value}` | {meaning} |")
    for name, keys in rows.items():
        said = PAGE.sub(r"[\1](\1.md)", about[name])
        yield from (f"## `{name}`", said, "", "| key | default | meaning |", "|---|---|---|", *keys, "")


def rewritten(lines: Iterable[str], page: str, repository: str) -> Iterator[str]:
    """The lines with links and formulas of the site; code stays as it is. `page` is relative to docs/."""
    in_code = False
    for line in lines:
        if line.startswith("```"):
            in_code = not in_code
        yield line if in_code else drawn(led_out(line, page, repository))


def led_out(line: str, page: str, repository: str) -> str:
    """A line whose links to files outside the site are addresses of the repository."""

    def address(match: re.Match[str]) -> str:
        path, mark, anchor = match[2].partition("#")
        place = PurePosixPath("docs", page).parent / path
        if not path or "://" in match[2] or in_site(ROOT / place):
            return match[0]
        target = (ROOT / place).resolve().relative_to(ROOT)
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{match[1]}{repository}/{kind}/main/{target}{mark}{anchor}{match[3]}"

    return LINK.sub(address, line)


def in_site(path: Path) -> bool:
    """True for pages and pictures of docs/ but reports, and for what is missing: mkdocs names such links."""
    path = path.resolve()
    if not path.exists():
        return True
    inside = path.is_relative_to(ROOT / "docs") and not path.is_relative_to(ROOT / "docs" / "reports")
    return inside and path.suffix in (".md", *PICTURES)


def drawn(line: str) -> str:
    """A line whose formulas are MathML; dollar signs in code are none."""
    parts = CODE.split(line)
    return "".join(part if part.startswith("`") else FORMULA.sub(mathml, part) for part in parts)


def mathml(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert  # the other functions work without it

    display = "block" if match[1] == "$$" else "inline"
    text: str = convert(match[2].replace(r"\|", r"\Vert "), display=display)
    return text.replace("*", "&#42;").replace("_", "&#95;").replace("|", "&#124;")  # these mean something in Markdown


def separated(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with an empty one where a list or a table follows text."""
    before, in_code = "", False
    for line in lines:
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code:
            begins_list = ITEM.match(line) and not ITEM.match(before) and not before.startswith(" ")
            begins_table = line.startswith("|") and not before.startswith("|")
            if before and (begins_list or begins_table):
                yield ""
        before = line
        yield line
