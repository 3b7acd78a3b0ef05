"""Files of the ledger that somebody else damages: the run ends by name or mends them, and a later start finishes it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, running

from busrl.ledger.mend import newest_checkpoint
from busrl.ledger.trained import TrainedSet

pytestmark = pytest.mark.slow
END_S = 60.0  # to notice takes a second or two; to stop all processes in order takes the rest


def test_fates_that_are_cut_under_a_living_run_end_it_by_name_and_the_next_start_finishes_it(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=24)
    with running(run):
        run.until_step(13)  # past a checkpoint, with records after it
        os.truncate(run.paths.fates, 0)
        assert run.wait(END_S) == 1, run.tail()
        summary, before = run.summary(), run.step()
        assert summary["outcome"] == "failed" and 13 <= summary["steps"] < 24, summary
        assert re.search(r"fates\.bin was (made shorter|changed) by somebody else", summary["why"]), summary["why"]
        lost = {finding["kind"] for finding in summary["audit"]["findings"]}
        assert "logged_not_trained" in lost, summary["audit"]
        assert run.leftovers() == []
        run.start()
        code = run.wait()
    check_end(run, code)
    trained = [uid for line in read_standing(run) for uid, _, _ in line["samples"]]
    assert len(trained) == len(set(trained)) and run.step() == 24 > before


def read_standing(run: Run) -> list[dict]:
    """The lines of the train log that stand: of each step the last one."""
    lines = [json.loads(line) for line in run.paths.train_log.read_bytes().splitlines()]
    return list({line["step"]: line for line in lines}.values())


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def with_garbage(data: bytes) -> bytes:
    return data + bytes(range(200))


@pytest.mark.parametrize("damage", [cut, with_garbage, None])
def test_a_damaged_trained_set_is_made_again_from_the_train_log_by_the_next_start(
    damage: Callable[[bytes], bytes] | None, tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=16)
    with running(run):
        run.until_step(13)
        run.kill_launch()
        folder = newest_checkpoint(run.paths)
        assert folder is not None
        path, whole = folder / "trained.bin", (folder / "trained.bin").read_bytes()
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(whole))
        run.start()
        run.until("the start to mend it", lambda: "it was written again" in run.text())
        assert path.read_bytes() == whole
        code = run.wait()
    assert "resumed at step 1" in run.paths.log("learner").read_text()
    assert "torn checkpoint" not in run.paths.log("learner").read_text()
    check_end(run, code)


def test_a_trained_set_that_the_train_log_does_not_hold_is_made_again_from_the_checkpoint_before_and_the_log(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=30)
    with running(run):
        run.until_step(23)
        run.kill_launch()
        folder = newest_checkpoint(run.paths)
        assert folder is not None
        (folder / "trained.bin").write_bytes(b"BUSRLTRD")
        lines = run.paths.train_log.read_bytes().splitlines(keepends=True)
        run.paths.train_log.write_bytes(b"".join(lines[:13] + lines[14:]))  # a step after the checkpoint before
        run.start()
        code = run.wait()
    assert "from the checkpoint before and the log" in run.text(), run.tail()
    assert code == 1 and {one.kind for one in run.audit().errors} == {"train_log_disagrees"}, run.tail()
    assert len(TrainedSet.load(run.paths.checkpoints / "global_step_30" / "trained.bin")) == run.audit().counts.trained


def test_a_checkpoint_with_a_changed_byte_costs_the_run_nothing_and_a_person_is_told(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=30)
    with running(run):
        run.until_step(23)
        run.kill_launch()
        weights = next((run.paths.checkpoints / "global_step_20" / "model").glob("*.safetensors"))
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
        run.start()
        code = run.wait()
    check_end(run, code)
    assert "global_step_20 is damaged" in run.text() and "global_step_20 is damaged" in run.paths.errors.read_text()
    assert "resumed at step 2" in run.paths.log("learner").read_text()
    assert (run.paths.checkpoints / "torn-global_step_20").is_dir()


def test_a_topology_that_vanishes_under_a_run_is_written_again_and_the_run_has_its_summary(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=16)
    with running(run):
        run.until_step(3)
        before = run.paths.topology.read_bytes()
        run.paths.topology.unlink()
        run.kill("rollout/0")
        run.until("a child to need it", lambda: run.paths.topology.is_file())
        assert run.paths.topology.read_bytes() == before
        run.until_step(14)
        run.paths.topology.write_text("{}")
        code = run.wait()
    check_end(run, code)
    assert run.text().count("topology.json was removed or changed by somebody else; it is written again") == 2
