"""One rule for the first and the newest round of validation, in every place that shows them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from busrl.cli import evaluate
from busrl.data.figures import Figures
from busrl.launcher.summary import Progress
from busrl.observe.monitor.web.picture import steps_after
from busrl.observe.report.files import RunRecord
from busrl.observe.report.page import FACTS, Run
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.status.runfiles import RunFiles
from busrl.status.state import Facts, RoundRecord, RunState
from busrl.status.view import RunStatus, as_data
from busrl.status.words import judged, rises


def row(number: int, mean: float | None, samples: int = 8, dropped: int = 0, **more: Any) -> dict[str, Any]:
    return {"round": number, "val/reward": mean, "samples": samples, "dropped": dropped, "version": number, **more}


# Lines of validation.jsonl in the order in which they were written, and what every place says of them.
FILES: dict[str, tuple[list[dict[str, Any]], str, list[int]]] = {
    "an empty first round": (
        [row(0, None, 0, 8), row(5, 0.25), row(9, 0.5)], "validation 0.250 (step 5) → 0.500", [5, 9],
    ),
    "the 0 of an older busrl": (
        [row(0, 0.0, 0, 8), row(5, 0.25), row(9, 0.5)], "validation 0.250 (step 5) → 0.500", [5, 9],
    ),
    "an empty last round": ([row(0, 0.25), row(5, 0.5), row(9, None, 0, 8)], "validation 0.250 → 0.500", [0, 5]),
    "asked again": ([row(0, None, 0, 8), row(0, 0.25), row(5, 0.5)], "validation 0.250 → 0.500", [0, 5]),
    "not in order": ([row(5, 0.5), row(9, 0.75), row(0, 0.25)], "validation 0.250 → 0.750", [0, 5, 9]),
    "empty beside a measured one": ([row(0, 0.25), row(0, None, 0, 8)], "validation 0.250", [0]),
    "a part": (
        [row(0, 0.25, 6, 2), row(5, 0.5)], "validation 0.250 (6 of 8) → 0.500", [0, 5],
    ),
    "nothing at all": ([row(0, None, 0, 8)], "validation nothing measured (none of 8 answers was judged)", []),
    "two sets": (
        [row(0, None, 0, 8, set="hard"), row(0, 0.25), row(5, 0.5, set="hard")],
        "validation 0.250 · hard 0.500", [0, 5],
    ),
    "ten rounds": ([row(step, step / 16) for step in range(12)], "validation 0.000 → 0.688", [*range(12)]),
}


@pytest.fixture(params=FILES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RunPaths, str, list[int]]:
    rows, said, rounds = FILES[request.param]
    paths = RunPaths.of(tmp_path)
    paths.validation.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths, said, rounds


def test_status_summary_report_and_monitor_say_the_same(case: tuple[RunPaths, str, list[int]]) -> None:
    paths, said, rounds = case
    state = RunState(facts=Facts(name="x"))
    RunFiles(paths).fold_into(state)
    data = as_data(RunStatus(None, state, 0.0, "finished"))
    record = RunRecord(paths, rounds=[json.loads(line) for line in paths.validation.read_text().splitlines()])
    assert judged(state) == said, "monitor, status and the lines of launch"
    assert rises(data["validation"], data["validation_unmeasured"]) == said, "summary.json"
    assert f"validation {FACTS['validation'](Run(record, 'x'))}" == said, "the report's table"
    assert [row["round"] for row in data["validation"]] == rounds
    assert [row[1] for row in steps_after(state, 0)["rounds"]] == rounds, "the page of the monitor"
    assert sorted(x for line in Run(record, "x").validation() for x in line.x.tolist()) == rounds, "the report"


def test_report_and_status_say_the_same_of_the_reward(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    steps = [{"step": n, "version": n, "reward": n / 32} for n in range(1, 33)]
    paths.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    state = RunState(facts=Facts(name="x"))
    RunFiles(paths).fold_into(state)
    told = as_data(RunStatus(None, state, 0.0, "finished"))["reward"]
    said = f"{told['first']:.3f} → {told['last_10_steps']:.3f}"
    assert FACTS["reward"](Run(RunRecord(paths, steps=steps), "x")) == said


def test_what_the_bus_tells_counts_as_what_the_file_tells() -> None:
    state = RunState()
    state.handle(m.ValidationDone(round=0, version=0, samples=0, mean=0.0, dropped=8), 0.0)
    assert judged(state).startswith("validation nothing measured")
    state.handle(m.ValidationDone(round=3, version=3, samples=6, mean=0.5, dropped=2), 0.0)
    assert judged(state) == "validation 0.500 (6 of 8)"
    state.handle(m.ValidationDone(round=3, version=3, samples=0, mean=0.0, dropped=8), 0.0)
    assert state.judged()["validation"] == [{"round": 3, "mean": 0.5, "samples": 6, "dropped": 2}]


def test_the_first_round_is_kept_however_many_follow() -> None:
    state = RunState()
    for number in range(5000):
        state.validated(RoundRecord(number, mean=0.25 if not number else 0.5, samples=8))
    assert judged(state) == "validation 0.250 → 0.500" and len(state.validations) == 4096


@pytest.mark.parametrize(
    ("samples", "dropped", "said"),
    [
        (8, 0, "0.500 over 8 samples"), (6, 2, "0.500 over 6 of 8 samples, 2 had no reward"),
        (0, 8, "nothing measured (none of 8 answers was judged)"),
    ],
)
def test_the_line_of_a_round_says_how_many_of_how_many(samples: int, dropped: int, said: str) -> None:
    done = m.ValidationDone(round=4, version=3, samples=samples, mean=0.5 if samples else 0.0, dropped=dropped)
    progress = Progress(RunState(), [], 0.0)
    assert progress.handle(done, 0.0) == [f"validation 4 of version 3: {said}"]


def test_a_measurement_reports_its_progress_during_a_long_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported = threading.Semaphore(0)

    def progress() -> str:
        reported.release()
        return "loads the model"

    monkeypatch.setattr(evaluate, "PATIENCE_S", 0.001)
    with evaluate.progress_shown("my-model: 8 answers to 4 prompts of held.jsonl", progress):  # this body is the step
        assert all(reported.acquire(timeout=30) for _ in range(6))
    printed = capsys.readouterr().err
    assert printed.startswith("busrl: my-model: 8 answers to 4 prompts of held.jsonl\n")
    assert printed.count("s: loads the model\n") >= 2


def test_how_far_a_measurement_is_counts_answers_and_rewards_apart() -> None:
    rows = [evaluate.Row(1, "", finish="end", reward=1.0), evaluate.Row(2, "", finish="end"),
            evaluate.Row(3, "", error="too long"), evaluate.Row(4, "")]  # fmt: skip
    text = evaluate.progress_text(rows, 4, 1.0)
    assert text == "2 of 4 answers are there, 1 judged, mean 1.000, 1 have no reward"
    assert evaluate.progress_text(rows[1:2], 4, None) == "1 of 4 answers are there, 0 judged"


def test_a_measurement_of_nothing_is_null_and_not_0() -> None:
    nothing = Figures([]).record()
    assert nothing["val/reward"] is None and nothing["samples"] == 0
    text = evaluate.round_text({**row(4, None, 0, 8), "mixed": False})
    assert text == "validation, round 4: nothing measured (none of 8 answers was judged)"
    judged = evaluate.round_text({**row(4, 0.5, 6, 2), "mixed": False})
    assert judged.startswith("validation, round 4 of version 4: 6 of 8")
