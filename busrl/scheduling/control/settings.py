"""The numbers of a controller: the keys of [learner.controller] and [experiments.controller], and bounds that follow.

Plain data. The names are those of the keys, so that a decision can be read beside the file that asked for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

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
