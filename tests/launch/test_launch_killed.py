"""`launch` itself is killed: no orphan stays, and the next start in the directory adopts the ring."""

from __future__ import annotations

import json

from busrl.paths import RunPaths
from busrl.ring import Fates, Ring, State

MODES = {"keeper": "well", "rollout/0": "well", "learner": "learner"}


def dispatch_one(paths: RunPaths, uid: int) -> None:
    """What a scheduler does, in short: one sample of group 0 becomes QUEUED."""
    ring = Ring.attach(paths.ring_name)
    ring.register("scheduler", "test")
    ring.bind_fates(Fates(str(paths.fates)), Fates(str(paths.validate_fates)))
    assert ring.dispatch(
        uid=uid, group=uid // 8, admission=0, member=uid % 8, group_size=8, cls=0, task=b"{}", prompt_crc=0,
        max_new_tokens=4, temperature=1.0,
    )  # fmt: skip
    ring.close()


def kill_launch(scripted) -> None:
    pids = [scripted.ready(name) for name in MODES]
    scripted.launch.kill()
    scripted.launch.communicate()
    scripted.until(lambda: not any(scripted.alive(pid) for pid in pids), f"children {pids} to end with launch")


def test_children_end_with_a_killed_launch_and_the_next_one_adopts_the_ring(scripted):
    scripted.start(MODES)
    scripted.ready("keeper")
    dispatch_one(scripted.paths, uid=3)
    kill_launch(scripted)
    assert scripted.paths.ring_file.exists()
    uuid = json.loads(scripted.paths.run_json.read_text())["uuid"]
    scripted.start(MODES)
    scripted.life("learner", 2)
    ring = Ring.attach(scripted.paths.ring_name, read_only=True)
    line = ring.lines()[ring.lines()["state"] == State.QUEUED]
    assert line["uid"].tolist() == [3] and ring.uuid.hex() == uuid
    ring.close()
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "adopted the ring" in scripted.output and "1 queued" in scripted.output
    assert scripted.summary()["open_samples"] == 1 and scripted.leftovers() == []


def test_samples_of_open_bin_go_back_at_the_next_start(scripted):
    scripted.start(MODES)
    scripted.ready("keeper")
    dispatch_one(scripted.paths, uid=5)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert scripted.summary()["audit"]["counts"]["open"] == 1
    (scripted.root / "finish").unlink()
    scripted.start(MODES)
    scripted.ready("learner", 2)
    fates = Fates(str(scripted.paths.fates), read_only=True)
    assert fates.get(5) == 0 and not scripted.paths.open_bin.exists()
    assert json.loads(scripted.paths.draws.read_text())["uids"] == [5]
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "1 training and 0 validation samples that were in no slot are generated again" in scripted.output


def test_a_ring_without_its_run_directory_is_not_adopted_and_its_weights_neither(scripted):
    scripted.start(MODES)
    kill_launch(scripted)
    scripted.paths.run_json.unlink()
    scripted.paths.weights_file.touch()
    scripted.start(MODES)
    scripted.life("learner", 2)
    assert not scripted.paths.weights_file.exists()
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "adopted" not in scripted.output and scripted.leftovers() == []


def test_a_second_launch_in_the_directory_is_refused_with_the_pid_of_the_first(scripted):
    first = scripted.start(MODES)
    scripted.ready("learner")
    second = scripted.start(MODES)
    assert scripted.wait() != 0
    assert f"RunInUse: {scripted.root}" in scripted.output and f"pid {first.pid}" in scripted.output
    scripted.launch = first
    scripted.finish()
    assert scripted.wait() == 0 and second.returncode
