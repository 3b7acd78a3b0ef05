"""The entropy rules: the size of a step follows the entropy of the policy against its own beginning.

One of the two rule sets of `controller`. High entropy: small, frequent steps. Low entropy: large, rare ones. Between:
the settings of the topology. Pure; reads `Signals`, changes only its own band.

- A band is entered at its threshold and left only `hysteresis` inside of it.
- A move that lowers n_min is vetoed by rising entropy with falling reward, by a clip fraction far above its baseline,
  and by few effective samples: less data per step makes each of them worse.
- t_max moves with n_min where the topology has steps by time; where it has none (inf), it stays so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from busrl.scheduling.control.knobs import Knobs, Proposal
from busrl.scheduling.control.settings import ControlSettings
from busrl.scheduling.control.signals import Signals


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
