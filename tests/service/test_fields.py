"""The compiled reader of protobuf fields does what a plain one does, field by field and fault by fault."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from service_messages import chunk, compressed, datum, loss_input, request, tensor
from spoilt import BINARY, spoilt_bytes

from busrl._fields import Reader
from busrl.service import wire
from busrl.service.bodies import BadBody
from busrl.service.columns import Columns
from busrl.service.sums import LOSSES, UserFault, check
from busrl.service.wire import counted, digest, number, read_forward_backward, sized

ENDLESS, KIND, BEYOND, MANY = 1, 2, 3, 4
FEW_BODIES, MANY_BODIES = 400, 10_000
IDS = np.array([6, 7])
Row = tuple[int, int, int]


class Fault(Exception):
    pass


class PlainReader:
    """The same as `Reader`, in Python: the reader that services had before."""

    def __init__(self, body: bytes, most: int, error: Callable[[int, int], BaseException]) -> None:
        self.body, self.most, self.left, self.error = body, most, most, error

    def varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for count, byte in enumerate(self.body[at : min(end, at + 10)]):
            value |= (byte & 127) << 7 * count
            if byte < 128:
                return value % 2**64, at + count + 1
        raise self.error(ENDLESS, 0)

    def fields(self, at: int, end: int) -> Iterator[Row]:
        while at < end:
            key, at = self.varint(at, end)
            kind = key & 7
            if kind == 0:
                start, at = self.varint(at, end)
            elif kind == 2:
                size, start = self.varint(at, end)
                at = start + size
            elif kind in (1, 5):
                start, at = at, at + {1: 8, 5: 4}[kind]
            else:
                raise self.error(KIND, kind)
            if at > end:
                raise self.error(BEYOND, 0)
            if not self.left:
                raise self.error(MANY, self.most)
            self.left -= 1
            yield key, start, at

    def rows(self, bounds: object) -> None:
        """Let data be read one by one."""

    def numbers(self, at: int, end: int, most: int) -> list[int]:
        numbers: list[int] = []
        while at < end and len(numbers) < most:
            value, at = self.varint(at, end)
            numbers.append(value)
        return numbers


def fault(kind: int, value: int) -> Fault:
    return Fault(kind, value if kind in (KIND, MANY) else 0)


def read_all(reader: Reader | PlainReader, at: int, end: int) -> tuple[list[Row], tuple[int, ...]]:
    """The fields of a message, and the fault that ended them."""
    rows: list[Row] = []
    try:
        for row in reader.fields(at, end):
            rows.append(row)
    except Fault as problem:
        return rows, problem.args
    return rows, ()


keys = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1)).map(number)
pieces = st.one_of(
    st.binary(max_size=12), keys, st.builds(sized, st.integers(1, 2000), st.binary(max_size=200)),
    st.builds(counted, st.integers(1, 20), st.integers(0, 2**64 - 1)), st.just(b"\x09" + bytes(8)),
    st.just(b"\x80" * 10), st.just(b"\xff" * 9 + b"\x7f"),
)


@given(st.lists(pieces, max_size=12).map(b"".join), st.data(), st.integers(0, 12))
@example(b"\x0a" + b"\xff" * 9 + b"\x01abc", None, 5)
def test_any_bytes_are_read_as_a_plain_reader_does(body: bytes, data: st.DataObject | None, most: int) -> None:
    at, end = 0, len(body)
    if data is not None:
        at = data.draw(st.integers(0, len(body)))
        end = data.draw(st.integers(at, len(body)))
    compiled, plain = Reader(body, most, fault), PlainReader(body, most, fault)
    assert read_all(compiled, at, end) == read_all(plain, at, end)
    assert read_all(compiled, 0, len(body)) == read_all(plain, 0, len(body)), "the bound is one for all messages"


@given(st.binary(max_size=40), st.integers(0, 5))
def test_numbers_in_a_row_are_read_as_a_plain_reader_does(body: bytes, most: int) -> None:
    seen = []
    for kind in (Reader, PlainReader):
        try:
            seen.append(kind(body, 9, fault).numbers(0, len(body), most))
        except Fault as problem:
            seen.append(problem.args)
    assert seen[0] == seen[1]


@given(st.lists(pieces, max_size=12).map(b"".join), st.lists(st.integers(0, 60), max_size=12), st.integers(0, 40))
def test_rows_of_messages_are_their_fields_one_message_after_the_other(
    body: bytes, places: list[int], most: int
) -> None:
    bounds = [tuple(sorted((min(at, len(body)), min(end, len(body))))) for at, end in pairwise(places)]
    reader, plain = Reader(body, most, fault), PlainReader(body, most, fault)
    rows, problems = [], []
    for index, (at, end) in enumerate(bounds):
        fields, problem = read_all(plain, at, end)
        rows += [(index, *(number if number < 2**63 else number - 2**64 for number in row)) for row in fields]
        problems += [problem] if problem else []
    found = reader.rows(np.array(bounds, np.int64).reshape(-1, 2))
    if problems:
        assert found is None and reader.left == most
    else:
        assert found is not None and np.frombuffer(found, np.int64).reshape(-1, 4).tolist() == list(map(list, rows))
        assert reader.left == plain.left


@pytest.mark.parametrize("bounds", [[0, 4], [-1, 1], [2, 1], [0, 1, 0, 2**62]])
def test_rows_outside_of_the_bytes_are_refused(bounds: list[int]) -> None:
    with pytest.raises(IndexError, match="outside of 3 bytes"):
        Reader(b"\x08\x01\x00", 9, fault).rows(np.array(bounds))
    with pytest.raises(ValueError, match="no pairs"):
        Reader(b"\x08\x01\x00", 9, fault).rows(np.array([*bounds, 0]))


@pytest.mark.parametrize(("at", "end"), [(-1, 1), (0, 4), (2, 1), (4, 4), (-(2**40), 2**40)])
def test_places_outside_of_the_bytes_are_refused(at: int, end: int) -> None:
    reader = Reader(b"\x08\x01\x00", 9, fault)
    with pytest.raises(IndexError, match="of 3 bytes"):
        reader.fields(at, end)
    with pytest.raises(IndexError, match="of 3 bytes"):
        reader.numbers(at, end, 1)


def test_a_reader_keeps_its_bytes_and_ends_at_a_fault() -> None:
    rows = Reader(b"".join([counted(1, 7), b"\x0b", counted(1, 8)]), 9, fault).fields(0, 5)
    assert next(rows) == (8, 7, 2)
    with pytest.raises(Fault, match=r"\(2, 3\)"):
        next(rows)
    assert list(rows) == []


def test_an_error_that_cannot_be_made_is_raised_itself() -> None:
    with pytest.raises(ZeroDivisionError):
        list(Reader(b"\x0b", 9, lambda kind, value: ZeroDivisionError(1 // 0)).fields(0, 1))


# -- whole requests -----


def outcome(body: bytes) -> tuple[object, ...]:
    """The digest of a body, or the words of its refusal and the request that it is of."""
    try:
        asked = read_forward_backward(body)
    except BadBody as problem:
        return str(problem), problem.request
    return asked.model_id, asked.seq_id, digest("forward_backward", asked)


def outcomes(bodies: list[bytes]) -> tuple[list[Any], list[Any], list[Any]]:
    """The outcomes of bodies: read as they are, with their data one by one, and so by the plain reader."""
    with pytest.MonkeyPatch.context() as patch:
        as_they_are = list(map(outcome, bodies))
        patch.setattr(wire, "_columns", one_by_one)
        alone = list(map(outcome, bodies))
        patch.setattr(wire, "Reader", PlainReader)
        return as_they_are, alone, list(map(outcome, bodies))


def one_by_one(message: wire.Message, places: Any) -> Any:
    raise BadBody("", "", "")


@pytest.mark.parametrize("count", [FEW_BODIES, pytest.param(MANY_BODIES, marks=pytest.mark.slow)])
def test_spoilt_requests_come_to_the_same_however_they_are_read(count: int) -> None:
    rng = random.Random(38)
    bodies = [*BINARY, *(spoilt_bytes(rng, BINARY) for _ in range(count))]
    for body, *seen in zip(bodies, *outcomes(bodies), strict=True):
        assert seen[0] == seen[1] == seen[2], body[:2000]


@pytest.mark.parametrize("most", [1, 7, 8, 20, 60, 72, 73, 90])
def test_fields_are_counted_the_same_however_they_are_read(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_FIELDS", most)
    body = request(*[supervised(3) + counted(9, 1) * size for size in range(4)])
    (first,), (second,), (third,) = outcomes([body])
    assert first == second == third and (len(first) == 2) == (most < 73), first


def supervised(size: int, **others: Any) -> bytes:
    return datum(np.arange(size), **{"weights": np.ones(size, np.float32), "target_tokens": np.arange(size)} | others)


ONE = supervised(1)[len(chunk([0])) :]  # its inputs
UNUSUAL = [
    supervised(2, weights=np.ones((2, 2), np.float32)), supervised(2, weights=np.ones(2, np.int32)),
    supervised(2, weights=np.ones(3, np.float32)), supervised(2, more=np.ones(2, np.float32)),
    chunk([1]) + supervised(3), datum([1, 2]), supervised(2, weights=compressed(np.eye(2, dtype=np.float32))), b"",
    supervised(2, weights=sized(1, bytes(8)) + counted(3, 1)), supervised(2, weights=np.ones(2, np.int64)),
    supervised(2, weights=tensor(np.ones(2, np.float32), (1, 2))), datum([], weights=np.ones(0, np.float32)),
    supervised(2) + loss_input("", tensor(np.ones(2, np.float32))), supervised(2) + loss_input("x" * 120, tensor(IDS)),
    supervised(2, weights=tensor(np.ones(2, np.float32), (2**64 - 1,))), chunk([1, 2]) + sized(2, sized(1, b"\xff")),
    supervised(2, weights=tensor(np.ones(2, np.float32)) + sized(1, bytes(4))),
    supervised(2, weights=tensor(np.ones(2, np.float32)) + sized(2, sized(3, bytes(8)))),
    supervised(2, weights=tensor(np.ones(2, np.float32)) + counted(4, 1)),
    sized(1, sized(1, sized(1, b"abcde"))) + ONE, sized(1, sized(1, sized(1, b"abcd")) + sized(2, b"png")) + ONE,
]
PLAIN = [
    supervised(2), supervised(1), supervised(70), supervised(2) + counted(9, 1) + sized(3, b"span"), supervised(0),
    datum([4, 5], target_tokens=np.array([2, 3]), weights=np.zeros(2, np.float32)),
    loss_input("target_tokens", tensor(IDS)) + chunk([4, 5]) + loss_input("weights", tensor(np.ones(2, np.float32))),
]


@given(st.lists(st.sampled_from([*PLAIN * 4, *UNUSUAL]), min_size=1, max_size=5))
def test_data_come_to_the_same_read_together_and_one_by_one(data: list[bytes]) -> None:
    (first,), (second,), (third,) = outcomes([request(*data)])
    assert first == second == third


@given(st.lists(st.sampled_from(PLAIN), min_size=1, max_size=70))
def test_data_of_one_form_are_columns(data: list[bytes]) -> None:
    read = read_forward_backward(request(*data)).data
    alone = [read_forward_backward(request(one)).data[0] for one in data]
    assert isinstance(read, Columns) and len(read) == len(data)
    for datums in (list(read), read[:], [read[place - len(data)] for place in range(len(data))]):
        for one, other in zip(datums, alone, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() and one.tokens.flags.writeable
            assert {name: values.tolist() for name, values in one.inputs.items()} == {
                name: values.tolist() for name, values in other.inputs.items()}
    assert read.values("weights").tolist() == [weight for one in alone for weight in one.inputs["weights"]]
    assert read.tokens == sum(len(one.tokens) for one in alone)


@pytest.mark.parametrize("unusual", UNUSUAL)
def test_data_of_another_form_are_read_one_by_one(unusual: bytes) -> None:
    bodies = [request(unusual), request(supervised(2), unusual), request(unusual, unusual)]
    for body, *seen in zip(bodies, *outcomes(bodies), strict=True):
        assert seen[0] == seen[1] == seen[2], body
    with contextlib.suppress(BadBody):
        assert not isinstance(read_forward_backward(request(supervised(2), unusual)).data, Columns)


def test_tensors_are_bounded_however_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "DENSE_BYTES", 12 * 20)
    for first, second, third in zip(*outcomes([request(*[supervised(5)] * size) for size in (1, 4, 5)]), strict=True):
        assert first == second == third
    assert "tensors of more than" in first[0]


# -- what is said of them -----


FAULTY = [
    supervised(9), supervised(0), supervised(2, target_tokens=np.array([1, 10])),
    supervised(2, target_tokens=np.array([-1, 1])), supervised(2, target_tokens=np.zeros(2, np.float32)),
    supervised(2, weights=np.array([np.nan, 0], np.float32)), supervised(2) + loss_input("", tensor(IDS)),
    datum([1, -2], target_tokens=IDS, weights=np.ones(2, np.float32)), datum(IDS, target_tokens=IDS),
    supervised(2, mask=np.ones(2, np.float32)), supervised(2, more=np.ones(2, np.float32)),
]


def words_of(data: list[bytes], loss: str) -> list[str]:
    """The refusals of data as columns and as a list; none of sound ones."""
    read = read_forward_backward(request(*data)).data
    config: dict[str, float | str] = dict.fromkeys(LOSSES[loss].defaults, 1.0)
    said = []
    for one in (read, list(read)):
        try:
            check(one, loss, config, context=8, vocabulary=10)
        except UserFault as problem:
            said.append(str(problem))
    return said


@given(st.lists(st.sampled_from([*[supervised(2)] * 6, *FAULTY]), min_size=1, max_size=6), st.sampled_from([*LOSSES]))
def test_columns_have_the_faults_of_their_data(data: list[bytes], loss: str) -> None:
    said = words_of(data, loss)
    assert not said or (len(said) == 2 and said[0] == said[1])


@pytest.mark.parametrize("faulty", FAULTY)
def test_each_fault_of_columns_is_found_alone(faulty: bytes) -> None:
    said = words_of([faulty], "cross_entropy")
    assert len(said) == 2 and said[0] == said[1]
    assert words_of([supervised(2), supervised(3)], "cross_entropy") == []
