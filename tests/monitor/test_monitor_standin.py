"""A foreign worker finds a replay as it finds a run, and gets the work that its name had in the recording."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from monitor_scene import PATIENCE_S, Scene, finished, until

from busrl.cli import main
from busrl.monitor.recording import Entry, Header, Kind, Recording, Writer
from busrl.monitor.replay import Frames, StandIn
from busrl.monitor.sources import find
from busrl.monitor.state import Facts
from busrl.protocol import Message, encode, topic
from busrl.protocol import gateway as g
from busrl.protocol import messages as m

Start = Callable[..., "subprocess.Popen[str]"]
ACTOR = Path(__file__).parents[2] / "examples" / "python-actor" / "actor.py"
MS = 1_000_000
TASKS = 30
RECORDED_LIFE, NEW_LIFE = 5, 9


def task(number: int) -> g.Task:
    record = json.dumps({"prompt": "21=", "answer": "12"})
    return g.Task(f"{number}.1.{number}", number, 1, number, record, completion="|12")


def told(message: Message, to: str = "") -> tuple[str, bytes]:
    message.sender, message.msg_seq = "keeper", 1
    return topic(type(message), to), encode(message)


def work_of(name: str, welcome: bool = True) -> list[tuple[str, bytes]]:
    """What passed the bus for one worker: its welcome, tasks with their doorbells, and what became of each."""
    life: dict[str, int] = {"life": RECORDED_LIFE, "req": 77}
    made = [told(g.GatewayWelcome(lease_s=20.0, **life), name)] if welcome else []
    for number in range(TASKS):
        made.append(told(m.DataGenerated(slot_id=number, seq=1, uid=number)))
        made.append(told(g.GatewayTasks(tasks=[task(number)], **life), name))
        answer = g.GatewayAnswer("done", about="REMOTE_REWARDED", task=task(number).task, **life)
        made.append(told(answer, name))
    return made


def recording(path: Path, messages: list[tuple[str, bytes]], every_ns: int = 5 * MS) -> Path:
    writer = Writer(path, Header(1, "ab", time.time_ns(), 0, facts=Facts(name="recorded", run_id="recorded-1")))
    for at, (topic_, body) in enumerate(messages):
        writer.add(Kind.MESSAGE, topic_.encode(), body, at * every_ns)
    writer.close()
    return path


@pytest.mark.parametrize("speed", ["1", "max"])
def test_the_python_example_does_the_recorded_work_of_its_name_and_stops_with_the_run(
    short_dir: Path, started: Start, monkeypatch: pytest.MonkeyPatch, speed: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    after = [told(m.SchedulerState(credit=number)) for number in range(300)]  # a run goes on for a moment
    path = recording(short_dir / "a.rec", [*work_of("far"), told(m.Stop(reason="the goal is reached")), *after])
    folder = short_dir / "leads-here"
    player = started("replay", str(path), "--speed", speed, "--run-dir", str(folder))
    until("its run.json", lambda: (folder / "run.json").is_file())
    assert find(str(folder)).endpoint == json.loads((folder / "run.json").read_text())["backend"]
    actor = subprocess.run(
        [sys.executable, str(ACTOR), str(folder), "far"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert f"far: {TASKS} answers judged; leaving: STOP: the goal is reached" in actor.stdout, actor
    out = finished(player)
    assert "it holds work for: far" in out and "published " in out
    assert not folder.exists()


def test_a_worker_of_another_name_is_told_the_names_that_there_is_work_for(
    short_dir: Path, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    path = recording(short_dir / "a.rec", [*work_of("far"), told(m.Stop(reason="over"))])
    started("replay", str(path), "--run-dir", str(short_dir / "here"))
    until("its run.json", lambda: (short_dir / "here" / "run.json").is_file())
    actor = subprocess.run(
        [sys.executable, str(ACTOR), str(short_dir / "here"), "near"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "near: refused: this is a replay, and its recording holds work for: far; " in actor.stderr
    assert "near: 0 answers judged" in actor.stdout


def test_a_directory_that_holds_a_run_is_left_as_it_is_and_that_of_a_killed_replay_is_taken(
    scene: Scene, short_dir: Path, started: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    path, before = recording(short_dir / "a.rec", work_of("far")), scene.state()
    assert main(["replay", str(path), "--run-dir", str(scene.paths.root)]) == 2
    assert "holds a run; a replay needs a directory of its own" in capsys.readouterr().err
    assert scene.state() == before
    folder = short_dir / "here"
    killed = started("replay", str(path), "--run-dir", str(folder))
    until("its run.json", lambda: (folder / "run.json").is_file())
    assert main(["replay", str(path), "--run-dir", str(folder)]) == 2
    assert "served by another process" in capsys.readouterr().err
    killed.kill()
    killed.wait()
    assert main(["replay", str(path), "--run-dir", str(folder), "--wait", "0.1"]) == 2
    assert "nobody listened" in capsys.readouterr().err and not (folder / "run.json").exists()


@pytest.mark.parametrize("frontend", [False, True])
def test_a_listener_without_a_ping_is_not_waited_for_once_its_subscriptions_are_quiet(
    short_dir: Path, started: Start, frontend: bool
) -> None:
    path, bind = recording(short_dir / "a.rec", work_of("far")), f"ipc://{short_dir}/sub.sock"
    more = ["--frontend", f"ipc://{short_dir}/pub.sock"] if frontend else []
    player = started("replay", str(path), "--bind", bind, "--speed", "max", "--wait", str(100 * PATIENCE_S), *more)
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.setsockopt(zmq.SUBSCRIBE, b"DATA_GENERATED/")
        listener.connect(bind)
        for number in range(TASKS):
            assert listener.poll(int(PATIENCE_S * 1000))
            assert msgspec.msgpack.decode(listener.recv_multipart()[1])["uid"] == number
    assert f"published {3 * TASKS + 1}" in finished(player)


# ------------------------------------------------------------------------------------ the stand-in by itself


def stand_in(tmp_path: Path, messages: list[tuple[str, bytes]]) -> tuple[StandIn, list[Entry]]:
    path = recording(tmp_path / f"{os.urandom(4).hex()}.rec", messages)
    with Recording(path) as read:
        return StandIn(read), list(read.entries())


def said(kind: type[g.Remote], sender: str = "far", life: int = NEW_LIFE, **fields: object) -> Frames:
    message = kind(sender=sender, msg_seq=1, life=life, req=3, **fields)
    return [topic(kind).encode(), encode(message)]


def codes(frames: list[Frames]) -> list[tuple[str, str]]:
    answers = [msgspec.msgpack.decode(one[1], type=g.GatewayAnswer) for one in frames]
    assert all((one.life, one.req) == (NEW_LIFE, 3) for one in answers)
    return [(one.task, one.code) for one in answers]


def test_tasks_come_for_the_life_that_asked_and_results_get_the_recorded_answer_whichever_is_first(
    tmp_path: Path,
) -> None:
    keeper, entries = stand_in(tmp_path, work_of("far"))
    [(where, body)] = keeper.asked(said(g.RemoteJoin, role="reward"))
    assert where == b"GATEWAY_WELCOME/far/"
    welcome = msgspec.msgpack.decode(body, type=g.GatewayWelcome)
    assert (welcome.life, welcome.req, welcome.lease_s) == (NEW_LIFE, 3, 20.0)
    _, bell, tasks, answer, *rest = entries
    assert keeper.reached(entries[0]) == [] and keeper.reached(bell) == [[bell.topic, bell.body]]
    [(where, body)] = keeper.reached(tasks)
    given = msgspec.msgpack.decode(body, type=g.GatewayTasks)
    assert given.life == NEW_LIFE and given.tasks == [task(0)] and keeper.owed
    early = said(g.RemoteRewarded, task=task(0).task, reward=1.0)
    assert keeper.asked(early) == [] == keeper.asked(early) and not keeper.owed
    assert codes(keeper.reached(answer)) == [(task(0).task, "done")]
    assert codes(keeper.asked(early)) == [(task(0).task, "done")], "a copy is answered as often as it comes"
    keeper.reached(rest[1])
    assert keeper.reached(rest[2]) == []
    assert codes(keeper.asked(said(g.RemoteFail, task=task(1).task))) == [(task(1).task, "done")]


def test_what_the_recording_does_not_answer_is_late_when_it_ends_and_a_newer_life_replaces(tmp_path: Path) -> None:
    keeper, entries = stand_in(tmp_path, work_of("far")[:3])
    keeper.asked(said(g.RemoteJoin, life=NEW_LIFE - 1, role="reward"))
    keeper.asked(said(g.RemoteJoin, role="reward"))
    [(_, body)] = keeper.asked(said(g.RemoteClaim, life=NEW_LIFE - 1))
    assert msgspec.msgpack.decode(body, type=g.GatewayAnswer).code == "replaced"
    for entry in entries:
        keeper.reached(entry)
    assert keeper.asked(said(g.RemoteRewarded, task=task(0).task, reward=1.0)) == []
    assert codes(keeper.over()) == [(task(0).task, "late")]
    assert codes(keeper.asked(said(g.RemoteRewarded, task="9.9.9", reward=1.0))) == [("9.9.9", "late")]


def test_without_its_welcome_a_reward_worker_is_let_in_and_a_rollout_worker_told_what_is_missing(
    tmp_path: Path,
) -> None:
    keeper, _ = stand_in(tmp_path, work_of("far", welcome=False))
    [(where, _)] = keeper.asked(said(g.RemoteJoin, role="reward"))
    assert where == b"GATEWAY_WELCOME/far/"
    [(where, body)] = keeper.asked(said(g.RemoteJoin, role="rollout"))
    assert b"GATEWAY_ANSWER/" in where and "record from before the worker joins" in body.decode(errors="replace")


def test_a_worker_that_joins_takes_the_place_of_the_recorded_one(tmp_path: Path) -> None:
    asked = said(g.RemoteRewarded, life=RECORDED_LIFE, task=task(0).task, reward=0.0)
    keeper, entries = stand_in(tmp_path, [*work_of("far"), (asked[0].decode(), asked[1])])
    assert keeper.reached(entries[-1]) == [asked]
    keeper.asked(said(g.RemoteJoin, role="reward"))
    assert keeper.reached(entries[-1]) == []


def test_to_whom_nobody_has_joined_as_the_recording_is_given_byte_by_byte(tmp_path: Path) -> None:
    keeper, entries = stand_in(tmp_path, [*work_of("far"), ("GATEWAY_TASKS/odd/", b"\xc1 damaged")])
    assert keeper.asked([b"REMOTE_CLAIM/", b"\xc1"]) == [] == keeper.asked([b"PING/x/", b""])
    assert [keeper.reached(entry) for entry in entries] == [[[entry.topic, entry.body]] for entry in entries]
