"""The binary messages of a service: `forward_backward` as a request, its result, and that of sampling.

Reads and writes protobuf by hand. Knows the fields of the messages, nothing of HTTP, models or losses.

- What the interface does not name is ignored: other numbers, and known numbers of another kind.
- Time and memory are bounded: `MOST_FIELDS` in a request, `DENSE_BYTES` of tensors, the caller's limit for zstd. Of a
  text its beginning is read: none that means something is longer.
- A fault behind the request's model and number is a `BadBody` that has them: its future fails, with no gap.
"""

from __future__ import annotations

import hashlib
import math
import struct
from codecs import utf_8_decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from busrl._fields import Reader
from busrl.service.bodies import IDENTIFIER, LAST_NUMBER, BadBody, TooLarge
from busrl.service.columns import TOKENS, Columns, Datum, written_of

Array = npt.NDArray[Any]
Bounds = tuple[int, int]  # of a field's bytes in the body

MOST_DATA, MOST_INPUTS, MOST_SETTINGS, MOST_AXES, MOST_FIELDS = 1024, 16, 64, 2, 1 << 19
MOST_TEXT: Final = 100  # bytes of a name or a setting
MOST_ID: Final = 400  # more than an id may have
DENSE_BYTES: Final = 256 << 20  # of all tensors of a request
PIECE: Final = 512  # bytes of zstd at a time: each block of 4 bytes may become 128 KiB
WINDOW: Final = 1 << 27

VARINT, EIGHT, SIZED = 0, 1, 2  # kinds of fields; the key of a field is number << 3 | kind
MODEL_ID, SEQ_ID, DATA, LOSS_FN, CONFIG, FORWARD_ONLY, CONFIG_V2 = 0x0A, 0x10, 0x1A, 0x22, 0x2A, 0x30, 0x3A
MODEL_INPUT, LOSS_FN_INPUTS = 0x0A, 0x12
ENCODED_TEXT, IMAGE, DMEL, TOKENS_OF_TEXT = 0x0A, 0x12, 0x1A, 0x0A
DENSE, SPARSE, DTYPE, SHAPE, UNPACKED_SHAPE = 0x0A, 0x12, 0x18, 0x22, 0x20
VALUES, ROWS, COLUMNS = 0x0A, 0x12, 0x1A
KEY, VALUE, DOUBLE_VALUE, NUMBER_V2, TEXT_V2 = 0x0A, 0x12, 0x11, 0x09, 0x12

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
DTYPES: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4"), BFLOAT16: np.dtype("<u2"),
}
CODES: dict[np.dtype[Any], int] = {np.dtype(np.float32): FLOAT32, np.dtype(np.int64): INT64, np.dtype(np.int32): INT32}


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """A request for gradients, or with `forward_only` for log-probabilities alone."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool

    @property
    def tokens(self) -> int:
        """Tokens of all its data."""
        return self.data.tokens if isinstance(self.data, Columns) else sum(len(datum.tokens) for datum in self.data)

    @property
    def held_bytes(self) -> int:
        """Bytes of the arrays of its data that are not in its body: those that were read one by one."""
        data = () if isinstance(self.data, Columns) else self.data
        return sum(array.nbytes for datum in data for array in (datum.tokens, *datum.inputs.values()))


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


FAULTS: Final = {  # of `_fields.Reader`: what is told of them, and the remedy
    1: ("a number that does not end", "send a whole message"),
    2: ("a field of kind {}", "send protobuf"),
    3: ("a field that is longer than its message", "send a whole message"),
    4: ("more than {} fields", "join chunks, or send several requests"),
}


def _fault(kind: int, number: int) -> BadBody:
    rule, remedy = FAULTS[kind]
    return BadBody("", rule.format(number), remedy)


class NoRoom(BadBody):
    """A body whose tensors are too large."""


class Message:
    """The bytes of a message and of those in it. All of them have at most so many fields, so that small ones without
    number cannot keep a process busy.

    `fields(at, end)`: key, start and stop of each field of the message in body[at:end]; of a varint its value as start.
    `numbers(at, end, most)`: the varints there, the first `most` of them. `rows(bounds)`: for messages that begin and
    end at the pairs of `bounds` (int64) the fields of all of them, as the number of the message, key, start and stop;
    None where there is a fault, of which `fields` has the words. `room`: bytes of all tensors that are looked at one by
    one, DENSE_BYTES if it is None.
    """

    def __init__(self, body: bytes, most: int | None = None, room: int | None = None) -> None:
        self.body, self._reader = body, Reader(body, MOST_FIELDS if most is None else most, _fault)
        self.fields, self.numbers, self.rows = self._reader.fields, self._reader.numbers, self._reader.rows
        self._room = DENSE_BYTES if room is None else room

    def again(self) -> Message:
        """Another one of these bytes, which may have as many fields from here on; this one counts none of them."""
        return Message(self.body, self._reader.left)

    def merged(self, places: Sequence[Bounds]) -> Iterator[tuple[int, int, int]]:
        """Fields of a message that comes in pieces, which make one."""
        if len(places) == 1:
            return self.fields(*places[0])
        return chain.from_iterable(self.fields(at, end) for at, end in places)

    def take(self, size: int) -> None:
        """Have room for a tensor. NoRoom: there are too many."""
        self._room -= size
        if self._room < 0:
            raise NoRoom("", f"tensors of more than {DENSE_BYTES >> 20} MiB in all", "send several requests")

    def text(self, start: int, stop: int, field: str, most: int = MOST_TEXT) -> str:
        """A text, or its first bytes without a character that is cut."""
        try:
            text, _ = utf_8_decode(self.body[start : min(stop, start + most)], "strict", stop - start <= most)
        except UnicodeDecodeError:
            raise BadBody(field, "no UTF-8", "send text") from None
        return text

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


def read_forward_backward(body: bytes, room: int | None = None) -> ForwardBackward:
    """A request from its bytes. BadBody: it cannot be read; has the model and number if those could. NoRoom: its
    tensors unfold into more than `room` bytes."""
    message, outline = Message(body, room=room), _Outline()
    try:
        places, settings = _outlined(message, outline)
        _require_number(outline)
        if not 1 <= outline.count <= MOST_DATA:
            raise BadBody("data", f"{outline.count} data; 1 to {MOST_DATA} in one request", "send several requests")
        config, data = _config(message, settings), _data(message, places)
    except BadBody as problem:
        with suppress(BadBody):
            _require_number(outline)
            problem.request = outline.model_id, outline.seq_id
        raise
    return ForwardBackward(
        outline.model_id, outline.seq_id, data, outline.loss_fn, config, outline.forward_only
    )


def _require_number(outline: _Outline) -> None:
    if not IDENTIFIER.fullmatch(outline.model_id):
        raise BadBody("model_id", f"{outline.model_id[:100]!r} is no id of a model", "send one of create_model")
    if not 1 <= outline.seq_id <= LAST_NUMBER:
        raise BadBody("seq_id", f"{outline.seq_id} is not within 1 and {LAST_NUMBER}", "number requests from 1")


def _outlined(message: Message, outline: _Outline) -> tuple[list[Bounds], list[tuple[int, int, int]]]:
    """Read the outermost level; returns the places of at most MOST_DATA data, and those of the settings of the loss."""
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
            outline.model_id = message.text(start, stop, "model_id", MOST_ID)
        elif key == SEQ_ID:
            outline.seq_id = start
        elif key == LOSS_FN:
            outline.loss_fn = message.text(start, stop, "loss_fn")
        elif key == FORWARD_ONLY:
            outline.forward_only = bool(start)
        elif key in (CONFIG, CONFIG_V2) and len(settings) <= 2 * MOST_SETTINGS:
            settings.append((key, start, stop))
    return places, settings


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


def _data(message: Message, places: Sequence[Bounds]) -> Sequence[Datum]:
    try:
        return _columns(message.again(), places)
    except (BadBody, UnicodeDecodeError, _Otherwise):
        return _one_by_one(message, places)


def _one_by_one(message: Message, places: Sequence[Bounds]) -> list[Datum]:
    """Data of any form. BadBody names the first that is none, and its field."""
    data = []
    for index, (start, stop) in enumerate(places):
        try:
            data.append(_datum(message, start, stop))
        except BadBody as problem:
            raise problem.within(f"data[{index}]") from None
    return data


class _Otherwise(Exception):
    """Data that are not of the form that most requests have, or at fault."""


def _require(fact: object) -> None:
    if not fact:
        raise _Otherwise


class _Table:
    """All fields of some messages, which lie at the pairs of `bounds`. _Otherwise: one of them is at fault."""

    def __init__(self, message: Message, bounds: Array) -> None:
        found = message.rows(np.ascontiguousarray(bounds))
        _require(found is not None)
        rows = np.frombuffer(found or b"", np.int64).reshape(-1, 4)
        self.owners: Array = rows[:, 0]
        self.keys: Array = rows[:, 1]
        self.bounds: Array = rows[:, 2:]
        self._count = len(bounds)

    def each(self, key: int) -> Array:
        """The field with this key of each message. _Otherwise: one has none, or several."""
        found = self.keys == key
        _require(np.array_equal(self.owners[found], np.arange(self._count)))
        bounds: Array = self.bounds[found]
        return bounds


def _columns(message: Message, places: Sequence[Bounds]) -> Columns:
    """Data as most clients send them, read all together: in one chunk, and all with the same inputs, which are dense
    vectors of float32 or int64 as long as the tokens. _Otherwise, BadBody: they are not like that."""
    data = _Table(message, np.array(places, np.int64))
    chunks = _Table(message, data.each(MODEL_INPUT))
    _require(not np.isin(chunks.keys, (IMAGE, DMEL)).any())
    tokens = _Table(message, chunks.each(ENCODED_TEXT)).each(TOKENS_OF_TEXT)
    lengths, rest = np.divmod(tokens[:, 1] - tokens[:, 0], DTYPES[INT32].itemsize)
    _require(not rest.any())
    inputs = data.keys == LOSS_FN_INPUTS
    entries = _Table(message, data.bounds[inputs])
    names, order = _in_order(message, entries.each(KEY), data.owners[inputs], len(places))
    dtypes, starts = _vectors(message, entries.each(VALUE)[order], lengths)
    starts = np.column_stack([tokens[:, 0], starts])
    return Columns(message.body, (TOKENS, *names), (DTYPES[INT32], *dtypes), lengths, starts)


def _in_order(message: Message, places: Array, owners: Array, count: int) -> tuple[list[str], Array]:
    """Names of the inputs, the same for each of `count` data, and the order that sorts entries by datum and name."""
    written = [message.body[start:stop] for start, stop in places.tolist()]
    names = sorted(set(written))
    _require(0 < len(names) <= MOST_INPUTS and max(map(len, names)) <= MOST_TEXT and names[0])
    numbers = {name: number for number, name in enumerate(names)}
    cells = owners * len(names) + np.array([numbers[name] for name in written])
    order = np.argsort(cells)
    _require(np.array_equal(cells[order], np.arange(count * len(names))))
    return [name.decode() for name in names], order


def _vectors(message: Message, places: Array, lengths: Array) -> tuple[list[np.dtype[Any]], Array]:
    """Type of each input, and where the vectors of each datum begin; `places` of tensors, by datum and input."""
    tensors, count = _Table(message, places), len(lengths)
    _require(not np.isin(tensors.keys, (SPARSE, UNPACKED_SHAPE)).any())
    codes = tensors.each(DTYPE)[:, 0].reshape(count, -1)
    _require((codes == codes[0]).all() and np.isin(codes[0], (FLOAT32, INT64)).all())
    dtypes = [DTYPES[code] for code in codes[0].tolist()]
    dense = tensors.each(DENSE).reshape(count, -1, 2)
    sizes = lengths[:, None] * np.array([dtype.itemsize for dtype in dtypes])
    _require((dense[..., 1] - dense[..., 0] == sizes).all() and sizes.sum() <= DENSE_BYTES)
    shapes = [message.numbers(start, stop, 2) for start, stop in tensors.each(SHAPE).tolist()]
    _require(shapes == [[length] for length in lengths.repeat(len(dtypes)).tolist()])
    return dtypes, dense[..., 0]


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
                if inner == TOKENS_OF_TEXT:
                    tokens = first, last
        elif key in (IMAGE, DMEL):
            raise BadBody("model_input", "images and audio are not served here", "send encoded_text")
    return message.array(*tokens, DTYPES[INT32], "model_input")


def _input(message: Message, at: int, end: int) -> tuple[str, Array]:
    """An entry of loss_fn_inputs."""
    name, places = "", list[Bounds]()
    for key, start, stop in message.fields(at, end):
        if key == KEY:
            name = message.text(start, stop, "loss_fn_inputs")
        elif key == VALUE:
            places.append((start, stop))
    try:
        return name, _tensor(message, places)
    except BadBody as problem:
        raise problem.within(f"loss_fn_inputs[{name!r}]") from None


def _tensor(message: Message, places: Sequence[Bounds]) -> Array:
    """A tensor as int64 or float32 of at most two axes; a sparse one is unfolded."""
    code, shape = 0, []
    dense, sparse = (0, 0), list[Bounds]()
    for key, start, stop in message.merged(places):
        if key == DENSE:
            dense, sparse = (start, stop), []
        elif key == DTYPE:
            code = start
        elif key == SHAPE:
            shape += message.numbers(start, stop, MOST_AXES + 1)
        elif key == SPARSE:
            sparse.append((start, stop))
        elif key == UNPACKED_SHAPE:
            shape.append(start)
        if len(shape) > MOST_AXES:
            raise BadBody("shape", f"more than {MOST_AXES} axes", "send one or two")
    if code not in DTYPES:
        raise BadBody("dtype", f"{code} is not 1 (float32), 2 (int64), 3 (int32) or 4 (bfloat16)", "send one of them")
    if sparse:
        return _unfolded(message, sparse, code, shape)
    array = _widened(message.array(*dense, DTYPES[code], "dense"), code)
    message.take(array.nbytes)
    if shape and (math.prod(shape) != array.size or max(shape) > DENSE_BYTES):
        raise BadBody("shape", f"{_shown(shape)} is not that of {array.size} numbers", "send the tensor's own")
    return array.reshape(shape) if len(shape) > 1 else array


def _widened(array: Array, code: int) -> Array:
    """Numbers of a type that clients may send, as float32 or int64."""
    if code == BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.int64) if code == INT32 else array


def _unfolded(message: Message, places: Sequence[Bounds], code: int, shape: list[int]) -> Array:
    """A matrix from its compressed rows; cells that are not listed are 0."""
    values = rows = columns = np.zeros(0, np.int64)
    for key, start, stop in message.merged(places):
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
    message.take(math.prod(shape) * (4 if code in (FLOAT32, BFLOAT16) else 8))
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
        for written in written_of(asked.data):
            hasher.update(written)
    else:
        meant = asked if isinstance(asked, Mapping) else msgspec.to_builtins(asked)
        hasher.update(_sorted({name: value for name, value in meant.items() if name != UNMEANT}))
    return hasher.digest()


def _sorted(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def unpacked_bytes(body: bytes, limit: int) -> int:
    """Bytes that a frame of zstd is unpacked to at most: what it says, or `limit` where it says nothing. TooLarge: more
    than `limit`; BadBody: no frame, or no zstandard here."""
    try:
        told: int = _zstandard().frame_content_size(body)
    except _zstandard().ZstdError as problem:
        raise BadBody("body", f"no zstd: {problem}", "send a whole frame") from None
    if told > limit:
        raise TooLarge("body", f"more than {limit} bytes when unpacked", "send several requests")
    return told if told >= 0 else limit


def unpack(body: bytes, limit: int) -> bytes:
    """Unpack a frame of zstd, to `unpacked_bytes` at most and with its faults. BadBody: the frame is not whole."""
    zstandard, most = _zstandard(), unpacked_bytes(body, limit)
    unpacker = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    try:
        if zstandard.frame_content_size(body) > 0:  # at once, into memory of that size
            whole: bytes = unpacker.decompress(body, allow_extra_data=False)
            return whole
        return _streamed(unpacker.decompressobj(), body, most)
    except zstandard.ZstdError as problem:
        raise BadBody("body", f"no zstd: {problem}", "send a whole frame") from None


def _streamed(stream: Any, body: bytes, limit: int) -> bytes:
    """Unpack a frame that does not say how much it holds."""
    unpacked, size = [], 0
    for at in range(0, len(body), PIECE):
        unpacked.append(stream.decompress(body[at:at + PIECE]))
        size += len(unpacked[-1])
        if size > limit:
            raise TooLarge("body", f"more than {limit} bytes when unpacked", "send several requests")
    if not stream.eof or stream.unused_data:
        raise BadBody("body", "not exactly one frame of zstd", "send a whole frame")
    return b"".join(unpacked)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise BadBody("Content-Encoding", "zstd cannot be read here: zstandard is not installed",
                      "send the body as it is, or install busrl[service]") from None
    return zstandard
