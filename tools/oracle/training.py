"""What the steps of a run do to its weights: masks, advantages, losses and updates, sample by sample.

Puts the formulas of `maths` on what `model` gives; `check` drives it and compares. Knows nothing of metrics.

- A step's advantages and values are those of the weights before its first update, and constants.
- Everything that a sample has of numbers is an array over all of its generated tokens; a mask says which are trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.oracle import maths
from tools.oracle.files import LENGTH, RunFiles, Sample, Step
from tools.oracle.model import Dense, Lora, Model, Scores, ValueHead, gradients, load_adamw

BOUNDARY = 2e-5  # a ratio so close to a clip bound may be counted on either side


@dataclass(frozen=True)
class Terms:
    """What decides which tokens of a step are trained: its record says so, or else the topology."""

    bound: int | None = None  # steps that a group may be old
    masks_old: bool = False
    last_segment: bool = False
    masks_cut: bool = False

    @classmethod
    def of(cls, step: Step, topology: dict[str, Any]) -> Terms:
        if step.terms is not None:
            return cls(**step.terms)
        weights, forced = topology["weights"], topology["experiments"]["forced_age"] > 0
        bounded = weights["mode"] == "batch-async" and not forced
        return cls(
            weights["max_staleness"] if bounded else None, bounded and weights["over_age"] == "wait",
            topology["segments"]["loss"] == "last_segment", topology["reward"]["truncated"] == "mask",
        )


@dataclass
class Given:
    """What a step starts from, per sample."""

    masks: list[np.ndarray]  # which tokens are trained
    worths: list[Tensor]  # advantages
    logps: list[Tensor]  # under the weights before the step
    referred: list[Tensor]  # under the reference; none without one
    values: list[Tensor]  # before the step, and what they are trained towards; none without a value head
    returns: list[Tensor]


@dataclass
class Tokens:
    """The trained tokens of one sample under the weights of their update."""

    loss: Tensor
    entropy: Tensor
    log_ratio: Tensor
    worth: Tensor
    versions: Tensor
    begun: int  # the oldest version that drew the first token of a turn
    dropped: Tensor | None = None  # by a correction
    kl: Tensor | None = None
    of_values: Tensor | None = None  # the loss of values
    errors: Tensor | None = None  # return - value
    returns: Tensor | None = None
    norm: float = 0.0  # of the gradient of its mini-batch


class Training:
    """The weights of a run, and the steps that change them."""

    def __init__(self, files: RunFiles, dtype: str, step_of: maths.VersionSteps) -> None:
        topology = files.topology
        self.topology, self.step_of = topology, step_of
        self.learner, self.segments = topology["learner"], topology["segments"]
        self.model = Model(Path(topology["model"]["path"]), dtype)
        self.lora = topology["lora"]["rank"] > 0
        seed = topology["run"]["seed"]
        self.trained: Dense | Lora = Lora(self.model, topology["lora"], seed) if self.lora else Dense(self.model)
        self.adamw, self.value = maths.AdamW(self.learner), self._value_head()
        self.earlier: dict[int, tuple[float, float]] = {}  # of advantage = "ema", by seat: weighted rewards, weight
        self.reference: tuple[Model, dict[str, Tensor]] | None = None
        self.kl = self.learner.get("kl", "none")
        if self.kl != "none":
            named = topology["model"].get("reference")
            other = Model(Path(named), dtype, self.model.without) if named else self.model
            self.reference = other, other.weights()

    def _value_head(self) -> ValueHead | None:
        if self.learner["advantage"] != "gae":
            return None
        width = self.model.net.get_output_embeddings().in_features
        return ValueHead(width, self.learner["value"], self.model.dtype)

    def load(self, checkpoint: Path) -> None:
        """Weights, optimiser and value head of a checkpoint."""
        self.trained.load(checkpoint)
        self.adamw = maths.AdamW(self.learner)
        load_adamw(self.adamw, checkpoint, self.trained)
        meta = json.loads((checkpoint / "meta.json").read_text())
        self.earlier = {seat: (total, weight) for seat, total, weight in meta.get("reward_means", [])}
        if self.value is not None:
            self.value.load(checkpoint)

    def tensors(self) -> dict[str, Tensor]:
        """All that is trained, by name."""
        return self.trained.leaves | {f"value.{name}": one for name, one in self._of_head().items()}

    def _of_head(self) -> dict[str, Tensor]:
        return {} if self.value is None else self.value.leaves

    # -- which tokens ---------------------------------------------------------------------------------------------

    def mask(self, step: Step, sample: Sample) -> np.ndarray:
        """Of each generated token whether it is trained."""
        terms = Terms.of(step, self.topology)
        if is_cut(sample, terms):
            return np.zeros(len(sample.tokens), bool)
        found = sample.trained
        for part, turn in zip(parts_of(sample), turns_of(sample)):
            context = max(self.too_old(step, turn, terms), turn.last_begins if terms.last_segment else 0)
            found[part.start : part.start + context] = False
        return found

    def too_old(self, step: Step, sample: Sample, terms: Terms) -> int:
        """Everything up to the last token of a version that is older than the bound, where that is left out."""
        if not terms.masks_old or terms.bound is None or step.step - 1 - sample.step <= terms.bound:
            return 0
        late = [i + 1 for i, version in enumerate(sample.versions.tolist())
                if step.step - 1 - self.step_of(version) > terms.bound]
        return max(late, default=0)

    def masked(self, step: Step) -> dict[str, Any]:
        """Tokens of the step's samples that taught nothing, and why."""
        terms = Terms.of(step, self.topology)
        whole = [sample for sample in step.samples if not is_cut(sample, terms)]
        cut = sum(len(sample.tokens) for sample in step.samples if is_cut(sample, terms))
        old = sum(self.too_old(step, turn, terms) for sample in whole for turn in turns_of(sample))
        untrained = sum(int((~sample.trained).sum()) for sample in whole)
        trained = sum(int(self.mask(step, sample).sum()) for sample in whole)
        context = sum(len(sample.tokens) for sample in whole) - trained
        named = {name: count for name, count in (("cut", cut), ("untrained", untrained)) if count}
        return {
            "masked": {"earlier_segments": context - old - untrained, "too_old": old, **named},
            "never_trained": (context + cut) / max(1, trained + context + cut),
        }

    # -- what a step starts from ----------------------------------------------------------------------------------

    def given(self, step: Step) -> Given:
        before = self.model.score(self.trained.effective(), step.samples)
        referred: list[Tensor] = []
        if self.reference is not None:
            model, weights = self.reference
            referred = [one.logp for one in model.score(weights, step.samples)]
        found = Given([self.mask(step, sample) for sample in step.samples], [], [one.logp.detach() for one in before],
                      referred, [], [])
        paid = [self.paid(sample, referred[i]) if referred else np.zeros(len(sample.tokens))
                for i, sample in enumerate(step.samples)]
        if self.value is None:
            self._of_groups(step, found, paid)
        else:
            self._of_values(step, found, paid, [self.value(one.hidden).detach() for one in before])
        return found

    def paid(self, sample: Sample, referred: Tensor) -> np.ndarray:
        """What learner.kl_in = "reward" takes from each token's reward; a turn that is not trained pays nothing."""
        if self.learner["kl_in"] != "reward":
            return np.zeros(len(sample.tokens))
        drawn = torch.from_numpy(sample.logprobs).to(referred)
        found: np.ndarray = self.learner["kl_coef"] * maths.kl(self.kl, drawn, referred).numpy() * sample.trained
        return found

    def _of_groups(self, step: Step, found: Given, paid: list[np.ndarray]) -> None:
        found.worths = [torch.zeros(0)] * len(step.samples)
        for group in step.groups:
            own = step.members(group)
            rewards = [step.samples[i].reward - math.fsum(paid[i].tolist()) for i in own]
            if self.learner["advantage"] == "ema":
                seat = group % len(self.topology["model"].get("seats") or [""])
                base, self.earlier[seat] = maths.with_group(*self.earlier.get(seat, (0.0, 0.0)), rewards)
                rewards = [reward - base for reward in rewards]
            for i, worth in zip(own, self.advantages([step.samples[i] for i in own], rewards)):
                lengths = [part.stop - part.start for part in parts_of(step.samples[i])]
                found.worths[i] = torch.from_numpy(np.repeat(worth, lengths)).to(self.model.dtype)

    def _of_values(self, step: Step, found: Given, paid: list[np.ndarray], values: list[Tensor]) -> None:
        own = self.learner["value"]
        worths = []
        for sample, cost, known in zip(step.samples, paid, values):
            rewards = (-cost).tolist()
            rewards[-1] += sample.reward
            worths.append(maths.gae(rewards, known.tolist(), own["gamma"], own["decay"]))
            towards = maths.gae(rewards, known.tolist(), own["gamma"], own["decay_of_values"])
            found.returns.append(known + torch.tensor(towards, dtype=known.dtype))
        if own["whiten"]:
            every = [one for row, mask in zip(worths, found.masks) for one, is_in in zip(row, mask) if is_in]
            mean, spread = maths.whitening(every)
            worths = [[(one - mean) / spread for one in row] for row in worths]
        found.worths = [torch.tensor(row, dtype=self.model.dtype) for row in worths]
        found.values = values

    def advantages(self, samples: list[Sample], rewards: list[float]) -> list[list[float]]:
        """Of each turn of each sample of a group, in the order of the log."""
        kind = self.learner["advantage"]
        if self.learner.get("credit", "episode") == "episode":
            return [[value] * len(one.turns) for value, one in zip(maths.advantages(kind, rewards), samples)]
        orders = [sorted(range(len(one.turns)), key=lambda at, one=one: one.turns[at, 3]) for one in samples]
        steps = []
        for one, order, reward in zip(samples, orders, rewards):
            own = [(one.turn_rewards or [0.0] * len(order))[at] for at in order]
            steps.append([*own[:-1], own[-1] + reward - math.fsum(own)])
        named = [one.keys or [""] * len(one.turns) for one in samples]
        keys = [[own[at] for at in order] for own, order in zip(named, orders)]
        worth = maths.turn_advantages(kind, steps, self.learner["gamma"], keys)
        return [[row[order.index(at)] for at in range(len(order))] for row, order in zip(worth, orders)]

    # -- the updates ----------------------------------------------------------------------------------------------

    def step(self, step: Step, rate: float) -> list[list[Tokens]]:
        """The mini-batches of a step: the tokens of each under the weights of its own update."""
        given = self.given(step)
        shares = maths.mini_batches(step.groups, self.learner["updates_per_batch"])
        return [self.update(step, groups, given, rate) for groups in shares]

    def update(self, step: Step, groups: list[int], given: Given, rate: float) -> list[Tokens]:
        for value in self.tensors().values():
            value.requires_grad_()
        made = []
        for group in groups:
            own = step.members(group)
            for i, scores in zip(own, self.model.score(self.trained.effective(), [step.samples[i] for i in own])):
                if given.masks[i].any():
                    made.append(self.tokens(step.samples[i], i, given, scores))
        if count := sum(len(one.loss) for one in made):
            parts = [one.loss if one.of_values is None else one.loss + one.of_values for one in made]
            self._change(torch.cat(parts).sum() / count, made, rate)
        self.trained.leaves = {name: one.detach() for name, one in self.trained.leaves.items()}
        if self.value is not None:
            self.value.leaves = {name: one.detach() for name, one in self.value.leaves.items()}
        return made

    def _change(self, total: Tensor, made: list[Tokens], rate: float) -> None:
        slopes = gradients(self.tensors(), total)
        limit = self.learner["max_grad_norm"]
        own = {name: one for name, one in slopes.items() if name in self.trained.leaves}
        slope, norm = maths.clipped(own, limit)
        for one in made:
            one.norm = norm
        self.adamw.step(self.trained.leaves, slope, rate)
        if self.value is not None:
            of_head = {name: slopes[f"value.{name}"] for name in self.value.leaves}
            slope, _ = maths.clipped(of_head, limit)
            self.value.adamw.step(self.value.leaves, slope, rate * self.value.settings["rate"])

    def tokens(self, sample: Sample, i: int, given: Given, scores: Scores) -> Tokens:
        mask = torch.from_numpy(given.masks[i])
        logp, entropy, worth = scores.logp[mask], scores.entropy[mask], given.worths[i][mask]
        recorded = torch.from_numpy(sample.logprobs).to(logp)[mask]
        behaviour = logp.detach() if self.segments["loss"] == "pois" else recorded
        prox = given.logps[i][mask] if self.learner["updates_per_batch"] > 1 else logp.detach()
        found = Tokens(
            loss=maths.loss(self.learner["loss"], logp, behaviour, prox, worth, self.learner), worth=worth,
            entropy=entropy.detach(), log_ratio=torch.clamp(logp.detach() - recorded, -20, 20),
            versions=torch.from_numpy(sample.versions)[mask],
            begun=int(min(sample.versions[part.start] for part in parts_of(sample))),
        )
        if (kind := self.learner.get("correction", "none")) != "none":
            weight = maths.correction(kind, behaviour, prox, self.learner)
            found.loss, found.dropped = found.loss * weight, weight == 0
        if given.referred:
            found.kl = maths.kl("k3", logp.detach(), given.referred[i][mask])
            if self.learner["kl_in"] == "loss":
                found.loss = found.loss + self.learner["kl_coef"] * self.divergence(
                    logp, maths.old(behaviour, prox, self.learner), given.referred[i][mask])
        found.loss = found.loss - self.learner.get("entropy_coef", 0.0) * entropy
        if self.value is not None:
            values, found.returns = self.value(scores.hidden)[mask], given.returns[i][mask]
            clip = self.learner["value"]["clip"]
            found.of_values = maths.value_loss(values, given.values[i][mask], found.returns, clip)
            found.errors = found.returns - values.detach()
        return found

    def divergence(self, logp: Tensor, old: Tensor, referred: Tensor) -> Tensor:
        if self.kl == "k3_is":
            return maths.ratio(logp, old) * maths.kl("k3", logp, referred)
        return maths.kl(self.kl, logp, referred)


# -- what the tokens of a step come to ---------------------------------------------------------------------------


def joined(updates: Iterable[list[Tokens]], learner: dict[str, Any]) -> dict[str, Any]:
    """What the trained tokens of all mini-batches come to; the gradient norm is that of the last one."""
    updates = list(updates)
    every = [one for made in updates for one in made]
    count = sum(len(one.loss) for one in every)
    log_ratio, advantage = (torch.cat([getattr(one, name) for one in every]) for name in ("log_ratio", "worth"))
    r = log_ratio.exp()
    return {
        "tokens": count,
        "loss": float(sum(float(one.loss.detach().sum()) for one in every)) / count,
        "grad_norm": updates[-1][0].norm,
        "entropy": float(torch.cat([one.entropy for one in every]).mean()),
        "log_ratio_mean": float(log_ratio.mean()),
        "k3": float((r - 1 - log_ratio).mean()),
        "ess": float(r.sum() ** 2 / (count * (r * r).sum())),
        "clip_low": _share((advantage < 0), 1 - learner["clip_low"] - r),
        "clip_high": _share((advantage > 0), r - 1 - learner["clip_high"]),
        "dual_clip": _share((advantage < 0), r - learner["dual_clip"]),
        **_of_terms(every),
    }


def _of_terms(every: list[Tokens]) -> dict[str, Any]:
    """What a step tells of terms that not every run has."""
    found: dict[str, Any] = {}
    if every[0].dropped is not None:
        found["dropped"] = float(torch.cat([one.dropped for one in every]).double().mean())
    if every[0].kl is not None:
        found["kl"] = float(torch.cat([one.kl for one in every]).mean())
    if every[0].of_values is not None:
        errors, returns = (torch.cat([getattr(one, name) for one in every]) for name in ("errors", "returns"))
        found["value_loss"] = float(torch.cat([one.of_values.detach() for one in every]).mean())
        spread = float(returns.var(correction=0))
        found["explained_variance"] = 1 - float(errors.var(correction=0)) / spread if spread > 1e-9 else None
    return found


def _share(which: Tensor, above: Tensor) -> tuple[float, float]:
    """The share of the tokens beyond a bound: at least and at most, as float32 may see it."""
    low, high = (which & (above > BOUNDARY)).double().mean(), (which & (above > -BOUNDARY)).double().mean()
    return float(low), float(high)


def is_cut(sample: Sample, terms: Terms) -> bool:
    """Whether it is not trained, since the limit cut it."""
    return terms.masks_cut and sample.finish == LENGTH


def parts_of(sample: Sample) -> list[slice]:
    """The generated tokens of each turn among all of a sample; of an answer all."""
    ends = np.cumsum(sample.turns[:, 2] - sample.turns[:, 1]).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]


def turns_of(sample: Sample) -> list[Sample]:
    """Each turn as an answer of its own; one that is not trained has no token."""
    if not sample.is_episode:
        return [sample]
    return [
        replace(sample, tokens=sample.tokens[part][:most], logprobs=sample.logprobs[part][:most],
                versions=sample.versions[part][:most], segments=[most])
        for part, mark in zip(parts_of(sample), sample.turns[:, 3].tolist())
        for most in [part.stop - part.start if mark % 2 else 0]
    ]
