"""Versions on their way to another host: an engine there reads whole ones only, and never an older one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from busrl.errors import WeightsRefused
from busrl.hosts.folders import FolderCopy, FolderSnapshot
from busrl.hosts.versions import CopiedVersion, Pieces, SegmentCopy, Snapshot
from busrl.weights.folders import DRAFT, FolderReceiver, FolderSender, versions
from busrl.weights.shm import LOGGED, ShmReceiver, ShmSender, attach_segment

PIECE = 100


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((7, 9), value), "b": torch.full((5,), -value, dtype=torch.bfloat16)}


def pieces(source: Snapshot, version: CopiedVersion) -> list[tuple[int, memoryview]]:
    starts = range(0, len(version.data), PIECE)
    parts = [(at, source.piece(version.digest, at, min(PIECE, len(version.data) - at))) for at in starts]
    return [(at, data) for at, data in parts if data is not None]


def begun(copy: SegmentCopy | FolderCopy, version: CopiedVersion) -> Pieces:
    parts = Pieces(len(version.data), PIECE, version.digests)
    copy.begin(version.version, version.step, version.checksum, version.manifest, version.digest, parts)
    return parts


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
        params = tensors(0)
        assert engine.fetch(params) == (version, version)
        assert all(torch.equal(params[name], tensor) for name, tensor in tensors(version).items())


def test_a_copy_that_ends_in_the_middle_leaves_the_version_before_it(tmp_path: Path) -> None:
    sender, source = ShmSender(tmp_path / "home"), Snapshot(tmp_path / "home", PIECE)
    engine, params = ShmReceiver(tmp_path / "away"), tensors(0)
    for version, full in ((1, True), (2, False), (3, False), (4, True)):
        sender.publish(version, version, tensors(version))
        taken, copy = source.take(), SegmentCopy(tmp_path / "away")  # of a new process
        assert taken is not None
        begun(copy, taken)
        for at, data in pieces(source, taken)[: None if full else 1]:
            copy.write(at, data)
        copy.done() if full else copy.close()
        newest = version if full else 1
        assert engine.fetch(params) == (newest, newest)
        assert torch.equal(params["a"], tensors(newest)["a"])


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


def test_a_host_offers_only_what_it_has_of_two_versions(tmp_path: Path) -> None:
    sender, source = ShmSender(tmp_path / "home"), Snapshot(tmp_path / "home", PIECE)
    copy, taken = SegmentCopy(tmp_path / "away"), []
    for version in (1, 2, 3):
        sender.publish(version, version, tensors(version))
        snapshot = source.take()
        assert snapshot is not None
        taken.append(snapshot)
        here = begun(copy, snapshot)
        for number, (at, data) in enumerate(pieces(source, snapshot)):
            assert copy.piece(snapshot.digest, at, len(data)) is None
            assert here.came(at, data)
            copy.write(at, data)
            assert copy.piece(snapshot.digest, at, len(data)) == data
            if (version, number) == (3, 1):  # of the last one the rest does not come
                break
        if version < 3:
            copy.done()
    first, second, third = (version.digest for version in taken)
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
    piece = source.piece(taken.digest, at, size)
    assert (piece is not None) == (at >= 0 and size > 0 and at + size <= len(taken.data))
    assert piece is None or len(piece) == size
    source.close()


def test_a_version_of_sparse_updates_reaches_engines_of_another_host_whole(tmp_path: Path) -> None:
    """Whichever versions the host left out: it needs none of those that an update follows."""
    sender = ShmSender(tmp_path / "home", checksums=True, threshold=0.5, key_every=5)
    source, copy = Snapshot(tmp_path / "home", PIECE), SegmentCopy(tmp_path / "away")
    engine, values, params, sparse = ShmReceiver(tmp_path / "away"), tensors(1), tensors(0), 0
    for version in range(1, 14):
        values["a"].view(-1)[version] += version
        values["b"][version % 5] = version
        sender.publish(version, 2 * version, values)
        if version % 3 == 0:
            continue
        segment = attach_segment(tmp_path / "home")
        assert segment is not None
        sparse += bool(segment.buffer[segment.newest() or 0][LOGGED])
        taken = source.take()
        assert taken is not None and (taken.version, taken.step) == (version, 2 * version)
        begun(copy, taken)
        for at, data in pieces(source, taken):
            copy.write(at, data)
        copy.done()
        assert engine.fetch(params) == (version, 2 * version)
        assert all(torch.equal(params[name], tensor) for name, tensor in values.items())
    assert sparse >= 4


def test_a_damaged_sparse_update_is_sent_to_nobody(tmp_path: Path) -> None:
    sender, source = ShmSender(tmp_path / "home", threshold=0.5), Snapshot(tmp_path / "home", PIECE)
    values = tensors(1)
    sender.publish(1, 1, values)
    values["a"][0, 0] = 7
    sender.publish(2, 2, values)
    segment = attach_segment(tmp_path / "home", writable=True)
    assert segment is not None
    k = segment.newest() or 0
    assert segment.buffer[k][LOGGED]
    segment.log[k][60] ^= 1
    assert source.take() is None
    sender.publish(3, 3, {name: tensor + 1 for name, tensor in values.items()})
    taken = source.take()
    assert taken is not None and taken.version == 3


def written(folder: Path, tensors: object) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "empty").touch()
    (folder / "values.bin").write_bytes(bytes(range(256)) * 3)
    (folder / "deep" / "version.txt").write_text(folder.name)


def sent(root: Path) -> FolderSender:
    return FolderSender(root, written, kind="checkpoint", kept=2)


def test_engines_on_the_other_host_take_the_folders_that_the_learner_wrote(tmp_path: Path) -> None:
    sender, source = sent(tmp_path / "home"), FolderSnapshot(tmp_path / "home", PIECE)
    copy, engine = FolderCopy(tmp_path / "away", count=2), FolderReceiver(tmp_path / "away", "rollout/0", kind="folder")
    assert source.take() is None and copy.newest() == -1
    for version in (1, 2, 5):
        sender.publish(version, version + 1, {})
        taken = source.take()
        assert taken is not None and taken.version == version
        begun(copy, taken)
        all_of_it = pieces(source, taken)
        assert len(all_of_it) > 5
        for at, data in reversed(all_of_it):
            assert engine.newest()[0] < version, "not before it is whole"
            copy.write(at, data)
        copy.done()
        assert engine.newest() == (version, version + 1)
        _, _, folder = engine.take()
        for file in ("deep/empty", "values.bin", "deep/version.txt", "busrl.json"):
            assert (folder / file).read_bytes() == (tmp_path / "home" / folder.name / file).read_bytes()
    assert [folder.version for folder in versions(tmp_path / "away")] == [2, 5]


def test_a_folder_is_forwarded_while_it_arrives_and_after_its_replacement(tmp_path: Path) -> None:
    sender, source = sent(tmp_path / "home"), FolderSnapshot(tmp_path / "home", PIECE)
    copy = FolderCopy(tmp_path / "away", 1)
    sender.publish(1, 1, {})
    first = source.take()
    assert first is not None
    here = begun(copy, first)
    at, data = pieces(source, first)[2]
    assert copy.holds(first.digest) and copy.piece(first.digest, at, len(data)) is None
    assert here.came(at, data)
    copy.write(at, data)
    assert copy.piece(first.digest, at, len(data)) == bytes(data)
    for at, data in pieces(source, first):
        here.came(at, data)
        copy.write(at, data)
    copy.done()
    sender.publish(2, 2, {})
    two = source.take({1})
    assert two is not None
    begun(copy, two)
    assert [copy.piece(first.digest, at, len(data)) for at, data in pieces(source, first)] == [
        bytes(data) for _, data in pieces(source, first)
    ]


def test_of_a_folder_that_ends_in_the_middle_nothing_is_found(tmp_path: Path) -> None:
    sender, source = sent(tmp_path / "home"), FolderSnapshot(tmp_path / "home", PIECE)
    sender.publish(1, 1, {})
    taken = source.take()
    assert taken is not None
    dead = FolderCopy(tmp_path / "away", 1)  # of a relay that is killed here
    begun(dead, taken)
    dead.write(*pieces(source, taken)[0])
    copy = FolderCopy(tmp_path / "away", 1)
    assert copy.newest() == -1 and list((tmp_path / "away").glob(f"{DRAFT}*"))
    begun(copy, taken)
    copy.abandon()
    assert copy.newest() == -1 and not list((tmp_path / "away").glob(f"{DRAFT}*")) and not copy.holds(taken.digest)


@pytest.mark.parametrize("name", ["/etc/passwd", "../out", "a/../../out", "", "."])
def test_no_name_leads_out_of_a_folder(name: str, tmp_path: Path) -> None:
    copy = FolderCopy(tmp_path / "away", 1)
    with pytest.raises(WeightsRefused, match="names no files of a folder"):
        copy.begin(1, 1, 0, json.dumps([[name, 3]]).encode(), 5, Pieces(3, 3, bytes(8)))
    assert not (tmp_path / "away").exists()
