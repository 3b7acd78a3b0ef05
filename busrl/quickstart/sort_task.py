"""The task `sort`: prompts, right answers, the filler before them, and wrong answers for the warm-up.

Pure and seeded by the caller's generator. A prompt is `50213=`, its completion `.....|01235` and the end token. The
filler stands for thinking: its length is geometric with a mean that the first digit sets, so lengths have a long tail
and yet can be guessed from the prompt. Knows nothing of files, tokens ids or torch.

- No prompt is in both splits, nor twice in one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from busrl.quickstart.recipe import Recipe

ASK, FILLER, BAR = "=", ".", "|"
PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN, ASK, FILLER, BAR, *"0123456789")
EXTRACT = r"\|([0-9]+)<eos>$"  # what `exact_match` compares with the answer; needs the end token, so a cut one fails


def draw_prompt(recipe: Recipe, rng: random.Random) -> str:
    """A prompt with a uniform number of uniform digits."""
    count = rng.randint(recipe.digits_min, recipe.digits_max)
    return "".join(rng.choice("0123456789") for _ in range(count)) + ASK


def answer_of(prompt: str) -> str:
    return "".join(sorted(prompt.removesuffix(ASK)))


def draw_filler(recipe: Recipe, prompt: str, rng: random.Random) -> str:
    """Geometric with the prompt's mean, drawn again above the cap."""
    mean = recipe.filler_base + recipe.filler_slope * int(prompt[0])
    stay = math.log(mean / (mean + 1.0))
    while True:
        length = int(math.log(1.0 - rng.random()) / stay)
        if length <= recipe.filler_cap:
            return FILLER * length


def spoil(answer: str, rng: random.Random) -> str:
    """The answer with one digit replaced by another."""
    place = rng.randrange(len(answer))
    wrong = (int(answer[place]) + rng.randint(1, 9)) % 10
    return f"{answer[:place]}{wrong}{answer[place + 1 :]}"


def draw_completion(recipe: Recipe, prompt: str, wrong: float, rng: random.Random) -> str:
    """A target of the warm-up, without the end token; wrong with that probability."""
    answer = answer_of(prompt)
    if rng.random() < wrong:
        answer = spoil(answer, rng)
    return draw_filler(recipe, prompt, rng) + BAR + answer


def splits(recipe: Recipe) -> tuple[list[str], list[str]]:
    """The prompts of train and validation: disjoint and without repeats."""
    rng = random.Random(f"{recipe.seed}/prompts")
    drawn: dict[str, None] = {}
    while len(drawn) < recipe.train_prompts + recipe.validation_prompts:
        drawn[draw_prompt(recipe, rng)] = None
    prompts = list(drawn)
    return prompts[recipe.validation_prompts :], prompts[: recipe.validation_prompts]


def warm_up_prompts(recipe: Recipe, held_out: list[str]) -> Iterator[str]:
    """Endless prompts for the warm-up, none of them held out."""
    rng, hidden = random.Random(f"{recipe.seed}/warm-up"), frozenset(held_out)
    while True:
        prompt = draw_prompt(recipe, rng)
        if prompt not in hidden:
            yield prompt
