"""The controller: fed with one `Inputs` per step, it decides every few steps whether one of its knobs is moved.

Pure: no clock, no file, no chance. Talks to nothing; the learner carries out what `knobs` say between two steps, writes
every decision down and keeps `state` in its checkpoints. Knows nothing of how the inputs were measured.

- The same inputs give the same decisions, whether they come from a run, from its log, or from a simulator.
- One decision moves at most one knob (n_min and t_max are one: the trigger). After a move nothing moves for
  `cooldown` steps, safety and the entropy gate of the full rules apart.
- Knobs stay within [n_lo, n_hi] and [eta_min, eta_max]. B, W, the loss and the learning rate are never touched.
- In mode `advise` everything happens but `applied` is False: the knobs are what `act` would have set.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from busrl.scheduling.control.entropy import EntropyRules
from busrl.scheduling.control.full import FullRules
from busrl.scheduling.control.inputs import Inputs
from busrl.scheduling.control.knobs import Knobs, Proposal
from busrl.scheduling.control.settings import ControlSettings
from busrl.scheduling.control.signals import Signals

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
        )  # fmt: skip

    def seen(self) -> dict[str, float]:
        """Every smoothed number that is known."""
        signals = self.signals
        numbers = {
            "ratio": signals.ratio, "noise_scale": signals.noise_scale, "probe": signals.mean("probe"),
            "probe_reference": signals.first("probe"), "clip_reference": signals.first("clip"),
            **{name: signals.mean(name) for name in ("reward", "clip", "k3", "ess", "idle_train", "idle_rollout")},
        }  # fmt: skip
        return {name: value for name, value in numbers.items() if value is not None}

    # -- checkpoint ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint; `load` of an equally set controller goes on from it."""
        return {
            "version": STATE_VERSION, "rules": self.rules.name, "knobs": self.knobs.to_dict(), "moves": self.moves,
            "rest_until": self._rest_until, "signals": self.signals.state(), "rule_state": self.rules.state(),
        }  # fmt: skip

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
