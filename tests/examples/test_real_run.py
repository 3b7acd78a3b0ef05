"""examples/real-run: Qwen's own token ids, questions kept apart, curves; a small run, killed and resumed on its way."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "examples" / "real-run"
# Not imported where tests are only collected: they take seconds.
lacking = [name for name in ("reasoning_gym", "dashscope") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif("reasoning_gym" in lacking, reason="pip install reasoning-gym")
vocabulary = pytest.mark.skipif("dashscope" in lacking, reason="pip install --no-deps dashscope")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """make_model.py, which imports task.py beside it."""
    monkeypatch.syspath_prepend(str(OWN))
    for name in ("task", "make_model", "curves"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("make_model")


@vocabulary
def test_the_tokenizer_gives_the_ids_of_qwen_2(module: ModuleType) -> None:
    tokenizer = module.make_tokenizer()
    assert len(tokenizer) == 151_646
    assert tokenizer("Hello, world!")["input_ids"] == [9707, 11, 1879, 0]
    assert tokenizer("2024")["input_ids"] == [17, 15, 17, 19]  # digit by digit
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_dict=False
    )
    assert turn == [151644, 872, 198, 9707, 151645, 198, 151644, 77091, 198]


def test_no_warm_up_or_run_question_comes_from_the_held_out_set(module: ModuleType) -> None:
    for kind in module.KINDS:
        held = {row["prompt"] for row in module.questions(kind, 50, 2, held=True)}
        seen = module.questions(kind, 500, 1, held=False)
        assert len(held) == 50 and not held & {row["prompt"] for row in seen}
        from task import trained  # type: ignore[import-not-found]

        assert all(map(trained, seen)) and not any(trained({"prompt": one}) for one in held)


def test_a_curve_is_drawn_from_the_files_of_a_run(module: ModuleType, tmp_path: Path) -> None:
    import curves  # type: ignore[import-not-found]

    steps = [{"step": at, "entropy": 1 / at, "reward_parts": {"right": at / 10, "form": 1.0}} for at in range(1, 10)]
    again = {"step": 9, "entropy": 0.1, "reward_parts": {"right": 0.5, "form": 1.0}}  # trained again after a death
    rounds = [{"round": at, "set": "short", "val/pass@1": share} for at, share in ((0, 0.25), (9, 0.75))]
    write = {"metrics": [{"kind": "other"}, *steps, again], "validation": rounds}
    for name, rows in write.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert curves.of_steps(tmp_path, "reward_parts/right")[-1] == (9, pytest.approx((0.5 + 0.6 + 0.7 + 0.8 + 0.5) / 5))
    assert list(curves.table([tmp_path]))[-1].endswith("| short | 0.250 | 0.750 (step 9) | +0.500 |")
    assert curves.svg([tmp_path]).count("<polyline") == 4


@vocabulary
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_demo_is_killed_twice_resumes_and_loses_nothing(tmp_path: Path) -> None:
    shutil.copytree(OWN, tmp_path / "demo", ignore=shutil.ignore_patterns("made", ".made.making", "__pycache__"))
    settings = ["run.max_steps=15", "groups.size=4", "learner.trigger.n_min=4", "validation.samples=8"]
    command = [sys.executable, "run.py", "--run-dir", "run", "--warm-up", "steps=120", "check=60", "batch=32"]
    for one in settings:
        command += ["--set", one]
    done = subprocess.run(command, cwd=tmp_path / "demo", capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "SIGKILL of rollout/0" in done.stdout and "SIGKILL of launch" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "demo/run/validation.jsonl").read_text().splitlines()]
    assert {(row["round"], row["set"]) for row in rows} == {(at, name) for at in (0, 15) for name in ("short", "long")}
    assert (tmp_path / "demo/run/curves.svg").read_text().startswith("<svg")
    assert "0 lost, 0 trained twice" in done.stdout
