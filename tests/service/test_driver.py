"""Numbered requests of models: executed in order, answered once, run again after a death."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from busrl.errors import DiskFull
from busrl.service import driver, operations
from busrl.service.driver import CREDIT_S, Driver, Limits
from busrl.service.figures import Course
from busrl.service.folders import ServiceFolders
from busrl.service.models import Computed, Pass
from busrl.service.requests import SEGMENT_BYTES, Answer, LogReader, LogWriter, Request
from busrl.service.sums import UserFault

ADAPTER = {"rank": 4, "seed": 0, "attn": True, "mlp": True, "unembed": False}


BYTES = 100  # that a model takes


class Asked:
    """What a body stands for here: the sums that it adds to the gradients, a micro-batch each."""

    loss_fn, config, forward_only, held_bytes = "cross_entropy", {}, False, 0

    def __init__(self, body: bytes) -> None:
        self.data = [float(value) for value in body.split()]


class Models:
    """Models that are a number each: a step adds the gradients. The base dies where it is told to."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        self.calls: list[str] = []
        self.most = 0  # models that were in memory at the same time
        self.halves = False  # a micro-batch is a forward and a backward
        self.worked: Callable[[float], None] = lambda seconds: None  # told what a forward or a backward takes

    def bytes_of(self, adapter: object) -> int:
        return BYTES

    def create(self, name: str, adapter: object) -> None:
        self.values[name] = self.gradients[name] = 0.0
        self.most = max(self.most, len(self.values))

    def has(self, name: str) -> bool:
        return name in self.values

    def forget(self, name: str) -> None:
        del self.values[name], self.gradients[name]

    def begin(
        self, name: str, data: Sequence[float], loss_fn: str, config: Mapping[str, Any], forward_only: bool
    ) -> Pass:
        return Pass([[number] for number in range(len(data))], partial(self._compute, name, data), forward_only)

    def _compute(self, name: str, data: Sequence[float], numbers: list[int]) -> Computed:
        value = data[numbers[0]]
        self.calls.append(f"forward {value:g}")
        self.worked(value)
        if value < 0:
            raise UserFault("a negative value")
        if value == 13:
            raise KeyboardInterrupt  # as a kill would
        if not self.halves:
            self.gradients[name] += value

        def backward() -> None:
            self.calls.append(f"backward {value:g}")
            self.worked(2 * value)
            self.gradients[name] += value

        return value, [np.zeros(0, np.float32)], backward if self.halves else None

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


class Clock:
    """A clock by which every turn takes about the same time."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 0.5
        return self._now


class Worked:
    """A clock by which time is what was worked."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def add(self, seconds: float) -> None:
        self._now += seconds


class Service:
    """A door's log, and one life of a driver after the other."""

    def __init__(self, root: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.where = ServiceFolders(root)
        self.log = LogWriter(self.where.requests, segment_bytes)
        self.warned: list[str] = []
        self.log.write(Request("session", "s", about={"key": "k"}))
        self.model("m")
        self.restart()

    def model(self, name: str, first: int = 1, owner: str = "run") -> None:
        about = {"session": "s", "adapter": ADAPTER, "first": first, "owner": owner}
        self.log.write(Request("model", name, about=about))

    def restart(self, state_every_s: float = 1e9, **limits: Any) -> None:
        self.models = Models()
        self.course = Course(self.where.root.parent / "metrics.jsonl", self.where, self.warned.append)
        settings = Limits(**{"sync": False, "state_every_s": state_every_s, **limits})
        self.driver = Driver(
            self.models, self.where, self.course, self.warned.append, settings)  # type: ignore[arg-type]

    def close(self) -> None:
        self.driver.close()
        self.course.close()
        self.log.close()

    def ask(self, seq: int, op: str, model: str = "m", **body: Any) -> None:
        tokens = body.pop("tokens", 0)
        raw = body.pop("raw", "") or json.dumps({"model_id": model, "seq_id": seq, **body})
        meaning = hashlib.blake2b(f"{op} {seq} {raw}".encode(), digest_size=8).digest()
        self.log.write(Request("training", model, seq, op, meaning, raw.encode(), tokens=tokens))

    def forward(self, seq: int, *values: float, model: str = "m", tokens: int = 0) -> None:
        self.ask(seq, "forward_backward", model, raw=" ".join(map(str, values)), tokens=tokens)

    def train(self, seq: int, value: float, model: str = "m") -> None:
        """A step of two requests."""
        self.forward(seq, value, model=model)
        self.step(seq + 1, model)

    def damage(self, number: int) -> None:
        """Change a byte of a state of the model m."""
        file = self.where.state("m", number) / "value"
        file.write_text(file.read_text()[:-1] + "7")

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


def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let bodies and answers of forward_backward be numbers."""
    monkeypatch.setattr(operations, "read_forward_backward", Asked)
    monkeypatch.setattr(
        operations, "write_forward_backward_result", lambda outputs, metrics: json.dumps(metrics).encode())


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    stub(monkeypatch)
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
    service.run()
    assert not service.models.calls, "a model is run again when somebody asks for it"
    service.step(4)
    service.driver.follow()
    assert service.driver.standing["m"].replays == 3
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
    service.forward(1, 1, model="other")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            service.run()
        service.restart()
    service.run()
    assert service.said() == [(1, "done"), (2, "server"), (3, "user")]
    assert [answer.state for answer in service.answers("other")] == ["done"]
    assert "killed the process that trains, twice" in service.answers()[1].payload.decode()
    service.restart()
    service.train(4, 2)
    service.run()
    assert service.models.values["m"] == 2.0


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
    service.step(4)
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
    service.forward(1, 1, model="copy")
    service.step(2, "copy")
    service.run()
    assert service.models.values == {"m": 4.0, "copy": 5.0}
    service.restart()
    service.train(3, 1, "copy")
    service.run()
    assert service.models.values["copy"] == 6.0


def test_a_path_that_is_not_there_fails_its_future(service: Service) -> None:
    service.ask(1, "load_weights", path="tinker://m/weights/none", optimizer=False)
    service.run()
    assert service.said() == [(1, "user")]
    assert "does not exist" in service.answers()[0].payload.decode()


def test_a_new_model_does_not_take_the_turns_of_an_older_one(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.time, "monotonic", Clock())
    for seq in range(1, 21):
        service.forward(seq, 1)
    service.run()
    service.model("n")
    for seq in range(1, 11):
        service.forward(seq, 2, model="n")
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


def test_a_full_disk_at_an_answer_executes_nothing_twice(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(log: LogWriter, record: Answer) -> None:
        raise DiskFull("no space")

    service.train(1, 4)
    with monkeypatch.context() as patched:
        patched.setattr(LogWriter, "write", full)
        for _ in range(3):
            with pytest.raises(DiskFull):
                service.run()
    assert service.said() == []
    service.run()
    assert service.said() == [(1, "done"), (2, "done")]
    assert service.models.values["m"] == 4.0


def test_a_full_disk_has_room_for_the_name_of_what_is_executed(service: Service) -> None:
    size = service.where.executing.stat().st_size
    service.train(1, 4)
    service.run()
    assert service.where.executing.stat().st_size == size > 0
    assert not service.where.executing.read_bytes().strip(b"{} ")
    service.forward(3, 13)
    with pytest.raises(KeyboardInterrupt):
        service.run()
    assert json.loads(service.where.executing.read_bytes())["seq"] == 3
    assert service.where.executing.stat().st_size == size


def test_a_state_is_written_before_a_named_save_is_answered(service: Service) -> None:
    service.train(1, 1)
    service.ask(3, "save_weights_for_sampler", sampling_session_seq_id=0)
    service.run()
    assert not service.where.states_of("m")
    service.ask(4, "save_weights", path="mine")
    service.run()
    assert [number for number, _ in service.where.states_of("m")] == [3]


# -- damage -----


def test_a_damaged_newest_state_gives_way_to_the_older_one(service: Service) -> None:
    service.restart(state_every_s=0)
    for seq, value in ((1, 1), (3, 2), (5, 4)):
        service.train(seq, value)
    service.run()
    service.damage(6)
    service.restart()
    service.train(7, 8)
    service.run()
    assert service.models.calls == ["forward 4", "step", "forward 8", "step"]
    assert service.models.values["m"] == 15.0
    assert service.said() == [(seq, "done") for seq in range(1, 9)]
    assert len(service.warned) == 1 and "state after request 6 is damaged" in service.warned[0]
    service.restart()
    service.step(9)
    service.run()
    assert len(service.warned) == 1, "it was said before"


def test_a_model_without_a_whole_state_runs_all_again(service: Service) -> None:
    service.restart(state_every_s=0)
    service.train(1, 1)
    service.train(3, 2)
    service.run()
    for number in (2, 4):
        service.damage(number)
    service.restart()
    service.train(5, 4)
    service.run()
    assert service.models.values["m"] == 7.0


def test_a_model_that_cannot_be_run_again_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)
    service = Service(tmp_path, segment_bytes=200)
    service.restart(state_every_s=0)
    for seq in range(1, 20, 2):
        service.train(seq, 1)
    service.run()
    for _ in range(20):
        service.driver.tend()
    for number in (18, 20):
        service.damage(number)
    service.restart()
    service.train(21, 1)
    service.run()
    assert service.said()[20:] == [(21, "server"), (22, "server")]
    assert "its states are damaged" in service.answers()[-1].payload.decode()
    service.restart()
    service.step(23)
    service.run()
    assert service.said()[22:] == [(23, "server")]


# -- parking -----


def test_many_models_are_trained_in_the_memory_of_two(service: Service) -> None:
    names = [f"m{number}" for number in range(20)]
    for name in names:
        service.model(name)
    service.restart(resident_bytes=2 * BYTES)
    for seq in (1, 3, 5):
        for number, name in enumerate(names):
            service.train(seq, 2 * number, name)
        service.run()
    assert service.models.most == 2
    for number, name in enumerate(names):
        last = json.loads(service.answers(name)[-1].payload)
        assert last["metrics"] == {"value:mean": 6.0 * number}
    assert not service.warned


def test_models_within_a_step_are_parked_and_lose_nothing(service: Service) -> None:
    service.model("n")
    service.restart(resident_bytes=BYTES)
    for seq in (1, 2, 3):
        for number, name in enumerate(("m", "n")):
            service.forward(seq, 10**number, 10**number, model=name)
            service.run()
    for name in ("m", "n"):
        service.step(4, name)
    service.run()
    assert service.models.most == 1
    for number, name in enumerate(("m", "n")):
        assert [answer.seq for answer in service.answers(name)] == [1, 2, 3, 4]
        assert json.loads(service.answers(name)[-1].payload)["metrics"] == {"value:mean": 6.0 * 10**number}


def test_models_that_all_have_work_get_on_in_the_memory_of_one(service: Service) -> None:
    names = [f"m{number}" for number in range(5)]
    for name in names:
        service.model(name)
        service.forward(1, 1, 2, 3, model=name)
        service.forward(2, 4, model=name)
        service.step(3, name)
    service.restart(resident_bytes=BYTES)
    service.run()
    assert service.models.most == 1
    assert all(b'"value:mean":10.0' in service.answers(name)[-1].payload for name in names)


@pytest.mark.parametrize("ended", [False, True])
def test_models_of_silent_or_ended_sessions_give_their_memory_back(service: Service, ended: bool) -> None:
    service.restart(session_s=1e9 if ended else 0.0)
    service.train(1, 5)
    service.run()
    if ended:
        service.driver.tend()
        assert service.models.values == {"m": 5.0}
        service.log.write(Request("finish", "s", about={"reason": "success"}))
        service.driver.follow()
    service.driver.tend()
    assert service.models.values == {}
    service.train(3, 5)
    service.run()
    assert service.models.values == {"m": 10.0}


def test_an_owner_begins_nothing_more_while_its_requests_hold_much(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.time, "monotonic", Clock())
    monkeypatch.setattr(driver, "MOST_HELD_BYTES", 2 * len(b"1.5 1.5 1.5") - 1)
    owners = {"a": "run", "b": "run", "c": "run", "n": "ann"}
    for name, owner in owners.items():
        service.model(name, owner=owner)
        service.forward(1, 1.5, 1.5, 1.5, model=name)
    service.driver.follow()
    together = set()
    while service.driver.advance():
        under_way = [name for name in owners if service.driver.lines[name].request is not None]
        together.add((sum(owners[name] == "run" for name in under_way), "n" in under_way))
    assert (2, True) in together and max(count for count, _ in together) == 2, together
    assert all(service.models.gradients[name] == 4.5 for name in owners)


# -- turns -----


def test_a_request_of_much_work_lets_another_owner_in(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.time, "monotonic", Clock())
    service.model("n", owner="ann")
    service.forward(1, *range(20, 30))
    service.driver.follow()
    service.driver.advance()
    service.train(1, 1, "n")
    service.driver.follow()
    for _ in range(6):
        service.driver.advance()
    assert "step" in service.models.calls, service.models.calls
    assert service.said() == []
    service.run()
    assert service.said() == [(1, "done")]
    assert service.models.gradients["m"] == sum(range(20, 30))


def test_between_a_forward_and_its_backward_come_small_steps_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.time, "monotonic", Clock())
    service.model("small", owner="ann")
    service.model("large", owner="eve")
    service.model("parked", owner="joe")
    service.restart(small_tokens=10)
    for name in ("small", "large"):
        service.train(1, 0, name)
    service.run()
    service.models.halves = True
    service.forward(1, *range(40, 52), tokens=30)
    service.driver.follow()
    for _ in range(2 * 10 + 1):
        service.driver.advance()
    del service.models.calls[:-1]
    service.forward(3, 1, model="small", tokens=10)
    service.step(4, "small")
    service.forward(3, 70, model="large", tokens=11)
    service.forward(1, 90, model="parked", tokens=1)
    service.run()
    calls = service.models.calls
    assert calls[:4] == ["forward 50", "forward 1", "backward 1", "backward 50"], calls  # then it was eve's turn
    for large in (50, 51, 70, 90):
        between = calls[calls.index(f"forward {large}") + 1 : calls.index(f"backward {large}")]
        assert set(between) <= {"forward 1", "backward 1", "step"}, calls
    assert service.models.gradients == {"m": float(sum(range(40, 52))), "small": 0.0, "large": 70.0, "parked": 90.0}


def test_large_owners_get_their_time_though_small_steps_come_between_halves(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, seconds = Worked(), {"large": 10.0, "small": 0.5, "middle": 1.0}
    monkeypatch.setattr(driver.time, "monotonic", clock)
    for name in seconds:
        service.model(name, owner=name)
        for seq in range(1, 701):
            service.forward(seq, seconds[name], model=name, tokens=1 if name == "small" else 30)
    service.restart(small_tokens=10)
    service.models.halves, service.models.worked = True, clock.add
    service.driver.follow()
    while clock() < 3000:
        service.driver.advance()
    served = [3 * service.models.gradients[name] for name in seconds]
    assert max(served) - min(served) <= 2 * 30, served  # a request of the large one takes 30


def test_owners_get_the_same_time_however_many_models_they_have(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.time, "monotonic", Clock())
    service.model("n", owner="ann")
    for name in ("m2", "m3", "m4"):
        service.model(name)
    names = ["m", "m2", "m3", "m4"]
    for name in (*names, "n"):
        service.forward(1, 0, model=name)
    service.run()
    for name in (*names, "n"):
        for seq in range(2, 12):
            service.forward(seq, 2 if name == "n" else 1, model=name)
    service.driver.follow()
    for _ in range(16):
        service.driver.advance()
    assert 7 <= service.models.calls.count("forward 2") <= 9
    served = [service.models.gradients[name] for name in names]
    assert max(served) - min(served) <= 1


class Told:
    """A clock that moves as it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def moves(self, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, seconds: float) -> None:
        """Let a call take so long."""
        call = getattr(holder, name)

        def taking(*args: Any) -> Any:
            self.now += seconds
            return call(*args)

        monkeypatch.setattr(holder, name, taking)


SYNC_S, STEP_S, PARK_S = 0.125, 0.5, 4.0


@pytest.mark.parametrize("flushes", [True, False], ids=["as the tuner does", "by the next turn"])
def test_an_answer_is_written_at_the_cost_of_its_owner(
    flushes: bool, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Told()
    monkeypatch.setattr(driver.time, "monotonic", clock)
    service.restart(sync=True)
    clock.moves(monkeypatch, LogWriter, "sync", SYNC_S)
    clock.moves(monkeypatch, Models, "optim_step", STEP_S)
    service.model("n", owner="ann")
    for seq in range(1, 400):
        service.log.write(Request("refused", "n", seq, "save_weights", b"d", about={"why": "no name"}))
    for seq in range(1, 80):
        service.step(seq)
    service.driver.follow()
    while clock.now < 40:
        service.driver.advance()
        if flushes:
            service.driver.flush()
    served = len(service.answers("m")) * (SYNC_S + STEP_S), len(service.answers("n")) * SYNC_S
    assert abs(served[0] - served[1]) <= CREDIT_S + 2 * (SYNC_S + STEP_S), served


def test_room_is_made_at_the_cost_of_whose_model_needs_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Told()
    monkeypatch.setattr(driver.time, "monotonic", clock)
    service.restart(resident_bytes=2 * BYTES)
    clock.moves(monkeypatch, Models, "save_state", PARK_S)
    clock.moves(monkeypatch, Models, "optim_step", STEP_S)
    service.model("n", owner="ann")
    service.model("o", owner="ann")
    for seq in range(1, 60):
        for name in ("m", "n", "o"):
            service.step(seq, name)
    service.driver.follow()
    while clock.now < 60:
        service.driver.advance()
    counts = {name: len(service.answers(name)) for name in ("m", "n", "o")}
    assert counts["m"] * STEP_S >= 60 / 2 - CREDIT_S - 2 * (PARK_S + STEP_S), counts


def test_with_room_for_one_the_oldest_model_is_served_first(service: Service) -> None:
    service.restart(alone=True)
    service.model("n")
    for seq in (1, 3):
        service.train(seq, 10, "n")
        service.train(seq, 1)
    service.run()
    assert service.models.calls == ["forward 1", "step"] * 2 + ["forward 10", "step"] * 2
    assert service.models.most == 1
    service.restart(alone=True)
    service.train(5, 10, "n")
    service.run()
    assert json.loads(service.answers("n")[-1].payload)["metrics"] == {"value:mean": 30.0}


def test_requests_that_are_never_run_again_are_forgotten(service: Service) -> None:
    service.restart(state_every_s=0.0)
    for seq in range(1, 40, 2):
        service.train(seq, 1)
    service.run()
    for _ in range(2):
        assert sorted(service.driver.lines["m"].model.requests) == [39, 40]  # since the older of two states
        service.restart(state_every_s=0.0)
        service.driver.follow()
