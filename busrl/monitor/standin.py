"""Stands in for the keeper's gateway in a replay: gives a worker the work that its name had in the recorded run.

Pure but for reading the recording once: messages in, messages out. Knows nothing of sockets or of time.

- Only what stands in the recording is handed out, at its own place there; nothing is claimed, leased or trained.
- A worker that joins takes the place of the recorded one: what that said is left out from then on.
- Nobody judges a result: its answer is the one that the recorded worker got for that task.
- Who joins under a name that the recording has no work for is refused, and told the names that it has.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from busrl.bus.tap import envelope_of
from busrl.monitor.recording import Entry, Kind, Recording
from busrl.monitor.watcher import decoded
from busrl.protocol import Message, encode, topic
from busrl.protocol import gateway as g

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
