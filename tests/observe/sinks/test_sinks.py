"""The sinks: what each was given is read back by its own library; a failure is told once, and nothing is lost by it."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.observe.sinks import Live, RunCard, Sink
from busrl.observe.sinks.feed import Feed, Place, figures_of, numbers_of
from busrl.observe.sinks.known import Prometheus, TensorBoard, Wandb
from busrl.paths import RunPaths

END_S = 60.0


class Recorder:
    """What a sink was given. `fails` raises at the numbers of these steps, once each."""

    def __init__(self, fails: Sequence[int] = (), problem: BaseException | None = None) -> None:
        self.received: list[tuple[int, dict[str, float]]] = []
        self.rows: list[Mapping[str, Any]] = []
        self.makes = 0
        self._fails, self._problem = list(fails), problem or ConnectionError("no such host")

    def __call__(self, card: RunCard) -> Sink:
        self.makes += 1
        return self

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        if step in self._fails:
            self._fails.remove(step)
            raise self._problem
        self.received.append((step, dict(values)))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows += rows

    def flush(self) -> None: ...
    def close(self) -> None: ...

    @property
    def steps(self) -> list[int]:
        return [step for step, values in self.received if "reward" in values]


class RunOfFiles:
    """A run directory whose files the test writes, and the card of a sink."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths.of(root)

    def card(self, name: str = "own", **more: Any) -> RunCard:
        folder = self.paths.sinks / name
        folder.mkdir(parents=True, exist_ok=True)
        return RunCard("sort", "5a" * 16, "tests", folder, {"learner": {"lr": 1e-6}}, **more)

    def step(self, *steps: int) -> None:
        rows = [{"step": n, "reward": n / 10, "kl": None, "wait_s": {"groups": 0.5}} for n in steps]
        self._add(self.paths.metrics, rows)

    def round(self, number: int, reward: float, name: str = "") -> None:
        more = {"set": name} if name else {}
        self._add(self.paths.validation, [{"round": number, "val/reward": reward, "samples": 8, **more}])

    def sample(self, step: int, text: str) -> None:
        self._add(self.paths.samples, [{"step": step, "uid": 7, "prompt": "34=", "completion": text, "reward": 1.0}])

    def model_steps(self, model: str, *steps: int) -> None:
        rows = [{"kind": "model", "model": model, "number": 3 * n, "model_step": n, "loss": n / 2} for n in steps]
        self._add(self.paths.metrics, rows)

    @staticmethod
    def _add(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        with open(path, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def feed(self, make: Callable[[RunCard], Sink], told: list[str] | None = None) -> Feed:
        return Feed("own", make, self.card(), self.paths, lambda _, text: None if told is None else told.append(text))

    def fed(self, make: Callable[[RunCard], Sink]) -> None:
        """From a start to an end: all that is there now, and no complaint."""
        told: list[str] = []
        feed = self.feed(make, told)
        feed.start()
        feed.finish()
        feed.join(END_S)
        assert not feed.is_alive() and told == []


@pytest.fixture
def run(tmp_path: Path) -> RunOfFiles:
    return RunOfFiles(tmp_path)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + END_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_each_step_and_round_is_given_once_over_several_starts(run: RunOfFiles) -> None:
    sink = Recorder()
    run.step(1, 2)
    run.round(0, 0.25)
    run.fed(sink)
    run.step(3)
    run.round(0, 0.5, "hard")  # a set may be ready after another start
    run.round(4, 0.75)
    run.fed(sink)
    assert sink.steps == [1, 2, 3]
    assert sink.received[0] == (1, {"reward": 0.1, "wait_s/groups": 0.5})
    rounds = [values for values in sink.received if "reward" not in values[1]]
    assert rounds == [
        (0, {"val/reward": 0.25, "val/samples": 8.0}), (0, {"val/hard/reward": 0.5, "val/hard/samples": 8.0}),
        (4, {"val/reward": 0.75, "val/samples": 8.0}),
    ]


def test_idle_group_lines_and_torn_or_damaged_lines_are_no_steps(run: RunOfFiles) -> None:
    sink = Recorder()
    run.step(1)
    with open(run.paths.metrics, "a") as file:
        file.write('{"kind": "idle", "step": 1, "reward": 0.0}\n{"step": \n[]\n{"step": 2, "rew')
    run.fed(sink)
    assert sink.steps == [1]
    with open(run.paths.metrics, "a") as file:
        file.write('ard": 0.2}\n')
    run.fed(sink)
    assert sink.steps == [1, 2]


def test_each_model_of_a_service_has_a_series_of_its_own(run: RunOfFiles) -> None:
    sink = Recorder()
    run.model_steps("a", 1, 2)
    run.fed(sink)
    run.model_steps("b", 1)
    run.fed(sink)
    assert sink.received == [(1, {"a/loss": 0.5}), (2, {"a/loss": 1.0}), (1, {"b/loss": 0.5})]


@pytest.mark.parametrize("problem", [ConnectionError("no such host"), SystemExit("no such host")])
def test_a_failing_sink_is_remade_and_gets_what_it_missed(
    run: RunOfFiles, monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    monkeypatch.setattr("busrl.observe.sinks.feed.FIRST_PAUSE_S", 0.01)
    sink, told = Recorder([2], problem), list[str]()
    run.step(1, 2, 3)
    feed = run.feed(sink, told)
    feed.start()
    until(lambda: sink.steps == [1, 2, 3] and len(told) == 2)
    feed.finish()
    feed.join(END_S)
    assert f"{type(problem).__name__}: no such host" in told[0] and told[1] == "" and sink.makes == 2


def test_samples_that_a_sink_failed_at_are_given_again(run: RunOfFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrl.observe.sinks.feed.FIRST_PAUSE_S", 0.01)

    class FailsOnce(Recorder):
        def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
            if self.makes == 1:
                raise ConnectionError("no such host")
            super().samples(step, rows)

    sink = FailsOnce()
    run.sample(1, "34")
    feed = run.feed(sink)
    feed.start()
    until(lambda: bool(sink.rows))
    feed.finish()
    feed.join(END_S)
    assert [row["completion"] for row in sink.rows] == ["34"]


def test_a_step_counts_once_its_sink_has_flushed(run: RunOfFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrl.observe.sinks.feed.FIRST_PAUSE_S", 0.01)

    class LosesOnce(Recorder):
        """Keeps steps until a flush; the first of them fails, as on a full disk."""

        def flush(self) -> None:
            if self.makes == 1:
                self.received.clear()
                raise OSError("no space left on device")

    sink = LosesOnce()
    run.step(1, 2)
    feed = run.feed(sink)
    feed.start()
    until(lambda: sink.makes == 2 and sink.steps == [1, 2])
    feed.finish()
    feed.join(END_S)
    assert sink.steps == [1, 2]


def test_a_sink_that_hangs_makes_no_other_wait(run: RunOfFiles) -> None:
    """Nor does it hold anything in memory: the files are the queue."""
    stuck = threading.Event()

    class Hangs(Recorder):
        def numbers(self, step: int, values: Mapping[str, float]) -> None:
            stuck.wait(END_S)
            super().numbers(step, values)

    hanging, sink = Hangs(), Recorder()
    run.step(*range(1, 100))
    first = run.feed(hanging)
    other = Feed("other", sink, run.card("other"), run.paths, lambda *_: None)
    first.start()
    other.start()
    other.finish()
    other.join(END_S)
    assert sink.steps == list(range(1, 100)) and not hanging.received
    stuck.set()
    first.finish()
    first.join(END_S)
    assert hanging.steps == list(range(1, 100))


def test_another_run_in_the_directory_begins_anew(tmp_path: Path) -> None:
    place = Place(tmp_path / "place.json", "one")
    place.advance("steps", 5)
    place.save()
    assert Place(tmp_path / "place.json", "one").of("steps") == 5
    assert Place(tmp_path / "place.json", "two").of("steps") == -1


NUMBERS = st.integers(-9, 9) | st.floats() | st.booleans() | st.none() | st.text(max_size=3)
ROWS = st.dictionaries(st.text("abc", min_size=1, max_size=2), st.recursive(
    NUMBERS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1), inner, max_size=3)
))


@given(ROWS)
def test_whatever_a_line_holds_its_names_are_flat_and_its_numbers_finite(row: dict[str, Any]) -> None:
    for numbers in (list(numbers_of(row)), list(figures_of(row))):
        assert all(isinstance(name, str) and abs(value) < float("inf") for name, value in numbers)
    assert all(name.startswith("val/") for name, _ in figures_of(row))


# -- read back by their own libraries -----


def test_tensorboard_reads_the_scalars_the_samples_and_the_topology(run: RunOfFiles) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run.step(1, 2)
    run.round(2, 0.5)
    run.sample(2, "<b>|34\n")
    run.fed(TensorBoard)
    events = accumulators.EventAccumulator(str(run.paths.sinks / "own"))
    events.Reload()
    scalars = [(scalar.step, round(scalar.value, 6)) for scalar in events.Scalars("reward")]
    assert scalars == [(1, 0.1), (2, 0.2)]
    assert [scalar.step for scalar in events.Scalars("val/reward")] == [2]
    (table,) = events.Tensors("samples/text_summary")
    assert rb"|&lt;b&gt;\|34<br>|" in table.tensor_proto.string_val[0]
    assert b'"lr": 1e-06' in events.Tensors("topology/text_summary")[0].tensor_proto.string_val[0]


def records(file: Path) -> Iterator[Any]:
    """The records of an offline run: W&B's messages in LevelDB's log format (blocks of 32 KiB), after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def test_wandb_offline_holds_each_step_with_its_number(run: RunOfFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run.step(1, 2)
    run.round(1, 0.5)  # after a later step
    run.sample(2, "34")
    run.fed(Wandb)
    (file,) = (run.paths.sinks / "own" / "wandb").glob("offline-run-*/*.wandb")

    def history() -> list[dict[str, Any]]:
        return [
            {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            for record in records(file) if record.WhichOneof("record_type") == "history"
        ]

    until(lambda: len(history()) >= 3)  # W&B's own process writes them
    rows = history()
    assert [(row["step"], row["reward"]) for row in rows if "reward" in row] == [(1, 0.1), (2, 0.2)]
    assert [(row["step"], row["val/reward"]) for row in rows if "val/reward" in row] == [(1, 0.5)]
    assert "5a" * 16 in file.name


def test_prometheus_answers_with_the_newest_numbers_and_those_of_the_moment(run: RunOfFiles) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    said: list[str] = []
    card = run.card(live=lambda: [Live("slots", {"state": "queued"}, 3.0)], say=said.append)
    sink = Prometheus(card)
    try:
        sink.numbers(1, {"reward": 0.1, "wait_s/groups": 1.0})
        sink.numbers(2, {"reward": 0.2})
        with urllib.request.urlopen(said[0].split()[-1], timeout=END_S) as answer:
            text = answer.read().decode()
        families = parser.text_string_to_metric_families(text)
        samples = {sample.name: sample for family in families for sample in family.samples}
        assert samples["busrl_reward"].value == 0.2 and samples["busrl_reward"].labels == {"run": "sort"}
        assert samples["busrl_wait_s_groups"].value == 1.0 and samples["busrl_step"].value == 2
        assert samples["busrl_slots"].labels == {"run": "sort", "state": "queued"}
        again = run.card("again", port=int(said[0].rsplit(":", 1)[1].split("/")[0]))
        with pytest.raises(OSError):
            Prometheus(again)
    finally:
        sink.close()


def test_prometheus_answers_among_many_connections_that_say_nothing(run: RunOfFiles) -> None:
    pytest.importorskip("prometheus_client")
    said, before = list[str](), threading.active_count()
    sink = Prometheus(run.card(say=said.append))
    url = said[0].split()[-1]
    port = int(url.rsplit(":", 1)[1].split("/")[0])
    try:
        with ExitStack() as strangers:
            for _ in range(200):
                strangers.enter_context(socket.create_connection(("127.0.0.1", port), END_S))
            with urllib.request.urlopen(url, timeout=END_S) as answer:
                assert answer.status == 200
            until(lambda: threading.active_count() < before + 80)
    finally:
        sink.close()
