"""The controller's memory of the steps: smoothed numbers, baselines of the first steps, and what a median needs.

Pure. Everything in it is plain data, so that it stands in a checkpoint as it is. Knows nothing of rules.

- A mean is exponential over steps and corrected for its start; a number that is missing changes nothing.
- The probe is not scored in every step: its mean forgets by the steps that passed, so its speed does not depend on how
  often it is scored.
- Baselines are made of the first `reference_steps` steps that it is told of, and stand from then on.
"""

from __future__ import annotations

import statistics
from typing import Any

from busrl.scheduling.control.inputs import Inputs
from busrl.scheduling.control.settings import ControlSettings

SMOOTHED = (
    "reward", "clip", "k3", "ess", "masked", "idle_train", "idle_rollout", "noise_signal", "noise_spread"
)  # fmt: skip
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
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self._sums = {name: (float(a), float(b)) for name, (a, b) in state["sums"].items()}
        self._first = {name: (float(a), int(b)) for name, (a, b) in state["first"].items()}
        self._norms = [float(norm) for norm in state["norms"]]
        self._probed = None if state["probed"] is None else int(state["probed"])
        self.step, self.steps = int(state["step"]), int(state["steps"])
        self.broken, self.jump = bool(state["broken"]), float(state["jump"])
