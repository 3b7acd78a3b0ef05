"""What a person sees: lines on a pipe, a picture on a terminal, and numbers that lost messages do not spoil."""

from __future__ import annotations

import fcntl
import gc
import io
import math
import os
import pty
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.launcher.display import Display, LiveDisplay, open_display
from busrl.launcher.summary import Progress
from busrl.launcher.supervisor import Child
from busrl.observe.monitor.screen import launch_picture
from busrl.protocol import messages as m
from busrl.status.state import STEPS_KEPT, Facts, ProcessRecord, Rate, RingRecord, RunState
from busrl.status.words import duration, line, short
from busrl.topology.schema import Limits

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(step: int, version: int, tokens: int, *processes: ProcessRecord) -> RingRecord:
    words = {"step": step, "version": version, "run_state": 0}
    occupancy = {"free": 5, "generating": 128}
    return RingRecord(133, occupancy, words, 0, tokens, -1, -1, processes)


def begun(goal: int = 200, children: int = 2) -> Progress:
    """A run whose learner is ready while its rollout workers start again."""
    names = ["learner", *(f"rollout/{number}" for number in range(children - 1))]
    children = [Child(name, Limits(ready_s=9, progress_s=9, restart_attempts=9, crash_attempts=0)) for name in names]
    for pid, child in enumerate(children, 100):
        child.started(pid, 0.0)
    children[0].became_ready()
    for child in children[1:]:
        child.restarts = 2
    return Progress(RunState(facts=Facts(name="sort", max_steps=goal)), children, 0.0)


def progress() -> Progress:
    progress = begun()
    for step in range(1, 85):
        update = {"step": step, "version": step + 1, "groups": 32, "samples": 256, "tokens": 9000, "reward": step / 200}
        progress.handle(m.LearnerStateUpdate(**update), 0.0)
    for second, busy in ((0.0, 0), (2.0, 1_860_000_000)):
        learner = ProcessRecord("learner", "learner", 100, "ready", "training", 0.0, 0.1, busy, 0, 0, 85)
        progress.run.look(record(84, 85, 1000 + int(3100 * second), learner), second)
    return progress


def shown(state: Progress, width: int = 100, height: int = 30, now: float = 2.0) -> list[str]:
    return COLOUR.sub("", launch_picture(state.run, state.rows(now), now, width, height)).splitlines()


def test_a_pipe_gets_plain_lines_at_most_every_five_seconds_per_step():
    stream, clock, state = io.StringIO(), Clock(), progress()
    display = open_display(stream, clock)
    for second in range(10):
        clock.now = float(second)
        state.run.look(record(84 + second // 8, 85, 7200), 2.0)
        display.show(state)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and "\x1b" not in stream.getvalue()
    assert lines[0].startswith("step 84/200 · reward 0.398 · ")
    assert lines[0].endswith(" · 0s") and lines[1].startswith("step 85/200")


def test_a_terminal_gets_a_picture_redrawn_in_place_below_lasting_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        clock = Clock()
        display = open_display(stream, clock)
        assert isinstance(display, LiveDisplay)
        display.show(progress())
        clock.now = 1.0
        display.show(progress())
        display.say("rollout/0 ended; starting it again")
        clock.now = 2.0
        display.show(progress())
        display.say("the end")
        text = ""
        while "the end" not in text:
            text += os.read(master, 65536).decode()
    os.close(master)
    assert text.count("\x1b[J") == 3 and "step 84/200" in text and "↻2" in text
    after = text.split("starting it again")[1].rpartition("\x1b[J")[0].rpartition("\x1b")[0]
    assert "\x1b[J" not in after and "sort" in after


def test_a_stalled_reader_delays_nobody_and_later_learns_what_it_missed(monkeypatch):
    monkeypatch.setattr("busrl.launcher.display.MOST_WAITING", 2000)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    display = Display(os.fdopen(writer, "w"), Clock())
    for number in range(1000):
        display.say(f"line {number:03d} of many")  # returns, although pipe and memory take some 300
    text = ""
    while "(" not in text:
        text += os.read(reader, 65536).decode()
        display.say("after it")
    first = text.partition("(")[0]
    shown = [line for line in first.splitlines() if line.startswith("line")]
    assert shown == [f"line {number:03d} of many" for number in range(len(shown))] and 0 < len(shown) < 1000
    while "logs/launch.log" not in text:
        text += os.read(reader, 65536).decode()
    display.close()
    os.close(reader)


def test_the_end_waits_for_a_slow_reader_but_not_a_stalled_one(monkeypatch):
    monkeypatch.setattr("busrl.launcher.display.UNREAD_S", 0.3)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    display = Display(os.fdopen(writer, "w"), Clock())
    for number in range(2000):
        display.say(f"line {number:04d}")
    display.close()  # returns
    read = b""
    while not read.endswith(b"line 1999\n"):
        read += os.read(reader, 65536)
    os.close(reader)


def test_a_stream_that_can_not_write_a_character_shows_another():
    stream = io.TextIOWrapper(io.FileIO(os.memfd_create("out"), "r+"), encoding="ascii")
    display = Display(stream, Clock())
    display.say("reward → 1 ✓")
    display.close()
    assert os.pread(stream.fileno(), 100, 0) == b"reward ? 1 ?\n"


FLOATS = st.floats(allow_nan=True, allow_infinity=True)
COUNTS = st.integers(0, 2**64 - 1)
STEPS = st.one_of(COUNTS, st.integers(80, 220))


@given(
    st.lists(
        st.one_of(
            st.builds(
                m.LearnerStateUpdate, step=STEPS, version=COUNTS, groups=COUNTS, samples=COUNTS, tokens=COUNTS,
                reward=FLOATS, entropy=FLOATS, age_mean=FLOATS,
                metrics=st.dictionaries(st.sampled_from(["flat_share", "groups_ended", "cut_share"]), FLOATS),
            ),
            st.builds(m.ValidationStarted, round=COUNTS, version=COUNTS, samples=COUNTS),
            st.builds(m.ValidationDone, round=COUNTS, version=COUNTS, samples=COUNTS, mean=FLOATS),
            st.builds(m.SchedulerState, waiting=st.text(max_size=50)),
        ),
        max_size=12,
    )
)
def test_no_message_that_the_bus_lets_pass_can_end_the_picture(messages):
    state = progress()
    for message in messages:
        state.handle(message, 1.0)
        assert line(state.run, 1.0)
    assert shown(state)
    reward = state.run.steps.recent(lambda step: step.reward)
    assert reward is None or math.isfinite(reward)


def test_a_reader_that_went_away_does_not_end_the_run():
    reader, writer = os.pipe()
    os.close(reader)
    display = Display(os.fdopen(writer, "w"), Clock())
    display.say("nobody hears this")
    display.say("nor this")


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize(("height", "children"), [(24, 2), (24, 60), (8, 3), (3, 1)])
def test_the_picture_is_smaller_than_the_terminal(width, height, children):
    state = progress()
    state.children = begun(children=children).children
    lines = shown(state, width, height)
    assert 0 < len(lines) < height and all(len(line) < width for line in lines)


def test_late_and_doubled_updates_change_nothing():
    state = progress()
    before = (state.run.at_step, state.samples, len(state.run.steps))
    state.handle(m.LearnerStateUpdate(step=84, samples=256, reward=9.0), 3.0)
    state.handle(m.LearnerStateUpdate(step=10, samples=256, reward=9.0), 3.0)
    assert (state.run.at_step, state.samples, len(state.run.steps)) == before


def test_without_any_message_the_ring_alone_shows_how_far_the_run_is():
    state = begun()
    for second in range(11):
        state.run.look(record(second * 2, second, 0), float(second))
    assert state.run.at_step == 20 and state.run.left_s(10.0) == pytest.approx(90.0)


HOSTILE = "\x1b[2J\x1b[1;1Hall is well\x1b]0;x\x07\x9b31m\u202e\rover"


def test_what_others_wrote_moves_no_cursor_on_a_pipe_or_a_terminal(monkeypatch):
    stream = io.StringIO()
    Display(stream, Clock()).say(f"REMOTE_FAIL: {HOSTILE}")
    assert stream.getvalue().isprintable() is False and stream.getvalue()[:-1].isprintable(), stream.getvalue()
    assert "all is well" in stream.getvalue() and stream.getvalue().endswith("over\n")
    state = begun()
    state.handle(m.SchedulerState(credit=0, waiting=HOSTILE), 0.0)
    learner = ProcessRecord(HOSTILE, "learner", 100, "ready", HOSTILE, 0.0, 0.1, 0, 0, 0, 1)
    state.run.look(record(0, 0, 0, learner), 0.0)
    state.run.facts = Facts(name=HOSTILE, max_steps=200)
    for text in shown(state):
        assert text.isprintable(), text


def test_validations_are_lines_that_stay():
    state = progress()
    (text,) = state.handle(m.ValidationDone(round=1, version=7, samples=512, mean=0.5), 2.0)
    assert text == "validation 1 of version 7: 0.500 over 512 samples"
    assert [(entry.round, entry.mean, entry.samples) for entry in state.run.validations.values()] == [(1, 0.5, 512)]


def test_faults_on_purpose_are_shown_all_the_time():
    state = begun()
    assert "FAULTS ARE ON" not in "".join(shown(state))
    state = Progress(state.run, state.children, 0.0, ["drops 1 % of all messages"])
    assert "FAULTS ARE ON" in shown(state)[0] and line(state.run, 0.0).startswith("FAULTS ARE ON · step 0/200")


def test_a_rate_starts_afresh_when_its_counter_does():
    rate = Rate()
    for second, tokens in enumerate((0, 100, 200, 0, 50)):
        rate.add(tokens, float(second))
    assert rate.per_s() == 50.0


def test_durations_and_numbers_are_short():
    assert [duration(seconds) for seconds in (5, 187, 3725)] == ["5s", "3m 07s", "1h 02m"]
    assert [short(count) for count in (7, 3100, 123456, 2.5e6)] == ["7", "3.1k", "123k", "2.5M"]


@pytest.mark.parametrize("reads", [True, False], ids=["somebody reads at last", "nobody does"])
def test_lines_that_nobody_read_are_counted_at_the_end(tmp_path, monkeypatch, reads):
    """Those that did not fit for whoever reads again; all of them in the log where nobody does."""
    monkeypatch.setattr("busrl.launcher.display.MOST_WAITING", 40_000)
    monkeypatch.setattr("busrl.launcher.display.UNREAD_S", 60.0 if reads else 0.2)
    reader, writer = os.pipe()
    os.write(writer, b"." * (fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096) - 1) + b"\n")
    with os.fdopen(writer, "w") as stream:
        display = open_display(stream, Clock())
    display.log = tmp_path / "launch.log"
    for number in range(1000):
        display.say(f"{number:099}")
    with os.fdopen(reader, "rb") as source, ThreadPoolExecutor(1) as thread:
        reading = thread.submit(source.read) if reads else None
        display.close()
        if reading is not None:
            read = reading.result(60).splitlines()
            assert read[-1] == b"(600 lines are not shown, as nobody read: they are in logs/launch.log)"
            assert len(read) == 1 + 400 + 1 and not display.log.exists()
    if not reads:
        assert display.log.read_text().startswith("1000 lines up to the end were not shown, as nobody read")


def test_what_launch_keeps_of_steps_is_a_window_and_no_leak():
    """Less than 1 KB a step, without its figures by tag; it looks like a leak until as many steps as are kept."""

    progress = begun(goal=1_000_000)

    def told(step):
        figures = {f"by/level-{level}/{name}": float(step) for level in range(8) for name in ("reward", "length")}
        sent = m.LearnerStateUpdate(step=step, version=step, reward=0.5, metrics={"lr": 1e-5, "kl": 0.1, **figures})
        return msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=m.LearnerStateUpdate)

    def kept(first):
        for step in range(first, first + STEPS_KEPT):
            progress.handle(told(step), float(step))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        filled, later = kept(1), kept(STEPS_KEPT + 1)
    finally:
        tracemalloc.stop()
    assert len(progress.run.steps) == STEPS_KEPT and 1 << 20 < filled < STEPS_KEPT << 10
    assert later < 1.05 * filled, (filled, later)
