"""What the controller may move, and what a rule proposes. Plain data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any


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
