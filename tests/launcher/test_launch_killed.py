"""`launch` itself is killed: no orphan stays, and the next start in the directory adopts the ring."""

from __future__ import annotations

import json

import pytest

from busrl.ring import Fates, Ring, State

pytestmark = pytest.mark.long  # whole starts of `busrl launch`

MODES = {"keeper": "well", "rollout/0": "well", "learner": "learner"}


def test_children_end_with_a_killed_launch_and_the_next_adopts_the_ring(scripted):
    scripted.start(MODES)
    scripted.ready("keeper")
    scripted.dispatch_one(uid=3)
    scripted.kill_launch(MODES)
    assert scripted.paths.ring_file.exists()
    info = json.loads(scripted.paths.run_json.read_text())
    uuid = info["uuid"]
    scripted.start(MODES)
    scripted.life("learner", 2)
    ring = Ring.attach(scripted.paths.ring_name, read_only=True)
    line = ring.lines()[ring.lines()["state"] == State.QUEUED]
    assert line["uid"].tolist() == [3] and ring.uuid.hex() == uuid
    assert json.loads(scripted.paths.run_json.read_text())["claimed_from"] == info["claimed_from"]
    ring.close()
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "adopted the ring" in scripted.output and "1 queued" in scripted.output
    assert scripted.summary()["open_samples"] == 1 and scripted.leftovers() == []


def test_samples_of_open_bin_go_back_at_the_next_start(scripted):
    scripted.start(MODES)
    scripted.ready("keeper")
    scripted.dispatch_one(uid=5)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert scripted.summary()["audit"]["counts"]["open"] == 1
    (scripted.root / "finish").unlink()
    before = json.loads(scripted.paths.run_json.read_text())
    scripted.start(MODES)
    scripted.ready("learner", 2)
    now = json.loads(scripted.paths.run_json.read_text())
    assert now["uuid"] == before["uuid"] and now["claimed_from"] != before["claimed_from"], "the same run, another ring"
    assert now["claimed_from"][:16] == before["claimed_from"][:16] == now["uuid"][:16]
    fates = Fates(str(scripted.paths.fates), read_only=True)
    assert fates.get(5) == 0 and not scripted.paths.open_bin.exists()
    assert json.loads(scripted.paths.draws.read_text())["uids"] == [5]
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "1 training and 0 validation samples that were in no slot are generated again" in scripted.output


def test_neither_ring_nor_weights_without_their_run_directory_are_adopted(scripted):
    scripted.start(MODES)
    scripted.kill_launch(MODES)
    scripted.paths.run_json.unlink()
    scripted.paths.weights_file.touch()
    scripted.start(MODES)
    scripted.life("learner", 2)
    assert not scripted.paths.weights_file.exists()
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "adopted" not in scripted.output and scripted.leftovers() == []


def test_a_second_launch_in_the_directory_is_refused_with_the_first_pid(scripted):
    first = scripted.start(MODES)
    scripted.ready("learner")
    second = scripted.start(MODES)
    assert scripted.wait() != 0
    assert f"RunInUse: {scripted.root}" in scripted.output and f"pid {first.pid}" in scripted.output
    scripted.launch = first
    scripted.finish()
    assert scripted.wait() == 0 and second.returncode
