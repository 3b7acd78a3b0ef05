"""Files of lines with a bound: parts are made and dropped while others read, and writers are killed meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.errors import DiskFull
from busrl.observe.report.files import read
from busrl.paths import RunPaths
from busrl.status.runfiles import RunFiles
from busrl.status.state import RunState
from busrl.system import files
from busrl.system.files import PARTS, TAIL_BYTES, LineFile, LineFollower, bound, dropped, json_lines, parts, whole_file


def lines_of(path: Path) -> list[int]:
    return [int(line) for line in whole_file(path)]


def bytes_of(path: Path) -> int:
    return sum(part.stat().st_size for _, part in parts(path)) + (path.stat().st_size if path.exists() else 0)


def test_a_bounded_file_keeps_its_newest_lines_and_an_unbounded_one_all(tmp_path: Path) -> None:
    for keep in (0, 400):
        path = tmp_path / f"{keep}"
        writer = LineFile(path, keep=keep)
        for n in range(1000):
            writer.append(b"%d" % n)
            assert not keep or bytes_of(path) <= keep
        lines = lines_of(path)
        assert lines == list(range(lines[0], 1000)) and (lines[0] == 0) == (keep == 0)
        assert bool(dropped(path)) == bool(parts(path)) == bool(keep)
        assert writer.size() == sum(len(b"%d\n" % n) for n in range(1000))
        if keep:
            assert len(parts(path)) < PARTS and bytes_of(path) > keep // 2
        writer.close()


def test_the_end_is_read_over_the_parts(tmp_path: Path) -> None:
    writer = LineFile(tmp_path / "lines", keep=400)
    for n in range(100):
        writer.append(b'{"n": %d}' % n)
    rows = [row["n"] for row in json_lines(tmp_path / "lines", tail=200)]
    assert rows == list(range(rows[0], 100)) and len(rows) == 200 // len('{"n": 99}\n') - 1
    assert list(whole_file(tmp_path / "lines", TAIL_BYTES))[-1] == b'{"n": 99}\n'
    writer.close()


@given(keep=st.integers(100, 4000), blocks=st.lists(st.lists(st.integers(1, 24), max_size=60), max_size=40))
@settings(deadline=None)
def test_lines_added_together_stay_below_the_bound_however_many_they_are(
    tmp_path_factory: pytest.TempPathFactory, keep: int, blocks: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "lines"
    writer, told = LineFile(path, keep=keep), []
    for block in blocks:
        lines = [b"x" * length for length in block]
        writer.extend(lines)
        told += lines
        assert bytes_of(path) <= keep and len(parts(path)) < PARTS
    lines = [line.rstrip(b"\n") for line in whole_file(path)]
    assert lines == told[len(told) - len(lines):] and (lines or not told)
    writer.close()


def test_a_line_longer_than_the_bound_is_kept(tmp_path: Path) -> None:
    writer = LineFile(tmp_path / "lines", keep=40)
    for line in (b"a", b"b" * 100, b"c"):
        writer.append(line)
    assert b"".join(whole_file(tmp_path / "lines")) == b"b" * 100 + b"\nc\n"
    writer.close()


def test_a_disk_that_fills_right_after_a_new_part_loses_no_line(tmp_path: Path, largest_file) -> None:
    writer = LineFile(tmp_path / "lines", keep=4000)
    for _ in range(99):
        writer.append(b"x" * 9)
    with largest_file(0), pytest.raises(DiskFull):
        for _ in range(2):
            writer.append(b"y" * 19)
    writer.append(b"z")
    assert list(whole_file(tmp_path / "lines"))[-2:] == [b"x" * 9 + b"\n", b"z\n"]
    writer.close()


Step = st.sampled_from(["line", "line", "line", "long", "look", "late", "kill", "torn", "lost"])


@settings(deadline=None)
@given(st.lists(Step, max_size=120), st.sampled_from([40, 100, 400]))
def test_followers_get_whole_lines_once_in_order_whatever_the_writer_suffers(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], keep: int
) -> None:
    path = tmp_path_factory.mktemp("followed") / "lines"
    writer, n = LineFile(path, keep=keep), 0
    often, seldom = LineFollower(path), LineFollower(path)
    seen: dict[LineFollower, list[int]] = {often: [], seldom: []}

    def look(follower: LineFollower) -> None:
        least = next(iter(lines_of(path)), n)
        new = [int(line) for line in follower.new()]
        before = seen[follower][-1] if seen[follower] else -1
        assert new == list(range(max(before + 1, least), n))  # none of those that are kept is missing
        seen[follower] += new

    for step in steps:
        if step in ("line", "long"):
            writer.append((b"%d" % n).rjust(30 if step == "long" else 1, b"0"))
            n += 1
        elif step == "kill":  # between the two names of a part, or just so
            writer.close()
            if path.exists() and path.stat().st_size > keep // PARTS // 2:
                files._name_part(path, path, path.stat().st_size, keep)
            writer = LineFile(path, keep=keep)
        elif step == "torn":
            with open(path, "ab") as file:
                file.write(b"12")
            look(often)
            writer.close()
            writer = LineFile(path, keep=keep)
        elif step == "lost" and len(parts(path)) > 1:  # somebody needs the room
            parts(path)[0][1].unlink()
        elif step in ("look", "late"):
            look(often if step == "look" else seldom)
    look(often)
    look(seldom)
    writer.close()


WRITER = """
import sys
from busrl.system.files import LineFile, whole_file
path, keep = sys.argv[1], int(sys.argv[2])
writer = LineFile(path, keep=keep)
n = max((int(line) for line in whole_file(writer.path)), default=-1)
while True:
    n += 1
    writer.append(b"%d" % n)
"""


def test_a_writer_killed_at_any_moment_loses_no_kept_line(tmp_path: Path) -> None:
    path, chance = tmp_path / "lines", random.Random(3)
    follower, seen = LineFollower(path), list[int]()
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path), "20000"])
        wanted = len(seen) + chance.randrange(500, 4000)
        while len(seen) < wanted:
            assert child.poll() is None
            seen += [int(line) for line in follower.new()]
        child.kill()
        child.wait()
        seen += [int(line) for line in follower.new()]
        kept = [int(line) for line in whole_file(path) if line.endswith(b"\n")]
        assert kept == list(range(kept[0], kept[-1] + 1)) and bytes_of(path) <= 20000
        assert seen[-1] == kept[-1]
        assert not list(tmp_path.glob("*.cut"))
    assert seen == sorted(set(seen)) and dropped(path)


def test_a_report_without_the_beginning_of_its_run_says_so(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    writer = LineFile(paths.metrics, keep=4000)
    for step in range(1, 301):
        writer.append(b'{"step":%d,"reward":%f}' % (step, step / 300))
    writer.close()
    record = read(tmp_path)
    steps = [row["step"] for row in record.steps]
    assert steps == list(range(steps[0], 301)) and steps[0] > 1
    (said,) = [fault for fault in record.faults if "log.keep_mb" in fault]
    assert said.startswith("metrics.jsonl: its first ")
    files_of_run, state = RunFiles(paths), RunState()
    files_of_run.fold_into(state)
    assert files_of_run.step_age_s() is not None and state.first_reward == pytest.approx(steps[0] / 300)


# -- files that other processes hold open: logs -----


@pytest.fixture(params=["disk", "shared memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """On one of the two the beginning of a file can be cut off, on the other it cannot."""
    if request.param == "disk":
        return tmp_path
    place = Path(f"/dev/shm/busrl-test-{os.getpid()}-{tmp_path.name}")
    place.mkdir()
    request.addfinalizer(lambda: [*(file.unlink() for file in place.iterdir()), place.rmdir()])
    return place


def test_a_log_is_bounded_under_the_program_that_holds_it_open(folder: Path) -> None:
    path, keep = folder / "log", 80_000
    follower, seen = LineFollower(path), list[bytes]()
    with open(path, "ab", buffering=0) as log:
        for n in range(40_000):
            log.write(b"line %d\n" % n)
            if n % 500 == 0:
                bound(path, keep)
                assert bytes_of(path) <= keep + 8000
                seen += follower.new()
        inode = os.fstat(log.fileno()).st_ino
    seen += follower.new()
    assert path.stat().st_ino == inode
    assert seen == [b"line %d" % n for n in range(40_000)]
    kept = list(whole_file(path))
    assert b"".join(kept[1:]) == b"".join(b"line %d\n" % n for n in range(40_000 - len(kept) + 1, 40_000))


def test_a_log_without_a_bound_is_left_alone(folder: Path) -> None:
    (folder / "log").write_bytes(b"x\n" * 100_000)
    bound(folder / "log", 0)
    bound(folder / "none", 100)
    assert [file.name for file in folder.iterdir()] == ["log"] and dropped(folder / "log") == 0


@pytest.mark.parametrize("at", ["draft", "half a draft", "cut"])
def test_a_log_with_interrupted_bounding_reads_whole_and_is_mended_next(folder: Path, at: str) -> None:
    path, text = folder / "log", b"".join(b"line %d\n" % n for n in range(5000))
    path.write_bytes(text)
    follower = LineFollower(path)
    before = follower.new()
    draft = path.with_name("log.cut")
    with open(path, "r+b", buffering=0) as file:
        files._cut_beginning(file.fileno(), draft)
    if at != "cut":  # killed before anything was cut off
        draft.write_bytes(draft.read_bytes()[: 999 if at == "half a draft" else None])
        path.write_bytes(text)
    with open(path, "ab") as file:
        file.write(b"more\n")
    assert b"".join(whole_file(path)) == text + b"more\n"
    if at == "cut":
        assert before + follower.new() == [*text.split(b"\n")[:-1], b"more"]
    bound(path, 1 << 20)
    assert not draft.exists() and b"".join(whole_file(path)) == text + b"more\n"
    assert len(parts(path)) == (at == "cut")


def test_a_reader_sees_a_killed_cut_although_as_much_was_appended_since(folder: Path) -> None:
    path = folder / "log"
    path.write_bytes(b"".join(b"line %d\n" % n for n in range(5000)))
    with contextlib.closing(files.Lines(path)) as lines:
        with open(path, "r+b", buffering=0) as file:
            size = files._cut_beginning(file.fileno(), path.with_name("log.cut"))
        with open(path, "ab") as file:
            file.write(b"more\n" * size)
        assert lines.changed()


def test_a_log_on_a_full_disk_is_not_bounded_and_loses_nothing(tmp_path: Path, largest_file) -> None:
    path, text = tmp_path / "log", b"line\n" * 20_000
    path.write_bytes(text)
    with largest_file(30_000):
        bound(path, 40_000)
    assert path.read_bytes() == text and [file.name for file in tmp_path.iterdir()] == ["log"]


BOUNDER = """
import sys
from pathlib import Path
from busrl.system.files import bound
print("ready", flush=True)
while True:
    bound(Path(sys.argv[1]), 200_000)
"""


def test_a_bounding_process_killed_anywhere_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    path, chance = tmp_path / "log", random.Random(7)
    path.touch()
    over, written = threading.Event(), [0]

    def write() -> None:
        with open(path, "ab", buffering=0) as log:
            while not over.is_set():
                log.write(b"line %d\n" % written[0])
                written[0] += 1

    writer = threading.Thread(target=write)
    writer.start()
    follower, seen = LineFollower(path, 1 << 40), list[bytes]()
    try:
        for _ in range(5):
            with subprocess.Popen([sys.executable, "-c", BOUNDER, str(path)], stdout=subprocess.PIPE) as child:
                assert child.stdout is not None and child.stdout.readline()
                wanted, before = len(seen) + chance.randrange(3000, 20_000), parts(path)
                while len(seen) < wanted or parts(path) == before:  # each makes a part, however late it gets its turn
                    seen += follower.new()
                child.send_signal(signal.SIGKILL)
    finally:
        over.set()
        writer.join()
    seen += follower.new()
    numbers = [int(line.split()[1]) for line in seen]
    with contextlib.suppress(IndexError):
        assert numbers[-1] == written[0] - 1
    assert numbers == sorted(set(numbers))
    bound(path, 200_000)
    assert not path.with_name("log.cut").exists() and dropped(path) > 0
