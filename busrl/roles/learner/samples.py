"""Records of the log as the trainer's samples, and which of their tokens are trained.

Used by the training step and by the parity gate. Knows nothing of losses, advantages, models or the ring.

- What is not trained is context: seen by the model, in no loss and no denominator. Its reward counts all the same.
- Which tokens are trained follows from the record, from the terms of its step and from the steps of versions: a replay
  of the log leaves out the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from busrl.ledger.wal import SampleRecord, Terms
from busrl.states import Finish
from busrl.topology import Topology
from busrl.training.batch import Sample, Turns, numbered
from busrl.weights.base import VersionSteps

KEPT = 256  # versions whose step is remembered; older ones count as at most as old as the oldest of these


def to_sample(record: SampleRecord, last_only: bool = False, skipped: Sequence[int] = (0,)) -> Sample:
    """A record of the log as the trainer takes it; the arrays share the record's bytes.

    The first `skipped` tokens of each turn are context; `last_only`: all segments but the last are.
    """
    return Sample(
        uid=record.uid, group=record.group, member=record.member, reward=record.reward,
        temperature=record.temperature, finish=record.finish, prompt_ids=record.prompt_array(),
        token_ids=record.token_array(), behaviour_logprobs=record.logprob_array(),
        policy_versions=record.version_array(), turns=_turns(record, skipped),
        context=0 if record.turns else max(skipped[0], record.earlier if last_only else 0),
    )


def _turns(record: SampleRecord, skipped: Sequence[int]) -> Turns | None:
    """Places of the turns of an episode; None for an answer."""
    if not record.turns:
        return None
    lengths = record.turn_lengths()
    left_out = np.zeros(len(lengths), np.int64)
    left_out[: len(skipped)] = skipped
    hidden = numbered(lengths) < np.repeat(np.where(record.turns_trained(), left_out, lengths), lengths)
    return Turns(np.array(record.seqs, np.int64), record.turn_array()[:, :3], hidden)


class StaleTokenMask:
    """Finds the leading tokens of a turn that are older than `bound` steps (weights.max_staleness): context, not
    trained.

    A group that is over age is trained under `over_age = "wait"`, but no token of it that is older than the bound.
    Such tokens count in no denominator; the reward, and so the advantage, is of the whole answer. Everything up to
    the last of them is left out, so what remains is one piece at the end; an answer is one turn. The step of a
    version is known from the records of the log alone, so a replay leaves out the same tokens. `bound` None:
    nothing is too old. Call `at` before the samples of a step, then `leading` for each.
    """

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.now = 0  # finished steps
        self.masked = 0  # tokens left out since `taken`
        self.steps = VersionSteps(KEPT)

    def at(self, version: int, step: int) -> None:
        """`version` is the newest one published, `step` steps are finished."""
        self.now = step
        self.steps.add(version, step)

    def step_of(self, version: int) -> int:
        return self.steps.step_of_row(version, self.now)

    def ages(self, versions: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Finished steps since each of these versions was made."""
        which, place = np.unique(versions, return_inverse=True)
        ages = np.array([max(0, self.now - self.step_of(version)) for version in which.tolist()], np.int64)
        return ages[place]

    def leading(self, record: SampleRecord) -> list[int]:
        """Counts the tokens at the start of each turn that are not to be trained, and adds them to `masked`."""
        counts = self.count(record)
        self.masked += sum(counts)
        return counts

    def count(self, record: SampleRecord) -> list[int]:
        """Counts the same tokens without adding them. Of a turn that is not trained at all: none."""
        lengths = record.turn_lengths()
        if self.bound is None or self.now - record.step <= self.bound:
            return [0] * len(lengths)
        late = self.ages(record.version_array()) > self.bound
        turns = zip(np.split(late, np.cumsum(lengths)[:-1]), record.turns_trained(), strict=True)
        return [_leading(np.flatnonzero(part)) if trained else 0 for part, trained in turns]

    def taken(self) -> int:
        """Tokens that were left out since the last call."""
        masked, self.masked = self.masked, 0
        return masked


def _leading(late: npt.NDArray[np.int64]) -> int:
    return int(late[-1]) + 1 if len(late) else 0


def terms_of(topology: Topology) -> Terms:
    """Terms of a topology: the ages that it promises, and what it leaves out of the loss."""
    weights, waves, forced = topology.weights, topology.segments.waves, topology.experiments.forced_age > 0
    by_mode = {"batch-async": weights.max_staleness, "sync": max(0, waves - 1)}
    return Terms(
        None if forced else by_mode.get(weights.mode),
        weights.mode == "batch-async" and weights.over_age == "wait" and not forced,
        topology.segments.loss == "last_segment", topology.reward.truncated == "mask",
    )


class TrainedTokens:
    """The samples of records by the terms of the step under way."""

    def __init__(self, terms: Terms) -> None:
        self.stale = StaleTokenMask(None)
        self.train_by(terms)

    def train_by(self, terms: Terms) -> None:
        """Go by these terms from the next sample on."""
        self.terms, self.stale.bound = terms, terms.bound if terms.masks_old else None
        self.last_only = terms.last_segment

    def is_cut(self, record: SampleRecord) -> bool:
        """True if an answer is not trained, since the limit cut it (reward.truncated = "mask")."""
        return self.terms.masks_cut and record.finish == Finish.LENGTH

    def samples(self, records: Sequence[SampleRecord]) -> list[Sample]:
        """All samples, too old tokens and cut answers included: to be looked at or scored."""
        return [to_sample(record, self.last_only) for record in records]

    def trained(self, record: SampleRecord) -> Sample:
        """A sample to be trained; tokens that are too old are counted, and are context."""
        return to_sample(record, self.last_only, self.stale.leading(record))

    def mask(self, record: SampleRecord) -> npt.NDArray[np.bool_]:
        """Mask of the tokens of the answer that will be trained."""
        return to_sample(record, self.last_only, self.stale.count(record)).mask() & (not self.is_cut(record))
