"""What a person is told of a run's course: from the first step ever, with what was thrown away, whoever asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from busrl.launcher.summary import Progress
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.states import Fate
from busrl.status.runfiles import RunFiles, fates, number, run_of_files, sample_line
from busrl.status.state import RunState, Speed
from busrl.status.view import status
from busrl.status.words import line, reward_line
from busrl.system.files import FOLLOWED_BYTES


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "version": step, "seconds": 2.0, "groups": 2, "groups_ended": 10, "tokens": 100,
        "reward": step / 100, "flat_share": 0.8, "cut_share": 0.25, "entropy": 0.5, "ess": None, "k3": 0.001, **more,
    }


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run directory whose run has ended after 60 steps."""
    paths = RunPaths.of(tmp_path)
    write(paths.metrics, *(row(step) for step in range(1, 61)))
    write(paths.validation, *({"round": at, "val/reward": at / 100, "samples": 8} for at in (0, 30, 60)))
    write(paths.samples, {"step": 60, "prompt": '{"prompt": "1+1=", "answer": "2"}', "completion": "3", "reward": 0.0})
    paths.fates.write_bytes(bytes([Fate.TRAINED] * 200 + [Fate.FLAT] * 800 + [Fate.REWARD_RAISED, Fate.DISPATCHED, 0]))
    paths.run_json.write_text(json.dumps({"run_id": "told"}))
    paths.topology.write_text(json.dumps({"run": {"max_steps": 90}}))
    ended = {"outcome": "stopped", "why": "asked to", "steps": 60, "max_steps": 90, "seconds": 9, "version": 60}
    paths.summary.write_text(json.dumps(ended))
    return paths


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def story(paths: RunPaths) -> RunState:
    return run_of_files(RunFiles(paths))


def reward(run: RunState) -> float | None:
    return run.steps.recent(lambda step: step.reward)


def test_a_story_begins_with_the_first_step_and_ends_with_the_newest(run: RunPaths) -> None:
    state = story(run)
    assert (state.at_step, state.first_reward, reward(state)) == (60, 0.01, pytest.approx(0.555))
    assert state.steps.flat_share() == pytest.approx(0.8) and state.steps.recent(lambda step: step.ess) is None
    assert state.steps.pace(0.0) == Speed(0.0, 50.0, 30.0) and state.steps.pace(22.0) == Speed(0.0, 25.0, 15.0)
    rounds = [(entry.round, entry.mean, entry.samples) for entry in state.validations.values()]
    assert rounds == [(0, 0.0, 8), (30, 0.3, 8), (60, 0.6, 8)]


def test_a_long_file_is_read_at_both_ends_without_bad_lines(run: RunPaths) -> None:
    run.metrics.write_bytes(
        b"\xff\n[]\n" + json.dumps(row(1)).encode() + b"\n" + b"x" * FOLLOWED_BYTES + b"\n"
        + b'{"step": 7, "reward": 1e999}\n{"step": 8, "reward": 0.5}\n{"step": 9, "rew'
    )
    state = story(run)
    assert (state.first_reward, state.at_step, state.steps.course(lambda step: step.reward)) == (0.01, 8, [0.5])
    empty = RunState()
    RunFiles(RunPaths.of(run.root / "nothing")).fold_into(empty)
    assert empty == RunState(errors=empty.errors, steps=empty.steps) and not len(empty.steps)


def test_status_shows_reward_validation_waste_and_a_sample_in_words(run: RunPaths) -> None:
    text = status(run.root)
    for wanted in (
        "stopped, asked to; it took 9s", "step 60/90 · version 60 · validation 0.000 → 0.600", "0.010 → 0.600 over 60",
        "policy    flat groups 80% · cut answers 25% · entropy 0.50",
        "'1+1=' → '3', reward 0",
        "200 trained · 800 flat (all rewards of the group equal) · 1 whose reward raised · 1 open",
    ):
        assert wanted in text, text


def test_status_as_json_tells_the_same_and_no_number_that_is_none(run: RunPaths) -> None:
    shown = json.loads(status(run.root, as_json=True), parse_constant=lambda word: pytest.fail(word))
    assert (shown["schema"], shown["state"], shown["step"], shown["max_steps"]) == (1, "stopped", 60, 90)
    assert shown["reward"] == {"first": 0.01, "last_10_steps": pytest.approx(0.555)} and shown["steps_per_min"] == 30
    assert shown["flat_share"] == pytest.approx(0.8) and shown["ess"] is None and shown["sample"]["completion"] == "3"
    assert shown["samples"]["trained"] == 200 and shown["validation"][-1] == {"round": 60, "mean": 0.6, "samples": 8}


def test_files_with_numbers_that_are_none_are_no_obstacle(run: RunPaths) -> None:
    with open(run.samples, "a") as file:
        file.write('{"prompt": [NaN], "completion": "3", "reward": -Infinity}\n')
    newest = story(run).at_step
    for path, key in ((run.metrics, "step"), (run.validation, "round")):
        with open(path, "a") as file:
            file.write(f'{{"{key}": {10**300}}}\n{{"{key}": -1}}\n{{"{key}": true}}\n')
    assert story(run).at_step == newest and all(0 <= at < 100 for _, at in story(run).validations)
    run.summary.write_text('{"outcome": "stopped", "why": "x", "seconds": NaN, "open_samples": NaN, "steps": 1e999}')
    shown = json.loads(status(run.root, as_json=True), parse_constant=lambda word: pytest.fail(word))
    assert shown["seconds"] is shown["step"] is shown["sample"]["reward"] is None
    assert "stopped, x" in status(run.root)


def test_a_table_of_fates_of_any_length_is_counted_in_words(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes([0, Fate.OLD, Fate.DISPATCHED, 200]) * 700_000)
    assert list(fates(tmp_path / "f").items())[-1] == ("open", 700_000) and len(fates(tmp_path / "f")) == 3
    assert fates(tmp_path) == fates(tmp_path / "gone") == {}


@pytest.mark.parametrize(
    ("sample", "line"),
    [
        ({"prompt": "Q", "completion": "A\x1b[2J", "reward": 0.5}, "'Q' → 'A [2J', reward 0.5"),
        ({"prompt": [{"role": "user", "content": "Q"}], "completion": ""},
         """'[{"role": "user", "content": "Q"}]' → ''"""),
        ({"prompt": "x" * 500, "completion": "y" * 500}, f"'{'x' * 90}' → '{'y' * 60} … {'y' * 60}'"),
        ({"prompt": "{broken", "completion": "A"}, "'{broken' → 'A'"),
        ({}, ""),
    ],
)
def test_a_sample_is_one_line_whatever_stands_in_it(sample: dict[str, Any], line: str) -> None:
    assert sample_line(sample) == line


def test_a_resumed_run_goes_on_with_its_story(run: RunPaths) -> None:
    progress = Progress(story(run), [], 0.0)
    progress.run.ended_step = 61  # the ring may tell of a step before its message
    metrics = {"flat_share": 0.5, "groups_ended": 4.0, "cut_share": 0.0}
    progress.handle(m.LearnerStateUpdate(step=61, version=61, reward=0.9, metrics=metrics), 1.0)
    progress.handle(m.LearnerStateUpdate(step=60, version=60, reward=0.0), 1.0)
    newest = progress.run.steps.newest
    assert newest and (progress.run.first_reward, progress.before, newest.reward) == (0.01, 60, 0.9)
    assert [entry.mean for entry in progress.run.validations.values()] == [0.0, 0.3, 0.6]
    assert reward(progress.run) == pytest.approx(0.594)
    text = line(progress.run, 2.0)
    assert "step 61/90 · reward 0.594" in text and "79% flat" in text


def test_groups_that_give_no_step_are_told_and_are_no_steps(run: RunPaths) -> None:
    idle = {"kind": "idle", "step": 60, "groups_ended": 100, "flat_share": 1.0, "reward": 0.0, "tokens": 0,
            "seconds": 99.0, "idle_groups": 100, "idle_limit": 128, "idle_causes": {"flat": 100}}
    with open(run.metrics, "a") as file:
        file.write(json.dumps(idle) + "\n")
    state = story(run)
    assert (state.at_step, reward(state)) == (60, pytest.approx(0.555))
    assert state.steps.pace(0.0) == Speed(0.0, 50.0, 30.0) and state.steps.flat_share(state.idle) == pytest.approx(0.9)
    text = status(run.root)
    assert "idle      100 groups in a row ended with nothing to train (100 flat), the run ends after 128" in text
    write(run.metrics, idle)
    state = story(run)
    assert (state.first_reward, len(state.steps), state.steps.flat_share(state.idle)) == (None, 0, 1.0)


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), True, "7", None, [], {}])
def test_what_is_no_finite_number_is_not_known(value: object) -> None:
    assert number(value) is None
    assert number(7) == 7.0


@pytest.mark.parametrize(("first", "last", "words"), [
    (0.25, 0.5, "reward 0.250 → 0.500"), (0.25, None, "reward 0.250"), (None, None, ""),
])
def test_a_summary_names_the_rewards_that_it_has(first: float | None, last: float | None, words: str) -> None:
    assert reward_line({"first": first, "last_10_steps": last}) == words
