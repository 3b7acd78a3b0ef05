"""The user's table of keywords (`scheduler.keywords`), read from its file, with the faults in it by file and line.

Used by the preflight, which reports the faults, and by the predictors of a run and of a simulation, which use the
words. The rules for a table are those of `lengths.rules`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from busrl.errors import Problem
from busrl.predict.lengths.rules import Fault, Keywords, check
from busrl.topology import reader


def read_keywords(path: str | Path) -> tuple[Keywords, list[Problem]]:
    """The sound entries of a file's table, and the problems of the others. A problem without a place concerns the whole
    file."""
    nothing = Keywords({}, {})
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        return nothing, [Problem("", "", f"cannot be read ({reason})", "give the path of a table of keywords (.toml)")]
    try:
        tables = reader.parse_toml(text)
    except ValueError as error:
        problem = reader.syntax_error(path, text, error)[1]
        return nothing, [replace(problem, remedy='lines are "word" = number, and every word stands once')]
    places = reader.positions(text)
    keywords, faults = check(tables)
    return keywords, [_placed(path, places, fault) for fault in faults]


def problems_of(path: str) -> list[Problem]:
    """The problems of a table of keywords, for `busrl check`."""
    return read_keywords(path)[1]


def _placed(path: str | Path, places: dict[reader.KeyPath, int], fault: Fault) -> Problem:
    number = places.get(fault.path, places.get(fault.path[:1], 0))
    return Problem(f"{path}:{number}" if number else str(path), fault.value, fault.rule, fault.remedy)
