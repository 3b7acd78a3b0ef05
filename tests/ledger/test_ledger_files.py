"""The smaller files of the ledger: fate codes, trained set, open.bin, draws.log, train.jsonl, whole files, lines."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from busrl.errors import DiskFull, FileCorrupt, LedgerError, UserError
from busrl.ledger.audit import histogram
from busrl.ledger.openbin import OpenSlot, read_draws, read_open, record_put_back, remove_open, write_open
from busrl.ledger.trained import UID_LIMIT, TrainedSet, TrainLine, last_step, step_lines
from busrl.ledger.wal import Record
from busrl.states import ACCIDENTS, FATE_NAMES, RULES, Fate, fate_name
from busrl.system import files
from busrl.system.files import LineFile, json_lines


def test_every_fate_has_a_name_and_a_kind() -> None:
    assert set(FATE_NAMES) == set(Fate)
    for fate in Fate:
        kinds = [fate in RULES, fate in ACCIDENTS, fate in (Fate.TRAINED, Fate.VALIDATED)]
        assert sum(kinds) == (0 if fate in (Fate.NONE, Fate.DISPATCHED) else 1)
        assert fate_name(fate.letter) == fate_name(fate) == FATE_NAMES[fate]


def test_a_histogram_names_unknown_codes_and_leaves_out_none() -> None:
    codes = np.frombuffer(b"\0\0DTTf\x05", np.uint8)
    assert histogram(codes) == {"dispatched": 1, "trained": 2, "flat group": 1, "unknown code 5": 1}


def test_a_trained_set_refuses_uids_that_are_no_training_uids() -> None:
    trained = TrainedSet([5])
    for uid in (-1, UID_LIMIT, 1 << 62):
        with pytest.raises(LedgerError, match=str(uid)):
            trained.add([uid])
        assert uid not in trained
    assert (len(trained), list(trained)) == (1, [5])


def test_a_trained_set_of_a_million_uids_is_small_on_disk(tmp_path: Path) -> None:
    trained = TrainedSet(uid for uid in range(2_000_000) if uid // 8 % 2 == 0)
    trained.save(tmp_path / "trained.bin")
    assert (tmp_path / "trained.bin").stat().st_size < 20_000
    assert len(TrainedSet.load(tmp_path / "trained.bin")) == 1_000_000


def test_a_trained_set_that_does_not_fit_leaves_the_old_file(tmp_path: Path, largest_file) -> None:
    path = tmp_path / "trained.bin"
    TrainedSet([1, 2]).save(path)
    with largest_file(8), pytest.raises(DiskFull, match=r"trained\.bin"):
        TrainedSet([3]).save(path)
    assert list(TrainedSet.load(path)) == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["trained.bin"]


def test_open_bin_comes_back_also_when_nothing_was_open(tmp_path: Path) -> None:
    path = tmp_path / "open.bin"
    assert read_open(path) is None
    write_open(path, [])
    assert read_open(path) == []
    slots = [OpenSlot(7, 2, 0), OpenSlot(1 << 62, 6, 3)]
    write_open(path, slots)
    assert read_open(path) == slots
    remove_open(path)
    assert read_open(path) is None


@pytest.mark.parametrize("at", [0, 9, 12, 16, 24, 30])
def test_a_damaged_open_bin_is_refused(tmp_path: Path, at: int) -> None:
    path = tmp_path / "open.bin"
    write_open(path, [OpenSlot(7, 2, 0)])
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileCorrupt, match=r"open\.bin"):
        read_open(path)


def test_put_backs_are_kept_and_half_a_line_was_never_acted_upon(tmp_path: Path) -> None:
    path = tmp_path / "draws.log"
    assert read_draws(path) == []
    record_put_back(path, [9, 4], "no slot")
    record_put_back(path, [], "nothing")
    with path.open("ab") as file:
        file.write(b'{"time_ns": 1, "why": "ki')
    assert [(entry.uids, entry.why) for entry in read_draws(path)] == [([4, 9], "no slot")]
    record_put_back(path, [5], "again")
    assert [entry.uids for entry in read_draws(path)] == [[4, 9], [5]]


def test_a_line_of_the_train_log_names_uid_attempt_and_prompt(tmp_path: Path, run) -> None:
    samples = [run.sample(1, prompt_crc=77), run.sample(2, attempt=1, prompt_crc=78)]
    line = TrainLine.of(Record(step=3, version=4, cause="count", groups=[0], samples=samples))
    assert msgspec.json.encode(line) == b'{"step":3,"version":4,"cause":"count","samples":[[1,0,77],[2,1,78]]}'


@pytest.mark.parametrize("rest", [b"", b"half", b"x" * 200_000])
def test_half_a_line_of_a_killed_writer_is_cut_before_the_next(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\n" + rest)
    lines = LineFile(path)
    lines.append(b"two")
    lines.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path, largest_file) -> None:
    lines = LineFile(tmp_path / "lines", sync=True)
    lines.append(b"one")
    with largest_file(6), pytest.raises(DiskFull):
        lines.append(b"a longer one")
    lines.append(b"two")
    lines.close()
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\n"


def test_a_whole_file_is_private_and_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.replace(path, b"old")
    reader = path.open("rb")
    files.replace(path, b"new")
    assert (reader.read(), path.read_bytes()) == (b"old", b"new")
    reader.close()
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_drafts_of_killed_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    others = [f"one.{os.getppid()}.new", f"two.{dead.pid}.new", "one.more.new"]
    for name in (*others, f"one.{dead.pid}.new"):
        (tmp_path / name).touch()
    files.replace(tmp_path / "one", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["one", *others])


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def removed(path: Path) -> None:
    path.unlink()


def rotated(path: Path) -> None:
    path.rename(path.with_suffix(".1"))
    path.touch()


def half_a_line(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b'{"no end')


@pytest.mark.parametrize("damage", [emptied, removed, rotated, half_a_line])
def test_the_next_line_stands_whole_in_its_named_file_whatever_happened(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = LineFile(path)
    for step in range(1, 4):
        lines.append(json.dumps({"step": step}).encode())
    damage(path)
    for step in range(4, 6):
        lines.append(json.dumps({"step": step}).encode())
    lines.close()
    assert b"\0" not in path.read_bytes()
    kept = [1, 2, 3] if damage is half_a_line else []
    assert [row["step"] for row in json_lines(path)] == [*kept, 4, 5]


def test_a_directory_that_is_moved_takes_its_lines_along(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lines = LineFile(tmp_path / "run" / "train.jsonl")
    lines.append(b"{}")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    lines.append(b"{}")
    lines.close()
    assert (tmp_path / "elsewhere" / "train.jsonl").read_bytes() == b"{}\n{}\n" and not (tmp_path / "run").exists()


def test_a_name_taken_by_something_other_than_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "there" / "is" / "none")
    for name, why in (("folder", "Is a directory"), ("pipe", "no regular file"), ("nowhere", "No such file")):
        with pytest.raises(UserError, match=f"{name}: cannot be opened for lines: .*{why}.*move away"):
            LineFile(tmp_path / name)


def test_lines_are_read_back_past_whatever_else_stands_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n}{ not json\n[2]\n' + bytes(5000) + b'\n{"a": 3}\n\xff\n{"a": 4}\n{"a": 5')
    assert [row["a"] for row in json_lines(path)] == [1, 3, 4]
    assert [row["a"] for row in json_lines(path, tail=25)] == [4]
    assert not list(json_lines(tmp_path / "none")) and not list(json_lines(tmp_path))


def test_a_groups_line_without_a_step_belongs_to_no_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    idle = '{"kind": "idle", "step": 4}\n'
    path.write_text(f'{idle}{{"step": 1}}\n{{"step": 3}}\n{idle}{{"step": 4, "re')
    assert last_step(path) == 3
    assert [row["step"] for row in step_lines(path)] == [1, 3] and step_lines(tmp_path / "none") == []
    assert step_lines(path, tail=50) == []
