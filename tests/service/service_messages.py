"""Messages of clients, written field by field, a reader of the answers that clients get, and what the SDK sent."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from busrl.service.wire import CODES, DTYPES, Message, counted, number, sized

RECORDED = Path(__file__).with_name("recorded.json")


class Recorded(NamedTuple):
    """A body that tinker 0.38.0 sent (or an answer that protobuf wrote), and its Content-Encoding."""

    route: str
    body: bytes
    encoding: str


def recorded(route: str = "") -> list[Recorded]:
    """What was recorded of a route; of all of them without one."""
    entries = json.loads(RECORDED.read_text())
    bodies = [
        Recorded(entry["route"], base64.b64decode(entry["base64"]) if "base64" in entry else entry["text"].encode(),
                 entry.get("encoding", ""))
        for entry in entries
    ]
    return [body for body in bodies if route in ("", body.route)]


# -- requests -----


def tensor(array: Any, shape: tuple[int, ...] | None = None) -> bytes:
    array = np.ascontiguousarray(array)
    axes = array.shape if shape is None else shape
    return sized(1, array.tobytes()) + counted(3, CODES[array.dtype]) + sized(4, *map(axis, axes))


def axis(size: int) -> bytes:
    return number(size % 2**64)


def sparse(values: Any, rows: Any, columns: Any, shape: tuple[int, ...]) -> bytes:
    """A matrix as compressed rows."""
    values = np.asarray(values)
    parts = sized(1, values.tobytes()), sized(2, ints(rows)), sized(3, ints(columns))
    return sized(2, *parts) + counted(3, CODES[values.dtype]) + sized(4, *map(axis, shape))


def ints(values: Any) -> bytes:
    return np.asarray(values, np.int64).tobytes()


def compressed(matrix: Any) -> bytes:
    """A matrix as compressed rows of what is not 0."""
    rows, columns = np.nonzero(matrix)
    offsets = np.searchsorted(rows, np.arange(len(matrix) + 1))
    return sparse(matrix[rows, columns], offsets, columns, matrix.shape)


def chunk(tokens: Any) -> bytes:
    return sized(1, sized(1, sized(1, np.asarray(tokens, np.int32).tobytes())))


def loss_input(name: str, value: bytes) -> bytes:
    return sized(2, sized(1, name.encode()), sized(2, value))


def datum(tokens: Any, **inputs: Any) -> bytes:
    """A datum with its inputs: arrays, or tensors that are written already."""
    written = [
        loss_input(name, value if isinstance(value, bytes) else tensor(value)) for name, value in inputs.items()
    ]
    return chunk(tokens) + b"".join(written)


def request(
    *data: bytes, model: str = "s:train:0", seq: int = 1, loss: str = "ppo", config: Mapping[str, Any] | None = None,
    forward_only: bool = False,
) -> bytes:
    """A forward_backward as a client sends it."""
    parts = [sized(1, model.encode()), counted(2, seq % 2**64), *(sized(3, part) for part in data)]
    parts.append(sized(4, loss.encode()))
    for name, value in (config or {}).items():
        if isinstance(value, str):
            parts.append(sized(7, sized(1, name.encode()), sized(2, sized(2, value.encode()))))
        else:
            double = struct.pack("<d", value)
            parts.append(sized(5, sized(1, name.encode()), b"\x11" + double))
            parts.append(sized(7, sized(1, name.encode()), sized(2, b"\x09" + double)))
    return b"".join(parts) + (counted(6, 1) if forward_only else b"")


# -- answers -----


class Sampled(NamedTuple):
    stopped: bool
    tokens: list[int]
    logprobs: list[float]
    topk: tuple[Any, Any] | None


def parts(body: bytes) -> Iterator[tuple[int, Any]]:
    """Number and content of each field of an answer."""
    for key, start, stop in Message(body).fields(0, len(body)):
        yield key >> 3, start if key & 7 == 0 else body[start:stop]


def read_forward_backward_result(answer: bytes) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The arrays of each datum, and the metrics."""
    outputs: list[dict[str, Any]] = []
    metrics = {}
    for field, value in parts(answer):
        if field == 2:
            outputs += _record(value)
        elif field == 3:
            entry = dict(parts(value))
            (metrics[entry[1].decode()],) = struct.unpack("<d", entry[2])
    return outputs, metrics


def _record(record: bytes) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = [{} for _ in range(dict(parts(record))[3])]
    for field, value in parts(record):
        if field == 2:
            entry = dict(parts(value))
            batch = dict(parts(entry[2]))
            trailing = varints(batch.get(4, b""))
            offsets = np.frombuffer(batch[2], np.int64)
            for output, start, stop in zip(outputs, offsets, offsets[1:]):
                flat = np.frombuffer(batch[1][start:stop], DTYPES[batch[3]])
                output[entry[1].decode()] = flat.reshape(-1, *trailing)
    return outputs


def varints(packed: bytes) -> list[int]:
    """The numbers of a run of small varints."""
    return list(packed)


def read_sample_result(answer: bytes) -> tuple[list[Sampled], dict[str, Any]]:
    """The sequences, and what was asked for of the prompt."""
    sequences, prompt = [], {}
    for field, value in parts(answer):
        if field == 1:
            entry = dict(parts(value))
            topk = _topk(entry[4]) if 4 in entry else None
            tokens, logprobs = np.frombuffer(entry[2], np.int32), np.frombuffer(entry[3], np.float32)
            sequences.append(Sampled(entry.get(1, 0) == 0, tokens.tolist(), logprobs.tolist(), topk))
        elif field == 2:
            prompt["logprobs"] = np.frombuffer(value, np.float32)
        elif field == 3:
            prompt["topk"] = _topk(value)
        elif field == 4:
            prompt["cache_hits"] = value
        elif field == 5:
            entry = dict(parts(value))
            prompt["targets"], prompt["sparse"] = _matrix(entry)
    return sequences, prompt


def _matrix(entry: dict[int, Any]) -> tuple[Any, bool]:
    """A tensor of float32, and whether it came as compressed rows, whose other cells are 0 here."""
    shape = varints(entry[4])
    if 1 in entry:
        return np.frombuffer(entry[1], np.float32).reshape(shape), False
    cells = dict(parts(entry[2]))
    rows, columns = (np.frombuffer(cells[field], np.int64) for field in (2, 3))
    matrix = np.zeros(shape, np.float32)
    matrix[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = np.frombuffer(cells[1], np.float32)
    return matrix, True


def _topk(message: bytes) -> tuple[Any, Any]:
    entry = dict(parts(message))
    shape = entry[4], entry[3]
    return np.frombuffer(entry[1], np.int32).reshape(shape), np.frombuffer(entry[2], np.float32).reshape(shape)
