"""A reward that everybody waits for says so: what a call takes, what a step takes, how many serve, what to do."""

from __future__ import annotations

from busrl.roles.reward import WINDOW_S, RewardLoad


def made(workers: int = 1, processes: int = 1) -> RewardLoad:
    return RewardLoad(workers, processes, step_samples=256, now=0.0)


def test_a_busy_reward_with_waiting_samples_shows_a_steps_cost() -> None:
    load = made()
    assert load.seen(WINDOW_S) == int(WINDOW_S * 1e9) and load.due(WINDOW_S)
    told = load.slow(judged=20, waiting=200, now=WINDOW_S)
    assert "a call takes 0.5 s, a step's 256 samples 128 s, and 200 wait" in told
    assert "one worker serves all: raise reward.workers (1)" in told and len(told) < 180, "a console shows all of it"
    assert not load.due(WINDOW_S * 2.9), "the same is said less and less often"


def test_several_workers_of_several_processes_share_a_step() -> None:
    load = made(workers=4, processes=2)
    load.seen(WINDOW_S)
    told = load.slow(judged=80, waiting=200, now=WINDOW_S)
    assert "a call takes 0.5 s" in told and "256 samples 16 s" in told and "8 workers serve all" in told


def test_a_reward_with_time_left_or_without_waiters_shows_nothing() -> None:
    for busy, waiting in ((WINDOW_S / 2, 200), (WINDOW_S, 2)):
        load = made()
        load.seen(busy)
        assert load.slow(judged=20, waiting=waiting, now=WINDOW_S) == ""
        assert load.due(2 * WINDOW_S)


def test_a_call_without_end_names_whom_it_holds_up_and_how_long() -> None:
    load = made()
    load.seen(WINDOW_S)
    assert "no answer for 10 s, 9 samples wait; one worker serves all" in load.slow(0, 9, WINDOW_S)
    assert "blocks its worker for so long: one worker serves all" in load.hung() and "lower the limit" in load.hung()
