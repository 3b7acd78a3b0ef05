"""The controller of a simulated learner: told after every step what can be known here, and followed where it acts.

Talks to the learner's plan and to admission, as the learner role and its messages do. The decisions are
`busrl.scheduling.control`'s. Knows nothing of slots or events.

- Known: ages, the idle shares of learner and actors, groups per step. Unknown: entropy, clip fraction, gradient noise.
- Nothing is learned here, so old answers are as good as new ones (`HARMLESS`): the bound on age follows idle times
  alone. Whether staleness does harm only a real run shows.
"""

from __future__ import annotations

from typing import Any

from busrl.errors import UserError
from busrl.roles.limits import control_settings
from busrl.scheduling.control import Controller, Decision, Inputs
from busrl.scheduling.credit import Admission
from busrl.scheduling.plan import LearnerPlan
from busrl.simulate.figures import StepRow
from busrl.topology import Topology

HARMLESS: dict[str, Any] = {"ess": 1.0, "k3": 0.0}


def refuse(topology: Topology) -> None:
    """`UserError` for a controller that would have to be followed and can not be told what it looks at."""
    mode, rules = topology.learner.controller.mode, topology.experiments.controller.rules
    if mode == "act" and rules == "entropy":
        raise UserError(
            'experiments.controller.rules = "entropy" with mode = "act": these rules follow the entropy of the '
            "policy, and a simulation trains none; add --set experiments.controller.rules=full (its bound on age is "
            "simulated) or --set learner.controller.mode=off"
        )


class Control:
    """Without a controller, and with one that could only advise on entropy, every call does nothing.

    `actors`: how many there are; their busy seconds come in with every step.
    """

    def __init__(self, topology: Topology, plan: LearnerPlan, admission: Admission, actors: int) -> None:
        refuse(topology)
        settings = control_settings(topology)
        known = settings is not None and settings.rules == "full"
        self.controller = Controller(settings) if settings is not None and known else None
        self.plan, self.admission, self.actors = plan, admission, actors
        self.decisions: list[Decision] = []  # those that moved a knob
        self._at = self._waited = self._busy = 0.0
        self._apply()

    def step(self, row: StepRow, waited_s: float, busy_s: float) -> None:
        """After a step: seconds that the learner has waited so far, and that all actors were busy."""
        if self.controller is None:
            return
        passed = max(row.time_s - self._at, 1e-9)
        idle_train = _share((waited_s - self._waited) / passed)
        idle_rollout = 1 - _share((busy_s - self._busy) / (passed * self.actors))
        self._at, self._waited, self._busy = row.time_s, waited_s, busy_s
        decision = self.controller.observe(
            Inputs.made(
                row.step, row.groups, age_mean=row.age_mean, age_max=row.age_max, idle_train=idle_train,
                idle_rollout=idle_rollout, **HARMLESS,
            )
        )  # fmt: skip
        if decision is not None and decision.moved:
            self.decisions.append(decision)
            self._apply()

    def _apply(self) -> None:
        if self.controller is None or not self.controller.acts:
            return
        knobs = self.controller.knobs
        self.plan.trigger.set(knobs.n_min, knobs.t_max_ms / 1000)
        self.plan.tighten(knobs.eta)
        self.admission.tighten(knobs.eta)

    def told(self) -> dict[str, float]:
        """What it came to; the names are those of metrics.jsonl."""
        if self.controller is None:
            return {}
        knobs = self.controller.knobs
        found = {"control_n_min": float(knobs.n_min), "control_moves": float(self.controller.moves)}
        return found if knobs.eta is None else found | {"control_eta": float(knobs.eta)}


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
