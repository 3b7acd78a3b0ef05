"""Whole runs of a mixture of experts in bfloat16: routes reach the learner, through deaths, and are trained with."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import check_end
from harness import Run, running
from moe_models import moe_folder

from busrl.ledger.wal import Wal

SETTINGS = ("model.dtype=bfloat16", "generation.max_new_tokens=24", "limits.idle_groups=0", "learner.lr=1e-3",
            "reward.kind=python", "groups.size=4")
REWARD = "def score(record, completion, token_ids):\n    return float(completion.count('3') - completion.count('4'))\n"


def run_of(folder: Path, *settings: str, steps: int = 4) -> Run:
    (folder / "reward.py").write_text(REWARD)
    model = moe_folder(folder / "model", dtype="bfloat16")
    return Run(folder / "run", f"model.path={model}", f"reward.function={folder / 'reward.py'}:score", *SETTINGS,
               *settings, steps=steps)


@pytest.mark.long
def test_a_run_replays_what_its_engine_chose_and_says_where_they_differ(tmp_path: Path) -> None:
    run = run_of(tmp_path, "learner.routes_compare_every=1")
    with running(run):
        code = run.wait()
    check_end(run, code)
    rows = run.metrics()
    assert all(0 < row["routes"]["rows"] <= 1 and row["routes"]["own_tokens"] == 0 for row in rows)
    first = rows[0]["routes"]
    assert first["changed"] < 0.3
    assert first["mismatch"] == pytest.approx(rows[0]["mismatch"]) and first["mismatch"] != first["mismatch_own"] > 0
    for record in Wal(run.paths.wal).records():
        for sample in record.samples:
            routes, prompt = sample.route_arrays()
            assert routes is not None and len(routes) == sample.tokens
            assert prompt is not None and len(prompt) == len(sample.prompt_array()) - 1


@pytest.mark.long
@pytest.mark.parametrize("settings", [("learner.routes=own",), ("model.dtype=float32",)])
def test_a_run_without_routes_has_no_trace_of_them(tmp_path: Path, settings: tuple[str, ...]) -> None:
    run = run_of(tmp_path, *settings, steps=2)
    with running(run):
        code = run.wait()
    check_end(run, code)
    assert not any("routes" in row for row in run.metrics())


@pytest.mark.long
@pytest.mark.parametrize("log", ["on", "off"])
def test_a_step_that_is_trained_again_takes_its_logged_routes(tmp_path: Path, log: str) -> None:
    run = run_of(tmp_path, "learner.checkpoint_every=100", f"learner.log_routes={log}", steps=5)
    with running(run):
        run.until_step(2)
        run.kill("learner")
        code = run.wait()
    check_end(run, code, accidents=1)
    again = [row for row in run.metrics() if row.get("replayed")]
    own = {row["routes"]["own_tokens"] > 0 for row in again if "routes" in row}
    assert own <= {log == "off"}
