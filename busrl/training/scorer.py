"""Scores of a micro-batch for a loss: log-probabilities of the model, of its reference and its teacher, and values.

Made and driven by the trainer. Talks to the way in which the model computes (`forward`); knows nothing of gradients,
updates or steps.

- The reference is computed before the graph of the model exists: the weights that it gathers are given up by then.
- Numbers of a reference and a teacher have no gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from busrl import capabilities
from busrl.algorithms import catalog, diagnostics, losses
from busrl.algorithms.gae import Valued, value_loss
from busrl.training import batch, sharded
from busrl.training.batch import Flat, Sample, Worth
from busrl.training.forward import Forward, Scores
from busrl.training.model import vocabulary
from busrl.training.settings import TrainerSettings
from busrl.training.value_head import ValueHead

Floats = NDArray[np.float32]
Versions = NDArray[np.uint32]
Reference = Callable[[Sequence[Sample], Flat], Tensor]  # its log-probabilities
Teacher = Callable[[Sequence[Sample], Flat], tuple[Tensor, Tensor]]  # ids and log-probabilities of its best tokens
EVERY = "every"  # token, in the place of a generated one
NOTHING = Sample(
    uid=0, group=0, member=0, prompt_ids=np.zeros(1, np.int32), token_ids=np.zeros(1, np.int32),
    behaviour_logprobs=np.zeros(1, np.float32), policy_versions=np.zeros(1, np.uint32),
)


@dataclass(frozen=True)
class Advantages:
    """Advantages of the samples of a call, and what else they are trained with: a number or a row for each; None where
    the default holds."""

    per_sample: Sequence[Worth]  # not read where `valued` has those of each token
    weights: Sequence[Worth] | None = None  # of the loss of a sample's tokens; 1
    proximal: Sequence[Floats] | None = None  # log-probabilities by `score` as the step began; those of the forward
    chosen: Sequence[NDArray[np.bool_]] | None = None  # tokens, for a loss that chooses
    valued: Sequence[Valued] | None = None  # for a value head: values, returns and advantages of each token

    def of(self, part: Sequence[int]) -> Advantages:
        """Select the samples at these positions."""
        rows = {name: None if rows is None else [rows[i] for i in part] for name, rows in vars(self).items()}
        return replace(self, **rows)  # type: ignore[arg-type]


def drawn(version: int, place: int, every: int) -> bool:
    """Draw one of `every` micro-batches: the same ones whoever asks, at any place of a step."""
    lot = hashlib.blake2b(f"{version} {place}".encode(), digest_size=8).digest()
    return not int.from_bytes(lot, "big") % every


def teachers_of(topology: Any, root: Path) -> Callable[..., Teacher] | None:
    """The maker of several teachers, or of others than a model's own best tokens; None where there are none such."""
    learner = topology.learner
    if not learner.teacher and learner.teacher_top == "teacher":
        return None
    maker: Callable[..., Teacher] = capabilities.plug("teachers", "maker")(topology, root)
    return maker


class Scorer:
    """Computes a micro-batch with the model as it is, and with the models that it is compared with."""

    def __init__(
        self, forward: Forward, settings: TrainerSettings, dtype: torch.dtype, device: torch.device,
        ages_of: Callable[[Versions], NDArray[np.int64]], value_head: ValueHead | None = None,
        reference: Reference | None = None, teacher: Teacher | None = None,
    ) -> None:
        """`dtype`: of what the loss computes with. `ages_of`: steps since the version of each token."""
        self.forward, self.settings, self.dtype, self.device = forward, settings, dtype, device
        self.ages_of, self.value_head, self.reference, self.teacher = ages_of, value_head, reference, teacher

    def flatten(self, samples: Sequence[Sample]) -> Flat:
        return batch.flatten(samples, self.dtype, self.device)

    def inputs(
        self, samples: Sequence[Sample], flat: Flat, advantages: Advantages
    ) -> tuple[losses.LossInputs, Tensor | None]:
        """Inputs of the loss, and the values of a value head, of one forward of each model."""
        referred = self._reference_logprobs(samples, flat)  # first: see the head of the module
        wanted, taught, student = flat, None, None
        if self.teacher is not None:
            with torch.no_grad():
                ids, taught = self.teacher(samples, flat)
            wanted = replace(flat, targets=torch.cat([flat.targets[:, None], ids], -1))
        (logprobs, entropy), values = self._scores_and_values(samples, wanted)
        if taught is not None:
            logprobs, student, taught = logprobs[:, 0], logprobs[:, 1:], taught.to(self.dtype)
            student = student.masked_fill(taught <= catalog.FEWER, catalog.FEWER)
        inputs = self._of_logprobs(flat, logprobs, advantages)
        return replace(inputs, entropy=entropy, reference_logprobs=referred, teacher_logprobs=taught,
                       student_logprobs=student), values

    @property
    def asks_ahead(self) -> bool:
        """True if `expect` has an effect."""
        return bool(getattr(self.teacher, "asks_ahead", False))

    @property
    def ahead(self) -> int:
        """Number of micro-batches after the one that is trained that are to be expected by then."""
        return int(getattr(self.teacher, "ahead", 0))

    def expect(self, samples: Sequence[Sample]) -> None:
        """Tell a teacher that answers from elsewhere which samples come next."""
        if self.asks_ahead:
            elsewhere: Any = self.teacher
            elsewhere.expect(samples)

    def wait_for(self, uids: Sequence[int], on_wait: Callable[[], None]) -> None:
        """Wait until such a teacher has told of these samples, which were expected; calls `on_wait` meanwhile."""
        if self.asks_ahead:
            elsewhere: Any = self.teacher
            elsewhere.wait_for(uids, on_wait)

    def _of_logprobs(self, flat: Flat, logprobs: Tensor, advantages: Advantages) -> losses.LossInputs:
        """The inputs of the loss that need the forward of the log-probabilities alone."""
        before, chosen = logprobs.detach(), None
        if advantages.proximal is not None:
            before = torch.from_numpy(np.concatenate(advantages.proximal)).to(logprobs)
        if advantages.chosen is not None:
            chosen = torch.from_numpy(np.concatenate(advantages.chosen)).to(self.device)
        worth = flat.per_token(advantages.per_sample, self.dtype)
        if advantages.valued is not None:
            worth = torch.from_numpy(np.concatenate([row.advantages for row in advantages.valued])).to(worth)
        by_turn = self.settings.unit == "turn"
        return losses.LossInputs(
            trainer_logprobs=logprobs, behaviour_logprobs=flat.behaviour_logprobs, proximal_logprobs=before,
            advantages=worth, mask=flat.mask, samples=flat.turns if by_turn else flat.rows,
            policy_versions=torch.from_numpy(flat.policy_versions.astype(np.int64)).to(self.device),
            ages=torch.from_numpy(self.ages_of(flat.policy_versions)).to(self.device),
            lengths=flat.turn_lengths if by_turn else flat.lengths, chosen=chosen,
        )

    def for_loss(self, inputs: losses.LossInputs, current: Tensor | None) -> losses.LossInputs:
        """The inputs for the loss alone: ratio exactly 1 for all tokens (pois), or for those of the present weights."""
        if self.settings.ratio_one:
            return replace(inputs, behaviour_logprobs=inputs.trainer_logprobs.detach())
        if self.settings.newest_ratio == "one" and current is not None:
            behaviour = torch.where(current, inputs.trainer_logprobs.detach(), inputs.behaviour_logprobs)
            return replace(inputs, behaviour_logprobs=behaviour)
        return inputs

    def value_errors(self, values: Tensor | None, valued: Sequence[Valued], flat: Flat) -> diagnostics.ValueErrors:
        """The value loss per token, 0 where masked, with returns and values."""
        assert values is not None and self.settings.value is not None, "rows of values for a trainer without a head"
        old, returns = (
            torch.from_numpy(np.concatenate([getattr(row, name) for row in valued])).to(values)
            for name in ("values", "returns")
        )
        loss = value_loss(values, old, returns, self.settings.value.clip)
        trained = loss if flat.mask is None else loss.where(flat.mask, 0)
        return diagnostics.ValueErrors(trained, returns, values.detach())

    def idle(self) -> Tensor:
        """A forward of one token that does not count, of every model; its gradient is 0."""
        flat = self.flatten([NOTHING])
        self._reference_logprobs([NOTHING], flat)
        if self.teacher is not None:
            self.teacher([NOTHING], flat)
        logprobs, _ = self.forward.score([NOTHING], flat)
        return logprobs.nan_to_num().sum() * 0

    # -- a mixture of experts -----

    def balance(self, share: Tensor | None, parameters: Sequence[Tensor]) -> Tensor | None:
        """Give what the balance loss adds to a micro-batch, the losses of whose tokens add up to `share` if each is 1;
        None of a rank without work. A collective of the ranks that the parameters are spread over."""
        replay = self.forward.replay
        if replay is None:
            return None
        spread = sharded.any_spread(parameters)  # alone the sum would only round
        return replay.loss(share, partial(sharded.summed, parameters=parameters) if spread else None)

    @torch.no_grad()
    def by_own_routes(
        self, samples: Sequence[Sample], flat: Flat, version: int | None, place: int
    ) -> Tensor | None:
        """Score one of so many micro-batches, by lot, with the experts that the model chooses; None of all others. A
        forward of all ranks, which draw alike: by the version of the weights, without which none is compared, and the
        place in the step. Nothing may need the last forward any more."""
        every = 0 if self.settings.routing is None else self.settings.routes_compare_every
        if not every or version is None or not drawn(version, place, every):
            return None
        return self.forward.by_itself().score(samples, flat)[0]

    # -- without a gradient -----

    @torch.no_grad()
    def at_once(self, samples: Sequence[Sample], by: str = "") -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the generated tokens, computed at once; `by` "reference", "value" or EVERY
        those numbers alone. Samples may be none: a rank without work has to make a forward like the others."""
        chosen = list(samples) or [NOTHING]
        if by == "value":
            assert self.value_head is not None
            scores = self.value_head(self.forward.states(chosen)), torch.zeros(0)
        elif by == EVERY:
            flat = self.flatten(chosen)
            words = torch.arange(vocabulary(self.forward.model), device=self.device)
            flat = replace(flat, targets=words.expand(len(flat.targets), -1))
            scores = self.forward.score(chosen, flat)[0], torch.zeros(0)
        else:
            flat = self.flatten(chosen)
            referred = self._reference_logprobs(chosen, flat) if by else None
            assert referred is not None or not by, "no reference"
            scores = self.forward.score(chosen, flat) if referred is None else (referred, torch.zeros(0))
        return scores if samples else (scores[0][:0], scores[1][:0])

    @torch.no_grad()
    def _reference_logprobs(self, samples: Sequence[Sample], flat: Flat) -> Tensor | None:
        return None if self.reference is None else self.reference(samples, flat)

    def _scores_and_values(self, samples: Sequence[Sample], flat: Flat) -> tuple[Scores, Tensor | None]:
        if self.value_head is None:
            return self.forward.score(samples, flat), None
        scores, hidden = self.forward.with_states(samples, flat)
        return scores, self.value_head(hidden)
