"""A run of several models in a mount namespace of its own, in which the disk of one of them is full for a while.

    unshare -m python model_disk.py FOLDER EXAMPLES
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness import running
from model_runs import check_models, paths_of, process_of, status, step_of, three_models
from small_disk import fill, mount

STEPS, PROGRESS_S = 12, 5
NAMES = ["learner", "learner/judge", "rollout/0", "rollout/1", "rollout/2", "agent/0", "scheduler", "keeper"]


def main() -> None:
    """The learner of that model keeps its batch, nobody dies, and the others wait for it by name."""
    folder, several = map(Path, sys.argv[1:])
    run = three_models(several, folder, f"limits.progress_s={PROGRESS_S}", steps=STEPS)
    judge = paths_of(run, "judge").root
    mount(judge, "64m")
    with running(run):
        run.until("the judge learns", lambda: step_of(run, "judge") >= 3)
        filler = fill(judge)
        run.until("its training to pause", lambda: "training pauses" in run.text())
        said = next(line for line in run.text().splitlines() if "training pauses" in line)
        assert str(judge) in said, said
        run.until("the others' wait to be named", lambda: "(judge)" in status(run))
        ahead = step_of(run, "") - step_of(run, "judge")
        before = {name: run.until(name, lambda name=name: process_of(run, name)).pid for name in NAMES}
        run.let_pass(PROGRESS_S + 2.0)  # longer than limits.progress_s: waiting is no reason to be killed
        after = {name: process.pid for name in NAMES if (process := process_of(run, name))}
        assert after == before, run.tail()
        assert step_of(run, "") - step_of(run, "judge") <= ahead + 4, "the solver's learner is held back"
        filler.unlink()
        run.until("training to go on", lambda: "training continues" in run.text())
        code = run.wait()
    check_models(run, code)
    assert run.text().count("training pauses") == 1, run.text()


if __name__ == "__main__":
    main()
