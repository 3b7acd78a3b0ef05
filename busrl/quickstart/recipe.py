"""What a quickstart task is made from: every number that shapes the model, its data and its warm-up.

Pure data. A recipe's hash names its cache folder, so a changed number makes a new folder instead of using an old one.
Knows nothing of files or torch.

- The hash covers every field and `FORMAT`, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
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
    batch: int = 64
    lr: float = 2e-3
    lr_end: float = 2e-4
    lr_rise: int = 50
    check_every: int = 50
    check_samples: int = 512
    skill: float = 0.9
    skill_steps_max: int = 1500
    wrong: float = 0.65  # share of targets that carry one wrong digit
    mask_steps: int = 150
    mask_steps_max: int = 600
    pass_low: float = 0.33
    pass_high: float = 0.43

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


def known(name: str) -> bool:
    """Whether `name` (as in `[model] path`) names a quickstart rather than a folder."""
    return name in RECIPES


def find(name: str) -> Recipe:
    """The recipe of that name; UserError lists the names there are."""
    if name not in RECIPES:
        raise UserError(f"quickstart {name!r}: there is none of that name; choose one of: {', '.join(RECIPES)}")
    return RECIPES[name]
