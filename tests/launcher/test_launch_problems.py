"""`busrl status` names what went wrong lately: newest first, alike lines as one with a count, torn lines left out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from busrl.errors import first_line
from busrl.launcher.children import last_words
from busrl.states import VALIDATE_BIT, shown_uid
from busrl.status.view import MOST_KINDS, problem_lines
from busrl.status.words import idle
from busrl.system.files import TAIL_BYTES


def problems(path: Path) -> list[str]:
    return list(problem_lines(path))


def write(path: Path, *texts: str, process: str = "bus") -> None:
    rows = [
        {"time": time.time(), "process": process, "severity": "warning", "where": "x", "text": text, "trace": ""}
        for text in texts
    ]
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_nothing_is_said_of_a_run_without_problems(tmp_path: Path) -> None:
    assert problems(tmp_path / "errors.jsonl") == []


def test_lines_that_differ_only_in_numbers_merge_with_count_and_latest_text(tmp_path: Path) -> None:
    path = tmp_path / "errors.jsonl"
    write(path, "refused 10.0.0.1: 1 in all", "refused 10.0.0.1: 2 in all", "something else")
    head, *rest = problems(path)
    assert str(path) in head and len(rest) == 2
    assert any("2 times" in line and "2 in all" in line and "bus warning" in line for line in rest)


def test_the_newest_kinds_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    path = tmp_path / "errors.jsonl"
    for letter in "abcdefgh":
        write(path, f"problem {letter}")
    lines = problems(path)
    assert "problem h" in lines[1] and lines[-1].strip() == f"and {8 - MOST_KINDS} older kinds"


def test_torn_lines_and_cut_tails_and_huge_files_stay_readable(tmp_path: Path) -> None:
    path = tmp_path / "errors.jsonl"
    path.write_bytes(b"\xff" * (3 * TAIL_BYTES) + b"\n[1]\n{}\n")
    write(path, "x" * 5000)
    with open(path, "ab") as file:
        file.write(b'{"time": 1, "process"')
    assert len(problems(path)) == 2 and all(len(line) < 400 for line in problems(path))


DEEP = "Traceback (most recent call last):\n" + '  File "/a/b.py", line 3, in f\n    g()\n' * 60
RAISED = "KeyError: 'answer'"
CHAINED = f"{DEEP}ValueError: first\n\nDuring handling of the above exception, another:\n\n{DEEP}{RAISED}\nmore"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\ntwo", "one"),
        (f"{DEEP}{RAISED}\n", RAISED),
        (CHAINED, RAISED),
        (f"sample 7 raised: {DEEP}{RAISED}", f"sample 7 raised: {RAISED}"),
        (f"what happened\nand why\n{DEEP}{RAISED}", "what happened"),
        (DEEP, "g()"),
        ("Traceback (most recent call last):", "(cut off)"),
        ("", ""),
    ],
)
def test_a_one_line_text_says_what_was_raised_beneath_a_traceback(text: str, line: str) -> None:
    assert first_line(text) == line


def test_a_long_traceback_is_shown_by_status_as_what_was_raised(tmp_path: Path) -> None:
    write(tmp_path / "errors.jsonl", f"sample 7 raised: {DEEP}{RAISED}", process="judge")
    assert f"judge warning: sample 7 raised: {RAISED}" in "\n".join(problems(tmp_path / "errors.jsonl"))


def test_the_last_words_of_a_child_are_what_its_last_life_raised(tmp_path: Path) -> None:
    log, mark = tmp_path / "x.log", "--- 2026-01-01 00:00:00 started by launch (pid 7)\n"
    log.write_text(f"{mark}{DEEP}{RAISED}\nwith a hint\nof two lines\n")
    assert last_words(log) == RAISED
    log.write_text(f"{mark}{DEEP}{RAISED}\n{mark}quietly\ngone\n")
    assert last_words(log) == "gone"
    log.write_text(f"{mark}{DEEP}{RAISED}\n{mark}")
    assert last_words(log) == ""


CAUSE = "learner: the weights do not fit"
LEAKS = """nanobind: leaked 64 types!
 - leaked type "triton._C.libtriton.ir.location"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""
TRACKER = """/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: 1 leaked
  warnings.warn('resource_tracker: There appear to be %d '
"""
DUMP = """terminate called after throwing an instance of 'std::runtime_error'
  what():  the peer has gone
Fatal Python error: Aborted

Current thread 0x00007f (most recent call first):
  File "/x.py", line 3 in wait
Extension modules: numpy (total: 1)
"""
IGNORED = f"Exception ignored in: <function Pool.__del__>\n{DEEP}AttributeError: 'NoneType' has no 'get'\n"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (f"{CAUSE}\n{LEAKS}", CAUSE),
        (f"{CAUSE}\n{TRACKER}", CAUSE),
        (f"{DEEP}{RAISED}\n{IGNORED}{LEAKS}", RAISED),
        (f"quietly\n{CAUSE}\nOMP: Info #276: omp_set_nested routine deprecated\n", CAUSE),
        (f"{CAUSE}\nI0000 00:00:1 cpu_guard.cc:210] This binary\n[W802 10:11:12 Module.cpp:1] Warning\n", CAUSE),
        (f"quietly\n{DUMP}", "the peer has gone"),
        ("terminate called without an active exception\n", "terminate called without an active exception"),
    ],
)
def test_what_libraries_write_at_an_end_is_not_its_cause(tmp_path: Path, said: str, words: str) -> None:
    log = tmp_path / "x.log"
    log.write_text(f"--- 2026-01-01 00:00:00 started by launch (pid 7)\n{said}")
    assert last_words(log) == words


def test_people_see_samples_of_validation_by_their_number_and_fates_in_words() -> None:
    assert shown_uid(VALIDATE_BIT) == "v0" and shown_uid(VALIDATE_BIT + 12) == "v12" and shown_uid(7) == "7"
    run = SimpleNamespace(idle=SimpleNamespace(idle_groups=9, idle_limit=32, idle_causes={"f": 8, "R": 1, "older": 2}))
    text = idle(run)  # type: ignore[arg-type]
    assert "(8 flat group, 1 reward raised, 2 older)" in text
