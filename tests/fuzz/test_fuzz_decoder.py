"""Changed messages through the whole receiving side of an endpoint: each is taken or counted, and memory is bounded."""

from __future__ import annotations

import itertools
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from busrl.bus import Endpoint
from busrl.bus.endpoint import MAX_ADDRESSED
from busrl.hosts import messages as g
from busrl.protocol import codec
from busrl.protocol import messages as m
from busrl.protocol.codec import ALL, Fault, Rejected, topic
from busrl.protocol.messages import name_of
from tests.fuzz.mutate import Mutator, golden, sample

GROWTH_BYTES = 64 << 20
LIMIT = 1 << 20
# Bounded by the size of the whole message alone: what they hold is as long as a prompt or an answer is.
PAYLOADS = {"texts", "prompt", "record", "completion", "text", "data", "tensors", "prompt_ids", "tokens", "logprobs",
            "versions", "routes"}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class HandedIn:
    """Message faults of an endpoint that give it frames of the test's in the place of what its socket receives."""

    def __init__(self) -> None:
        self.messages: Iterator[Sequence[bytes]] = iter(())
        self.all_taken = False

    def lets_out(self, topic: str) -> bool:
        return True

    def around(self, receive: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
        return lambda flags: self.next()

    def next(self) -> list[tuple[bytes, ...]]:
        messages = [tuple(frames) for frames in itertools.islice(self.messages, 100)]
        self.all_taken = not messages
        return messages

    def due_s(self) -> float:
        return math.inf


def take_all(endpoint: Endpoint, handed: HandedIn, messages: Iterator[Sequence[bytes]]) -> None:
    """Let the endpoint take every one of these messages, and forget what it gives."""
    handed.messages, handed.all_taken = messages, False
    while not handed.all_taken:
        endpoint.drain()


def changed(inputs: int, seed: int) -> Iterator[Sequence[bytes]]:
    """`inputs` changed messages, a tenth of them under a changed or another topic."""
    corpus = golden()
    mutator = Mutator(seed, [raw for _, raw in corpus])
    chance = random.Random(seed).random
    targets = [topic(kind).encode() for kind in ALL]
    for number in range(inputs):
        which = int(chance() * len(corpus))
        target = targets[which]
        if chance() < 0.1:
            target = mutator.next(target) if chance() < 0.5 else targets[int(chance() * len(targets))]
        frames = [target, mutator.next(corpus[which][1])]
        if number % 1000 == 0:
            frames = [mutator.next(frame) for frame in frames * (number // 1000 % 3 + 1)]
        yield frames or [b""]


@pytest.mark.parametrize(
    ("inputs", "seed"),
    [(20_000, 1), pytest.param(1_000_000, 2, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_changed_messages_are_taken_or_counted_and_memory_stays_bounded(tmp_path: Path, inputs: int, seed: int) -> None:
    said: list[str] = []
    sockets = f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"
    topics, handed = [topic(kind) for kind in ALL], HandedIn()
    with Endpoint("fuzz", *sockets, subscribe=topics, report=said.append, message_faults=handed) as endpoint:
        take_all(endpoint, handed, changed(2_000, seed=0))
        before, size = endpoint.faults.total(), resident_bytes()
        take_all(endpoint, handed, changed(inputs, seed))
        grown = resident_bytes() - size
    dropped = endpoint.faults.total() - before
    assert grown < GROWTH_BYTES, f"{grown >> 20} MiB more after {inputs} inputs"
    # Else the mutations say nothing.
    assert inputs / 50 < dropped < inputs * 0.98 and endpoint.faults[Fault.MALFORMED] > inputs / 50
    assert len(said) <= 1024


@pytest.mark.parametrize("kind", ALL, ids=name_of)
def test_the_valid_message_of_a_kind_is_accepted(kind: type[m.Message]) -> None:
    raw = dict(golden())[kind]
    assert isinstance(codec.decode(kind, raw, LIMIT), kind)


@pytest.mark.parametrize("depth", [1_001, 20_000, 1_000_000])
@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa0"])
def test_a_message_nested_too_deep_is_malformed_and_says_so(depth: int, level: bytes) -> None:
    raw = b"\x82\xa4type\xa7GOODBYE\xa1x" + level * depth + b"\xc0"
    with pytest.raises(Rejected, match="nested too deep") as caught:
        codec.decode(m.Goodbye, raw, 4 << 20)
    assert caught.value.fault is Fault.MALFORMED


def test_an_unknown_field_that_nests_a_little_is_ignored() -> None:
    raw = b"\x82\xa4type\xa7GOODBYE\xa1x" + b"\x91" * 100 + b"\xc0"
    assert isinstance(codec.decode(m.Goodbye, raw, LIMIT), m.Goodbye)


def unbounded(info: inspect.Type, where: str) -> set[str]:
    """Fields below a type whose strings, bytes, lists or maps have no greatest length."""
    fields: set[str] = set()
    if isinstance(info, (inspect.StrType, inspect.BytesType, inspect.ListType, inspect.DictType, inspect.AnyType)):
        fields |= {where} if getattr(info, "max_length", None) is None else set()
    if isinstance(info, inspect.ListType):
        fields |= unbounded(info.item_type, where)
    if isinstance(info, inspect.DictType):
        fields |= unbounded(info.key_type, where) | unbounded(info.value_type, where)
    if isinstance(info, inspect.UnionType):
        for alternative in info.types:
            fields |= unbounded(alternative, where)
    if isinstance(info, inspect.StructType):
        for field in info.fields:
            fields |= unbounded(field.type, field.name)
    return fields


@pytest.mark.parametrize("kind", ALL, ids=name_of)
def test_every_string_list_and_map_of_a_message_has_a_greatest_length(kind: type[m.Message]) -> None:
    assert unbounded(inspect.type_info(kind), "") <= PAYLOADS


@pytest.mark.parametrize(
    ("kind", "changes", "size"),
    [
        (m.SchedulerState, {"values": {str(n): 0.0 for n in range(m.MAX_MAP + 1)}}, "length <= 4096"),
        (m.SchedulerState, {"values": {"x" * (m.MAX_KEY + 1): 0.0}}, "length <= 256"),
        (m.Goodbye, {"reason": "x" * (m.MAX_TEXT + 1)}, "length <= 16384"),
        (g.RemoteExtend, {"holding": ["x"] * (m.MAX_MAP + 1)}, "length <= 4096"),
        (m.Hello, {"sender": "x" * (m.MAX_NAME + 1)}, "length <= 64"),
    ],
)
def test_what_is_too_long_is_malformed_with_its_limit(kind: type[m.Message], changes: dict, size: str) -> None:
    raw = msgspec.msgpack.encode({**sample(inspect.type_info(kind)), "v": 1, **changes})
    with pytest.raises(Rejected, match=size):
        codec.decode(kind, raw, LIMIT)


def test_a_header_that_promises_gigabytes_is_refused_without_room_being_made() -> None:
    raw = b"\x82\xa4type\xafSCHEDULER_STATE\xa6values\xdf\xff\xff\xff\xff"
    before = resident_bytes()
    for _ in range(100):
        with pytest.raises(Rejected):
            codec.decode(m.SchedulerState, raw, LIMIT)
    assert resident_bytes() - before < 1 << 20, sys.version


def test_pings_from_ever_new_names_cost_no_memory_and_spare_the_heartbeat(tmp_path: Path) -> None:
    sockets, handed = (f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"), HandedIn()
    with Endpoint("victim", *sockets, report=lambda _: None, message_faults=handed) as endpoint:
        target = topic(m.Ping, "victim").encode()
        pings = (codec.encode(m.Ping(token="t", sender=f"n{number}")) for number in range(5_000))
        take_all(endpoint, handed, ((target, ping) for ping in pings))
        assert 0 < len(endpoint.last_seqs()) <= MAX_ADDRESSED
        beat = m.Heartbeat(last_seqs=endpoint.last_seqs())
        assert isinstance(codec.decode(m.Heartbeat, codec.encode(beat), LIMIT), m.Heartbeat)
