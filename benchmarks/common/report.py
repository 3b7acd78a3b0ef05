"""Results of a comparison: medians, ratios, the machine, as JSON and as a Markdown table."""

from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import sides


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def commit(root: Path) -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return sides.ran(command, cwd=root).output.strip() or "unknown"


def summary(runs: list[dict[str, Any]], against: str = "busrl") -> list[dict[str, Any]]:
    """Make a row per system: medians over its runs, and the ratio of its seconds to busrl's, run by run."""
    rows = []
    for system in dict.fromkeys(run["system"] for run in runs):
        mine = [run for run in runs if run["system"] == system]
        seconds = [run["seconds"] for run in mine]
        rows.append(
            {
                "system": system,
                "runs": len(mine),
                "reached": sum(run["reached"] for run in mine),
                "seconds": statistics.median(seconds),
                "seconds_min": min(seconds),
                "seconds_max": max(seconds),
                **{key: statistics.median(run[key] for run in mine) for key in ("cpu_seconds", "updates", "samples")},
                "per_update_s": statistics.median(run["seconds"] / run["updates"] for run in mine),
                "load_before_max": max(run["load_before"][0] for run in mine),
                "cpu_ms_by_part": _by_part(mine),
            }
        )
    base = next((row for row in rows if row["system"] == against), None)
    for row in rows:
        row["ratio"] = round(row["seconds"] / base["seconds"], 3) if base else None
        row["paired_ratios"] = _paired(runs, row["system"], against)
    return rows


def _by_part(runs: list[dict[str, Any]]) -> dict[str, float]:
    """CPU milliseconds an update of each part of a system that says them: medians over its runs."""
    parts = dict.fromkeys(name for run in runs for name in run.get("cpu_by_part", ()))
    return {
        name: round(1000 * statistics.median(run["cpu_by_part"].get(name, 0.0) / run["updates"] for run in runs), 1)
        for name in parts
    }


def _paired(runs: list[dict[str, Any]], system: str, against: str) -> list[float]:
    """Seconds of `system` over seconds of `against`, for runs of the same round and seed."""
    times = {(run["system"], run["round"], run["seed"]): run["seconds"] for run in runs}
    ratios = []
    for run in runs:
        base = times.get((against, run["round"], run["seed"]))
        if run["system"] == system and base is not None:
            ratios.append(round(run["seconds"] / base, 3))
    return ratios


def table(result: dict[str, Any]) -> str:
    host = result["machine"]
    lines = [
        f"# Time to a mean reward of {result['goal']} (last 10 updates, all samples), lr {result['lr']:g}",
        "",
        f"{host['cpu']}, {host['cores']} cores, Linux {host['kernel']}, Python {host['python']}, "
        f"commit {result['commit']}, {result['date']}.",
        f"Seeds {', '.join(map(str, result['seeds']))}, {result['rounds']} round(s), systems taken in turn"
        f"{'' if result['turns'] == result['turns_asked'] else _cut_short(result)}.",
        "The clock runs from the first generated sequence, imports and model loading done, for every system alike.",
        "",
        "| system | reached | seconds (min to max) | CPU s | updates | samples | s/update | over busrl | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["summary"]:
        lines.append(
            f"| {row['system']} | {row['reached']}/{row['runs']} "
            f"| {row['seconds']:.1f} ({row['seconds_min']:.1f} to {row['seconds_max']:.1f}) "
            f"| {row['cpu_seconds']:.1f} | {row['updates']:g} | {row['samples']:g} | {row['per_update_s']:.3f} "
            f"| {'' if row['ratio'] is None else format(row['ratio'], '.2f')} | {row['load_before_max']:.1f} |"
        )
    lines += [
        "",
        "Figures are medians. `over busrl`: seconds over busrl's; `load`: highest one-minute load before a run.",
    ]
    if of_parts := {row["system"]: row["cpu_ms_by_part"] for row in result["summary"] if row["cpu_ms_by_part"]}:
        lines += ["", "CPU milliseconds an update, by part:"]
        lines += [f"- {system}: {_listed(parts)}" for system, parts in of_parts.items()]
    if result["failures"]:
        lines += ["", "Runs that failed:", *(f"- {failure.splitlines()[0]}" for failure in result["failures"])]
    return "\n".join(lines) + "\n"


def _cut_short(result: dict[str, Any]) -> str:
    return f"; stopped after {result['turns']} of {result['turns_asked']} turns of a seed"


def _listed(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {ms:g}" for name, ms in parts.items())
