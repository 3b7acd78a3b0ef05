"""The full rules: safety, entropy gate, batch from the gradient noise scale, staleness; one knob per decision.

The other rule set of `controller`. Pure; reads `Signals`, changes only its own counters. The rules are looked at in
that order, and the first that wants to move a knob ends the decision.

- Safety halves the admission bound; what is added to it comes back one step at a time.
- A counter of decisions in a row stands at 0 while its knob is at the end of its range, while a move is being waited
  for, and while growth is frozen: no rule winds up behind a limit.
- The gate switches on below gate_on x sigma and off above gate_off x sigma; entropy far below sigma freezes growth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from busrl.scheduling.control.entropy import Trend, clip_is_high, vetoes_of
from busrl.scheduling.control.knobs import Knobs, Proposal
from busrl.scheduling.control.settings import ControlSettings
from busrl.scheduling.control.signals import Signals

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
