"""The audit's sets of uids against plain Python sets, in blocks so small that everything crosses their borders."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.ledger.audit import audit, readers
from busrl.ledger.trained import TrainedSet

some_uids = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1)), max_size=20)
few_uids = st.sets(st.integers(0, 100))


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "UIDS_AT_ONCE", 3)
        patch.setattr(readers, "BITMAP_BLOCK", 2)
        yield


def of(values: list[int]) -> readers.Uids:
    return np.array(values, np.uint64)


@given(some_uids, some_uids)
def test_differences_and_unions_are_those_of_sets(values: list[int], others: list[int]) -> None:
    ascending = readers.distinct(of(others))
    assert ascending.tolist() == sorted(set(others))
    assert readers.is_among(of(values), ascending).tolist() == [value in others for value in values]
    assert readers.minus(of(values), ascending).tolist() == sorted(set(values) - set(others))
    assert readers.union(ascending, of(values)).tolist() == sorted({*values, *others})


@given(some_uids, st.binary(max_size=50))
def test_codes_are_looked_up_within_the_table_and_are_0_beyond(values: list[int], table: bytes) -> None:
    codes = np.frombuffer(table, np.uint8)
    assert readers.codes_at(codes, of(values)).tolist() == [table[uid] if uid < len(table) else 0 for uid in values]
    assert readers.is_one_of(codes, {0, 7}).tolist() == [code in (0, 7) for code in table]
    assert readers.mask_of(of(values), len(table)).tolist() == [uid in values for uid in range(len(table))]
    assert readers.with_code(codes, 7).tolist() == [uid for uid, code in enumerate(table) if code == 7]


@given(few_uids, few_uids)
def test_bitmaps_hold_what_was_put_in(some: set[int], others: set[int]) -> None:
    bits, other = (np.packbits([uid in which for uid in range(101)], bitorder="little") for which in (some, others))
    last = max(others, default=-1) // 8 + 1  # a bitmap ends with its highest uid
    assert readers.in_bitmap(bits).tolist() == sorted(some)
    assert readers.bitmap_minus(bits, other[:last]).tolist() == sorted(some - others)
    assert readers.bitmap_minus(other[:last], bits).tolist() == sorted(others - some)


def test_an_audit_takes_little_memory_for_each_trained_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "UIDS_AT_ONCE", 1 << 12)
    monkeypatch.setattr(readers, "BITMAP_BLOCK", 1 << 12)
    size, steps, count = 8, 3000, 64
    prompt = b'{"prompt": "one", "answer": "1"}'
    (tmp_path / "prompts.jsonl").write_bytes(prompt + b"\n")
    content = {
        "run": {"seed": 1}, "data": {"train": str(tmp_path / "prompts.jsonl"), "shuffle": False},
        "groups": {"size": size}, "learner": {"wal": "sync"},
    }
    (tmp_path / "topology.json").write_text(json.dumps(content))
    fates = np.zeros((steps * count // size, 2 * size), np.uint8)
    fates[:, :size] = ord("T")
    fates.tofile(tmp_path / "fates.bin")
    uids, crc = np.flatnonzero(fates).reshape(steps, count), zlib.crc32(prompt)
    with open(tmp_path / "train.jsonl", "w") as file:
        for step, some in enumerate(uids.tolist(), 1):
            file.write(json.dumps({"step": step, "samples": [[uid, 0, crc] for uid in some]}) + "\n")
    for step in (steps - 2, steps - 1, steps):
        path = tmp_path / "checkpoints" / f"global_step_{step}"
        path.mkdir(parents=True)
        trained = TrainedSet(uids[:step].reshape(-1).tolist())
        trained.save(path / "trained.bin")
        (path / "meta.json").write_text(json.dumps({"step": step, "samples": len(trained)}))
    (tmp_path / "open.bin").write_bytes(b"")
    tracemalloc.start()
    try:
        report = audit(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.counts.trained == steps * count
    assert report.kinds <= {"open_damaged"}
    assert peak / report.counts.trained < 70
