"""A loss, advantages, metrics and an optimiser of the user's, named in [learner] by import path (docs/extending.md).

Used by the trainer, the training step and the learner's metrics; `busrl check` runs `python -m busrl.training.custom`,
which loads each of them and tries it once on small inputs. Knows nothing of the ring, the bus or topologies.

- What they return is checked at each call, without reading the device: a broken contract is a `FunctionRefused` with
  the key, the import path, the place in the user's code, and what to return instead.
- A loss or an estimator that fails ends the run: its step is in the log and is trained by the next start, with the
  corrected function. A metric that fails costs its numbers only.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from busrl import imports
from busrl.algorithms import advantages, losses
from busrl.algorithms.advantages import AdvantageEstimator
from busrl.algorithms.losses import LossFunction, LossInputs, LossSettings
from busrl.errors import FunctionRefused, cause
from busrl.ledger.wal import SampleRecord
from busrl.training import optimizers

LOSS, ADVANTAGE, METRICS = "learner.loss", "learner.advantage", "learner.metrics"
TRIAL_S = 90  # to load and try all of them; the process that asked has given up before

# The trained samples of a step, whole groups one after the other, and the step's line of metrics.jsonl -> numbers.
Metric = Callable[[Sequence[SampleRecord], Mapping[str, Any]], Mapping[str, float]]


class _Checked:
    """A function of the user's with the name it has in messages."""

    def __init__(self, key: str, target: str) -> None:
        self.named = f"{key} = {target!r}"
        self.function = imports.load(key, target, FunctionRefused)

    def call(self, *arguments: Any) -> Any:
        try:
            return self.function(*arguments)
        except Exception as problem:
            raise FunctionRefused(f"{self.named}: it raised {cause(problem)}; correct it and start again") from problem

    def refuse(self, what: str, remedy: str) -> FunctionRefused:
        return FunctionRefused(f"{self.named}: it {what}; {remedy}")


def load_loss(target: str) -> LossFunction:
    """The loss of that name, or that of an import path."""
    if ":" not in target:
        return losses.LOSSES[target]
    own = _Checked(LOSS, target)

    def loss(inputs: LossInputs, settings: LossSettings) -> Tensor:
        found = own.call(inputs, settings)
        shape = tuple(inputs.trainer_logprobs.shape)
        if not isinstance(found, Tensor) or tuple(found.shape) != shape:
            what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise own.refuse(f"returned {what}", f"return a tensor of shape {shape}: one loss per token, not averaged")
        if not found.requires_grad:
            raise own.refuse("returned a loss without gradient", "compute it from inputs.trainer_logprobs")
        return found

    return loss


def load_estimator(target: str) -> AdvantageEstimator:
    """The advantage estimator of that name, or that of an import path."""
    if ":" not in target:
        return advantages.ADVANTAGES[target]
    own = _Checked(ADVANTAGE, target)

    def estimator(rewards: Sequence[float], lengths: Sequence[int]) -> Sequence[float]:
        found = own.call(rewards, lengths)
        try:
            values = [float(value) for value in found]
        except (TypeError, ValueError):
            raise own.refuse(f"returned {found!r}", f"return {len(rewards)} numbers, one per sample") from None
        if len(values) != len(rewards):
            raise own.refuse(f"returned {len(values)} advantages for {len(rewards)} rewards", "return one per sample")
        if not all(map(math.isfinite, values)):
            raise own.refuse(f"returned {values} for the rewards {list(rewards)}", "return finite numbers")
        return values

    return estimator


class Metrics:
    """The user's metrics of a run."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._own = [_Checked(METRICS, target) for target in targets]
        self.failures: list[str] = []  # of the last step

    def measure(self, samples: Sequence[SampleRecord], row: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of all of them by name; what one failed with is in `failures`."""
        found: dict[str, float] = {}
        self.failures = []
        for own in self._own:
            try:
                found |= _numbers(own, own.call(samples, row))
            except FunctionRefused as problem:
                self.failures.append(str(problem))
        return found


def _numbers(own: _Checked, found: Any) -> dict[str, float]:
    try:
        numbers = {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise own.refuse(f"returned {found!r}", "return a dict of names and numbers") from None
    if wrong := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise own.refuse(f"returned {numbers[wrong[0]]} for {wrong[0]!r}", "leave out what is not a finite number")
    return numbers


# -- the trial of `busrl check` -----------------------------------------------


def try_loss(target: str) -> None:
    """FunctionRefused if it cannot be loaded or breaks its contract on tokens of three samples, one of them masked."""
    loss, mask = load_loss(target), torch.tensor([True, True, True, False, True, True])
    for trained in (None, mask):
        logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -0.7], requires_grad=True)
        recorded = torch.tensor([-0.6, -0.9, -2.0, -0.2, -2.0, -0.7])
        inputs = LossInputs(
            logprobs, recorded, logprobs.detach(), torch.tensor([1.0, 1.0, -1.0, -1.0, 0.5, 0.5]), trained,
            samples=torch.tensor([0, 0, 1, 1, 2, 2]), policy_versions=torch.tensor([3, 3, 2, 3, 3, 3]),
            ages=torch.tensor([0, 0, 1, 0, 0, 0]), lengths=torch.tensor([2, 2 if trained is None else 1, 2]),
            entropy=torch.tensor([0.4, 0.9, 1.1, 0.2, 1.5, 0.6], requires_grad=True),
        )
        found = losses.per_token(loss, inputs, LossSettings())
        found.sum().backward()  # type: ignore[no-untyped-call]
        gradient = logprobs.grad
        if not found.isfinite().all() or gradient is None or not gradient.isfinite().all():
            what = f"the loss {found.tolist()} with the gradient {gradient}"
            raise FunctionRefused(f"{LOSS} = {target!r}: it gave {what} for {inputs}; both must be finite")


def try_estimator(target: str) -> None:
    """FunctionRefused if it cannot be loaded, or breaks its contract on a group of four and on one of two."""
    estimator = load_estimator(target)
    estimator([1.0, 0.0, 0.0, 0.5], [3, 7, 1, 4])
    estimator([0.0, 1.0], [1, 2])


def try_metric(target: str) -> None:
    """FunctionRefused if it cannot be loaded, or breaks its contract on a group of two samples."""
    metrics = Metrics([target])
    metrics.measure([_sample(0, 2), _sample(1, 3)], ROW)
    if metrics.failures:
        raise FunctionRefused(metrics.failures[0])


ROW = {"step": 1, "version": 0, "reward": 0.5, "groups": 1, "samples": 2, "tokens": 5, "entropy": 1.0, "lr": 1e-4}


def _sample(member: int, length: int) -> SampleRecord:
    return SampleRecord(
        uid=member, group=0, admission=0, member=member, attempt=0, prompt_crc=0, reward=float(member), temperature=1.0,
        version=0, step=0, finish=1, prompt_ids=np.array([5, 6], "<i4").tobytes(),
        token_ids=np.full(length, 7, "<i4").tobytes(), logprobs=np.full(length, -1, "<f4").tobytes(),
        versions=np.zeros(length, "<u4").tobytes(),
    )


def try_optimizer(asked: str) -> None:
    """FunctionRefused if the optimiser described by a JSON map (`target`, `options`, and the keys of AdamW) cannot be
    used; `optimizers.try_optimizer` says what is tried."""
    own = json.loads(asked)
    optimizers.try_optimizer(own.pop("target"), own, own.pop("options"))


TRIALS: dict[str, Callable[[str], None]] = {
    LOSS: try_loss, ADVANTAGE: try_estimator, METRICS: try_metric, optimizers.KEY: try_optimizer,
}


def main(arguments: Sequence[str]) -> int:
    """`arguments`: pairs of key and import path. One JSON line: for each what is wrong with it, "" if nothing."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what user code prints is no answer
    signal.alarm(TRIAL_S)  # ends it even if its parent is gone
    found = []
    for key, target in zip(arguments[::2], arguments[1::2], strict=True):
        try:
            TRIALS[key](target)
            found.append("")
        except FunctionRefused as problem:
            found.append(str(problem))
        except Exception as problem:  # in the backward pass of a loss
            found.append(f"{key} = {target!r}: it raised {cause(problem)}")
    os.write(answers, json.dumps(found).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
