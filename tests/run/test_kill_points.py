"""SIGKILL exactly between two stores: the points where half of something is done, in real runs.

A point is named with a count, and the process dies when it passes it for that time. It is started again and dies there
again, as long as so much work is left. Several processes have a point each in one run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, running

STEPS = 16
# A step of 8 whole groups of 8 ends 64 slots: the first slot after the log's record of step 8 is number 449.
FIRST_OF_A_STEP, MIDDLE_OF_A_STEP = 449, 480
LATER = 700


def with_points(tmp_path: Path, learner: str, rollout: str) -> Path:
    """The quickstart's topology with a kill point in two of its processes."""
    text = (ROOT / "configs" / "quickstart.toml").read_text()
    for role, point in (("learner", learner), ("rollout", rollout)):
        text += f'\n[[process]]\nrole = "{role}"\nenv = {{ BUSRL_CRASH_POINT = "{point}" }}\n'
    path = tmp_path / "points.toml"
    path.write_text(text)
    return path


def survive(tmp_path: Path, learner: str, rollout: str, scheduler: str) -> None:
    # Of the processes that see launch's environment only the scheduler dispatches that often.
    run = Run(
        tmp_path / "run", steps=STEPS, config=with_points(tmp_path, learner, rollout),
        env={"BUSRL_CRASH_POINT": scheduler},
    )
    with running(run):
        code = run.wait()
    check_end(run, code)
    assert all(run.restarts(name) > 0 for name in ("learner", "rollout/0", "scheduler")), run.summary()["processes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learner", "rollout", "scheduler"),
    [
        (f"finish.fate:{FIRST_OF_A_STEP}", f"commit.before:{LATER}", f"dispatch.uid:{LATER}"),
    ],
)
def test_a_run_survives_deaths_at(
    learner: str, rollout: str, scheduler: str, tmp_path: Path, quickstart: None
) -> None:
    survive(tmp_path, learner, rollout, scheduler)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learner", "rollout", "scheduler"),
    [
        (f"finish.free:{MIDDLE_OF_A_STEP}", f"commit.after:{LATER}", f"dispatch.fate:{LATER}"),
        (f"finish.free:{FIRST_OF_A_STEP}", f"put.copied:{5 * LATER}", f"dispatch.claimed:{LATER}"),
        (f"finish.fate:{MIDDLE_OF_A_STEP}", f"put.stored:{5 * LATER}", f"dispatch.reserved:{LATER}"),
        (f"claim.cas:{MIDDLE_OF_A_STEP}", f"take.claimed:{LATER}", f"dispatch.written:{LATER}"),
        (f"claim.cas:{FIRST_OF_A_STEP}", f"commit.after:{LATER}", f"dispatch.queued:{LATER}"),
    ],
)
def test_a_run_survives_the_rarer_deaths_at(
    learner: str, rollout: str, scheduler: str, tmp_path: Path, quickstart: None
) -> None:
    survive(tmp_path, learner, rollout, scheduler)
