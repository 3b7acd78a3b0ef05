"""A part of kind math gives what math-verify itself gives, over 2,000 pairs of references and answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from busrl.rewards.base import Item
from busrl.rewards.pool import RewardPool
from busrl.topology.rewards import Reward, RewardPart

math_verify = pytest.importorskip("math_verify")
PAIRS, SEED = 2000, 7
FRAMES = ("{}", "The answer is {}.", r"so we get \boxed{{{}}}", "${}$", r"First $x = 1$, then \boxed{{{}}}",
          "Answer: ${}$")


def pairs() -> Iterator[tuple[str, str]]:
    """References, and answers that are the same, written in another way, or wrong."""
    chance = random.Random(SEED)
    for _ in range(PAIRS):
        forms = chance.choice((number, fraction, power, pair, choice, polynomial, interval))(chance)
        others = chance.choice((number, fraction, pair, polynomial))(chance)
        answer = chance.choice(forms if chance.random() < 0.6 else others)
        yield chance.choice(forms), chance.choice(FRAMES).format(answer)


def number(chance: random.Random) -> list[str]:
    value = chance.randrange(-9999, 9999)
    return [str(value), f"{value:,}", f"{value}.0", rf"\frac{{{2 * value}}}{{2}}"]


def fraction(chance: random.Random) -> list[str]:
    above, below = chance.randrange(1, 20), 2 ** chance.randrange(1, 4)
    return [f"{above}/{below}", rf"\frac{{{above}}}{{{below}}}", rf"\dfrac{{{above}}}{{{below}}}", str(above / below)]


def power(chance: random.Random) -> list[str]:
    root = chance.randrange(2, 12)
    return [rf"\sqrt{{{root * root * 2}}}", rf"{root}\sqrt{{2}}", f"{root}*sqrt(2)"]


def pair(chance: random.Random) -> list[str]:
    first, second = chance.randrange(9), chance.randrange(9)
    return [f"({first},{second})", f"({first}, {second})", rf"\left({first}, {second}\right)"]


def choice(chance: random.Random) -> list[str]:
    few = sorted(chance.sample(range(20), 3))
    return [rf"\{{{few[0]},{few[1]},{few[2]}\}}", rf"\{{{few[2]},{few[0]},{few[1]}\}}"]


def polynomial(chance: random.Random) -> list[str]:
    root = chance.randrange(1, 9)
    return [f"(x+{root})^2", f"x^2+{2 * root}x+{root * root}", f"(x+{root})(x+{root})"]


def interval(chance: random.Random) -> list[str]:
    low = chance.randrange(9)
    return [f"[{low},{low + 3})", rf"[{low}, {low + 3})", rf"\left[{low},{low + 3}\right)"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_part_agrees_with_the_library_on_2000_pairs() -> None:
    questions = list(pairs())
    with RewardPool(Reward(part=(RewardPart("math", "math", 1.0, 60.0),), workers=2), base_dir=".") as pool:
        pool.submit([
            Item(key, json.dumps({"answer": right}).encode(), text, []) for key, (right, text) in enumerate(questions)
        ])
        worths: dict[int, float] = {}
        while len(worths) < len(questions):
            for outcome in pool.poll(10.0):
                assert outcome.error == "", (questions[outcome.key], outcome)
                worths[outcome.key] = outcome.value
    parse, verify = math_verify.parse, math_verify.verify
    wanted = [float(verify(parse(f"${right}$"), parse(text))) for right, text in questions]
    differ = [(questions[key], worths[key]) for key in range(len(questions)) if worths[key] != wanted[key]]
    assert not differ, (len(differ), differ[:5])
    assert 0.3 < sum(wanted) / len(wanted) < 0.9, "both verdicts are common"
