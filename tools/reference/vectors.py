"""The golden vectors: messages with fixed contents, their bytes, and bytes that must be refused.

Written to docs/vectors by `python -m tools.reference.protocol_page --vectors`; programs in other languages check their
codec against them. Uses `codec` for every byte of `messages.json`; knows nothing of sockets. Format: docs/messages.md.

- Every message has `minimal` (required fields only), `typical` and `wide` (large numbers, long and non-ASCII text).
- Values follow from the field's name or type, so a new message has vectors without a line here.
- JSON has no bytes and no safe integer above 2**53: they stand as {"$bin": hex} and {"$int": decimal}.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import inspect as kinds

from busrl.protocol import codec
from busrl.protocol import messages as m
from busrl.protocol.codec import ALL, BY_NAME, topic
from busrl.protocol.messages import VERSION, Message, name_of
from tools.reference.catalog import ROUTES, Reach, described

SENDER: Final = "rollout-0"
TIME_NS: Final = 1_700_000_000_123_456_789
LIMIT: Final = 1 << 20
SAFE: Final = 1 << 53
Make = Callable[[str, kinds.Type], Any]  # (MESSAGE.field, its type) -> a sample value
UNICODE: Final = "aß水🚌"  # 1, 2, 3 and 4 bytes of UTF-8

TASK: Final = "17.41.1289"
SECRET: Final = b"0123456789abcdef" * 4  # of the control.key by which the typical CONTROL is proved
ASKED: Final = m.Control(
    id="8f1d0c5e", verb="set", key="learner.lr", value="1e-06", who="alice (pid 4711, busrl set)"
)


def _array(dtype: str, values: Sequence[float]) -> dict[str, Any]:
    form = {"int32": "i", "uint32": "I", "float32": "f"}[dtype]
    return {"dtype": dtype, "shape": [len(values)], "data": struct.pack(f"<{len(values)}{form}", *values)}


ARRAYS: Final = {
    "prompt_ids": _array("int32", [1, 14, 12, 13, 2]), "tokens": _array("int32", [12, 13, 14, 2]),
    "logprobs": _array("float32", [-0.125, -0.5, 0.0, -0.25]), "versions": _array("uint32", [12, 12, 12, 12]),
}
PROBE = {
    "prompt_ids": _array("int32", [1, 14, 12, 13, 2])["data"], "tokens": _array("int32", [12, 13, 14, 2])["data"],
    "logprobs": _array("float32", [-0.125, -0.5, 0.0, -0.25])["data"],
    "versions": _array("uint32", [12, 12, 12, 12])["data"],
}
EXPERTS = {
    "routes": {"dtype": "uint8", "shape": [4, 2, 1], "data": bytes([0, 3, 2, 1] * 2)},
    "prompt_routes": {"dtype": "uint8", "shape": [4, 2, 1], "data": bytes([1, 0] * 4)},
}
TYPICAL: Final[dict[str, Any]] = {
    "REMOTE_JOIN.routes": True, "GATEWAY_WELCOME.routes": [2, 1, 4], "REMOTE_ROUTED.text": "123",
    "REMOTE_BATCH.routes": [EXPERTS], **{f"REMOTE_ROUTED.{name}": routes for name, routes in EXPERTS.items()},
    "worker_id": "rollout-0", "capacity": 8, "rows": 64, "slot_id": 17, "seq": 41, "uid": 1289, "count": 3,
    "version": 12, "step": 12, "round": 12, "samples": 64, "groups": 8, "role": "rollout", "pid": 4711,
    "host": "node-1", "index": 5, "activity": "compile", "last_seqs": {"TASK_REQUEST/": 7, "HEARTBEAT/": 31},
    "token": "8f1d0c5e", "reason": "all steps are done", "drain_s": 10.0, "severity": "warning", "where": "reward",
    "text": "sample 1289 raised", "traceback": "", "transport": "shm",
    "waiting": "credit", "mean": 0.8125, "set": "math", "figures": {"val/pass@4": 0.875},
    "reward": 0.75, "entropy": 1.5, "metrics": {"loss": 0.25}, "values": {"credit": 4.0}, "status": "generated",
    "admitted": 96, "open_groups": 12, "queued": 30, "free": 128, "credit": 4, "age_mean": 1.25,
    "life": 1_700_000_000_000, "req": 3, "task": TASK, "holding": [TASK], "lost": [TASK], "finish": 1, "done": True,
    "drop": "raised", "parts": {"length": 0.5}, "lease_s": 20.0, "max_capacity": 1024, "max_message_bytes": LIMIT,
    "max_prompt_tokens": 64, "seed": 0, "GATEWAY_WELCOME.model": "/models/sort", "model": "judge",
    "prompt_key": "prompt", "answer_key": "answer", "template": "none",
    "code": "done", "about": "REMOTE_REWARDED", "GATEWAY_ANSWER.text": "", "segment": 0,
    "attempt": 1, "max_new_tokens": 32, "segment_tokens": 16, "temperature": 1.0, "top_p": 1.0,
    "id": ASKED.id, "verb": ASKED.verb, "key": ASKED.key, "value": ASKED.value, "who": ASKED.who,
    "proof": ASKED.proof_with(SECRET), "control": 512, "ok": True, "waits": ["learner"],
    "CONTROL_DONE.text": "learner.lr = 1e-06, it was 2e-06",
    "record": '{"prompt":"312=","answer":"123"}',
    "completion": "123", "REMOTE_GENERATED.text": "123", "tensors": ARRAYS, **ARRAYS,
    "LEARNER_STATE_UPDATE.tokens": 5321, "at": 3, "ids": [12, 13, 14], "kind": "", "stream": 0, "stop": [],
    "cls": 0, "priority": -3, "admission": 17, "ring": "4f0c1a2b3c4d5e6f708192a3b4c5d6e7",
    **{f"{kind}.{name}": data for name, data in PROBE.items() for kind in ("PROBE_DRAWN", "PROBE_ROUTED")},
    "PROBE_ROUTED.routes": bytes([0, 3, 2, 1] * 8), "temperatures": [1.0],
    "REMOTE_BATCH.tasks": [TASK], "lengths": [4], "prompt_lengths": [5],
    "finishes": [1], "steps": [16], "texts": ["123"], "rewards": [0.75], "GATEWAY_SETTLED.done": [TASK],
}
WIDE: Final[dict[str, Any]] = {"seq": (1 << 36) - 1, "uid": (1 << 62) + SAFE + 1}


# -- messages.json: what busrl writes -----


def samples() -> Iterator[tuple[str, Message]]:
    """Every message in three sizes, the envelope filled in with fixed values, and with what may be left out."""
    for kind in ALL:
        absent = [field.name for field in described(kind) if may_be_absent(field)]
        for size, make in (("minimal", _minimal), ("typical", _typical), ("wide", _wide), ("whole", _typical)):
            fields = _fields(kind, make, required_only=size == "minimal")
            if size != "whole":
                fields = {name: value for name, value in fields.items() if name not in absent}
            elif not absent:
                continue
            message = msgspec.convert({"type": name_of(kind), **fields}, kind)
            message.sender, message.msg_seq, message.time_ns = SENDER, 1, TIME_NS
            yield f"{name_of(kind)}.{size}", message


def may_be_absent(field: kinds.Field) -> bool:
    """Tell whether a sender leaves the field out of its map, where it has nothing to say."""
    return not field.required and field.default is field.default_factory is msgspec.NODEFAULT


def messages() -> list[dict[str, Any]]:
    """The vectors of messages.json."""
    return [
        {
            "name": name,
            "topic": topic(type(message), "rollout-0" if ROUTES[type(message)].reach is Reach.ONE else ""),
            "hex": codec.encode(message).hex(),
            "map": plain(as_map(message)),
        }
        for name, message in samples()
    ]


def as_map(message: Message) -> dict[str, Any]:
    """The fields as they go to the wire, bytes and large integers as they are."""
    found: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return found


def plain(value: Any) -> Any:
    """A value as JSON can hold it without loss; `natural` is the way back."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bin": bytes(value).hex()}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > SAFE:
        return {"$int": str(value)}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def natural(value: Any) -> Any:
    """What `plain` made, turned back."""
    if isinstance(value, dict):
        if set(value) == {"$bin"}:
            return bytes.fromhex(value["$bin"])
        if set(value) == {"$int"}:
            return int(value["$int"])
        return {key: natural(one) for key, one in value.items()}
    return [natural(one) for one in value] if isinstance(value, list) else value


# -- variants.json: what other encoders may write, and means the same -----


def variants() -> list[dict[str, Any]]:
    """Bytes that busrl never writes and must read as the named message of messages.json."""
    return [{"name": name, "equals": equals, "hex": raw.hex()} for name, equals, raw in _variants()]


def _variants() -> Iterator[tuple[str, str, bytes]]:
    by_name = dict(samples())
    for name in BY_NAME:
        fields = as_map(by_name[f"{name}.typical"])
        yield f"{name}.unknown_field", f"{name}.typical", _pack(fields | {"from_tomorrow": [1, {"x": None}]})
        yield f"{name}.keys_reversed", f"{name}.typical", _pack(dict(reversed(fields.items())))
        minimal = as_map(by_name[f"{name}.minimal"])
        asked = {"type", "sender", "msg_seq", "time_ns", *_required(BY_NAME[name])}
        yield f"{name}.defaults_left_out", f"{name}.minimal", _pack({k: v for k, v in minimal.items() if k in asked})
    reward = as_map(by_name["REWARD_COMPUTED.typical"])
    yield "REWARD_COMPUTED.float_32", "REWARD_COMPUTED.typical", _with(reward, "reward", "ca3f400000")
    yield "REWARD_COMPUTED.uint_64", "REWARD_COMPUTED.typical", _with(reward, "slot_id", "cf0000000000000011")
    long_text = "db00000009" + SENDER.encode().hex()
    yield "REWARD_COMPUTED.str_32", "REWARD_COMPUTED.typical", _with(reward, "sender", long_text)
    zero = as_map(by_name["REWARD_COMPUTED.minimal"])
    yield "REWARD_COMPUTED.integer_for_float", "REWARD_COMPUTED.minimal", _with(zero, "reward", "00")


def _with(fields: dict[str, Any], name: str, hexed: str) -> bytes:
    """The map with one value replaced by raw bytes, under a map-32 header."""
    body = b"".join(_pack(key) + (bytes.fromhex(hexed) if key == name else _pack(one)) for key, one in fields.items())
    return b"\xdf" + len(fields).to_bytes(4, "big") + body


# -- rejected.json: what must be dropped and counted -----


def rejected() -> list[dict[str, Any]]:
    """Bytes on the topic of `message` that hold none, with the fault that a receiver counts."""
    return [
        {"name": name, "message": message, "hex": raw.hex(), "fault": _fault(BY_NAME[message], raw)}
        for name, message, raw in _rejected()
    ]


def _rejected() -> Iterator[tuple[str, str, bytes]]:
    request = as_map(dict(samples())["TASK_REQUEST.typical"])
    whole = _pack(request)
    wrong: dict[str, bytes] = {
        "no_bytes": b"",
        "cut_in_the_middle": whole[:-3],
        "bytes_after_the_map": whole + b"\xc0",
        "an_array": _pack(list(request)),
        "the_reserved_byte_c1": b"\xc1",
        "a_length_of_4_gigabytes": bytes.fromhex("dfffffffff"),
        "a_newer_protocol": _pack(request | {"v": VERSION + 1}),
        "another_message": _pack(request | {"type": "NEW_TASK"}),
        "an_unknown_type": _pack(request | {"type": "FROM_TOMORROW"}),
        "a_required_field_is_missing": _pack({key: one for key, one in request.items() if key != "worker_id"}),
        "text_for_a_number": _pack(request | {"capacity": "8"}),
        "a_float_for_an_integer": _pack(request | {"capacity": 8.0}),
        "nil_for_text": _pack(request | {"worker_id": None}),
        "a_negative_count": _pack(request | {"capacity": -1}),
        "a_name_of_65_characters": _pack(request | {"worker_id": "x" * (m.MAX_NAME + 1)}),
        "text_that_is_no_utf8": _with(request, "worker_id", "a2c328"),
        "bytes_for_text": _with(request, "worker_id", "c40177"),
        "a_key_that_is_no_text": b"\x81\x01\xc3",
    }
    for name, raw in wrong.items():
        yield name, "TASK_REQUEST", raw


def _fault(kind: type[Message], raw: bytes) -> str:
    try:
        codec.decode(kind, raw, LIMIT)
    except codec.Rejected as rejected:
        return rejected.fault.value
    raise ValueError(f"{raw.hex()} should be refused as {name_of(kind)} and is accepted")


# -- values that follow from a field -----


def _fields(kind: type[Message], make: Make, required_only: bool) -> dict[str, Any]:
    envelope = Message.__struct_fields__
    return {
        field.name: make(f"{name_of(kind)}.{field.name}", field.type)
        for field in described(kind)
        if field.name not in envelope and (field.required or not required_only)
    }


def _required(kind: type[Message]) -> list[str]:
    return [field.name for field in described(kind) if field.required]


def _minimal(place: str, kind: kinds.Type) -> Any:
    return _value(place, kind, _Size("", 0, 0.0, False, b"", 0), _minimal)


def _typical(place: str, kind: kinds.Type) -> Any:
    name = place.rpartition(".")[2]
    for value in (TYPICAL.get(place), TYPICAL.get(name)):
        if value is not None and _fits(value, kind):
            return value
    return _value(place, kind, _Size(name, 7, 0.5, True, b"\1\2\3\4", 1), _typical)


def _wide(place: str, kind: kinds.Type) -> Any:
    name = place.rpartition(".")[2]
    if name in WIDE and isinstance(kind, kinds.IntType):
        return WIDE[name]
    return _value(place, kind, _Size(UNICODE * 80, (1 << 64) - 1, -1.5e308, True, bytes(range(256)) * 2, 20), _wide)


class _Size(NamedTuple):
    """What a sample value is made of."""

    text: str
    number: int
    real: float
    flag: bool
    raw: bytes
    repeat: int


_PYTHON: Final[dict[type, type]] = {
    kinds.IntType: int, kinds.FloatType: float, kinds.StrType: str, kinds.BoolType: bool, kinds.BytesType: bytes,
    kinds.DictType: dict, kinds.ListType: list,
}


def _fits(value: Any, kind: kinds.Type) -> bool:
    """A new message may use a known name for another type; then the sample follows from the type."""
    if isinstance(kind, kinds.UnionType):
        return any(_fits(value, one) for one in kind.types)
    if isinstance(kind, kinds.StructType):
        return isinstance(value, dict) and set(value) == {field.name for field in kind.fields}
    return type(value) is _PYTHON.get(type(kind))


def _value(place: str, kind: kinds.Type, size: _Size, make: Make) -> Any:
    """A value of a described type; TypeError for a type that no message may have."""
    if isinstance(kind, kinds.StrType):
        return size.text[: kind.max_length]
    if isinstance(kind, kinds.IntType):
        return min(size.number, kind.le) if kind.le is not None else max(size.number, kind.ge or 0)
    if isinstance(kind, (kinds.FloatType, kinds.BoolType)):
        return size.real if isinstance(kind, kinds.FloatType) else size.flag
    if isinstance(kind, kinds.BytesType):
        return size.raw[: kind.max_length]
    if isinstance(kind, (kinds.ListType, kinds.VarTupleType)):
        return [make(place, kind.item_type) for _ in range(_repeat(size, kind.item_type, kind.max_length))]
    if isinstance(kind, kinds.DictType):
        many = _repeat(size, kind.value_type, kind.max_length)
        return {f"{size.text[:8]}{i}": make(place, kind.value_type) for i in range(many)}
    if isinstance(kind, kinds.UnionType):
        return make(place, next(one for one in kind.types if not isinstance(one, kinds.NoneType)))
    if isinstance(kind, kinds.StructType):
        given = [field for field in kind.fields if not may_be_absent(field)]
        return {field.name: make(f"{kind.cls.__name__}.{field.name}", field.type) for field in given}
    raise TypeError(f"{place}: {type(kind).__name__} has no sample value; tools/reference/vectors.py makes them")


def _repeat(size: _Size, inner: kinds.Type, most: int | None) -> int:
    """Many plain values, few records: a record is large."""
    many = min(size.repeat, 2) if isinstance(inner, kinds.StructType) else size.repeat
    return min(many, most if most is not None else many)


def _pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


# -- files -----


def files() -> dict[str, str]:
    """File name -> text. One vector a line, so that a change shows as a line."""
    made = {"messages": messages(), "variants": variants(), "rejected": rejected()}
    return {f"{name}.json": _lines(vectors) for name, vectors in made.items()}


def _lines(made: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in made) + "\n]\n"
