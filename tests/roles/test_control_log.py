"""The controller's log and its learner's death: whatever moment it dies at, the file explains what was decided."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busrl.ledger.wal import Record, SampleRecord
from busrl.predict.controller import Controller, Inputs
from busrl.predict.observer import ControllerObserver, controller_settings, read_lines
from busrl.preflight.load import load
from busrl.roles.learner.observers import FinishedStep
from busrl.scheduling.plan import make_plan
from busrl.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "mode": "act", "reference_steps": 3, "high": 1.1, "low": 0.9, "hysteresis": 0.01, "ema": 0.3, "probe_every": 2,
    "every": 2, "cooldown": 2,
}


@pytest.fixture(scope="module")
def topology() -> Topology:
    return load(ROOT / "configs" / "quickstart.toml", [*overrides(KEYS), "weights.max_staleness=4"])


def overrides(settings: dict[str, object]) -> list[str]:
    """What switches it stands in the learner's table, its thresholds in that of experiments."""
    short = ("mode", "every", "cooldown")
    tables = {key: "learner" if key in short else "experiments" for key in settings}
    return [f"{tables[key]}.controller.{key}={value}" for key, value in settings.items()]


class Living:
    """A learner's controller with its run directory, its log of training and its newest checkpoint."""

    def __init__(self, folder: Path, topology: Topology, seed: int) -> None:
        self.folder, self.topology = folder, topology
        self.random = random.Random(seed)
        self.records: list[Record] = []
        self.checkpoint: tuple[int, dict[str, Any]] = (0, {})
        self.start()

    def start(self) -> None:
        """As the learner does: checkpoint, replay, go on."""
        self.training: Any = SimpleNamespace(entropy=lambda probe: self.entropy)
        self.entropy = 0.5
        self.plan = make_plan(self.topology)
        self.control = ControllerObserver(self.folder / "decisions.jsonl", self.topology, self.training, self.plan)
        if self.checkpoint[0]:
            self.control.load(self.checkpoint[1], self.folder)
        for record in self.records[self.checkpoint[0] :]:
            self.control.replayed(record, self.stats(record.step))
        self.control.start()

    def stats(self, step: int) -> Any:
        chance = random.Random(step)
        self.entropy = chance.uniform(0.3, 0.7)
        told = SimpleNamespace(entropy=1.0, clip_low=chance.random() / 50, clip_high=0.0, ess=0.95)
        return SimpleNamespace(diagnostics=told)

    def append(self) -> Record:
        """The commit point of the next step."""
        step = len(self.records) + 1
        samples = [
            SampleRecord(
                uid=step * 100 + i, group=step * 10 + i // 8, admission=0, member=i % 8, attempt=0, prompt_crc=0,
                reward=float(i % 2), temperature=1.0, version=0, step=0, finish=1, prompt_ids=b"", token_ids=b"",
                logprobs=b"", versions=b"",
            )
            for i in range(48)
        ]
        self.records.append(Record(step=step, version=step - 1, cause="count", groups=[1, 2], samples=samples))
        return self.records[-1]

    def step(self) -> None:
        record = self.append()
        step = FinishedStep(record, self.stats(record.step), None)
        self.control.after(step, {"reward": self.random.random()})

    def save(self) -> None:
        self.checkpoint = (len(self.records), self.control.meta())
        self.control.save(self.folder)

    def die(self) -> None:
        self.control.close()

    def told_again(self) -> tuple[list[Any], dict[str, Any]]:
        """What a fresh controller makes of the file, and its state in the end."""
        wanted = controller_settings(self.topology)
        assert wanted is not None
        fresh = Controller(wanted)
        lines = read_lines(self.folder / "decisions.jsonl").values()
        decisions = [fresh.observe(Inputs.from_dict(line)) for line in lines]
        return [decision.to_dict() if decision else None for decision in decisions], fresh.state()


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), events=st.lists(st.sampled_from("sssssssckbl"), min_size=10, max_size=60))
def test_the_file_explains_every_decision_whenever_the_learner_dies(
    topology: Topology, tmp_path_factory: pytest.TempPathFactory, seed: int, events: list[str]
) -> None:
    it = Living(tmp_path_factory.mktemp("run"), topology, seed)
    rolled_back = False
    for event in events:
        if event == "s":
            it.step()
        elif event == "c":
            it.save()
        else:
            before = it.control.controller.state() if it.control.controller else {}
            if event == "b":  # killed between the commit point and its line
                it.append()
            elif event == "l":  # the log is lost back to the checkpoint
                del it.records[it.checkpoint[0] :]
                rolled_back = True
            it.die()
            it.start()
            assert it.control.controller is not None
            if event == "k":
                assert it.control.controller.state() == before
    lines = read_lines(it.folder / "decisions.jsonl")
    assert it.control.controller is not None
    if not rolled_back or len(lines) == len(it.records):
        assert list(lines) == list(range(1, len(it.records) + 1))
        decisions, state = it.told_again()
        assert [line["decision"] for line in lines.values()] == decisions
        assert state == it.control.controller.state()
    assert it.plan.trigger.n_min == it.control.controller.knobs.n_min
    it.die()


def test_the_probe_is_the_first_groups_of_step_one_even_after_restarts(
    topology: Topology, tmp_path: Path
) -> None:
    it = Living(tmp_path, topology, 0)
    it.step()
    first = [sample.uid for sample in it.control.probe]
    assert first == list(range(100, 132))  # 32 samples: four whole groups of 8
    it.step()
    it.save()
    it.step()
    it.die()
    it.start()
    assert [sample.uid for sample in it.control.probe] == first
    it.checkpoint = (0, {})
    it.start()
    assert [sample.uid for sample in it.control.probe] == first


def test_damaged_lines_are_left_out_and_an_earlier_step_replaces_what_followed(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"step":1}\n{"step":2,"groups":5}\nnonsense\n{"step":"x"}\n{"step":3}\n{"step":2,"groups":7}\n{"st')
    assert read_lines(path) == {1: {"step": 1}, 2: {"step": 2, "groups": 7}}
