"""examples/experts: its model has the shape that its head says, and its topology trains such a folder."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from busrl.ledger.trained import step_lines
from busrl.preflight.load import load
from busrl.quickstart import maker, task

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "examples" / "experts"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What make_experts.py writes, without its warm-up."""
    monkeypatch.syspath_prepend(str(OWN))
    model, recipe = importlib.import_module("make_experts").make_model(0), task.Recipe()
    maker.save(tmp_path / "model", recipe, maker.new_tokenizer(recipe), model)
    rows = [json.dumps({"prompt": f"{n}=", "answer": f"{n}"}) for n in range(100, 164)]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def settings(made: Path) -> list[str]:
    return [f"model.path={made / 'model'}", f"data.train={made / 'train.jsonl'}",
            f"validation.data={made / 'validation.jsonl'}", "process.rollout.engine=torch"]


def test_the_example_carries_routes_of_six_bytes_for_each_token(made: Path) -> None:
    routing = load(OWN / "experts.toml", settings(made)).derived.routing
    assert routing is not None and routing.bytes_per_token == 6 and routing.experts == 8


@pytest.mark.long
def test_the_example_trains_with_the_routes_of_its_engine(made: Path) -> None:
    command = [sys.executable, "-m", "busrl.cli", "launch", str(OWN / "experts.toml"), "--run-dir", str(made / "run")]
    more = ["run.max_steps=2", "learner.trigger.n_min=2", "validation.samples=4", "limits.idle_groups=0",
            "generation.max_new_tokens=12", "reward.kind=python", "reward.extract=",
            f"reward.function={made / 'reward.py'}:score"]
    (made / "reward.py").write_text("def score(record, completion, token_ids):\n    return len(set(completion))\n")
    for setting in (*settings(made), *more):
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["routes"]["own_tokens"] == 0 for row in step_lines(made / "run" / "metrics.jsonl"))
