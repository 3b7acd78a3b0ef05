"""A reward of several parts, each in a child of its own: what breaks in one is named and costs only its sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from busrl.errors import RewardNotLoaded
from busrl.rewards.base import Item, Outcome
from busrl.rewards.pool import RewardPool
from busrl.topology.rewards import Reward, RewardPart

FUNCTIONS = '''
import asyncio, os, time
running = most = 0
calls = []
def score(record, completion, token_ids):
    if completion == "hang": time.sleep(600)
    if completion == "nan": return float("nan")
    if completion == "large": return "x" * (1 << 28)
    if completion == "large error": raise ValueError("x" * (1 << 28))
    return {"words": len(completion.split()), "ids": len(token_ids)}
async def slow(record, completion, token_ids):
    global running, most
    running += 1
    most = max(most, running)
    if completion == "hang": await asyncio.sleep(600)
    if completion == "block": time.sleep(600)
    if completion == "raise": raise ValueError("no such luck")
    if completion == "die":
        with open(f"{__file__}.deaths", "a") as deaths: deaths.write("x")
        os._exit(3)
    await asyncio.sleep(0.05)
    running -= 1
    return float(most)
def lists(records, completions, token_ids):
    calls.append(len(completions))
    if "raise" in completions: raise ValueError("no such luck")
    if "die" in completions: os._exit(3)
    if "hang" in completions: time.sleep(600)
    if "few" in completions: return [1.0]
    if "inf" in completions: return [float("inf") if text == "inf" else 2.0 for text in completions]
    return [float(len(ids)) for ids in token_ids]
def size(records, completions, token_ids):
    return [float(len(records))] * len(records)
def turns(record, completion, token_ids, episode):
    return float(len(episode["turns"])) if episode else -1.0
async def slow_turns(record, completion, token_ids, *, episode=None):
    return 10.0 * turns(record, completion, token_ids, episode)
def list_of_turns(records, completions, token_ids, episode):
    return [100.0 * turns(None, None, None, each) for each in episode]
'''
HOSTILE = RewardPart("regex", "hostile", 0.5, 1.5, pattern=r"^(a+)+$")
MakePool = Callable[..., RewardPool]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakePool]:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    pools: list[RewardPool] = []

    def build(*parts: RewardPart, **more: Any) -> RewardPool:
        pools.append(RewardPool(Reward(part=parts, **more), base_dir=tmp_path))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def judged(pool: RewardPool, *texts: str, line: bytes = b'{"answer": 3}') -> list[Outcome]:
    """The outcome of each text; the test's own watchdog ends a pool that never answers."""
    pool.submit([Item(key, line, text, [1, 2]) for key, text in enumerate(texts)])
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(texts):
        for outcome in pool.poll(10.0):
            assert outcome.key not in outcomes
            outcomes[outcome.key] = outcome
    assert len(pool) == 0
    return [outcomes[key] for key in range(len(texts))]


def python(name: str, function: str, **more: Any) -> RewardPart:
    settings = {"timeout_s": 60.0, "function": f"own.py:{function}", **more}
    return RewardPart("python", name, **settings)


def test_the_reward_is_the_weighted_sum_and_parts_are_shown_without_weight(make: MakePool) -> None:
    pool = make(
        RewardPart("numeric", "right", 1.0, 60.0), RewardPart("regex", "style", 0.25, 60.0, pattern="^It"),
        python("own", "score", weight=-0.5), workers=2,
    )
    first, second = judged(pool, "It is 3", "4")
    assert first.value == 1.0 + 0.25 - 0.5 * 5 and second.value == -0.5 * 3
    assert first.parts == {"right": 1.0, "style": 1.0, "own": 5.0, "own/words": 3.0, "own/ids": 2.0}
    assert second.parts["right"] == second.parts["style"] == 0.0
    assert pool.counts[""] == 2


def test_a_hostile_expression_is_ended_at_its_deadline_and_named(make: MakePool) -> None:
    pool = make(HOSTILE, RewardPart("numeric", "right", 1.0, 60.0))
    fine, hung, after = judged(pool, "aaa", "a" * 60 + "!", "3")
    assert (fine.error, after.error, after.value) == ("", "", 1.0)
    assert hung.error == "hung" and hung.text.startswith("part hostile: no result after 1.5 s")


def test_a_part_that_is_not_finite_is_malformed_and_named(make: MakePool) -> None:
    pool = make(python("own", "score"), RewardPart("numeric", "right", 1.0, 60.0))
    assert [(outcome.error, outcome.text) for outcome in judged(pool, "nan")] == [
        ("malformed", "part own: the reward is nan: must be finite")]


def test_a_sum_that_is_not_finite_is_malformed(make: MakePool) -> None:
    pool = make(RewardPart("numeric", "one", 1.7e308, 60.0), RewardPart("numeric", "two", 1.7e308, 60.0))
    (outcome,) = judged(pool, "3")
    assert outcome.error == "malformed" and "sum of the weighted parts is inf" in outcome.text


@pytest.mark.parametrize(("text", "error"), [("large", "malformed"), ("large error", "raised")])
def test_a_huge_text_is_no_reward_and_its_message_is_short(
    make: MakePool, text: str, error: str
) -> None:
    outcome, after = judged(make(python("own", "score")), text, "a")
    assert outcome.error == error and outcome.text.startswith("part own: ") and len(outcome.text) < 10_000
    assert after.error == ""


def test_coroutines_run_at_the_same_time_and_are_answered_in_order(make: MakePool) -> None:
    pool, count = make(python("slow", "slow")), 40
    assert pool.wait_ready(60)
    values = [outcome.value for outcome in judged(pool, *map(str, range(count)))]
    assert max(values) > 10 and values == sorted(values)


def test_a_coroutine_that_fails_costs_its_own_sample(make: MakePool) -> None:
    pool = make(python("slow", "slow", timeout_s=1.0))
    fine, raised, hung, last = judged(pool, "a", "raise", "hang", "b")
    assert (fine.error, raised.error, hung.error, last.error) == ("", "raised", "hung", "")
    assert raised.text.startswith("part slow: ValueError: no such luck") and "no result after 1 s" in hung.text
    assert pool.restarts == 0


def test_a_coroutine_that_kills_its_process_is_found_among_others(make: MakePool, tmp_path: Path) -> None:
    pool = make(python("slow", "slow"))
    outcomes = judged(pool, "a", "b", "die", "c", "d")
    assert [outcome.error for outcome in outcomes] == ["", "", "raised", "", ""]
    assert "died on this sample twice" in outcomes[2].text
    assert (tmp_path / "own.py.deaths").read_text() == "xx", "once with others, and once alone"


@pytest.mark.parametrize(
    ("word", "error", "text"),
    [
        ("raise", "raised", "no such luck"), ("die", "raised", "died on this sample twice"),
        ("hang", "hung", "no result after 1 s"), ("inf", "malformed", "must be finite"),
    ],
)
def test_a_sample_that_breaks_a_batch_is_found_and_others_are_judged(
    make: MakePool, word: str, error: str, text: str
) -> None:
    pool = make(python("many", "lists", batch=True, timeout_s=1.0))
    outcomes = judged(pool, "a", "b", word, "c", "d")
    assert [outcome.error for outcome in outcomes] == ["", "", error, "", ""] and text in outcomes[2].text
    assert {outcome.value for outcome in outcomes if not outcome.error} == {2.0}


def test_a_list_of_another_length_is_malformed(make: MakePool) -> None:
    pool = make(python("many", "lists", batch=True))
    pool.wait_ready(60)
    outcomes = judged(pool, "few", "a")
    assert outcomes[0].error == "" and outcomes[0].value == 1.0, "alone it gives one reward for one answer"


def test_lists_hold_what_has_come_up_meanwhile(make: MakePool) -> None:
    pool = make(python("many", "size", batch=True))
    pool.wait_ready(60)
    assert max(outcome.value for outcome in judged(pool, *map(str, range(200)))) == 64.0


def test_a_function_of_each_kind_may_ask_for_the_episode_by_name(
    make: MakePool,
) -> None:
    pool = make(python("own", "turns"), python("slow", "slow_turns"), python("many", "list_of_turns", batch=True),
                python("plain", "score", weight=0.0), RewardPart("regex", "style", 0.0, 60.0, pattern="x"))
    pool.submit([Item(0, b"{}", "x", [1], {"turns": [{}, {}, {}]}), Item(1, b"{}", "x", [1])])
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < 2:
        outcomes |= {outcome.key: outcome for outcome in pool.poll(10.0)}
    assert (outcomes[0].error, outcomes[0].value, outcomes[1].error, outcomes[1].value) == ("", 333.0, "", -111.0)


def test_a_part_that_cannot_be_loaded_is_named(make: MakePool) -> None:
    pool = make(RewardPart("numeric", "right", 1.0, 60.0), python("own", "gone"))
    with pytest.raises(RewardNotLoaded, match=r"reward.part 'own'.function = 'own.py:gone'.* has no 'gone'"):
        pool.wait_ready(60)


def test_math_keeps_to_the_time_of_its_child_in_the_main_thread(make: MakePool) -> None:
    pytest.importorskip("math_verify")
    pool = make(RewardPart("math", "math", 1.0, 60.0), RewardPart("numeric", "number", 0.5, 60.0))
    line = rb'{"answer": "3"}'
    outcomes = judged(pool, r"\boxed{3}", "4", r"\boxed{\frac{6}{2}}", line=line)
    assert [outcome.value for outcome in outcomes] == [1.5, 0.0, 1.0]


@pytest.mark.slow
def test_what_math_verify_cannot_decide_ends_within_the_deadline(make: MakePool) -> None:
    pytest.importorskip("math_verify")
    pool = make(RewardPart("math", "math", 1.0, 8.0))
    pool.wait_ready(60)
    begun = time.monotonic()
    outcome, after = judged(pool, r"\boxed{9^{9^{9^{9^{9}}}}}", "3")
    assert time.monotonic() - begun < 60 and outcome.value == 0.0, "unequal, or hung: never a reward"
    assert outcome.error in ("", "hung") and after.value == 1.0


def test_parts_stand_and_are_added_in_their_order_whoever_answers_first(make: MakePool) -> None:
    pool = make(python("late", "slow"), RewardPart("regex", "soon", 0.1, 60.0, pattern="a"), python("own", "score"))
    outcomes = judged(pool, *(f"a {n}" for n in range(8)))
    assert all(list(outcome.parts) == ["late", "soon", "own", "own/words", "own/ids"] for outcome in outcomes)
