"""Models that wait for each other in real runs: a learner that is slow, and a seat that few episodes use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import Run, read_lines, running
from model_runs import check_models, paths_of, status, step_of, three_models

from busrl.ring import Fates
from busrl.states import Fate
from busrl.topology.recorded import recorded

SIZE, STEPS = 4, 8
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SLOW = """import os
import time

def loss(inputs, settings):
    if "BUSRL_RUN_DIR" in os.environ:  # check makes a step with it too
        time.sleep(1.0)  # a step takes a tenth of that
    return -inputs.advantages * inputs.trainer_logprobs
"""
ASKED = '''import random

async def episode(task, llm):
    """A sum, of which the judge hears in a share of the episodes."""
    answer = await llm["solver"].complete(task["prompt"], max_tokens=1)
    worth = {{"solver": float(answer.text == task["answer"])}}
    if random.Random(llm.uid).random() < {share}:
        verdict = await llm["judge"].complete(f"{{task['prompt']}}{{answer.text}}=", max_tokens=1)
        worth["judge"] = float(verdict.text == "|") - worth["solver"]
    return worth
'''


def oldest(run: Run, tag: str) -> int:
    """The greatest age of a group that the model trained."""
    return max(row["age_max"] for row in read_lines(paths_of(run, tag).metrics) if "kind" not in row)


def bound(run: Run, tag: str) -> int:
    return recorded(paths_of(run, tag).topology).derived.limits.max_staleness or 0


def test_a_learner_ten_times_as_slow_holds_the_others_back_by_name(tmp_path: Path, several: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = three_models(several, tmp_path, f"model.judge.learner.loss={tmp_path}/slow.py:loss", steps=STEPS)
    with running(run):
        run.until("the wait is named", lambda: "in_flight (judge)" in status(run))
        ahead = step_of(run, "") - step_of(run, "judge")
        code = run.wait()
    check_models(run, code)
    for tag in ("", "judge"):
        assert oldest(run, tag) <= bound(run, tag), tag
    assert ahead <= 2 * bound(run, "judge") + 2, "no more is opened than the slow one has room for"


def judged(run: Run) -> np.ndarray:
    """The fates of the judge's samples of first tries, as [group, member]; of groups in which all have ended."""
    codes = np.array(Fates(str(paths_of(run, "judge").fates), read_only=True).view())
    codes = codes[: len(codes) // (2 * SIZE) * 2 * SIZE].reshape(-1, 2 * SIZE)[:, :SIZE]
    return codes[~np.isin(codes, [Fate.NONE, Fate.DISPATCHED, Fate.ENDED]).any(1)]


@pytest.mark.parametrize("unused", [0.5, pytest.param(0.1, marks=pytest.mark.slow),
                                    pytest.param(0.95, marks=pytest.mark.slow)])
def test_episodes_without_a_seat_cost_its_model_no_other_group(
    tmp_path: Path, several: Path, unused: float
) -> None:
    rare = ("model.judge.learner.trigger.n_min=1", "model.judge.max_steps=3") if unused > 0.9 else ()
    run = three_models(several, tmp_path, 'learner.advantage="reward"', *rare, steps=STEPS)
    (tmp_path / "rounds.py").write_text(ASKED.format(share=round(1 - unused, 3)))
    with running(run):
        code = run.wait()
    check_models(run, code, *([""] if rare else ["", "judge"]))
    assert run.summary()["models"]["judge"]["steps"] == (3 if rare else STEPS)
    groups = judged(run)
    used = (groups != Fate.UNUSED).sum(1)
    assert abs((groups == Fate.UNUSED).mean() - unused) < 0.15, "as the episodes chose"
    trained, alone = (groups == Fate.TRAINED).sum(1), (groups == Fate.INCOMPLETE).sum(1)
    assert (trained[used > 1] == used[used > 1]).all(), "two are compared, however few of the group they are"
    assert (alone[used == 1] == 1).all() and not trained[used < 2].any()
    for tag in ("", "judge"):
        assert oldest(run, tag) <= bound(run, tag), tag
