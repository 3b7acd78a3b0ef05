"""The chain of waits: it ends at a root, names nobody twice, is the same for the same picture, and finds each root."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from busrl.ring import State
from busrl.status.reader import Calls, calls_by_uid, held_slots
from busrl.status.state import Facts, Held, ProcessRecord, RingRecord, RunState, StepRecord
from busrl.status.waits import Link, StallAlarm, chain, limit_s, sentence_of

NAMES = (
    "learner", "scheduler", "rollout/0", "rollout/1", "reward/0", "agent/0", "validator", "keeper", "relay", "rank/1",
    "far",
)
ACTIVITIES = (
    "", "step", "publish", "held by validation", "new weights", "first weights", "waits for its ranks",
    "waiting for disk space", "waits for pid 9", "in the function", "in part style", "waits: weights",
    *(f"waits: {reason}{group}" for group in ("", ", group 7") for reason in (
        "admission", "groups", "window", "round", "staleness", "slots", "in_flight", "ahead", "arrivals",
        "in_flight (judge)", "starting (judge)")),
)
FACTS = Facts(n_min=4, transport="shm", reward_function="my.py:score", agent_function="play.py:go", stall_steps=10.0,
              stall_s=120.0)


def process(name: str, activity: str = "", **more: Any) -> ProcessRecord:
    role = "host" if name == "far" else name.partition("/")[0]
    fields = {"role": role, "pid": 77, "state": "ready", "progress_age_s": 0.1, "remote": name == "far"}
    return ProcessRecord(name, activity=activity, **{**fields, **more})


def picture(*processes: ProcessRecord, slots: tuple[Held, ...] = (), **more: Any) -> RunState:
    """A run with these processes; of the usual ones those that are not given are there and have nothing to say."""
    given_ = {record.name: record for record in processes}
    usual = [given_.pop(name, process(name)) for name in ("learner", "scheduler", "rollout/0", "reward/0")]
    occupancy = {"free": more.pop("free", 8)}
    words = more.pop("words", {})
    run = RunState(facts=FACTS, restarts=dict.fromkeys([*(record.name for record in usual), *given_], 0), **more)
    entries = tuple(record for record in (*usual, *given_.values()) if record.state != "gone")
    run.look(RingRecord(16, occupancy, words, 0, 0, 4, 1, entries, held=slots), 0.0)
    return run


def found(run: RunState) -> tuple[list[str], str]:
    """Who stands in the chain, and its root."""
    links = chain(run, 0.0)
    return [link.process for link in links], links[-1].waits_for if links else ""


processes = st.builds(
    process, st.sampled_from(NAMES), st.sampled_from(ACTIVITIES), state=st.sampled_from(["ready", "starting", "dead"]),
    progress_age_s=st.sampled_from([0.0, 7.0, 90.0]), stopped=st.booleans(), version=st.integers(0, 2),
    deadline_s=st.sampled_from([0.0, 60.0, 1e9]),
)
slots = st.builds(
    Held, state=st.sampled_from([state.name.lower() for state in State]),
    owner=st.sampled_from([*NAMES, "", "process 5"]),
    slots=st.integers(1, 9), oldest_s=st.floats(0, 100), validates=st.booleans(), draw=st.sampled_from([-1, 7]),
    call=st.sampled_from(["", "queued", "rollout/0", "rollout/1", "rollout/9"]),
)
runs = st.builds(
    lambda entries, where, names, words: _run({entry.name: entry for entry in entries}, where, names, words),
    st.lists(processes, max_size=8), st.lists(slots, max_size=8), st.sets(st.sampled_from(NAMES)),
    st.fixed_dictionaries({"generation_pause": st.sampled_from([0, 0, 1, 2]), "unpublished_groups": st.integers(0, 1)}),
)


def _run(entries: dict[str, ProcessRecord], where: list[Held], names: set[str], words: dict[str, int]) -> RunState:
    run = RunState(facts=FACTS, restarts=dict.fromkeys(names, 0), launched=True)
    run.look(RingRecord(16, {"free": 1}, words, 0, 0, 3, 1, tuple(entries.values()), held=tuple(where)), 0.0)
    return run


def test_a_scheduler_held_back_by_another_model_names_its_learner() -> None:
    held = process("scheduler", "waits: in_flight (judge), group 7")
    waiting = process("learner", "waits: admission")
    assert found(picture(waiting, held)) == (["learner", "scheduler"], "the learner of judge")
    judge = process("learner/judge", "step")
    assert found(picture(waiting, held, judge))[0] == ["learner", "scheduler", "learner/judge"]
    assert chain(picture(waiting, held), 0.0)[1].because == (
        "opens no group: as many are in flight as may be (of judge)")


def test_a_stopped_engine_of_another_model_is_the_root_of_its_calls() -> None:
    calls = Held("generating", "agent/0", 8, 12.0, draw=7, call="queued judge")
    run = picture(WAITING, process("agent/0"), slots=(calls,))
    assert run.ring is not None
    engines = process("learner/judge"), process("rollout/1", stopped=True, progress_age_s=9.0)
    run.look(replace(run.ring, beside={"judge": engines}), 0.0)
    links = chain(run, 0.0)
    assert found(run) == (["learner", "agent/0", "rollout/1"], "kill -CONT 77")
    assert "calls wait for an engine of judge" in links[1].because


def test_the_chain_goes_through_a_learner_that_several_models_share() -> None:
    held = process("scheduler", "waits: in_flight (judge)")
    of_judge = process("learner", "waits: groups"), process("rollout/0", stopped=True)  # their parts for the judge
    run = picture(process("learner", "waits: admission"), held)
    assert run.ring is not None
    run.look(replace(run.ring, beside={"judge": of_judge}), 0.0)
    assert found(run) == (["learner", "scheduler"], "the learner of judge"), "it is in the chain already"
    third = picture(process("learner", "waits: admission"), process("scheduler", "waits: in_flight (third)"))
    apart = (process("learner/judge", "step"),)  # it is the judge's, and trains the third too
    third.look(replace(run.ring, processes=third.ring.processes, beside={"judge": apart, "third": apart}), 0.0)
    assert found(third)[0] == ["learner", "scheduler", "learner/judge"]


def test_a_call_of_another_model_waits_for_the_engine_that_they_share() -> None:
    calls = Held("generating", "agent/0", 8, 12.0, draw=7, call="queued judge")
    stopped = process("rollout/0", stopped=True, progress_age_s=9.0)
    run = picture(WAITING, process("agent/0"), stopped, slots=(calls,))
    assert run.ring is not None
    run.look(replace(run.ring, beside={"judge": (stopped,)}), 0.0)
    assert found(run) == (["learner", "agent/0", "rollout/0"], "kill -CONT 77")


@given(runs)
def test_a_chain_ends_at_a_root_and_names_no_process_twice(run: RunState) -> None:
    links = chain(run, 0.0)
    names = [link.process for link in links]
    assert len(set(names)) == len(names)
    assert [link.waits_for for link in links[:-1]] == names[1:]
    known = {process.name for process in run.ring.processes} | run.restarts.keys()  # type: ignore[union-attr]
    for link in links:
        assert link.waits_for and link.because and math.isfinite(link.since_s) and link.since_s >= 0
    assert not links or links[-1].waits_for not in known, "the root is no process that could be asked in turn"
    there = {row.name for row in run.rows(0.0) if row.state != "dead"} | run.restarts.keys()
    assert bool(links) == bool({"learner", "relay"} & there or run.ring.words["generation_pause"] == 2)  # type: ignore[union-attr]


@given(runs)
def test_the_same_picture_gives_the_same_chain_in_any_listing_order(run: RunState) -> None:
    ring = run.ring
    assert ring is not None
    other = RunState(facts=FACTS, restarts=dict(reversed(run.restarts.items())), launched=True)
    turned = RingRecord(16, ring.occupancy, ring.words, 0, 0, 3, 1, ring.processes[::-1], held=ring.held[::-1])
    other.look(turned, 0.0)
    assert chain(run, 0.0) == chain(other, 0.0)


WAITING = process("learner", "waits: groups, group 7")


def test_a_reward_that_does_not_return_is_named_by_its_function() -> None:
    had = (Held("rewarding", "reward/0", 64, 41.0, draw=7), Held("generating", "rollout/0", 8, 3.0))
    run = picture(WAITING, process("reward/0", "in the function", activity_age_s=41.0), slots=had)
    assert sentence_of(chain(run, 0.0)) == (
        "learner waits for 3 more groups <- reward/0 has had 64 samples for 41 s, no call returned for 41 s <- reward "
        "function my.py:score"
    )
    run = picture(WAITING, process("reward/0", "in part style", activity_age_s=41.0), slots=had)
    assert found(run) == (["learner", "reward/0"], "part style of the reward")


def test_a_stopped_process_is_the_root_before_one_that_has_waited_longer() -> None:
    had = (Held("generating", "rollout/0", 4, 50.0), Held("generating", "rollout/1", 4, 9.0))
    stopped = process("rollout/1", stopped=True, pid=123)
    assert found(picture(WAITING, stopped, slots=had)) == (["learner", "rollout/1"], "kill -CONT 123")
    assert found(picture(WAITING, process("rollout/1"), slots=had)) == (["learner", "rollout/0"], "its engine")


def test_the_group_that_is_waited_for_decides_and_not_whatever_is_old() -> None:
    had = (Held("generating", "rollout/0", 1, 5.0, draw=7), Held("rewarding", "reward/0", 9, 90.0))
    assert found(picture(WAITING, slots=had))[0] == ["learner", "rollout/0"]


def test_a_process_that_died_is_told_of_with_its_latest_end() -> None:
    run = picture(WAITING, process("reward/0", state="gone"), slots=(Held("generated", "", 9, 4.0, draw=7),))
    run.deaths = {"reward/0": "reward/0 (pid 3) ended while ready: signal SIGKILL"}
    links = chain(run, 0.0)
    assert links[-1] == Link("reward/0", "its start by launch", 0.0, f"is not there: {run.deaths['reward/0']}")
    starting = process("reward/0", "load the reward function", state="starting")
    run = picture(WAITING, starting, slots=(Held("generated", "", 9, 4.0, draw=7),))
    assert found(run) == (["learner", "reward/0"], "its start")


def test_a_full_ring_is_told_of_with_who_holds_it() -> None:
    had = (Held("generating", "rollout/0", 12, 5.0), Held("rewarding", "reward/0", 4, 5.0))
    run = picture(process("learner", "waits: admission"), process("scheduler", "waits: slots"), slots=had, free=0)
    assert found(run) == (["learner", "scheduler", "rollout/0"], "its engine")
    assert "(no slot is free, it has 12 of 16)" in chain(run, 0.0)[-1].because


def test_untaken_weights_are_traced_to_the_engine_or_the_transport() -> None:
    publishing = process("learner", "publish")
    run = picture(publishing, process("rollout/0", stopped=True, pid=5))
    assert found(run) == (["learner", "rollout/0"], "kill -CONT 5")
    run = picture(publishing, process("rollout/0", "new weights"))
    assert found(run) == (["learner", "rollout/0"], "the transport of weights (shm)")
    run = picture(WAITING, process("rollout/0", "waits: weights"), slots=(Held("queued", "", 9, 4.0, draw=7),))
    assert found(run) == (["learner", "rollout/0"], "the transport of weights (shm)")
    run = picture(WAITING, process("rollout/0", "waits: weights"), process("rollout/1", stopped=True, pid=5),
                  slots=(Held("queued", "", 9, 4.0, draw=7),))
    assert found(run)[0] == ["learner", "rollout/0"], "of its own each engine takes them from shared memory"
    run.facts = replace(FACTS, transport="broadcast")
    assert found(run) == (["learner", "rollout/0", "rollout/1"], "kill -CONT 5")
    late = process("rollout/0", "first weights", state="starting")
    run = picture(WAITING, late, process("rollout/1", stopped=True, pid=5), slots=(Held("queued", "", 9, 4.0, draw=7),))
    assert found(run) == (["learner", "rollout/0"], "the transport of weights (shm)"), "the learner waits for it"
    run.facts = replace(FACTS, transport="broadcast")
    assert found(run) == (["learner", "rollout/0", "rollout/1"], "kill -CONT 5")
    run = picture(process("learner", stopped=True, pid=6), process("rollout/0", "new weights"))
    assert found(run) == (["learner"], "kill -CONT 6")


def test_an_episode_waits_for_its_own_code_or_its_engine() -> None:
    agent = process("agent/0")
    hangs = (Held("generating", "agent/0", 3, 41.0, draw=7), Held("generating", "agent/0", 5, 1.0, call="rollout/0"))
    assert found(picture(WAITING, agent, slots=hangs))[1] == "the episodes' own code (play.py:go), or its clients"
    asks = (Held("generating", "agent/0", 3, 41.0, draw=7, call="queued"),)
    assert found(picture(WAITING, agent, slots=asks))[0] == ["learner", "agent/0", "rollout/0"]
    stopped = process("rollout/0", stopped=True, pid=8)
    both = (*hangs, Held("generating", "agent/0", 1, 2.0, draw=7, call="rollout/0"))
    assert found(picture(WAITING, agent, stopped, slots=both)) == (["learner", "agent/0", "rollout/0"],
                                                                   "kill -CONT 8")


def test_a_version_that_is_held_is_traced_to_what_validation_waits_for() -> None:
    had = (Held("rewarding", "reward/0", 9, 4.0), Held("queued", "", 9, 4.0, validates=True))
    run = picture(process("learner", "held by validation"), process("validator"), process("rollout/0", stopped=True),
                  slots=had)
    assert found(run) == (["learner", "validator", "rollout/0"], "kill -CONT 77")


def test_full_disks_and_pauses_and_silent_hosts_and_lost_homes_are_roots() -> None:
    assert found(picture(process("learner", "waiting for disk space")))[1].startswith("space on the disk")
    run = picture(WAITING, words={"generation_pause": 2})
    assert found(run) == (["scheduler"], "`busrl resume`")
    far = process("far", "remote, holds 3", progress_age_s=9.0)
    run = picture(WAITING, far, slots=(Held("generating", "far", 3, 9.0, draw=7),))
    assert found(run) == (["learner", "far"], "its host, and the network to it")
    run = picture(WAITING, far, process("keeper", stopped=True), slots=(Held("generating", "far", 3, 9.0, draw=7),))
    assert found(run) == (["learner", "far", "keeper"], "kill -CONT 77")
    run = RunState(facts=FACTS)
    relay = process("relay", "hears nothing of the run", activity_age_s=6.0)
    run.look(RingRecord(16, {}, {}, 0, 0, -1, -1, (relay,)), 0.0)
    assert chain(run, 0.0) == [Link("relay", "the run's own host, and the network to it", 6.0,
                                    "hears nothing of the run")]


def test_a_run_that_is_over_has_no_waits() -> None:
    assert chain(RunState(), 0.0) == [] and sentence_of([]) == ""
    assert chain(picture(WAITING, words={"run_state": 2}), 0.0) == []


# -- stalls -----


def stepping(step: int, learner: ProcessRecord = WAITING, known: int = 5, **words: int) -> RunState:
    """A run whose newest steps took 30 s each."""
    run = picture(learner, words={"step": step, **words})
    for step in range(known):
        run.step(StepRecord(step + 1, seconds=30.0), None)
    return run


def test_a_stall_is_told_of_once_and_again_only_after_a_step() -> None:
    alarm = StallAlarm()
    assert [alarm.look(stepping(5), 100.0) for _ in range(6)] == [False, False, False, True, False, False]
    assert alarm.quiet_s == 600.0
    assert [alarm.look(stepping(6), 100.0) for _ in range(4)] == [False, False, False, True]


def test_the_limit_follows_the_usual_step_and_is_larger_before_the_first() -> None:
    assert limit_s(stepping(5), 120.0) == 300.0 and limit_s(stepping(5), 400.0) == 400.0
    assert limit_s(stepping(0, known=0), 120.0) == 600.0
    never = stepping(5)
    never.facts = Facts(stall_s=120.0)
    assert limit_s(never, 120.0) == math.inf


@given(st.lists(st.sampled_from(["pause", "start", "checkpoint", "stop"]), max_size=30))
def test_a_pause_a_start_and_work_that_gets_on_are_no_stall(seen: list[str]) -> None:
    alarm = StallAlarm()
    runs = {
        "pause": stepping(5, generation_pause=2),
        "start": stepping(5, process("learner", "recover", state="starting", deadline_s=600.0)),
        "checkpoint": stepping(5, process("learner", "checkpoint", deadline_s=600.0, progress_age_s=4.0)),
        "stop": stepping(5, run_state=2),
    }
    assert not any(alarm.look(runs[event], 1000.0) for event in seen)
    hangs = stepping(5, process("learner", "checkpoint", deadline_s=900.0, progress_age_s=800.0))
    assert alarm.look(hangs, 1000.0)


# -- slots by what they have in common -----


def test_slots_are_counted_by_state_owner_class_group_and_call() -> None:
    fields = [("state", "u1"), ("owner", "u4"), ("cls", "u4"), ("group", "u8"), ("uid", "u8"), ("changed_ns", "u8")]
    lines = np.array([
        (State.FREE, 0, 0, 7, 1, 5), (State.QUEUED, 0, 0, 7, 2, 5), (State.QUEUED, 3, 0, 8, 3, 5),
        (State.GENERATING, 3, 0, 7, 4, 5), (State.GENERATING, 3, 0, 7, 5, 5), (State.GENERATING, 3, 1, 9, 6, 5),
        (State.TRAINING, 9, 0, 9, 8, 5),
    ], fields)
    calls = np.array([(State.QUEUED, 0, 0, 0, 4, 9), (State.FREE, 0, 0, 0, 5, 8), (State.GENERATING, 1, 0, 0, 5, 7)],
                     fields)

    class Entry:
        def __init__(self, index: int, label: str) -> None:
            self.index, self.label, self.role = index, label, label.partition("/")[0]

    entries: Any = [Entry(1, "rollout/0"), Entry(3, "agent/0")]
    asked = calls_by_uid([Calls(calls, entries)])
    assert asked == {4: ("queued", 9), 5: ("rollout/0", 7)}, "a call under way counts before one that is over"
    counts = held_slots(lines, entries, {7, -1}, asked)
    seen = {(entry.state, entry.owner, entry.validates, entry.draw, entry.call): entry.slots for entry in counts}
    assert seen == {
        ("queued", "", False, 7, ""): 1, ("queued", "", False, -1, ""): 1,
        ("generating", "agent/0", False, 7, "queued"): 1, ("generating", "agent/0", False, 7, "rollout/0"): 1,
        ("generating", "agent/0", True, -1, ""): 1, ("training", "process 9", False, -1, ""): 1,
    }
