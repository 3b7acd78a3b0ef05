"""The binary messages of a service: `forward_backward` as a request, its result, and that of sampling.

Reads and writes protobuf by hand. Knows the fields of the messages, nothing of HTTP, models or losses.

- What the interface does not name is ignored: other numbers, and known numbers of another kind.
- Time and memory are bounded: `MOST_FIELDS` in a request, `DENSE_BYTES` of tensors, the caller's limit for zstd.
- A fault below the outermost level is a `BadBody` with the request's model and number: its future fails, with no gap.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.service.bodies import IDENTIFIER, LAST_NUMBER, BadBody, TooLarge

Array = npt.NDArray[Any]
Bounds = tuple[int, int]  # of a field's bytes in the body

MOST_DATA, MOST_INPUTS, MOST_SETTINGS, MOST_AXES, MOST_FIELDS = 1024, 16, 64, 2, 1 << 19
DENSE_BYTES: Final = 256 << 20  # of all tensors of a request
PIECE: Final = 512  # bytes of zstd at a time: each block of 4 bytes may become 128 KiB
WINDOW: Final = 1 << 27

VARINT, EIGHT, SIZED, FOUR = 0, 1, 2, 5  # kinds of fields; the key of a field is number << 3 | kind
WIDTHS = {EIGHT: 8, FOUR: 4}
MODEL_ID, SEQ_ID, DATA, LOSS_FN, CONFIG, FORWARD_ONLY, CONFIG_V2 = 0x0A, 0x10, 0x1A, 0x22, 0x2A, 0x30, 0x3A
MODEL_INPUT, LOSS_FN_INPUTS = 0x0A, 0x12
ENCODED_TEXT, IMAGE, DMEL, TOKENS = 0x0A, 0x12, 0x1A, 0x0A
DENSE, SPARSE, DTYPE, SHAPE, UNPACKED_SHAPE = 0x0A, 0x12, 0x18, 0x22, 0x20
VALUES, ROWS, COLUMNS = 0x0A, 0x12, 0x1A
KEY, VALUE, DOUBLE_VALUE, NUMBER_V2, TEXT_V2 = 0x0A, 0x12, 0x11, 0x09, 0x12

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
DTYPES: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4"), BFLOAT16: np.dtype("<u2"),
}
CODES: dict[np.dtype[Any], int] = {np.dtype(np.float32): FLOAT32, np.dtype(np.int64): INT64, np.dtype(np.int32): INT32}


@dataclass(frozen=True, eq=False)
class Datum:
    """A sequence to train on: token ids, int32 (n,), and what its loss needs, by name: (n,) or (n, k) each."""

    tokens: Array
    inputs: dict[str, Array]


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """A request for gradients, or with `forward_only` for log-probabilities alone."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool


class SampledSequence(NamedTuple):
    """A sample: ids (n,) and their log-probabilities (n,); `topk`: likeliest ids and log-probabilities, (n, k) each."""

    stopped: bool
    tokens: Array
    logprobs: Array
    topk: tuple[Array, Array] | None = None


class CompressedRows(NamedTuple):
    """A matrix of float32 of which some cells are listed: their values, offsets of its rows, columns of the cells."""

    values: Array
    rows: Array
    columns: Array
    shape: tuple[int, ...]


# -- fields -----


def varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, 64 bits without a sign, and the place behind it."""
    if at + 1 < end and body[at + 1] < 128 <= body[at]:  # two bytes, as most sizes have
        return (body[at] & 127) | body[at + 1] << 7, at + 2
    value = shift = 0
    while at < end and shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise BadBody("", "a number that does not end", "send a whole message")


class Message:
    """The bytes of a message and of those in it. All of them have at most MOST_FIELDS fields, so that small ones
    without number cannot keep a process busy."""

    def __init__(self, body: bytes) -> None:
        self.body, self._left = body, MOST_FIELDS

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield key, start and stop of each field of the message in body[at:end]; of a varint its value as start."""
        body = self.body
        while at < end:
            key = body[at]
            at += 1
            if key > 127:
                key, at = varint(body, at - 1, end)
            kind = key & 7
            if kind == SIZED:
                size = body[at] if at < end else 128
                start = at + 1
                if size > 127:
                    size, start = varint(body, at, end)
                at = start + size
            elif kind == VARINT:
                start, at = varint(body, at, end)
            elif kind in WIDTHS:
                start, at = at, at + WIDTHS[kind]
            else:
                raise BadBody("", f"a field of kind {kind}", "send protobuf")
            if at > end:
                raise BadBody("", "a field that is longer than its message", "send a whole message")
            self._left -= 1
            if self._left < 0:
                raise BadBody("", f"more than {MOST_FIELDS} fields", "join chunks, or send several requests")
            yield key, start, at

    def text(self, start: int, stop: int, field: str) -> str:
        try:
            return self.body[start:stop].decode()
        except UnicodeDecodeError:
            raise BadBody(field, "no UTF-8", "send text") from None

    def double(self, start: int) -> float:
        (value,) = struct.unpack_from("<d", self.body, start)
        return float(value)

    def array(self, start: int, stop: int, dtype: np.dtype[Any], field: str) -> Array:
        """A copy of the numbers in body[start:stop]: those in the body are not aligned."""
        count, rest = divmod(stop - start, dtype.itemsize)
        if rest:
            raise BadBody(field, f"{stop - start} bytes are no whole number of {dtype.name}", "send whole numbers")
        aligned: Array = np.frombuffer(self.body, dtype, count, start).copy()
        return aligned


# -- forward_backward -----


@dataclass
class _Outline:
    """The outermost level of a request, where each datum lies in its body, and how many there are."""

    model_id: str = ""
    seq_id: int = 0
    loss_fn: str = ""
    forward_only: bool = False
    count: int = 0


def read_forward_backward(body: bytes) -> ForwardBackward:
    """A request from its bytes. BadBody: it cannot be read; has the model and number if those could."""
    message = Message(body)
    outline, places, settings = _outlined(message)
    if not IDENTIFIER.fullmatch(outline.model_id):
        raise BadBody("model_id", f"{outline.model_id[:100]!r} is no id of a model", "send one of create_model")
    if not 1 <= outline.seq_id <= LAST_NUMBER:
        raise BadBody("seq_id", f"{outline.seq_id} is not within 1 and {LAST_NUMBER}", "number requests from 1")
    try:
        if not 1 <= outline.count <= MOST_DATA:
            raise BadBody("data", f"{outline.count} data; 1 to {MOST_DATA} in one request", "send several requests")
        config, data = _config(message, settings), _data(message, places)
    except BadBody as problem:
        problem.request = outline.model_id, outline.seq_id
        raise
    return ForwardBackward(
        outline.model_id, outline.seq_id, data, outline.loss_fn, config, outline.forward_only
    )


def _outlined(message: Message) -> tuple[_Outline, list[Bounds], list[tuple[int, int, int]]]:
    """The outermost level, the places of at most MOST_DATA data, and those of the settings of the loss."""
    outline = _Outline()
    places: list[Bounds] = []
    settings: list[tuple[int, int, int]] = []
    for key, start, stop in message.fields(0, len(message.body)):
        if key == DATA:
            outline.count += 1
            if outline.count <= MOST_DATA:
                places.append((start, stop))
            elif outline.model_id and outline.seq_id:
                break  # what is behind cannot make it right
        elif key == MODEL_ID:
            outline.model_id = message.text(start, stop, "model_id")
        elif key == SEQ_ID:
            outline.seq_id = start
        elif key == LOSS_FN:
            outline.loss_fn = message.text(start, min(stop, start + 100), "loss_fn")
        elif key == FORWARD_ONLY:
            outline.forward_only = bool(start)
        elif key in (CONFIG, CONFIG_V2) and len(settings) <= 2 * MOST_SETTINGS:
            settings.append((key, start, stop))
    return outline, places, settings


def _config(message: Message, settings: Sequence[tuple[int, int, int]]) -> dict[str, float | str]:
    """The settings of a loss; those of the second version win."""
    if len(settings) > 2 * MOST_SETTINGS:
        raise BadBody("loss_fn_config", f"more than {MOST_SETTINGS} settings", "send those of the loss")
    versions: dict[int, dict[str, float | str]] = {CONFIG: {}, CONFIG_V2: {}}
    for version, at, end in settings:
        name, value = "", 0.0
        setting: float | str
        for key, start, stop in message.fields(at, end):
            if key == KEY:
                name = message.text(start, stop, "loss_fn_config")
            elif key == DOUBLE_VALUE and version == CONFIG:
                value = message.double(start)
        setting = value if version == CONFIG else _setting(message, at, end)
        versions[version][name] = setting
    return versions[CONFIG] | versions[CONFIG_V2]


def _setting(message: Message, at: int, end: int) -> float | str:
    """The value of an entry of the second version: a number or a text."""
    setting: float | str = 0.0
    for outer, start, stop in message.fields(at, end):
        if outer != VALUE:
            continue
        for key, first, last in message.fields(start, stop):
            if key == NUMBER_V2:
                setting = message.double(first)
            elif key == TEXT_V2:
                setting = message.text(first, last, "loss_fn_config")
    return setting


def _data(message: Message, places: Sequence[Bounds]) -> list[Datum]:
    data, size = [], 0
    for index, (start, stop) in enumerate(places):
        try:
            datum = _datum(message, start, stop)
        except BadBody as problem:
            raise problem.within(f"data[{index}]") from None
        data.append(datum)
        size += sum(array.nbytes for array in datum.inputs.values())
        if size > DENSE_BYTES:
            raise BadBody("data", f"tensors of more than {DENSE_BYTES >> 20} MiB", "send several requests")
    return data


def _datum(message: Message, at: int, end: int) -> Datum:
    chunks: list[Array] = []
    inputs: dict[str, Array] = {}
    for key, start, stop in message.fields(at, end):
        if key == MODEL_INPUT:
            chunks.append(_chunk(message, start, stop))
        elif key == LOSS_FN_INPUTS:
            name, value = _input(message, start, stop)
            if name in inputs:
                raise BadBody(f"loss_fn_inputs[{name!r}]", "given twice", "send each input once")
            inputs[name] = value
        if len(inputs) > MOST_INPUTS:
            raise BadBody("loss_fn_inputs", f"more than {MOST_INPUTS}", "send those of the loss")
    if len(chunks) == 1:
        return Datum(chunks[0], inputs)
    return Datum(np.concatenate(chunks) if chunks else np.zeros(0, np.int32), inputs)


def _chunk(message: Message, at: int, end: int) -> Array:
    """Token ids of a piece of a sequence, int32 (n,)."""
    tokens = at, at
    for key, start, stop in message.fields(at, end):
        if key == ENCODED_TEXT:
            for inner, first, last in message.fields(start, stop):
                if inner == TOKENS:
                    tokens = first, last
        elif key in (IMAGE, DMEL):
            raise BadBody("model_input", "images and audio are not served here", "send encoded_text")
    return message.array(*tokens, DTYPES[INT32], "model_input")


def _input(message: Message, at: int, end: int) -> tuple[str, Array]:
    """An entry of loss_fn_inputs."""
    name, place = "", (at, at)
    for key, start, stop in message.fields(at, end):
        if key == KEY:
            name = message.text(start, min(stop, start + 100), "loss_fn_inputs")
        elif key == VALUE:
            place = start, stop
    try:
        return name, _tensor(message, *place)
    except BadBody as problem:
        raise problem.within(f"loss_fn_inputs[{name!r}]") from None


def _tensor(message: Message, at: int, end: int) -> Array:
    """A tensor as int64 or float32 of at most two axes; a sparse one is unfolded."""
    code, shape = 0, []
    dense, sparse = (at, at), (0, 0)
    for key, start, stop in message.fields(at, end):
        if key == DENSE:
            dense, sparse = (start, stop), (0, 0)
        elif key == DTYPE:
            code = start
        elif key == SHAPE:
            shape += _packed(message, start, stop)
        elif key == SPARSE:
            sparse = start, stop
        elif key == UNPACKED_SHAPE:
            shape.append(start)
        if len(shape) > MOST_AXES:
            raise BadBody("shape", f"more than {MOST_AXES} axes", "send one or two")
    if code not in DTYPES:
        raise BadBody("dtype", f"{code} is not 1 (float32), 2 (int64), 3 (int32) or 4 (bfloat16)", "send one of them")
    if sparse[1]:
        return _unfolded(message, sparse, code, shape)
    array = _widened(message.array(*dense, DTYPES[code], "dense"), code)
    if shape and (math.prod(shape) != array.size or max(shape) > DENSE_BYTES):
        raise BadBody("shape", f"{_shown(shape)} is not that of {array.size} numbers", "send the tensor's own")
    return array.reshape(shape) if len(shape) > 1 else array


def _packed(message: Message, at: int, end: int) -> list[int]:
    """A run of numbers: the first few, which are enough to see that there are too many."""
    numbers: list[int] = []
    while at < end and len(numbers) <= MOST_AXES:
        value, at = varint(message.body, at, end)
        numbers.append(value)
    return numbers


def _widened(array: Array, code: int) -> Array:
    """Numbers of a type that clients may send, as float32 or int64."""
    if code == BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.int64) if code == INT32 else array


def _unfolded(message: Message, place: Bounds, code: int, shape: list[int]) -> Array:
    """A matrix from its compressed rows; cells that are not listed are 0."""
    values = rows = columns = np.zeros(0, np.int64)
    for key, start, stop in message.fields(*place):
        if key == VALUES:
            values = _widened(message.array(start, stop, DTYPES[code], "values"), code)
        elif key == ROWS:
            rows = message.array(start, stop, DTYPES[INT64], "crow_indices")
        elif key == COLUMNS:
            columns = message.array(start, stop, DTYPES[INT64], "col_indices")
    if len(shape) != 2 or math.prod(shape) * 8 > DENSE_BYTES or shape[1] > DENSE_BYTES:
        raise BadBody("shape", f"{_shown(shape)} of a sparse tensor is not that of a matrix of at most "
                      f"{DENSE_BYTES >> 20} MiB", "send two axes, or several requests")
    if rows.size != shape[0] + 1 or rows[0] != 0 or rows[-1] != columns.size or (rows[1:] < rows[:-1]).any():
        raise BadBody("crow_indices", f"{rows.size} offsets do not rise from 0 to the {columns.size} columns in "
                      f"{shape[0]} steps", "send compressed rows (CSR)")
    if values.size != columns.size:
        raise BadBody("values", f"{values.size} values for {columns.size} columns", "send one for each")
    if columns.size and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise BadBody("col_indices", f"a column is outside of 0 to {shape[1] - 1}", "send columns of the shape")
    return _scattered(np.repeat(np.arange(shape[0]), np.diff(rows)), columns, values, shape, code)


def _scattered(rows: Array, columns: Array, values: Array, shape: list[int], code: int) -> Array:
    cells = rows * shape[1] + columns
    if np.unique(cells).size != cells.size:
        raise BadBody("col_indices", "a cell is listed twice", "send each cell once")
    matrix = np.zeros(shape, np.float32 if code in (FLOAT32, BFLOAT16) else np.int64)
    matrix.reshape(-1)[cells] = values
    return matrix


def _shown(shape: Iterable[int]) -> str:
    signed = (axis - (1 << 64) if axis >> 63 else axis for axis in shape)
    return f"({', '.join(map(str, signed))})"


# -- results -----


def number(value: int) -> bytes:
    """A varint: seven bits a byte, the lowest first."""
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    written.append(value)
    return bytes(written)


def sized(field: int, *parts: bytes) -> bytes:
    """A field of bytes: a text, a tensor's data, a message."""
    return b"".join((number(field << 3 | SIZED), number(sum(map(len, parts))), *parts))


def counted(field: int, value: int) -> bytes:
    """A field with a number from 0."""
    return number(field << 3 | VARINT) + number(value)


def write_forward_backward_result(outputs: Sequence[Mapping[str, Array]], metrics: Mapping[str, float]) -> bytes:
    """The answer to a forward_backward: for each datum arrays of float32, int64 or int32 by name, and metrics.

    ValueError: a name of a metric without exactly one colon, at which the SDK splits it.
    """
    if unsplit := [name for name in metrics if name.count(":") != 1]:
        raise ValueError(f"the metric {unsplit[0]!r} has not exactly one colon")
    parts = [sized(1, b"ArrayRecord")]
    first = 0
    for index in range(1, len(outputs) + 1):  # a record holds neighbours of the same names, types and widths
        if index == len(outputs) or _layout(outputs[index]) != _layout(outputs[first]):
            parts.append(sized(2, _record(outputs[first:index])))
            first = index
    for name, value in metrics.items():
        parts.append(sized(3, sized(1, name.encode()), number(2 << 3 | EIGHT), struct.pack("<d", value)))
    return b"".join(parts)


def _layout(output: Mapping[str, Array]) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    return [(name, array.dtype, array.shape[1:]) for name, array in output.items()]


def _record(outputs: Sequence[Mapping[str, Array]]) -> bytes:
    parts = [sized(1, b"ArrayRecord")]
    for name, first in outputs[0].items():
        arrays = [np.ascontiguousarray(output[name]) for output in outputs]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
        values = b"".join(array.tobytes() for array in arrays)
        batch = [sized(1, values), sized(2, offsets), counted(3, CODES[first.dtype])]
        if first.ndim > 1:
            batch.append(sized(4, *map(number, first.shape[1:])))
        parts.append(sized(2, sized(1, name.encode()), sized(2, *batch)))
    return b"".join((*parts, counted(3, len(outputs))))


def write_sample_result(
    sequences: Iterable[SampledSequence | tuple[bool, Array, Array, tuple[Array, Array] | None]],
    prompt_logprobs: Array | None = None, topk_prompt: tuple[Array, Array] | None = None,
    target_prompt_logprobs: Array | CompressedRows | None = None, cache_hits: int = 0,
) -> bytes:
    """The answer to a request for samples. `prompt_logprobs`: (n,), NaN where there is none; `topk_prompt`: ids and
    log-probabilities, (n, k) each; `target_prompt_logprobs`: (n - 1, k); `cache_hits`: tokens of the prompt."""
    parts = [sized(1, *_sequence(*sequence)) for sequence in sequences]
    if prompt_logprobs is not None:
        parts.append(sized(2, np.asarray(prompt_logprobs, "<f4").tobytes()))
    if topk_prompt is not None:
        parts.append(sized(3, *_topk(*topk_prompt)))
    if cache_hits:
        parts.append(counted(4, cache_hits))
    if target_prompt_logprobs is not None:
        shape = sized(4, *map(number, target_prompt_logprobs.shape))
        parts.append(sized(5, _cells(target_prompt_logprobs), counted(3, FLOAT32), shape))
    return b"".join(parts)


def _cells(matrix: Array | CompressedRows) -> bytes:
    """The numbers of a tensor of float32."""
    if not isinstance(matrix, CompressedRows):
        return sized(1, np.ascontiguousarray(matrix, "<f4").tobytes())
    values, rows, columns, _ = matrix
    return sized(2, sized(1, np.asarray(values, "<f4").tobytes()), sized(2, np.asarray(rows, "<i8").tobytes()),
                 sized(3, np.asarray(columns, "<i8").tobytes()))


def _sequence(
    stopped: bool, tokens: Array, logprobs: Array, topk: tuple[Array, Array] | None = None
) -> Iterator[bytes]:
    yield counted(1, 0 if stopped else 1)
    yield sized(2, np.asarray(tokens, "<i4").tobytes())
    yield sized(3, np.asarray(logprobs, "<f4").tobytes())
    if topk is not None:
        yield sized(4, *_topk(*topk))


def _topk(ids: Array, logprobs: Array) -> tuple[bytes, ...]:
    length, width = ids.shape
    return (sized(1, np.asarray(ids, "<i4").tobytes()), sized(2, np.asarray(logprobs, "<f4").tobytes()),
            counted(3, width), counted(4, length))


# -- meaning and packing -----

UNMEANT: Final = "sampling_session_seq_id"  # another one each time the SDK repeats a save


def digest(operation: str, asked: ForwardBackward | msgspec.Struct | Mapping[str, Any] | bytes) -> bytes:
    """A hash of what is asked for, the same however a client writes it when it asks again: 32 bytes.

    `bytes` is for a body that could not be read.
    """
    hasher = hashlib.sha256(operation.encode() + b"\0")
    if isinstance(asked, bytes):
        hasher.update(asked)
    elif isinstance(asked, ForwardBackward):
        hasher.update(_sorted([asked.loss_fn, asked.config, asked.forward_only, len(asked.data)]))
        heads: dict[tuple[str, str, tuple[int, ...]], bytes] = {}  # few differ, and each costs more than its array
        for datum in asked.data:
            for name, array in (("", datum.tokens), *sorted(datum.inputs.items())):
                kind = name, array.dtype.char, array.shape
                if kind not in heads:
                    heads[kind] = f"{name} {array.dtype.str} {array.shape}\0".encode()
                hasher.update(heads[kind])
                hasher.update((array if array.flags.c_contiguous else np.ascontiguousarray(array)).data)
    else:
        meant = asked if isinstance(asked, Mapping) else msgspec.to_builtins(asked)
        hasher.update(_sorted({name: value for name, value in meant.items() if name != UNMEANT}))
    return hasher.digest()


def _sorted(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def unpack(body: bytes, limit: int) -> bytes:
    """Unpack a frame of zstd. TooLarge: more than `limit` bytes; BadBody: no whole frame, or no zstandard here."""
    try:
        import zstandard
    except ImportError:
        raise BadBody("Content-Encoding", "zstd cannot be read here: zstandard is not installed",
                      "send the body as it is, or install busrl[service]") from None
    stream = zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj()
    unpacked, size = [], 0
    try:
        for at in range(0, len(body), PIECE):
            unpacked.append(stream.decompress(body[at:at + PIECE]))
            size += len(unpacked[-1])
            if size > limit:
                raise TooLarge("body", f"more than {limit} bytes when unpacked", "send several requests")
    except zstandard.ZstdError as problem:
        raise BadBody("body", f"no zstd: {problem}", "send a whole frame") from None
    if not stream.eof or stream.unused_data:
        raise BadBody("body", "not exactly one frame of zstd", "send a whole frame")
    return b"".join(unpacked)
