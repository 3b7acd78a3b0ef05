"""The result of an audit: numbers, findings, and the page that a person reads.

Talks to nothing. Knows nothing of files or rules; `rules` fills it in.

- A finding of severity "error" breaks a promise of the ledger; a "note" says what was chosen or is on its way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice

EXAMPLES = 8
STATES = {
    "running": "running now; samples in slots are in flight",
    "killed": "no process runs, and its ring is still there: the next start finishes the samples in it",
    "damaged": "no process runs, and its ring cannot be used (bad_ring says why): the next start refuses until "
    "`busrl ring clean RUN_DIR --force`, and then generates again what was in its slots",
    "finished": "ended in order; samples that were open are in open.bin",
    "gone": "no process runs, and there is neither a ring nor an open.bin: the next start generates open samples again",
}


@dataclass(frozen=True)
class Finding:
    """A kind of finding: how often, in words, and the first few uids (or steps, slots, files)."""

    kind: str
    severity: str  # "error" | "note"
    count: int
    text: str
    examples: tuple[int | str, ...] = ()


def _finding(severity: str, kind: str, where: Collection[int | str], text: str, count: int = 0) -> Finding:
    """`where` are all the uids (or steps, slots, files) that it was found at, if there are any."""
    few = tuple(place if isinstance(place, str) else int(place) for place in islice(where, EXAMPLES))
    return Finding(kind, severity, count or len(where), text, few)


error = partial(_finding, "error")  # a broken promise
note = partial(_finding, "note")  # something to know


@dataclass(frozen=True)
class Counts:
    """The numbers of a run, each recomputed from its files. A sample is a uid."""

    dispatched: int = 0  # training samples with any fate
    trained: int = 0  # in the history that survives: newest checkpoint and log together
    in_flight: int = 0  # dispatched and in a slot
    open: int = 0  # dispatched and in open.bin
    lost: int = 0  # dispatched and nowhere
    trained_twice: int = 0
    unsettled: int = 0  # in the history, still dispatched in its slot: the learner stores T next
    rolled_back: int = 0  # T, in no checkpoint and no log, with wal = "off"
    unsaved: int = 0  # the same while the learner that trained it still runs
    put_back: int = 0  # put-backs in draws.log
    step: int = 0  # newest step of the history
    checkpoint_step: int = -1  # -1: no checkpoint
    log_records: int = 0
    groups: int = 0  # groups in the history
    oldest: int = -1  # steps that the oldest group of the log was old when it was trained; -1: no record


@dataclass(frozen=True)
class AuditReport:
    """The outcome of one audit."""

    run_dir: str
    state: str  # a key of STATES
    counts: Counts = field(default_factory=Counts)
    histogram: Mapping[str, int] = field(default_factory=dict)  # fate in words -> training samples
    validation: Mapping[str, int] = field(default_factory=dict)
    rules: Mapping[str, int] = field(default_factory=dict)  # set aside by rule, by reason
    accidents: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(finding.kind for finding in self.errors)

    @property
    def exit_code(self) -> int:
        return 1 if self.errors else 0

    def to_json(self) -> dict[str, object]:
        return {"clean": not self.errors, **asdict(self)}


def render(report: AuditReport) -> str:
    """The report for a person; the last line is the verdict."""
    counts = report.counts
    lines = [f"audit of {report.run_dir}", f"  {report.state}: {STATES.get(report.state, '')}"]
    saved = f"checkpoint of step {counts.checkpoint_step}" if counts.checkpoint_step >= 0 else "no checkpoint"
    lines.append(
        f"  step {counts.step}: {counts.trained:,} samples in {counts.groups:,} groups trained; {saved}, "
        f"{counts.log_records:,} records in the log"
        + (f", age of their groups at most {counts.oldest} steps" if counts.oldest >= 0 else "")
    )
    lines += _table("training samples by fate", report.histogram, report)
    lines += _table("validation samples by fate", report.validation, report)
    where = {
        "in a slot": counts.in_flight,
        "in open.bin": counts.open,
        "trained, fate to follow": counts.unsettled,
        "put back by a start": counts.put_back,
        "trained, not yet in a checkpoint": counts.unsaved,
        "rolled back (wal = off)": counts.rolled_back,
    }
    lines += _table("dispatched, and", {name: number for name, number in where.items() if number}, report)
    for finding in report.findings:
        examples = ", ".join(map(str, finding.examples)) + (", ..." if finding.count > len(finding.examples) else "")
        lines.append(f"  {finding.severity.upper()} {finding.kind} x {finding.count:,}: {finding.text}")
        lines += [f"      at {examples}"] if finding.examples else []
    accidents, rules = sum(report.accidents.values()), sum(report.rules.values())
    lines.append(
        f"  lost {counts.lost:,} | trained twice {counts.trained_twice:,} | set aside by rule {rules:,} | by accident "
        f"{accidents:,} | {'clean' if not report.errors else f'NOT CLEAN: {len(report.errors)} kinds of error'}"
    )
    return "\n".join(lines)


def _table(title: str, rows: Mapping[str, int], report: AuditReport) -> list[str]:
    if not rows:
        return []
    kind = {**dict.fromkeys(report.rules, "by rule"), **dict.fromkeys(report.accidents, "accident")}
    return [f"  {title}"] + [
        f"    {number:>12,}  {name:<34}{kind.get(name, '')}".rstrip() for name, number in rows.items()
    ]
