"""`busrl audit`: what became of every sample of a run, recomputed from its files and its ring's raw bytes alone.

Reads a run that is alive, that ended, or that was killed, and changes nothing. It has its own readers for every file
and its own arithmetic for uids and prompts; it shares no counter and, but for the fate codes, no code with the run.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from busrl.ledger.audit import rules
from busrl.ledger.audit.report import AuditReport, Counts, Finding, render
from busrl.ledger.audit.snapshot import Snapshot, take
from busrl.states import ACCIDENTS, RULES, fate_name

__all__ = ["AuditReport", "Counts", "Finding", "audit", "render"]

SECOND_OPINIONS = 2
BLOCK = 1 << 20


def audit(run_dir: str | os.PathLike[str], *, prompts: str | os.PathLike[str] | None = None) -> AuditReport:
    """Audit one run directory. `prompts` names the prompt file if the topology does not (`tiny:...`).

    `NoSuchRun` if it is no run directory. A run that is going on is looked at again before anything is held against it.
    """
    root = Path(run_dir).resolve()
    for _ in range(1 + SECOND_OPINIONS):
        report = report_of(root, take(root, Path(prompts) if prompts else None))
        if report.state != "running" or not report.errors:
            break
    return report


def report_of(root: Path, snapshot: Snapshot) -> AuditReport:
    """Check one snapshot by all rules."""
    history = rules.history_of(snapshot)
    where = rules.dispatched(snapshot, history)
    checked = (
        *snapshot.problems,
        *rules.check_lost(snapshot, where),
        *rules.check_history(snapshot, history),
        *rules.check_trained(snapshot, history, where),
        *rules.check_payloads(snapshot),
        *rules.check_ages(snapshot),
        *rules.check_versions(snapshot),
        *rules.check_terms(snapshot),
        *rules.check_groups(snapshot, history),
        *rules.check_rerolls(snapshot),
        *rules.check_codes(snapshot),
        *rules.check_claims(snapshot),
        *rules.check_slots(snapshot),
        *rules.check_train_log(snapshot, history),
    )
    findings = tuple(finding for finding in checked if finding.count)
    samples = histogram(snapshot.last)
    return AuditReport(
        run_dir=str(root), state=snapshot.state, counts=_counts(snapshot, history, where, findings), histogram=samples,
        validation=histogram(snapshot.validate_last), rules=_part(samples, RULES), accidents=_part(samples, ACCIDENTS),
        findings=findings,
    )


def histogram(codes: npt.NDArray[np.uint8]) -> dict[str, int]:
    """Count samples by the name of their fate, without "none"; unknown codes have their own entries."""
    counts = np.zeros(256, np.int64)
    for start in range(0, codes.size, BLOCK):  # bincount makes eight bytes of each
        counts += np.bincount(codes[start : start + BLOCK], minlength=256)
    return {fate_name(code): int(counts[code]) for code in range(1, 256) if counts[code]}


def _part(histogram: dict[str, int], codes: frozenset[int]) -> dict[str, int]:
    names = {fate_name(code) for code in codes}
    return {name: count for name, count in histogram.items() if name in names}


def _counts(
    snapshot: Snapshot, history: rules.History, where: rules.Dispatched, findings: tuple[Finding, ...]
) -> Counts:
    def of(kind: str) -> int:
        return sum(finding.count for finding in findings if finding.kind == kind)

    steps = [step.step for step in snapshot.log]
    return Counts(
        dispatched=sum(histogram(snapshot.last).values()),
        trained=int(history.uids.size),
        in_flight=int(where.in_slot.size),
        open=int(where.in_open.size),
        lost=int(where.lost.size),
        trained_twice=of("trained_twice"),
        unsettled=int(where.unsettled.size),
        rolled_back=of("rolled_back"),
        unsaved=of("unsaved"),
        put_back=snapshot.put_back,
        step=max([history.saved_step, 0, *steps]),
        checkpoint_step=history.saved_step,
        log_records=len(steps),
        oldest=rules.oldest_age(snapshot.log),
        groups=int(rules.in_runs(rules.groups_of(history.uids, snapshot.terms.group_size))[0].size),
    )
