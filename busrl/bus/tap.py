"""Every message of the bus, as bytes with its envelope, read at the tap of a broker or at a replay.

Talks to one SUB socket. Decodes no more than the envelope, so that messages of newer programs and damaged ones are seen
as well. Knows nothing of runs or files.

- It subscribes to everything, but at the tap, not on the bus: no publisher notices it.
- It never sends. Its queue is short, so what it does not read in time is dropped for it alone; the senders' own
  numbers show how many those were (`gaps.missed`).
- `reopen` gives up what is queued, for a listener that prefers what is sent now.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import zmq

from busrl.bus.endpoint import DEFAULT_MAX_BYTES, NOBLOCK, Gaps, configure, open_wire
from busrl.bus.security import check_endpoint

QUEUE: Final = 4096  # messages on this side of the wire


class Envelope(msgspec.Struct):
    """What every message carries; `last_seqs` is filled in heartbeats alone."""

    type: str = ""
    v: int = 0
    sender: str = ""
    msg_seq: int = 0
    time_ns: int = 0
    last_seqs: dict[str, int] = {}


class TapMessage(NamedTuple):
    """One message as it came; `envelope` is None if its bytes hold none."""

    topic: bytes
    body: bytes
    envelope: Envelope | None

    @property
    def name(self) -> str:
        """The message's name, from its topic: `NEW_TASK` of `NEW_TASK/rollout-0/`."""
        return self.topic.partition(b"/")[0].decode(errors="replace")


_decode: Final = msgspec.msgpack.Decoder(Envelope).decode


class Tap:
    """`take` what has come, `wait` for more; `gaps` and `malformed` count what was lost and what was none."""

    def __init__(self, endpoint: str, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        check_endpoint(endpoint)
        self.endpoint, self._max_bytes = endpoint, max_bytes
        self.malformed = 0
        self.gaps = Gaps()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open()

    def take(self, limit: int = 4096) -> list[TapMessage]:
        """What is here already, `limit` messages and at most as many more as the wire gives at once."""
        came: list[TapMessage] = []
        while len(came) < limit and (messages := self._wire.receive(NOBLOCK)):
            # One frame: a subscription on its way to the publishers.
            came += [self._seen(frames[0], frames[1]) for frames in messages if len(frames) == 2]
        return came

    def wait(self, timeout_s: float, *others: int) -> bool:
        """Whether a message is here within the time; one of the descriptors `others` ends the wait as well."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for other in others:
            poller.register(other, zmq.POLLIN)
        return any(ready is self._socket for ready, _ in poller.poll(max(0, int(timeout_s * 1000))))

    def reopen(self) -> None:
        """Drop what is queued for us here and at the other end, and listen on from now."""
        self._shut()
        self._open()

    def close(self) -> None:
        self._shut()
        self._context.term()

    def _shut(self) -> None:
        self._wire.close()
        self._socket.close(0)

    def _open(self) -> None:
        self._socket = socket = self._context.socket(zmq.SUB)
        configure(socket, QUEUE, self._max_bytes)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(self.endpoint)
        self._wire = open_wire(socket, socket)

    def _seen(self, topic: bytes, body: bytes) -> TapMessage:
        try:
            envelope = _decode(body)
        except (ValueError, RecursionError, MemoryError):
            self.malformed += 1
            return TapMessage(topic, body, None)
        self.gaps.seen(topic, envelope)
        if envelope.last_seqs:
            self.gaps.tail(envelope, envelope.last_seqs)
        return TapMessage(topic, body, envelope)
