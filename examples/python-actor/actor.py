"""A reward worker for a busrl run that imports nothing of busrl: pyzmq and msgpack are all it needs.

    python actor.py RUN_DIR [NAME]        (both are in the environment of a process that `launch` started)

It joins through the keeper's gateway, claims generated answers, judges them and sends rewards back. Every message may
be lost, doubled or late, and broker and keeper may die at any time. So it repeats a request until an answer comes,
identifies tasks by their names, and stores each result until the keeper has settled its task.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import zmq

CAPACITY = 64
CLAIM_S, RESEND_S, HEARTBEAT_S = 0.25, 0.5, 1.0
OVER_S = 5.0  # when the run's sockets are gone for so long, the run has ended


def judge(record: dict[str, Any], completion: str) -> float:
    """1 if the digits after the last bar are the sorted ones. Put your own reward here."""
    match = re.search(r"\|([0-9]+)$", completion)
    return float(match is not None and match[1] == str(record["answer"]))


class Actor:
    """A worker. `results` has the result that was sent for each task, until the keeper has settled it."""

    def __init__(self, run_dir: str, name: str) -> None:
        self.name, self.life = name, time.time_ns() // 1_000_000  # a later start of the same name has a larger life
        self.numbers: dict[str, int] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.sent_at: dict[str, float] = {}
        self.joined, self.stopping, self.request, self.judged = False, "", 0, 0
        run = json.loads(Path(run_dir, "run.json").read_text())
        self.socket_file = run["frontend"].removeprefix("ipc://")
        context = zmq.Context()
        self.pub, self.sub = context.socket(zmq.PUB), context.socket(zmq.SUB)
        for socket in (self.pub, self.sub):
            socket.setsockopt(zmq.LINGER, 250)
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        answers = [f"{kind}/{name}/" for kind in ("GATEWAY_WELCOME", "GATEWAY_TASKS", "GATEWAY_ANSWER")]
        for topic in ("STOP/", "DATA_GENERATED/", *answers):
            self.sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.pub.connect(run["frontend"])
        self.sub.connect(run["backend"])

    def send(self, kind: str, **fields: Any) -> None:
        """Publish one message; PUB never blocks and never fails."""
        topic = f"{kind}/"
        self.numbers[topic] = self.numbers.get(topic, 0) + 1
        envelope = {"type": kind, "v": 1, "sender": self.name, "msg_seq": self.numbers[topic]}
        self.pub.send_multipart([topic.encode(), msgpack.packb({**envelope, "time_ns": time.time_ns(), **fields})])

    def ask(self, kind: str, **fields: Any) -> None:
        """Send a request to the gateway. Its number grows, so that the gateway can ignore late copies."""
        self.request += 1
        self.send(kind, life=self.life, req=self.request, **fields)

    def claim(self) -> None:
        """Claim tasks, which extends the leases of those that are listed; before the gateway's welcome, join."""
        if self.joined:
            self.ask("REMOTE_CLAIM", capacity=CAPACITY, holding=list(self.results))
        else:
            self.send("HELLO", role="reward", pid=os.getpid(), host=os.uname().nodename)
            self.ask("REMOTE_JOIN", role="reward")

    def send_result(self, task: str) -> None:
        """Send the result of a task, the first time or again."""
        self.sent_at[task] = time.monotonic()
        self.ask("REMOTE_REWARDED", task=task, **self.results[task])

    def receive(self, message: dict[str, Any]) -> bool:
        """Act on a message; True if it is a reason to claim tasks now."""
        kind = message["type"]
        if kind == "STOP":
            self.stopping = f"STOP: {message.get('reason', '')}"
        elif kind == "DATA_GENERATED":
            return len(self.results) < CAPACITY
        elif message.get("life") not in (self.life, 0):
            return False  # an answer to an earlier life of this name
        elif kind == "GATEWAY_WELCOME":
            self.joined = True
            return True
        elif kind == "GATEWAY_TASKS":
            for task in message["tasks"]:
                self.work(task)
        elif kind == "GATEWAY_ANSWER":
            self.settle(message["code"], message["task"], message["text"])
        return False

    def work(self, task: dict[str, Any]) -> None:
        if task["task"] not in self.results:  # else a copy: its result is on the way
            self.results[task["task"]] = {"reward": judge(json.loads(task["record"]), task["completion"])}
            self.send_result(task["task"])

    def settle(self, code: str, task: str, text: str) -> None:
        if code == "unknown":
            self.joined = False  # a new keeper, or this worker was silent too long: it joins, then sends results again
        elif code == "replaced":
            self.stopping = text
        elif self.results.pop(task, None) is not None:
            self.judged += code in ("done", "already")
        if code not in ("done", "already", "late", "unknown"):
            print(f"{self.name}: {code}: {text}", file=sys.stderr, flush=True)

    def run(self) -> None:
        next_claim = next_beat = 0.0
        seen = time.monotonic()
        while not self.stopping:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + HEARTBEAT_S
                self.send("HEARTBEAT", role="reward", activity="judging", last_seqs=self.numbers)
                seen = now if os.path.exists(self.socket_file) else seen
                self.stopping = "the run is over" if now - seen > OVER_S else self.stopping
            for task in [task for task, at in self.sent_at.items() if now - at > RESEND_S]:
                self.send_result(task) if task in self.results else self.sent_at.pop(task)
            if now >= next_claim:
                next_claim = now + CLAIM_S
                self.claim()
            if self.sub.poll(50):
                rang = False
                while self.sub.poll(0):
                    rang |= self.receive(msgpack.unpackb(self.sub.recv_multipart()[1]))
                next_claim = now if rang else next_claim
        self.ask("REMOTE_LEAVE", reason=self.stopping)
        self.send("GOODBYE", reason=self.stopping)
        print(f"{self.name}: {self.judged} answers judged; leaving: {self.stopping}", flush=True)


if __name__ == "__main__":
    default = os.environ.get("BUSRL_NAME", f"python-actor-{os.getpid()}").replace("/", "-")
    run_dir, name, *_ = [*sys.argv[1:], *[os.environ.get("BUSRL_RUN_DIR", "."), default][len(sys.argv) - 1 :]]
    actor = Actor(run_dir, name)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: setattr(actor, "stopping", signal.Signals(got).name))
    actor.run()
