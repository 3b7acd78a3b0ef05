"""A replay says what the recording holds, at the pace that was asked for, and takes nobody's address."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from monitor_scene import PATIENCE_S, TOPOLOGY, Scene, finished

from busrl.bus import Endpoint
from busrl.bus.endpoint import Tap
from busrl.cli import main
from busrl.errors import BadEndpoint, PeerTimeout, RunInUse
from busrl.observe.monitor.recording import Drops, End, Header, Kind, Recording, Replayer, Writer, summary
from busrl.protocol import messages as m
from busrl.protocol.codec import encode, topic
from busrl.status.state import Facts, ProcessRecord, RingRecord

Start = Callable[..., "subprocess.Popen[str]"]
FACTS = Facts(name="recorded", run_id="recorded-1", uuid="ab", max_steps=100, n_min=8)
MS = 1_000_000


def make(path: Path, messages: list[tuple[str, bytes]], every_ns: int = MS, end: bool = True) -> Path:
    """A recording of these messages, one every so often, with two looks at a ring and a gap that was counted."""
    writer = Writer(path, Header(1, FACTS.uuid, time.time_ns(), 0, facts=FACTS))
    writer.add(Kind.LOOK, b"LOOK/", msgspec.msgpack.encode(ring(1)), 0)
    for at, (topic_, body) in enumerate(messages):
        writer.add(Kind.MESSAGE, topic_.encode(), body, at * every_ns)
    last = len(messages) * every_ns
    writer.add(Kind.DROPS, b"", msgspec.msgpack.encode(Drops(7, {"a X/": 7})), last)
    writer.add(Kind.LOOK, b"LOOK/", msgspec.msgpack.encode(ring(2)), last)
    if end:
        writer.add(Kind.END, b"", msgspec.msgpack.encode(End("asked", len(messages), 0, 7)), last)
    writer.close()
    return path


def ring(step: int) -> RingRecord:
    entry = ProcessRecord("rollout/0", "rollout", 77, "ready", "", 0.0, 0.1, 0, 5, 6, step)
    words = {"step": step, "version": step, "run_state": 0}
    return RingRecord(16, {"free": 10, "generating": 6}, words, 0, 99, 3, 2, (entry,))


def stream(count: int) -> list[tuple[str, bytes]]:
    """Messages of several kinds, some damaged, some of a newer protocol."""
    messages: list[tuple[str, bytes]] = []
    for at in range(count):
        sent = {"sender": "learner", "msg_seq": at // 5 + 1, "time_ns": at + 1}
        kind = at % 5
        if kind == 0:
            messages.append(("LEARNER_STATE_UPDATE/", encode(m.LearnerStateUpdate(step=at, reward=0.5, **sent))))
        elif kind == 1:
            messages.append(("NEW_TASK/rollout-1/", encode(m.NewTask(worker_id="w", slot_id=1, seq=1, uid=at, **sent))))
        elif kind == 2:
            messages.append(("DATA_GENERATED/", b"\xc1 damaged"))
        elif kind == 3:
            messages.append(("FROM_TOMORROW/", msgspec.msgpack.encode({"type": "FROM_TOMORROW", **sent})))
        else:
            messages.append(("ERROR/", encode(m.Error(severity="error", where="w", text=f"trouble {at}", **sent))))
    return messages


@contextmanager
def replaying(path: Path, bind: str, **options: object) -> Iterator[tuple[Replayer, list[object]]]:
    """A replay in a thread of its own; what it ended with is put into the list."""
    with Recording(path) as recording, Replayer(recording, bind, **options) as replayer:  # type: ignore[arg-type]
        result: list[object] = []

        def run() -> None:
            try:
                result.append(replayer.run(PATIENCE_S))
            except Exception as problem:
                result.append(problem)

        thread = threading.Thread(target=run)
        thread.start()
        yield replayer, result
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_monitor_fed_at_full_speed_counts_what_the_recording_holds(
    short_dir: Path, started: Start, tmp_path: Path
) -> None:
    path, bind = make(tmp_path / "a.rec", stream(30_000)), f"ipc://{short_dir}/replay.sock"
    player = started("replay", str(path), "--speed", "max", "--bind", bind)
    told = json.loads(finished(started("monitor", bind, "--once", "--json")))
    assert "published 30,000 messages" in finished(player)
    held = summary(path)
    counted = {name: counts["count"] for name, counts in told["messages"]["by_name"].items()}
    assert counted.pop("(unknown)") == held["messages"].pop("FROM_TOMORROW")
    assert counted == held["messages"] and told["messages"]["count"] == 30_000
    assert told["messages"]["missed"] == held["missed"] == 7 and told["messages"]["malformed"] == 6_000
    assert (told["name"], told["state"], told["step"], told["max_steps"]) == ("recorded", "replay", 29_995, 100)
    assert told["slots"]["generating"] == 6 and told["processes"][0]["name"] == "rollout/0"
    assert told["errors"]["count"] == 6_000 and told["groups"]["ready"] == 2
    assert not Path(bind.removeprefix("ipc://")).exists()


def test_a_torn_recording_is_replayed_up_to_the_tear_and_says_so(
    short_dir: Path, started: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, bind = make(tmp_path / "a.rec", stream(100), end=False), f"ipc://{short_dir}/replay.sock"
    path.write_bytes(path.read_bytes()[:-300])
    player = started("replay", str(path), "--speed", "max", "--bind", bind)
    told = json.loads(finished(started("monitor", bind, "--once", "--json")))
    assert main(["replay", str(make(tmp_path / "b.rec", stream(3))), "--info"]) == 0
    assert "torn: " not in capsys.readouterr().out
    assert "is cut at byte" in finished(player)
    assert told["messages"]["count"] == sum(summary(path)["messages"].values()) > 90
    assert main(["replay", str(path), "--info"]) == 0
    assert "torn: a record is cut" in capsys.readouterr().out


@pytest.mark.parametrize("speed", ["1", "20", "max"])
def test_a_recording_from_the_middle_of_a_run_shows_its_speed(
    short_dir: Path, started: Start, tmp_path: Path, speed: str
) -> None:
    metrics = {"seconds": 2.5}
    update = [
        m.LearnerStateUpdate(step=step, version=step, samples=20, tokens=600, metrics=metrics, sender="x")
        for step in range(45, 49)
    ]
    messages = [("LEARNER_STATE_UPDATE/", encode(step)) for step in update]
    path = make(tmp_path / "a.rec", messages, every_ns=100 * MS)
    bind = f"ipc://{short_dir}/replay.sock"
    player = started("replay", str(path), "--speed", speed, "--bind", bind)
    told = json.loads(finished(started("monitor", bind, "--once", "--json")))
    finished(player)
    assert told["step"] == 48
    assert told["steps_per_min"] == 24.0 and told["samples_per_s"] == 8.0


@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_the_pace_is_the_recorded_one_times_the_factor(short_dir: Path, tmp_path: Path, speed: float) -> None:
    path, bind = make(tmp_path / "a.rec", stream(40), every_ns=20 * MS), f"ipc://{short_dir}/replay.sock"
    with replaying(path, bind, speed=speed):
        begun = time.monotonic()  # with its first subscriber the replay begins
        tap, at, over = Tap(bind), {}, False
        while not over:
            assert tap.wait(PATIENCE_S)
            for heard in tap.take():
                at.setdefault((heard.topic, heard.body), time.monotonic())
                over = over or (heard.name == "REPLAY" and b"over" in heard.body)
        tap.close()
    times = [sent_at for (topic_, _), sent_at in at.items() if topic_.startswith(b"NEW_TASK")]
    assert times == sorted(times) and len(times) == 8
    # Late it may be on a busy machine, early never. The last of these is recorded 36 * 20 ms after the first of all.
    assert times[-1] - begun >= 36 * 0.020 / speed


def test_an_endpoint_begins_the_replay_and_gets_what_it_subscribed_to(short_dir: Path, tmp_path: Path) -> None:
    backend, path = f"ipc://{short_dir}/sub.sock", make(tmp_path / "a.rec", stream(500))
    with replaying(path, backend, speed=0.0) as (_, result):
        where = f"ipc://{short_dir}/none.sock", backend
        actor = Endpoint("rollout/1", *where, subscribe=[topic(m.NewTask, "rollout/1")])
        tasks = []
        while len(tasks) < 100:
            task = actor.recv(PATIENCE_S)
            assert isinstance(task, m.NewTask)
            tasks.append(task.uid)
        assert tasks == list(range(1, 500, 5))
        actor.close()
    assert result == [500]


def test_a_listener_without_a_ping_is_awaited_until_its_subscriptions_are_quiet(
    short_dir: Path, started: Start, tmp_path: Path
) -> None:
    path, bind = make(tmp_path / "a.rec", stream(50)), f"ipc://{short_dir}/sub.sock"
    player = started("replay", str(path), "--bind", bind, "--speed", "max", "--wait", str(100 * PATIENCE_S))
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.setsockopt(zmq.SUBSCRIBE, b"NEW_TASK/")
        listener.connect(bind)
        for number in range(10):
            assert listener.poll(int(PATIENCE_S * 1000))
            assert msgspec.msgpack.decode(listener.recv_multipart()[1])["uid"] == 5 * number + 1
    assert "published 50 messages" in finished(player)


def test_a_departing_listener_ends_the_replay_with_an_error_saying_so(short_dir: Path, tmp_path: Path) -> None:
    path, bind = make(tmp_path / "a.rec", stream(400), every_ns=100 * MS), f"ipc://{short_dir}/replay.sock"
    with replaying(path, bind, speed=1.0) as (_, result):
        tap = Tap(bind)
        assert tap.wait(PATIENCE_S)
        tap.close()
    assert isinstance(result[0], PeerTimeout) and "last listener" in str(result[0])


def test_without_a_listener_nothing_is_published(
    short_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    path = make(tmp_path / "a.rec", stream(5))
    assert main(["replay", str(path), "--wait", "0.1"]) == 2
    assert "nobody listened" in capsys.readouterr().err
    assert list(short_dir.iterdir()) == []


def test_a_living_runs_bus_is_never_taken(scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, before = make(tmp_path / "a.rec", stream(5)), scene.state()
    paths = scene.paths
    for endpoint in (paths.backend, paths.frontend, paths.tap, f"ipc://{paths.runtime_dir}/mine.sock"):
        assert main(["replay", str(path), "--bind", endpoint]) == 2
        assert "socket directory of a run" in capsys.readouterr().err
    link = tmp_path / "link"
    link.symlink_to(paths.runtime_dir)
    assert main(["replay", str(path), "--bind", f"ipc://{link}/sub.sock"]) == 2
    assert scene.state() == before
    scene.endpoint("learner").ready(PATIENCE_S)


def test_an_address_that_is_served_or_a_file_is_refused(short_dir: Path, tmp_path: Path) -> None:
    path = make(tmp_path / "a.rec", stream(5))
    with socket.socket(socket.AF_UNIX) as server, Recording(path) as recording:
        server.bind(f"{short_dir}/served")
        server.listen(1)
        with pytest.raises(RunInUse, match="endpoint of its own"):
            Replayer(recording, f"ipc://{short_dir}/served")
        with pytest.raises(BadEndpoint, match="over ipc:// alone"):
            Replayer(recording, "tcp://127.0.0.1:5600")
        assert (short_dir / "served").is_socket()
    precious = short_dir / "precious"
    precious.write_text("data")
    assert main(["replay", str(path), "--bind", f"ipc://{precious}"]) == 2 and precious.read_text() == "data"


def test_a_socket_that_nobody_serves_any_more_is_used_again(short_dir: Path, tmp_path: Path) -> None:
    path = make(tmp_path / "a.rec", stream(5))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short_dir}/left")
    with replaying(path, f"ipc://{short_dir}/left", speed=0.0) as (_, result):
        tap, heard = Tap(f"ipc://{short_dir}/left"), Counter()
        while heard["NEW_TASK"] < 1:
            assert tap.wait(PATIENCE_S)
            heard.update(message.name for message in tap.take())
        tap.close()
    assert result == [5]


@pytest.mark.parametrize("speed", ["0", "-1", "fast", "nan", "1e99"])
def test_a_speed_that_is_none_is_named(speed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(make(tmp_path / "a.rec", stream(5))), f"--speed={speed}"]) == 2
    assert f"--speed {speed}" in capsys.readouterr().err


def test_the_scene_of_these_tests_names_the_keys_that_the_monitor_reads() -> None:
    """The hand-made topology.json must not drift from a real one."""
    from busrl.preflight.load import load

    real = load(Path(__file__).parents[3] / "configs" / "reference.toml", []).to_dict()
    for section, keys in TOPOLOGY.items():
        assert set(keys) <= set(real[section]), section
    assert set(TOPOLOGY["learner"]["trigger"]) <= set(real["learner"]["trigger"])
