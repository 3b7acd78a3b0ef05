"""What a run's predictor learned: saved, restored, copied into checkpoints; damage costs quality, never the run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from busrl.data import JsonlStream
from busrl.data.trace import make_trace, write
from busrl.paths import RunPaths
from busrl.predict import kept as predictor_state
from busrl.predict.kept import PredictorState, copy_into
from busrl.preflight.load import load
from busrl.scheduling.predictor import Candidate
from busrl.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
TASKS = make_trace(120)


class Place:
    """A run directory, a trace, and schedulers' predictors one after another."""

    def __init__(self, root: Path) -> None:
        self.told: list[str] = []
        self.root = root
        self.paths = RunPaths.of(root)
        write(root / "trace.jsonl", TASKS)

    def topology(self, predictor: str = "blend", keywords: str = "") -> Topology:
        topology = load(ROOT / "configs" / "quickstart.toml", ["scheduler.policy=sjf"])
        # `check` refuses an oracle for a real model; here it is given to one all the same, to see what it knows.
        scheduler = dataclasses.replace(topology.scheduler, predictor=predictor, keywords=keywords)
        return dataclasses.replace(topology, scheduler=scheduler)

    def state(self, predictor: str = "blend", keywords: str = "") -> PredictorState:
        stream = JsonlStream(self.root / "trace.jsonl", 0, shuffle=False)
        return PredictorState(self.topology(predictor, keywords), self.paths, stream, self.told.append)

    def taught(self, predictor: str = "blend") -> PredictorState:
        state = self.state(predictor)
        for draw in range(60):
            state.predictor.observe([(asked(draw), TASKS[draw].length(m)) for m in range(8)])
        return state

    def checkpoint(self, step: int) -> Path:
        directory = self.paths.checkpoints / f"global_step_{step}"
        directory.mkdir(parents=True)
        copy_into(directory, self.paths)
        os.utime(directory, (step, step))
        return directory / self.paths.predictor.name


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def asked(draw: int) -> Candidate:
    return Candidate(draw, TASKS[draw].prompt, 4096, TASKS[draw].tag)


ASKED = [asked(draw) for draw in range(50, 120)]


@pytest.mark.parametrize("name", ["learned", "history", "blend"])
def test_a_successor_goes_on_with_what_was_learned(place: Place, name: str) -> None:
    first = place.taught(name)
    first.close()
    second = place.state(name)
    assert second.restore() and not place.told
    assert np.array_equal(second.predictor.predict(ASKED), first.predictor.predict(ASKED))


def test_a_run_without_its_own_file_takes_the_newest_checkpoint_copy(place: Place) -> None:
    first = place.taught()
    first.save()
    said = first.predictor.predict(ASKED)
    place.checkpoint(20)
    first.predictor.observe([(asked(draw), 4000) for draw in range(60, 100)])
    first.save()
    later = first.predictor.predict(ASKED)
    place.checkpoint(100)  # by time, not by name
    place.paths.predictor.unlink()
    second = place.state()
    assert second.restore() and np.array_equal(second.predictor.predict(ASKED), later)
    (place.paths.checkpoints / "global_step_100" / place.paths.predictor.name).unlink()
    third = place.state()
    assert third.restore() and np.array_equal(third.predictor.predict(ASKED), said)


def damage(whole: bytes) -> list[bytes]:
    return [
        b"",
        b"nonsense",
        whole[: len(whole) // 2],
        whole[:3000] + bytes(40) + whole[3040:],
        b"\x93NUMPY" + bytes(90),
    ]


@pytest.mark.parametrize("kind", range(5))
def test_a_damaged_file_is_warned_about_and_the_checkpoints_copy_used(place: Place, kind: int) -> None:
    first = place.taught()
    first.save()
    place.checkpoint(10)
    place.paths.predictor.write_bytes(damage(place.paths.predictor.read_bytes())[kind])
    second = place.state()
    assert second.restore()
    assert np.array_equal(second.predictor.predict(ASKED), first.predictor.predict(ASKED))
    assert len(place.told) == 1 and "predictor.npz" in place.told[0]


def test_with_nothing_that_can_be_read_a_run_begins_anew(place: Place) -> None:
    place.paths.predictor.write_bytes(b"nonsense")
    state = place.state()
    assert not state.restore() and len(place.told) == 1
    assert np.array_equal(state.predictor.predict(ASKED), place.state().predictor.predict(ASKED))


def test_the_state_of_another_predictor_is_not_taken(place: Place) -> None:
    place.taught("history").save()
    state = place.state("learned")
    assert not state.restore() and "it is of the predictor 'history', not 'learned'" in place.told[0]


def test_nothing_is_written_before_there_is_something_new(place: Place) -> None:
    state = place.state()
    state.close()
    assert not place.paths.predictor.exists()
    state.predictor.observe([(asked(0), 5)])
    state.save()
    before = place.paths.predictor.stat().st_mtime_ns
    state.save()
    assert place.paths.predictor.stat().st_mtime_ns == before


def test_a_state_reaches_disk_with_the_first_answer_however_late(place: Place) -> None:
    state = place.state()
    for now in (3.0, 30.0, 300.0):
        state.keep(now)
        assert not place.paths.predictor.exists()
    state.predictor.observe([(asked(0), 5)])
    state.keep(300.1)
    assert place.paths.predictor.exists()


def test_later_answers_are_saved_periodically_and_before_a_possible_checkpoint_step(
    place: Place,
) -> None:
    state, saved = place.state(), []
    state.save = lambda: saved.append(state.predictor.answers)  # type: ignore[method-assign]
    for now, before in ((0.0, None), (1.0, None), (2.0, 10), (2.1, 10), (3.0, 11), (4.0, None), (60.0, None)):
        state.predictor.observe([(asked(0), 5)])
        state.keep(now, before)
    assert saved == [1, 3, 5, 7]


def test_a_save_that_fails_is_told_and_tried_again(place: Place) -> None:
    state = place.taught()
    os.mkdir(place.paths.predictor)  # a rename onto a directory fails, for root too
    state.save()
    assert len(place.told) == 1 and "is not saved" in place.told[0]
    os.rmdir(place.paths.predictor)
    state.save()
    assert place.paths.predictor.is_file()


def test_a_checkpoint_of_a_run_that_learned_nothing_has_no_copy(place: Place) -> None:
    assert not place.checkpoint(1).exists()


def test_the_oracle_of_a_run_knows_its_trace(place: Place) -> None:
    said = place.state("oracle").predictor.predict([asked(3)])
    assert said[0] == pytest.approx(np.minimum(TASKS[3].lengths[:8], 4096).mean())


def test_a_run_uses_the_users_words(place: Place) -> None:
    words = place.root / "words.toml"
    words.write_text('[words]\n"zebra" = 900\n')
    restored, other = (s.predictor.predict([Candidate(0, "a zebra", 4096)])[0]
                  for s in (place.state("rules", str(words)), place.state("rules")))
    assert restored == other + 900


def test_plain_data_comes_back_equal(tmp_path: Path) -> None:
    data = {"a": np.arange(3), "b": [1, 2.5, "ü\ud800", {"c": np.zeros((0, 2), np.float32)}], "d": True, "e": {}}
    predictor_state.save_plain(tmp_path / "x.npz", data)
    back = predictor_state.load_plain(tmp_path / "x.npz")
    assert back is not None and list(back) == list(data) and back["b"][:3] == data["b"][:3] and back["e"] == {}
    assert back["a"].dtype == np.int64 and back["b"][3]["c"].shape == (0, 2) and back["b"][3]["c"].dtype == np.float32
    assert predictor_state.load_plain(tmp_path / "none.npz") is None
