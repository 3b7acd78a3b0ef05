"""The report: JSON with everything, and a page of Markdown for a reader. Knows nothing of how it was found out."""

from __future__ import annotations

import itertools
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class Report:
    """The two files of one run of the tool, under a name that no other run has: the device and a stamp, by default the
    time. May be written any number of times; each file is replaced as a whole."""

    def __init__(self, folder: Path, stamp: str = "") -> None:
        self._folder = folder
        self._stamp = stamp or time.strftime("%Y%m%d-%H%M%S")
        self._wanted = ""
        self.data = self.page = folder

    def write(self, found: dict[str, Any]) -> None:
        """OSError if the folder can not be written to."""
        device = "".join(c if c.isalnum() else "-" for c in found["device"].lower())
        wanted, before = f"gpu-{device}-{self._stamp}", (self.data, self.page)
        renamed = wanted != self._wanted
        if renamed:  # the device's name is known only after the first check
            self._reserve(wanted)
        _write_whole(self.data, json.dumps(found, indent=1) + "\n")
        _write_whole(self.page, markdown(found))
        if renamed and self._wanted:
            for path in before:
                path.unlink(missing_ok=True)
        self._wanted = wanted

    def _reserve(self, wanted: str) -> None:
        """An empty file of that name, or of that name with a number."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for count in itertools.count(1):
            data = self._folder / f"{wanted}{f'-{count}' if count > 1 else ''}.json"
            with suppress(FileExistsError):
                os.close(os.open(data, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                self.data, self.page = data, data.with_suffix(".md")
                return


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(text)
    os.replace(draft, path)


def markdown(found: dict[str, Any]) -> str:
    figures = next((c["figures"] for c in found["checks"] if c["name"] == "machine"), {})
    machine = [f"| {name} | {value} |" for name, value in figures.items()]
    lines = [
        f"# gpu_check: {found['device']}, {found['when']}", "",
        f"{found['verdict']} In {found['seconds']:.0f} s of {found['minutes']:g} minutes.",
        "Made by `tools/gpu_check.py`; what the checks are: docs/gpu.md.", "",
        *(f"{note}\n" for note in found.get("notes", [])),
        "| machine | |", "|---|---|", *machine, "",
        "| check | result | s | why |", "|---|---|---|---|",
        *(f"| {c['name']} | {c['status']} | {c['seconds']:.0f} | {c['why']} |" for c in found["checks"]), "",
    ]
    for check in found["checks"]:
        if check["name"] != "machine" and (check["figures"] or check["bars"] or check["notes"]):
            lines += section(check)
    return "\n".join(lines)


def section(check: dict[str, Any]) -> list[str]:
    lines = [f"## {check['name']}: {check['title']}", ""]
    if check["bars"]:
        lines += ["| has to hold | wanted | found | |", "|---|---|---|---|"]
        lines += [f"| {b['what']} | {b['wanted']} | {b['found']:g} | {'kept' if b['kept'] else '**missed**'} |"
                  for b in check["bars"]]
        lines.append("")
    if check["figures"]:
        lines += ["| measured | |", "|---|---|", *(f"| {name} | {_shown(v)} |" for name, v in check["figures"].items())]
        lines.append("")
    lines += [f"{note}\n" for note in check["notes"]]
    return lines


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
