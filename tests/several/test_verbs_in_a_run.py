"""A running run of several models is asked about one of them: more engines, a checkpoint, a round of validation."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from harness import Run, read_lines, running
from model_runs import check_models, paths_of, process_of, three_models

from busrl.cli import main
from busrl.ledger.trained import newest_checkpoint, step_of
from busrl.observe.monitor.sources import Watcher, models_of, settle, watched
from busrl.observe.monitor.web.picture import History, picture
from busrl.ring import Ring
from busrl.several.summaries import overview
from busrl.states import HeaderWord
from busrl.status.view import status

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
WAIT_S = 120
STEPS = 60


def busrl(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a verb prints; it must end well."""
    code = main([*map(str, arguments), "--wait", str(WAIT_S)])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


class Holds:
    """While open, notes which models' versions are held."""

    def __init__(self, run: Run) -> None:
        self.seen, self._over = set[str](), threading.Event()
        self._rings = {tag or "solver": Ring.attach(paths_of(run, tag).ring_name, read_only=True)
                       for tag in ("", "judge")}
        self._looking = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.seen |= {tag for tag, ring in self._rings.items() if ring.header(HeaderWord.HOLD)}

    def __enter__(self) -> Holds:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()
        for ring in self._rings.values():
            ring.close()


def ready(run: Run, *names: str) -> bool:
    return all(process_of(run, name) is not None for name in names)


def test_verbs_and_views_reach_each_model_of_a_running_run(
    several: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = several / "made" / "sums.jsonl"
    run = three_models(several, tmp_path / "verbs", f"validation.data={prompts}", "validation.samples=8",
                       "validation.every=1000", "validation.at_start=false", "learner.checkpoint_every=0",
                       "learner.lr=1e-7", "model.judge.learner.lr=1e-7", steps=STEPS)  # what is learnt makes no steps
    with running(run):
        run.until("both models learn", lambda: len(read_lines(run.paths.metrics)) > 1
                  and len(read_lines(paths_of(run, "judge").metrics)) > 1)
        assert "model.judge.process.rollout.count = 2" in busrl(
            capsys, "scale", run.directory, "rollout", 2, "--model", "judge")
        assert "model.hint.process.rollout.count = 2" in busrl(
            capsys, "scale", run.directory, "rollout", 2, "--model", "hint")
        assert ready(run, "rollout/0", "rollout/1", "rollout/4", "rollout/2", "rollout/5"), run.tail()

        told = busrl(capsys, "checkpoint", run.directory, "--model", "judge")
        written = newest_checkpoint(paths_of(run, "judge"))
        assert written is not None and str(written.parent) in told and newest_checkpoint(run.paths) is None
        told = busrl(capsys, "checkpoint", run.directory)
        assert told.count("is written") == 2 and newest_checkpoint(run.paths) is not None

        with Holds(run) as holds:
            told = busrl(capsys, "validate", run.directory, "--model", "judge")
        assert holds.seen == {"judge"}, "its version is held, and no other's"
        assert "validation, round" in told and ", judge of version" in told and "\n  judge 0." in told
        row = read_lines(run.paths.validation)[-1]
        assert row["val/parts"]["judge"] == pytest.approx(float(told.split()[-1]), abs=1e-4)
        assert main(["validate", str(run.directory), "--model", "hint"]) == 2
        assert "it only serves" in capsys.readouterr().err

        seen(run)
        assert "rollout.count = 1" in busrl(capsys, "scale", run.directory, "rollout", 1, "--model", "judge")
        assert not ready(run, "rollout/4")
        run.kill_launch()
        run.start()
        run.until("its engines are as they were set", lambda: ready(run, "rollout/0", "rollout/1", "rollout/2",
                                                                    "rollout/5"), WAIT_S)
        check_models(run, run.wait(400))
    assert step_of(written) <= STEPS


def seen(run: Run) -> None:
    """Monitor, page and status show each model by its tag."""
    view = overview(run.directory)
    assert view is not None and view.data.keys() == {"judge", "hint"}
    judge = view.data["judge"]
    assert judge["step"] > 0 and judge["version"] > 0 and 0 <= judge["reward"]["last_10_steps"] <= 1
    assert judge["processes"] == ["learner/judge", "rollout/1", "rollout/4"] and "waits" in judge
    assert "reward" not in view.data["hint"] and view.data["hint"]["processes"] == ["rollout/2", "rollout/5"]
    assert any(line.strip().startswith("judge: version") and "reward" in line for line in view.lines)
    models = models_of(run.paths)
    assert [paths.root.name for paths in models] == [run.directory.name, "hint", "judge"]
    for paths in models:
        watcher = Watcher(paths)
        try:
            settle(watcher, 1.0)
            data = watched(watcher, paths)
            shown = picture(watcher, paths, History(), time.monotonic(), time.time())
        finally:
            watcher.close()
        names = {process["name"] for process in data["processes"]}
        if paths.root.name == "judge":
            assert {"learner/judge", "rollout/1", "rollout/4"} <= names and "learner" not in names
            assert data["step"] > 0 and " · judge" in shown["web"]["headline"]
            assert all(link["process"] not in ("rollout/0", "learner") for link in data.get("waits") or [])
        elif paths.root == run.paths.root:
            assert shown["web"]["lead"] == "solver" and shown["models"]["judge"]["step"] > 0
    assert "rollout/0" not in json.loads(status(models[2].root, as_json=True))["restarts"]
