"""Records of the log as the trainer's samples, and which of their tokens are trained.

Used by the training step and by the parity gate. Knows nothing of losses, advantages, models or the ring.

- Untrained tokens are context: the model sees them, no loss and no denominator has them. Their reward counts.
- The record, the terms of its step and the steps of versions determine the trained tokens: a replay of the log leaves
  out the same ones.
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
    """A record of the log as a sample of the trainer; the arrays share the record's bytes.

    The first `skipped` tokens of each turn are context; `last_only`: all segments but the last are.
    """
    routes, prompt_routes = record.route_arrays()
    return Sample(
        uid=record.uid, group=record.group, member=record.member, reward=record.reward,
        temperature=record.temperature, finish=record.finish, prompt_ids=record.prompt_array(),
        token_ids=record.token_array(), behaviour_logprobs=record.logprob_array(),
        policy_versions=record.version_array(), turns=_turns(record, skipped),
        context=0 if record.turns else max(skipped[0], record.earlier if last_only else 0),
        routes=routes, prompt_routes=prompt_routes,
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
    """Finds the leading tokens of a turn that are older than the bound (weights.max_staleness): context, not trained.

    Under `over_age = "wait"` a group that is over age is trained, but no token of it that is older than the bound.
    Such tokens count in no denominator; the reward, and so the advantage, is of the whole answer. All tokens up to the
    last old one are left out, so one piece at the end remains; an answer is one turn. The log alone gives the step of
    a version, so a replay leaves out the same tokens. Call `at` before the samples of a step, then `leading` for each.
    """

    def __init__(self, bound: int | None) -> None:
        self.limit_to(bound)
        self.now = 0  # finished steps
        self.masked = 0  # tokens left out since `taken`
        self.steps = VersionSteps(KEPT)

    def limit_to(self, bound: int | None) -> None:
        """From the next sample on, tokens older than `bound` steps are too old; None: no token is."""
        self.bound = bound

    def at(self, version: int, step: int) -> None:
        """`version` is the newest published one, `step` steps are finished."""
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
        """Count the tokens at the start of each turn that are too old, and add them to `masked`."""
        counts = self.count(record)
        self.masked += sum(counts)
        return counts

    def count(self, record: SampleRecord) -> list[int]:
        """Count these tokens without adding them; none of a turn that is not trained at all."""
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
    """Terms of a topology: its bound on ages, and the tokens that it leaves out of the loss."""
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
        self.terms, self.last_only = terms, terms.last_segment
        self.stale.limit_to(terms.bound if terms.masks_old else None)

    def is_cut(self, record: SampleRecord) -> bool:
        """True if the limit cut the answer, which therefore is not trained (reward.truncated = "mask")."""
        return self.terms.masks_cut and record.finish == Finish.LENGTH

    def samples(self, records: Sequence[SampleRecord]) -> list[Sample]:
        """All samples with all tokens, also too old and cut ones: for checks and scores."""
        return [to_sample(record, self.last_only) for record in records]

    def trained(self, record: SampleRecord) -> Sample:
        """A sample for training; its too old tokens are counted, and are context."""
        return to_sample(record, self.last_only, self.stale.leading(record))

    def mask(self, record: SampleRecord) -> npt.NDArray[np.bool_]:
        """Mask of the tokens of the answer that will be trained."""
        return to_sample(record, self.last_only, self.stale.count(record)).mask() & (not self.is_cut(record))
