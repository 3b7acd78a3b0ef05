"""What the controller is told of one step: plain numbers, each of which may be missing.

Made by the learner from the line of metrics of a step, by a simulator, or read back from `decisions.jsonl`. Knows
nothing of how they were measured.

- None means: not measured in this step. It changes no mean and fires no rule.
- What went through `to_dict` and JSON comes back equal; NaN and infinity can not be written, so they become None and
  `broken` says that there was one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


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
                for name, value in numbers.items()}  # fmt: skip
        return cls(step=step, groups=groups, broken=broken or bad, **kept)
