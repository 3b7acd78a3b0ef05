"""The write-ahead log: what is appended is there, what is torn is cut, what is damaged is refused."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from busrl.errors import DiskFull, FileCorrupt, LedgerError, WriteFailed
from busrl.ledger.wal import HEAD, Record, SampleRecord, Wal, frames


def sample(uid: int, tokens: int = 3) -> SampleRecord:
    return SampleRecord(
        uid=uid, group=uid // 8, admission=uid // 8, member=uid % 4, attempt=0, prompt_crc=uid * 7, reward=0.5,
        temperature=1.0, version=2, step=1, finish=1, prompt_ids=np.arange(2, dtype="<i4").tobytes(),
        token_ids=np.arange(tokens, dtype="<i4").tobytes(), logprobs=np.full(tokens, -1.5, "<f4").tobytes(),
        versions=np.full(tokens, 2, "<u4").tobytes(),
    )


def record(step: int, uids: range = range(4), tokens: int = 3) -> Record:
    return Record(step=step, version=step + 1, cause="count", groups=[0], samples=[sample(uid, tokens) for uid in uids])


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.wal"))


def test_records_come_back_in_order_after_reopening(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal") as wal:
        for step in (1, 2, 5):
            wal.append(record(step))
    with Wal(tmp_path / "wal") as wal:
        assert list(wal.records()) == [record(1), record(2), record(5)]
        assert [r.step for r in wal.records(after=1)] == [2, 5]
        assert (wal.last_step, wal.last_version) == (5, 6)


def test_arrays_of_a_sample_have_the_types_that_were_written() -> None:
    short = sample(9)
    assert short.token_array().tolist() == [0, 1, 2] and short.token_array().dtype == np.int32
    assert short.logprob_array().tolist() == [-1.5] * 3 and short.logprob_array().dtype == np.float32
    assert short.version_array().tolist() == [2] * 3 and short.version_array().dtype == np.uint32
    assert short.prompt_array().tolist() == [0, 1]


def test_a_step_that_does_not_grow_is_refused_also_after_reopening(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal") as wal:
        wal.append(record(3))
        with pytest.raises(LedgerError, match="step 3 after step 3"):
            wal.append(record(3))
    with Wal(tmp_path / "wal") as wal, pytest.raises(LedgerError, match="step 2 after step 3"):
        wal.append(record(2))


def test_a_torn_last_record_is_cut_and_the_next_append_follows(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal") as wal:
        wal.append(record(1))
        path = tmp_path / "wal" / "00000001.wal"
        whole = path.stat().st_size
        wal.append(record(2))
    os.truncate(path, path.stat().st_size - 1)
    with Wal(tmp_path / "wal") as wal:
        assert [r.step for r in wal.records()] == [1]
        assert (path.stat().st_size, wal.last_step) == (whole, 1)
        assert wal.cut_bytes > 0
        wal.append(record(2, range(8, 12)))
    with Wal(tmp_path / "wal") as wal:
        assert list(wal.records()) == [record(1), record(2, range(8, 12))]


def test_a_last_record_with_a_wrong_checksum_is_cut(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal") as wal:
        wal.append(record(1))
        wal.append(record(2))
    flip(tmp_path / "wal" / "00000001.wal", -3)
    with Wal(tmp_path / "wal") as wal:
        assert [r.step for r in wal.records()] == [1]


def test_damage_with_records_behind_it_is_refused_and_nothing_is_cut(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal") as wal:
        wal.append(record(1))
        wal.append(record(2))
    path = tmp_path / "wal" / "00000001.wal"
    flip(path, len(HEAD) + 20)
    before = path.read_bytes()
    with pytest.raises(FileCorrupt, match="byte 16 is damaged, and records follow it"):
        Wal(tmp_path / "wal")
    assert path.read_bytes() == before


def test_damage_at_the_end_of_an_older_segment_is_refused(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal", segment_bytes=1) as wal:
        wal.append(record(1))
        wal.append(record(2))
    flip(tmp_path / "wal" / "00000001.wal", -1)
    with pytest.raises(FileCorrupt, match=r"00000001\.wal"):
        Wal(tmp_path / "wal")


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wal").mkdir()
    (tmp_path / "wal" / "00000001.wal").write_bytes(b"something else entirely")
    with pytest.raises(FileCorrupt, match="does not begin with"):
        Wal(tmp_path / "wal")


def test_a_segment_whose_head_was_never_finished_is_begun_again(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal", segment_bytes=1) as wal:
        wal.append(record(1))
    (tmp_path / "wal" / "00000002.wal").write_bytes(HEAD[:7])
    with Wal(tmp_path / "wal", segment_bytes=1) as wal:
        wal.append(record(2))
        assert [r.step for r in wal.records()] == [1, 2]


def test_old_segments_go_after_a_checkpoint_and_newer_ones_stay(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal", segment_bytes=1) as wal:
        for step in range(1, 6):
            wal.append(record(step))
        assert len(segments(tmp_path / "wal")) == 5
        assert wal.drop_before(4) == 3
        assert [r.step for r in wal.records()] == [4, 5]
        assert wal.drop_before(6) == 2
        assert (segments(tmp_path / "wal"), list(wal.records())) == ([], [])
        wal.append(record(6))
    assert segments(tmp_path / "wal") == ["00000006.wal"]


def test_a_segment_with_one_newer_record_is_kept_whole(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal") as wal:
        wal.append(record(1))
        wal.append(record(2))
        assert wal.drop_before(2) == 0
        assert [r.step for r in wal.records()] == [1, 2]


def run_python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": paths}, check=False
    )


FILL = """
import resource, sys
from busrl.errors import DiskFull
from busrl.ledger.wal import Record, Wal
wal = Wal(sys.argv[1])
wal.append(Record(step=1, version=1, cause="x" * 1000, groups=[], samples=[]))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    wal.append(Record(step=2, version=2, cause="y" * 10000, groups=[], samples=[]))
except DiskFull as full:
    print(full)
wal.append(Record(step=2, version=2, cause="small", groups=[], samples=[]))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
wal.append(Record(step=3, version=3, cause="z" * 10000, groups=[], samples=[]))
"""


def test_a_full_disk_takes_the_record_back_and_the_log_resumes(tmp_path: Path) -> None:
    done = run_python(FILL, tmp_path / "wal")
    assert done.returncode == 0, done.stderr
    assert "00000001.wal: no space for" in done.stdout
    with Wal(tmp_path / "wal") as wal:
        assert wal.cut_bytes == 0
        assert [(r.step, r.cause[:1]) for r in wal.records()] == [(1, "x"), (2, "s"), (3, "z")]


def test_a_full_disk_while_a_segment_is_begun_leaves_no_segment(tmp_path: Path) -> None:
    wal = Wal(tmp_path / "wal", segment_bytes=1)
    wal.append(record(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        with pytest.raises(DiskFull):
            wal.append(record(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert segments(tmp_path / "wal") == ["00000001.wal"]
    wal.append(record(2))
    assert [r.step for r in wal.records()] == [1, 2]
    wal.close()


def test_a_failed_sync_is_no_commit_and_an_uncuttable_log_refuses_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wal = Wal(tmp_path / "wal")
    wal.append(record(1))

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(WriteFailed, match="Input/output error"):
            wal.append(record(2))
        assert [r.step for r in wal.records()] == [1]
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(WriteFailed):
            wal.append(record(2))
    with pytest.raises(WriteFailed, match="restart the learner"):
        wal.append(record(2))
    wal.close()


APPEND = """
import sys
from busrl.ledger.wal import Record, Wal
wal = Wal(sys.argv[1], sync=False, segment_bytes=200_000)
step = wal.last_step
while True:
    step += 1
    wal.append(Record(step=step, version=step, cause=str(step) * 9000, groups=[], samples=[]))
    print(step, flush=True)
"""


def test_a_writer_killed_at_any_moment_keeps_every_appended_record(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for lives in range(1, 6):
        child = subprocess.Popen([sys.executable, "-c", APPEND, str(tmp_path / "wal")], stdout=subprocess.PIPE, env=env)
        assert child.stdout is not None
        for _ in range(7 * lives):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        said = [int(line) for line in child.stdout.read().split()]
        child.wait(timeout=30)
        child.stdout.close()
        with Wal(tmp_path / "wal") as wal:
            steps = [r.step for r in wal.records()]
            assert steps == list(range(steps[-1] + 1))
            assert not said or said[-1] <= steps[-1]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def test_a_sample_of_one_turn_is_written_without_what_episodes_need(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal") as wal:
        wal.append(record(1, range(1)))
    ((payload, _),) = frames((tmp_path / "wal" / "00000001.wal").read_bytes())
    plain = sample(0)
    names = ("uid", "group", "admission", "member", "attempt", "prompt_crc", "reward", "temperature", "version", "step",
             "finish", "prompt_ids", "token_ids", "logprobs", "versions", "segments")
    written = {name: getattr(plain, name) for name in names}
    content = {"step": 1, "version": 2, "cause": "count", "groups": [0], "samples": [written]}
    assert bytes(payload) == msgspec.msgpack.encode(content)


def test_an_episode_comes_back_with_its_sequences_turns_and_their_rewards(tmp_path: Path) -> None:
    ids, logprobs = np.arange(12, dtype="<i4").tobytes(), np.full(5, -1, "<f4").tobytes()
    arrays = {"seqs": [7, 5], "turns": [0, 2, 4, 1, 0, 6, 7, 2, 1, 3, 5, 5], "turn_rewards": [0.5, 0.0, -1.0]}
    drawn = {"prompt_ids": b"", "token_ids": ids, "logprobs": logprobs, "versions": logprobs}
    episode = msgspec.structs.replace(sample(3), **drawn, **arrays)
    with Wal(tmp_path / "wal") as wal:
        wal.append(msgspec.structs.replace(record(1), samples=[episode, sample(4)]))
    with Wal(tmp_path / "wal") as wal:
        ((read_back, plain),) = (step.samples for step in wal.records())
    assert read_back == episode and read_back.tokens == 5 and plain == sample(4)
    assert read_back.turn_array().tolist() == [[0, 2, 4, 1], [0, 6, 7, 2], [1, 3, 5, 5]]
    assert plain.turn_array().tolist() == [[0, 2, 5, 1]] and plain.tokens == 3 and not plain.seqs


def test_the_bounds_of_segments_are_in_the_log(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal") as wal:
        wal.append(record(1, tokens=7))
    with Wal(tmp_path / "wal") as wal:
        (first,) = wal.records()
    assert first.samples[0].segments == [] and first.samples[0].earlier == 0
    cut = msgspec.structs.replace(first.samples[0], segments=[4, 2, 1])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(cut), type=SampleRecord)
    assert again == cut and again.earlier == 6


def layouts(directory: Path) -> list[int]:
    return [path.read_bytes()[8] for path in sorted(directory.glob("*.wal"))]


def test_records_with_keys_stand_in_segments_of_layout_4(tmp_path: Path) -> None:
    def keyed(step: int) -> Record:
        made = record(step)
        turns = {"turns": [0, 1, 2, 1, 0, 3, 5, 3], "seqs": [5], "keys": ["plan", ""]}
        made.samples[1] = msgspec.structs.replace(made.samples[1], **turns)
        return made

    with Wal(tmp_path / "wal") as wal:
        wal.append(record(1))
        first = (tmp_path / "wal" / "00000001.wal").read_bytes()
        wal.append(keyed(2))
        wal.append(record(3))
    with Wal(tmp_path / "wal") as wal:
        assert list(wal.records()) == [record(1), keyed(2), record(3)] and wal.cut_bytes == 0
        wal.append(keyed(4))
        assert layouts(tmp_path / "wal") == [3, 4]
        wal.end_segment()
        wal.append(record(5))
    assert layouts(tmp_path / "wal") == [3, 4, 3]
    assert (tmp_path / "wal" / "00000001.wal").read_bytes() == first, "what has no keys is written as before"
    assert b"keys" not in first and first.startswith(b"BUSRLWAL\x03\0\0\0")
    with Wal(tmp_path / "wal") as wal:
        wal.append(keyed(6))
        assert [made.step for made in wal.records()] == [1, 2, 3, 4, 5, 6] and layouts(tmp_path / "wal") == [3, 4, 3, 4]


def test_a_keyed_record_that_was_torn_is_cut_like_any_other(tmp_path: Path) -> None:
    made = record(1)
    made.samples[0] = msgspec.structs.replace(made.samples[0], turns=[0, 1, 4, 1], seqs=[5], keys=["plan"])
    with Wal(tmp_path / "wal") as wal:
        wal.append(made)
    path = tmp_path / "wal" / "00000001.wal"
    os.truncate(path, path.stat().st_size - 1)
    with Wal(tmp_path / "wal") as wal:
        assert list(wal.records()) == [] and wal.cut_bytes > 0
        wal.append(made)
        assert list(wal.records()) == [made] and layouts(tmp_path / "wal") == [4]


@pytest.mark.parametrize("layout", [1, 2, 6])
def test_a_log_of_another_layout_is_refused(tmp_path: Path, layout: int) -> None:
    start = b"BUSRLWAL" + struct.pack("<I", layout)
    (tmp_path / "wal").mkdir()
    (tmp_path / "wal" / "00000001.wal").write_bytes(start + struct.pack("<I", zlib.crc32(start)))
    with pytest.raises(FileCorrupt, match="layout 3, 4 or 5; it is no log of this busrl"):
        Wal(tmp_path / "wal")


def test_damage_among_records_superseded_by_a_checkpoint_is_skipped_and_reported(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal") as wal:
        for step in range(1, 7):
            wal.append(record(step))
            if step in (2, 4):
                wal.end_segment()
    assert segments(tmp_path / "wal") == ["00000001.wal", "00000002.wal", "00000003.wal"]
    first, second = (tmp_path / "wal" / f"0000000{k}.wal" for k in (1, 2))
    flip(first, -1)  # the end of the record of step 2
    flip(second, len(HEAD) + 20)  # the record of step 3
    with pytest.raises(FileCorrupt, match=r"00000001\.wal: the record at byte"):
        Wal(tmp_path / "wal", superseded=1)
    with Wal(tmp_path / "wal", superseded=3) as wal:
        assert wal.steps() == [1, 4, 5, 6] == [record.step for record in wal.records()]
        assert len(wal.damage) == 2 and "00000002.wal: the record at byte 16 is damaged" in wal.damage[1]
        wal.append(record(7))
        assert wal.drop_before(5) == 2
    first.write_bytes(b"no log at all")
    with Wal(tmp_path / "wal", superseded=4) as wal:
        assert [record.step for record in wal.records()] == [5, 6, 7]
    with pytest.raises(FileCorrupt, match="it is no log of this busrl"):
        Wal(tmp_path / "wal", superseded=3)


def gone(directory: Path) -> None:
    shutil.rmtree(directory)


def emptied(directory: Path) -> None:
    os.truncate(directory / "00000002.wal", 0)


def other(directory: Path) -> None:
    (directory / "00000001.wal").unlink()
    (directory / "00000001.wal").write_bytes(HEAD)


def folder(directory: Path) -> None:
    (directory / "00000002.wal").unlink()
    (directory / "00000002.wal").mkdir()


@pytest.mark.parametrize("damage", [gone, emptied, other, folder])
def test_a_log_notices_outside_changes_and_begins_anew_after_a_checkpoint(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with Wal(tmp_path / "wal") as wal:
        wal.append(record(1))
        wal.end_segment()
        wal.append(record(2))
        assert not any(wal.fault() for _ in range(4))
        damage(tmp_path / "wal")
        faults = [fault for _ in range(2) if (fault := wal.fault())]
        assert faults and str(tmp_path / "wal") in faults[0], faults
        wal.renew()
        wal.append(record(3))
        assert not any(wal.fault() for _ in range(4))
    with Wal(tmp_path / "wal") as wal:
        assert [record.step for record in wal.records()] == [3]
