"""The audit beside the real ring: it reads the same slots, and a process killed at any point leaves nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from busrl.ledger.audit import audit
from busrl.ledger.audit.snapshot import read_ring
from busrl.ring import Fates, Ring, State

WORK = """
import sys
import msgspec
from busrl.system.files import LineFile
from busrl.ledger.wal import Wal
from busrl.ledger.trained import TrainLine
from busrl.ring import Fates, Ring, State
from fake_run import FakeRun
from pathlib import Path

root = Path(sys.argv[1])
run = FakeRun(root)
ring = Ring.attach(str(root / "ring.bin"))
ring.register("all", "all")
fates = Fates(str(root / "fates.bin"))
ring.bind_fates(fates, None)
for draw in range(3):
    for uid in run.group(draw):
        task = run.lines[0]
        ring.dispatch(uid=uid, group=draw, admission=draw, member=uid % 4, group_size=4, cls=0, task=task,
                      prompt_crc=run.crc(uid), max_new_tokens=4, temperature=1.0)
for _ in range(8):
    (slot, word), = ring.take(State.QUEUED, State.GENERATING, cls=0, limit=1)
    word = ring.commit_segment(slot, word, True)
    word = ring.claim(slot, word, State.REWARDING)
    word = ring.release(slot, word, State.REWARDED)
slot = next(slot for slot, line in enumerate(ring.lines()) if line["uid"] == run.uid(2, 0))
ring.drop(slot, int(ring.words()[slot]), "P")
uid = run.uid(2, 0, again=1)
ring.dispatch(uid=uid, group=2, admission=2, member=0, group_size=4, cls=0, task=b"x", prompt_crc=run.crc(uid),
              max_new_tokens=4, temperature=1.0)
mine = ring.take(State.REWARDED, State.TRAINING, cls=0, limit=4)
uids = [int(ring.line(slot)["uid"]) for slot, _ in mine]
record = run.record(1, uids)
Wal(root / "wal").append(record)
for slot, word in mine:
    ring.finish(slot, word, "T")
LineFile(root / "train.jsonl").append(msgspec.json.encode(TrainLine.of(record)))
"""
DISPATCH = ("claimed", "reserved", "written", "uid", "fate", "queued")
POINTS = [f"dispatch.{point}:{count}" for point in DISPATCH for count in (1, 6, 13)]
POINTS += [f"finish.{point}:{count}" for point in ("fate", "free") for count in (1, 3)]
POINTS += ["claim.cas:1", "commit.before:3", "commit.after:3", "drop.cas:1", "drop.fate:1"]


@pytest.fixture
def world(run):
    """An empty run with a real ring."""
    run.save()
    ring = Ring.create(str(run.root / "ring.bin"), slots=16, slot_bytes=8192, processes=8, uuid=run.uuid)
    fates = Fates(str(run.root / "fates.bin"), create=True)
    fates.reserve(1 << 12)
    ring.bind_fates(fates, None)
    yield run, ring, fates
    ring.close()
    fates.close()


def work(root: Path, crash_point: str = "") -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parent), *(path for path in sys.path if path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "BUSRL_CRASH_POINT": crash_point}
    command = [sys.executable, "-c", WORK, str(root)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_audit_reads_the_slots_that_the_ring_shows(world) -> None:
    run, ring, _ = world
    done = work(run.root)
    assert done.returncode == 0, done.stderr
    slots, lines = read_ring(run.root / "ring.bin"), ring.lines()
    assert slots is not None and slots.stable.all() and slots.still.all()
    for mine, theirs in (("word", "word"), ("uid", "uid"), ("group", "group"), ("prompt_crc", "prompt_crc")):
        assert np.array_equal(slots.lines[mine], lines[theirs])
    for mine, theirs in (("member", "member"), ("group_size", "group_size"), ("claim_seq", "last_commit_seq")):
        assert np.array_equal(slots.lines[mine], lines[theirs])
    assert np.array_equal(slots.state, lines["state"].astype(np.uint64))
    report = audit(run.root)
    assert (report.findings, report.state) == ((), "killed")
    assert (report.counts.trained, report.counts.in_flight, report.accidents) == (4, 8, {"poison": 1})


@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_anywhere_loses_nothing_before_or_after_the_reap(world, point: str) -> None:
    run, ring, _ = world
    assert work(run.root, point).returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), "the point was not reached"
    before = audit(run.root)
    assert before.errors == ()
    ring.reap()
    ring.finish_drops()
    after = audit(run.root)
    assert after.errors == ()
    assert not (np.isin(ring.lines()["state"], [State.RESERVED, State.GENERATING, State.TRAINING])).any()
    assert after.counts.trained == before.counts.trained
