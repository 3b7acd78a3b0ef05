"""The numbers of a controller: the keys of [learner.controller] and [experiments.controller], and bounds that follow.

Plain data. The names are those of the keys, so that a decision can be read beside the file that asked for it.

What the controller may move, and what a rule proposes. Plain data.

What the controller is told of one step: plain numbers, each of which may be missing.

Made by the learner from the line of metrics of a step, by a simulator, or read back from `decisions.jsonl`. Knows
nothing of how they were measured.

- None means: not measured in this step. It changes no mean and fires no rule.
- What went through `to_dict` and JSON comes back equal; NaN and infinity can not be written, so they become None and
  `broken` says that there was one.

The gradient noise scale: from squared gradient norms at two batch sizes to signal and spread.

Pure arithmetic. Source: McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1. Knows nothing of gradients as tensors.

- E|g_B|^2 = |G|^2 + tr(S) / B, so two sizes give an unbiased estimate of both terms. Each may be negative in a single
  step: average the two apart from each other and divide afterwards.
- In GRPO the unit of B is the group: the samples of a group share a baseline, so they are not independent draws.

The controller's memory of the steps: smoothed numbers, baselines of the first steps, and what a median needs.

Pure. Everything in it is plain data, so that it stands in a checkpoint as it is. Knows nothing of rules.

- A mean is exponential over steps and corrected for its start; a number that is missing changes nothing.
- The probe is not scored in every step: its mean forgets by the steps that passed, so its speed does not depend on how
  often it is scored.
- Baselines are made of the first `reference_steps` steps that it is told of, and stand from then on.

The entropy rules: the size of a step follows the entropy of the policy against its own beginning.

One of the two rule sets of `controller`. High entropy: small, frequent steps. Low entropy: large, rare ones. Between:
the settings of the topology. Pure; reads `Signals`, changes only its own band.

- A band is entered at its threshold and left only `hysteresis` inside of it.
- A move that lowers n_min is vetoed by rising entropy with falling reward, by a clip fraction far above its baseline,
  and by few effective samples: less data per step makes each of them worse.
- t_max moves with n_min where the topology has steps by time; where it has none (inf), it stays so.

The full rules: safety, entropy gate, batch from the gradient noise scale, staleness; one knob per decision.

The other rule set of `controller`. Pure; reads `Signals`, changes only its own counters. The rules are looked at in
that order, and the first that wants to move a knob ends the decision.

- Safety halves the admission bound; what is added to it comes back one step at a time.
- A counter of decisions in a row stands at 0 while its knob is at the end of its range, while a move is being waited
  for, and while growth is frozen: no rule winds up behind a limit.
- The gate switches on below gate_on x sigma and off above gate_off x sigma; entropy far below sigma freezes growth.

The controller: fed with one `Inputs` per step, it decides every few steps whether one of its knobs is moved.

Pure: no clock, no file, no chance. Talks to nothing; the learner carries out what `knobs` say between two steps, writes
every decision down and keeps `state` in its checkpoints. Knows nothing of how the inputs were measured.

- The same inputs give the same decisions, whether they come from a run, from its log, or from a simulator.
- One decision moves at most one knob (n_min and t_max are one: the trigger). After a move nothing moves for
  `cooldown` steps, safety and the entropy gate of the full rules apart.
- Knobs stay within [n_lo, n_hi] and [eta_min, eta_max]. B, W, the loss and the learning rate are never touched.
- In mode `advise` everything happens but `applied` is False: the knobs are what `act` would have set.

A switch on the mean entropy of the policy: ON below 0.9 sigma, OFF above 1.1 sigma, unchanged in between.

Pure. Decides when mastered tokens are left out of the loss (`experiments.dmmpt = "gate"`): always on, entropy rises
without end. Fed once per step with the entropy over all trained tokens, those left out included, so that it does not
measure its own doing. Knows nothing of losses.

- The entropy is smoothed with beta 0.9 and corrected for its start; the state is two numbers and a flag.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any

# -- The numbers of a controller: the keys of [learner.controller] and [experiments.controller], and bounds that ... --


MODES = ("off", "advise", "act")
RULES = ("entropy", "full")
BOUNDS = ("n_min", "n_lo", "n_hi", "t_max_ms", "eta_min", "eta_max")


@dataclass(frozen=True)
class ControlSettings:
    """`n_min`, `t_max_ms`, `eta_max` are the starting values; `eta_max` None: there is no admission bound to move."""

    n_min: int
    n_lo: int
    n_hi: int
    t_max_ms: float = math.inf
    eta_min: int = 0
    eta_max: int | None = None
    mode: str = "advise"
    rules: str = "entropy"
    every: int = 5
    cooldown: int = 10
    ema: float = 0.9
    probe_every: int = 5
    probe_samples: int = 32
    reference_steps: int = 20
    high: float = 1.3
    low: float = 0.6
    hysteresis: float = 0.1
    high_t_max: float = 250.0
    low_t_max: float = 1000.0
    clip_factor: float = 5.0
    clip_floor: float = 0.001
    ess_low: float = 0.5
    k3_high: float = 0.05
    masked_high: float = 0.02
    grad_factor: float = 5.0
    safety_cooldown: int = 20
    sigma: float = 0.2
    gate_on: float = 0.9
    gate_off: float = 1.1
    collapse: float = 0.5
    streak: int = 3
    kappa: float = 1.0
    grow_at: float = 1.5
    shrink_at: float = 0.67
    grow: float = 1.25
    shrink: float = 0.8
    idle_train: float = 0.1
    idle_rollout: float = 0.2
    ess_safe: float = 0.8
    k3_safe: float = 0.01

    def __post_init__(self) -> None:
        if not 1 <= self.n_lo <= self.n_min <= self.n_hi:
            raise ValueError(f"1 <= n_lo <= n_min <= n_hi does not hold: {self.n_lo}, {self.n_min}, {self.n_hi}")
        if self.eta_max is not None and not 0 <= self.eta_min <= self.eta_max:
            raise ValueError(f"0 <= eta_min <= eta_max does not hold: {self.eta_min}, {self.eta_max}")
        if self.mode not in MODES or self.rules not in RULES:
            raise ValueError(f"mode = {self.mode!r}, rules = {self.rules!r}: one of {MODES} and one of {RULES}")

    @classmethod
    def of(cls, controller: Any, rules: Any, **bounds: Any) -> ControlSettings:
        """From the topology's [learner.controller] and [experiments.controller]; `bounds` are the values of BOUNDS."""
        names = {field.name for field in fields(cls)} - set(BOUNDS) - {"high_t_max", "low_t_max"}
        values = {name: getattr(controller if hasattr(controller, name) else rules, name) for name in names}
        times = {"high_t_max": 1000 * rules.high_t_max_s, "low_t_max": 1000 * rules.low_t_max_s}  # ms here
        return cls(**bounds, **values, **times)


# -- What the controller may move, and what a rule proposes. Plain data -----------------------------------------------


@dataclass(frozen=True)
class Knobs:
    """`eta` is the admission bound in steps (None: there is none to move); `gate` asks for the mastered-token mask."""

    n_min: int
    t_max_ms: float = math.inf
    eta: int | None = None
    gate: bool = False

    def with_trigger(self, n_min: int, t_max_ms: float) -> Knobs:
        return replace(self, n_min=n_min, t_max_ms=t_max_ms)

    def to_dict(self) -> dict[str, Any]:
        """JSON has no infinity: None stands for it."""
        return {**asdict(self), "t_max_ms": self.t_max_ms if math.isfinite(self.t_max_ms) else None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Knobs:
        return cls(**{**data, "t_max_ms": math.inf if data["t_max_ms"] is None else float(data["t_max_ms"])})


@dataclass(frozen=True)
class Proposal:
    """A rule's answer: `knobs` as they would be, None to leave them; vetoes stop it. `rest`: steps to wait after it."""

    rule: str
    knob: str
    knobs: Knobs | None
    reason: str
    vetoes: tuple[str, ...] = ()
    rest: int | None = None

    @classmethod
    def hold(cls, rule: str, reason: str, rest: int | None = None) -> Proposal:
        return cls(rule, "", None, reason, (), rest)


# -- What the controller is told of one step: plain numbers, each of which may be missing -----------------------------


@dataclass(frozen=True)
class Inputs:
    """Shares and clip fractions in [0, 1], entropies in nats, noise terms in squared gradient norms (times groups)."""

    step: int
    groups: int
    reward: float | None = None  # mean over all samples that ended
    probe: float | None = None  # entropy on the fixed probe set, in the steps that score it
    entropy: float | None = None  # over the trained tokens: moves with the data too, so it is logged and not acted on
    clip: float | None = None  # share of tokens outside of the clip range, both sides
    k3: float | None = None
    ess: float | None = None
    masked: float | None = None  # share of tokens left out because they were too old
    grad_norm: float | None = None
    broken: bool = False  # the step changed nothing, or one of its numbers was not finite
    noise_signal: float | None = None  # |G|^2, unbiased
    noise_spread: float | None = None  # tr(S), per group
    idle_train: float | None = None
    idle_rollout: float | None = None
    flat_share: float | None = None
    length_ratio: float | None = None  # consumed over dispatched
    age_mean: float | None = None
    age_p95: float | None = None
    age_max: float | None = None
    queue: float | None = None  # groups that are ready or claimed

    def to_dict(self) -> dict[str, Any]:
        """Plain data without what is missing."""
        return {name: value for name, value in asdict(self).items() if value is not None and value is not False}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Inputs:
        """The counterpart. Unknown names are left out: a newer program may have written them."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})

    @classmethod
    def made(cls, step: int, groups: int, broken: bool = False, **numbers: float | None) -> Inputs:
        """From measured numbers, whatever they are."""
        bad = any(value is not None and not math.isfinite(value) for value in numbers.values())
        kept = {name: None if value is None or not math.isfinite(value) else float(value)
                for name, value in numbers.items()}
        return cls(step=step, groups=groups, broken=broken or bad, **kept)


# -- The gradient noise scale: from squared gradient norms at two batch sizes to signal and spread --------------------


def noise_pair(small_squared: float, small: float, big_squared: float, big: float) -> tuple[float, float]:
    """(|G|^2, tr(S)) from the mean squared norm of gradients over `small` units and the squared norm over `big` units.

    With parts of unequal size `small` is their harmonic mean. ValueError unless 0 < small < big.
    """
    if not 0 < small < big:
        raise ValueError(f"batch sizes {small} and {big}: the first must be above 0 and below the second")
    signal = (big * big_squared - small * small_squared) / (big - small)
    spread = (small_squared - big_squared) / (1 / small - 1 / big)
    return signal, spread


# -- The controller's memory of the steps: smoothed numbers, baselines of the first steps, and what a median needs ----


SMOOTHED = (
    "reward", "clip", "k3", "ess", "masked", "idle_train", "idle_rollout", "noise_signal", "noise_spread"
)
GRADIENTS = 50  # norms that the median is taken of


class Signals:
    """Fed with every step by `add`; read by the rules."""

    def __init__(self, settings: ControlSettings) -> None:
        self._ema, self._reference = settings.ema, settings.reference_steps
        self._sums: dict[str, tuple[float, float]] = {}  # name -> weighted sum, weight
        self._first: dict[str, tuple[float, int]] = {}  # name -> sum, count over the reference steps
        self._norms: list[float] = []
        self._probed: int | None = None
        self.step = 0
        self.steps = 0
        self.broken = False  # since `calm` was called last
        self.jump = 0.0  # the largest gradient norm over its median since then

    def add(self, inputs: Inputs) -> None:
        """One more step."""
        self.step = inputs.step
        self.steps += 1
        for name in SMOOTHED:
            self._smooth(name, getattr(inputs, name), self._ema)
        if inputs.probe is not None:
            gap = 1 if self._probed is None else max(1, inputs.step - self._probed)
            self._smooth("probe", inputs.probe, self._ema**gap)
            self._probed = inputs.step
        if self.steps <= self._reference:
            self._note_first("probe", inputs.probe)
            self._note_first("clip", inputs.clip)
        self._note_gradient(inputs)

    def _smooth(self, name: str, value: float | None, keep: float) -> None:
        if value is not None:
            total, weight = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (keep * total + (1 - keep) * value, keep * weight + (1 - keep))

    def _note_first(self, name: str, value: float | None) -> None:
        if value is not None:
            total, count = self._first.get(name, (0.0, 0))
            self._first[name] = (total + value, count + 1)

    def _note_gradient(self, inputs: Inputs) -> None:
        self.broken |= inputs.broken
        if inputs.grad_norm is None:
            return
        if len(self._norms) >= 5 and (median := statistics.median(self._norms)) > 0:
            self.jump = max(self.jump, inputs.grad_norm / median)
        self._norms = [*self._norms, inputs.grad_norm][-GRADIENTS:]

    def calm(self) -> None:
        """Forget the events of single steps: a decision has looked at them."""
        self.broken, self.jump = False, 0.0

    # -- what the rules read ------------------------------------------------------------------------------------

    def mean(self, name: str) -> float | None:
        """The smoothed value, None before the first."""
        total, weight = self._sums.get(name, (0.0, 0.0))
        return total / weight if weight > 0 else None

    def first(self, name: str) -> float | None:
        """The baseline, None until the reference steps are over or if nothing was measured in them."""
        total, count = self._first.get(name, (0.0, 0))
        return total / count if count and self.steps >= self._reference else None

    @property
    def ratio(self) -> float | None:
        """H / H_ref on the probe set."""
        reference, now = self.first("probe"), self.mean("probe")
        return now / reference if reference and now is not None and reference > 0 else None

    @property
    def noise_scale(self) -> float | None:
        """B_simple in groups: numerator and denominator smoothed apart; None while either is not above 0."""
        signal, spread = self.mean("noise_signal"), self.mean("noise_spread")
        return spread / signal if signal is not None and spread is not None and signal > 0 and spread > 0 else None

    # -- checkpoint ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "sums": {name: list(pair) for name, pair in self._sums.items()},
            "first": {name: list(pair) for name, pair in self._first.items()},
            "norms": list(self._norms), "probed": self._probed, "step": self.step, "steps": self.steps,
            "broken": self.broken, "jump": self.jump,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._sums = {name: (float(a), float(b)) for name, (a, b) in state["sums"].items()}
        self._first = {name: (float(a), int(b)) for name, (a, b) in state["first"].items()}
        self._norms = [float(norm) for norm in state["norms"]]
        self._probed = None if state["probed"] is None else int(state["probed"])
        self.step, self.steps = int(state["step"]), int(state["steps"])
        self.broken, self.jump = bool(state["broken"]), float(state["jump"])


# -- The entropy rules: the size of a step follows the entropy of the policy against its own beginning ----------------


class Band(str, Enum):
    """Where H / H_ref is: normal <-> high, normal <-> low; from one end to the other in one go if it jumped."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass
class Trend:
    """Ratio and reward at the last decision, to tell rising from falling."""

    ratio: float | None = None
    reward: float | None = None


class EntropyRules:
    """`propose` is called when a decision is due."""

    name, alert = "entropy", ""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.band = Band.NORMAL
        self.trend = Trend()

    def start(self) -> Knobs:
        """The topology's own settings."""
        return Knobs(self.settings.n_min, self.settings.t_max_ms)

    def propose(self, signals: Signals, knobs: Knobs, *, resting: bool) -> Proposal:
        """What to do now. `resting`: a move was made so lately that none may be made."""
        ratio = signals.ratio
        if ratio is None:
            return Proposal.hold("entropy", "no reference entropy yet")
        band = self.band_of(ratio)
        target = self.target(band, knobs)
        vetoes = tuple(vetoes_of(self.settings, signals, self.trend)) if target.n_min < knobs.n_min else ()
        self.trend = Trend(ratio, signals.mean("reward"))
        if target == knobs:
            self.band = band
            return Proposal.hold("entropy", f"H / H_ref {ratio:.3f} is {band.value}, nothing to change")
        if resting:
            return Proposal.hold("entropy", f"H / H_ref {ratio:.3f} is {band.value}, in cooldown")
        if vetoes:
            return Proposal("entropy", "trigger", target, f"H / H_ref {ratio:.3f} is {band.value}", vetoes)
        self.band = band
        return Proposal("entropy", "trigger", target, f"H / H_ref {ratio:.3f} is {band.value}")

    def band_of(self, ratio: float) -> Band:
        """The band that follows from the ratio and from where we are."""
        s = self.settings
        high = s.high - (s.hysteresis if self.band is Band.HIGH else 0.0)
        low = s.low + (s.hysteresis if self.band is Band.LOW else 0.0)
        return Band.HIGH if ratio > high else Band.LOW if ratio < low else Band.NORMAL

    def target(self, band: Band, knobs: Knobs) -> Knobs:
        s = self.settings
        n_min = {Band.HIGH: s.n_lo, Band.NORMAL: s.n_min, Band.LOW: s.n_hi}[band]
        t_max = {Band.HIGH: s.high_t_max, Band.NORMAL: s.t_max_ms, Band.LOW: s.low_t_max}[band]
        return knobs.with_trigger(n_min, t_max if math.isfinite(s.t_max_ms) else math.inf)

    def state(self) -> dict[str, Any]:
        return {"band": self.band.value, "ratio": self.trend.ratio, "reward": self.trend.reward}

    def load(self, state: dict[str, Any]) -> None:
        self.band = Band(state["band"])
        self.trend = Trend(state["ratio"], state["reward"])


def vetoes_of(s: ControlSettings, signals: Signals, before: Trend) -> Iterator[str]:
    """Why n_min must not be lowered now."""
    ratio, reward = signals.ratio, signals.mean("reward")
    known = None not in (ratio, reward, before.ratio, before.reward)
    if known and ratio > before.ratio and reward < before.reward:  # type: ignore[operator]
        entropy, rewards = f"{before.ratio:.3f} to {ratio:.3f}", f"{before.reward:.3f} to {reward:.3f}"
        yield f"entropy rises ({entropy}) while reward falls ({rewards})"
    if (text := clip_is_high(s, signals)) is not None:
        yield text
    ess = signals.mean("ess")
    if ess is not None and ess < s.ess_low:
        yield f"ESS {ess:.3f} < {s.ess_low:g}"


def clip_is_high(s: ControlSettings, signals: Signals) -> str | None:
    """Whether the clip fraction is far above its baseline. Near 0 a multiple means nothing, hence the floor."""
    clip, first = signals.mean("clip"), signals.first("clip")
    if clip is None or first is None or clip <= s.clip_factor * max(first, s.clip_floor):
        return None
    return f"clip fraction {clip:.4f} > {s.clip_factor:g} x baseline {max(first, s.clip_floor):.4f}"


# -- The full rules: safety, entropy gate, batch from the gradient noise scale, staleness; one knob per decision ------


SIGMA_LOW, SIGMA_HIGH = 0.05, 1.0  # bounds of a sigma that is taken from the first steps
COUNTERS = ("bigger", "smaller", "staler", "collapsed")


class FullRules:
    """`propose` is called when a decision is due."""

    name = "full"

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.calm_until = 0  # the step until which safety has spoken
        self.trend = Trend()

    def start(self) -> Knobs:
        """Small steps first: the noise scale grows while a policy learns. The largest bound: safety takes from it."""
        return Knobs(self.settings.n_lo, self.settings.t_max_ms, self.settings.eta_max)

    def propose(self, signals: Signals, knobs: Knobs, *, resting: bool) -> Proposal:
        """What to do now. `resting`: a move was made so lately that none but safety and the gate may act."""
        before, self.trend = self.trend, Trend(signals.ratio, signals.mean("reward"))
        found = self._safety(signals, knobs) or self._gate(signals, knobs)
        signals.calm()
        if found is not None:
            self._reset("bigger", "smaller", "staler")
            return found
        frozen = self.counts["collapsed"] >= self.settings.streak
        if resting:
            self._reset("bigger", "smaller", "staler")
            return Proposal.hold(self.name, "in cooldown")
        return (
            self._batch(signals, knobs, before, frozen)
            or self._stale(signals, knobs, frozen)
            or Proposal.hold(self.name, self._why_frozen(frozen))
        )

    # -- 0 safety -----------------------------------------------------------------------------------------------

    def _safety(self, signals: Signals, knobs: Knobs) -> Proposal | None:
        why = "; ".join(self._dangers(signals))
        if not why or signals.step < self.calm_until:
            return None
        self.calm_until = signals.step + self.settings.safety_cooldown
        rest = self.settings.safety_cooldown
        if knobs.eta is None or knobs.eta <= self.settings.eta_min:
            return Proposal.hold("safety", f"{why}; the admission bound can not be lowered further", rest)
        lower = replace(knobs, eta=max(self.settings.eta_min, knobs.eta // 2))
        return Proposal("safety", "eta", lower, why, rest=rest)

    def _dangers(self, signals: Signals) -> Iterator[str]:
        s = self.settings
        ess, k3, masked = (signals.mean(name) for name in ("ess", "k3", "masked"))
        if ess is not None and ess < s.ess_low:
            yield f"ESS {ess:.3f} < {s.ess_low:g}"
        if k3 is not None and k3 > s.k3_high:
            yield f"k3 {k3:.4f} > {s.k3_high:g}"
        if masked is not None and masked > s.masked_high:
            yield f"masked share {masked:.3f} > {s.masked_high:g}"
        if (text := clip_is_high(s, signals)) is not None:
            yield text
        if signals.jump > s.grad_factor:
            yield f"gradient norm {signals.jump:.1f} x its median"
        if signals.broken:
            yield "a step changed nothing or was not finite"

    # -- 1 entropy gate -----------------------------------------------------------------------------------------

    def _gate(self, signals: Signals, knobs: Knobs) -> Proposal | None:
        sigma, entropy = self._sigma(signals), signals.mean("probe")
        if sigma is None or entropy is None:
            return None
        s = self.settings
        far = entropy < s.collapse * sigma
        self.counts["collapsed"] = self.counts["collapsed"] + 1 if far else 0
        on = entropy < s.gate_on * sigma or (knobs.gate and entropy <= s.gate_off * sigma)
        if on == knobs.gate:
            return None
        reason = f"H {entropy:.3f} against sigma {sigma:.3f}"
        return Proposal("gate", "gate", replace(knobs, gate=on), reason)

    def _sigma(self, signals: Signals) -> float | None:
        if self.settings.sigma > 0:
            return self.settings.sigma
        first = signals.first("probe")
        return None if first is None else min(max(0.5 * first, SIGMA_LOW), SIGMA_HIGH)

    def _why_frozen(self, frozen: bool) -> str:
        return "entropy has collapsed: growth of batch and staleness is frozen" if frozen else "nothing to change"

    # -- 2 batch ------------------------------------------------------------------------------------------------

    def _batch(self, signals: Signals, knobs: Knobs, before: Trend, frozen: bool) -> Proposal | None:
        s, scale = self.settings, signals.noise_scale
        if scale is None:
            self._reset("bigger", "smaller")
            return None
        wanted = s.kappa * scale
        # Not clamped before it is compared: else n_min would stop at n_hi / grow_at and never reach its end.
        factor = wanted / knobs.n_min
        self._count("bigger", factor > s.grow_at and knobs.n_min < s.n_hi and not frozen)
        self._count("smaller", factor < s.shrink_at and knobs.n_min > s.n_lo)
        reason = f"noise scale {scale:.1f} groups, wanted {wanted:.1f}"
        if self._ripe("bigger"):
            n_min = min(s.n_hi, max(knobs.n_min + 1, round(s.grow * knobs.n_min)))
            return Proposal("batch", "n_min", replace(knobs, n_min=n_min), reason)
        if self._ripe("smaller"):
            n_min = max(s.n_lo, min(knobs.n_min - 1, round(s.shrink * knobs.n_min)))
            return Proposal("batch", "n_min", replace(knobs, n_min=n_min), reason, tuple(vetoes_of(s, signals, before)))
        return None

    # -- 3 staleness --------------------------------------------------------------------------------------------

    def _stale(self, signals: Signals, knobs: Knobs, frozen: bool) -> Proposal | None:
        s = self.settings
        if knobs.eta is None or s.eta_max is None:
            return None
        ess, k3, train, rollout = (signals.mean(name) for name in ("ess", "k3", "idle_train", "idle_rollout"))
        safe = ess is not None and ess > s.ess_safe and k3 is not None and k3 < s.k3_safe
        starved = train is not None and train > s.idle_train
        self._count("staler", starved and safe and knobs.eta < s.eta_max and not frozen)
        if self._ripe("staler"):
            raised = replace(knobs, eta=knobs.eta + 1)
            return self._eta(raised, f"the learner is idle {train:.0%} of the time, ESS {ess:.3f}, k3 {k3:.4f}")
        if rollout is not None and rollout > s.idle_rollout and knobs.eta > s.eta_min and not starved:
            lowered = replace(knobs, eta=knobs.eta - 1)
            return self._eta(lowered, f"the engines are idle {rollout:.0%} of the time: freshness is free")
        return None

    def _eta(self, knobs: Knobs, reason: str) -> Proposal:
        """A change shows only when the groups admitted before it are gone: eta + 1 steps, and as many to judge it."""
        rest = max(self.settings.cooldown, 2 * ((knobs.eta or 0) + 1))
        return Proposal("staleness", "eta", knobs, reason, rest=rest)

    # -- counters -----------------------------------------------------------------------------------------------

    def _count(self, name: str, holds: bool) -> None:
        self.counts[name] = self.counts[name] + 1 if holds else 0

    def _ripe(self, name: str) -> bool:
        """Whether it held often enough in a row; the counter begins anew then."""
        if self.counts[name] < self.settings.streak:
            return False
        self.counts[name] = 0
        return True

    def _reset(self, *names: str) -> None:
        for name in names:
            self.counts[name] = 0

    @property
    def alert(self) -> str:
        """What a person should be told now, "" if nothing."""
        return self._why_frozen(True) if self.counts["collapsed"] >= self.settings.streak else ""

    def state(self) -> dict[str, Any]:
        return {**self.counts, "calm_until": self.calm_until, "ratio": self.trend.ratio, "reward": self.trend.reward}

    def load(self, state: dict[str, Any]) -> None:
        self.counts = {name: int(state[name]) for name in COUNTERS}
        self.calm_until = int(state["calm_until"])
        self.trend = Trend(state["ratio"], state["reward"])


# -- The controller: fed with one `Inputs` per step, it decides every few steps whether one of its knobs is moved -----


STATE_VERSION = 1


@dataclass(frozen=True)
class Decision:
    """One decision, also one that changes nothing. `old` and `new` hold all knobs; equal if none moved."""

    step: int
    rule: str
    knob: str  # "" if no rule wanted to move one
    old: dict[str, Any]
    new: dict[str, Any]
    reason: str
    vetoes: tuple[str, ...]
    applied: bool  # the knobs are in force: mode `act`, and something moved
    seen: dict[str, float]  # the smoothed numbers that were looked at

    @property
    def moved(self) -> bool:
        return self.old != self.new

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "vetoes": list(self.vetoes), "moved": self.moved}


class Controller:
    """`observe` after every step. `knobs` are what the rules say; only in mode `act` does anybody follow them."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.signals = Signals(settings)
        self.rules: EntropyRules | FullRules = (
            EntropyRules(settings) if settings.rules == "entropy" else FullRules(settings)
        )
        self.knobs = self.rules.start()
        self.moves = 0
        self._rest_until = 0

    @property
    def acts(self) -> bool:
        return self.settings.mode == "act"

    def probe_is_due(self, step: int) -> bool:
        """Whether the probe set is to be scored after this step: the first one, and every `probe_every` after it."""
        return (step - 1) % self.settings.probe_every == 0

    def observe(self, inputs: Inputs) -> Decision | None:
        """Take in a step. Returns the decision if one was due after it."""
        self.signals.add(inputs)
        if inputs.step % self.settings.every:
            return None
        resting = inputs.step < self._rest_until
        proposal = self.rules.propose(self.signals, self.knobs, resting=resting)
        return self._carried_out(inputs.step, proposal)

    def _carried_out(self, step: int, proposal: Proposal) -> Decision:
        old = self.knobs
        if proposal.knobs is not None and not proposal.vetoes:
            self.knobs = proposal.knobs
            self.moves += 1
            self._rest_until = step + self.settings.cooldown
        if proposal.rest is not None:
            self._rest_until = step + proposal.rest
        new = self.knobs
        return Decision(
            step=step, rule=proposal.rule, knob=proposal.knob, old=old.to_dict(), new=new.to_dict(),
            reason=proposal.reason, vetoes=proposal.vetoes, applied=self.acts and new != old, seen=self.seen(),
        )

    def seen(self) -> dict[str, float]:
        """Every smoothed number that is known."""
        signals = self.signals
        numbers = {
            "ratio": signals.ratio, "noise_scale": signals.noise_scale, "probe": signals.mean("probe"),
            "probe_reference": signals.first("probe"), "clip_reference": signals.first("clip"),
            **{name: signals.mean(name) for name in ("reward", "clip", "k3", "ess", "idle_train", "idle_rollout")},
        }
        return {name: value for name, value in numbers.items() if value is not None}

    # -- checkpoint ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint; `load` of an equally set controller goes on from it."""
        return {
            "version": STATE_VERSION, "rules": self.rules.name, "knobs": self.knobs.to_dict(), "moves": self.moves,
            "rest_until": self._rest_until, "signals": self.signals.state(), "rule_state": self.rules.state(),
        }

    def load(self, state: dict[str, Any]) -> bool:
        """False, and nothing changed, if it is the state of other rules or of another version of them."""
        if state.get("version") != STATE_VERSION or state.get("rules") != self.rules.name:
            return False
        self.signals.load(state["signals"])
        self.rules.load(state["rule_state"])
        self.knobs = self._within(Knobs.from_dict(state["knobs"]))
        self.moves, self._rest_until = int(state["moves"]), int(state["rest_until"])
        return True

    def _within(self, knobs: Knobs) -> Knobs:
        """A restart may come with other bounds."""
        s = self.settings
        eta = None if s.eta_max is None or knobs.eta is None else min(max(knobs.eta, s.eta_min), s.eta_max)
        eta = s.eta_max if eta is None and s.rules == "full" else eta
        return Knobs(min(max(knobs.n_min, s.n_lo), s.n_hi), knobs.t_max_ms, eta, knobs.gate)


# -- A switch on the mean entropy of the policy: ON below 0.9 sigma, OFF above 1.1 sigma, unchanged in between --------


BETA = 0.9
ON_BELOW, OFF_ABOVE = 0.9, 1.1  # of sigma


class EntropyGate:
    """`observe` each step's entropy in nats; `on` holds for the steps that follow."""

    def __init__(self, sigma: float) -> None:
        if not sigma > 0:
            raise ValueError(f"sigma = {sigma}: must be above 0 nats")
        self.sigma, self.on = sigma, False
        self._sum = self._weight = 0.0

    @property
    def entropy(self) -> float:
        """The smoothed entropy; NaN before the first step."""
        return self._sum / self._weight if self._weight else math.nan

    def observe(self, entropy: float) -> bool:
        """Take in a step; True if the switch moved. A number that is none changes nothing."""
        if not math.isfinite(entropy):
            return False
        self._sum = BETA * self._sum + (1 - BETA) * entropy
        self._weight = BETA * self._weight + (1 - BETA)
        before = self.on
        if self.entropy < ON_BELOW * self.sigma:
            self.on = True
        elif self.entropy > OFF_ABOVE * self.sigma:
            self.on = False
        return self.on != before

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"on": self.on, "sum": self._sum, "weight": self._weight}

    def load(self, state: dict[str, Any]) -> None:
        """The counterpart."""
        self.on, self._sum, self._weight = bool(state["on"]), float(state["sum"]), float(state["weight"])
