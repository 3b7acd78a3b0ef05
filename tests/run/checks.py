"""What has to be true of a run that was disturbed."""

from __future__ import annotations

from harness import Run, read_lines

MOST_TOKENS = 1.2  # of an undisturbed run: what a kill costs is what was being generated, no more


def check_end(run: Run, code: int, accidents: int = 0) -> None:
    """The goal was reached with every step, nothing is lost or doubled, and nothing is left behind; no accident, or at
    most so many of the test's own."""
    assert code == 0, run.tail()
    report = run.audit()
    assert report.counts.lost == 0 and report.counts.trained_twice == 0 and not report.errors, report
    assert sum(report.accidents.values()) <= accidents, report
    assert run.summary()["steps"] == run.steps
    steps = [line["step"] for line in read_lines(run.paths.train_log)]
    assert sorted(set(steps)) == list(range(1, run.steps + 1)), steps
    assert run.leftovers() == []


def check_tokens(run: Run, undisturbed: int) -> None:
    """The counter is in the ring and moves before the tokens are drawn, so those of killed workers are in it."""
    generated = run.summary()["generated_tokens"]
    assert 0 < generated <= MOST_TOKENS * undisturbed, f"{generated} tokens, {undisturbed} without a fault"
