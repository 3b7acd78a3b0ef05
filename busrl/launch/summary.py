"""`summary.json`, and the last lines that a person reads when a run has ended.

Pure but for writing one file: puts together what the supervisor, the bus and the audit know. Knows nothing of how they
know it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from busrl.launch.progress import Progress, duration, short
from busrl.launch.story import in_words
from busrl.launch.supervisor import Child
from busrl.ledger.audit import AuditReport
from busrl.ledger.files import write_whole
from busrl.paths import RunPaths


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "finished", "stopped" (by a signal) or "failed"; `why` is for a person."""

    kind: str
    why: str
    exit_code: int


def build(
    outcome: Outcome,
    progress: Progress,
    children: list[Child],
    report: AuditReport | None,
    still_open: int,
    now: float,
    usage: dict[str, dict[str, Any]],
    stays: dict[str, dict[str, float]],
    crashes_missing: list[str],
) -> dict[str, Any]:
    """The content of summary.json; `usage` as `Usage.summary` gives it, "launch" included; `stays` as
    `Stays.summary` does; `crashes_missing`: planned deaths that never came."""
    reward = progress.recent_reward()
    return {
        "name": progress.name,
        "outcome": outcome.kind,
        "why": outcome.why,
        "exit_code": outcome.exit_code,
        "goal_reached": outcome.exit_code == 0,
        "ended": time.time(),
        "seconds": round(now - progress.started, 3),
        "steps": progress.step,
        "steps_before": progress.before,
        "max_steps": progress.goal,
        "version": progress.version,
        "seen": {"groups": progress.groups, "samples": progress.samples, "tokens": progress.tokens},
        "generated_tokens": progress.generated,
        "reward": {"first": progress.first_reward, "last_10_steps": reward},
        "validation": [{"round": r, "mean": mean, "samples": n} for r, mean, n in progress.validations],
        "processes": {
            "launch": usage.get("launch", {}),
            **{
                child.name: {
                    "restarts": child.restarts,
                    "killed_for_silence": child.kills,
                    **usage.get(child.name, {}),
                }
                for child in children
            },
        },
        "slots": stays,
        "faults": progress.faults,
        "faults_that_never_came": crashes_missing,
        "open_samples": still_open,
        "audit": report.to_json() if report else None,
    }


def write(paths: RunPaths, summary: dict[str, Any]) -> None:
    """Write summary.json whole."""
    write_whole(paths.summary, json.dumps(summary, indent=2, ensure_ascii=False, default=str).encode() + b"\n")


def final_lines(summary: dict[str, Any], report: AuditReport | None, paths: RunPaths) -> list[str]:
    """What stays on the screen."""
    mark = "✓" if summary["goal_reached"] else "✗"
    lines = [f"{mark} {summary['name']}: {summary['outcome']}, {summary['why']}"]
    before = f" ({summary['steps_before']} were done before)" if summary["steps_before"] else ""
    facts = [f"step {summary['steps']}/{summary['max_steps']} in {duration(summary['seconds'])}{before}"]
    first, last = summary["reward"]["first"], summary["reward"]["last_10_steps"]
    if first is not None:
        facts.append(f"reward {first:.3f} → {last:.3f}")
    means = [one["mean"] for one in summary["validation"]]
    if means:
        facts.append("validation " + " → ".join(f"{mean:.3f}" for mean in dict.fromkeys((means[0], means[-1]))))
    lines.append("  " + " · ".join(facts))
    busy = [
        f"{name} {one['busy_share']:.0%}"
        for name, one in summary["processes"].items()
        if name.partition("/")[0] in ("learner", "rollout", "reward") and one.get("busy_share") is not None
    ]
    if busy:
        lines.append("  busy: " + ", ".join(busy))
    again = {name: one["restarts"] for name, one in summary["processes"].items() if one.get("restarts")}
    if again:
        lines.append("  restarted: " + ", ".join(f"{name} {count}×" for name, count in again.items()))
    lines += [f"  WITH FAULTS ON PURPOSE: {line}" for line in summary["faults"]]
    lines += [f"  THIS DEATH NEVER CAME: {line}" for line in summary["faults_that_never_came"]]
    lines += [f"  {line}" for line in _waste(report)]
    lines.append(f"  {_ledger(summary, report)}")
    lines.append(f"  {paths.root}")
    return lines


def _waste(report: AuditReport | None) -> list[str]:
    """What was generated and not trained, by rule; nothing where that was less than a hundredth."""
    if report is None:
        return []
    ended = sum(report.rules.values()) + sum(report.accidents.values()) + report.counts.trained
    told = [f"{count / ended:.0%} {in_words(name)}" for name, count in report.rules.items() if 100 * count >= ended]
    return [f"not trained: {', '.join(told)} of {short(ended)} samples"] if told else []


def _ledger(summary: dict[str, Any], report: AuditReport | None) -> str:
    if report is None:
        return "audit: not made"
    counts = report.counts
    text = f"audit: {short(counts.trained)} samples trained, {counts.lost} lost, {counts.trained_twice} trained twice"
    accidents = sum(report.accidents.values())
    text += f", {accidents} by accident" if accidents else ""
    text += f", {summary['open_samples']} open" if summary["open_samples"] else ""
    return text if not report.errors else f"{text}; NOT CLEAN, see `busrl audit`: {', '.join(sorted(report.kinds))}"
