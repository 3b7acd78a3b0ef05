"""A start without a ring: what was trained becomes T, what else was dispatched goes back, nothing else moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from busrl.launcher.fates import PutBack, put_back
from busrl.ledger.trained import TrainedSet
from busrl.ledger.wal import Record, SampleRecord, Wal, frames
from busrl.paths import RunPaths
from busrl.ring import Fates


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths.of(tmp_path)
    paths.checkpoints.mkdir()
    return paths


def fates_of(path: Path, codes: dict[int, str]) -> Fates:
    fates = Fates(str(path), create=True, capacity=1 << 26)
    for uid, code in codes.items():
        fates.store(uid, "D")
        if code != "D":
            fates.store(uid, code)
    return fates


def sample(uid: int) -> SampleRecord:
    return SampleRecord(
        uid=uid, group=0, admission=0, member=0, attempt=0, prompt_crc=0, reward=0.0, temperature=1.0, version=0,
        step=0, finish=1, prompt_ids=b"", token_ids=b"", logprobs=b"", versions=b"",
    )


def checkpoint(paths: RunPaths, step: int, uids: list[int]) -> None:
    folder = paths.checkpoints / f"global_step_{step}"
    folder.mkdir()
    TrainedSet(uids).save(folder / "trained.bin")
    (folder / "meta.json").write_text("{}")


def test_samples_in_checkpoint_or_log_are_trained_and_the_rest_returns(paths):
    fates = fates_of(paths.fates, {1: "D", 2: "D", 3: "D", 4: "T", 5: "P", 3_000_000: "D"})
    validate = fates_of(paths.validate_fates, {0: "V", 9: "D"})
    checkpoint(paths, 2, [4])
    checkpoint(paths, 10, [1, 4])
    (paths.checkpoints / "global_step_11").mkdir()  # half of one, without its meta.json
    with Wal(paths.wal) as wal:
        wal.append(Record(step=11, version=11, cause="count", groups=[0], samples=[sample(2)]))
    assert put_back(paths) == PutBack(trained=2, again=2, validation=1)
    assert [chr(fates.get(uid)) for uid in (1, 2, 3, 4, 5, 3_000_000)] == ["T", "T", "\0", "T", "P", "\0"]
    assert [chr(validate.get(uid)) for uid in (0, 9)] == ["V", "\0"]
    assert json.loads(paths.draws.read_text())["uids"] == [3, 3_000_000]
    assert put_back(paths) == PutBack()


def test_a_first_start_finds_nothing_to_put_back(paths):
    assert put_back(paths) == PutBack()
    assert not paths.draws.exists()


def test_a_table_of_fates_from_another_run_is_named_with_a_remedy(paths):
    fates_of(paths.fates, {1: "D", 4: "T", 5: "T", 2_000_000: "T"})
    checkpoint(paths, 2, [4])
    settled = put_back(paths)
    assert settled == PutBack(trained=0, again=1, validation=0, unlogged=2)
    assert "fates.bin calls 2 others trained that neither" in str(settled) and "restore or remove it" in str(settled)


def test_damage_in_records_that_the_newest_checkpoint_holds_costs_nothing(paths):
    fates = fates_of(paths.fates, {1: "D", 2: "D", 3: "D", 4: "D"})
    checkpoint(paths, 3, [1, 2, 3])
    with Wal(paths.wal) as wal:
        for step in (1, 2, 3, 4):
            wal.append(Record(step=step, version=step, cause="count", groups=[0], samples=[sample(step)]))
    (segment,) = paths.wal.glob("*.wal")
    data = bytearray(segment.read_bytes())
    second = next(end for _, end in frames(bytes(data)))
    data[second + 20] ^= 0xFF
    segment.write_bytes(data)
    assert put_back(paths) == PutBack(trained=4)
    assert [chr(fates.get(uid)) for uid in (1, 2, 3, 4)] == ["T", "T", "T", "T"]
