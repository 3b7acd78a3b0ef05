"""The files beside the policy: what the predictor learned, and the records of ended groups."""

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
from busrl.roles import foresight, plaindata
from busrl.roles.foresight import Foresight
from busrl.scheduling import Candidate, GroupScanner
from busrl.topology import Topology, load

ROOT = Path(__file__).resolve().parents[2]
LINE = np.dtype([("state", "u1"), ("segs", "u1"), ("cls", "u4"), ("uid", "u8"), ("admission", "u8"), ("step", "u4"),
                 ("reward", "f8"), ("finish", "u2"), ("response_tokens", "u4")])  # fmt: skip
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(data=st.dictionaries(st.text(max_size=5), PLAIN, max_size=4), shape=st.tuples(st.integers(0, 3)))
def test_plain_data_come_back_equal(data: dict[str, Any], shape: tuple[int], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("plain") / "state.npz"
    arrays = {"f": np.ones(shape, np.float32), "deep": [{"i": np.arange(3)}]}
    plaindata.save(path, {"data": data, **arrays})
    found = plaindata.load(path)
    assert found is not None and found["data"] == data
    assert found["f"].dtype == np.float32 and found["f"].shape == shape and found["deep"][0]["i"].tolist() == [0, 1, 2]


def test_a_missing_file_is_nothing_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    assert plaindata.load(path) is None
    plaindata.save(path, {"a": np.arange(1000)})
    whole = path.read_bytes()
    for damaged in (b"", b"no archive", whole[:40], whole[:-40], whole[:100] + b"\xff" * 40 + whole[140:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state\.npz: can not be read"):
            plaindata.load(path)


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
        return {"seen": self.seen}

    def load(self, state: Mapping[str, Any]) -> None:
        if state["seen"].ndim != 1:
            raise ValueError("seen must have one dimension")
        self.seen = state["seen"]

    def measures(self) -> dict[str, float]:
        return {"tau": 0.5, "pairs": float("nan")}


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    data = tmp_path / "train.jsonl"
    records = [{"prompt": "x" * (9 - n), "answer": "", "tag": f"t{n}"} for n in range(8)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings_ = [
        f'data.train="{data}"', 'data.validation=""', 'scheduler.policy="sjf"', "data.shuffle=false",
        "learner.trigger.n_min=4", "groups.size=2", "process.validator.count=0",
    ]  # fmt: skip
    return load(ROOT / "configs" / "quickstart.toml", settings_)


@pytest.fixture
def made(topology: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(foresight, "make_predictor", lambda name: Counting())
    warnings: list[str] = []

    def make() -> Foresight:
        found = Foresight(topology, RunPaths.of(tmp_path), JsonlStream(topology.data.train, 0, False), warnings.append)
        found.warnings = warnings  # type: ignore[attr-defined]
        return found

    return make


def test_lengths_are_told_once_kept_over_a_restart_and_written_with_their_predictions(
    made: Any, tmp_path: Path
) -> None:
    first = made()
    fates, lines = np.zeros(4096, np.uint8), np.zeros(4, LINE)
    scanner = GroupScanner(fates, 2)
    first.look(scanner.scan(lines), lines, 8)
    first.offer(scanner.scan(lines), 2)
    assert first.policy.next() == Candidate(7, "x" * 2, 64, "t7")  # the shortest
    fates[[28, 29]] = ord("D")
    for slot in (0, 1):
        lines[slot] = (4, 0, 0, 28 + slot, 0, 0, 0.0, 1, 10 + slot)
    for _ in range(2):
        first.look(scanner.scan(lines), lines, 8)
    assert first.predictor.seen.tolist() == [10, 11]
    assert first.told()["tau"] == 0.5 and "pairs" not in first.told() and first.told()["wait_bound"] == 14.0
    fates[[28, 29]], lines["state"] = ord("T"), 0
    first.look(scanner.scan(lines), lines, 8)
    first.close()
    (line,) = [json.loads(text) for text in (tmp_path / "scheduler.jsonl").read_text().splitlines()]
    assert (line["draw"], line["wait"], line["predicted"], line["actual"]) == ([7], [0], [2.0], [10.5])
    assert made().predictor.seen.tolist() == [10, 11]


def test_a_predictor_file_that_does_not_fit_is_told_and_not_used(made: Any, tmp_path: Path) -> None:
    plaindata.save(tmp_path / "predictor.npz", {"seen": np.zeros((2, 2))})
    again = made()
    assert again.predictor.seen.tolist() == [] and "begins anew: seen must have" in again.warnings[0]
    (tmp_path / "predictor.npz").write_bytes(b"rubbish")
    assert made().predictor.seen.tolist() == [] and "can not be read" in again.warnings[1]
