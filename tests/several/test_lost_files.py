"""Starts of a run of two models after its launch was killed, beside rings or files of one of them that are gone: what
is missing is named as in a run of one model, what can be made good is, and the other model loses nothing.

The run is killed once; each case goes on with a copy of its directory and of its rings.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Run, read_lines, running
from model_runs import paths_of, step_of, three_models

from busrl.ledger.audit import audit
from busrl.ledger.trained import newest_checkpoint
from busrl.ledger.trained import step_of as step_of_checkpoint
from busrl.paths import SHM, RunPaths
from busrl.several.audit import audit as audit_together
from busrl.topology.recorded import recorded

DONE = 8  # past two checkpoints, most often with steps that are in the log alone
TAGS = ("", "judge")
SLOW = pytest.mark.slow
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@dataclasses.dataclass
class Killed:
    """A run that was killed with all its processes, and copies of its rings by tag."""

    run: Run
    rings: dict[str, Path]

    def again(self, directory: Path, *settings: str, without: tuple[str, ...] = ()) -> Run:
        """A copy of it that is to make two steps more, without the rings of these tags."""
        shutil.copytree(self.run.directory, directory)
        steps = 2 + max(done(paths_of(self.run, tag)) for tag in TAGS)
        settings = (*self.run.settings, f"run.max_steps={steps}", *settings)
        run = Run(directory, *settings, config=self.run.config, steps=steps)
        for tag, ring in self.rings.items():
            if tag not in without:
                shutil.copy(ring, paths_of(run, tag).ring_file)  # with its mode: one that others may write is refused
        return run


def done(paths: RunPaths) -> int:
    """The steps of a model's train log."""
    return max(int(line["step"]) for line in read_lines(paths.train_log))


def kill_at(run: Run, folder: Path, *steps: int) -> Killed:
    """Let each model make so many steps, and kill the run."""
    with running(run):
        run.until(f"{steps} steps", lambda: all(step_of(run, tag) >= step for tag, step in zip(TAGS, steps)))
        run.kill_launch(limit_s=30)
        rings = {tag: Path(shutil.copy(paths_of(run, tag).ring_file, folder / f"ring-{tag}")) for tag in TAGS}
    return Killed(run, rings)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, several: Path) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    return kill_at(three_models(several, folder, "learner.checkpoint_every=3", steps=1000), folder, DONE, DONE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, several: Path) -> Killed:
    """The judge has made all its steps, and the run went on without it."""
    folder = tmp_path_factory.mktemp("finished")
    settings = "model.judge.max_steps=3", "learner.checkpoint_every=3"
    return kill_at(three_models(several, folder, *settings, steps=1000), folder, DONE, 3)


@pytest.fixture
def again(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Copies of a killed run, whose rings are gone after the test."""
    made: list[Run] = []

    def copy(killed: Killed, *settings: str, **how: Any) -> Run:
        made.append(killed.again(tmp_path / f"run{len(made)}", *settings, **how))
        return made[-1]

    yield copy
    for run in made:
        for path in SHM.glob(f"{run.paths.ring_name.removesuffix('.ring')}.*"):
            path.unlink(missing_ok=True)


def whole(paths: RunPaths, steps: int, errors: frozenset[str] = frozenset()) -> None:
    """A model made its steps, and its audit finds these errors alone."""
    report = audit(paths.root)
    assert {error.kind for error in report.errors} == errors, report
    assert report.counts.lost == report.counts.trained_twice == 0 and report.counts.step == steps, report
    assert sorted({line["step"] for line in read_lines(paths.train_log)}) == list(range(1, steps + 1))


def slots_of(run: Run) -> int:
    """The samples that may have been in flight, in both rings."""
    return sum(recorded(paths_of(run, tag).topology).derived.limits.train_slots for tag in TAGS)


# -- rings -----


@pytest.mark.parametrize("lost", [(), ("",), ("judge",), TAGS], ids=["none", "the lead's", "the other's", "both"])
def test_what_lost_rings_held_is_played_again(killed: Killed, again: Callable[..., Run], lost: tuple[str, ...]) -> None:
    run = again(killed, without=lost)
    trained = {tag: read_lines(paths_of(run, tag).train_log) for tag in TAGS}
    with running(run):
        code = run.wait()
    assert code == 0, run.tail()
    text = run.text()
    assert ("judge: adopted the ring" in text) == ("judge" not in lost), text
    assert text.count("adopted the ring") == 2 - len(lost), text
    for tag in TAGS:
        whole(paths_of(run, tag), run.steps)
        assert read_lines(paths_of(run, tag).train_log)[: len(trained[tag])] == trained[tag], "what was trained stays"
    together = audit_together(run.directory)
    assert together is not None and set(together.unpaired) <= {"alone", "finished"}
    assert sum(together.unpaired.values()) <= slots_of(run), "what was in flight, and what a finished model left out"
    assert run.leftovers() == []


@pytest.mark.parametrize("lost", [("judge",), pytest.param((), marks=SLOW), pytest.param(("",), marks=SLOW)],
                         ids=["its own ring", "no ring", "the lead's ring"])
def test_a_model_that_had_finished_stays_so(finished: Killed, again: Callable[..., Run], lost: tuple[str, ...]) -> None:
    run = again(finished, without=lost)
    judge = paths_of(run, "judge")
    log, checkpoint = judge.train_log.read_bytes(), newest_checkpoint(judge)
    with running(run):
        code = run.wait()
    assert code == 0, run.tail()
    whole(run.paths, run.steps)
    whole(judge, 3)
    assert judge.train_log.read_bytes() == log and newest_checkpoint(judge) == checkpoint
    assert run.summary()["models"]["judge"]["steps"] == 3 and run.leftovers() == []


@SLOW
def test_a_finished_model_that_is_given_more_steps_makes_them(finished: Killed, again: Callable[..., Run]) -> None:
    run = again(finished, "model.judge.max_steps=6")
    with running(run):
        code = run.wait()
    assert code == 0, run.tail()
    whole(run.paths, run.steps)
    whole(paths_of(run, "judge"), 6)
    together = audit_together(run.directory)
    assert together is not None and set(together.unpaired) <= {"alone", "finished"}


# -- files -----


def removed(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("tag", [pytest.param("", marks=SLOW), "judge"], ids=["the lead", "the other"])
def test_a_removed_log_is_named_and_costs_its_model_alone(killed: Killed, again: Callable[..., Run], tag: str) -> None:
    """Steps that only it held were trained, and cannot be trained again: the audit says which."""
    run = again(killed)
    paths, named = paths_of(run, tag), "learner/judge" if tag else "learner"
    checkpoint = newest_checkpoint(paths)
    assert checkpoint is not None
    stepped = done(paths) > step_of_checkpoint(checkpoint)
    removed(paths.wal)
    lost = "trained_unlogged" in audit(paths.root).kinds  # also of a step that was logged when its learner was killed
    assert lost or not stepped
    with running(run):
        code = run.wait()
    assert code == int(lost) and ("the audit found errors" in run.text()) == lost, run.tail()
    assert not stepped or "the end of the log was lost" in run.paths.log(named).read_text()
    for one in TAGS:
        whole(paths_of(run, one), run.steps, frozenset({"trained_unlogged"} if lost and one == tag else ()))
    assert run.leftovers() == []


@pytest.mark.parametrize("ring", [True, pytest.param(False, marks=SLOW)], ids=["with its ring", "without"])
@pytest.mark.parametrize("tag", [pytest.param("", marks=SLOW), "judge"], ids=["the lead", "the other"])
def test_removed_fates_are_made_again_from_the_files(
    killed: Killed, again: Callable[..., Run], tag: str, ring: bool
) -> None:
    run = again(killed, without=() if ring else (tag,))
    removed(paths_of(run, tag).fates)
    with running(run):
        code = run.wait()
    assert code == 0, run.tail()
    text = run.text()
    assert not ring or f"{tag}: " * bool(tag) + "the ring that an earlier launch left is not used" in text, text
    assert text.count("adopted the ring") == 1, "that of the other model"
    for one in TAGS:
        whole(paths_of(run, one), run.steps)
    assert run.leftovers() == []


@pytest.mark.parametrize("tag", [pytest.param("", marks=SLOW), "judge"], ids=["the lead", "the other"])
def test_removed_checkpoints_end_the_start_by_name_and_restored_it_goes_on(
    killed: Killed, again: Callable[..., Run], tag: str, tmp_path: Path
) -> None:
    run = again(killed)
    paths, other = paths_of(run, tag), paths_of(run, "" if tag else "judge")
    shutil.move(paths.checkpoints, tmp_path / "kept")
    before = other.train_log.read_bytes()
    with running(run):
        code = run.wait()
        text, named = run.text(), "learner/judge" if tag else "learner"
        assert code not in (0, None) and f"{named}" in run.summary()["why"], run.tail()
        assert "no whole checkpoint" in text and "Traceback" not in text, text
        assert other.train_log.read_bytes().startswith(before)
        shutil.rmtree(paths.checkpoints, ignore_errors=True)
        shutil.move(tmp_path / "kept", paths.checkpoints)
        run.start()
        code = run.wait()
    assert code == 0, run.tail()
    for one in TAGS:
        whole(paths_of(run, one), run.steps)
    assert run.leftovers() == []
