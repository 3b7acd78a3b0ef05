"""Runs of a solver, a judge and a third model that only serves, for tests: how they are made, and what must be true of
each model's files afterwards."""

from __future__ import annotations

import io
from contextlib import closing, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from harness import Run, read_lines

from busrl.cli import main
from busrl.errors import RingError
from busrl.ledger.audit import audit
from busrl.paths import RunPaths
from busrl.ring import Process, Ring

TAGS = ("", "judge", "hint")  # the lead is the solver
EPISODES = 48  # at a time, of an agent

EPISODE = '''
async def episode(task, llm):
    """Some rounds of the sums, so that a death often finds an episode half played."""
    right = judged = 0
    for _ in range(3):
        await llm["hint"].complete(task["prompt"], max_tokens=1)
        answer = await llm["solver"].complete(task["prompt"], max_tokens=1)
        verdict = await llm["judge"].complete(f"{task['prompt']}{answer.text}=", max_tokens=1)
        right += answer.text == task["answer"]
        judged += verdict.text == ("|" if answer.text == task["answer"] else ".")
    return {"solver": right / 3, "judge": judged / 3}
'''
THIRD = '''[[model]]
tag = "hint"
trained = false
path = "made/solver"
device = "cpu"

[data]
'''
ONE_LEARNER = '\n[[process]]\nrole = "learner"\nmodel = ["solver", "judge"]\n'
ADAPTERS = ("lora.rank=4", "model.judge.lora.rank=8", 'weights.transport="lora_hotswap"')


def three_models(folder: Path, where: Path, *settings: str, steps: int, shared: bool = False) -> Run:
    """A run of examples/several's solver and judge, both trained, and of one that is not. `shared`: solver and judge
    are adapters over the solver's weights, which one learner process trains."""
    where.mkdir(parents=True, exist_ok=True)
    (where / "rounds.py").write_text(EPISODE)
    text = (folder / "solver_judge.toml").read_text()
    if shared:
        text = text.replace("made/judge", "made/solver") + ONE_LEARNER
        settings = (*ADAPTERS, *settings)
    text = text.replace("[data]\n", THIRD, 1).replace("solver_judge.py:episode", f"{where}/rounds.py:episode")
    config = folder / f"{where.name}.toml"
    config.write_text(text)
    return Run(where / "run", "groups.size=4", "learner.checkpoint_every=5", f"agents.episodes={EPISODES}",
               "validation.data=", *settings, config=config, steps=steps)


def paths_of(run: Run, tag: str) -> RunPaths:
    """The paths of a model of the run; `""` and the lead: the run's own."""
    return run.paths.of_tag(tag) if tag else run.paths


def process_of(run: Run, name: str) -> Process | None:
    """The process of that name, in whatever model's ring it is, once it is ready."""
    for tag in TAGS:
        with suppress(RingError, OSError), closing(Ring.attach(paths_of(run, tag).ring_name, read_only=True)) as ring:
            for process in ring.processes():
                if process.label == name and process.state == "ready" and not ring.is_dead(process.index):
                    return process
    return None


def status(run: Run) -> str:
    """What `busrl status` prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        main(["status", str(run.directory)])
    return printed.getvalue()


def step_of(run: Run, tag: str) -> int:
    rows = [row for row in read_lines(paths_of(run, tag).metrics) if "kind" not in row]
    return int(rows[-1]["step"]) if rows else 0


def sides_alone(run: Run, tag: str) -> int:
    """Trained samples of episodes that were played without some of their sides."""
    rows = {row["step"]: row for row in read_lines(paths_of(run, tag).metrics) if "kind" not in row}
    return sum(row["episodes"].get("alone", 0) for row in rows.values())


def check_models(run: Run, code: int, *tags: str) -> dict[str, Any]:
    """Every model made its steps, and lost and doubled nothing; the reports of their audits."""
    assert code == 0, run.tail()
    reports = {}
    for tag in tags or ("", "judge"):
        paths = paths_of(run, tag)
        report = reports[tag] = audit(paths.root) if tag else run.audit()
        assert report.counts.lost == 0 and report.counts.trained_twice == 0 and not report.errors, (tag, report)
        steps = [line["step"] for line in read_lines(paths.train_log)]
        assert sorted(set(steps)) == list(range(1, run.steps + 1)), (tag, steps)
    assert run.leftovers() == []
    return reports
