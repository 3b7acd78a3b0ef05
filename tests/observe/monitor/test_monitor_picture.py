"""The picture does not depend on the order, the number or the loss of the messages that it is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.observe.monitor import phrases
from busrl.observe.monitor.screen import gauge, portions
from busrl.observe.monitor.web.picture import steps_after
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.status import words
from busrl.status.runfiles import LineFollower, RunFiles
from busrl.status.state import (
    STEPS_KEPT,
    ErrorRecord,
    Facts,
    ProcessRecord,
    RecentErrors,
    RingRecord,
    RoundRecord,
    RunState,
    Speed,
    StepRecord,
    Steps,
    Traffic,
)
from busrl.status.view import RunStatus, as_data, to_json
from busrl.status.words import chart, safe


def update(step: int) -> m.LearnerStateUpdate:
    metrics = {"length_ended": 30.0 - step, "age_p95": 1.0, "time_s": 5.0}
    return m.LearnerStateUpdate(step=step, version=step, reward=step / 10, samples=8, tokens=100, metrics=metrics)


def process(name: str = "rollout/0", **changed: object) -> ProcessRecord:
    fields = {
        "name": name, "role": "rollout", "pid": 7, "state": "ready", "activity": "", "deadline_s": 0.0,
        "progress_age_s": 0.1, "busy_ns": 0, "tokens": 0, "samples": 0, "version": 0,
    }
    return ProcessRecord(**{**fields, **changed})  # type: ignore[arg-type]


def ring(*processes: ProcessRecord, **changed: object) -> RingRecord:
    fields = {
        "slots": 16, "occupancy": {"free": 16}, "words": {"step": 9, "version": 10, "run_state": 0}, "reaps": 0,
        "tokens": 0, "groups_open": 3, "groups_ready": 2, "processes": processes,
    }
    return RingRecord(**{**fields, **changed})  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 30), min_size=1))
def test_steps_in_any_order_and_multiplicity_make_the_same_charts(told: list[int]) -> None:
    picture = RunState()
    for step in told:
        picture.handle(update(step), 0.0)
    assert picture.steps.course(lambda step: step.step) == sorted(set(told))
    assert picture.steps.course(lambda step: step.reward) == [step / 10 for step in sorted(set(told))]
    assert picture.steps.course(lambda step: step.length) == [30.0 - step for step in sorted(set(told))]


@given(st.sets(st.integers(1, 20)), st.sets(st.integers(1, 20)))
def test_a_step_that_file_and_bus_both_tell_of_counts_once(filed: set[int], heard: set[int]) -> None:
    picture = RunState()
    for step in filed:
        picture.step(StepRecord(step, samples=8), None)
    for step in heard:
        picture.handle(update(step), 0.0)
    assert picture.steps.course(lambda step: step.step) == sorted(filed | heard)


def test_the_newest_steps_are_kept_and_memory_is_bounded() -> None:
    steps = Steps()
    for step in range(1, STEPS_KEPT + 500):
        steps.add(StepRecord(step))
    assert len(steps) == STEPS_KEPT and steps.course(lambda step: step.step)[-1] == STEPS_KEPT + 499
    assert not steps.add(StepRecord(3)) and not steps.add(StepRecord(STEPS_KEPT))


def test_the_ring_is_believed_where_messages_were_lost() -> None:
    picture = RunState()
    picture.handle(update(3), 0.0)
    picture.look(ring(process()), 0.0)
    assert (picture.at_step, picture.version, picture.state) == (9, 10, "running")
    picture.look(ring(process(state="dead")), 1.0)
    assert picture.state == "left"


def test_an_error_both_filed_and_published_shows_once() -> None:
    complaints = RecentErrors()
    error = ErrorRecord(100.0, "rollout/0", "warning", "rollout", "slow")
    published = ErrorRecord(100.01, "rollout-0", "warning", "rollout", "slow")
    for seen, source in ((error, "file"), (published, "bus"), (published, "bus"), (error, "file")):
        complaints.add(seen, source)
    assert complaints.count == 2
    complaints.add(ErrorRecord(500.0, "rollout-0", "warning", "rollout", "slow"), "bus")
    assert complaints.count == 3 and complaints.newest()[0].time == 500.0


def test_a_process_is_late_only_after_the_time_that_it_declared() -> None:
    picture = RunState(facts=Facts(progress_s=30.0))
    silent = {"progress_age_s": 40.0}
    picture.look(ring(process("a", **silent), process("b", activity="step", deadline_s=600.0, **silent)), 0.0)
    assert [(row.name, row.late) for row in picture.rows(0.0)] == [("a", True), ("b", False)]


def test_a_process_without_a_mapping_shows_by_its_bus_presence() -> None:
    picture = RunState()
    picture.look(ring(process("rollout/0")), 0.0)
    picture.handle(m.Hello(sender="rollout-0", role="rollout", pid=7, index=1), 0.0)
    picture.handle(m.Hello(sender="judge", role="reward", pid=99), 0.0)
    picture.handle(m.Heartbeat(sender="judge", role="reward", activity="judging"), 1.0)
    row = picture.rows(2.0)[-1]
    assert [row.name for row in picture.rows(2.0)] == ["rollout/0", "judge"]
    assert (row.pid, row.activity, row.progress_age_s, row.late) == (99, "judging", 1.0, False)
    assert picture.rows(60.0)[-1].late
    picture.handle(m.Goodbye(sender="judge"), 3.0)
    assert [row.name for row in picture.rows(3.0)] == ["rollout/0"]


def test_tokens_per_second_follow_the_counter_of_the_current_ring() -> None:
    picture = RunState()
    for second, tokens in enumerate((100, 150, 200, 0, 30)):
        picture.look(ring(process(), tokens=tokens), float(second))
        if second == 2:
            assert picture.speed(2.0).tokens_per_s == 50.0
    assert picture.speed(4.0).tokens_per_s == 30.0


def test_a_counter_that_becomes_known_is_no_speed() -> None:
    picture = RunState()
    picture.look(None, 0.0)
    assert picture.speed(0.0) == Speed()
    picture.look(ring(process(), tokens=45_000, words={"step": 45, "version": 45}), 1.0)
    assert picture.speed(1.0) == Speed()
    assert words.speed(picture.speed(1.0)) == "- samples/s · - tokens/s · - steps/min"
    picture.look(ring(process(), tokens=45_100), 2.0)
    assert picture.speed(2.0) == Speed(tokens_per_s=100.0)
    picture.look(None, 3.0)
    picture.look(ring(process(), tokens=90_000), 4.0)
    assert picture.speed(4.0) == Speed(), "another ring is another counter"


def test_steps_tell_their_pace_before_a_second_one_was_watched() -> None:
    picture = RunState(facts=Facts(max_steps=20))
    for number in range(1, 11):
        picture.step(StepRecord(number, seconds=3.0, samples=6, tokens=300), None)
    assert picture.speed(50.0) == Speed(2.0, 100.0, 20.0)
    assert picture.left_s(50.0) == pytest.approx(30.0)
    picture.handle(update(11), 50.0)  # one that does not tell is passed over
    assert picture.speed(52.0) == Speed(2.0, 100.0, 20.0)


def test_the_newest_steps_count_and_a_run_that_stands_still_gets_slower() -> None:
    picture = RunState()
    for number in range(1, 31):
        picture.step(StepRecord(number, seconds=10.0 if number <= 10 else 1.0, samples=4), 100.0)
    assert picture.speed(100.5).steps_per_min == 60.0
    assert picture.speed(121.0).steps_per_min == 30.0
    assert picture.speed(10_000.0).steps_per_min < 0.2  # type: ignore[operator]


A_RUN = Facts(run_id="a run")


@pytest.mark.parametrize("pace", [0.5, 1.0, 4.0, 100.0])
def test_a_replay_tells_the_speed_of_the_run_whatever_its_own_is(pace: float) -> None:
    picture = RunState()
    picture.replayed(A_RUN, pace, False)
    for second in range(10):
        now = 7.0 + second / pace
        picture.look(ring(process(), tokens=45_000 + 50 * second), now)
        picture.step(StepRecord(45 + second, seconds=1.0, samples=8), now)
    assert picture.speed(now).tokens_per_s == pytest.approx(50.0)
    assert picture.speed(now).samples_per_s == 8.0 and picture.speed(now).steps_per_min == 60.0
    picture.replayed(A_RUN, pace, True)
    assert picture.speed(now + 1000).steps_per_min == 60.0


def test_a_replay_at_full_speed_has_no_clock_for_ring_counters() -> None:
    picture = RunState()
    picture.replayed(A_RUN, 0.0, False)
    for second in range(10):
        picture.look(ring(process(), tokens=100 * second), 0.001 * second)
    assert picture.speed(0.1) == Speed()


def test_looks_that_came_in_one_batch_are_one_point() -> None:
    picture = RunState()
    for at, tokens in ((0.0, 10), (0.0, 20), (0.0, 30), (1.0, 40), (1.0, 60)):
        picture.look(ring(process(), tokens=tokens), at)
    assert picture.speed(1.0).tokens_per_s == 30.0


def test_a_listener_that_is_behind_knows_it_despite_wrong_sender_clocks() -> None:
    traffic = Traffic()
    ahead_and_behind = {"here": 0.001, "ahead": -50.0, "behind": 70.0}
    for sender, age in ahead_and_behind.items():
        traffic.late(sender, age)
    traffic.batch(3, min(traffic.late(sender, age + 0.01) for sender, age in ahead_and_behind.items()), 1.0)
    assert traffic.lag_s < 0.02
    traffic.batch(3, min(traffic.late(sender, age + 9.0) for sender, age in ahead_and_behind.items()), 10.0)
    assert 8.9 < traffic.lag_s < 9.1
    traffic.batch(0, None, 11.0)
    assert traffic.lag_s == 0.0 and traffic.last_at == 10.0


def test_a_follower_gives_whole_lines_once_and_counts_those_it_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    follower = LineFollower(path, tail_bytes=20)
    assert follower.new() == []
    path.write_bytes(b"".join(b"line %03d\n" % i for i in range(10)) + b"torn")
    got = follower.new()
    assert got[-1] == b"line 009" and follower.skipped + len(got) == 10 and follower.new() == []
    with open(path, "ab") as file:
        file.write(b" no more\nand")
    assert follower.new() == [b"torn no more"]
    path.unlink()
    path.write_bytes(b"another file\n")
    assert follower.new() == [b"another file"]


@given(st.lists(st.floats(), max_size=300), st.integers(1, 80), st.integers(1, 12))
def test_a_chart_has_the_size_that_was_asked_for(values: list[float], width: int, height: int) -> None:
    assert [len(line) for line in chart(values, width, height)] == [width] * height


@given(st.lists(st.integers(0, 10_000), max_size=12), st.integers(1, 120))
def test_portions_fill_the_bar_and_show_whatever_is_there(counts: list[int], width: int) -> None:
    cells = portions(counts, width)
    assert sum(cells) == (width if any(counts) else 0)
    assert all(cell == 0 for count, cell in zip(counts, cells) if not count)
    if sum(count > 0 for count in counts) <= width:
        assert all(cell > 0 for count, cell in zip(counts, cells) if count)


@given(st.floats(-5, 5), st.integers(0, 50))
def test_a_gauge_is_as_wide_as_asked(share: float, width: int) -> None:
    assert len("".join(gauge(share, width))) == width


@given(st.text())
def test_nothing_that_is_printed_can_move_a_cursor(text: str) -> None:
    assert all(character.isprintable() for character in safe(text))


@given(st.floats(), st.floats(), st.floats())
def test_a_run_whose_numbers_are_none_is_shown_and_told_as_json(reward: float, length: float, at: float) -> None:
    picture = RunState(facts=Facts(started=at, t_max_s=length))
    picture.step(StepRecord(1, reward=reward, length_mean=length, age_mean=at), 0.0)
    picture.handle(m.ValidationDone(round=1, version=1, samples=1, mean=reward), 0.0)
    picture.errors.add(ErrorRecord(at, "a", "error"), "file")
    assert told(picture)["step"] == 1
    assert phrases.lines(picture, 0.0, 1000.0)


def told(run: RunState) -> Any:
    """What `--json` says of it, where there are no files."""
    return json.loads(to_json(as_data(RunStatus(None, run, 0.0, run.state))))


def test_the_data_are_json_whatever_is_not_known() -> None:
    status = told(RunState())
    assert "slots" not in status and status["max_steps"] is None and status["state"] == "unknown"


def test_a_validation_round_told_by_file_and_bus_shows_once() -> None:
    picture = RunState()
    picture.validated(RoundRecord(0, 0, 0.25))
    picture.handle(m.ValidationDone(round=0, version=0, samples=8, mean=0.25), 0.0)
    assert phrases.lines(picture, 0.0, 0.0)[1] == "  progress  step 0 · version 0 · validation 0.250"
    picture.validated(RoundRecord(5, 6, None))  # nothing was judged
    picture.handle(m.ValidationDone(round=9, version=10, samples=8, mean=0.75), 0.0)
    assert [row["round"] for row in told(picture)["validation"]] == [0, 9], "those in which a sample was judged"
    assert "validation 0.250 → 0.750" in words.line(picture, 0.0)


def test_a_name_first_heard_between_two_looks_has_a_rate_afterwards() -> None:
    traffic = Traffic()
    traffic.tick(10.0)
    for _ in range(6):
        traffic.received("NEW_TASK", 100)
    traffic.tick(12.0)
    assert traffic.by_name["NEW_TASK"].rate.per_s() == traffic.total.rate.per_s() == 3.0


def test_the_busy_share_of_a_process_that_tells_none_is_not_known() -> None:
    picture = RunState()
    for second in (0, 1):
        told = process("learner", pid=8, busy_ns=1_000 + second * 250_000_000)
        picture.look(ring(process("reward/0"), told), float(second))
    assert [row.busy for row in picture.rows(1.0)] == [None, 0.25]
    assert "busy    -" in "\n".join(phrases.lines(picture, 1.0, 0.0))


def test_new_samples_are_read_once_and_a_bad_line_is_left_out(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    files = RunFiles(paths)
    assert files.new_samples() == []
    paths.samples.write_text('{"prompt": "Q", "completion": "A"}\n[1]\n{"prompt": "R", "completion": "B"}\n{broken\n')
    both = [{"prompt": "Q", "completion": "A"}, {"prompt": "R", "completion": "B"}]
    assert files.new_samples() == both and files.new_samples() == []


def test_a_page_gets_named_reward_parts_and_the_rounds_that_judged() -> None:
    run = RunState()
    heard = update(1)
    heard.metrics["reward_parts/exact"] = 0.25
    run.handle(heard, 0.0)
    run.step(StepRecord(2, reward_parts={"exact": 0.5, "format": 1.0}, lr=1e-6, tokens=100, seconds=2.0), None)
    run.validated(RoundRecord(2, mean=0.75, samples=4, set="hard", time=9.0))
    run.validated(RoundRecord(4, mean=None, samples=0))
    told = steps_after(run, 0)
    first, second = ({name: row[at] for at, name in enumerate(told["columns"])} for row in told["rows"])
    assert (first["part/exact"], first["part/format"]) == (0.25, None)
    assert (second["part/exact"], second["part/format"], second["lr"], second["tokens_per_s"]) == (0.5, 1.0, 1e-6, 50.0)
    assert told["rounds"] == [["hard", 2, 0.75, 9.0]]
