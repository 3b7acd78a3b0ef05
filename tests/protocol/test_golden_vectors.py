"""The files in docs/vectors: the codec writes and reads exactly these bytes, and a stranger's decoder agrees.

Bytes that change here are a change of the protocol: see "Versions" in docs/protocol.md before writing them anew.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgpack
import pytest

from busrl.protocol import codec
from busrl.protocol.codec import ALL, BY_NAME, kind_of
from busrl.protocol.messages import name_of
from tools.reference import vectors
from tools.reference.catalog import described

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "vectors"
MESSAGES, VARIANTS, REJECTED = (
    json.loads((FOLDER / f"{name}.json").read_text()) for name in ("messages", "variants", "rejected")
)
BY_VECTOR = {vector["name"]: vector for vector in MESSAGES}
LIMIT = 1 << 20


def of_kind(name: str):
    return BY_NAME[name.partition(".")[0]]


def ids(entries: list[dict]) -> list[str]:
    return [entry["name"] for entry in entries]


@pytest.mark.parametrize("vector", MESSAGES, ids=ids(MESSAGES))
def test_the_codec_reads_a_vector_and_writes_its_exact_bytes_again(vector):
    raw = bytes.fromhex(vector["hex"])
    message = codec.decode(of_kind(vector["name"]), raw, LIMIT)
    assert codec.encode(message) == raw
    assert vectors.as_map(message) == vectors.natural(vector["map"])
    assert kind_of(vector["topic"]) is of_kind(vector["name"])


@pytest.mark.parametrize("vector", MESSAGES, ids=ids(MESSAGES))
def test_an_independent_decoder_reads_the_map_of_a_vector(vector):
    got = msgpack.unpackb(bytes.fromhex(vector["hex"]))
    want = vectors.natural(vector["map"])
    assert got == want and list(got) == list(want)
    assert {key: type(value) for key, value in got.items()} == {key: type(value) for key, value in want.items()}


@pytest.mark.parametrize("vector", VARIANTS, ids=ids(VARIANTS))
def test_what_other_encoders_may_write_reads_as_the_same_message(vector):
    kind = of_kind(vector["name"])
    want = codec.decode(kind, bytes.fromhex(BY_VECTOR[vector["equals"]]["hex"]), LIMIT)
    raw = bytes.fromhex(vector["hex"])
    assert raw.hex() != BY_VECTOR[vector["equals"]]["hex"], "a variant that is no variant"
    assert codec.decode(kind, raw, LIMIT) == want
    known = set(kind.__struct_fields__) & msgpack.unpackb(raw).keys()
    got = msgpack.unpackb(raw)
    assert {key: got[key] for key in known} == {key: vectors.as_map(want)[key] for key in known}


@pytest.mark.parametrize("vector", REJECTED, ids=ids(REJECTED))
def test_what_is_no_message_is_refused_with_the_fault_of_the_vector(vector):
    with pytest.raises(codec.Rejected) as refused:
        codec.decode(BY_NAME[vector["message"]], bytes.fromhex(vector["hex"]), LIMIT)
    assert refused.value.fault.value == vector["fault"]


def test_every_message_has_vectors_from_minimal_to_wide():
    whole = {f"{name_of(kind)}.whole" for kind in ALL if any(map(vectors.may_be_absent, described(kind)))}
    sizes = {f"{name_of(kind)}.{size}" for kind in ALL for size in ("minimal", "typical", "wide")}
    assert sizes | whole == set(BY_VECTOR) and whole


def test_the_files_are_what_the_code_makes_now():
    assert {path.name: path.read_text() for path in FOLDER.glob("*.json")} == vectors.files()


def test_wide_vectors_reach_long_forms_of_msgpack_and_utf8():
    wide = b"".join(bytes.fromhex(vector["hex"]) for vector in MESSAGES if vector["name"].endswith(".wide"))
    values = (value for vector in MESSAGES for value in vectors.natural(vector["map"]).values())
    texts = [value for value in values if isinstance(value, str)]
    assert {len(char.encode()) for text in texts for char in text} == {1, 2, 3, 4}
    assert max(len(text.encode()) for text in texts) > 256
    for form in (0xCF, 0xCB, 0xD9, 0xDA, 0xDE, 0xDC):
        assert form in wide


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_may_be_no_number(value):
    raw = msgpack.packb({"type": "REWARD_COMPUTED", "slot_id": 1, "seq": 2, "uid": 3, "reward": value})
    got = codec.decode(BY_NAME["REWARD_COMPUTED"], raw, LIMIT)
    again = msgpack.unpackb(codec.encode(got))["reward"]
    assert again == value or (math.isnan(value) and math.isnan(again))
