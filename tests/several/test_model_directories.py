"""Directories of several models over starts and ends: made, adopted, put back and closed, each by its own files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tagged import AGENT, JUDGE, SERVED, SOLVER, Read

from busrl.errors import RunFinished, UserError
from busrl.launcher.run import close_run
from busrl.launcher.rundir import OpenRun, open_run
from busrl.paths import SHM
from busrl.preflight.load import materialise
from busrl.ring import Fates, Ring
from busrl.states import Fate, HeaderWord, RunPhase
from busrl.status.reader import summary_of
from busrl.topology import Topology
from busrl.topology.recorded import recorded

OLD = SERVED.replace("judge", "old")


@contextmanager
def opened(folder: Path, topology: Topology) -> Iterator[OpenRun]:
    run = open_run(folder, materialise(topology))
    try:
        yield run
    finally:
        if run.directory >= 0:
            close_run(run)


def left(run: OpenRun) -> None:
    """Let go of a run as a launch that is killed does: rings and files stay."""
    run.release()
    run.directory = -1


def rings_of(run: OpenRun) -> dict[str, Path]:
    return {each.topology.tag: each.paths.ring_file for each in run.every}


def test_every_model_has_rings_and_a_frozen_one_little_else(tmp_path: Path, read: Read) -> None:
    with opened(tmp_path / "run", read(SOLVER + JUDGE + OLD + AGENT)) as run:
        _, judge, old = run.every
        assert [each.ring.n_slots for each in run.every] == [40, 40, 1]
        assert all(each.calls and each.ring.uuid == run.ring.uuid for each in run.every)
        assert len({each.paths.ring_name for each in run.every}) == 3
        assert judge.paths.root == run.paths.root / "models" / "judge" and judge.paths.fates.exists()
        assert sorted(path.name for path in old.paths.root.iterdir()) == ["run.json", "topology.json"]
        assert recorded(judge.paths.topology) == judge.topology and recorded(run.paths.topology) == run.topology
        told = json.loads(old.paths.run_json.read_text())
        assert told["ring"] == old.paths.ring_name and told["calls"] == old.paths.calls_name
        assert told["run_id"] == json.loads(run.paths.run_json.read_text())["run_id"]
        assert told["uuid"] == run.ring.uuid.hex() and told["frontend"] == run.paths.frontend
        names = rings_of(run).values()
        assert all(name.exists() for name in names)
    assert not any(name.exists() for name in names) and not run.paths.runtime_dir.exists()
    assert judge.paths.open_bin.exists() and not old.paths.open_bin.exists()


def test_rings_that_stand_are_adopted_and_a_lost_one_put_back(tmp_path: Path, read: Read) -> None:
    topology = read(SOLVER + JUDGE + OLD + AGENT)
    with opened(tmp_path / "run", topology) as run:
        for each in run.trained():
            each.fates.store(3, Fate.DISPATCHED)
        run.every[1].ring.set_header(HeaderWord.NEXT_ADMISSION, 7)
        left(run)
        run.paths.ring_file.unlink()
    with opened(tmp_path / "run", topology) as again:
        notes = "\n".join(again.notes)
        assert "judge: adopted the ring" in notes and "old: " not in notes
        assert "1 training and 0 validation samples that were in no slot" in notes
        assert again.every[1].ring.header(HeaderWord.NEXT_ADMISSION) == 7
        codes = [each.fates.view()[3] for each in again.trained()]
        assert codes[0] == Fate.NONE and codes[1] == Fate.DISPATCHED


def test_a_run_with_a_lock_of_its_own_keeps_all_its_models(tmp_path: Path, read: Read) -> None:
    topology = read(SOLVER + JUDGE + AGENT)
    with opened(tmp_path / "run", topology) as run:
        assert run.every[1].lock is run.lock and not (run.every[1].paths.root / "run.lock").exists()
        gone = rings_of(run)["judge"]
        gone.rename(gone.with_suffix(".away"))
        try:
            assert str(gone) in run.ring_gone()
        finally:
            gone.with_suffix(".away").rename(gone)
        assert not run.ring_gone()


def test_what_is_removed_of_a_model_is_written_again(tmp_path: Path, read: Read) -> None:
    with opened(tmp_path / "run", read(SOLVER + JUDGE + AGENT)) as run:
        file = run.every[1].paths.topology
        file.unlink()
        [line] = run.restore()
        assert str(file) in line and recorded(file) == run.every[1].topology


def test_a_topology_in_force_reaches_the_files_of_every_model(tmp_path: Path, read: Read) -> None:
    from busrl.preflight import changeable

    with opened(tmp_path / "run", read(SOLVER + JUDGE + AGENT)) as run:
        run.use(changeable.changed(run.topology, "model.judge.learner.lr", "0.25"))
        assert recorded(run.every[1].paths.topology).learner.lr == 0.25 == run.topology.of("judge").learner.lr
        assert recorded(run.paths.topology).learner.lr == 1e-4
        assert changeable.value_of(run.topology, "model.judge.learner.lr") == "0.25"
        assert changeable.value_of(run.topology, "learner.lr") == "0.0001"
        assert changeable.followers("model.judge.learner.lr") == ("learner",)
        with pytest.raises(UserError, match="is the run's"):
            changeable.changed(run.topology, "model.judge.scheduler.policy", "fifo")
        run.use(changeable.changed(run.topology, "model.judge.process.rollout.count", "2"))
        names = [process.name for process in recorded(run.every[1].paths.topology).processes()]
        assert names == ["learner/judge", "rollout/1", "rollout/3"]


@pytest.mark.parametrize("rows", [
    SOLVER + AGENT, JUDGE + SOLVER + AGENT, SOLVER + JUDGE.replace("judge", "other") + AGENT, SOLVER + SERVED + AGENT,
    SOLVER + JUDGE + 'seats = ["a", "b"]\n' + AGENT, '[model]\npath = "tiny:sort"\n' + AGENT,
], ids=["fewer", "order", "tag", "frozen", "seats", "plain"])
def test_other_models_or_seats_are_another_run(tmp_path: Path, read: Read, rows: str) -> None:
    with opened(tmp_path / "run", read(SOLVER + JUDGE + AGENT)):
        pass
    with pytest.raises(UserError, match="say what a sample of the run is") as refused, \
         opened(tmp_path / "run", read(rows)):
        pass
    assert "judge with seats judge" in str(refused.value)


def test_another_path_of_a_model_beside_the_lead_is_another_run(tmp_path: Path, read: Read) -> None:
    with opened(tmp_path / "run", read(SOLVER + JUDGE + AGENT)) as run:
        shutil.copytree(run.topology.model.path, tmp_path / "copy")
    match = r"models/judge holds a run with model.path = .*this key says what a sample of the run is"
    with pytest.raises(UserError, match=match), \
         opened(tmp_path / "run", read(SOLVER + JUDGE.replace("tiny:sort", "copy") + AGENT)):
        pass


def test_a_run_is_over_when_every_trained_model_has_made_its_steps(tmp_path: Path, read: Read) -> None:
    topology = read(SOLVER + JUDGE + "max_steps = 3\n" + AGENT)
    with opened(tmp_path / "run", topology) as run:
        solver, judge = run.every
    finish(solver.paths.metrics, 9)
    run.paths.summary.write_text('{"outcome": "finished", "ended": 1e12}')
    with opened(tmp_path / "run", topology) as again:
        assert [each.ring.header(HeaderWord.RUN_STATE) for each in again.every] == [RunPhase.RUNNING] * 2
    run.paths.summary.write_text('{"outcome": "finished", "ended": 1e12}')
    finish(judge.paths.metrics, 3)
    with pytest.raises(RunFinished, match="9 of 9 steps"), opened(tmp_path / "run", topology):
        pass


def finish(metrics: Path, steps: int) -> None:
    metrics.write_text("".join(json.dumps({"step": step, "reward": 1.0}) + "\n" for step in range(1, steps + 1)))


def test_a_frozen_models_ring_is_made_anew_whatever_was_left(tmp_path: Path, read: Read) -> None:
    topology = read(SOLVER + OLD + AGENT)
    with opened(tmp_path / "run", topology) as run:
        run.every[1].ring.register("rollout", "rollout/1")
        left(run)
    with opened(tmp_path / "run", topology) as again:
        assert not again.every[1].ring.processes()
        ring = Ring.attach(again.every[1].paths.ring_name, read_only=True)
        assert ring.uuid == again.ring.uuid and ring.header(HeaderWord.GENERATION_PAUSE) == 0
        ring.close()


def test_fates_of_models_are_tables_of_their_own(tmp_path: Path, read: Read) -> None:
    with opened(tmp_path / "run", read(SOLVER + JUDGE + AGENT)) as run:
        run.every[1].fates.store(5, Fate.DISPATCHED)
        for each, code in zip(run.every, (Fate.NONE, Fate.DISPATCHED)):
            table = Fates(str(each.paths.fates), read_only=True)
            assert table.view()[5:6].tolist() in ([code], [] if code == Fate.NONE else [code])
            table.close()
    assert SHM.exists()


def test_the_summary_of_a_model_has_its_own_numbers(tmp_path: Path, read: Read) -> None:
    with opened(tmp_path / "run", read(SOLVER + JUDGE + OLD + AGENT)) as run:
        _, judge, old = (each.paths for each in run.every)
    models = {"solver": {"steps": 9}, "judge": {"steps": 3, "version": 2}, "old": {"trained": False}}
    run.paths.summary.write_text(json.dumps({"outcome": "finished", "steps": 9, "version": 9, "models": models}))
    assert [summary_of(paths)["steps"] for paths in (run.paths, judge, old)] == [9, 3, 0]
    assert summary_of(judge)["version"] == 2 and summary_of(old)["outcome"] == "finished"
