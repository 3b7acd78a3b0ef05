"""What a person sees: lines on a pipe, a picture on a terminal, and numbers that lost messages do not spoil."""

from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.launch.display import Display, LiveDisplay, fit, open_display, picture, plain_line, sparkline
from busrl.launch.progress import Progress, Rate, Row, duration, short
from busrl.protocol import messages as m

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def progress() -> Progress:
    made = Progress("sort", 200, 0.0)
    for step in range(1, 85):
        made.hear(
            m.LearnerStateUpdate(step=step, version=step + 1, groups=32, samples=256, tokens=9000, reward=step / 200)
        )
    made.ring(step=84, version=85, tokens=1000, slots={"free": 5, "generating": 128}, now=0.0)
    made.ring(step=84, version=85, tokens=7200, slots={"free": 5, "generating": 128}, now=2.0)
    made.rows = (Row("learner", "ready", "training", 0.93), Row("rollout/0", "starting", restarts=2))
    return made


def test_a_pipe_gets_plain_lines_at_most_one_per_five_seconds_and_only_for_new_steps():
    stream, clock, state = io.StringIO(), Clock(), progress()
    display = open_display(stream, clock)
    for second in range(10):
        clock.now = float(second)
        state.step = 84 + second // 8
        display.show(state)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and "\x1b" not in stream.getvalue()
    assert lines[0].startswith("step 84/200 · reward 0.") and "3.1k tokens/s · version 85" in lines[0]


def test_a_terminal_gets_a_picture_that_is_redrawn_in_place_below_the_lines_that_stay(monkeypatch):
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
    assert text.count("\x1b[J") == 3 and "step 84/200" in text and "restarted 2×" in text
    after = text.split("starting it again")[1].rpartition("\x1b[J")[0].rpartition("\x1b")[0]
    assert "\x1b[J" not in after and "sort" in after


def test_a_reader_that_reads_nothing_holds_nobody_up_and_is_told_later_what_it_missed(monkeypatch):
    monkeypatch.setattr("busrl.launch.display.MOST_WAITING", 2000)
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


def test_the_end_waits_for_a_slow_reader_but_not_for_one_that_reads_nothing(monkeypatch):
    monkeypatch.setattr("busrl.launch.display.UNREAD_S", 0.3)
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
)  # fmt: skip
def test_no_message_that_the_bus_lets_pass_can_end_the_picture(messages):
    state = progress()
    for message in messages:
        state.hear(message)
        assert picture(state, 1.0, 80) and plain_line(state, 1.0)
    assert state.recent_reward() is None or math.isfinite(state.recent_reward())


def test_a_reader_that_went_away_does_not_end_the_run():
    reader, writer = os.pipe()
    os.close(reader)
    display = Display(os.fdopen(writer, "w"), Clock())
    display.say("nobody hears this")
    display.say("nor this")


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_of_the_picture_is_wider_than_the_terminal(width):
    for line in picture(progress(), 70.0, width):
        assert len(COLOUR.sub("", fit(line, width))) < width


@given(st.lists(st.floats(-1e6, 1e6), max_size=500), st.integers(1, 60))
def test_a_sparkline_fits_its_width_whatever_the_numbers(values, width):
    line = sparkline(values, width)
    assert len(line) <= max(width, 1) and (len(line) > 0) == bool(values)


def test_late_and_doubled_updates_change_nothing():
    state = progress()
    before = (state.step, state.samples, len(state.rewards))
    state.hear(m.LearnerStateUpdate(step=84, samples=256, reward=9.0))
    state.hear(m.LearnerStateUpdate(step=10, samples=256, reward=9.0))
    assert (state.step, state.samples, len(state.rewards)) == before


def test_without_any_message_the_ring_alone_shows_how_far_the_run_is():
    state = Progress("sort", 200, 0.0)
    for second in range(11):
        state.ring(step=second * 2, version=second, tokens=0, slots={}, now=float(second))
    assert state.step == 20 and state.left_s() == pytest.approx(90.0)


HOSTILE = "\x1b[2J\x1b[1;1Hall is well\x1b]0;x\x07\x9b31m\u202e\rover"


def test_what_others_wrote_moves_no_cursor_on_a_pipe_or_a_terminal(monkeypatch):
    stream = io.StringIO()
    Display(stream, Clock()).say(f"REMOTE_FAIL: {HOSTILE}")
    assert stream.getvalue().isprintable() is False and stream.getvalue()[:-1].isprintable(), stream.getvalue()
    assert "all is well" in stream.getvalue() and stream.getvalue().endswith("over\n")
    state = Progress("sort", 200, 0.0)
    state.hear(m.SchedulerState(credit=0, waiting=HOSTILE))
    state.rows = (Row(HOSTILE, "ready", HOSTILE, 0.5),)
    for line in picture(state, 0.0, 100):
        assert COLOUR.sub("", fit(line, 100)).isprintable(), line


def test_validations_are_lines_that_stay():
    state = progress()
    (line,) = state.hear(m.ValidationDone(round=1, version=7, samples=512, mean=0.5))
    assert line == "validation 1 of version 7: 0.500 over 512 samples" and state.validations == [(1, 0.5, 512)]


def test_a_rate_starts_afresh_when_its_counter_does():
    rate = Rate()
    for second, tokens in enumerate((0, 100, 200, 0, 50)):
        rate.add(tokens, float(second))
    assert rate.per_s() == 50.0


def test_durations_and_numbers_are_short():
    assert [duration(one) for one in (5, 187, 3725)] == ["5s", "3m 07s", "1h 02m"]
    assert [short(one) for one in (7, 3100, 123456, 2.5e6)] == ["7", "3.1k", "123k", "2.5M"]


@pytest.mark.parametrize("reads", [True, False], ids=["somebody reads at last", "nobody does"])
def test_lines_that_nobody_read_are_counted_at_the_end(tmp_path, monkeypatch, reads):
    """Those that did not fit for whoever reads again; all of them in the log where nobody does."""
    monkeypatch.setattr("busrl.launch.display.MOST_WAITING", 40_000)
    monkeypatch.setattr("busrl.launch.display.UNREAD_S", 60.0 if reads else 0.2)
    reader, writer = os.pipe()
    os.write(writer, b"." * (fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096) - 1) + b"\n")
    with os.fdopen(writer, "w") as stream:
        display = open_display(stream, Clock())
    display.log = tmp_path / "launch.log"
    for number in range(1000):
        display.say(f"{number:099}")
    with os.fdopen(reader, "rb") as source, ThreadPoolExecutor(1) as thread:
        whole = thread.submit(source.read) if reads else None
        display.close()
        if whole is not None:
            read = whole.result(60).splitlines()
            assert read[-1] == b"(600 lines are not shown, as nobody read: they are in logs/launch.log)"
            assert len(read) == 1 + 400 + 1 and not display.log.exists()
    if not reads:
        assert display.log.read_text().startswith("1000 lines up to the end were not shown, as nobody read")
