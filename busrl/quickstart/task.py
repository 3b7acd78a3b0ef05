"""The quickstart task `sort`: its recipe (every number that shapes model, data and warm-up), prompts and answers.

Pure and seeded by the caller's generator. A prompt is `50213=`, its completion `.....|01235` and the end token. The
filler stands for thinking: its length is geometric with a mean that the first digit sets, so lengths have a long tail
and yet can be guessed from the prompt. Knows nothing of files, token ids or torch.

- A recipe's hash names its cache folder, so a changed number makes a new folder instead of using an old one. It covers
  every field and `FORMAT`, and nothing else.
- No prompt is in both splits, nor twice in one.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from busrl.errors import UserError

FORMAT = 1  # raised when the maker changes what it writes for the same numbers


@dataclass(frozen=True)
class Recipe:
    """`tiny:sort`: the prompt is a row of digits; the completion is filler, a bar, the sorted digits, and the end."""

    name: str = "tiny:sort"
    seed: int = 0
    train_prompts: int = 4096
    validation_prompts: int = 512
    # task
    digits_min: int = 3
    digits_max: int = 10
    filler_base: float = 1.0  # mean filler of a prompt = base + slope * its first digit
    filler_slope: float = 1.5
    filler_cap: int = 52
    # model
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    head_dim: int = 16
    mlp: int = 192
    # warm-up: first on right answers until the skill is there, then on mostly wrong ones until it is well hidden
    batch: int = 32
    lr: float = 4e-3  # of embeddings and norms (AdamW)
    matrix_lr: float = 0.02  # of the layers' matrices (Muon)
    lr_rise: int = 20
    lr_end: float = 0.1  # share of the rates that is left at the end of a phase
    check_every: int = 20
    check_samples: int = 256
    skill: float = 0.9
    skill_steps: int = 260  # the rates fall over the last two fifths of them
    skill_steps_max: int = 900
    wrong: float = 0.8  # share of targets that carry one wrong digit
    mask_rate: float = 0.2  # share of the rates; low, so that the skill is hidden and not lost
    mask_check_every: int = 5
    mask_steps_max: int = 400
    pass_low: float = 0.25
    pass_high: float = 0.4

    @property
    def max_new_tokens(self) -> int:
        """The longest completion of the warm-up: filler, bar, digits, end."""
        return self.filler_cap + self.digits_max + 2

    @property
    def max_prompt_tokens(self) -> int:
        return self.digits_max + 1

    @property
    def folder(self) -> str:
        """Name of the cache folder: `tiny-sort-<hash>`."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return f"{self.name.replace(':', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (Recipe(),)}


def find(name: str) -> Recipe:
    """The recipe of that name; UserError lists the names there are."""
    if name not in RECIPES:
        raise UserError(f"quickstart {name!r}: there is none of that name; choose one of: {', '.join(RECIPES)}")
    return RECIPES[name]


# -- prompts and answers ----------------------------------


ASK, FILLER, BAR = "=", ".", "|"
PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN, ASK, FILLER, BAR, *"0123456789")
EXTRACT = r"\|([0-9]+)<eos>$"  # what `exact_match` compares with the answer; needs the end token, so a cut one fails


def draw_prompt(recipe: Recipe, rng: random.Random) -> str:
    count = rng.randint(recipe.digits_min, recipe.digits_max)
    return "".join(rng.choice("0123456789") for _ in range(count)) + ASK


def answer_of(prompt: str) -> str:
    return "".join(sorted(prompt.removesuffix(ASK)))


def draw_filler(recipe: Recipe, prompt: str, rng: random.Random) -> str:
    """Filler of geometric length with the prompt's mean; a length above the cap is drawn again."""
    mean = recipe.filler_base + recipe.filler_slope * int(prompt[0])
    stay = math.log(mean / (mean + 1.0))
    while True:
        length = int(math.log(1.0 - rng.random()) / stay)
        if length <= recipe.filler_cap:
            return FILLER * length


def spoil(answer: str, rng: random.Random) -> str:
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
