"""Advantages of the samples of a step, or values and returns; weights of their losses, and tokens that a loss chooses.

Used by the training step. Talks to the formulas of `busrl.algorithms`, and to the models for scores; knows nothing of
the optimiser, the log or the ring.

- Groups come whole: most advantages compare a sample with its own group only, some with the whole step.
- All of it is of the weights before the step's first update.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from busrl.algorithms import advantages as formulas
from busrl.algorithms import catalog, gae, losses, terms
from busrl.ledger.wal import SampleRecord
from busrl.roles.learner.models import Models
from busrl.roles.learner.samples import TrainedTokens
from busrl.topology import Topology
from busrl.training.batch import Sample, Worth, spread
from busrl.training.custom import load_estimator
from busrl.training.scorer import Advantages

ONCE = [name for name, basis in catalog.ADVANTAGE_FACTS.items() if basis == catalog.SCALE]
UNWEIGHTED = ("token-mean", "seq-mean-token-sum")  # all samples have weight 1


class StepAdvantages:
    """Computes the advantages of samples by the run's estimator, with the models that score them."""

    def __init__(self, topology: Topology, models: Models, tokens: TrainedTokens) -> None:
        self.models, self.tokens, self.seed = models, tokens, topology.run.seed
        self.estimator = load_estimator(topology.learner.advantage, topology.base_dir)
        self.earlier = formulas.RunningMeans(len(topology.seats))
        self.follow(topology)

    def follow(self, topology: Topology) -> None:
        """Go by these values from the next step on."""
        self.config = topology.learner

    @property
    def scaled_once(self) -> bool:
        """True if advantages are divided by a number of the whole step, which is known at its end."""
        return self.config.advantage in ONCE

    # -- advantages and values ----------------------------------------------------------------------------------

    def of_groups(self, records: Sequence[SampleRecord]) -> Advantages:
        """The advantages of whole groups; of all groups of a step where one depends on the others."""
        if self.config.advantage != catalog.GAE:
            return Advantages(self.per_sample(records))
        return Advantages([record.reward for record in records], valued=self.valued(records))

    def valued(self, records: Sequence[SampleRecord]) -> list[gae.Valued]:
        """Advantages and returns of each token, from the values under the present weights."""
        config, rows = self.config.value, [np.zeros(record.tokens) for record in records]
        for row, record, penalty in zip(rows, records, self._penalties(records), strict=True):
            row -= penalty
            row[-1] += record.reward
        before = [row.astype(np.float64) for row in self._score(records, "value")]
        estimates = gae.estimated(rows, before, config.gamma, config.decay, config.decay_of_values)
        if not config.whiten:
            return estimates
        masks = [self.tokens.mask(record) for record in records]
        white = gae.whitened([valued.advantages for valued in estimates], masks)
        return [replace(valued, advantages=row) for valued, row in zip(estimates, white, strict=True)]

    def per_sample(self, records: Sequence[SampleRecord]) -> Sequence[Worth]:
        """Advantages of whole groups; of all groups of a step where one depends on the others."""
        if self.config.credit == "turn":
            return self._turn_advantages(records)
        if catalog.ADVANTAGE_FACTS.get(self.config.advantage) == catalog.BATCH:
            counts = [int(self.tokens.mask(record).sum()) for record in records]
            return formulas.advantages(self.estimator, self._rewards(records), counts)
        values = self.group_advantages(records)
        if self.scaled_once:
            scale = formulas.batch_scale(values)
            return [value / scale for value in values]
        return values

    def group_advantages(self, records: Sequence[SampleRecord]) -> list[float]:
        """Advantages of whole groups, each compared with its own members alone."""
        values: list[float] = []
        for members, rewards in self._by_group(records):
            own = formulas.advantages(self.estimator, rewards, [record.tokens for record in members])
            known = self.earlier.before(members[0].group, rewards) if self.config.advantage == catalog.EMA else 0.0
            values += [value - known for value in own]
        return values

    def _turn_advantages(self, records: Sequence[SampleRecord]) -> list[Worth]:
        """Advantages of each turn of whole groups, in the order of the records' turns. They are computed in the order
        of the calls."""
        advantages: list[Worth] = []
        for members, rewards in self._by_group(records):
            orders = [np.argsort(record.turn_calls(), kind="stable") for record in members]
            each = zip(members, rewards, orders, strict=True)
            steps = [_turn_rewards(record, reward)[order].tolist() for record, reward, order in each]
            keys = [[record.keys[at] for at in order] if record.keys else [] for record, order in zip(members, orders)]
            worth = formulas.turn_advantages(steps, self.config.gamma, self.config.advantage == "group_std", keys)
            by_record = zip(orders, worth, strict=True)
            advantages += [np.array(values)[np.argsort(order)].tolist() for order, values in by_record]
        return advantages

    def _by_group(self, records: Sequence[SampleRecord]) -> Iterator[tuple[list[SampleRecord], list[float]]]:
        """The members of each group, with the rewards that their advantages are made of."""
        begin, rewards = 0, self._rewards(records)
        for _, group in groupby(records, key=lambda record: record.group):
            members = list(group)
            yield members, rewards[begin : begin + len(members)]
            begin += len(members)

    def _rewards(self, records: Sequence[SampleRecord]) -> list[float]:
        """The rewards of the answers; with kl_in = "reward" less the KL of each answer to the reference."""
        both = zip(records, self._penalties(records), strict=True)
        return [record.reward - float(np.sum(penalty)) for record, penalty in both]

    def _penalties(self, records: Sequence[SampleRecord]) -> list[npt.NDArray[np.float64] | float]:
        """Amounts that kl_in = "reward" takes from each token's reward, by its behaviour log-prob; else 0. A turn that
        is not trained, of an opponent say, pays nothing."""
        if self.config.kl == "none" or self.config.kl_in == "loss":
            return [0.0] * len(records)
        estimator, coefficient = terms.ESTIMATORS[self.config.kl], self.config.kl_coef
        referred = self._score(records, "reference")
        behaviour = [torch.from_numpy(record.logprob_array().astype(np.float64)) for record in records]
        return [
            coefficient * estimator(logprobs, torch.from_numpy(row.astype(np.float64))).numpy()
            * np.repeat(record.turns_trained(), record.turn_lengths())
            for record, logprobs, row in zip(records, behaviour, referred, strict=True)
        ]

    def _score(self, records: Sequence[SampleRecord], by: str) -> list[npt.NDArray[np.float32]]:
        return self.models.trainer.score(self.tokens.samples(records), by)

    # -- weights of the loss ------------------------------------------------------------------------------------

    def weights(self, samples: Sequence[Sample]) -> tuple[list[Worth] | None, float]:
        """Factors of the loss of each sample's tokens (None: all are 1), by turns where turns are the unit; and the
        share of these samples in the denominator. A turn without trained tokens is in neither."""
        if self.config.unit == "turn":
            lengths = [sample.trained_of_turns().tolist() for sample in samples]
        else:
            lengths = [[sample.trained] for sample in samples]
        units = [
            (count, sample.group) for sample, counts in zip(samples, lengths, strict=True) for count in counts if count
        ]
        factors, denominator = formulas.weights(
            self.config.aggregation, [count for count, _ in units], [group for _, group in units],
            self.config.length_norm,
        )
        if self.config.aggregation in UNWEIGHTED:
            return None, denominator
        each = iter(factors)
        rows = [[next(each) if count else 0.0 for count in counts] for counts in lengths]
        return [row[0] if len(row) == 1 else row for row in rows], denominator

    # -- tokens that a loss chooses -----------------------------------------------------------------------------

    def chosen(
        self, samples: Sequence[Sample], advantages: Advantages, number: int
    ) -> list[npt.NDArray[np.bool_]] | None:
        """Tokens that a loss chooses among all of an update, a row per sample; None for any other loss. The draw
        depends on the seed, the step and the update alone."""
        if (choice := losses.CHOICES.get(self.config.loss)) is None or not samples:
            return None
        now = self.models.trainer.score(samples)
        counts = [sample.generated for sample in samples]
        behaviour = [sample.behaviour_logprobs for sample in samples]
        trained = [sample.mask() for sample in samples]
        worth = spread(samples, advantages.per_sample)
        if advantages.valued is not None:
            worth = np.concatenate([valued.advantages for valued in advantages.valued])
        inputs = losses.LossInputs(
            _flat(now), _flat(behaviour), _flat(now if advantages.proximal is None else advantages.proximal),
            torch.from_numpy(worth), torch.from_numpy(np.concatenate(trained)),
        )
        stream = f"{self.seed} {self.tokens.stale.now} {number}"
        random = torch.Generator().manual_seed(zlib.crc32(stream.encode()))
        return np.split(choice(inputs, self.models.settings, random).numpy(), np.cumsum(counts)[:-1])


def _flat(rows: Sequence[npt.NDArray[np.float32]]) -> Tensor:
    """The values of all samples one after the other, in float64."""
    return torch.from_numpy(np.concatenate(rows).astype(np.float64))


def _turn_rewards(record: SampleRecord, reward: float) -> npt.NDArray[np.float64]:
    """The reward of each turn. The rest of the episode's reward, and all of an answer's, goes to the last call."""
    calls = record.turn_calls()
    rewards = np.array(record.turn_rewards, np.float64) if record.turn_rewards else np.zeros(len(calls))
    rewards[int(np.argmax(calls))] += reward - rewards.sum()
    return rewards
