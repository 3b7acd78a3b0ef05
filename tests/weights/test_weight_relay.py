"""Versions on their way to another host: an engine there reads whole ones only, and never an older one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from busrl.errors import WeightsRefused
from busrl.weights.relay import Pieces, SegmentCopy, Snapshot, Taken
from busrl.weights.shm import ShmReceiver, ShmSender

PIECE = 100


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((7, 9), value), "b": torch.full((5,), -value, dtype=torch.bfloat16)}


def pieces(source: Snapshot, taken: Taken) -> list[tuple[int, memoryview]]:
    starts = range(0, len(taken.data), PIECE)
    found = [(at, source.piece(taken.digest, at, min(PIECE, len(taken.data) - at))) for at in starts]
    return [(at, data) for at, data in found if data is not None]


def begun(copy: SegmentCopy, taken: Taken) -> Pieces:
    made = Pieces(len(taken.data), PIECE, taken.digests)
    copy.begin(taken.version, taken.step, taken.checksum, taken.manifest, taken.digest, made)
    return made


def test_engines_on_the_other_host_read_what_the_learner_wrote(tmp_path: Path) -> None:
    sender = ShmSender(tmp_path / "home", checksums=True)
    source, copy = Snapshot(tmp_path / "home", PIECE), SegmentCopy(tmp_path / "away")
    engine = ShmReceiver(tmp_path / "away")
    assert source.take() is None and engine.newest() == (-1, -1)
    for version in (1, 2, 5):
        sender.publish(version, version, tensors(version))
        taken = source.take()
        assert taken is not None and taken.version == version
        begun(copy, taken)
        for at, data in reversed(pieces(source, taken)):
            assert engine.newest()[0] < version, "not before it is whole"
            copy.write(at, data)
        copy.done()
        found = tensors(0)
        assert engine.fetch(found) == (version, version)
        assert all(torch.equal(found[name], one) for name, one in tensors(version).items())


def test_a_copy_that_ends_in_the_middle_leaves_the_version_before_it(tmp_path: Path) -> None:
    sender, source = ShmSender(tmp_path / "home"), Snapshot(tmp_path / "home", PIECE)
    engine, found = ShmReceiver(tmp_path / "away"), tensors(0)
    for version, whole in ((1, True), (2, False), (3, False), (4, True)):
        sender.publish(version, version, tensors(version))
        taken, copy = source.take(), SegmentCopy(tmp_path / "away")  # of a new process
        assert taken is not None
        begun(copy, taken)
        for at, data in pieces(source, taken)[: None if whole else 1]:
            copy.write(at, data)
        copy.done() if whole else copy.close()
        newest = version if whole else 1
        assert engine.fetch(found) == (newest, newest)
        assert torch.equal(found["a"], tensors(newest)["a"])


def test_an_overtaken_or_older_version_is_given_up(tmp_path: Path) -> None:
    sender, source = ShmSender(tmp_path / "home"), Snapshot(tmp_path / "home", PIECE)
    copy = SegmentCopy(tmp_path / "away")
    sender.publish(1, 1, tensors(1))
    old = source.take()
    sender.publish(2, 2, tensors(2))
    assert old is not None and source.piece(old.digest, 0, PIECE) is not None, "it stays until a newer one is taken"
    new = source.take({1})
    assert new is not None and new.version == 2
    assert source.piece(old.digest, 0, PIECE) is not None, "another host still fetches it"
    sender.publish(3, 3, tensors(3))
    assert source.take({1, 2}) is new, "no third one is held"
    newest = source.take({1})
    assert newest is not None and newest.version == 3 and source.piece(new.digest, 0, PIECE) is None
    assert source.take() is newest
    begun(copy, new)
    copy.done()
    for version in (old, new):
        with pytest.raises(WeightsRefused, match="is not above 2"):
            begun(copy, version)


def test_what_a_host_has_of_two_versions_can_be_had_from_it_and_nothing_else(tmp_path: Path) -> None:
    sender, source = ShmSender(tmp_path / "home"), Snapshot(tmp_path / "home", PIECE)
    copy, taken = SegmentCopy(tmp_path / "away"), []
    for version in (1, 2, 3):
        sender.publish(version, version, tensors(version))
        made = source.take()
        assert made is not None
        taken.append(made)
        here = begun(copy, made)
        for number, (at, data) in enumerate(pieces(source, made)):
            assert copy.piece(made.digest, at, len(data)) is None
            assert here.came(at, data)
            copy.write(at, data)
            assert copy.piece(made.digest, at, len(data)) == data
            if (version, number) == (3, 1):  # of the last one the rest does not come
                break
        if version < 3:
            copy.done()
    first, second, third = (one.digest for one in taken)
    assert not copy.holds(first), "its buffer is written over"
    assert copy.piece(second, 0, PIECE) == taken[1].data[:PIECE].tobytes()
    assert copy.piece(third, 2 * PIECE, PIECE) is None and copy.holds(third)
    assert copy.piece(second, 0, PIECE - 1) is None and copy.piece(second, 1, PIECE) is None
    copy.abandon()
    assert not copy.holds(third) and copy.holds(second)


@given(st.integers(-10, 10_000), st.integers(-10, 10_000))
def test_a_piece_lies_within_the_version_or_is_none(tmp_path: Path, at: int, size: int) -> None:
    source = Snapshot(tmp_path / "home", PIECE)
    if not (tmp_path / "home").exists():
        ShmSender(tmp_path / "home").publish(1, 1, tensors(1))
    taken = source.take()
    assert taken is not None
    found = source.piece(taken.digest, at, size)
    assert (found is not None) == (at >= 0 and size > 0 and at + size <= len(taken.data))
    assert found is None or len(found) == size
    source.close()
