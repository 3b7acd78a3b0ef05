"""What the simulated scheduler does beyond fifo: late dispatch, predictors that learn, segments that adapt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import FREE_TIMES, answers, topology

from busrl.errors import UserError
from busrl.predict.kept import unkept
from busrl.scheduling.groups import DISPATCHED
from busrl.simulate.actors import Times

Make = Callable[..., Any]
SOME = settings(max_examples=15)


def long_tailed(seed: int, groups: int = 60, members: int = 4) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    means = np.exp(random.normal(3.0, 1.0, groups))
    return [tuple(np.clip(random.normal(m, m / 5, members), 1, 500).astype(int).tolist()) for m in means]


@SOME
@given(
    seed=st.integers(0, 10_000), policy=st.sampled_from(["sjf", "ljf", "adaptive"]),
    mode=st.sampled_from(["batch-async", "sync", "fully-async"]), ahead=st.sampled_from([0, 4]), rows=st.integers(1, 9),
    predictor=st.sampled_from(["rules", "history"]),
)
def test_no_schedule_loses_a_sample_or_breaks_a_limit(
    checked: Make, seed: int, policy: str, mode: str, ahead: int, rows: int, predictor: str
) -> None:
    loaded = topology(
        "groups.size=4", "learner.trigger.n_min=3", f"weights.mode={mode}", f"generation.max_batch={rows}",
        f"scheduler.policy={policy}", f"scheduler.predictor={predictor}",
        f"scheduler.ahead={ahead if mode != 'sync' else 0}", "learner.micro_batch_min_samples=4",
    )
    world = checked(loaded, Times(), answers(long_tailed(seed), 0.2, seed=seed), actors=2, steps=6, seed=seed)
    figures = world.run()
    fates = world.ring.fates
    still = int((world.ring.state != 0).sum())
    assert figures.steps == 6
    assert int((fates == DISPATCHED).sum()) == still
    assert int((fates != 0).sum()) == still + figures.samples_trained + 4 * sum(figures.set_aside.values())
    if world.limits.max_staleness is not None:
        assert figures.age_max <= world.limits.max_staleness


def test_late_dispatch_leaves_prompts_to_the_policy_until_an_engine_is_free(checked: Make) -> None:
    common = (
        "groups.size=4", "learner.trigger.n_min=8", "weights.mode=fully-async", "generation.max_batch=4",
        "scheduler.policy=sjf", "scheduler.horizon=60", "learner.checkpoint_every=0",
    )
    lengths = [(4 * (60 - i),) * 4 for i in range(60)]  # the longest come first
    first = []
    for ahead in (0, 4):
        given_answers = answers(lengths)
        loaded = topology(*common, f"scheduler.ahead={ahead}")
        world = checked(loaded, FREE_TIMES, given_answers, steps=3, oracle=True)
        figures = world.run()
        first.append(figures.completion_mean_s)
        waiting = max(0, int((world.ring.state == 2).sum()))
        assert not ahead or waiting < ahead + 4
    assert first[1] < first[0], "chosen late, a group waits less in the ring"


def test_a_learning_predictor_hears_every_answer_once_and_its_tau_appears(checked: Make) -> None:
    loaded = topology("groups.size=4", "learner.trigger.n_min=4", "generation.max_batch=4", "scheduler.policy=sjf",
                      "scheduler.predictor=history", "learner.checkpoint_every=0")
    world = checked(loaded, FREE_TIMES, answers(long_tailed(3)), steps=60)
    draws: list[int] = []
    observe = world.feed.predictor.observe

    def watched(finished: Any) -> None:
        draws.extend(candidate.draw for candidate, _ in finished)
        observe(finished)

    world.feed.predictor.observe = watched
    figures = world.run()
    assert max(np.bincount(draws)) <= 4
    assert figures.tasks - 4 * 64 <= len(draws) <= figures.tasks + 16  # those still in flight are told at the next look
    assert figures.told["predictor_tau"] > 0.5, "the same prompts come again"
    assert figures.told["predictor_faults"] == 0
    assert not any("us_per" in name for name in figures.told)


def test_a_segment_length_of_auto_follows_the_answers(checked: Make) -> None:
    loaded = topology("groups.size=4", "learner.trigger.n_min=4", "generation.max_batch=16", "segments.length=auto",
                      "segments.max_segments=8", "learner.checkpoint_every=0")
    world = checked(loaded, FREE_TIMES, answers([(60, 70, 80, 500)]), steps=20)
    assert world.cuts.length == 512
    assert world.run().steps == 20
    assert world.cuts.length < 512


def test_a_keyword_table_with_a_fault_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "words.toml"
    table.write_text("[words]\nprove = true\n")
    with pytest.raises(UserError, match=r"words\.toml"):
        unkept(topology("scheduler.policy=sjf", f"scheduler.keywords={table}"), lambda draw: [1], oracle=False)
