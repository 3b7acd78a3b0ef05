"""What holds in every simulated run, and closed forms where there are some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from worlds import FREE_TIMES, answers, topology

from busrl.data.trace import TracedPrompt
from busrl.errors import UserError
from busrl.scheduling.groups import DISPATCHED
from busrl.simulate.actors import Actors, Times
from busrl.simulate.answers import TraceAnswers
from busrl.states import ACCIDENTS

Make = Callable[..., Any]
SOME = settings(max_examples=25)


@SOME
@example(  # a step by time leaves credit: a group that is admitted while it runs was trained one step late
    seed=10, actors=1, rows=1, n_min=5, mode="batch-async", staleness=0, over_age="wait", flat=0.4, segment=0,
    policy="fifo", grid=None, t_max="0.3",
)
@given(
    seed=st.integers(0, 10_000), actors=st.integers(1, 6), rows=st.integers(1, 9), n_min=st.integers(1, 6),
    staleness=st.integers(0, 4), mode=st.sampled_from(["batch-async", "sync", "fully-async"]),
    over_age=st.sampled_from(["wait", "drop"]), flat=st.sampled_from([0.0, 0.4]), segment=st.sampled_from([0, 7]),
    policy=st.sampled_from(["fifo", "sjf"]), grid=st.sampled_from([None, 0.1]), t_max=st.sampled_from(["inf", "0.3"]),
)
def test_no_run_breaks_the_limits_loses_a_sample_or_trains_one_twice(
    checked: Make, seed: int, actors: int, rows: int, n_min: int, staleness: int, mode: str, over_age: str,
    flat: float, segment: int, policy: str, grid: float | None, t_max: str,
) -> None:
    loaded = topology(
        f"learner.trigger.n_min={n_min}", f"weights.mode={mode}", f"weights.max_staleness={staleness}",
        f"weights.over_age={over_age}", f"generation.max_batch={rows}", f"scheduler.policy={policy}", "groups.size=4",
        "learner.micro_batch_min_samples=4", f"learner.trigger.t_max_s={'inf' if mode == 'sync' else t_max}",
        f"segments.length={segment}", "segments.max_segments=14", "generation.max_new_tokens=98",
    )
    random = np.random.default_rng(seed)
    lengths = [tuple(random.integers(1, 60, 4).tolist()) for _ in range(97)]
    times = Times(speed_spread=0.3, weights_s=0.05, learner_step_s=0.2, reward_s=0.05)
    drawn = answers(lengths, flat, seed=seed)
    if not segment and seed % 2:  # episodes of two calls, with a tool between them
        drawn.tasks = [
            replace(task, turns=tuple(((n, 0.05 * (n % 3)), (n % 7 + 1, 0.1)) for n in task.lengths))
            for task in drawn.tasks
        ]
    world = checked(
        loaded, times, drawn, actors=actors, steps=6, seed=seed, grid_s=grid,
    )
    figures = world.run()
    assert figures.steps == 6
    if world.limits.max_staleness is not None:
        assert figures.age_max <= world.limits.max_staleness
    assert all(actor.busy_s + actor.stalled_s <= figures.seconds + 1e-6 for actor in world.actors.all)
    assert figures.learner_busy + sum(figures.learner_waited.values()) == pytest.approx(1.0, abs=1e-6)
    # The ledger: every dispatched sample is open, trained, or set aside by a rule; nothing else has a fate.
    fates = world.ring.fates
    still = int((world.ring.state != 0).sum())
    assert int((fates == DISPATCHED).sum()) == still
    assert int((fates == ord("T")).sum()) == figures.samples_trained
    assert not np.isin(fates, list(ACCIDENTS)).any()
    ended = figures.samples_trained + 4 * sum(figures.set_aside.values())
    assert int((fates != 0).sum()) == still + ended
    lacking = sum(sum(group.lengths) for group in world.groups.values()) - _unmade(world)
    assert world.counts.generated == lacking + _generated(world)


def _unmade(world: Any) -> int:
    """Tokens that the open groups still lack (those of running sequences count at their end)."""
    return sum(world.scheduler.to_make[slot] for slot in np.flatnonzero(world.ring.state).tolist())


def _generated(world: Any) -> int:
    """Tokens of all groups that ended."""
    return int(sum(world.counts.drawn)) - sum(sum(group.lengths) for group in world.groups.values())


def test_one_actor_and_fixed_lengths_give_the_closed_form(checked: Make) -> None:
    # sync: 2 groups of 4 in 8 rows, each of 50 tokens: 50 steps of 10 ms + 8 x 1 ms, then 8 x 50 tokens of training.
    loaded = topology("groups.size=4", "learner.trigger.n_min=2", "weights.mode=sync", "generation.max_batch=8",
                      "learner.checkpoint_every=0")
    times = replace(FREE_TIMES, row_s=0.001, learner_step_s=0.1, learner_token_s=0.001, publish_s=0.05, sequence_s=0.01)
    figures = checked(loaded, times, answers([(50, 50, 50, 50)]), steps=10).run()
    generating, training = 8 * 0.01 + 50 * (0.01 + 8 * 0.001), 0.1 + 400 * 0.001 + 0.05
    assert figures.seconds == pytest.approx(10 * (generating + training))
    assert figures.actors_busy == pytest.approx(generating / (generating + training))
    assert figures.learner_busy == pytest.approx(training / (generating + training))
    assert figures.ages == {0: 1.0}


def test_rows_that_are_too_few_are_used_one_after_the_other(checked: Make) -> None:
    loaded = topology("groups.size=4", "learner.trigger.n_min=2", "weights.mode=sync", "generation.max_batch=1",
                      "learner.checkpoint_every=0")
    figures = checked(loaded, FREE_TIMES, answers([(10, 20, 30, 40)]), steps=3, actors=2).run()
    # 200 tokens over two actors, the longest first come first served: 10+30+10+30+... ends at 1.1 s of at least 1.0.
    assert 3 * 1.0 <= figures.seconds <= 3 * 1.2
    assert figures.actors_busy > 0.85


def test_new_weights_stop_every_running_actor_once(checked: Make) -> None:
    loaded = topology(
        "groups.size=4", "learner.trigger.n_min=1", "generation.max_batch=4", "learner.checkpoint_every=0"
    )
    without = checked(loaded, FREE_TIMES, answers([(50, 50, 50, 50)]), steps=40).run()
    with_stalls = checked(loaded, replace(FREE_TIMES, weights_s=0.1), answers([(50, 50, 50, 50)]), steps=40).run()
    assert with_stalls.seconds == pytest.approx(without.seconds + 40 * 0.1, rel=0.06)
    assert with_stalls.actors_stalled == pytest.approx(40 * 0.1 / with_stalls.seconds, rel=0.1)


def test_a_fast_learner_never_slows_generation_and_a_slow_one_limits_it(checked: Make) -> None:
    loaded = topology("learner.trigger.n_min=4", "generation.max_batch=64", "learner.checkpoint_every=0")
    given_answers = answers([(50, 60, 70, 80, 50, 60, 70, 80)])
    slow = checked(loaded, replace(FREE_TIMES, learner_step_s=5.0), given_answers, steps=20).run()
    assert slow.learner_busy > 0.85
    assert slow.step_s == pytest.approx(5.0, rel=0.1)


def test_a_reward_is_a_server_with_a_rate_and_shared_queue(checked: Make) -> None:
    loaded = topology("learner.trigger.n_min=4", "generation.max_batch=64", "learner.checkpoint_every=0")
    given_answers = answers([(50, 60, 70, 80, 50, 60, 70, 80)])
    slow = replace(FREE_TIMES, reward_call_s=0.5)
    single = checked(loaded, slow, given_answers, steps=20).run()
    # 32 answers a step, half a second each: a delay of half a second would cost a step next to nothing.
    assert single.step_s == pytest.approx(16.0, rel=0.05) and single.reward_busy == pytest.approx(1.0, abs=0.02)
    assert single.actors_busy < 0.2 and single.completion_mean_s > 16.0
    loaded = topology("learner.trigger.n_min=4", "generation.max_batch=64", "learner.checkpoint_every=0",
                      "reward.workers=4")
    four = checked(loaded, slow, given_answers, steps=20).run()
    assert four.step_s == pytest.approx(4.0, rel=0.05) and four.reward_busy > 0.95
    quick = checked(loaded, replace(FREE_TIMES, reward_call_s=0.001), given_answers, steps=20).run()
    assert 0 < quick.reward_busy < 0.05 and quick.step_s < 1.5


def test_the_same_seed_gives_the_same_run_and_another_one_does_not(checked: Make) -> None:
    loaded = topology("learner.trigger.n_min=4", "scheduler.policy=sjf")
    random = np.random.default_rng(0)
    lengths = [tuple(random.integers(1, 200, 8).tolist()) for _ in range(50)]
    times = Times(speed_spread=0.2)
    first, second, other = (
        checked(loaded, times, answers(lengths, 0.2, seed=seed), actors=3, steps=10, seed=seed).run()
        for seed in (1, 1, 2)
    )
    assert first.to_json() == second.to_json()
    assert first.rows == second.rows
    assert first.to_json() != other.to_json()


def test_an_answer_in_segments_continues_first_and_pays_prefill_again(checked: Make) -> None:
    loaded = topology("groups.size=4", "learner.trigger.n_min=2", "weights.mode=sync", "generation.max_batch=8",
                      "learner.checkpoint_every=0")
    times = replace(FREE_TIMES, prefill_token_s=0.001)
    uncut = checked(loaded, times, answers([(40, 40, 40, 40)]), steps=4).run()
    loaded = topology("groups.size=4", "learner.trigger.n_min=2", "weights.mode=sync", "generation.max_batch=8",
                      "learner.checkpoint_every=0", "segments.length=10", "segments.max_segments=4",
                      "generation.max_new_tokens=40")
    cut = checked(loaded, times, answers([(40, 40, 40, 40)]), steps=4).run()
    prefill = 8 * (10 + 20 + 30 + 3 * (1 + len("prompt 0") // 4)) * 0.001
    assert cut.seconds == pytest.approx(uncut.seconds + 4 * prefill, rel=1e-3)


def test_episodes_leave_rows_during_tools_and_reread_unkept_paths_afterwards(checked: Make) -> None:
    settings = ("groups.size=4", "learner.trigger.n_min=2", "weights.mode=sync", "generation.max_batch=4",
                "learner.checkpoint_every=0")
    tasks = [TracedPrompt("prompt 0", (50, 50), turns=(((20, 0.3), (30, 0.0)), ((20, 0.3), (30, 0.1))))]
    episodes = TraceAnswers(tasks, 4, 512)

    def seconds(times: Times, *more: str) -> float:
        return checked(topology(*settings, *more), times, episodes, steps=4).run().seconds / 4

    # 8 episodes in 4 rows: 4 first calls, the 4 others, whose tools the first ones' end before; second calls likewise
    plain = seconds(FREE_TIMES)
    assert plain == pytest.approx(0.2 + 0.2 + 0.1 + 0.3 + 0.3 + 0.1)
    reading = replace(FREE_TIMES, prefill_token_s=0.001)
    again = seconds(reading)
    assert again > plain + 2 * 4 * 20 * 0.001
    keeping, losing = (seconds(reading, f"generation.prefix_keep_s={limit}") for limit in (10, 0.1))
    assert losing == pytest.approx(again) and keeping == pytest.approx(again - 2 * 4 * (20 + 3) * 0.001, abs=1e-6)


def test_an_open_stream_ends_when_its_last_prompt_is_trained(checked: Make) -> None:
    loaded = topology("groups.size=4", "learner.trigger.n_min=3", "generation.max_batch=8")
    given_answers = answers([(20, 30, 20, 30)] * 10, endless=False)
    tasks = [replace(task, arrival_s=0.5 * i) for i, task in enumerate(given_answers.tasks)]
    given_answers.tasks = tasks
    figures = checked(loaded, FREE_TIMES, given_answers, steps=1000).run()
    assert figures.samples_trained == 40
    assert figures.seconds == pytest.approx(9 * 0.5 + 0.3, abs=0.1)
    assert figures.completion_mean_s == pytest.approx(0.25, abs=0.05)
    assert figures.causes == {"count": 3, "drain": 1}


def test_a_run_of_flat_groups_says_what_it_stands_still_for(checked: Make) -> None:
    loaded = topology("learner.trigger.n_min=2", "weights.mode=sync")
    given_answers = answers([(5,) * 8] * 40, endless=False)
    given_answers.tasks = [replace(task, rewards=(1.0,) * 8) for task in given_answers.tasks]
    figures = checked(loaded, FREE_TIMES, given_answers, steps=5).run()
    assert figures.steps == 0
    assert figures.set_aside == {"f": 40}


def test_no_actor_is_refused() -> None:
    from busrl.simulate.world import World

    with pytest.raises(ValueError, match="0 actors"):
        World(topology(), FREE_TIMES, answers([(5,) * 8]), actors=0, steps=1)
    with pytest.raises(ValueError, match="step_s"):
        replace(FREE_TIMES, step_s=0.0)
    assert issubclass(UserError, Exception)


def test_rounds_of_segments_train_what_is_whole_and_carry_the_rest_over(checked: Make) -> None:
    # Groups of 30 and of 10 tokens by turns, rounds of 2 groups, segments of 10: waves of 10 decoding steps each.
    loaded = topology("groups.size=4", "learner.trigger.n_min=2", "weights.mode=sync", "generation.max_batch=64",
                      "learner.checkpoint_every=0", "generation.max_new_tokens=30", "segments.length=10",
                      "segments.max_segments=3", "segments.rounds=segments")
    world = checked(loaded, FREE_TIMES, answers([(30,) * 4, (10,) * 4]), steps=8)
    figures = world.run()
    assert [row.groups for row in figures.rows[:4]] == [1, 1, 2, 2]  # the first long ones are whole after three waves
    assert figures.seconds == pytest.approx(8 * 0.1, abs=0.08)
    assert figures.age_max == 2 and figures.age_max <= world.limits.max_age


def test_a_segment_round_is_admitted_whole_and_begins_when_it_is(checked: Make) -> None:
    overrides = ("groups.size=4", "learner.trigger.n_min=8", "weights.mode=sync", "generation.max_batch=8",
             "learner.checkpoint_every=0", "generation.max_new_tokens=30", "segments.length=10",
             "segments.max_segments=3", "segments.rounds=segments")
    lengths = answers([(30,) * 4, (10,) * 4])
    world = checked(topology(*overrides, "scheduler.ahead=32"), FREE_TIMES, lengths, steps=6)
    take = world.ring.take

    def watched(limit: int) -> list[int]:
        allowed = world.scheduler.waves.claimable(world.ring.lines, world.scheduler.next_admission)
        assert all(allowed[slot] for _, _, slot in world.ring.queue)
        return take(limit)

    world.ring.take = watched

    assert world.run().rows == checked(topology(*overrides), FREE_TIMES, lengths, steps=6).run().rows


def test_rounds_of_segments_go_on_when_a_wave_completes_nothing(checked: Make) -> None:
    loaded = topology("groups.size=4", "learner.trigger.n_min=2", "weights.mode=sync", "generation.max_batch=64",
                      "learner.checkpoint_every=0", "generation.max_new_tokens=30", "segments.length=10",
                      "segments.max_segments=3", "segments.rounds=segments")
    figures = checked(loaded, FREE_TIMES, answers([(25,) * 4]), steps=3).run()
    assert figures.steps == 3 and all(row.groups == 2 for row in figures.rows)


def test_the_actor_that_has_been_idle_longest_is_fed_first() -> None:
    actors = Actors(2, 1, FREE_TIMES, seed=0)
    end = actors.add(0, 0.0, [(0, 5)], 0)
    actors.finish(0, end)
    actors.sort_in(0)
    assert actors.waiting() == 1, "actor 1 never ran, actor 0 has just ended"
