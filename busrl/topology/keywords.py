"""A user's table of keywords, `scheduler.keywords`: read, and every finding given its line.

Talks to one file. What a table must be is `busrl.scheduling.predictors.keywords`; knows nothing of predictors.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from busrl.errors import Problem
from busrl.scheduling.predictors.keywords import Fault, Keywords, check
from busrl.topology import lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read(path: str | Path) -> tuple[Keywords, list[Problem]]:
    """The table of a file without what is wrong in it, and all that is wrong. A problem without a place is the
    file's as a whole."""
    nothing = Keywords({}, {})
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        return nothing, [Problem("", "", f"can not be read ({reason})", "give the path of a table of keywords (.toml)")]
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return nothing, [_not_toml(path, text, str(error))]
    places = lines.positions(text)
    keywords, faults = check(tables)
    return keywords, [_placed(path, places, fault) for fault in faults]


def _placed(path: str | Path, places: dict[lines.Path, int], fault: Fault) -> Problem:
    number = places.get(fault.path, places.get(fault.path[:1], 0))
    return Problem(f"{path}:{number}" if number else str(path), fault.value, fault.rule, fault.remedy)


def _not_toml(path: str | Path, text: str, message: str) -> Problem:
    match = re.search(r"\(at line (\d+), column (\d+)\)", message)
    number = int(match.group(1)) if match else text.count("\n") + 1
    rows = text.splitlines()
    shown = rows[number - 1].strip() if 0 < number <= len(rows) else ""
    rule = "not TOML: " + re.sub(r" ?\(at .*\)$", "", message)
    return Problem(f"{path}:{number}", shown, rule, 'lines are "word" = number, and every word stands once')
