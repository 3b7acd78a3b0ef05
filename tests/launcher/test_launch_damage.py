"""Damaged or edited files of a run directory: a start names the file and changes nothing, `status` still shows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from busrl.errors import UserError
from busrl.launcher.fates import put_back
from busrl.launcher.rundir import unlink_segments
from busrl.ledger.errors import record_error
from busrl.paths import SHM, RunPaths
from busrl.ring import Fates
from busrl.status.view import status

pytestmark = pytest.mark.long  # whole starts of `busrl launch`


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("run.json", '{"uuid": "zz"}', "run.json: uuid = 'zz': it must have 32 hex digits"),
        ("run.json", '{"uuid": 5}', "run.json: uuid = 5: it must have 32 hex digits"),
        ("run.json", "[1]", "run.json: not what busrl wrote (expected a map)"),
        ("topology.json", "[]", "topology.json: not what busrl wrote"),
        ("topology.json", '{"run": 3}', "topology.json: no section 'run'"),
    ],
)
def test_a_start_names_the_file_and_the_remedy(scripted, file: str, text: str, said: str) -> None:
    scripted.root.mkdir()
    (scripted.root / file).write_text(text)
    scripted.start({"learner": "learner"})
    assert scripted.wait() != 0
    assert said in scripted.output and "Restore it" in scripted.output and "UserError" in scripted.output
    assert (scripted.root / file).read_text() == text and scripted.leftovers() == []


def test_status_says_that_launch_lives_although_its_ring_was_removed(scripted) -> None:
    scripted.start({"learner": "learner"})
    scripted.ready("learner")
    scripted.paths.ring_file.unlink()
    shown = status(scripted.root)
    assert f"launch (pid {scripted.launch.pid}) is there, but no ring" in shown and "busrl stop" in shown
    scripted.finish()
    scripted.wait()
    assert "is there" not in status(scripted.root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_shared_memory_of_another_user_is_named_with_a_way_out() -> None:
    name = f"busrl.test.{os.getpid()}.ring"
    weights = SHM / f"{name.removesuffix('.ring')}.weights"
    weights.touch()
    os.seteuid(65534)
    try:
        with pytest.raises(UserError, match=f"{weights} cannot be removed: it belongs to user 0, not to you .65534."):
            unlink_segments(name)
    finally:
        os.seteuid(0)
    unlink_segments(name)
    assert not weights.exists()


def test_a_byte_that_is_no_fate_is_refused_before_anything_changes(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    fates = Fates(str(paths.fates), create=True)
    fates.store(3, "D")
    with open(paths.fates, "r+b") as file:
        file.seek(70)
        file.write(b"V")  # a fate, but of a validation sample
    Fates(str(paths.validate_fates), create=True)
    with pytest.raises(UserError, match=r"fates.bin: byte 70 is 86, which is no fate there.*remove it"):
        put_back(paths)
    assert fates.get(3) == ord("D") and not paths.draws.exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"run": 5}', '{"run": {}, "workers": [1]}'])
def test_status_of_a_living_run_needs_no_file_but_run_json(scripted, text: str) -> None:
    scripted.start({"learner": "learner"})
    pid = scripted.ready("learner")
    whole = scripted.paths.topology.read_bytes()
    scripted.paths.topology.write_text(text)
    scripted.paths.gateway.write_text(text)
    scripted.paths.errors.mkdir()
    info = json.loads(scripted.paths.run_json.read_text())
    scripted.paths.run_json.write_text(json.dumps({**info, "started": "today"}))
    shown = status(scripted.root)
    assert "running" in shown and f"pid {pid}" in shown and "step 0" in shown
    scripted.paths.errors.rmdir()
    scripted.paths.topology.write_bytes(whole)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


def test_a_run_survives_an_overwritten_ring_header_and_status_names_it(scripted) -> None:
    scripted.start({"learner": "learner"})
    scripted.ready("learner")
    with open(scripted.paths.ring_file, "r+b") as file:
        file.write(b"NOTARING")
    shown = status(scripted.root)
    assert "damaged, its ring cannot be used: ring" in shown and "not a busrl ring" in shown, shown
    assert f"launch (pid {scripted.launch.pid}) continues" in shown and f"`busrl stop {scripted.root}`" in shown, shown
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert scripted.summary()["outcome"] == "finished" and scripted.leftovers() == []


@pytest.mark.parametrize(
    ("at", "data", "said"),
    [
        (0x00, b"NOTARING", "not a busrl ring: its first bytes"),
        (0x08, b"\x09\0\0\0", "layout"),
        (0x10, b"\0\0\x10", "bytes"),
        (0x40, b"\x07", "checksum"),
    ],
)
def test_status_and_start_name_a_damaged_ring_header_and_change_nothing(
    scripted, at: int, data: bytes, said: str
) -> None:
    modes = {"learner": "learner"}
    scripted.start(modes)
    scripted.kill_launch(modes)
    with open(scripted.paths.ring_file, "r+b") as file:
        file.seek(at)
        file.write(data)
    before = scripted.paths.ring_file.read_bytes()
    scripted.paths.metrics.write_text('{"step": 3, "version": 2}\n{"step": 4, "ver')
    record_error(scripted.paths, "reward/0", "error", "reward", "it was odd")
    shown = status(scripted.root)
    assert "damaged, its ring cannot be used" in shown and said in shown, shown
    assert f"`busrl ring clean {scripted.root} --force`" in shown and str(scripted.paths.ring_name) in shown, shown
    assert "step 3/10 · version 2" in shown and "reward/0 error: it was odd" in shown, shown
    scripted.start(modes)
    assert scripted.wait() != 0
    assert "RingMismatch" in scripted.output and said in scripted.output, scripted.output
    assert f"`busrl ring clean {scripted.root} --force`" in scripted.output
    assert scripted.paths.ring_file.read_bytes() == before
