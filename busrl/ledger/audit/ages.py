"""How old every trained group of the log was, worked out again from the versions of its tokens.

Pure: talks to nothing. Knows nothing of how the learner or the engines count; it has the records alone.

- Age of a group = finished steps - the least step that a member counts from: that of its admission version, or of an
  older one that drew a token that is trained. So no member may count from a later step than its oldest trained token.
- Which step made a version is known from the records: each names the newest version before its step. Versions before
  the first record are judged only where it is the first of the run.
- A group above `max_staleness` is an error; under `over_age = "wait"` one with tokens that are too old themselves,
  which are read then and not trained, is a note.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from busrl.ledger.audit.readers import LoggedSample, LoggedStep
from busrl.ledger.audit.report import Finding, error, note
from busrl.ledger.audit.snapshot import Snapshot, Terms

UNKNOWN = -1


class VersionSteps:
    """The step that made a version; `UNKNOWN` for one from before the log."""

    def __init__(self, log: Sequence[LoggedStep]) -> None:
        self._versions = [step.version for step in log]
        self._steps = [step.step - 1 for step in log]

    def __call__(self, version: int) -> int:
        i = bisect_left(self._versions, version)
        if i == len(self._steps) or (i == 0 and self._steps[0] > 0):
            return UNKNOWN
        return self._steps[i]


def check_ages(snapshot: Snapshot) -> Iterator[Finding]:
    step_of, terms = VersionSteps(snapshot.log), snapshot.terms
    wrong: list[int] = []
    old: list[int] = []
    masked: list[int] = []
    for step in snapshot.log:
        for sample in step.samples:
            if sample.step != UNKNOWN and not counts_right(sample, step, step_of, terms):
                wrong.append(sample.uid)
        for group, age in ages_of(step).items():
            if terms.bound is not None and age > terms.bound:
                excused = terms.masks_old and _has_old_token(step, group, step_of, terms.bound)
                (masked if excused else old).append(group)
    if wrong:
        text = "counts its age from a later step than its oldest trained token, or from one that was not finished"
        yield error("wrong_age", wrong, text)
    if old:
        yield error("too_old", old, f"groups trained above the bound of {terms.bound} steps (weights.max_staleness)")
    if masked:
        text = f"groups trained above the bound of {terms.bound} steps, without the tokens that are too old"
        yield note("old_tokens", masked, text)


def oldest_age(log: Sequence[LoggedStep]) -> int:
    """The greatest age of any group of the log; -1 without one."""
    return max((age for step in log for age in ages_of(step).values()), default=-1)


def ages_of(step: LoggedStep) -> dict[int, int]:
    """The age of each group of a record at the time that it was trained."""
    least: dict[int, int] = {}
    for sample in step.samples:
        if sample.step != UNKNOWN:
            least[sample.group] = min(least.get(sample.group, sample.step), sample.step)
    return {group: step.step - 1 - oldest for group, oldest in least.items()}


def counts_right(sample: LoggedSample, step: LoggedStep, step_of: VersionSteps, terms: Terms) -> bool:
    """Whether a sample counts its age from no later step than that of its oldest trained token."""
    if sample.step >= step.step:
        return False
    versions = np.frombuffer(sample.last_versions if terms.last_segment else sample.versions, "<u4")
    made = step_of(int(versions.min())) if versions.size else UNKNOWN
    return made == UNKNOWN or sample.step <= made


def _has_old_token(step: LoggedStep, group: int, step_of: VersionSteps, bound: int) -> bool:
    versions = {
        int(version)
        for sample in step.samples
        if sample.group == group
        for version in np.frombuffer(sample.versions, "<u4")
    }
    made = [step_of(version) for version in versions]
    # A version from before the log is older than the log's first step.
    return any(one == UNKNOWN or step.step - 1 - one > bound for one in made)
