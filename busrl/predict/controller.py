"""The controller of the learner's trigger: the size of a step follows the entropy of the policy.

High entropy calls for small, frequent steps, low entropy for large, rare ones; between the two the topology's own
settings hold. One `Inputs` per step goes in, at most one `Decision` comes out. Pure: no clock, no file, no randomness.
The inputs come from the learner role, or from the lines of `decisions.jsonl`; knows nothing of how they were measured.

- The same inputs give the same decisions, whether they come from a run or from its log.
- One knob moves, the trigger (n_min with t_max). It moves at most once in `cooldown` steps and n_min stays within
  [n_lo, n_hi]. B, W, the loss and the learning rate never change.
- A band is entered at its threshold and left only `hysteresis` inside of it.
- Rising entropy with falling reward, a clip fraction far above its baseline, or few effective samples veto a lower
  n_min: less data per step makes each of them worse.
- t_max moves with n_min where the topology has steps by time; where it has none (inf), it stays so.
- In mode `advise` the knobs move in the same way, but `applied` is False: the learner does not follow them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from busrl.topology.learner import Controller as ControllerKeys
from busrl.topology.schema import ControllerRules

STATE_VERSION = 1
NAME = "entropy"  # of the rules, in decisions and checkpoints


# -- settings, knobs and inputs -----------------------------------------------------------------------------


RULES, DECISIONS = ControllerRules(), ControllerKeys()


@dataclass(frozen=True)
class ControllerSettings:
    """The keys of [learner.controller] and [experiments.controller] by their names, with their defaults; `n_min`,
    `t_max_ms`: the start. Times are in milliseconds."""

    n_min: int
    n_lo: int
    n_hi: int
    t_max_ms: float = math.inf
    mode: str = "advise"
    every: int = DECISIONS.every
    cooldown: int = DECISIONS.cooldown
    ema: float = RULES.ema
    probe_every: int = RULES.probe_every
    probe_samples: int = RULES.probe_samples
    reference_steps: int = RULES.reference_steps
    high: float = RULES.high
    low: float = RULES.low
    hysteresis: float = RULES.hysteresis
    high_t_max: float = 1000 * RULES.high_t_max_s
    low_t_max: float = 1000 * RULES.low_t_max_s
    clip_factor: float = RULES.clip_factor
    clip_floor: float = RULES.clip_floor
    ess_low: float = RULES.ess_low

    @classmethod
    def of(
        cls, controller: ControllerKeys, rules: ControllerRules, *, n_min: int, n_lo: int, n_hi: int, t_max_ms: float
    ) -> ControllerSettings:
        """From the topology's [learner.controller] and [experiments.controller], and the bounds of a run."""
        return cls(
            n_min, n_lo, n_hi, t_max_ms, controller.mode, controller.every, controller.cooldown, rules.ema,
            rules.probe_every, rules.probe_samples, rules.reference_steps, rules.high, rules.low, rules.hysteresis,
            1000 * rules.high_t_max_s, 1000 * rules.low_t_max_s, rules.clip_factor, rules.clip_floor, rules.ess_low,
        )


@dataclass(frozen=True)
class Knobs:
    """The knobs that the controller moves: groups per step, and milliseconds after which a smaller step fires."""

    n_min: int
    t_max_ms: float = math.inf

    def to_dict(self) -> dict[str, Any]:
        """JSON has no infinity: None stands for it."""
        return {**asdict(self), "t_max_ms": self.t_max_ms if math.isfinite(self.t_max_ms) else None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Knobs:
        """The inverse of `to_dict`. Older runs have more knobs, which are left out."""
        return cls(data["n_min"], math.inf if data["t_max_ms"] is None else float(data["t_max_ms"]))


@dataclass(frozen=True)
class Inputs:
    """The measured numbers of a step: shares and clip fractions in [0, 1], entropies in nats. A number that is None was
    not measured in this step: it changes no mean and fires no rule. Other numbers of a step are in metrics.jsonl.
    """

    step: int
    groups: int
    reward: float | None = None  # mean over all samples that ended
    probe: float | None = None  # entropy on the fixed probe set, in the steps that score it
    clip: float | None = None  # share of tokens outside of the clip range, both sides
    ess: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the numbers that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Inputs:
        """The inverse of `to_dict`. Unknown names are left out: a newer or an older program may have written them."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})

    @classmethod
    def measured(cls, step: int, groups: int, **numbers: float | None) -> Inputs:
        """Inputs from any numbers: one that is not finite counts as not measured."""
        finite = {name: float(value) for name, value in numbers.items() if value is not None and math.isfinite(value)}
        return cls(step=step, groups=groups, **finite)


# -- the memory of the steps --------------------------------------------------------------------------------

SMOOTHED = ("reward", "clip", "ess")


class Signals:
    """Smoothed numbers, and baselines of the first `reference_steps` steps. `add` counts a step.

    A mean is exponential over steps and corrected for its start. The probe is not scored in every step; its mean decays
    by the steps that have passed, so that its speed does not depend on how often it is scored.
    """

    def __init__(self, settings: ControllerSettings) -> None:
        self._ema, self._reference = settings.ema, settings.reference_steps
        self._sums: dict[str, tuple[float, float]] = {}  # name -> weighted sum, weight
        self._first: dict[str, tuple[float, int]] = {}  # name -> sum, count over the reference steps
        self._probed: int | None = None
        self.step = 0
        self.steps = 0

    def add(self, inputs: Inputs) -> None:
        self.step = inputs.step
        self.steps += 1
        keeps = dict.fromkeys(SMOOTHED, self._ema)
        if inputs.probe is not None:
            gap = 1 if self._probed is None else max(1, inputs.step - self._probed)
            keeps["probe"] = self._ema**gap
            self._probed = inputs.step
        for name, keep in keeps.items():
            if (value := getattr(inputs, name)) is not None:
                total, weight = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (keep * total + (1 - keep) * value, keep * weight + (1 - keep))
        for name in ("probe", "clip") if self.steps <= self._reference else ():
            if (value := getattr(inputs, name)) is not None:
                total, count = self._first.get(name, (0.0, 0))
                self._first[name] = (total + value, count + 1)

    def mean(self, name: str) -> float | None:
        """The smoothed value, None before the first."""
        total, weight = self._sums.get(name, (0.0, 0.0))
        return total / weight if weight > 0 else None

    def first(self, name: str) -> float | None:
        """The baseline; None until the reference steps are over, and if nothing was measured in them."""
        total, count = self._first.get(name, (0.0, 0))
        return total / count if count and self.steps >= self._reference else None

    @property
    def ratio(self) -> float | None:
        """H / H_ref on the probe set."""
        reference, now = self.first("probe"), self.mean("probe")
        return now / reference if reference and now is not None and reference > 0 else None

    def state(self) -> dict[str, Any]:
        return {
            "sums": {name: list(pair) for name, pair in self._sums.items()},
            "first": {name: list(pair) for name, pair in self._first.items()},
            "probed": self._probed, "step": self.step, "steps": self.steps,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._sums = {name: (float(a), float(b)) for name, (a, b) in state["sums"].items()}
        self._first = {name: (float(a), int(b)) for name, (a, b) in state["first"].items()}
        self._probed = None if state["probed"] is None else int(state["probed"])
        self.step, self.steps = int(state["step"]), int(state["steps"])


# -- decisions ----------------------------------------------------------------------------------------------


class Band(str, Enum):
    """The band of H / H_ref: normal <-> high, normal <-> low; a jump leads from one end to the other at once."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass(frozen=True)
class Decision:
    """A decision, including one that changes nothing. `old` and `new` hold all knobs; equal if none moved."""

    step: int
    rule: str
    knob: str  # the one that a rule moves, or would move; "" for none
    old: dict[str, Any]
    new: dict[str, Any]
    reason: str
    vetoes: tuple[str, ...]
    applied: bool  # the knobs are in force: mode `act`, and something moved
    seen: dict[str, float]  # the smoothed numbers on which it rests

    @property
    def moved(self) -> bool:
        return self.old != self.new

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "vetoes": list(self.vetoes), "moved": self.moved}


class Controller:
    """The rules; call `observe` after every step. `knobs` are the settings by the rules, which the learner follows in
    mode `act` alone."""

    def __init__(self, settings: ControllerSettings) -> None:
        self.settings = settings
        self.signals = Signals(settings)
        self.knobs = Knobs(settings.n_min, settings.t_max_ms)
        self.moves = 0
        self.band = Band.NORMAL
        self._before: tuple[float | None, float | None] = (None, None)  # ratio and reward at the last decision
        self._rest_until = 0

    @property
    def acts(self) -> bool:
        return self.settings.mode == "act"

    def probe_is_due(self, step: int) -> bool:
        """Tell whether the probe set is to be scored after this step: the first, and every `probe_every`-th after it.
        """
        return (step - 1) % self.settings.probe_every == 0

    def observe(self, inputs: Inputs) -> Decision | None:
        """Count a step; returns the decision if one is due after it."""
        self.signals.add(inputs)
        return None if inputs.step % self.settings.every else self._decide(inputs.step)

    def _decide(self, step: int) -> Decision:
        ratio = self.signals.ratio
        if ratio is None:
            return self._decided(step, self.knobs, "no reference entropy yet")
        band = self._band_of(ratio)
        target, reason = self._target(band), f"H / H_ref {ratio:.3f} is {band.value}"
        vetoes = tuple(self._vetoes()) if target.n_min < self.knobs.n_min else ()
        self._before = ratio, self.signals.mean("reward")
        if target == self.knobs:
            self.band = band
            return self._decided(step, target, f"{reason}, nothing to change")
        if step < self._rest_until:
            return self._decided(step, self.knobs, f"{reason}, in cooldown")
        if vetoes:
            return self._decided(step, self.knobs, reason, "trigger", vetoes)
        self.band, self.moves, self._rest_until = band, self.moves + 1, step + self.settings.cooldown
        return self._decided(step, target, reason, "trigger")

    def _band_of(self, ratio: float) -> Band:
        s = self.settings
        high = s.high - (s.hysteresis if self.band is Band.HIGH else 0.0)
        low = s.low + (s.hysteresis if self.band is Band.LOW else 0.0)
        return Band.HIGH if ratio > high else Band.LOW if ratio < low else Band.NORMAL

    def _target(self, band: Band) -> Knobs:
        s = self.settings
        n_min, t_max = {
            Band.HIGH: (s.n_lo, s.high_t_max), Band.NORMAL: (s.n_min, s.t_max_ms), Band.LOW: (s.n_hi, s.low_t_max)
        }[band]
        return Knobs(n_min, t_max if math.isfinite(s.t_max_ms) else math.inf)

    def _vetoes(self) -> Iterator[str]:
        """Reasons against a lower n_min now. The clip baseline has a floor, as multiples of a value near 0 mean
        nothing."""
        s, signals, (ratio_before, reward_before) = self.settings, self.signals, self._before
        ratio, reward = signals.ratio, signals.mean("reward")
        complete = None not in (ratio, reward, ratio_before, reward_before)
        if complete and ratio > ratio_before and reward < reward_before:  # type: ignore[operator]
            entropy, rewards = f"{ratio_before:.3f} to {ratio:.3f}", f"{reward_before:.3f} to {reward:.3f}"
            yield f"entropy rises ({entropy}) while reward falls ({rewards})"
        clip, first = signals.mean("clip"), signals.first("clip")
        if clip is not None and first is not None and clip > s.clip_factor * max(first, s.clip_floor):
            yield f"clip fraction {clip:.4f} > {s.clip_factor:g} x baseline {max(first, s.clip_floor):.4f}"
        ess = signals.mean("ess")
        if ess is not None and ess < s.ess_low:
            yield f"ESS {ess:.3f} < {s.ess_low:g}"

    def _decided(self, step: int, new: Knobs, reason: str, knob: str = "", vetoes: tuple[str, ...] = ()) -> Decision:
        old, self.knobs = self.knobs, new
        return Decision(
            step=step, rule=NAME, knob=knob, old=old.to_dict(), new=new.to_dict(), reason=reason, vetoes=vetoes,
            applied=self.acts and new != old, seen=self._seen(),
        )

    def _seen(self) -> dict[str, float]:
        signals = self.signals
        numbers = {
            "ratio": signals.ratio, "probe": signals.mean("probe"), "probe_reference": signals.first("probe"),
            "clip_reference": signals.first("clip"), **{name: signals.mean(name) for name in SMOOTHED},
        }
        return {name: value for name, value in numbers.items() if value is not None}

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint; the `load` of a controller with equal settings continues from it."""
        ratio, reward = self._before
        return {
            "version": STATE_VERSION, "rules": NAME, "knobs": self.knobs.to_dict(), "moves": self.moves,
            "rest_until": self._rest_until, "signals": self.signals.state(),
            "rule_state": {"band": self.band.value, "ratio": ratio, "reward": reward},
        }

    def load(self, state: Mapping[str, Any]) -> bool:
        """Continue from a `state`; False, and nothing changed, if it is of other rules or of another version."""
        if state.get("version") != STATE_VERSION or state.get("rules") != NAME:
            return False
        self.signals.load(state["signals"])
        rules, s, knobs = state["rule_state"], self.settings, Knobs.from_dict(state["knobs"])
        self.band, self._before = Band(rules["band"]), (rules["ratio"], rules["reward"])
        self.knobs = Knobs(min(max(knobs.n_min, s.n_lo), s.n_hi), knobs.t_max_ms)  # the bounds may be others now
        self.moves, self._rest_until = int(state["moves"]), int(state["rest_until"])
        return True
