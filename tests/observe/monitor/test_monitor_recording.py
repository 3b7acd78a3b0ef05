"""A recording is read back as it was written, up to the first byte that is not, and says what it missed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monitor_scene import PATIENCE_S, Scene, entries, finished, until

from busrl.bus.endpoint import Tap
from busrl.cli import main
from busrl.errors import DiskFull, UserError
from busrl.hosts import messages as g
from busrl.observe.monitor.recording import Drops, End, Header, Kind, RecordedFrame, Recording, Writer
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.status.state import Facts

Start = Callable[..., "subprocess.Popen[str]"]
TOPIC = topic(m.DataGenerated)
WRITTEN = st.lists(st.tuples(st.sampled_from(list(Kind)), st.binary(max_size=40), st.binary(max_size=200)), max_size=12)


def write(path: Path, wanted: list[tuple[Kind, bytes, bytes]]) -> list[RecordedFrame]:
    path.unlink(missing_ok=True)
    writer = Writer(path, Header(1, "00ff", 5, 7, facts=Facts(name="a run")))
    for at, (kind, topic_, body) in enumerate(wanted):
        writer.add(kind, topic_, body, at)
    writer.close()
    return [RecordedFrame(at, kind, topic_, body) for at, (kind, topic_, body) in enumerate(wanted)]


@settings(max_examples=60)
@given(WRITTEN)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[Kind, bytes, bytes]]):
    path = tmp_path_factory.getbasetemp() / "whole.rec"
    written = write(path, wanted)
    with Recording(path) as recording:
        assert recording.header.uuid == "00ff" and recording.header.facts.name == "a run"
        assert list(recording.entries()) == written and recording.torn == ""


@settings(max_examples=60)
@given(WRITTEN.filter(bool), st.data())
def test_a_file_cut_anywhere_gives_its_whole_records_and_the_torn_place(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[Kind, bytes, bytes]], data: st.DataObject
):
    path = tmp_path_factory.getbasetemp() / "torn.rec"
    written = write(path, wanted)
    begin = path.stat().st_size - sum(8 + 12 + len(record.topic) + len(record.body) for record in written)
    cut = data.draw(st.integers(begin, path.stat().st_size - 1))
    os.truncate(path, cut)
    with Recording(path) as recording:
        got = list(recording.entries())
        assert got == written[: len(got)] and len(got) < len(written)
        whole = begin + sum(8 + 12 + len(record.topic) + len(record.body) for record in got)
        assert bool(recording.torn) == (cut > whole)


@settings(max_examples=60)
@given(WRITTEN.filter(bool), st.data())
def test_no_damaged_record_is_ever_given(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[Kind, bytes, bytes]], data: st.DataObject
):
    path = tmp_path_factory.getbasetemp() / "damaged.rec"
    written = write(path, wanted)
    raw = bytearray(path.read_bytes())
    begin = len(raw) - sum(8 + 12 + len(record.topic) + len(record.body) for record in written)
    at = data.draw(st.integers(begin, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    with Recording(path) as recording:
        got = list(recording.entries())
        assert got == written[: len(got)] and recording.torn


def test_files_that_are_no_recordings_are_named_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x"
    for content, wanted in ((b"hello" * 20, "no recording"), (b"", "no recording")):
        path.write_bytes(content)
        assert main(["replay", str(path)]) == 2
        assert wanted in capsys.readouterr().err
    write(path, [])
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert main(["replay", str(path), "--info"]) == 2
    assert "header is damaged" in capsys.readouterr().err
    raw[8] = 9
    path.write_bytes(raw)
    assert main(["replay", str(path)]) == 2
    assert "format 9" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "absent")]) == 2
    assert "busrl record" in capsys.readouterr().err


def test_a_recording_never_overwrites_and_a_full_disk_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    writer = Writer(path, Header(1, "", 0, 0))
    with pytest.raises(UserError, match="exists"):
        Writer(path, Header(1, "", 0, 0))
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))  # EFBIG there, as ENOSPC on a full disk
    try:
        with pytest.raises(DiskFull, match="can be replayed"):
            for at in range(10_000):
                writer.add(Kind.MESSAGE, b"X/", bytes(100), at)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        writer.close()
    with Recording(path) as recording:
        got = list(recording.entries())
    assert [record.at_ns for record in got] == list(range(len(got))) and len(got) > 2000


def test_a_recorder_writes_every_message_and_looks_at_the_ring(
    scene: Scene, started: Start, tmp_path: Path
) -> None:
    before, path = scene.state(), tmp_path / "a.rec"
    child, publisher = recorder(scene, started, path)
    for uid in range(500):
        publisher.send(m.DataGenerated(slot_id=1, seq=2, uid=uid))
    until("all are written", lambda: len(recorded_uids(path)) == 500)
    child.send_signal(signal.SIGINT)
    assert "none missed" in finished(child)
    assert recorded_uids(path) == list(range(500))
    records = entries(path)
    assert [record.at_ns for record in records] == sorted(record.at_ns for record in records)
    assert any(record.kind == Kind.LOOK for record in records) and records[-1].kind == Kind.END
    end = msgspec.msgpack.decode(records[-1].body, type=End)
    assert end.why == "asked to by SIGINT" and end.missed == 0
    assert end.messages == sum(record.kind == Kind.MESSAGE for record in records)
    assert scene.state() == before


def recorder(scene: Scene, started: Start, path: Path, *options: str):
    """A recorder that hears the bus already, and a publisher."""
    child = started("record", str(scene.paths.root), "-o", str(path), *options)
    publisher = scene.endpoint("rollout-9")

    def hears() -> bool:
        publisher.send(m.Hello(role="rollout"))
        return path.exists() and any(record.topic == b"HELLO/" for record in entries(path))

    until("the recorder hears", hears)
    return child, publisher


def test_a_named_recording_without_a_header_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    path.touch()  # what a reader sees between the writer's first two calls of the system
    assert entries(path) == []


def recorded_uids(path: Path) -> list[int]:
    bodies = [record.body for record in entries(path) if record.topic == TOPIC.encode()]
    return [msgspec.msgpack.decode(body)["uid"] for body in bodies]


def test_a_stopped_recorder_costs_subscribers_nothing_and_the_broker_little_memory(
    scene: Scene, started: Start, tmp_path: Path
) -> None:
    path, count, size = tmp_path / "a.rec", 12_000, 10_000
    child, publisher = recorder(scene, started, path)
    listener = scene.endpoint("learner", topic(g.RemoteFail), hwm=2 * count)
    publisher.send(large(0, 10))
    assert listener.recv(PATIENCE_S) is not None
    until("the first is written", lambda: any(record.topic == b"REMOTE_FAIL/" for record in entries(path)))
    child.send_signal(signal.SIGSTOP)
    before = resident(scene.broker.pid)
    for number in range(1, count + 1):
        publisher.send(large(number, size))
        if number % 500 == 0:  # what one process can read while it sends
            assert [message.req for message in heard(listener, 500)] == list(range(number - 499, number + 1))
    assert listener.gaps.missed == 0
    grown = resident(scene.broker.pid) - before
    assert grown < 0.6 * count * size, f"the broker keeps {grown:,} bytes for a recorder that does not read"
    child.send_signal(signal.SIGCONT)

    def counted() -> bool:
        publisher.heartbeat("rollout", "")  # names the last number, so that the lost tail is counted too
        records = entries(path)
        drops = [msgspec.msgpack.decode(record.body, type=Drops) for record in records if record.kind == Kind.DROPS]
        written = sum(record.topic == b"REMOTE_FAIL/" for record in records)
        return bool(drops) and drops[-1].by.get("rollout-9 REMOTE_FAIL/", 0) + written == count + 1

    until("what was written and what was missed is all that was sent", counted)
    child.send_signal(signal.SIGINT)
    assert "missed" in finished(child)
    end = msgspec.msgpack.decode(entries(path)[-1].body, type=End)
    assert end.missed > count / 5


def large(number: int, size: int) -> g.RemoteFail:
    return g.RemoteFail(life=1, req=number, task="1.2.3", text="x" * size)


def heard(listener, count: int) -> list[g.RemoteFail]:
    got = []
    while len(got) < count and (message := listener.recv(PATIENCE_S)) is not None:
        got.append(message)
    return got


def resident(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_monitor_that_was_stopped_reports_its_losses_and_shows_the_present(scene: Scene, started: Start) -> None:
    publisher = scene.endpoint("rollout-9")
    child = started("monitor", str(scene.paths.root), "--plain")
    assert child.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(child.stdout.readline, "")), daemon=True)
    reader.start()

    def seen(word: str) -> bool:
        publisher.send(m.DataGenerated(slot_id=1, seq=2, uid=0))
        return any(word in line for line in lines)

    until("it hears", lambda: seen("messages/s") and any(re_positive(line) for line in lines))
    child.send_signal(signal.SIGSTOP)
    for uid in range(30_000):
        publisher.send(m.DataGenerated(slot_id=1, seq=2, uid=uid))
    since = time.monotonic()
    until("they are old", lambda: time.monotonic() > since + 3.5)
    child.send_signal(signal.SIGCONT)
    until("it tells what it missed", lambda: seen("messages missed"))


def re_positive(line: str) -> bool:
    return "messages/s" in line and "· 0 messages/s" not in line


def test_a_reopened_tap_drops_its_backlog_and_hears_what_comes_next(scene: Scene) -> None:
    tap, publisher = Tap(scene.paths.tap), scene.endpoint("rollout-9")

    def take(message: m.Message) -> list[str]:
        publisher.send(message)
        tap.wait(0.1)
        return [message.name for message in tap.take()]

    try:
        until("it hears", lambda: "DATA_GENERATED" in take(m.DataGenerated(slot_id=1, seq=2, uid=0)))
        for uid in range(1000):
            publisher.send(m.DataGenerated(slot_id=1, seq=2, uid=uid))
        publisher.ready(PATIENCE_S)  # all of them have passed the broker
        tap.reopen()
        since: list[str] = []
        until("it hears again", lambda: since.extend(take(m.Hello(role="rollout"))) or "HELLO" in since)
        assert "DATA_GENERATED" not in since
        publisher.heartbeat("rollout", "")
        until("the lost ones are counted", lambda: take(m.Hello(role="rollout")) and tap.gaps.missed >= 1000)
    finally:
        tap.close()


@pytest.mark.slow
def test_a_recording_ends_with_its_time_and_with_the_run(scene: Scene, started: Start, tmp_path: Path) -> None:
    timed = started("record", str(scene.paths.root), "-o", str(tmp_path / "timed.rec"), "--seconds", "0.5")
    assert "the time is over" in finished(timed)
    child, _ = recorder(scene, started, tmp_path / "a.rec")
    scene.paths.ring_file.unlink()
    assert "the run has ended" in finished(child)


def test_nothing_is_recorded_where_nothing_runs(
    scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.paths.ring_file.unlink()
    assert main(["record", str(scene.paths.root), "-o", str(tmp_path / "a.rec")]) == 2
    assert "nothing runs there" in capsys.readouterr().err and not (tmp_path / "a.rec").exists()
    scene.lock.release()
    scene.paths.summary.write_text('{"outcome": "finished", "why": "the goal is reached"}')
    assert main(["record", str(scene.paths.root), "-o", str(tmp_path / "a.rec")]) == 2
    assert "`busrl status` says: scene-1: finished, the goal is reached" in capsys.readouterr().err
    assert main(["record", "ipc:///tmp/x.sock", "-o", str(tmp_path / "a.rec")]) == 2
    assert "not an endpoint" in capsys.readouterr().err


def test_an_unused_ring_is_not_recorded_but_a_starting_launch_is(
    scene: Scene, started: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.rec"
    scene.ring.enter_remote("reward", "far", life=1)  # it stays listed, whoever is killed here
    scene.ring.close()
    finished(started("record", str(scene.paths.root), "-o", str(path), "--seconds", "0.1"))
    path.unlink()
    scene.lock.release()
    assert main(["record", str(scene.paths.root), "-o", str(path)]) == 2
    assert "`busrl status` says: scene-1: " in capsys.readouterr().err and not path.exists()


def test_a_damaged_ring_is_not_recorded_and_called_damaged(
    scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(scene.paths.ring_file, "r+b") as file:
        file.write(b"no ring!")
    assert main(["record", str(scene.paths.root), "-o", str(tmp_path / "a.rec")]) == 2
    assert "its ring is damaged" in capsys.readouterr().err and not (tmp_path / "a.rec").exists()
