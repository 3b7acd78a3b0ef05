"""docs/protocol.md and messages.md are made from the structs; a message without a description is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.protocol import codec
from busrl.protocol import messages as m
from busrl.protocol.codec import ALL, BY_NAME
from tools.reference import catalog, protocol_page, vectors

ROOT = Path(__file__).resolve().parents[2]


def module_level(monkeypatch, kind) -> None:
    """Add a message as if it stood in messages.py."""
    for module in (catalog, protocol_page, vectors):
        monkeypatch.setattr(module, "ALL", (*ALL, kind))
    monkeypatch.setattr("busrl.protocol.codec.BY_NAME", {**BY_NAME, m.name_of(kind): kind})


class Shape(msgspec.Struct):
    """One tensor that travels inside a message."""

    name: m.Name
    shape: list[int]
    data: bytes


class Brought(m.Message, tag="BROUGHT"):
    """A worker without a mapping brings its tensors; here for tests."""

    worker_id: m.Name
    tensors: list[Shape] = msgspec.field(default_factory=list)
    remark: str | None = None


class Silent(m.Message, tag="SILENT"):
    worker_id: m.Name


@pytest.mark.parametrize("path", protocol_page.PAGES, ids=str)
def test_a_page_is_what_the_structs_say(path):
    page = (ROOT / path).read_text()
    assert protocol_page.rewritten(path, page) == page, "run `python -m tools.reference.protocol_page`"


def test_the_command_mends_pages_that_have_drifted_and_writes_the_vectors(tmp_path):
    (tmp_path / "docs").mkdir()
    for path in protocol_page.PAGES:
        (tmp_path / path).write_text((ROOT / path).read_text().replace("NEW_TASK", "OLD_TASK"))
    command = [sys.executable, "-m", "tools.reference.protocol_page", "--vectors", "--root", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, cwd=ROOT)
    mended = (tmp_path / "docs" / "messages.md").read_text()
    assert protocol_page.MARK.format("session") in mended and "### NEW_TASK" in mended and "### OLD_TASK" not in mended
    for path in (ROOT / "docs" / "vectors").glob("*.json"):
        assert (tmp_path / "docs" / "vectors" / path.name).read_bytes() == path.read_bytes()


def test_a_page_without_a_mark_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "protocol.md").write_text("nothing")
    assert protocol_page.main(["--root", str(tmp_path)]) == 2
    assert "no part 'envelope'" in capsys.readouterr().err


def test_a_message_that_nobody_described_says_all_that_is_missing(monkeypatch):
    module_level(monkeypatch, Silent)
    with pytest.raises(protocol_page.Incomplete) as refused:
        protocol_page.complete()
    said = str(refused.value)
    assert "Silent in busrl/protocol has no docstring" in said
    assert "Silent has no route; add it to ROUTES" in said
    assert 'add "SILENT": "worker_id" to the newest of HISTORY' in said


def test_a_field_without_version_or_meaning_is_named(monkeypatch):
    monkeypatch.setitem(catalog.HISTORY["1.0"], "NEW_TASK", "worker_id slot_id seq uid prompt")
    monkeypatch.delitem(catalog.MEANINGS, "drain_s")
    with pytest.raises(protocol_page.Incomplete) as refused:
        protocol_page.complete()
    assert "NEW_TASK: no version brought count" in str(refused.value)
    assert "STOP.drain_s has no meaning" in str(refused.value)


def test_history_names_no_field_twice_and_none_that_never_was(monkeypatch):
    monkeypatch.setitem(catalog.HISTORY, "1.9", {"PING": "token", "PONG": "colour"})
    problems = "\n".join(catalog.check())
    assert "PING.token stands there twice" in problems and "PONG.colour is in no struct" in problems


def test_a_new_message_gets_its_tables_and_vectors_by_itself(monkeypatch):
    module_level(monkeypatch, Brought)
    monkeypatch.setitem(catalog.ROUTES, Brought, catalog.Route("rollout", "keeper"))
    monkeypatch.setitem(catalog.HISTORY, "1.11", {"BROUGHT": "worker_id tensors remark", "Shape": "name shape data"})
    for name in ("tensors", "remark", "name", "shape", "data"):
        monkeypatch.setitem(catalog.MEANINGS, name, f"What {name} means.")
    protocol_page.complete()
    page = protocol_page.details()
    assert "| `tensors` | array of [Shape](#record-shape) | default `[]` | 1.11 |" in page
    assert "| `remark` | text or nil | default nil | 1.11 |" in page
    assert "### Record Shape" in page and "| `data` | bytes | required | 1.11 |" in page
    assert "[`BROUGHT`](messages.md#brought) | rollout | `BROUGHT/`" in protocol_page.overview()
    for name, message in vectors.samples():
        if name.startswith("BROUGHT."):
            assert codec.decode(Brought, codec.encode(message), 1 << 20) == message


def test_plain_json_holds_every_value_without_loss():
    value = {"a": [1, 2**53 + 1, -(2**60), b"\x00\xff"], "b": {"c": 0.1, "d": True, "e": None}, "f": "ß"}
    assert vectors.natural(vectors.plain(value)) == value


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text(), VALUES))
def test_bytes_taken_apart_for_a_reader_stay_whole(value):
    raw = msgspec.msgpack.encode(value)
    assert b"".join(token.raw for token in protocol_page.tokens(raw)) == raw
    pieces = protocol_page.fields(raw)
    assert b"".join(piece for piece, _ in pieces) == raw and len(pieces) == 1 + keys_in(value)


def keys_in(value) -> int:
    if isinstance(value, dict):
        return len(value) + sum(keys_in(child) for child in value.values())
    return sum(keys_in(child) for child in value) if isinstance(value, list) else 0


@given(st.binary(max_size=40))
def test_bytes_that_are_no_msgpack_are_refused_and_nothing_else_happens(raw):
    try:
        assert b"".join(token.raw for token in protocol_page.tokens(raw)) == raw
    except ValueError:
        pass
