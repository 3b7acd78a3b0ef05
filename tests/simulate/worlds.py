"""Small topologies and answers, and a world that checks the ledger's rules at every event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from busrl.data.trace import TracedPrompt
from busrl.preflight.load import load
from busrl.simulate.actors import Times
from busrl.simulate.answers import TraceAnswers
from busrl.simulate.world import World
from busrl.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
FREE_TIMES = Times(
    step_s=0.01, row_s=0.0, sequence_s=0.0, prefill_token_s=0.0, weights_s=0.0, reward_s=0.0, learner_step_s=0.0,
    learner_token_s=0.0, learner_group_s=0.0, publish_s=0.0, checkpoint_s=0.0,
)


def topology(*overrides: str) -> Topology:
    return load(QUICKSTART, ["generation.max_new_tokens=512", *overrides])


def answers(lengths: list[tuple[int, ...]], flat_share: float = 0.0, **more: Any) -> TraceAnswers:
    tasks = [TracedPrompt(f"prompt {i}", group, tag="a") for i, group in enumerate(lengths)]
    return TraceAnswers(tasks, len(lengths[0]), 512, flat_share=flat_share, **more)


class Checked(World):
    """Checks after every event what must never be broken."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.trained: list[int] = []
        self.last = 0.0
        self.most_in_flight = 0

    def handle(self, kind: int, time: float, subject: int, stamp: int) -> None:
        assert self.now >= self.last, "the clock went back"
        self.last = self.now
        super().handle(kind, time, subject, stamp)
        in_flight = len(self.groups) + self.learner.unpublished
        self.most_in_flight = max(self.most_in_flight, in_flight)
        assert in_flight <= self.limits.B, "more groups in flight than admitted"
        assert len(self.ring.free) == int((self.ring.state == 0).sum())
        assert sum(actor.active for actor in self.actors.all) + self.in_tools == int((self.ring.state == 3).sum())
        assert all(actor.active <= self.actors.rows for actor in self.actors.all)
