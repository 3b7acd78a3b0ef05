"""The report: JSON with everything, and a page of Markdown for a reader. Knows nothing of how it was found out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(folder: Path, name: str, found: dict[str, Any]) -> tuple[Path, Path]:
    """Both files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / f"{name}.json", folder / f"{name}.md"
    data.write_text(json.dumps(found, indent=1) + "\n")
    page.write_text(markdown(found))
    return data, page


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
    ]  # fmt: skip
    for check in found["checks"]:
        if check["name"] != "machine" and (check["figures"] or check["bars"] or check["notes"]):
            lines += section(check)
    return "\n".join(lines)


def section(check: dict[str, Any]) -> list[str]:
    lines = [f"## {check['name']}: {check['title']}", ""]
    if check["bars"]:
        lines += ["| has to hold | wanted | found | |", "|---|---|---|---|"]
        lines += [f"| {b['what']} | {b['wanted']} | {b['found']:g} | {'kept' if b['kept'] else '**missed**'} |"
                  for b in check["bars"]]  # fmt: skip
        lines.append("")
    if check["figures"]:
        lines += ["| measured | |", "|---|---|", *(f"| {name} | {_shown(v)} |" for name, v in check["figures"].items())]
        lines.append("")
    lines += [f"{note}\n" for note in check["notes"]]
    return lines


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
