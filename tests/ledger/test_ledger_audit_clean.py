"""Runs in which nothing is wrong: the audit says so, in every state that a run can be in."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from busrl.errors import NoSuchRun
from busrl.ledger.audit import audit, render
from busrl.ledger.audit.readers import read_fates, read_train_log
from busrl.ledger.trained import TrainedSet
from busrl.ledger.wal import Wal

VALIDATE = 1 << 62


def hold_lock(path: Path) -> int:
    """Lock as a run does; free again when the descriptor is closed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0))
    return fd


def test_a_run_that_ended_in_order_is_clean_with_every_number_recomputed(trained) -> None:
    report = trained.audit()
    assert report.errors == ()
    assert report.findings == ()
    assert (report.state, report.exit_code) == ("finished", 0)
    counts = report.counts
    assert (counts.trained, counts.groups, counts.open, counts.lost, counts.trained_twice) == (20, 5, 5, 0, 0)
    assert (counts.step, counts.checkpoint_step, counts.log_records) == (3, 2, 1)
    assert report.histogram == {"dispatched": 4, "trained": 20, "poison": 1, "flat group": 4, "too old": 4}
    assert report.rules == {"flat group": 4, "too old": 4}
    assert report.accidents == {"poison": 1}
    assert report.validation == {"dispatched": 1, "validated": 2}


def test_the_report_is_json_and_its_last_printed_line_is_the_verdict(trained) -> None:
    report = trained.audit()
    assert json.loads(json.dumps(report.to_json()))["clean"] is True
    text = render(report)
    last = text.splitlines()[-1]
    assert last == "  lost 0 | trained twice 0 | set aside by rule 8 | by accident 1 | clean"
    assert "poison" in text and "accident" in text


def test_a_killed_run_is_clean_while_its_ring_holds_the_dispatched_samples(run) -> None:
    run.step(1, run.group(0))
    run.dispatch(*run.group(1))
    run.slot(5, run.uid(2, 0), "RESERVED", owner=1)  # uid written, fate not yet: the reap undoes it
    run.slot(6, run.uid(0, 0), "RESERVED", owner=1, seq=9, claim=5)  # still names the sample that it held before
    run.fates[run.uid(2, 1)] = "o"
    run.slot(7, run.uid(2, 1), "DROPPED", owner=ord("o"))
    report = run.audit()
    assert (report.state, report.errors, report.counts.in_flight) == ("killed", (), 4)


def test_logged_samples_without_a_following_fate_are_unsettled(run) -> None:
    run.step(1, run.group(0), line=False)
    for slot, uid in enumerate(run.group(0)):
        run.fates[uid] = "D" if slot < 2 else "T"
        run.slot(slot, uid, ("TRAINING", "REWARDED", "TRAINING", "REWARDED")[slot])
    report = run.audit()
    assert report.errors == ()
    assert (report.counts.unsettled, report.counts.in_flight, report.counts.trained) == (2, 0, 4)


def test_records_that_a_checkpoint_already_holds_are_not_trained_twice(run) -> None:
    run.step(1, run.group(0))
    run.step(2, run.group(1))
    run.checkpoint(2)  # killed before the records were dropped
    run.open()
    assert run.audit().findings == ()


def test_history_is_the_checkpoint_and_the_newer_records_together(run) -> None:
    run.step(1, run.group(0))
    run.checkpoint(1)
    run.step(2, run.group(1))
    run.checkpoint(2)
    run.step(3, run.group(2))
    run.open()
    report = run.audit()
    assert (report.errors, report.counts.trained, report.counts.checkpoint_step) == ((), 12, 2)


def test_a_replayed_step_may_write_its_line_again(run) -> None:
    for step, draw in ((1, 0), (2, 1), (2, 1)):
        run.step(step, run.group(draw), log=len(run.history) < 8)
    run.open()
    assert run.audit().findings == ()


def test_a_torn_tail_is_a_note(run) -> None:
    run.step(1, run.group(0))
    with open(run.root / "wal" / "00000001.wal", "ab") as file:
        file.write(b"WREC\x10\x00\x00\x00half")
    run.open()
    report = run.audit()
    assert [finding.kind for finding in report.findings] == ["torn_tail"]
    assert report.exit_code == 0


def test_training_of_a_dead_learner_is_rolled_back_by_choice_without_wal(make_run) -> None:
    run = make_run(wal="off")
    run.step(1, run.group(0), log=False)
    run.checkpoint(1)
    run.step(2, run.group(1), log=False)
    run.empty_ring()
    report = run.audit()
    assert (report.errors, report.counts.rolled_back, report.counts.unsaved) == ((), 4, 0)
    lock = hold_lock(run.root / "run.lock")
    report = run.audit()
    os.close(lock)
    assert (report.state, report.errors, report.counts.rolled_back, report.counts.unsaved) == ("running", (), 0, 4)


def test_a_run_that_goes_on_is_running_while_its_lock_is_held(run) -> None:
    run.dispatch(*run.group(0))
    lock = hold_lock(run.root / "run.lock")
    assert run.audit().state == "running"
    os.close(lock)
    assert run.audit().state == "killed"


def test_a_ring_of_another_run_is_left_out(run) -> None:
    run.step(1, run.group(0))
    run.open()
    run.uuid = bytes(16)
    run.empty_ring()
    run.slot(0, run.uid(9, 0))
    report = run.audit()
    assert [finding.kind for finding in report.findings] == ["foreign_ring"]
    assert (report.state, report.exit_code) == ("finished", 0)


def test_without_a_prompt_file_the_report_says_that_prompts_were_not_checked(run) -> None:
    run.step(1, run.group(0))
    run.open()
    (run.root / "train_prompts.jsonl").unlink()
    report = run.audit()
    assert [finding.kind for finding in report.findings] == ["prompts_unchecked"]


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match=r"topology\.json"):
        audit(tmp_path)


def test_fates_are_read_through_a_shared_mapping_that_nobody_synced(tmp_path: Path) -> None:
    path = tmp_path / "fates.bin"
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        with mmap.mmap(file.fileno(), 1 << 20) as table:
            table[600_000] = ord("D")
            codes = read_fates(path)
    assert (codes.size, codes[-1]) == (600_001, ord("D"))


def test_a_long_run_of_many_groups_is_clean(make_run) -> None:
    run = make_run(group_size=8, prompts=100)
    for step in range(1, 31):
        uids = [uid for draw in range(step * 20, step * 20 + 20) for uid in run.group(draw)]
        run.step(step, uids)
        if step % 10 == 0:
            run.checkpoint(step)
            Wal(run.root / "wal", sync=False).drop_before(step + 1)
    run.open()
    report = run.audit()
    assert (report.findings, report.counts.trained, report.counts.groups) == ((), 4800, 600)


def test_the_audit_imports_none_of_the_code_that_it_judges() -> None:
    code = "import sys, busrl.ledger.audit; print(*[name for name in sys.modules if name.startswith('busrl')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    allowed = {"busrl", "busrl.errors", "busrl.ledger", "busrl.states"}
    strangers = {name for name in out.split() if not name.startswith("busrl.ledger.audit")} - allowed
    assert strangers == set()


def test_the_audit_reads_the_trained_set_as_its_own_code_does(trained) -> None:
    from busrl.ledger.audit.readers import in_bitmap, unpack_trained

    path = trained.root / "checkpoints" / "global_step_2" / "trained.bin"
    assert in_bitmap(unpack_trained(path.read_bytes())[0]).tolist() == list(TrainedSet.load(path))


def test_the_train_log_of_a_long_run_is_read_into_little_memory(tmp_path: Path) -> None:
    samples, steps = 64, 3000
    with open(tmp_path / "train.jsonl", "w") as file:
        for step in range(steps):
            entries = [[step * samples + k, 0, 4_000_000_000 + k] for k in range(samples)]
            file.write(json.dumps({"step": step, "version": 0, "cause": "n_min", "samples": entries}) + "\n")
    reports: list = []
    tracemalloc.start()
    lines = read_train_log(tmp_path / "train.jsonl", reports)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not reports and lines[-1].end == (tmp_path / "train.jsonl").stat().st_size
    assert lines[7].samples[3].tolist() == (7 * samples + 3, 0, 4_000_000_003)
    assert peak < 32 * samples * steps, (held, peak)
