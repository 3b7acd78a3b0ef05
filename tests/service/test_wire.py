"""The binary messages of a service: what clients send is read as it was meant, and what is no message is refused."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

sys.path.insert(0, str(Path(__file__).parent))
from service_messages import (
    chunk,
    compressed,
    datum,
    ints,
    loss_input,
    read_forward_backward_result,
    read_sample_result,
    recorded,
    request,
    sparse,
    tensor,
)

from busrl.service import wire
from busrl.service.bodies import BadBody, TooLarge
from busrl.service.wire import (
    MOST_DATA,
    SampledSequence,
    counted,
    digest,
    number,
    read_forward_backward,
    sized,
    unpack,
    unpacked_bytes,
    write_forward_backward_result,
    write_sample_result,
)

IDS, TARGETS = np.array([5, 6, 7, 8, 9], np.int32), np.array([6, 7, 8, 9, 10])
SUPERVISED = datum([1, 2], target_tokens=np.array([2, 3]), weights=np.ones(2, np.float32))


def refusal(body: bytes) -> BadBody:
    with pytest.raises(BadBody) as raised:
        read_forward_backward(body)
    return raised.value


def only(tensor_message: bytes) -> Any:
    """The tensor that a request with this one has."""
    read = read_forward_backward(request(datum([1, 2], weights=tensor_message)))
    return read.data[0].inputs["weights"]


# -- what clients send -----


def test_requests_of_the_sdk_are_read_as_they_were_meant() -> None:
    plain = [entry.body for entry in recorded("forward_backward") if not entry.encoding]
    supervised, forward, policy, wide, rows = map(read_forward_backward, plain)
    assert (supervised.model_id, supervised.seq_id, supervised.loss_fn) == ("s1:train:0", 1, "cross_entropy")
    assert [datum.inputs["weights"].tolist() for datum in supervised.data] == [[1.0] * 5, [0.5] * 5]
    assert (supervised.data[0].tokens == IDS).all() and (supervised.data[1].inputs["target_tokens"] == TARGETS).all()
    assert forward.forward_only and not supervised.forward_only
    assert policy.config == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    assert policy.data[0].inputs["logprobs"].tolist() == [-4.0] * 5
    assert wide.data[0].inputs["target_tokens"].tolist() == [[token, 0] for token in TARGETS]
    assert rows.data[0].tokens.tolist() == [5, 6, 7, 8] and rows.config == {"name": "a text", "beta": 0.5}
    assert rows.data[0].inputs["target_tokens"][:, :3].tolist() == [[6, 0, 3], [7, 0, 0], [8, 2, 0], [9, 0, 0]]
    assert rows.data[0].inputs["weights"].sum() == 3.75


names = st.sampled_from(["target_tokens", "weights", "advantages", "logprobs"])
values = st.one_of(
    arrays.arrays(np.float32, arrays.array_shapes(max_dims=2, max_side=5), elements=st.floats(width=32)),
    arrays.arrays(np.int64, arrays.array_shapes(max_dims=2, max_side=5)),
)
datums = st.tuples(arrays.arrays(np.int32, st.integers(0, 6)), st.dictionaries(names, values, max_size=3))


@given(st.lists(datums, min_size=1, max_size=4), st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False)))
def test_what_is_written_is_read_again(data: list[tuple[Any, dict[str, Any]]], config: dict[str, float]) -> None:
    body = request(*(datum(tokens, **inputs) for tokens, inputs in data), seq=7, config=config)
    read = read_forward_backward(body)
    assert (read.model_id, read.seq_id, read.config) == ("s:train:0", 7, config)
    for (tokens, inputs), one in zip(data, read.data, strict=True):
        np.testing.assert_array_equal(one.tokens, tokens)
        assert set(one.inputs) == set(inputs)
        for name, array in inputs.items():
            np.testing.assert_array_equal(one.inputs[name], array)
            assert one.inputs[name].dtype == array.dtype and one.inputs[name].flags.writeable


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=2, max_side=6),
                     elements=st.sampled_from([0.0, 0.0, 0.5, -2.0])))
def test_compressed_rows_are_the_matrix_that_they_came_from(matrix: Any) -> None:
    np.testing.assert_array_equal(only(compressed(matrix)), matrix)


def test_the_second_version_of_a_setting_wins() -> None:
    older = sized(5, sized(1, b"beta"), b"\x11" + np.float64(1.0).tobytes())
    assert read_forward_backward(request(SUPERVISED, config={"beta": 2.0}) + older).config == {"beta": 2.0}


def test_short_numbers_become_the_types_that_losses_take() -> None:
    assert only(sized(1, np.array([1, -2], np.int32).tobytes()) + counted(3, 3)).dtype == np.int64
    halves = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert only(sized(1, halves.tobytes()) + counted(3, 4)).tolist() == [1.5, -2.0]


def test_what_the_interface_does_not_name_is_ignored() -> None:
    unknown = sized(99, b"later") + counted(77, 5) + number(55 << 3 | 5) + b"four" + number(54 << 3 | 1) + b"eight..."
    read = read_forward_backward(unknown + request(SUPERVISED + unknown + sized(3, b"spans")) + unknown)
    assert read.data[0].tokens.tolist() == [1, 2] and set(read.data[0].inputs) == {"target_tokens", "weights"}


# -- what is no message -----

HEAD = request()  # model, number and loss, no data


def in_datum(rest: bytes) -> bytes:
    return HEAD + sized(3, chunk([1, 2]) + rest)


def in_tensor(rest: bytes) -> bytes:
    return in_datum(loss_input("weights", rest))


ONES = np.ones(2, np.float32)
NUMBERED = {  # fault -> body, and words of the refusal; model and number can be read, so the future fails
    "no data": (HEAD, "data: 0 data"),
    "too many data": (HEAD + sized(3, SUPERVISED) * (MOST_DATA + 1), "1 to 1024 in one request"),
    "a datum that is longer than itself": (HEAD + sized(3, b"\x0a\x7f"), "data[0]: a field that is longer"),
    "an image": (HEAD + sized(3, sized(1, sized(2, b"png"))), "images and audio"),
    "audio": (HEAD + sized(3, sized(1, sized(3, b"dmel"))), "images and audio"),
    "tokens of three bytes": (HEAD + sized(3, sized(1, sized(1, sized(1, b"abc")))), "3 bytes are no whole number"),
    "a number without end": (in_datum(b"\x80" * 30), "a number that does not end"),
    "a group": (in_datum(b"\x0b\x0c"), "a field of kind 3"),
    "an input given twice": (in_datum(loss_input("weights", tensor(ONES)) * 2), "given twice"),
    "many inputs": (in_datum(b"".join(loss_input(str(i), tensor(ONES)) for i in range(20))), "more than 16"),
    "fields without number": (HEAD + sized(3, b"\x50\x00" * 300_000) * 2, "more than 524288 fields"),
    "a name that is no text": (in_datum(sized(2, sized(1, b"\xff"), sized(2, tensor(ONES)))), "no UTF-8"),
    "no type": (in_tensor(sized(1, ONES.tobytes())), "dtype: 0 is not"),
    "type 9": (in_tensor(sized(1, ONES.tobytes()) + counted(3, 9)), "dtype: 9 is not"),
    "another shape": (in_tensor(tensor(ONES, (3,))), "shape: (3) is not that of 2 numbers"),
    "a shape that overflows": (in_tensor(tensor(ONES, (2**32, 2**32 + 1))), "is not that of 2 numbers"),
    "an empty shape that overflows": (in_tensor(tensor(np.zeros(0, np.float32), (0, -1))), "(0, -1)"),
    "a negative shape": (in_tensor(tensor(ONES, (-1, -2))), "(-1, -2) is not that of 2"),
    "three axes": (in_tensor(tensor(ONES, (1, 1, 2))), "more than 2 axes"),
    "endless axes": (in_tensor(tensor(ONES, (1,) * 5000)), "more than 2 axes"),
    "falling rows": (in_tensor(sparse(ONES, [0, 3, 2], [0, 1], (2, 2))), "do not rise"),
    "rows that wrap around": (in_tensor(sparse(ONES, [0, 2**63 - 1, -2, 2], [0, 1], (3, 2))), "do not rise"),
    "too few rows": (in_tensor(sparse(ONES, [0, 2], [0, 1], (2, 2))), "do not rise"),
    "no rows": (in_tensor(sparse(ONES, [], [0, 1], (2, 2))), "do not rise"),
    "rows that end early": (in_tensor(sparse(ONES, [0, 1, 1], [0, 1], (2, 2))), "do not rise"),
    "a column outside": (in_tensor(sparse(ONES, [0, 1, 2], [0, 2], (2, 2))), "outside of 0 to 1"),
    "a column before": (in_tensor(sparse(ONES, [0, 1, 2], [0, -1], (2, 2))), "outside of 0 to 1"),
    "a cell listed twice": (in_tensor(sparse(ONES, [0, 2, 2], [1, 1], (2, 2))), "twice"),
    "fewer values": (in_tensor(sparse(ONES, [0, 1, 3], [0, 0, 1], (2, 2))), "2 values for 3 columns"),
    "a sparse vector": (in_tensor(sparse(ONES, [0, 2], [0, 1], (2,))), "not that of a matrix"),
    "a wide matrix": (in_tensor(sparse(ONES, [0, 1, 2], [0, 1], (2, 2**40))), "of at most 256 MiB"),
    "a setting that is no text": (HEAD + sized(3, SUPERVISED) + sized(7, sized(1, b"\xff"), sized(2, b"\x12\x00")),
                                  "loss_fn_config: no UTF-8"),
    "a setting cut short": (HEAD + sized(3, SUPERVISED) + sized(5, b"\x11abc"), "longer than its message"),
    "a loss that is no text": (HEAD + sized(3, SUPERVISED) + sized(4, b"\xff"), "loss_fn: no UTF-8"),
    "cut short": (request(SUPERVISED)[:-2], "longer than its message"),
    "cut in a number": (request(SUPERVISED) + b"\x80", "a number that does not end"),
    "many settings": (HEAD + sized(3, SUPERVISED) + sized(5, b"") * 200, "more than 64 settings"),
}


@pytest.mark.parametrize("fault", [*NUMBERED])
def test_a_fault_inside_a_request_has_its_number(fault: str) -> None:
    body, words = NUMBERED[fault]
    problem = refusal(body)
    assert words in str(problem) and problem.request == ("s:train:0", 1), str(problem)


def test_a_fault_names_its_datum_and_field() -> None:
    problem = refusal(request(SUPERVISED, datum([1], weights=tensor(ONES, (3,)))))
    assert str(problem).startswith("data[1].loss_fn_inputs['weights'].shape: (3) is not that of 2 numbers; ")


UNNUMBERED = {
    "nothing": (b"", "model_id: '' is no id"),
    "JSON": (b'{"model_id": "s:train:0", "seq_id": 1}', "kind 3"),
    "cut before the number": (request()[:11], "seq_id: 0 is not within 1"),
    "a number and no model": (counted(2, 1) + sized(4, b"\xff"), "loss_fn: no UTF-8"),
    "number 0": (request(SUPERVISED, seq=0), "seq_id: 0 is not within 1"),
    "number -1": (request(SUPERVISED, seq=-1), "is not within 1"),
    "number 2^31": (request(SUPERVISED, seq=2**31), "is not within 1"),
    "a model with line breaks": (request(SUPERVISED, model="a\nb"), "is no id of a model"),
    "a model of 1 MB": (request(SUPERVISED, model="m" * 2**20), "is no id of a model"),
    "a model that is no text": (sized(1, b"\xff"), "model_id: no UTF-8"),
    "data without a model": (sized(3, b"") * 3000, "model_id: '' is no id"),
}


@pytest.mark.parametrize("fault", [*UNNUMBERED])
def test_what_has_no_number_is_refused_without_one(fault: str) -> None:
    body, words = UNNUMBERED[fault]
    problem = refusal(body)
    assert words in str(problem) and problem.request is None and len(str(problem)) < 400, str(problem)


def test_every_beginning_of_a_request_is_refused_or_read() -> None:
    body = request(SUPERVISED, SUPERVISED, config={"beta": 0.5, "name": "x"})
    for size in range(len(body)):
        try:
            assert read_forward_backward(body[:size]).model_id == "s:train:0"
        except BadBody:
            pass


def test_sparse_tensors_of_a_request_unfold_into_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "DENSE_BYTES", 1 << 12)
    matrix = sparse(ONES, [0, 1, 2], [0, 1], (2, 200))  # 1,600 bytes each, from some 60
    assert "tensors of more than" in str(refusal(request(*[datum([1, 2], weights=matrix)] * 3)))
    untold = sized(1, ONES.tobytes())  # it is never looked at
    inputs = {"advantages": matrix, "logprobs": matrix, "mask": matrix, "weights": untold}
    assert "tensors of more than" in str(refusal(request(datum([1, 2], **inputs))))


@pytest.mark.parametrize("text", ["a" + "é" * 60, "é" * 60, "a" * 99 + "\U0001f600", "x" * 1_000_000])
def test_long_texts_are_read_as_their_beginnings(text: str) -> None:
    asked = read_forward_backward(request(datum([1, 2], **{text: ONES}), loss=text, config={text: text}))
    ((setting, value),), (name,) = asked.config.items(), asked.data[0].inputs
    assert {asked.loss_fn, setting, value, name} == {asked.loss_fn}
    assert text.startswith(asked.loss_fn) and 97 <= len(asked.loss_fn.encode()) <= 100


def test_pieces_of_a_message_make_one() -> None:
    tail = counted(3, 1) + sized(4, *map(number, (2, 2)))
    values, rows, columns = sized(1, ONES.tobytes()), sized(2, ints([0, 1, 2])), sized(3, ints([0, 1]))
    pieces = sized(2, values) + sized(2, rows, columns) + tail
    assert only(pieces).tolist() == [[1, 0], [0, 1]]
    later = sized(1, b"weights"), sized(2, sized(2, values)), sized(2, sized(2, rows, columns), tail)
    (read,) = read_forward_backward(request(chunk([1, 2]) + sized(2, *later))).data
    assert read.inputs["weights"].tolist() == [[1, 0], [0, 1]]
    assert only(sized(2, rows) + sized(1, np.zeros(4, np.float32).tobytes()) + pieces).tolist() == [[1, 0], [0, 1]]
    assert not only(pieces + sized(1, np.zeros(4, np.float32).tobytes())).any()  # of two kinds the later one counts


# -- answers -----


def test_a_result_is_read_as_it_was_written() -> None:
    outputs = [{"logprobs": np.array([-1, -2], np.float32)}, {"logprobs": np.array([-3], np.float32)},
               {"logprobs": np.ones((2, 3), np.float32)}, {"ids": np.array([1, 2])}]
    read, metrics = read_forward_backward_result(write_forward_backward_result(outputs, {"loss:sum": 2.5}))
    assert metrics == {"loss:sum": 2.5} and len(read) == 4
    for output, again in zip(outputs, read, strict=True):
        assert set(output) == set(again)
        for name, array in output.items():
            np.testing.assert_array_equal(again[name], array)


def test_a_result_without_data_has_its_metrics() -> None:
    assert read_forward_backward_result(write_forward_backward_result([], {"loss:sum": 0.0})) == ([], {"loss:sum": 0.0})


@pytest.mark.parametrize("name", ["loss", "loss:sum:all"])
def test_a_metric_that_the_sdk_cannot_split_is_never_sent(name: str) -> None:
    with pytest.raises(ValueError, match="exactly one colon"):
        write_forward_backward_result([], {name: 1.0})


def test_samples_are_read_as_they_were_written() -> None:
    topk = np.array([[1, 3], [2, 4]]), np.array([[-1.0, -3.0], [-2.0, -4.0]])
    answer = write_sample_result(
        [SampledSequence(True, np.array([1, 2]), np.array([-1.0, -2.0]), topk), (False, np.array([3]), [-1.0], None)],
        np.array([np.nan, -3.0]), (np.array([[0], [4]]), np.array([[-99999.0], [-3.0]])), np.array([[-3.0, -4.0]]), 7,
    )
    (first, second), prompt = read_sample_result(answer)
    assert first[:3] == (True, [1, 2], [-1.0, -2.0]) and second == (False, [3], [-1.0], None)
    assert first.topk and first.topk[0].tolist() == topk[0].tolist() and first.topk[1].tolist() == topk[1].tolist()
    assert np.isnan(prompt["logprobs"][0]) and prompt["logprobs"][1] == -3.0 and prompt["cache_hits"] == 7
    assert prompt["topk"][0].tolist() == [[0], [4]] and prompt["targets"].tolist() == [[-3.0, -4.0]]


def test_answers_are_the_bytes_that_protobuf_writes() -> None:
    (trained,), (sampled,) = recorded("answer of forward_backward"), recorded("answer of asample")
    outputs = [{"logprobs": np.array([-1, -2, -3], np.float32)}, {"logprobs": np.array([-4], np.float32)}]
    assert write_forward_backward_result(outputs, {"loss:sum": 6.5}) == trained.body
    sequences, prompt = read_sample_result(sampled.body)
    assert [sequence.stopped for sequence in sequences] == [False, True]
    again = write_sample_result(
        sequences, prompt["logprobs"], prompt["topk"], prompt["targets"], prompt["cache_hits"])
    assert read_sample_result(again)[0][1] == sequences[1] and len(again) == len(sampled.body) + 2  # a 0 is written


# -- meaning -----


def test_the_order_of_a_maps_entries_changes_no_digest() -> None:
    one = datum([1, 2], weights=ONES, target_tokens=np.array([2, 3]))
    other = datum([1, 2], target_tokens=np.array([2, 3]), weights=ONES)
    first, second = (
        read_forward_backward(request(message, config=config))
        for message, config in ((one, {"a": 1.0, "b": 2.0}), (other, {"b": 2.0, "a": 1.0}))
    )
    assert digest("forward_backward", first) == digest("forward_backward", second)


def test_another_meaning_has_another_digest() -> None:
    meanings = [
        request(SUPERVISED), request(SUPERVISED, SUPERVISED), request(SUPERVISED, loss="dro"),
        request(SUPERVISED, forward_only=True), request(SUPERVISED, config={"beta": 1.0}),
        request(datum([1, 2], weights=ONES)), request(datum([1, 3], weights=ONES)),
        request(datum([1, 2], mask=ONES)), request(datum([1, 2], weights=ONES * 2)),
        request(datum([1, 2], weights=ONES[:, None])), request(datum([1, 2], weights=np.ones(2, np.int64))),
    ]
    digests = {digest("forward_backward", read_forward_backward(body)) for body in meanings}
    assert len(digests) == len(meanings) and all(len(entry) == 32 for entry in digests)


def plain_digest(asked: wire.ForwardBackward) -> bytes:
    """By the words of the page on the service, array by array."""
    head = [asked.loss_fn, asked.config, asked.forward_only, len(asked.data)]
    hasher = hashlib.sha256(b"forward_backward\0" + msgspec.json.encode(head, order="sorted"))
    for one in asked.data:
        for name, array in (("", one.tokens), *sorted(one.inputs.items())):
            hasher.update(f"{name} {array.dtype.str} {array.shape}\0".encode() + array.tobytes())
    return hasher.digest()


@pytest.mark.parametrize("sizes", [[1], [3, 2, 1], [1] * 700, [20_000, 5, 17_000, 16_384], [30_000] * 3])
def test_a_digest_is_of_one_array_after_the_other(sizes: list[int]) -> None:
    data = [datum(np.arange(size), weights=np.ones(size, np.float32), target_tokens=np.arange(size) + index)
            for index, size in enumerate(sizes)]
    asked = read_forward_backward(request(*data))
    assert digest("forward_backward", asked) == plain_digest(asked)


def test_requests_of_the_sdk_keep_the_digests_that_logs_have() -> None:
    plain = [entry.body for entry in recorded("forward_backward") if not entry.encoding]
    digests = [digest("forward_backward", read_forward_backward(body)).hex()[:16] for body in plain]
    assert digests == [
        "48e7692043df7be3", "a0f7350b449a3006", "f010e6df5010a6d7", "44058ae026cf3775",
        "cb5c561c3fe61804",
    ]


def test_a_save_that_the_sdk_repeats_has_the_same_digest() -> None:
    first = {"model_id": "m", "seq_id": 4, "sampling_session_seq_id": 1, "kind": "snapshot"}
    again = {"kind": "snapshot", "sampling_session_seq_id": 2, "seq_id": 4, "model_id": "m"}
    assert digest("save_weights_for_sampler", first) == digest("save_weights_for_sampler", again)
    other = {**first, "kind": "inflight"}
    assert digest("save_weights_for_sampler", first) != digest("save_weights_for_sampler", other)
    assert digest("optim_step", b"no JSON") != digest("optim_step", b"no json")


# -- zstd -----


@pytest.fixture
def pack() -> Any:
    zstandard = pytest.importorskip("zstandard")
    return lambda body: zstandard.ZstdCompressor().compress(body)


def test_a_packed_body_is_what_was_packed(pack: Any) -> None:
    body = np.random.default_rng(0).bytes(100_000) + bytes(100_000)
    assert unpack(pack(body), len(body)) == body
    assert unpack(pack(b""), 0) == b""


def test_a_packed_request_of_the_sdk_means_what_the_plain_one_does(pack: Any) -> None:
    packed = next(entry.body for entry in recorded("forward_backward") if entry.encoding == "zstd")
    plain = recorded("forward_backward")[2].body
    body = unpack(packed, 1 << 20)
    assert body != plain  # the entries of its maps come in another order
    first, second = (digest("forward_backward", read_forward_backward(message)) for message in (body, plain))
    assert first == second


def test_a_body_that_unpacks_beyond_the_limit_is_stopped(pack: Any) -> None:
    stream = pytest.importorskip("zstandard").ZstdCompressor(write_content_size=False)
    for bomb in (pack(bytes(1 << 30)), stream.compress(bytes(1 << 30))):
        with pytest.raises(TooLarge, match="more than 1048576 bytes when unpacked"):
            unpack(bomb, 1 << 20)


def test_a_packed_body_without_a_size_counts_the_most(pack: Any) -> None:
    stream, body = pytest.importorskip("zstandard").ZstdCompressor(write_content_size=False), bytes(1000)
    assert unpacked_bytes(pack(body), 5000) == 1000
    assert unpacked_bytes(stream.compress(body), 5000) == 5000
    assert unpack(stream.compress(body), 5000) == unpack(pack(body), 5000) == body


@pytest.mark.parametrize("spoil", ["half", "nothing", "other", "twice", "tail", "less", "more", "none"])
def test_what_is_not_one_frame_is_refused(pack: Any, spoil: str) -> None:
    frame = pack(np.random.default_rng(0).bytes(5000))
    less, more = (frame[:5] + bytes([frame[5] + by]) + frame[6:] for by in (-1, 1))  # than there are
    bodies = {"half": frame[:2500], "nothing": b"", "other": b"gzip" * 10, "twice": frame * 2, "tail": frame + b"x",
              "less": less, "more": more, "none": frame[:4] + b"\x20\x00" + frame[7:]}
    with pytest.raises(BadBody, match=r"zstd|more than 0 bytes"):
        unpack(bodies[spoil], 1 << 20)


def test_without_zstandard_a_packed_body_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(BadBody, match=r"install busrl\[service\]"):
        unpack(b"", 1)
