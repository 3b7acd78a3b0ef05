"""Stands in for the keeper's gateway in a replay: gives a worker the work that its name had in the recorded run.

Pure but for reading the recording once: messages in, messages out. Knows nothing of sockets or of time.

- Only what stands in the recording is handed out, at its own place there; nothing is claimed, leased or trained.
- A worker that joins takes the place of the recorded one: what that said is left out from then on.
- Nobody judges a result: its answer is the one that the recorded worker got for that task.
- Who joins under a name that the recording has no work for is refused, and told the names that it has.

Publishes a recording again, on an endpoint of its own: as it was, faster, or as fast as the listener reads.

Talks to a recording and to the sockets that it binds; it never connects to anything. Knows nothing of runs.

- It refuses an address that somebody serves, or that lies in the socket directory of a run.
- It begins when a listener's subscriptions are complete: one to everything (a monitor), or to a PING topic, which an
  `Endpoint` subscribes to last, or others, once no more have come for a second. Nothing is lost on the way: it waits
  for a slow listener, and ends with an error when that has read nothing for long, or when the last listener has left.
- With a frontend it also passes on what actors publish there, so that an unchanged actor finds a bus: its ping comes
  back, what it answers can be seen, and a worker of the gateway gets the work of its name. Then it does not begin for a
  monitor alone, and serves until the last listener leaves.

A directory with a run.json that leads actors to a replay, for as long as that goes on.

Talks to the file system only. Knows nothing of what is replayed, and never touches a directory that holds a run.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket as sockets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from busrl.bus.broker import EVERYTHING
from busrl.bus.endpoint import DEFAULT_HWM, DEFAULT_MAX_BYTES, configure
from busrl.bus.security import check_endpoint, private_directory, private_umask
from busrl.bus.tap import envelope_of
from busrl.errors import BadEndpoint, PeerTimeout, RunInUse, UserError
from busrl.launch.story import read_map
from busrl.monitor.recording import Drops, Entry, Kind, Recording
from busrl.monitor.sources import ReplayMark, decoded, require_ipc
from busrl.paths import SHM, RunPaths
from busrl.protocol import Message, encode, topic
from busrl.protocol import gateway as g

# -- Stands in for the keeper's gateway in a replay: gives a worker the work that its name had in the recorded run ----


Frames = list[bytes]
SENDER: Final = "replay"
GATEWAY: Final = ("GATEWAY_WELCOME", "GATEWAY_TASKS", "GATEWAY_ANSWER")
FINAL: Final = ("done", "already", "late", "not_yours")
RESULTS: Final = (g.RemoteGenerated, g.RemoteRewarded, g.RemoteFail)


def addressee(topic_: bytes) -> tuple[str, str]:
    """The message's name and whom it is for: ("GATEWAY_TASKS", "far") of `GATEWAY_TASKS/far/`."""
    name, _, to = topic_.decode(errors="replace").removesuffix("/").partition("/")
    return name, to


class StandIn:
    """`asked` takes what a worker says, `reached` a record of the recording; both give what is to be sent."""

    def __init__(self, recording: Recording) -> None:
        self.names: dict[str, g.GatewayWelcome | None] = {}  # who has work in the recording, and its first welcome
        for entry in recording.entries():
            name, to = addressee(entry.topic)
            if entry.kind == Kind.MESSAGE and name in GATEWAY and to:
                known = self.names.setdefault(to, None)
                message = decoded(name, entry.body) if known is None and name == GATEWAY[0] else None
                if isinstance(message, g.GatewayWelcome):
                    self.names[to] = message
        self.heard: set[str] = set()  # every worker that has said anything
        self._life: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._given: set[tuple[str, str]] = set()  # name and task, handed out and without a result so far
        self._codes: dict[tuple[str, str], tuple[str, str]] = {}  # the answer of the recording, once it was reached
        self._unanswered: dict[tuple[str, str], g.Remote] = {}
        self._over = False

    @property
    def owed(self) -> bool:
        """Whether a worker still has something to say to tasks that it was given."""
        return bool(self._given)

    def asked(self, frames: Frames) -> list[Frames]:
        """What a worker published; what the gateway says to that."""
        message = decoded(addressee(frames[0])[0], frames[-1])
        if not isinstance(message, g.Remote):
            return []
        self.heard.add(message.sender)
        if message.sender not in self.names:
            return self._refused(message) if isinstance(message, g.RemoteJoin) else []
        if message.life < self._life.get(message.sender, 0):
            return [self._answer(message, "replaced", text="a newer life has this name")]
        self._life[message.sender] = message.life
        if isinstance(message, g.RemoteJoin):
            return [self._welcome(message)]
        if isinstance(message, g.RemoteClaim):
            return [self._told(g.GatewayTasks(life=message.life, req=message.req), message.sender)]
        return self._result(message) if isinstance(message, RESULTS) else [self._answer(message, "done")]

    def reached(self, entry: Entry) -> list[Frames]:
        """A message of the recording; as it stands unless it is for a worker that has joined here."""
        if self._life and (envelope := envelope_of(entry.body)) is not None and envelope.sender in self._life:
            return []
        name, to = addressee(entry.topic)
        life = self._life.get(to) if name in GATEWAY else None
        if life is None:
            return [[entry.topic, entry.body]]
        message = decoded(name, entry.body)
        if isinstance(message, g.GatewayTasks) and message.tasks:
            self._given.update((to, task.task) for task in message.tasks if (to, task.task) not in self._codes)
            return [[entry.topic, self._for_this_life(entry, life)]]
        if isinstance(message, g.GatewayAnswer) and message.task and message.code in FINAL:
            self._codes.setdefault((to, message.task), (message.code, message.text))
            asked = self._unanswered.pop((to, message.task), None)
            return self._result(asked) if asked is not None else []
        return []

    def over(self) -> list[Frames]:
        """The recording has ended: what has no answer there gets `late`."""
        self._over = True
        asked, self._unanswered = list(self._unanswered.values()), {}
        return [frames for one in asked for frames in self._result(one)]

    # -- inside -------------------------------------------------------------------------------------------------

    def _result(self, message: Any) -> list[Frames]:
        key = (message.sender, message.task)
        self._given.discard(key)
        known = self._codes.get(key)
        if known is None and self._over:
            known = ("late", "the recording ends before it tells what became of this task")
        if known is None:
            self._unanswered[key] = message
            return []
        return [self._answer(message, known[0], message.task, known[1])]

    def _welcome(self, message: g.RemoteJoin) -> Frames:
        recorded = self.names[message.sender]
        if recorded is None and message.role == "rollout":
            text = (
                "this is a replay, and its recording begins after this name had joined, so it does not say which model "
                "and template its prompts have; record from before the worker joins"
            )
            return self._answer(message, "refused", text=text)
        welcome = msgspec.structs.replace(recorded or g.GatewayWelcome(life=0), life=message.life, req=message.req)
        return self._told(welcome, message.sender)

    def _refused(self, message: g.RemoteJoin) -> list[Frames]:
        names = ", ".join(sorted(self.names)[:20])
        text = (
            f"this is a replay, and its recording holds work for: {names}; take one of these names (BUSRL_NAME)"
            if names
            else "this is a replay, and its recording holds no work for workers of the gateway"
        )
        return [self._answer(message, "refused", text=text)]

    def _answer(self, message: g.Remote, code: str, task: str = "", text: str = "") -> Frames:
        about = addressee(topic(type(message)).encode())[0]
        answer = g.GatewayAnswer(code=code, life=message.life, req=message.req, about=about, task=task, text=text)
        return self._told(answer, message.sender)

    def _told(self, message: Message, to: str) -> Frames:
        where = topic(type(message), to)
        message.sender, message.msg_seq, message.time_ns = SENDER, self._next(where), time.time_ns()
        return [where.encode(), encode(message)]

    def _for_this_life(self, entry: Entry, life: int) -> bytes:
        """The recorded bytes with what names the recorded life changed; all else as it stands."""
        found = msgspec.msgpack.decode(entry.body)
        found.update(life=life, req=0, sender=SENDER, msg_seq=self._next(entry.topic.decode()))
        return msgspec.msgpack.encode(found)

    def _next(self, where: str) -> int:
        self._numbers[where] = self._numbers.get(where, 0) + 1
        return self._numbers[where]


# -- Publishes a recording again, on an endpoint of its own: as it was, faster, or as fast as the listener reads ------


STALLED_S: Final = 15.0  # longer than a listener that was stopped takes to be cut off by the transport's heartbeats
LINGER_MS: Final = 15_000
QUIET_S: Final = 1.0  # between the subscriptions of a listener that shows no sign of having all
OWED_S: Final = 5.0  # what a worker gets to answer what it was given before it is told to stop
REPLAY_TOPIC: Final = b"REPLAY/"
PING, STOP = b"PING/", b"STOP/"


class Replayer:
    """Binds at once; `run` waits for a listener and publishes. Use with `with`."""

    def __init__(self, recording: Recording, bind: str, *, frontend: str = "", speed: float = 0.0) -> None:
        """`speed` 1 is as it was, N is N times as fast, 0 as fast as the listener reads."""
        self._recording, self._speed = recording, speed
        self._bound = [bind, frontend] if frontend else [bind]
        self._messages = self._missed = 0
        self._pinged = self._spoken = self._stopped = False
        self._subscribed_at = 0.0
        self._stand_in = StandIn(recording) if frontend else None
        self._heard_by: set[bytes] = set()  # topics that somebody is subscribed to
        for endpoint in self._bound:
            refuse_if_served(endpoint)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._backend = self._socket(zmq.XPUB, bind)
        self._frontend = self._socket(zmq.XSUB, frontend) if frontend else None
        if self._frontend is not None:
            self._frontend.send(EVERYTHING)
        self._poller = zmq.Poller()
        for one in (self._backend, self._frontend):
            if one is not None:
                self._poller.register(one, zmq.POLLIN)

    @property
    def workers(self) -> list[str]:
        """Names that the recording has work for, if there is a frontend where they could ask for it."""
        return sorted(self._stand_in.names) if self._stand_in is not None else []

    def run(
        self, wait_s: float, begun: Callable[[], None] = lambda: None, published: Callable[[], None] = lambda: None
    ) -> int:
        """Wait so long for a listener, then publish everything; how many messages that were. PeerTimeout by name."""
        self._await_listener(wait_s)
        begun()
        self._mark("running")
        try:
            self._publish_all()
        except PeerTimeout:
            if self._heard_by or not self._stopped:
                raise
            return self._messages  # who leaves because the run does has seen all there is for it
        self._mark("over")
        if self._stand_in is not None:
            self._send_all(self._stand_in.over())
            published()
            with suppress(PeerTimeout):
                while True:
                    self._serve(1.0)
        return self._messages

    def close(self) -> None:
        """Let what is queued leave, and take the sockets away; idempotent."""
        if self._context.closed:
            return
        for one in (self._backend, self._frontend):
            if one is not None:
                one.close(LINGER_MS)
        self._context.term()
        for endpoint in self._bound:
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def __enter__(self) -> Replayer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        configure(made, DEFAULT_HWM, DEFAULT_MAX_BYTES)
        if kind == zmq.XPUB:
            made.setsockopt(zmq.XPUB_NODROP, 1)
            made.setsockopt(zmq.XPUB_VERBOSE, 1)
        try:
            with private_umask():
                made.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            if error.errno == errno.EADDRINUSE:
                raise _served(endpoint) from None
            raise BadEndpoint(f"{endpoint} can not be bound: {error.strerror}; choose another with --bind") from None
        return made

    def _await_listener(self, wait_s: float) -> None:
        end = time.monotonic() + wait_s
        while True:
            left = end - time.monotonic()
            self._received(min(left, QUIET_S / 4))
            if self._complete():
                return
            if left <= 0:
                if self._heard_by:  # a foreign listener, which need not have a PING topic
                    return
                raise PeerTimeout(f"nobody listened at {self._bound[0]} within {wait_s:g} s; nothing was published")

    def _complete(self) -> bool:
        """Whether a listener has all its subscriptions; with a frontend an actor's are waited for."""
        if any(one.startswith(PING) for one in self._heard_by):
            return self._pinged or self._stand_in is None
        if self._stand_in is None and b"" in self._heard_by:
            return True
        # No telling sign: some other program. One that subscribes to everything is an actor if it has spoken.
        if not (self._heard_by - {b""} or (self._heard_by and self._spoken)):
            return False
        asking = {to for name, to in map(addressee, self._heard_by) if name.startswith("GATEWAY_") and to}
        if self._stand_in is not None and not asking <= self._stand_in.heard:
            return False  # its work would be lost before it has said which life of its name it is
        return time.monotonic() - self._subscribed_at >= QUIET_S

    def _publish_all(self) -> None:
        start, first = time.monotonic(), None
        for entry in self._recording.entries():
            first = entry.at_ns if first is None else first
            if self._speed > 0:
                self._serve_until(start + (entry.at_ns - first) / 1e9 / self._speed)
            self._publish(entry)
        self._await_results()

    def _serve_until(self, due: float) -> None:
        """Pass on what actors say until it is time for the next message."""
        while True:
            left = due - time.monotonic()
            self._serve(left)
            if left <= 0:
                return

    def _serve(self, timeout_s: float) -> None:
        if any(frames[0] == EVERYTHING for frames in self._received(timeout_s)):
            self._mark("running")  # a listener that came later wants to know as well what this is
        if not self._heard_by:
            raise PeerTimeout(f"the last listener at {self._bound[0]} left after {self._messages} messages")

    def _received(self, timeout_s: float) -> list[list[bytes]]:
        """Wait for anything; subscriptions are given back, messages of actors are passed on."""
        ready = dict(self._poller.poll(max(0, min(60_000, int(timeout_s * 1000)))))
        if self._frontend is not None and self._frontend in ready:
            with suppress(zmq.Again):
                for _ in range(1024):
                    frames = self._frontend.recv_multipart(zmq.NOBLOCK)
                    self._pinged = self._pinged or frames[0].startswith(PING)
                    self._spoken = True
                    self._send(frames)
                    if self._stand_in is not None:
                        self._send_all(self._stand_in.asked(frames))
        subscriptions = []
        if self._backend in ready:
            with suppress(zmq.Again):
                for _ in range(1024):
                    subscriptions.append(self._backend.recv_multipart(zmq.NOBLOCK))
        for frames in subscriptions:
            change = self._heard_by.add if frames[0][:1] == b"\x01" else self._heard_by.discard
            change(frames[0][1:])
            self._subscribed_at = time.monotonic()
        return subscriptions

    def _publish(self, entry: Entry) -> None:
        if entry.kind == Kind.MESSAGE:
            self._messages += 1
            if self._messages % 256 == 0:
                self._serve(0.0)
            if entry.topic == STOP:
                self._await_results()
            self._send_all([[entry.topic, entry.body]] if self._stand_in is None else self._stand_in.reached(entry))
            self._stopped = self._stopped or entry.topic == STOP
        elif entry.kind == Kind.LOOK:
            self._send([entry.topic, entry.body])
        elif entry.kind == Kind.DROPS:
            self._missed = msgspec.msgpack.decode(entry.body, type=Drops).missed
            self._mark("running")

    def _await_results(self) -> None:
        """Let a worker answer what it was given, which is sooner over in a replay that goes fast."""
        end = time.monotonic() + OWED_S
        while self._stand_in is not None and self._stand_in.owed and time.monotonic() < end:
            self._serve(0.1)

    def _send_all(self, messages: list[list[bytes]]) -> None:
        for frames in messages:
            self._send(frames)

    def _mark(self, phase: str) -> None:
        facts = self._recording.header.facts
        mark = ReplayMark(phase, facts, self._speed, self._messages, self._missed)
        self._send([REPLAY_TOPIC, msgspec.msgpack.encode(mark)])

    def _send(self, frames: list[bytes]) -> None:
        while True:
            try:
                self._backend.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                if not self._backend.poll(int(STALLED_S * 1000), zmq.POLLOUT):
                    raise PeerTimeout(
                        f"a listener at {self._bound[0]} has read nothing for {STALLED_S:g} s; the replay stopped "
                        f"after {self._messages} messages"
                    ) from None


@contextmanager
def own_endpoint() -> Iterator[str]:
    """An address in a directory of this process alone, which is removed afterwards."""
    folder = private_directory(RunPaths.of("/").runtime_dir.parent / f"replay-{os.getpid()}")
    try:
        yield f"ipc://{folder}/bus.sock"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()  # if no run and no other replay is there


def refuse_if_served(endpoint: str) -> None:
    """RunInUse if somebody serves this address, or it belongs to a run: binding would take it away from them."""
    check_endpoint(require_ipc(endpoint))
    path = Path(endpoint.removeprefix("ipc://"))
    folder = path.parent.resolve()
    if re.fullmatch(r"[0-9a-f]{12}", folder.name) and list(SHM.glob(f"busrl.*.{folder.name}.ring")):
        raise RunInUse(f"{endpoint} is in the socket directory of a run; a replay needs an endpoint of its own")
    if not folder.exists():
        private_directory(folder)
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise BadEndpoint(f"{endpoint}: a file of that name exists and is no socket; choose another name")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError:  # a full queue: somebody is there who does not get round to it
            pass
    raise _served(endpoint)


def _served(endpoint: str) -> RunInUse:
    return RunInUse(f"{endpoint} is served by another process; a replay needs an endpoint of its own (--bind)")


# -- A directory with a run.json that leads actors to a replay, for as long as that goes on ---------------------------


@contextmanager
def stage(directory: Path, recording: Recording, frontend: str, backend: str) -> Iterator[None]:
    """Make the directory if it is not there, write its run.json, and take both away afterwards."""
    path = RunPaths.of(directory).run_json
    _refuse_if_used(path)
    made = not path.parent.exists()
    facts = recording.header.facts
    info = {
        "run_id": facts.run_id, "uuid": facts.uuid, "frontend": frontend, "backend": backend, "launch_pid": os.getpid(),
        "started": time.time(), "replay": str(recording.path.resolve()),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"run.json.{os.getpid()}")
        new.write_text(json.dumps(info, indent=2) + "\n")
        new.replace(path)  # whole or not there: an actor may look already
    except OSError as error:
        raise UserError(f"{path} can not be written: {error.strerror}; choose another --run-dir") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        if made:
            with suppress(OSError):  # an actor may have written there
                path.parent.rmdir()


def _refuse_if_used(path: Path) -> None:
    if not path.exists():
        return
    before = read_map(path)
    if not before.get("replay"):
        raise UserError(f"{path.parent} holds a run; a replay needs a directory of its own: --run-dir NEW")
    for key in ("frontend", "backend"):  # of a replay that was killed, or goes on
        if endpoint := before.get(key):
            refuse_if_served(str(endpoint))
