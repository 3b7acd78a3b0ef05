"""A streak of groups of which none can be trained: what is counted, when it is told, and what is said."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.errors import RUN_FAILED, CannotTrain, process_code
from busrl.ledger.errors import record_error
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.roles.learner.alarms import MOST_GROUPS, FlatStreak, Idling, LengthSkew, cause_of
from busrl.roles.learner.metrics import StepMetrics
from busrl.roles.learner.observers import IdleWatch
from busrl.states import Finish
from busrl.topology import Topology

QUICK = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
DTYPE = [("reward", "f8"), ("finish", "u1")]


def topology(n_min: int = 8, idle_groups: int | str = "auto") -> Topology:
    base = load(QUICK, [f"learner.trigger.n_min={n_min}"])
    return replace(base, limits=replace(base.limits, idle_groups=idle_groups))


def idling(tmp_path: Path, n_min: int = 8, idle_groups: int | str = "auto") -> Idling:
    made = Idling(topology(n_min, idle_groups), RunPaths.of(tmp_path))
    made.look(view(), [])
    return made


def view(
    ended: Sequence[str] = (), ready: Sequence[int] = (), flat: Sequence[int] = (), gone: Sequence[int] = (),
) -> Any:
    """Groups of two that ended with these fates, and open ones that can be trained or are flat. `gone`: the numbers of
    the first that ended."""
    draws = np.array([*ready, *flat], np.int64)
    fates = [[ord(fate) if fate != "." else 0 for fate in group] for group in ended]
    return SimpleNamespace(
        draws=draws, usable=np.ones(len(draws), np.bool_), flat=np.isin(draws, np.array(flat, np.int64)),
        ended_draws=np.array([*gone, *range(10**9, 10**9 + len(fates) - len(gone))], np.int64),
        ended_fates=np.array(fates, np.uint8).reshape(-1, 2),
    )


def lines(*rewards: float, cut: int = 0) -> Any:
    return np.array([(reward, Finish.LENGTH if k < cut else 1) for k, reward in enumerate(rewards)], DTYPE)


def sample() -> dict[str, object]:
    return {"prompt": '{"prompt": "3 1 2"}', "completion": "1 2 3 and more", "reward": 0.0}


def test_the_default_warns_after_n_min_groups_and_ends_after_four_times(tmp_path: Path) -> None:
    idle, told = idling(tmp_path), []
    for _ in range(40):
        idle.look(view(ended=["ff"]), [])
        told.append([*idle.quarters()])
    assert {quarter: told.index([quarter]) + 1 for quarter in (1, 2, 3, 4)} == {1: 8, 2: 16, 3: 24, 4: 32}
    assert sum(map(sum, told)) == 10, "each quarter is told once"


def test_a_seat_asked_seldom_is_not_idle_but_one_never_asked_is(tmp_path: Path) -> None:
    idle = idling(tmp_path)
    for _ in range(31):
        idle.look(view(ended=["uu", "ui"]), [])
    assert (idle.streak, dict(idle.causes)) == (3, {"u": 3})
    idle.look(view(ended=["uP", "fu"]), [])
    assert (idle.streak, idle.causes["P"], idle.causes["f"]) == (5, 1, 1)
    while idle.streak < idle.patience:
        idle.look(view(ended=["uu"] * 16), [])
    assert "seat not used" in idle.text(0) and "the function that plays them" in idle.text(0)


def test_a_few_consecutive_flat_groups_are_chance_however_small_the_step(tmp_path: Path) -> None:
    assert idling(tmp_path, n_min=1).patience == 32 and idling(tmp_path, n_min=1, idle_groups=3).patience == 3


def test_many_groups_that_end_between_two_looks_are_all_counted(tmp_path: Path) -> None:
    idle = idling(tmp_path)
    idle.look(view(ended=["ll"] * 50), [])
    assert [*idle.quarters()] == [1, 2, 3, 4] and idle.streak == 50


def test_prompts_left_out_by_pass_rate_do_not_count_as_vain(tmp_path: Path) -> None:
    idle = idling(tmp_path)
    idle.look(view(ended=["s.", "ff", "s."]), [])
    assert idle.streak == 1


def test_zero_means_never(tmp_path: Path) -> None:
    idle = idling(tmp_path, idle_groups=0)
    idle.look(view(ended=["ff"] * 10_000), [])
    assert not idle.quarters() and idle.patience == 0


def test_what_ended_before_the_first_look_is_another_starts_business(tmp_path: Path) -> None:
    idle = Idling(topology(), RunPaths.of(tmp_path))
    idle.look(view(ended=["ff"] * 1000), [])
    assert idle.streak == 0


def test_a_step_or_trainable_group_ends_the_streak_of_vain_groups(tmp_path: Path) -> None:
    idle = idling(tmp_path)
    idle.look(view(ended=["ff", "TT", "ff"], flat=[8]), [])
    assert idle.streak == 2
    idle.look(view(ended=["ff"], ready=[9]), [])
    assert idle.streak == 0
    idle.look(view(ended=["ff"], ready=[9]), [])
    assert idle.streak == 1, "the same group is no news"
    idle.look(view(ended=["oo"], ready=[9, 10]), [10])
    assert idle.streak == 2, "a group that is just being dropped as too old can not be trained"
    idle.end_streak()
    assert idle.streak == 0 and not idle.quarters()


def test_groups_that_a_step_let_wait_beside_trainable_ones_are_no_streak(tmp_path: Path) -> None:
    """Each step lasts so long that more flat groups than the limit wait at its end, with others to train."""
    idle, flat = idling(tmp_path), range(100, 140)
    for step in range(3):
        idle.look(view(ready=[step], flat=flat), [*flat])
        for draw in flat:
            idle.set_aside(lines(0.0, 0.0), "f", sample, draw)
        idle.look(view(ended=["ff"] * len(flat), ready=[step], gone=flat), [])
        assert (idle.streak, idle.flat.answers) == (0, 0)
        idle.end_streak()
    assert idle.patience == 32 * (120 + 3 + 8) // 3, "they count as groups that trainable ones take"
    idle.look(view(flat=flat), [*flat])
    for draw in flat:
        idle.set_aside(lines(1.0, 1.0), "f", sample, draw)
    idle.look(view(ended=["ff"] * len(flat), gone=flat), [])
    assert (idle.streak, idle.flat.answers) == (40, 80)


def test_only_groups_that_were_set_aside_beside_trainable_ones_are_left_out(tmp_path: Path) -> None:
    idle = idling(tmp_path)
    idle.look(view(ready=[1], flat=[9, 10]), [9, 10])
    for draw in (9, 10):
        idle.set_aside(lines(0.0, 0.0), "f", sample, draw)
    idle.look(view(ended=["ll", "ff"], ready=[1], gone=[4, 9]), [])  # of two groups that ended one was set aside
    assert (idle.streak, idle.causes, idle.flat.answers) == (1, {"l": 1}, 0)
    idle.look(view(ended=["ff", "oo"], ready=[1], gone=[10, 11]), [])  # the other's slots came free later
    assert (idle.streak, idle.causes, idle.flat.answers) == (2, {"l": 1, "o": 1}, 0)
    idle.look(view(ready=[1], flat=[12]), [12])
    idle.set_aside(lines(0.0, 0.0), "f", sample, 12)
    idle.look(view(ended=["ff"], ready=[1], gone=[12]), [])
    assert (idle.streak, idle.causes["f"], idle.flat.answers) == (3, 1, 2)


def test_flat_groups_that_rested_at_the_start_are_no_streak(tmp_path: Path) -> None:
    idle, flat = Idling(topology(idle_groups=3), RunPaths.of(tmp_path)), range(8)
    idle.look(view(flat=flat), [*flat])  # of the reward function before it was corrected
    for draw in flat:
        idle.set_aside(lines(0.0, 0.0), "f", sample, draw)
    idle.look(view(ended=["ff"] * 8 + ["ll"], gone=flat), [])
    assert (idle.streak, idle.causes, idle.flat.answers, [*idle.quarters()]) == (1, {"l": 1}, 0, [1])


def test_a_task_of_mostly_flat_groups_is_slow_and_not_idle(tmp_path: Path) -> None:
    """One group in twenty can be trained: a step takes five times more groups than the limit."""
    chance, idle = np.random.default_rng(0), idling(tmp_path)
    told = 0
    for draw in range(40_000):
        if chance.random() < 0.05:
            idle.look(view(ready=[draw]), [])
        else:
            idle.look(view(ended=["ff"]), [])
        told = max([told, *idle.quarters()])
    assert told <= 1, "a warning by chance, once in a long run"
    for _ in range(2_000):
        idle.look(view(ended=["ff"]), [])
        told = max([told, *idle.quarters()])
    assert told == 4, "and it is idle once they stop"


@given(st.lists(st.booleans(), max_size=200))
def test_whatever_came_before_a_run_without_anything_to_train_ends(before: list[bool]) -> None:
    idle = Idling(topology(), RunPaths.of("/nowhere"))
    idle.look(view(), [])
    for draw, usable in enumerate(before):
        idle.look(view(ready=[draw]) if usable else view(ended=["ff"]), [])
    idle.end_streak()
    idle.look(view(ended=["ff"] * (32 * (len(before) + 8) + 32)), [])
    assert 4 in idle.quarters()


@pytest.mark.parametrize(
    ("fates", "cause"), [("ff", "f"), ("fR", "f"), ("RR", "R"), ("Ri", "R"), ("l.", "l"), ("oo", "o"), ("ii", "i")]
)
def test_a_group_takes_the_cause_of_its_rule_or_commonest_accident(fates: str, cause: str) -> None:
    assert cause_of(np.array([ord(fate) if fate != "." else 0 for fate in fates], np.uint8)) == cause


def test_flat_groups_are_reported_with_rewards_and_cuts_and_an_example(tmp_path: Path) -> None:
    idle = idling(tmp_path)
    for _ in range(3):
        idle.set_aside(lines(0.0, 0.0, cut=1), "f", sample)
        idle.look(view(ended=["ff"]), [])
    text = idle.text(0)
    assert "all 3 groups that ended since the start: flat group" in text
    assert "every reward was 0, 50% of the answers were cut at generation.max_new_tokens" in text
    assert "'1 2 3 and more', worth 0" in text and "reward.extract" in text
    idle.set_aside(lines(1.0, 1.0), "f", sample)
    idle.look(view(ended=["ff", "RR"]), [])
    text = idle.text(7)
    assert "4 of 5 groups that ended since step 7" in text and "all rewards of each group were equal" in text


def test_groups_all_at_the_best_reward_of_the_run_mean_solved(tmp_path: Path) -> None:
    idle = idling(tmp_path)
    idle.add_rewards([0.0, 1.0])
    for _ in range(19):
        idle.set_aside(lines(1.0, 1.0), "f", sample)
        idle.look(view(ended=["ff"]), [])
    text = idle.text(60)
    assert idle.solved and text.startswith("all 19 groups that ended since step 60 were flat with a reward of 1"), text
    assert "if a better reward exists, the policy has collapsed" in text.lower(), "a collapse looks the same"
    assert "with a reward of 1, the best that this run has seen: nothing is left to learn" in text
    assert "reward.extract" not in text and "harder" in text
    idle.look(view(ended=["XX"]), [])
    assert idle.solved, "an accident among them"
    idle.look(view(ended=["XX"] * 3), [])
    assert not idle.solved, "many are another cause"


@pytest.mark.parametrize(("tag", "told"), [("", "the run"), ("judge", "the training of judge")])
def test_a_model_of_several_that_is_solved_ends_alone(tmp_path: Path, tag: str, told: str) -> None:
    said: list[str] = []
    idle = IdleWatch(idling(tmp_path), cast(StepMetrics, SimpleNamespace(idle=lambda *_: None)),
                     replace(topology(), tag=tag), lambda where, text, *_, **__: said.append(text))
    idle.idling.add_rewards([0.0, 1.0])
    while not idle.solved:
        idle.idling.set_aside(lines(1.0, 1.0), "f", sample)
        idle.look(view(ended=["ff"]), [], 1, 1)
    assert said[-1].startswith(f"{told} ends here: all "), said


@pytest.mark.parametrize("earlier", [[0.0, 2.0], [1.0, 2.0], []])
def test_equal_rewards_that_were_once_higher_or_never_differed_are_unsolved(
    tmp_path: Path, earlier: list[float]
) -> None:
    idle = idling(tmp_path)
    idle.add_rewards(earlier)
    idle.set_aside(lines(1.0, 1.0), "f", sample)
    idle.look(view(ended=["ff"]), [])
    assert not idle.solved and "reward.extract" in idle.text(60)
    assert ("too easy for this model, or the reward gives this to every answer" in idle.text(60)) == (not earlier)


def ends_flat(idle: Idling, *rewards: float) -> None:
    for reward in rewards:
        idle.set_aside(lines(reward, reward), "f", sample)


def test_where_nearly_all_flat_answers_are_right_the_task_is_learnt(tmp_path: Path) -> None:
    idle = idling(tmp_path)
    ends_flat(idle, 0.0, *[1.0] * 30)
    assert idle.learnt, "whatever was trained in between"
    idle.end_streak()
    text = idle.learnt_text(76, 150)
    assert text.startswith("step 76: the task is learnt") and "it goes on to step 150" in text
    assert "harder prompts" in text and "busrl stop" in text and "reward.extract" not in text


@pytest.mark.parametrize("rewards", [[0.0] * 30, [1.0] * 30, [0.0] * 20 + [1.0] * 20, []])
def test_flat_groups_at_low_equal_or_mixed_rewards_are_still_an_alarm(tmp_path: Path, rewards: list[float]) -> None:
    idle = idling(tmp_path)
    ends_flat(idle, *rewards)
    assert not idle.learnt


def played(tmp_path: Path, *games: tuple[float, float], earlier: Sequence[float] = (0.0, 1.0)) -> Idling:
    """Idling of a model that plays two seats. Each game ends a flat group for each seat, with that seat's reward."""
    base = topology()
    made = Idling(replace(base, model=replace(base.model, seats=("first", "second"))), RunPaths.of(tmp_path))
    made.look(view(), [])
    made.add_rewards(earlier)
    for group, reward in enumerate(reward for game in games for reward in game):
        made.set_aside(lines(reward, reward), "f", sample, group)
        made.look(view(ended=["ff"]), [])
    return made


def test_a_game_that_always_ends_alike_has_settled(tmp_path: Path) -> None:
    idle = played(tmp_path, *[(1.0, 0.0)] * 20)
    assert idle.solved and idle.learnt, "what one wins the other loses: no failure of the run"
    text = idle.text(60)
    assert "all 40 groups that ended since step 60 were flat, first always 1, second always 0: every episode" in text
    assert "a habit that no seat tries to break" in text and "learner.entropy_coef" in text
    for wrong in ("every prompt always", "reward.extract", "task is solved", "harder"):
        assert wrong not in text and wrong not in idle.learnt_text(60, 90)
    assert "The run goes on to step 90" in idle.learnt_text(60, 90)


@pytest.mark.parametrize("games", [[(1.0, 0.0), (0.0, 1.0)] * 10, [(0.0, 0.0)] * 20, [(0.5, 0.0)] * 20])
def test_games_that_vary_or_that_nobody_wins_have_not_settled(
    tmp_path: Path, games: list[tuple[float, float]]
) -> None:
    idle = played(tmp_path, *games)
    assert not idle.solved and not idle.learnt
    if games[0] != games[1]:
        assert "all rewards of each group were equal: first 0 to 1, second 0 to 1" in idle.text(3)


def test_seats_that_share_one_reward_are_told_to_have_their_own(tmp_path: Path) -> None:
    idle = played(tmp_path, *[(1.0, 1.0)] * 20, earlier=())
    assert not idle.solved and "return a map from each seat to its reward" in idle.text(0)
    assert "return a map" not in played(tmp_path, *[(0.0, 0.0)] * 20, earlier=()).text(0)


def test_groups_set_aside_before_a_step_are_reported_with_their_rewards(tmp_path: Path) -> None:
    idle = idling(tmp_path)
    ends_flat(idle, 0.0, 0.0)
    idle.end_streak()
    idle.look(view(ended=["ff", "ff"]), [])
    assert idle.streak == 2 and "every reward was 0" in idle.text(5)
    idle.end_streak()
    idle.look(view(ended=["ff"]), [])
    assert "every reward" not in idle.text(6), "those of an earlier streak"


def test_advice_comes_before_the_figures_and_no_fate_is_a_letter(tmp_path: Path) -> None:
    idle = idling(tmp_path)
    ends_flat(idle, 0.0)
    idle.look(view(ended=["ff"]), [])
    text = idle.text(0)
    assert text.startswith("look at what the reward compares") and "fate" not in text
    assert text.index("all 1 groups that ended") < text.index("the last: ")


def test_flat_groups_of_different_rewards_are_no_solved_task(tmp_path: Path) -> None:
    idle = idling(tmp_path)
    for reward in (0.0, 1.0):
        idle.set_aside(lines(reward, reward), "f", sample)
        idle.look(view(ended=["ff"]), [])
    assert not idle.solved


def test_of_prompts_that_are_always_or_never_right_the_shares_are_told(tmp_path: Path) -> None:
    """Nine of ten are solved, and one is beyond the model: no failure of the reward, and not the goal either."""
    idle = idling(tmp_path)
    idle.add_rewards([0.0, 1.0])
    for group in range(20):
        idle.set_aside(lines(*[float(group % 10 != 3)] * 2), "f", sample)
        idle.look(view(ended=["ff"]), [])
    text = idle.text(9)
    assert not idle.solved and "every prompt always gets the same reward" in text
    assert "90% of the answers the highest (1), 10% the lowest (0)" in text and "too easy or too hard" in text


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=30))
def test_shares_at_the_highest_and_lowest_reward_cover_all_answers(rewards: list[float]) -> None:
    flat = FlatStreak()
    for reward in rewards:
        flat.add(np.full(2, reward))
    assert flat.answers == 2 * len(rewards)
    assert dict(flat.counts) == {edge: 2 * rewards.count(edge) for edge in (min(rewards), max(rewards))}


def test_a_restarted_process_knows_earlier_rewards_and_usable_group_rarity(tmp_path: Path) -> None:
    rows = [{"step": 1, "fates": "f" * 59 + "T", "rewards": [[0, 0]] * 59 + [[0, 1]]}, {"fates": 3}, {"rewards": [1]}]
    (tmp_path / "groups.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\nhalf")
    idle = idling(tmp_path)
    assert idle.streak == 0 and idle.patience == 32 * (60 + 8), "one in sixty: slow, not idle"
    idle.set_aside(lines(1.0, 1.0), "f", sample)
    idle.look(view(ended=["ff"]), [])
    assert idle.solved


def test_accidents_are_told_with_the_last_error_behind_them(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    record_error(paths, "rollout/0", "warning", "rollout", "sample 4 is dropped: its prompt has 99 tokens", uids=[4])
    record_error(paths, "reward/0", "warning", "reward", "sample 5 raised: KeyError: 'answer' (judge.py:3)", uids=[5])
    record_error(paths, "learner", "warning", "learner", "something else")
    with open(paths.errors, "ab") as file:
        file.write(b'[1]\n{"half": ')
    idle = idling(tmp_path)
    idle.look(view(ended=["RR", "RR", "l."]), [])
    text = "the last error: sample 5 raised: KeyError: 'answer' (judge.py:3); correct the reward function"
    assert text in idle.text(0)
    idle.end_streak()
    idle.look(view(ended=["l."]), [])
    assert "prompt too long" in idle.text(0) and "its prompt has 99 tokens; give generation.max_prompt" in idle.text(0)


def test_the_end_of_such_a_run_is_final() -> None:
    assert process_code(CannotTrain("x")) == RUN_FAILED


def test_stepless_groups_get_their_own_line_and_count_for_the_next_step(tmp_path: Path) -> None:
    metrics, idle = StepMetrics(RunPaths.of(tmp_path)), idling(tmp_path)
    own = np.zeros(2, [("reward", "f8"), ("finish", "u1"), ("response_tokens", "u4"), ("group", "u8"), ("step", "u8")])
    for _ in range(3):
        metrics.set_aside(own, "f", 6)
        idle.set_aside(own, "f", sample)
        idle.look(view(ended=["ff"]), [])
    metrics.idle(5, 6, idle)
    metrics.close()
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (row["kind"], row["step"], row["version"], row["groups"], row["tokens"]) == ("idle", 5, 6, 0, 0)
    assert (row["groups_ended"], row["samples_ended"], row["reward"], row["flat_share"]) == (3, 6, 0.0, 1.0)
    assert (row["idle_groups"], row["idle_limit"], row["idle_causes"]) == (3, 32, {"f": 3})
    assert metrics.ended.groups == 3
    (shown,) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert shown["kind"] == "idle" and shown["completion"] == "1 2 3 and more"


def test_groups_set_aside_forever_take_no_memory_without_any_step(tmp_path: Path) -> None:
    metrics, idle = StepMetrics(RunPaths.of(tmp_path)), idling(tmp_path, idle_groups=0)
    own = np.zeros(4, [("reward", "f8"), ("finish", "u1"), ("response_tokens", "u4"), ("group", "u8"), ("step", "u8")])

    def ends(count: int) -> int:
        for draw in range(count):
            own["group"] = draw
            metrics.set_aside(own, "f", 1, [{"format": 1.0, "right": 0.0}] * 4)
            idle.set_aside(own, "f", sample)
            idle.look(view(ended=["ffff"]), [])
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        grown = -ends(100) + ends(2000)
    finally:
        tracemalloc.stop()
    assert grown < 20_000 and metrics.ended.groups == 2100
    assert metrics.ended.row()["reward_parts"] == {"format": 1.0, "right": 0.0}
    metrics.close()


def test_length_figures_keep_the_newest_groups_without_any_step() -> None:
    skew = LengthSkew(4, 0.0)
    for draw in range(MOST_GROUPS + 10):
        skew.ended(draw, [draw], "f")
    row = skew.step([])
    assert row["length_dispatched_mean"] == row["length_drawn_mean"] == 10 + (MOST_GROUPS - 1) / 2


def playing(tmp_path: Path, **given: Any) -> Idling:
    """Of a run whose samples are episodes."""
    base = load(QUICK.with_name("agents.toml"), [])
    made = Idling(replace(base, limits=replace(base.limits, **given)), RunPaths.of(tmp_path))
    made.look(view(), [])
    return made


@pytest.mark.parametrize("role", ["agent", "serve"])
def test_a_run_of_only_failing_episodes_ends_soon_with_the_last_failure(tmp_path: Path, role: str) -> None:
    idle, told = playing(tmp_path), []
    paths = RunPaths.of(tmp_path)
    for _ in range(9):
        idle.look(view(ended=["RR"]), [])
        failure = "3 more like this, the latest: sample 4 is dropped: its episode raised: URLError: refused by a proxy"
        record_error(paths, f"{role}/0", "warning", role, failure, uids=[4])
        told.append([*idle.quarters()])
    assert {quarter: told.index([quarter]) + 1 for quarter in (1, 4)} == {1: 2, 4: 8}
    cause = "no episode came to a reward; the last raised: URLError: refused by a proxy; see the log"
    assert idle.text(0).startswith(cause)


def test_episodes_with_some_rewards_get_the_usual_patience_of_runs(tmp_path: Path) -> None:
    idle = playing(tmp_path)
    idle.add_rewards([0.0, 1.0])
    idle.look(view(ended=["RR"] * 8), [])
    assert idle.patience >= 32 and playing(tmp_path, idle_groups=500).patience == 500
