"""The rules about children, without any child: pauses, giving up, silence, and fairness of the supervisor's clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.launcher.supervisor import (
    LONGEST_PAUSE_S,
    SERVED_S,
    Child,
    Ending,
    Exit,
    Phase,
    Shutdown,
    stage_of,
)
from busrl.system.clocks import FairClock
from busrl.topology.schema import Limits


@dataclass
class Entry:
    """What counts of an entry of the process table."""

    progress: int
    activity: str = ""
    deadline_s: float = 0.0
    samples: int = 0


PATIENCE = Limits(ready_s=60.0, progress_s=30.0, restart_attempts=5, crash_attempts=0)


def started(name: str = "rollout/0", ready: bool = False) -> Child:
    child = Child(name, PATIENCE)
    child.started(4711, 100.0)
    if ready:
        assert child.became_ready()
        child.looked(Entry(1), 0.2)
    return child


def silent(child: Child, sight, seconds: float):
    """Look every fifth of a second while nothing changes; the kill, if one was asked for."""
    for _ in range(round(seconds / 0.2)):
        kill = child.looked(sight, 0.2)
        if kill:
            return kill
    return ""


def test_a_new_child_is_due_at_once_and_only_once():
    child = Child("bus", PATIENCE)
    assert child.is_due(0.0)
    child.started(1, 0.0)
    assert not child.is_due(1e9) and child.alive


def test_a_death_after_ready_restarts_at_once_and_never_gives_up():
    child = started()
    for life in range(1, 50):
        child.became_ready()
        death = child.ended(Exit(-9), 100.0)
        assert not death.gives_up and child.is_due(100.0) and child.restarts == life
        child.started(4711, 100.0)


def test_a_hopeless_child_is_given_up_at_once_unless_it_is_stopping():
    child = started()
    death = child.ended(Exit(2), 100.0, hopeless=True)
    assert death.gives_up and "to start it again would change nothing" in death.text and child.phase is Phase.GONE
    stopping = started(ready=True)
    stopping.stop()
    assert not stopping.ended(Exit(2), 100.0, hopeless=True).gives_up


def test_a_child_remembers_that_it_was_ready_in_an_earlier_life():
    child = started()
    assert not child.was_ready
    child.became_ready()
    child.ended(Exit(-9), 100.0)
    child.started(4711, 100.0)
    assert child.was_ready


def test_pauses_grow_up_to_a_limit_and_the_last_attempt_gives_up():
    child, pauses = Child("rollout/0", Limits(ready_s=60.0, progress_s=30.0, restart_attempts=10, crash_attempts=0)), []
    for _ in range(9):
        child.started(1, 0.0)
        assert not child.ended(Exit(1), 0.0).gives_up
        pauses.append(child.due)
    assert pauses == sorted(pauses) and pauses[0] == 0.25 and pauses[-1] == LONGEST_PAUSE_S
    child.started(1, 0.0)
    death = child.ended(Exit(1), 0.0)
    assert death.gives_up and "10 times in a row" in death.text and child.phase is Phase.GONE


def test_becoming_ready_forgives_earlier_deaths():
    child = Child("rollout/0", Limits(ready_s=60.0, progress_s=30.0, restart_attempts=2, crash_attempts=0))
    for _ in range(20):
        child.started(1, 0.0)
        assert not child.ended(Exit(1), 0.0).gives_up
        child.started(1, 0.0)
        child.became_ready()
        child.ended(Exit(1), 0.0)


def test_silence_beyond_the_limit_kills_naming_child_and_state_and_time():
    child = started(ready=True)
    assert not silent(child, Entry(1), 29.8)
    kill = silent(child, Entry(1), 1.0)
    assert "rollout/0 (pid 4711), state ready: no progress for 30.2 s (limit 30 s" in kill
    assert not silent(child, Entry(1), 100.0)  # asked for once
    assert "killed for no progress" in child.ended(Exit(-9), 140.0).text


@pytest.mark.parametrize("moved", [Entry(2), Entry(1, activity="saving")])
def test_any_change_of_counter_or_activity_restarts_the_silence_clock(moved):
    child = started(ready=True)
    assert not silent(child, Entry(1), 29.0)
    assert not child.looked(moved, 0.2)
    assert not silent(child, moved, 29.0)


def test_a_declared_activity_has_its_own_limit_longer_or_shorter():
    long, short = Entry(1, "compiling", 600.0), Entry(1, "asking", 2.0)
    child = started(ready=True)
    assert not silent(child, long, 599.0)
    kill = silent(child, long, 3.0)
    assert "doing 'compiling'" in kill
    assert silent(started(ready=True), short, 3.0)


def test_a_ready_child_without_a_ring_mapping_is_never_killed_for_silence():
    child = started()
    child.became_ready()
    assert not silent(child, None, 10_000.0)


def test_a_child_that_never_becomes_ready_is_killed_despite_a_moving_counter():
    child = started()
    kills = [child.looked(Entry(count), 0.2) for count in range(310)]
    kill = next(kill for kill in kills if kill)
    assert "state starting: not ready for 60." in kill


def test_a_start_that_declares_a_longer_activity_is_waited_for():
    child = started()
    assert not silent(child, Entry(0, "downloading", 900.0), 899.0)


def test_declared_long_work_at_the_start_is_awaited_while_it_progresses():
    child = started()
    kills = [child.looked(Entry(count // 500, "recover", 120.0), 0.2) for count in range(9000)]  # 100 s each
    assert not any(kills)
    kill = silent(child, Entry(18, "recover", 120.0), 130.0)
    assert "doing 'recover'" in kill


def held(child: Child, how: str, sight, seconds: float, passed: float = 0.2):
    """Look while something holds it; what was said, and the kill."""
    said = []
    for _ in range(round(seconds / 0.2)):
        said += filter(None, [child.held(how, passed)])
        if kill := child.looked(sight, passed):
            return said, kill
    return said, ""


@pytest.mark.parametrize("activity, deadline_s", [("micro", 600.0), ("waits for the learner", 1e9), ("", 0.0)])
def test_a_held_child_is_named_once_and_killed_whatever_it_declared(activity, deadline_s):
    child = started("rank/1", ready=True)
    sight = Entry(1, activity, deadline_s)
    said, kill = held(child, "stopped (SIGSTOP)", sight, PATIENCE.progress_s / 2)
    (line,) = said
    assert "rank/1 (pid 4711) is stopped (SIGSTOP)" in line and "10 s" in line
    assert "stopped (SIGSTOP) for 10.2 s (limit 10 s" in kill


def test_a_child_that_is_held_while_it_starts_is_killed_too():
    said, kill = held(started(), "in a frozen group", None, 15.0)
    assert len(said) == 1 and "in a frozen group for" in kill


def test_a_child_held_now_and_then_but_progressing_is_not_killed():
    child = started(ready=True)
    for progress in range(500):  # as under strace
        assert not child.held("held by a debugger", 0.2) and not child.looked(Entry(progress), 0.2)
    assert held(child, "stopped", Entry(499), 5.0) and not held(child, "", Entry(499), 20.0)[1]


def test_while_the_run_is_paused_a_held_child_is_let_be():
    assert held(started(ready=True), "stopped", Entry(1), 100.0, passed=0.0) == ([], "")


def test_a_child_that_computes_while_it_starts_is_not_stalled():
    child = started()
    kills = [child.looked(None, 0.2, cpu_s=0.005 * look) for look in range(1500)]  # 2.5 % of a core for 300 s
    assert not any(kills)
    assert "not ready after 300.2 s of work (limit 300 s)" in child.looked(None, 0.2, cpu_s=8.0)


def test_a_child_that_hangs_after_processor_use_is_killed_for_the_hang():
    child = started()
    for look in range(500):
        assert not child.looked(None, 0.2, cpu_s=0.1 * look)
    kill = next(filter(None, (child.looked(None, 0.2, cpu_s=50.0) for _ in range(400))))
    assert "not ready for 60." in kill


def test_a_child_that_only_polls_while_it_starts_is_stalled():
    child = started()
    assert any(child.looked(None, 0.2, cpu_s=0.0004 * look) for look in range(350))  # 0.2 % of a core, 70 s


def test_a_stopped_child_is_neither_killed_for_silence_nor_started_again():
    child = started(ready=True)
    child.stop()
    assert not silent(child, Entry(1), 1000.0)
    child.ended(Exit(0), 200.0)
    assert child.phase is Phase.GONE and not child.is_due(1e9)
    waiting = Child("reward/0", PATIENCE)
    waiting.stop()
    assert waiting.phase is Phase.GONE


@given(st.lists(st.floats(0.0, 1e5), max_size=50))
def test_a_late_supervisor_counts_at_most_two_ticks_for_a_look(steps):
    clock, now = FairClock(0.2, 0.0), 0.0
    for step in steps:
        now += step
        assert 0.0 <= clock.passed(now) <= min(step + 1e-6, 0.4)


def test_a_supervisor_that_slept_kills_nobody_for_that_time():
    child, clock = started(ready=True), FairClock(0.2, 0.0)
    assert not child.looked(Entry(1), clock.passed(3600.0))
    assert not child.looked(Entry(1), clock.passed(3600.2))


@given(st.lists(st.sampled_from(["bus", "keeper", "scheduler", "learner", "validator", "rollout/0", "reward/0", "x"])))
def test_an_orderly_stop_asks_everybody_once_and_stages_never_go_back(names):
    alive, shutdown, order = set(names), Shutdown(stop_s=10.0), []
    for now in range(100):
        for action in shutdown.step(sorted(alive), float(now)):
            assert not action.overdue
            order.append(action.name)
        alive.difference_update(order)
    assert sorted(order) == sorted(set(names))
    places = [stage_of(name) for name in order]
    assert places == sorted(places)


def test_a_process_that_stays_is_killed_once_after_its_stage_patience():
    shutdown = Shutdown(stop_s=10.0)
    assert shutdown.step(["rollout/0", "bus"], 0.0) == [Ending("rollout/0")]
    assert shutdown.step(["rollout/0", "bus"], 10.0) == []
    (force,) = shutdown.step(["rollout/0", "bus"], 10.5)
    assert "rollout/0 did not end within 10.5 s" in force.overdue
    assert shutdown.step(["rollout/0", "bus"], 11.0) == []
    assert shutdown.step(["bus"], 12.0) == [Ending("bus")]
    assert shutdown.step(["bus"], 21.0) == []  # its own patience begins with its own stage


ENDING = Limits(ready_s=60.0, progress_s=30.0, restart_attempts=5, crash_attempts=8)


def test_deaths_after_ready_without_work_end_the_run_after_growing_pauses():
    child, now, pauses = Child("rollout/0", ENDING), 0.0, []
    for _ in range(8):
        child.started(4711, now)
        child.became_ready()
        child.looked(Entry(7), 0.2)
        death = child.ended(Exit(-9), now)
        pauses.append(child.due - now)
        now = child.due
    assert pauses[:7] == [0, 0, 0, 0, 0, 0.25, 0.5]
    assert death.gives_up and "it died 8 times in a row and did none of its work in between" in death.text


@pytest.mark.parametrize("works", [True, False], ids=["it finished a sample itself", "the run got on"])
def test_a_child_that_works_between_its_deaths_restarts_at_once_forever(works):
    child = Child("rollout/0", ENDING)
    for life in range(100):
        child.started(4711, 0.0)
        child.became_ready()
        child.looked(Entry(7, samples=int(works)), 0.2)
        assert not child.ended(Exit(1), 0.0, did=0 if works else life // 5).gives_up
        assert child.is_due(0.0)


@pytest.mark.parametrize("served", [True, False])
def test_a_child_whose_work_is_presence_has_worked_after_a_while(served: bool):
    """The keeper looks and the bus passes on whether or not anybody needs it."""
    child, lives = Child("keeper", ENDING), 0
    while child.phase is not Phase.GONE and lives < 100:
        child.started(4711, 0.0)
        child.looked(None, 10.0)  # to start takes its time, and is no work
        child.became_ready()
        for look in range(20):
            child.looked(Entry(look), (SERVED_S + 0.1 if served else SERVED_S / 2) / 20)
        child.ended(Exit(1), 0.0, did=None)
        lives += 1
    assert lives == (100 if served else 8)


def test_kills_from_outside_before_ready_weigh_less_than_ends_of_its_own():
    child, deaths = Child("rollout/0", ENDING), 0
    while child.phase is not Phase.GONE:
        child.started(4711, 0.0)
        death = child.ended(Exit(-9), 0.0)
        deaths += 1
    assert deaths == 15 and "5 times in a row before it was ready" in death.text and "dmesg" in death.text


def test_a_kill_by_launch_itself_counts_as_an_end_of_its_own():
    child = Child("rollout/0", ENDING)
    for _ in range(5):
        child.started(4711, 0.0)
        assert child.looked(None, 61.0)
        death = child.ended(Exit(-9), 0.0)
    assert death.gives_up


def test_lack_of_space_never_counts_and_is_told_once_until_ready() -> None:
    child = Child("rollout/0", Limits(ready_s=60, progress_s=60, restart_attempts=2, crash_attempts=0))
    child.started(1, 0.0)
    assert child.became_ready()
    for turn in range(5):
        text = child.no_space(Exit(4), 10.0 * turn)
        assert ("without space" in text) == (turn == 0)
        assert child.phase is Phase.BACKOFF and not child.is_due(10.0 * turn + 1) and child.is_due(10.0 * turn + 2)
        child.started(2 + turn, 10.0 * turn + 2)
    assert child.became_ready() and child.early_deaths == 0
    assert child.no_space(Exit(4), 99.0)


def test_a_rank_ended_with_another_restarts_at_once_and_uncounted():
    child = Child("learner", Limits(ready_s=60.0, restart_attempts=1, crash_attempts=1))
    for life in range(3):
        child.started(10 + life, 100.0)
        if life:
            assert child.became_ready()
        assert not child.went_along
        child.goes_with("rank/1")
        assert child.went_along and child.condemned
        death = child.ended(Exit(-9), 101.0)
        assert not death.gives_up and "was ended with rank/1" in death.text
        assert child.is_due(101.0) and child.restarts == life + 1
