"""A damaged trained set of the newest checkpoint: made again from the train log byte for byte, or refused."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from busrl.errors import FileCorrupt
from busrl.ledger.trained import RESTORED, TrainedSet, TrainLine, mend_train_log, mend_trained_set, train_log_is_whole
from busrl.paths import RunPaths
from busrl.system import files

STEPS = {step: list(range(step * 8, step * 8 + 8)) for step in range(1, 6)}


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run that was trained for five steps, went back to step 2 once, and has checkpoints of steps 2 and 4."""
    run = RunPaths.of(tmp_path)
    rolled_back = [TrainLine(step=3, version=3, cause="count", samples=[(900, 0, 0)])]
    lines = [TrainLine(step=step, version=step, cause="count", samples=[(u, 0, 0) for u in us]) for step, us in
             STEPS.items()]
    lines[2:2] = rolled_back
    run.train_log.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + b'{"step": 6, "samp')
    for step in (2, 4):
        folder = run.checkpoints / f"global_step_{step}"
        folder.mkdir(parents=True)
        uids = [uid for number in range(1, step + 1) for uid in STEPS[number]]
        TrainedSet(uids).save(folder / "trained.bin")
        data = (folder / "trained.bin").read_bytes()
        (folder / "meta.json").write_text(json.dumps({"step": step, "samples": len(uids)}))
        (folder / "files.json").write_text(json.dumps({"trained.bin": [len(data), zlib.crc32(data)], "a": [1, 2]}))
    return run


def newest(paths: RunPaths) -> Path:
    return paths.checkpoints / "global_step_4"


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut in the middle": lambda data: data[: len(data) // 2],
    "cut in its head": lambda data: data[:5],
    "empty": lambda data: b"",
    "garbage at its end": lambda data: data + b"\0\1\2",
    "a changed byte": lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:],
    "another number in its head": lambda data: data[:16] + b"\7" + data[17:],
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_set_comes_back_byte_for_byte(paths: RunPaths, how: str) -> None:
    path = newest(paths) / "trained.bin"
    whole, listed = path.read_bytes(), (newest(paths) / "files.json").read_bytes()
    assert mend_trained_set(paths) is None
    path.write_bytes(DAMAGE[how](whole))
    said = mend_trained_set(paths)
    assert said is not None and str(path) in said and "written again: 32 samples, from train.jsonl" in said
    assert path.read_bytes() == whole and (newest(paths) / "files.json").read_bytes() == listed
    assert mend_trained_set(paths) is None


def test_a_missing_set_comes_back_and_an_older_checkpoint_stays_unchanged(paths: RunPaths) -> None:
    path, older = newest(paths) / "trained.bin", paths.checkpoints / "global_step_2" / "trained.bin"
    whole = path.read_bytes()
    path.unlink()
    older.write_bytes(b"")
    said = mend_trained_set(paths)
    assert said is not None and "No such file" in said
    assert path.read_bytes() == whole and older.read_bytes() == b""


def test_the_list_of_the_checkpoint_follows_a_file_that_was_packed_otherwise(paths: RunPaths) -> None:
    path, listing = newest(paths) / "trained.bin", newest(paths) / "files.json"
    path.write_bytes(path.read_bytes()[:-1])
    listing.write_text(json.dumps({"trained.bin": [7, 7], "a": [1, 2]}))
    assert mend_trained_set(paths)
    data = path.read_bytes()
    assert json.loads(listing.read_text()) == {"trained.bin": [len(data), zlib.crc32(data)], "a": [1, 2]}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda paths: paths.train_log.unlink(), "names 0 samples up to its step, not 32"),
        (lambda paths: paths.train_log.write_bytes(b"[" + paths.train_log.read_bytes()), "names 24 samples"),
        (lambda paths: (newest(paths) / "meta.json").write_text("{}"), "its meta.json cannot be read either"),
    ],
)
def test_what_can_not_be_made_again_is_refused_with_what_to_do(paths: RunPaths, spoil, said: str) -> None:
    path = newest(paths) / "trained.bin"
    path.write_bytes(path.read_bytes()[:-1])
    damaged = path.read_bytes()
    spoil(paths)
    with pytest.raises(FileCorrupt) as problem:
        mend_trained_set(paths)
    text = str(problem.value)
    assert said in text and f"Move {newest(paths)} out of its directory" in text and "trained_unlogged" in text
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    "end", [b"\0" * 200_000, b'{"step": 7, "samples": [' + b"[1,0,2]," * 20_000], ids=["NULs", "half a line"]
)
def test_a_train_log_ending_in_long_garbage_is_recognised_as_damaged(paths: RunPaths, end: bytes) -> None:
    paths.train_log.write_bytes(b'{"step": 1, "samples": []}\n')
    assert train_log_is_whole(paths.train_log, 0)
    with open(paths.train_log, "ab") as file:
        file.write(end)
    assert not train_log_is_whole(paths.train_log, 0)


def test_a_death_while_mending_keeps_the_damaged_train_log_in_place(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = paths.train_log.read_bytes()

    def died(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "replace", died)
    with pytest.raises(KeyboardInterrupt):
        mend_train_log(paths.train_log, 4, TrainedSet(), (), lambda uid: 0, 0)
    assert paths.train_log.read_bytes() == before
    monkeypatch.undo()
    told = mend_train_log(paths.train_log, 4, TrainedSet(), (), lambda uid: 0, 0)
    assert "train.jsonl.damaged-2" in told and paths.train_log.with_name("train.jsonl.damaged-2").read_bytes() == before
    assert [json.loads(line)["step"] for line in paths.train_log.read_bytes().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize("uid", ["-1", str(1 << 70), '"7"', str(1 << 35), "1.5"])
def test_a_line_with_an_impossible_uid_is_a_damaged_line(paths: RunPaths, uid: str) -> None:
    """Its samples are known from elsewhere, or the refusal names the line."""
    lines = paths.train_log.read_text().split("\n")
    lines[1] = '{"step": 2, "version": 2, "cause": "count", "samples": [[' + uid + ", 0, 0]]}"
    paths.train_log.write_text("\n".join(lines[:-1]) + "\n")
    path = newest(paths) / "trained.bin"
    path.write_bytes(b"")
    with pytest.raises(FileCorrupt, match=r"names 24 samples up to its step, not 32 \(1 of its lines .* line 2: "):
        mend_trained_set(paths)
    trained = TrainedSet(uid for step in range(1, 5) for uid in STEPS[step])
    told = mend_train_log(paths.train_log, 4, trained, (), lambda uid: 0, 0)
    assert "line 2: " in told and "the steps of 8 samples are not known any more" in told
    mended = [json.loads(line) for line in paths.train_log.read_text().splitlines()]
    assert [(line["step"], line["cause"]) for line in mended] == [(step, RESTORED if step == 2 else "count")
                                                                  for step in (1, 2, 3, 4)]
    assert sorted(uid for line in mended for uid, _, _ in line["samples"]) == sorted(trained)
    paths.train_log.write_text('{"step": 1, "samples": [[' + uid + ", 0, 0]]}\n")
    assert not train_log_is_whole(paths.train_log, 0)


def test_a_long_train_log_is_mended_a_line_at_a_time(tmp_path: Path) -> None:
    """Three thousand steps of 64 samples, 5 MB: neither the file nor its lines are held."""
    path, entry = tmp_path / "train.jsonl", ", ".join(f"[{uid}, 0, 4000000000]" for uid in range(64))
    with open(path, "w") as file:
        for step in range(3000):
            file.write(f'{{"step": {step}, "version": 1, "cause": "c", "samples": [{entry}]}}\n')
    size = path.stat().st_size
    tracemalloc.start()
    try:
        told = mend_train_log(path, 3000, TrainedSet(range(64)), (), lambda uid: 0, size + 100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 4e6 and peak < 1.5e6, "what is held is a place of each line"
    assert "the steps of 0 samples" in told and path.stat().st_size == size + 100
