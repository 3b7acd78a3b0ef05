"""The whole loop beside its rivals: what all sides are given, what a turn counts, and a short run of it."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import loop_10m
from benchmarks.common import sides, systems
from benchmarks.common.judge import Log
from benchmarks.rivals import work

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("work")
    work.Work("tiny", prompts=32, prompt=12, mean=8.0, longest=24, groups=2).write(place)
    return place


# -- what all are given ------------------------------------------------------------------------------------------------


def test_the_model_ends_its_texts_after_the_asked_length_in_the_mean(folder: Path) -> None:
    plain = pytest.importorskip("benchmarks.rivals.plain").PlainLoop(folder, False)
    plain.work = work.Work("tiny", longest=200)
    lengths = [len(row) for row in plain.generated(plain.prompts * 16)]
    assert 6.0 < sum(lengths) / len(lengths) < 11.0
    assert max(lengths) > 24, "lengths have a long tail"


def test_prompts_are_the_ids_that_the_tokenizer_finds_in_them(folder: Path) -> None:
    plain = pytest.importorskip("benchmarks.rivals.plain").PlainLoop(folder, False)
    texts = [json.loads(line)["prompt"] for line in (folder / "train.jsonl").read_text().splitlines()]
    assert plain.prompts == [list(map(int, text.split())) for text in texts]
    assert {len(prompt) for prompt in plain.prompts} <= set(range(6, 13))


def test_the_reward_is_a_coin() -> None:
    chance = random.Random(0)
    tossed = [work.score({}, "", [chance.randrange(64) for _ in range(8)]) for _ in range(1000)]
    assert set(tossed) == {0.0, 1.0} and 450 < sum(tossed) < 550


def test_both_ways_of_the_plain_loop_draw_and_train_a_step(folder: Path) -> None:
    rival = pytest.importorskip("benchmarks.rivals.plain")
    for continuous in (False, True):
        plain = rival.PlainLoop(folder, continuous)
        before = [parameter.detach().clone() for parameter in plain.model.parameters()]
        row = plain.step()
        assert row["samples"] == 16 and 16 <= row["tokens"] <= 16 * 24
        assert any((old != new).any() for old, new in zip(before, plain.model.parameters()))


def test_the_plain_step_has_the_gradient_of_the_policy_gradient(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    rival = pytest.importorskip("benchmarks.rivals.plain")
    plain = rival.PlainLoop(folder, False)
    prompts, completions, rewards = [[5, 6, 7]] * 2, [[9, 8, 1], [3, 1]], [1.0, 0.0]
    expected = 0.0
    for prompt, completion, advantage in zip(prompts, completions, (0.5**0.5, -(0.5**0.5))):
        logits = plain.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])
        expected = expected - advantage * chosen.sum() / 5
    expected.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.model.parameters()]).item()
    assert plain.trainer.step(prompts, completions, rewards, 2) == 5
    assert plain.trainer.norm == pytest.approx(norm, rel=1e-4)


# -- a turn ------------------------------------------------------------------------------------------------------------

BURNS = """
import json, sys, time
while True:
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    print(json.dumps({"samples": 10, "tokens": 30}), file=open(sys.argv[1], "a"), flush=True)
"""


def test_a_turn_counts_between_two_ends_of_steps(tmp_path: Path) -> None:
    lines = tmp_path / "steps.jsonl"
    child = sides.started([sys.executable, "-c", BURNS, str(lines)])
    options = argparse.Namespace(seconds=0.5, steps=3, limit=60.0)
    try:
        turn = loop_10m.counted(child, 2, loop_10m.StepLines(lines), options)
    finally:
        sides.end_session(child)
    figures = turn.figures
    assert figures["steps"] >= 3 and figures["seconds"] >= 0.5 and figures["tokens_per_sample"] == 3.0
    assert 100 < figures["samples_per_cpu_s"] < 300  # 200, but for a look that came late
    assert figures["cores"] <= 1.05
    assert sum(turn.by_process.values()) == pytest.approx(1e3 / figures["samples_per_cpu_s"], rel=0.1)


def test_what_was_drawn_before_a_turn_is_not_counted_as_its_work(tmp_path: Path) -> None:
    lines, drawn = tmp_path / "steps.jsonl", iter((70, 75))
    child = sides.started([sys.executable, "-c", BURNS, str(lines)])
    options = argparse.Namespace(seconds=0.1, steps=2, limit=60.0)
    try:
        figures = loop_10m.counted(child, 1, loop_10m.StepLines(lines), options, lambda: next(drawn)).figures
    finally:
        sides.end_session(child)
    samples = figures["samples_per_s"] * figures["seconds"]
    assert samples == pytest.approx(5) and figures["drawn_per_trained"] == pytest.approx(0.5 / figures["steps"])


def test_a_side_that_ends_early_is_a_failure_with_its_steps(tmp_path: Path) -> None:
    child = sides.started([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(systems.RunFailed, match="ended with 3 after 0 steps"):
        loop_10m.counted(
            child, 1, loop_10m.StepLines(tmp_path / "none"), argparse.Namespace(seconds=1, steps=1, limit=60.0))


def test_half_a_line_of_a_step_waits_for_its_end(tmp_path: Path) -> None:
    lines = loop_10m.StepLines(tmp_path / "steps.jsonl")
    assert lines.look() == 0
    lines.path.write_text('{"samples": 1}\n{"samp')
    assert lines.look() == 1
    with lines.path.open("a") as file:
        file.write('les": 2}\n{"event": "other"}\n')
    assert lines.look() == 2 and [row["samples"] for row in lines.rows] == [1, 2]


def test_each_rival_has_its_bar() -> None:
    limits = {bar.what: bar.limit for bar in loop_10m.bars(["busrl", "sync-2", "batch-1", "trl"])}
    assert limits == {
        "busrl over sync-2, samples per CPU s": 1.0, "busrl over sync-2, samples per s": 1.2,
        "busrl over batch-1, samples per CPU s": 1.5, "busrl over batch-1, samples per s": 1.0,
        "busrl over trl, samples per CPU s": 2.5, "busrl over trl, samples per s": 1.0,
    }
    assert loop_10m.bars(["trl", "busrl"]) == [] and Log().judge(loop_10m.bars(["busrl", "trl"])[0])["met"] is None


@pytest.mark.slow
def test_a_short_run_measures_busrl_beside_its_own_sync_and_the_loop(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "benchmarks", "loop-10m", "--shape", "tiny", "--rounds", "1", "--seconds", "0.5",
               "--groups", "2", "--mean", "8", "--longest", "16", "--sides", "busrl", "sync-1", "loop-1", "trl",
               "--out", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "BUSRL_TRL_PYTHON": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TRL is not measured" in done.stderr and "| sync-1 |" in done.stdout
    result = json.loads(next(tmp_path.glob("loop-10m-tiny_*.json")).read_text())
    assert not result["failures"] and result["machine"]["cores"]
    assert [turn["side"] for turn in result["turns"]] == ["busrl", "sync-1", "loop-1"]
    for side in ("busrl", "sync-1", "loop-1"):
        assert result["medians"][f"{side}:samples_per_cpu_s"]["value"] > 0
        assert result["medians"][f"{side}:steps"]["value"] >= 2
    assert {"busrl:learner", "busrl:rollout/0", "busrl:scheduler"} <= set(result["turns"][0]["cpu_ms_per_sample"])
