"""What the policy is told, the records of ended groups, and files of plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.data import JsonlStream
from busrl.paths import RunPaths
from busrl.predict import kept as predictor_state
from busrl.preflight.load import load
from busrl.roles.scheduler import DispatchFeed
from busrl.scheduling.dispatch import OpenGroup
from busrl.scheduling.groups import GroupScanner
from busrl.scheduling.predictor import Candidate
from busrl.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
LINE = np.dtype([("state", "u1"), ("segs", "u1"), ("cls", "u4"), ("uid", "u8"), ("admission", "u8"), ("step", "u4"),
                 ("reward", "f8"), ("finish", "u2"), ("response_tokens", "u4")])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(data=st.dictionaries(st.text(max_size=5), PLAIN, max_size=4), shape=st.tuples(st.integers(0, 3)))
def test_plain_data_come_back_equal(data: dict[str, Any], shape: tuple[int], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("plain") / "state.npz"
    arrays = {"f": np.ones(shape, np.float32), "deep": [{"i": np.arange(3)}]}
    predictor_state.save_plain(path, {"data": data, **arrays})
    state = predictor_state.load_plain(path)
    assert state is not None and state["data"] == data
    assert state["f"].dtype == np.float32 and state["f"].shape == shape and state["deep"][0]["i"].tolist() == [0, 1, 2]


def test_a_missing_file_is_nothing_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    assert predictor_state.load_plain(path) is None
    predictor_state.save_plain(path, {"a": np.arange(1000)})
    whole = path.read_bytes()
    for damaged in (b"", b"no archive", whole[:40], whole[:-40], whole[:100] + b"\xff" * 40 + whole[140:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state\.npz: cannot be read"):
            predictor_state.load_plain(path)


class Counting:
    """A predictor that remembers every length that it was told."""

    name = "counting"

    def __init__(self) -> None:
        self.seen = np.empty(0, np.int64)

    def predict(self, candidates: Sequence[Candidate]) -> Any:
        return np.array([float(len(c.prompt)) for c in candidates])

    def observe(self, finished: Sequence[tuple[Candidate, int]]) -> None:
        self.seen = np.append(self.seen, [tokens for _, tokens in finished])

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {"tau": 0.5, "pairs": float("nan")}


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    data = tmp_path / "train.jsonl"
    records = [{"prompt": "x" * (9 - n), "answer": "", "tag": f"t{n}"} for n in range(8)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings_ = [
        f'data.train="{data}"', 'validation.data=""', 'scheduler.policy="sjf"', "data.shuffle=false",
        "learner.trigger.n_min=4", "groups.size=2", "process.validator.count=0",
    ]
    return load(ROOT / "configs" / "quickstart.toml", settings_)


def test_lengths_are_told_once_and_written_with_their_predictions(topology: Topology, tmp_path: Path) -> None:
    predictor, warnings = Counting(), list[str]()
    stream = JsonlStream(topology.data.train, 0, False)
    first = DispatchFeed(topology, RunPaths.of(tmp_path), stream, predictor, warnings.append)
    fates, lines = np.zeros(4096, np.uint8), np.zeros(4, LINE)
    scanner = GroupScanner(fates, 2)
    first.look(scanner.scan(lines), lines, 8)
    first.offer(scanner.scan(lines), 2, 1 << 62)
    assert first.policy.next() == Candidate(7, "x" * 2, 64, "t7")  # the shortest
    fates[[28, 29]] = ord("D")
    for slot in (0, 1):
        lines[slot] = (4, 0, 0, 28 + slot, 0, 0, 0.0, 1, 10 + slot)
    for _ in range(2):
        first.look(scanner.scan(lines), lines, 8)
    assert predictor.seen.tolist() == [10, 11]
    assert first.metrics()["tau"] == 0.5 and "pairs" not in first.metrics() and first.metrics()["wait_bound"] == 14.0
    fates[[28, 29]], lines["state"] = ord("T"), 0
    first.look(scanner.scan(lines), lines, 8)
    first.close()
    (line,) = [json.loads(text) for text in (tmp_path / "scheduler.jsonl").read_text().splitlines()]
    assert (line["draw"], line["wait"], line["predicted"], line["actual"]) == ([7], [0], [2.0], [10.5])
    assert not warnings


def test_a_policy_is_asked_for_arrived_draws_in_one_array(
    topology: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = DispatchFeed(
        topology, RunPaths.of(tmp_path), JsonlStream(topology.data.train, 0, False), Counting(), lambda text: None)
    asked: list[Any] = []
    monkeypatch.setattr(feed.policy, "missing", lambda draws: asked.append(draws) or [])
    view = GroupScanner(np.zeros(4096, np.uint8), 2).scan(np.zeros(4, LINE))
    feed.offer(view, 2, 3)
    feed.offer(view, 2, 1 << 62)
    assert all(isinstance(draws, np.ndarray) for draws in asked)
    assert [draws.tolist() for draws in asked] == [[0, 1, 2], list(range(feed.policy.horizon + 2))]


def test_a_new_scheduler_tells_its_policy_of_groups_that_are_open_already(topology: Topology, tmp_path: Path) -> None:
    stream, predictor = JsonlStream(topology.data.train, 0, False), Counting()
    later = DispatchFeed(topology, RunPaths.of(tmp_path), stream, predictor, lambda text: None)
    fates, lines = np.zeros(4096, np.uint8), np.zeros(4, LINE)
    fates[[0, 1]] = ord("D")
    lines[0], lines[1] = (4, 0, 0, 0, 0, 0, 0.0, 1, 33), (3, 0, 0, 1, 0, 0, 0.0, 0, 0)
    later.look(GroupScanner(fates, 2).scan(lines), lines, 8)
    assert predictor.seen.tolist() == [33] and later.policy.unknown([0]) == []


def test_a_disk_that_refuses_costs_the_records_and_no_more(topology: Topology, tmp_path: Path) -> None:
    warnings: list[str] = []
    paths = RunPaths.of(tmp_path / "gone")
    told = DispatchFeed(topology, paths, JsonlStream(topology.data.train, 0, False), Counting(), warnings.append)
    told.write([OpenGroup(Candidate(3, "", 8), 1.0, 0, longest=2, tokens=2, members=1)], least=1)
    assert warnings and "1 groups are missing from scheduler.jsonl" in warnings[0]
