"""Named sets of validation in real runs: several answers to a prompt, rounds on demand, rollouts that only validate."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Run, read_lines, running

from busrl.cli.command import main
from busrl.data.figures import majority
from busrl.status.runfiles import RunFiles
from busrl.status.state import RunState
from busrl.status.words import judged

FOUR = '{name="four", data="tiny:sort", k=4, samples=8, every_steps=0}'
WHOLE = '{name="whole", data="tiny:sort", samples="all"}'
DEDICATED = """
[[process]]
role = "rollout"
[[process]]
role = "rollout"
serves = "validation"
"""


def rows_of(run: Run, name: str) -> list[dict[str, Any]]:
    return [row for row in read_lines(run.paths.validation) if row.get("set", "") == name]


def answers_of(run: Run, name: str, number: int) -> dict[int, list[dict[str, Any]]]:
    """The results of a round by line of the file, as validation.log has them."""
    results: dict[int, list[dict[str, Any]]] = {}
    for row in read_lines(run.directory / "validation.log"):
        if row.get("set", "") == name and row["round"] == number:
            results.setdefault(row["line"], []).append(row)
    return results


def check_figures(row: dict[str, Any], answers: dict[int, list[dict[str, Any]]], k: int) -> None:
    """Every figure of a line again, by enumeration, from the answers in the log."""
    right = {line: [row["reward"] >= 1 for row in rows] for line, rows in answers.items()}
    for size in (1, 2, 4):
        chosen = {line: list(itertools.combinations(of, size)) for line, of in right.items()}
        passed = [sum(map(any, some)) / len(some) for some in chosen.values()]
        assert row[f"val/pass@{size}"] == pytest.approx(sum(passed) / len(passed))
    votes = [majority((row["answer"], row["reward"] >= 1) for row in rows) for rows in answers.values()]
    assert row[f"val/maj@{k}"] == pytest.approx(sum(votes) / len(votes))
    assert row["val/avg@4"] == row["val/reward"] == pytest.approx(sum(map(sum, right.values())) / k / len(right))
    low, high = row["intervals"]["pass@4"]
    assert low <= row["val/pass@4"] <= high


@pytest.mark.long
def test_two_sets_are_measured_with_figures_that_their_answers_have(
    tmp_path: Path, quickstart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run", "validation.data=", f"validation.set=[{FOUR}, {WHOLE}]", steps=2)
    with running(run):
        assert run.wait() == 0, run.tail()
    assert [row["round"] for row in rows_of(run, "four")] == [row["round"] for row in rows_of(run, "whole")] == [0, 2]
    for row in rows_of(run, "four"):
        answers = answers_of(run, "four", row["round"])
        assert len(answers) == 8 and all(len(rows) == 4 for rows in answers.values())
        check_figures(row, answers, 4)
    whole = answers_of(run, "whole", 2)
    assert sorted(whole) == list(range(512)) and all(len(rows) == 1 for rows in whole.values()), "each line once"
    assert not run.audit().errors, run.tail()

    seen = RunState()
    RunFiles(run.paths).fold_into(seen)
    assert "four 0." in judged(seen) and " · whole 0." in judged(seen)
    assert {entry.get("set") for entry in run.summary()["validation"]} == {"four", "whole"}
    assert "validation 2 of four of version 2" in run.text()
    assert main(["evaluate", str(run.directory), "--validation", "four", "--json"]) == 0
    figures, told = json.loads(capsys.readouterr().out), rows_of(run, "four")[-1]
    assert figures["mean"] == told["val/reward"] and figures["figures"]["pass@4"]["value"] == told["val/pass@4"]
    assert figures["figures"]["maj@4"]["value"] == told["val/maj@4"]
    assert main(["validate", str(run.directory)]) == 2 and "no process runs it" in capsys.readouterr().err


@pytest.mark.slow
def test_a_round_on_demand_covers_the_step_of_its_request(
    tmp_path: Path, quickstart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run", "validation.at_start=false", f"validation.set=[{FOUR}]", steps=60)
    with running(run):
        run.until_step(5)
        assert main(["validate", str(run.directory), "nothing"]) == 2
        assert "no set of this run; it has validation, four" in capsys.readouterr().err
        assert main(["validate", str(run.directory), "four", "--json"]) == 0
        row = json.loads(capsys.readouterr().out)
        assert row["set"] == "four" and 5 <= row["round"] < 60 and row["samples"] == 32 and not row["mixed"]
        assert main(["validate", str(run.directory), "--free"]) == 0
        text = capsys.readouterr().out
        assert "validation, round" in text and "four, round" in text and "  pass@4 " in text
        assert run.wait() == 0, run.tail()
    for name in ("", "four"):
        rounds = [row["round"] for row in rows_of(run, name)]
        assert rounds == sorted(set(rounds)) and rounds[-1] == 60, rounds
    assert not run.audit().errors


@pytest.mark.slow
def test_a_round_of_two_sets_that_is_cut_short_is_finished_once(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", f"validation.set=[{FOUR}, {WHOLE}]", steps=10)
    with running(run):
        for _ in range(2):
            run.kill("validator", when=lambda process: process.activity.startswith("validate round"))
        assert run.wait() == 0, run.tail()
    for name, answers in (("", 32), ("four", 32), ("whole", 512)):
        rows = rows_of(run, name)
        assert [row["round"] for row in rows] == [0, 10] and all(row["samples"] == answers for row in rows), rows
    assert not run.audit().errors


@pytest.mark.slow
def test_training_goes_on_while_rollouts_of_their_own_validate_one_version(tmp_path: Path, quickstart: None) -> None:
    topology = tmp_path / "dedicated.toml"
    topology.write_text((ROOT / "configs" / "quickstart.toml").read_text() + DEDICATED)
    settings = ("validation.mode=dedicated", "validation.every=10", "validation.samples=all", "validation.k=2")
    run = Run(tmp_path / "run", *settings, "generation.max_batch=32", config=topology, steps=60)

    def in_round() -> bool:
        validator = run.processes().get("validator")
        return validator is not None and validator.activity.startswith("validate round") and bool(run.step())

    with running(run):
        run.until("a round in the run", in_round)
        began = run.step()
        run.until("a step within the round", lambda: run.step() > began + 1)
        assert in_round(), "two steps were published while a version was being validated"
        assert run.wait() == 0, run.tail()
    rows = rows_of(run, "")
    assert len(rows) >= 3 and not any(row["mixed"] for row in rows) and all(row["samples"] == 1024 for row in rows)
    assert all(row["version"] >= row["round"] for row in rows if 0 < row["round"] < 60), rows
    assert not run.audit().errors
