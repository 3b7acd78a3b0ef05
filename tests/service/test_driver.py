"""Numbered requests of models: executed in order, answered once, run again after a death."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from busrl.service import driver
from busrl.service.driver import Driver
from busrl.service.figures import Course
from busrl.service.folders import ServiceFolders
from busrl.service.requests import Answer, LogReader, LogWriter, Request
from busrl.service.sums import UserFault

ADAPTER = {"rank": 4, "seed": 0, "attn": True, "mlp": True, "unembed": False}


class Asked:
    """What a body stands for here: the sum that it adds to the gradients."""

    loss_fn, config, forward_only = "cross_entropy", {}, False

    def __init__(self, value: float) -> None:
        self.data = [value]


class Models:
    """Models that are a number each: a step adds the gradients. The base dies where it is told to."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        self.calls: list[str] = []

    def create(self, name: str, adapter: object) -> None:
        self.values[name] = self.gradients[name] = 0.0

    def forward_backward(
        self, name: str, data: Sequence[float], loss_fn: str, config: Mapping[str, Any], forward_only: bool
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        self.calls.append(f"forward {data[0]:g}")
        if data[0] < 0:
            raise UserFault("a negative value")
        if data[0] == 13:
            raise KeyboardInterrupt  # as a kill would
        self.gradients[name] += data[0]
        return [], {"loss:sum": data[0]}

    def optim_step(self, name: str, adam: object) -> dict[str, float]:
        self.calls.append("step")
        self.values[name] += self.gradients[name]
        self.drop_gradients(name)
        return {"value:mean": self.values[name]}

    def drop_gradients(self, name: str) -> None:
        self.gradients[name] = 0.0

    def save_state(self, name: str, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "value").write_text(str(self.values[name]))

    def load_state(self, name: str, folder: Path, optimizer: bool) -> None:
        self.values[name] = float((folder / "value").read_text())

    def snapshot(self, name: str, folder: Path) -> None:
        self.save_state(name, folder)


class Service:
    """A door's log, and one life of a driver after the other."""

    def __init__(self, root: Path) -> None:
        self.where = ServiceFolders(root)
        self.log = LogWriter(self.where.requests)
        self.warned: list[str] = []
        self.log.write(Request("session", "s", about={"key": "k"}))
        self.model("m")
        self.restart()

    def model(self, name: str, first: int = 1) -> None:
        self.log.write(Request("model", name, about={"session": "s", "adapter": ADAPTER, "first": first}))

    def restart(self, state_every_s: float = 1e9) -> None:
        self.models = Models()
        self.course = Course(self.where.root.parent / "metrics.jsonl", self.where, self.warned.append)
        self.driver = Driver(
            self.models, self.where, self.course, self.warned.append, False, state_every_s)  # type: ignore[arg-type]

    def ask(self, seq: int, op: str, model: str = "m", **body: Any) -> None:
        value = body.pop("value", 0.0)
        raw = json.dumps({"model_id": model, "seq_id": seq, **body}) if op != "forward_backward" else f"{value:g}"
        self.log.write(Request("training", model, seq, op, f"{op} {seq} {value}".encode(), raw.encode()))

    def forward(self, seq: int, value: float, model: str = "m") -> None:
        self.ask(seq, "forward_backward", model, value=value)

    def step(self, seq: int, model: str = "m") -> None:
        self.ask(seq, "optim_step", model, adam_params={})

    def run(self) -> None:
        self.driver.follow()
        while self.driver.advance():
            pass

    def answers(self, model: str = "m") -> list[Answer]:
        decode = msgspec.msgpack.Decoder(Answer).decode
        read = [decode(payload) for payload, _ in LogReader(self.where.answers).read()]
        return [answer for answer in read if answer.id == model]

    def said(self) -> list[tuple[int, str]]:
        return [(answer.seq, answer.state) for answer in self.answers()]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(driver, "read_forward_backward", lambda body: Asked(float(body)))
    monkeypatch.setattr(driver, "write_forward_backward_result", lambda outputs, metrics: json.dumps(metrics).encode())
    return Service(tmp_path)


def test_requests_run_in_the_order_of_their_numbers(service: Service) -> None:
    service.step(3)
    service.forward(2, 20)
    service.run()
    assert service.said() == []
    service.forward(1, 10)
    service.run()
    assert service.models.calls == ["forward 10", "forward 20", "step"]
    assert service.said() == [(1, "done"), (2, "done"), (3, "done")]
    assert json.loads(service.answers()[-1].payload)["metrics"] == {"value:mean": 30.0}


def test_a_new_life_runs_again_without_answering_again(service: Service) -> None:
    service.forward(1, 1)
    service.step(2)
    service.forward(3, 5)
    service.run()
    answers = service.answers()
    service.restart()
    service.driver.follow()
    assert service.driver.replays == 3
    service.step(4)
    service.run()
    assert service.answers()[:3] == answers
    assert service.models.values["m"] == 6.0
    assert not service.warned


def test_a_state_spares_what_is_in_it(service: Service) -> None:
    service.restart(state_every_s=0.0)
    service.forward(1, 1)
    service.step(2)
    service.forward(3, 5)
    service.run()
    service.restart()
    service.step(4)
    service.run()
    assert service.models.calls == ["forward 5", "step"]
    assert service.models.values["m"] == 6.0


def test_the_chain_is_the_same_after_a_restart(service: Service) -> None:
    for seq in (1, 3):
        service.forward(seq, seq)
        service.step(seq + 1)
    service.run()
    whole = [answer.chain for answer in service.answers()]
    assert len(set(whole)) == 4
    service.restart(state_every_s=0.0)
    service.forward(5, 1)
    service.run()
    service.restart()
    service.step(6)
    service.run()
    other = Service(service.where.root / "other")
    for seq in (1, 3):
        other.forward(seq, seq)
        other.step(seq + 1)
    other.forward(5, 1)
    other.step(6)
    other.run()
    assert [answer.chain for answer in service.answers()] == [answer.chain for answer in other.answers()]


def test_a_step_behind_a_failed_part_changes_nothing(service: Service) -> None:
    service.forward(1, 10)
    service.forward(2, -1)
    service.step(3)
    service.forward(4, 2)
    service.step(5)
    service.run()
    assert service.said() == [(1, "done"), (2, "user"), (3, "user"), (4, "done"), (5, "done")]
    assert "request 2 of this step failed: a negative value" in service.answers()[2].payload.decode()
    assert service.models.values["m"] == 2.0


def test_a_refused_request_is_answered_in_its_turn(service: Service) -> None:
    service.log.write(Request("refused", "m", 1, "forward_backward", b"d", about={"why": "no tokens"}))
    service.step(2)
    service.run()
    assert service.said() == [(1, "user"), (2, "user")]
    assert "no tokens" in service.answers()[0].payload.decode()


def test_a_request_that_killed_twice_is_given_up(service: Service) -> None:
    service.model("other")
    service.forward(1, 7)
    service.forward(2, 13)
    service.step(3)
    service.forward(1, 1, "other")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            service.run()
        service.restart()
    service.run()
    assert service.said() == [(1, "done"), (2, "server"), (3, "user")]
    assert [answer.state for answer in service.answers("other")] == ["done"]
    assert "killed the process that trains, twice" in service.answers()[1].payload.decode()
    service.restart()
    service.run()
    assert service.models.values["m"] == 0.0


def test_a_death_elsewhere_does_not_count(service: Service) -> None:
    service.forward(1, 1)
    service.run()
    service.forward(2, 13)
    with pytest.raises(KeyboardInterrupt):
        service.run()
    service.restart()
    service.driver.follow()
    service.driver.advance()  # the first request again
    service.restart()
    with pytest.raises(KeyboardInterrupt):
        service.run()


def test_a_snapshot_keeps_its_number_when_it_is_made_again(service: Service) -> None:
    service.ask(1, "save_weights_for_sampler", sampling_session_seq_id=0)
    service.forward(2, 3)
    service.step(3)
    service.ask(4, "save_weights_for_sampler", path="named")
    service.run()
    assert [answer.weights for answer in service.answers()] == [1, 0, 0, 2]
    (service.where.snapshot(1) / "value").unlink()
    service.restart()
    service.ask(5, "save_weights_for_sampler", sampling_session_seq_id=1)
    service.run()
    assert service.answers()[-1].weights == 3
    assert (service.where.snapshot(2) / "value").read_text() == "3.0"
    told = json.loads(service.answers()[0].payload)
    assert told["sampling_session_id"] == "s:sample:0"


def test_external_weights_are_the_adapter_in_a_folder_of_their_own(service: Service) -> None:
    service.forward(1, 3)
    service.step(2)
    service.ask(3, "save_weights_external", path="out")
    service.run()
    told = json.loads(service.answers()[-1].payload)
    assert told["path"] == "tinker://m/external_weights/out"
    assert (service.where.saved_as("m", "external_weights", "out") / "value").read_text() == "3.0"


def test_a_name_is_overwritten_only_when_asked(service: Service) -> None:
    service.ask(1, "save_weights", path="one")
    service.ask(2, "save_weights", path="one")
    service.ask(3, "save_weights", path="one", overwrite=True)
    service.run()
    assert service.said() == [(1, "done"), (2, "user"), (3, "done")]
    service.restart()
    service.run()
    assert not service.warned


def test_a_model_begins_with_what_another_saved(service: Service) -> None:
    service.forward(1, 4)
    service.step(2)
    service.ask(3, "save_weights", path="four")
    service.run()
    service.model("copy", first=0)
    raw = {"session_id": "s", "model_seq_id": 1, "path": "tinker://m/weights/four", "optimizer": True}
    service.log.write(Request("training", "copy", 0, "load_weights", b"d", json.dumps(raw).encode()))
    service.forward(1, 1, "copy")
    service.step(2, "copy")
    service.run()
    assert service.models.values == {"m": 4.0, "copy": 5.0}
    service.restart()
    service.run()
    assert service.models.values["copy"] == 5.0


def test_a_path_that_is_not_there_fails_its_future(service: Service) -> None:
    service.ask(1, "load_weights", path="tinker://m/weights/none", optimizer=False)
    service.run()
    assert service.said() == [(1, "user")]
    assert "does not exist" in service.answers()[0].payload.decode()


def test_a_new_model_does_not_take_the_turns_of_an_older_one(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def clock() -> float:  # each request takes a second
        nonlocal now
        now += 0.5
        return now

    monkeypatch.setattr(driver.time, "monotonic", clock)
    for seq in range(1, 21):
        service.forward(seq, 1)
    service.run()
    service.model("n")
    for seq in range(1, 11):
        service.forward(seq, 2, "n")
        service.forward(20 + seq, 1)
    service.models.calls.clear()
    service.run()
    assert service.models.calls[:10].count("forward 1") == 5, "the older model waited until the new one had its time"


def test_a_full_disk_costs_a_state_and_no_answer(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    service.restart(state_every_s=0)
    monkeypatch.setattr(service.models, "save_state", full)
    service.forward(1, 1)
    service.step(2)
    service.ask(3, "save_weights", path="mine")
    service.forward(4, 1)
    service.run()
    assert [answer.state for answer in service.answers()] == ["done", "done", "server", "done"]
    assert not service.where.states_of("m") and any("no state after request 2" in line for line in service.warned)
