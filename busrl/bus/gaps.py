"""Counts, per sender and topic, how many messages a listener did not see.

Pure: fed with envelopes, knows nothing of sockets or time. The counts are for people and for statistics; nobody asks
for a message again, because the ring holds what it announced.

- The first message seen of a (sender, topic) is the base line: what came before it was not this listener's to hear.
- A number that is not larger than the last one is a repetition, or a new life of the sender if it was sent later.
- Memory is bounded: beyond `capacity` pairs, further ones are not followed.
"""

from __future__ import annotations

from typing import Protocol


class Numbered(Protocol):
    """What is looked at of a message; a decoded one has it, and so has its bare envelope."""

    @property
    def sender(self) -> str: ...
    @property
    def msg_seq(self) -> int: ...
    @property
    def time_ns(self) -> int: ...


class Tail(Numbered, Protocol):
    """A heartbeat, which names the last number of every topic of its sender."""

    @property
    def last_seqs(self) -> dict[str, int]: ...


class Gaps:
    """`seen` for every message; `missed`, `repeated` and `missed_by` are the result."""

    def __init__(self, capacity: int = 4096) -> None:
        self.missed = 0
        self.repeated = 0
        self.missed_by: dict[tuple[str, str], int] = {}
        self._capacity = capacity
        self._last: dict[bytes, dict[str, list[int]]] = {}  # by topic and sender: msg_seq and time_ns
        self._followed = 0

    def seen(self, topic: bytes, message: Numbered) -> None:
        """One message arrived."""
        seq, time_ns = message.msg_seq, message.time_ns
        try:
            last = self._last[topic][message.sender]
        except KeyError:
            self._follow(topic, message)
            return
        ahead = seq - last[0]
        if ahead > 1:
            self._miss(message.sender, topic, ahead - 1)
        elif ahead < 1 and time_ns <= last[1]:
            self.repeated += 1
            return
        last[0], last[1] = seq, time_ns

    def tail(self, heartbeat: Tail) -> None:
        """A heartbeat names the last number of each topic: whatever lies between was lost at the end."""
        for name, seq in heartbeat.last_seqs.items():
            topic = name.encode(errors="replace")
            last = self._last.get(topic, {}).get(heartbeat.sender)
            if last is not None and seq > last[0]:
                self._miss(heartbeat.sender, topic, seq - last[0])
                last[:] = seq, heartbeat.time_ns

    def _follow(self, topic: bytes, message: Numbered) -> None:
        if self._followed < self._capacity:
            self._followed += 1
            self._last.setdefault(topic, {})[message.sender] = [message.msg_seq, message.time_ns]

    def _miss(self, sender: str, topic: bytes, count: int) -> None:
        self.missed += count
        named = (sender, topic.decode(errors="replace"))
        self.missed_by[named] = self.missed_by.get(named, 0) + count
