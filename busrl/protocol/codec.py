"""Messages to msgpack bytes and back, the list of all messages, and the topic on which each travels.

Talks to msgspec, and to the table of parts, which may have messages of their own. Knows nothing of sockets or counters.
One encoder and one decoder per message kind are made once and reused, since making them costs more than using them. A
message that is not in `ALL` is unknown to the bus.

- `decode` never raises anything but `Rejected`, whatever the bytes are: garbage, cut, nested 100,000 deep, mistyped.
- What a message may hold is bounded: its bytes by `max_bytes`, its strings, lists and maps by their types, and how deep
  an unknown field may nest by the interpreter's own limit of recursion.
- Unknown fields are ignored. An unknown `type` is a fault apart from damage, since it may come from a newer program.
- A topic is `NAME/` to everybody or `NAME/ADDRESSEE/` to one process. The broker compares prefixes byte by byte, so
  every part ends with "/": a filter for `NEW_TASK/rollout-1/` never matches `NEW_TASK/rollout-10/`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import cache
from typing import Final

import msgspec

from busrl import capabilities
from busrl.protocol.messages import CORE, MAX_NAME, VERSION, Message, name_of

# All messages, in the order of docs/protocol.md: those of the core, then those of the parts that are there.
ALL: Final[tuple[type[Message], ...]] = (*CORE, *(kind for kinds in capabilities.plugs("messages") for kind in kinds))
BY_NAME: Final[dict[str, type[Message]]] = {name_of(kind): kind for kind in ALL}


# -- topics -----


def address(process: str) -> str:
    """The form of a process name in a topic: `rollout/0` -> `rollout-0`."""
    name = process.replace("/", "-")
    if not is_address(name):
        raise ValueError(
            f"process name {process!r} cannot be part of a topic: it must be 1 to {MAX_NAME} printable ASCII "
            "characters without spaces; rename the process"
        )
    return name


def is_address(name: str) -> bool:
    """Tell whether a name from outside can be part of a topic."""
    return bool(name) and name.isascii() and name.isprintable() and not {" ", "/"} & {*name} and len(name) <= MAX_NAME


def topic(kind: type[Message] | str, to: str = "") -> str:
    """Topic of a message kind (class or wire name), for one process or, with `to=""`, for everybody."""
    name = kind if isinstance(kind, str) else name_of(kind)
    if name not in BY_NAME:
        raise ValueError(f"unknown message {name!r}: the bus knows {', '.join(sorted(BY_NAME))}")
    return f"{name}/{address(to)}/" if to else f"{name}/"


def kind_of(topic_text: str) -> type[Message]:
    """The message class that travels on a topic; ValueError for text that is no topic."""
    name, slash, rest = topic_text.partition("/")
    if name not in BY_NAME or not slash or (rest and not rest.endswith("/")):
        raise ValueError(
            f"{topic_text!r} is not a topic: write NAME/ or NAME/ADDRESSEE/ with the final slash, and a NAME of "
            f"{', '.join(sorted(BY_NAME))}"
        )
    return BY_NAME[name]


# -- bytes -----


class Fault(enum.Enum):
    """The reason why bytes were dropped; the value is the word in reports and statistics."""

    MALFORMED = "malformed"
    UNKNOWN_TYPE = "unknown type"
    WRONG_VERSION = "wrong version"
    OVERSIZE = "oversize"


class Rejected(Exception):
    """Bytes that are no message of the expected kind: the fault, the sender as far as it is known, and the reason."""

    def __init__(self, fault: Fault, sender: str, detail: str) -> None:
        super().__init__(f"{fault.value} from {sender or 'an unknown sender'}: {detail}")
        self.fault = fault
        self.sender = sender
        self.detail = detail


class _Envelope(msgspec.Struct):
    """The fields that can be read of a message whose kind is not known."""

    type: str = ""
    v: int = VERSION
    sender: str = ""


_BAD: Final = (ValueError, RecursionError, MemoryError)  # every msgspec error is a ValueError
_envelope: Final = msgspec.msgpack.Decoder(_Envelope)
encode: Final[Callable[[Message], bytes]] = msgspec.msgpack.Encoder().encode  # the msgpack map of a message


def decode(kind: type[Message], raw: bytes, max_bytes: int) -> Message:
    """The message of this kind in `raw`; `Rejected` for bytes that hold none."""
    return reader(kind, max_bytes)(raw)


@cache
def reader(kind: type[Message], max_bytes: int) -> Callable[[bytes], Message]:
    """`decode` for one kind and limit, with nothing left to look up for each message."""
    read = msgspec.msgpack.Decoder(kind).decode

    def decode_one(raw: bytes) -> Message:
        if len(raw) > max_bytes:
            raise Rejected(Fault.OVERSIZE, sender_in(raw), f"{len(raw)} bytes, the limit is {max_bytes}")
        try:
            message = read(raw)
        except _BAD as error:
            raise _explain(kind, raw, error) from None
        if message.v != VERSION:
            raise Rejected(Fault.WRONG_VERSION, message.sender, f"protocol {message.v}, this program speaks {VERSION}")
        return message

    return decode_one


def sender_in(raw: bytes) -> str:
    """The sender that the bytes claim, cut to a name's length, or "" if none can be read."""
    try:
        return _envelope.decode(raw).sender[:MAX_NAME]
    except _BAD:
        return ""


def _explain(kind: type[Message], raw: bytes, error: BaseException) -> Rejected:
    if isinstance(error, RecursionError):
        return Rejected(Fault.MALFORMED, "", "nested too deep: no field of a message is deeper than a map of a map")
    try:
        seen = _envelope.decode(raw)
    except _BAD:
        return Rejected(Fault.MALFORMED, "", str(error))
    sender = seen.sender[:MAX_NAME]
    if seen.v != VERSION:
        return Rejected(Fault.WRONG_VERSION, sender, f"protocol {seen.v}, this program speaks {VERSION}")
    if seen.type != name_of(kind):
        return Rejected(Fault.UNKNOWN_TYPE, sender, f"{seen.type[:MAX_NAME]!r} where {name_of(kind)} was expected")
    return Rejected(Fault.MALFORMED, sender, str(error))
