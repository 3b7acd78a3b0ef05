"""A checkpoint measured without a run gives the numbers of the run's own round; a new run begins from a checkpoint."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT, Run, running

from busrl.cli.command import main
from busrl.cli.evaluate import Evaluation, MeasuredRound
from busrl.engines import Engine, Finished, Request, make_engine
from busrl.errors import UserError
from busrl.preflight.load import load, materialise
from busrl.states import Finish
from busrl.topology import Topology

pytestmark = pytest.mark.long

STEPS = 3
QUICKSTART = ROOT / "configs" / "quickstart.toml"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, quickstart: None) -> Iterator[Run]:
    """A finished run of a few steps, validated before and after them."""
    run = Run(tmp_path_factory.mktemp("evaluated") / "run", "learner.checkpoint_every=1", steps=STEPS)
    with running(run):
        assert run.wait() == 0, run.tail()
        yield run


def rounds(run: Run) -> dict[int, dict[str, Any]]:
    return {row["round"]: row for row in map(json.loads, run.paths.validation.read_text().splitlines())}


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["evaluate", *map(str, arguments), "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


@pytest.mark.parametrize("step", [0, STEPS])
def test_a_checkpoint_has_the_mean_of_the_run_s_own_round(
    done: Run, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, told = evaluated(capsys, done.directory, "--checkpoint", step), rounds(done)[step]
    assert figures["mean"] == pytest.approx(told["val/reward"], abs=1e-9) and figures["samples"] == told["samples"]
    assert figures["length"] == pytest.approx(told["val/length"]) and figures["failed"] == 0
    rows = [json.loads(line) for line in Path(figures["rows"]).read_text().splitlines()]
    assert Path(figures["rows"]) == done.directory / "evaluated" / f"step_{step}.jsonl" and len(rows) == 32
    mean = sum(row["reward"] for row in rows) / 32
    spread = (sum((row["reward"] - mean) ** 2 for row in rows) / 31 / 32) ** 0.5
    assert figures["mean"] == pytest.approx(mean) and figures["standard_error"] == pytest.approx(spread)
    assert all(row["prompt"].endswith("=") for row in rows)
    assert sum(row["completion"] != "" and row["finish"] == "end" for row in rows) > 24  # others are cut or end at once


def test_the_newest_checkpoint_and_its_own_folder_evaluate_the_same(
    done: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = evaluated(capsys, done.directory)
    assert newest["model"].endswith(f"global_step_{STEPS}/model")
    folder = done.paths.checkpoints / f"global_step_{STEPS}"
    same = evaluated(capsys, QUICKSTART, "--checkpoint", folder, "--samples", 32, "--out", tmp_path / "rows.jsonl")
    assert same["mean"] == newest["mean"] and same["model"] == newest["model"]


def test_a_damaged_checkpoint_is_refused_and_an_unfit_model_named(
    done: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / f"global_step_{STEPS}"
    shutil.copytree(done.paths.checkpoints / damaged.name, damaged)
    weights = next((damaged / "model").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-8:] = bytes(8)
    weights.write_bytes(data)
    asked = ["evaluate", str(QUICKSTART), "--checkpoint", str(damaged), "--out", str(tmp_path / "rows.jsonl")]
    assert main(asked) == 2
    assert "the checkpoint is damaged" in capsys.readouterr().err
    config = json.loads((damaged / "model" / "config.json").read_text())
    (damaged / "model" / "config.json").write_text(json.dumps({**config, "num_attention_heads": 0}))
    asked[3] = str(damaged / "model")
    assert main(asked) == 2 and "no causal language model and tokenizer" in capsys.readouterr().err


def test_rewards_that_raise_are_counted_shown_and_left_out_of_the_mean(
    done: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "judge.py").write_text(
        "def score(record, completion, token_ids):\n"
        "    return {'n': 2.0} if len(record['prompt']) % 2 else {}['answer']\n"
    )
    settings = ["--set", "reward.kind=python", "--set", f"reward.function={tmp_path}/judge.py:score"]
    out = tmp_path / "rows.jsonl"
    more = ["--samples", "16", "--temperature", "0", "--out", str(out)]
    assert main(["evaluate", str(QUICKSTART), *settings, *more]) == 0
    rows, text = [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out
    failed = [row for row in rows if "error" in row]
    assert 0 < len(failed) < 16 and all("KeyError: 'answer'" in row["error"].split("\n")[0] for row in failed)
    assert "mean reward 2.0000" in text and f"{len(failed)} samples without a reward" in text
    assert all(row["parts"] == {"n": 2.0} for row in rows if row not in failed)


class GivesUp:
    """An engine that ends what it is asked without a whole answer."""

    capacity, max_length, active = 64, 64, 0

    def __init__(self, finish: int, tokens: int, token: int = 1) -> None:
        self.finish, self.ids, self.ended = finish, np.full(tokens, token, np.int32), list[Finished]()

    def encode(self, prompt: object) -> list[int]:
        return [5, 6]

    def submit(self, requests: Sequence[Request]) -> None:
        logprobs, versions = (np.ones(len(self.ids), kind) for kind in (np.float32, np.uint32))
        self.ended = [Finished(request.key, self.ids, -logprobs, versions, self.finish) for request in requests]
        self.active = len(requests)

    def step(self) -> list[Finished]:
        ended, self.ended, self.active = self.ended, [], 0
        return ended

    def close(self) -> None: ...


@pytest.mark.parametrize(("finish", "tokens", "token", "told"), [
    (Finish.ABORTED, 3, 1, "gave it up"), (Finish.LENGTH, 0, 1, "no room"),
    (Finish.LENGTH, 3, 16, "3 of its ids stand for no token of the tokenizer, the first is 16"),
])
def test_part_of_an_answer_or_what_is_no_text_is_not_judged(
    finish: int, tokens: int, token: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busrl.cli.evaluate.make_engine", lambda *_: GivesUp(finish, tokens, token))
    topology = materialise(load(QUICKSTART))
    evaluation = Evaluation(topology, MeasuredRound(dataclasses.replace(topology.sets[0], prompts=4), 4))
    rows = evaluation.run()
    assert len(rows) == 4 and all(told in row.error and row.reward is None for row in rows), rows
    assert evaluation.figures().samples == 0 and evaluation.figures().failed == 4


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["{run}", "--checkpoint", "7"], "has no such step; it has those of steps 0, 2, 3 "),
        (["{run}", "--checkpoint", "{run}/logs"], "no config.json in it"),
        (["{run}", "--set", "groups.size=2"], "give a file instead"),
        (["{run}/logs"], "no topology.json in it"),
    ],
)
def test_what_can_not_be_measured_is_said(
    done: Run, arguments: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *(part.format(run=done.directory) for part in arguments)]) == 2
    assert rule in capsys.readouterr().err


@pytest.fixture
def removed_meanwhile(done: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, whose newest checkpoint goes before an engine is made."""
    run = tmp_path / "run"
    shutil.copytree(done.directory, run, ignore=shutil.ignore_patterns("*.lock", "evaluated"))

    def make_engine_too_late(topology: Topology, process: str) -> Engine:
        shutil.rmtree(run / "checkpoints" / f"global_step_{STEPS}")
        return make_engine(topology, process)

    monkeypatch.setattr("busrl.cli.evaluate.make_engine", make_engine_too_late)
    return run


def test_a_checkpoint_that_its_run_removes_meanwhile_is_measured(
    done: Run, removed_meanwhile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = evaluated(capsys, removed_meanwhile)
    assert figures["mean"] == pytest.approx(rounds(done)[STEPS]["val/reward"], abs=1e-9)
    assert figures["model"] == str(removed_meanwhile / "checkpoints" / f"global_step_{STEPS}" / "model")
    assert [path.name for path in (removed_meanwhile / "checkpoints").iterdir()] == [f"global_step_{STEPS - 1}"]


def test_without_hard_links_a_removed_checkpoint_is_said_to_be_gone(
    removed_meanwhile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refused)
    assert main(["evaluate", str(removed_meanwhile)]) == 2
    said = capsys.readouterr().err
    assert "its run has removed it while it was read" in said and "takes the newest one" in said
    assert not list((removed_meanwhile / "checkpoints").glob(".*"))


def test_rows_that_can_not_be_written_are_said_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Evaluation, "run", lambda *_: pytest.fail("it computes"))
    (tmp_path / "file").write_text("")
    assert main(["evaluate", str(QUICKSTART), "--out", str(tmp_path / "file" / "rows.jsonl")]) == 2
    assert "rows cannot be written there" in (told := capsys.readouterr().err) and "--out" in told


def test_a_new_run_begins_with_what_a_checkpoint_has_learned(done: Run, tmp_path: Path) -> None:
    folder = done.paths.checkpoints / f"global_step_{STEPS}"
    settings = (f"model.path={folder}", "validation.at_end=false")
    assert load(QUICKSTART, settings).model.path == f"{folder}/model"
    run = Run(tmp_path / "run", *settings, steps=1)
    with running(run):
        assert run.wait() == 0, run.tail()
    assert json.loads(run.paths.topology.read_text())["model"]["path"] == f"{folder}/model"


def test_a_folder_that_is_no_checkpoint_is_not_looked_into(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"no config\.json in this folder"):
        load(QUICKSTART, [f"model.path={tmp_path}"])
