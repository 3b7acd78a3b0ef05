"""The session of docs/protocol.md: what a worker without a library sends and receives, byte by byte.

Pure: made from the codec, the topics and the framing of ZMTP 3; knows nothing of libzmq. A test plays the page's bytes
on plain sockets against a real broker.

Every line is `SOCKET > hex ; words` (the worker sends) or `SOCKET < hex ; words` (the broker does).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from busrl.protocol import codec
from busrl.protocol import gateway as g
from busrl.protocol import messages as m
from busrl.protocol.explain import fields
from busrl.protocol.messages import Message
from busrl.protocol.topics import topic
from busrl.protocol.vectors import ARRAYS

WORKER: Final = "reward-9"
LIFE: Final = 1_700_000_000_000
BEGIN_NS: Final = 1_700_000_000_000_000_000
MORE, LAST, LONG, COMMAND = 1, 0, 2, 4
WIDTH: Final = 24  # bytes a line


class _Script:
    """Lines of the session; numbers the messages as endpoints do."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._seqs: dict[tuple[str, str], int] = {}
        self._time = BEGIN_NS

    def say(self, text: str) -> None:
        self.lines += ["", f"; {text}"] if self.lines else [f"; {text}"]

    def put(self, socket: str, arrow: str, raw: bytes, words: str) -> None:
        for at in range(0, len(raw), WIDTH):
            note = f" ; {words}" if at == 0 else ""
            self.lines.append(f"{socket} {arrow} {raw[at : at + WIDTH].hex(' ')}{note}")

    def message(self, socket: str, arrow: str, message: Message, sender: str, to: str = "") -> None:
        """One message: the frame of its topic, the frame of its map, field by field."""
        target = topic(message.__class__, to)
        self._seqs[sender, target] = message.msg_seq = self._seqs.get((sender, target), 0) + 1
        message.sender, message.time_ns = sender, self._time
        self._time += 1_000_000
        raw, text = codec.encode(message), target.encode()
        self.put(socket, arrow, bytes([MORE, len(text)]) + text, f'frame, more follow, {len(text)} bytes: "{target}"')
        head = bytes([LAST, len(raw)]) if len(raw) < 256 else bytes([LAST | LONG]) + len(raw).to_bytes(8, "big")
        self.put(socket, arrow, head, f"frame, the last one, {len(raw)} bytes")
        for piece, words in fields(raw):
            self.put(socket, arrow, piece, words)

    def echo(self, socket: str, since: int) -> None:
        """The broker passes on, byte for byte, what the lines from `since` on sent."""
        raw = b"".join(raw for _, _, raw in parse("\n".join(self.lines[since:])))
        self.put(socket, "<", raw, f"the same {len(raw)} bytes")


def greeting(server: bool) -> bytes:
    """ZMTP: signature, version, mechanism NULL, filler; 64 bytes."""
    signature = b"\xff" + (1 if server else 0).to_bytes(8, "big") + b"\x7f"
    return (signature + bytes([3, 1 if server else 0]) + b"NULL").ljust(64, b"\0")


def command(name: str, body: bytes) -> bytes:
    """A short ZMTP command frame."""
    text = bytes([len(name)]) + name.encode() + body
    return bytes([COMMAND, len(text)]) + text


def ready(kind: str) -> bytes:
    """READY with the one property that matters here."""
    name = b"Socket-Type"
    return command("READY", bytes([len(name)]) + name + len(kind).to_bytes(4, "big") + kind.encode())


def lines() -> list[str]:
    """The whole session."""
    script = _Script()
    _connect(script, "SUB", "XPUB", "Connect to sub.sock. Both sides greet, then say what they are.")
    _connect(script, "PUB", "XSUB", "The same on pub.sock.")
    script.say("Subscribe: a message whose first byte is 1, then the prefix. Our own PING comes last.")
    answers = [topic(kind, WORKER) for kind in (g.GatewayWelcome, g.GatewayTasks, g.GatewayAnswer)]
    for prefix in (topic(m.Stop), topic(m.DataGenerated), *answers, topic(m.Ping, WORKER)):
        script.put("SUB", ">", bytes([LAST, 1 + len(prefix), 1]) + prefix.encode(), f'subscribe "{prefix}"')
    script.say("Are we heard? A PING to ourselves, repeated until it comes back.")
    before = len(script.lines)
    script.message("PUB", ">", m.Ping(token="7c0ffee7"), WORKER, WORKER)
    script.echo("SUB", before)
    script.say("Say who we are. index 0: this process does not map the ring.")
    script.message("PUB", ">", m.Hello(role="reward", pid=4711, host="node-1"), WORKER)
    _work(script)
    script.say("The run ends. Hand back what we hold (nothing), say goodbye, close both sockets.")
    script.message("SUB", "<", m.Stop(reason="all steps are done", drain_s=10.0), "launch")
    script.message("PUB", ">", g.RemoteLeave(life=LIFE, req=4, reason="STOP"), WORKER)
    script.message("SUB", "<", g.GatewayAnswer(code="done", life=LIFE, req=4, about="REMOTE_LEAVE"), "keeper", WORKER)
    script.message("PUB", ">", m.Goodbye(reason="STOP"), WORKER)
    return script.lines


def _work(script: _Script) -> None:
    """Joining, a doorbell, one task and its answer."""
    script.say("Join the gateway; again every half second until it answers.")
    script.message("PUB", ">", g.RemoteJoin(life=LIFE, req=1, role="reward"), WORKER)
    welcome = g.GatewayWelcome(
        life=LIFE, req=1, index=9, lease_s=20.0, max_capacity=1024, max_message_bytes=1 << 20, max_prompt_tokens=64,
        model="/models/sort", prompt_key="prompt", answer_key="answer", template="none",
    )  # fmt: skip
    script.message("SUB", "<", welcome, "keeper", WORKER)
    script.say("A doorbell: three slots were GENERATED, slot 17 is the first of them. So ask for work.")
    bell = m.DataGenerated(slot_id=17, seq=41, uid=1289, version=12, count=3)
    script.message("SUB", "<", bell, "rollout-0")
    script.message("PUB", ">", g.RemoteClaim(life=LIFE, req=2, capacity=1), WORKER)
    script.say("One task. Its name is slot 17, claim 42, sample 1289; it is ours for 20 seconds.")
    script.message("SUB", "<", g.GatewayTasks(life=LIFE, req=2, tasks=[_task()]), "keeper", WORKER)
    script.say("Judge it and answer; again every half second until the keeper has said what became of it.")
    reward = g.RemoteRewarded(life=LIFE, req=3, task="17.42.1289", reward=1.0)
    script.message("PUB", ">", reward, WORKER)
    done = g.GatewayAnswer(code="done", life=LIFE, req=3, about="REMOTE_REWARDED", task="17.42.1289")
    script.message("SUB", "<", done, "keeper", WORKER)


def _task() -> g.Task:
    arrays = {name: msgspec.convert(array, g.Tensor) for name, array in ARRAYS.items()}
    return g.Task(
        task="17.42.1289", slot_id=17, seq=42, uid=1289, record='{"prompt":"312=","answer":"123"}', segment=1,
        version=12, completion="123", tensors=arrays,
    )  # fmt: skip


def _connect(script: _Script, ours: str, theirs: str, words: str) -> None:
    script.say(words)
    script.put(ours, ">", greeting(False), "greeting: signature, version 3.0, NULL, filler")
    script.put(ours, "<", greeting(True), "greeting of the broker: version 3.1")
    script.put(ours, ">", ready(ours), f'command READY, Socket-Type = "{ours}"')
    script.put(ours, "<", ready(theirs), f'command READY, Socket-Type = "{theirs}"')


def parse(text: str) -> Iterator[tuple[str, str, bytes]]:
    """(socket, arrow, bytes) of every line that holds any."""
    for line in text.splitlines():
        head, _, _ = line.partition(";")
        if head.strip():
            socket, arrow, *hexed = head.split()
            yield socket, arrow, bytes.fromhex("".join(hexed))
