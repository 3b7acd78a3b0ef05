"""Loss, advantages, metrics and optimiser of the user's, named in [learner] by import path (docs/extend-functions.md).

`busrl check` runs `python -m busrl.training.custom`, which loads each of them and tries it once on small inputs.

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
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from busrl.algorithms import advantages, losses
from busrl.algorithms.advantages import AdvantageEstimator
from busrl.algorithms.losses import LossFunction, LossInputs, LossSettings
from busrl.errors import FunctionRefused, cause
from busrl.ledger.wal import SampleRecord
from busrl.system import imports
from busrl.training import optimizers

LOSS, ADVANTAGE, METRICS = "learner.loss", "learner.advantage", "learner.metrics"
TRIAL_S = 90  # to load and try all of them; the parent gives up earlier


class _Checked:
    """A function of the user's with the name it has in messages."""

    def __init__(self, key: str, target: str, base_dir: str) -> None:
        self.label = f"{key} = {target!r}"
        self.function = imports.load(key, target, FunctionRefused, base_dir)

    def call(self, *arguments: Any) -> Any:
        try:
            return self.function(*arguments)
        except (Exception, SystemExit) as problem:
            raise FunctionRefused(f"{self.label}: it raised {cause(problem)}; correct it and start again") from problem

    def refuse(self, what: str, remedy: str) -> FunctionRefused:
        return FunctionRefused(f"{self.label}: it {what}; {remedy}")


# Names in `uses` of a loss -> the inputs that it gets only if it names them.
USES: dict[str, tuple[str, ...]] = {
    "prox": (), "entropy": ("entropy",), "reference": ("reference_logprobs",),
    "teacher": ("teacher_logprobs", "student_logprobs"),
}


class OwnLoss(_Checked):
    """A loss of the user's. Attribute `streamable` (False): a sample's losses depend on no other sample; `uses`: the
    inputs of USES that it reads; without it, all that there are."""

    def __init__(self, target: str, base_dir: str) -> None:
        super().__init__(LOSS, target, base_dir)
        self.streamable = getattr(self.function, "streamable", False)
        self.uses = getattr(self.function, "uses", None)
        if not isinstance(self.streamable, bool):
            raise self.refuse(f"has streamable = {self.streamable!r}", "set it to True or False")
        names = () if self.uses is None else self.uses
        if isinstance(names, str) or not set(names) <= USES.keys():
            raise self.refuse(f"has uses = {names!r}", f"set it to a tuple of some of {', '.join(USES)}")

    def reads(self, name: str) -> bool:
        return self.uses is not None and name in self.uses

    def __call__(self, inputs: LossInputs, settings: LossSettings) -> Tensor:
        values = self.call(self._shown(inputs), settings)
        shape = tuple(inputs.trainer_logprobs.shape)
        if not isinstance(values, Tensor) or tuple(values.shape) != shape:
            what = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise self.refuse(f"returned {what}", f"return a tensor of shape {shape}: one loss per token, not averaged")
        if not values.requires_grad:
            raise self.refuse("returned a loss without gradient", "compute it from inputs.trainer_logprobs")
        return values

    def _shown(self, inputs: LossInputs) -> LossInputs:
        """The inputs without those that the loss does not read."""
        if self.uses is None:
            return inputs
        unread: dict[str, Any] = {name: None for use in USES.keys() - self.uses for name in USES[use]}
        return replace(inputs, **unread)


def reads(loss: LossFunction, name: str) -> bool:
    """True if it is a loss of the user's whose `uses` has that name."""
    return isinstance(loss, OwnLoss) and loss.reads(name)


def load_loss(target: str, base_dir: str) -> LossFunction:
    """The loss of that name, or that of an import path."""
    return losses.LOSSES[target] if ":" not in target else OwnLoss(target, base_dir)


def load_estimator(target: str, base_dir: str) -> AdvantageEstimator:
    if ":" not in target:
        return advantages.ADVANTAGES[target]
    function = _Checked(ADVANTAGE, target, base_dir)

    def estimator(rewards: Sequence[float], lengths: Sequence[int]) -> Sequence[float]:
        answer = function.call(rewards, lengths)
        try:
            values = [float(value) for value in answer]
        except (TypeError, ValueError):
            raise function.refuse(f"returned {answer!r}", f"return {len(rewards)} numbers, one per sample") from None
        if len(values) != len(rewards):
            what = f"returned {len(values)} advantages for {len(rewards)} rewards"
            raise function.refuse(what, "return one per sample")
        if not all(map(math.isfinite, values)):
            raise function.refuse(f"returned {values} for the rewards {list(rewards)}", "return finite numbers")
        return values

    return estimator


class Metrics:
    """The user's metrics of a run: functions of a step's trained samples and its line of metrics.jsonl, which give
    numbers by name."""

    def __init__(self, targets: Sequence[str], base_dir: str) -> None:
        self._own = [_Checked(METRICS, target, base_dir) for target in targets]
        self.failures: list[str] = []  # of the last step

    def measure(self, samples: Sequence[SampleRecord], row: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of all metrics by name; errors of metrics that failed are in `failures`."""
        figures: dict[str, float] = {}
        self.failures = []
        for metric in self._own:
            try:
                figures |= _numbers(metric, metric.call(samples, row))
            except FunctionRefused as problem:
                self.failures.append(str(problem))
        return figures


def _numbers(metric: _Checked, answer: Any) -> dict[str, float]:
    try:
        numbers = {str(name): float(value) for name, value in answer.items()}
    except (AttributeError, TypeError, ValueError):
        raise metric.refuse(f"returned {answer!r}", "return a dict of names and numbers") from None
    if wrong := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise metric.refuse(f"returned {numbers[wrong[0]]} for {wrong[0]!r}", "leave out what is not a finite number")
    return numbers


# -- the trial of `busrl check` -----------------------------------------------


ROWS, HIDDEN = (4, 3, 5), (1, 0, 2)  # trained tokens of the samples of the trial, and masked ones behind them


def try_loss(target: str, base_dir: str) -> None:
    """FunctionRefused if it cannot be loaded or breaks its contract on random tokens of three samples: a finite loss
    and gradient of the right shape, equal at each call, without influence of masked tokens, and, of a streamable loss,
    without influence of other samples."""
    loss = load_loss(target, base_dir)
    assert isinstance(loss, OwnLoss)
    for seed in range(3):
        tokens = _random_tokens(seed)
        assert tokens.mask is not None and tokens.samples is not None
        values = _losses(loss, tokens)
        _same(loss, values, _losses(loss, tokens), "another call", "compute it from its arguments alone, or seed it")
        with_others, alone = values[:, tokens.mask], _losses(loss, _part(tokens, tokens.mask))
        remedy = "masked tokens must have no influence: weight by inputs.mask, and count with inputs.lengths"
        _same(loss, with_others, alone, "the masked tokens taken away", remedy)
        for sample in range(len(ROWS)) if loss.streamable else ():
            mask = tokens.samples == sample
            remedy = "a loss that depends on other samples is not streamable: leave streamable = True away"
            _same(loss, values[:, mask], _losses(loss, _part(tokens, mask)), "the other samples taken away", remedy)


def _random_tokens(seed: int) -> LossInputs:
    random = torch.Generator().manual_seed(seed)
    counts = torch.tensor(ROWS) + torch.tensor(HIDDEN)
    samples = torch.arange(len(ROWS)).repeat_interleave(counts)
    size = len(samples)
    place = torch.cat([torch.arange(count) for count in counts.tolist()])

    def numbers(*shape: int) -> Tensor:
        return -3 * torch.rand(*(shape or (size,)), generator=random) - 0.05

    worth = torch.randn(len(ROWS), generator=random)[samples]
    return LossInputs(
        numbers(), numbers(), numbers(), worth, place < torch.tensor(ROWS)[samples],
        samples=samples, policy_versions=torch.randint(2, 4, (size,), generator=random), entropy=-numbers(),
        ages=torch.randint(0, 2, (size,), generator=random), lengths=torch.tensor(ROWS), reference_logprobs=numbers(),
        teacher_logprobs=numbers(size, 2) - 1, student_logprobs=numbers(size, 2) - 1,
    )


def _part(tokens: LossInputs, chosen: Tensor) -> LossInputs:
    """Some of the tokens as a micro-batch of their own."""
    assert tokens.samples is not None and tokens.mask is not None
    fields = {name: value[chosen] for name, value in vars(tokens).items() if name != "lengths" and value is not None}
    _, samples = fields["samples"].unique(return_inverse=True)
    mask = fields["mask"]
    lengths = torch.bincount(samples[mask], minlength=int(samples.max()) + 1)
    return LossInputs(**{**fields, "samples": samples, "lengths": lengths, "mask": None if bool(mask.all()) else mask})


def _losses(loss: OwnLoss, tokens: LossInputs) -> Tensor:
    """Loss and gradient of each token, [2, tokens]; FunctionRefused if one of them is not finite."""
    leaves = {name: getattr(tokens, name).clone().requires_grad_() for name in ("trainer_logprobs", "entropy")}
    inputs = replace(tokens, **leaves)
    values = losses.per_token(loss, inputs, LossSettings())
    values.sum().backward()  # type: ignore[no-untyped-call]
    gradient = leaves["trainer_logprobs"].grad
    gradient = torch.zeros_like(values) if gradient is None else gradient
    both = torch.stack([values.detach(), gradient])
    if not both.isfinite().all():
        what = f"gave the loss {values.tolist()} with the gradient {gradient.tolist()} for {inputs}"
        raise loss.refuse(what, "both must be finite for every token")
    return both


def _same(loss: OwnLoss, first: Tensor, second: Tensor, how: str, remedy: str) -> None:
    wrong = ((first - second).abs() > 1e-5 + 1e-4 * first.abs()).nonzero()
    if len(wrong):
        kind, token = wrong[0].tolist()
        what = ("loss", "gradient")[kind]
        values = f"{float(first[kind, token]):.6g} and, with {how}, {float(second[kind, token]):.6g}"
        raise loss.refuse(f"gave a token the {what} {values}", remedy)


def try_estimator(target: str, base_dir: str) -> None:
    """FunctionRefused if it cannot be loaded, or breaks its contract on a few groups of 2 to 16."""
    estimator, random = load_estimator(target, base_dir), np.random.default_rng(0)
    groups = [([1.0, 0.0, 0.0, 0.5], [3, 7, 1, 4]), ([0.0, 1.0], [1, 2])]
    groups += [(random.normal(size=size).tolist(), random.integers(1, 9, size).tolist()) for size in (2, 3, 8, 16)]
    for rewards, lengths in groups:
        first, second = (list(estimator(list(rewards), list(lengths))) for _ in range(2))
        if first != second:
            raise FunctionRefused(
                f"{ADVANTAGE} = {target!r}: for the rewards {rewards} it returned {first} and, at another call, "
                f"{second}; compute it from its arguments alone: a step of the log is trained again with the same "
                "numbers"
            )


def try_metric(target: str, base_dir: str) -> None:
    """FunctionRefused if it cannot be loaded, or breaks its contract on a group of two samples."""
    metrics = Metrics([target], base_dir)
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


def try_optimizer(request: str, base_dir: str) -> None:
    """FunctionRefused if the optimiser described by a JSON map (`target`, `options`, the keys of AdamW, and whether it
    updates `parts` on several ranks) fails in `optimizers.try_optimizer`."""
    adam = json.loads(request)
    target, options, parts = adam.pop("target"), adam.pop("options"), adam.pop("parts", False)
    optimizers.try_optimizer(target, adam, options, base_dir)
    if parts:
        optimizers.require_elementwise(target, adam, options, base_dir)


TRIALS: dict[str, Callable[[str, str], None]] = {
    LOSS: try_loss, ADVANTAGE: try_estimator, METRICS: try_metric, optimizers.KEY: try_optimizer,
}


def main(arguments: Sequence[str]) -> int:
    """Try each of the pairs of key and import path that follow the folder of the topology. Writes one JSON line: a
    problem for each, or ""."""
    answers = os.dup(1)
    os.dup2(2, 1)  # prints of user code are no answer
    signal.alarm(TRIAL_S)  # ends it even if its parent is gone
    problems = []
    base_dir, *pairs = arguments
    for key, target in zip(pairs[::2], pairs[1::2], strict=True):
        try:
            TRIALS[key](target, base_dir)
            problems.append("")
        except FunctionRefused as problem:
            problems.append(str(problem))
        except Exception as problem:  # in the backward pass of a loss
            problems.append(f"{key} = {target!r}: it raised {cause(problem)}")
    os.write(answers, json.dumps(problems).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
