"""Properties of the log and of the trained set, for any records, any cut and any damage."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.errors import FileCorrupt
from busrl.ledger.audit import readers
from busrl.ledger.audit.readers import in_bitmap
from busrl.ledger.trained import TrainedSet
from busrl.ledger.wal import HEAD, Record, SampleRecord, Wal

uids = st.integers(0, 5000)
samples = st.builds(
    SampleRecord, uid=uids, group=uids, admission=uids, member=st.integers(0, 7), attempt=st.integers(0, 3),
    prompt_crc=st.integers(0, 2**32 - 1), reward=st.floats(allow_nan=False), temperature=st.just(1.0), version=uids,
    step=uids, finish=st.integers(0, 3), prompt_ids=st.binary(max_size=9), token_ids=st.binary(max_size=9),
    logprobs=st.binary(max_size=9), versions=st.binary(max_size=9),
)
causes = st.one_of(st.text(max_size=5), st.just("WREC"))


@st.composite
def logs(draw: st.DrawFn) -> list[Record]:
    steps = sorted(draw(st.sets(st.integers(0, 99), max_size=5)))
    return [
        Record(step=step, version=step, cause=draw(causes), groups=[], samples=draw(st.lists(samples, max_size=3)))
        for step in steps
    ]


def write(directory: Path, records: list[Record], segment_bytes: int) -> None:
    with Wal(directory, sync=False, segment_bytes=segment_bytes) as wal:
        for record in records:
            wal.append(record)


def steps_seen_by_the_audit(directory: Path) -> list[int]:
    return [step.step for step in readers.read_log(directory, [])]


@settings(max_examples=150)
@given(logs(), st.data(), st.sampled_from([1, 300, 1 << 20]))
def test_a_log_cut_at_any_byte_is_a_prefix_of_its_records(
    records: list[Record], data: st.DataObject, size: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "wal"
        write(directory, records, size)
        newest = max(directory.glob("*.wal"), default=None)
        if newest is not None:
            newest.write_bytes(newest.read_bytes()[: data.draw(st.integers(0, newest.stat().st_size))])
        assert (
            steps_seen_by_the_audit(directory) == [r.step for r in records][: len(steps_seen_by_the_audit(directory))]
        )
        seen = steps_seen_by_the_audit(directory)
        with Wal(directory, sync=False) as wal:
            kept = list(wal.records())
            assert kept == records[: len(kept)]
            assert [r.step for r in kept] == seen
            wal.append(Record(step=100, version=0, cause="", groups=[], samples=[]))
        with Wal(directory, sync=False) as wal:
            assert [r.step for r in wal.records()] == [*seen, 100]
            assert wal.cut_bytes == 0


@settings(max_examples=150)
@given(logs().filter(bool), st.data())
def test_a_log_with_a_damaged_byte_is_refused_or_loses_one_record(
    records: list[Record], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "wal"
        write(directory, records, 1 << 20)
        path = directory / "00000001.wal"
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(len(HEAD), len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        try:
            wal = Wal(directory, sync=False)
        except FileCorrupt:
            assert path.read_bytes() == content
        else:
            assert list(wal.records()) == records[:-1]
            wal.close()


@given(st.lists(uids), st.lists(uids))
def test_a_trained_set_is_a_set(first: list[int], second: list[int]) -> None:
    trained = TrainedSet(first)
    again = trained.add(second)
    assert set(trained) == set(first) | set(second)
    assert len(trained) == len(set(first) | set(second))
    assert set(again) >= set(first) & set(second)
    assert len(again) == len(second) - len(set(second) - set(first))
    asked = np.array([*first, *second, 7, 10**9], np.uint64)
    assert trained.contains_all(asked).tolist() == [int(uid) in trained for uid in asked]


@settings(max_examples=50)
@given(st.sets(uids), st.data())
def test_a_saved_set_comes_back_and_a_damaged_one_is_refused(wanted: set[int], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trained.bin"
        TrainedSet(wanted).save(path)
        assert list(TrainedSet.load(path)) == sorted(wanted)
        bitmap, count = readers.unpack_trained(path.read_bytes())
        assert (set(in_bitmap(bitmap).tolist()), count) == (wanted, len(wanted))
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        with pytest.raises(FileCorrupt):
            TrainedSet.load(path)
        with pytest.raises(ValueError):
            readers.unpack_trained(path.read_bytes())
