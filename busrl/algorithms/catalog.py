"""The choices of [learner]: losses, advantages, aggregations, corrections, KL terms and recipes, with their properties
and the settings of their papers.

The formulas are in the other modules of this package, under the same names. The configuration reads
them: it parses without torch and takes its defaults from `LossSettings`. Imports nothing.

- A recipe and a loss set keys that a topology leaves out; a key that is written down always wins.
- `held_back` says why the gradient of a sample needs more than its own group: such a step is computed at once, when it
  fires, and not streamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

NO_DUAL = 1000.0  # the largest value of learner.dual_clip: as good as none


FEWER = -1e5  # log-probability in the place of a token that a teacher did not name: such a one counts nothing


@dataclass(frozen=True)
class OfLimit:
    """A value of a recipe: the limit of an answer in tokens over `parts`."""

    parts: int


@dataclass(frozen=True)
class LossSettings:
    """The numbers that a loss may use; the names are those of the topology's [learner] keys."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    tis_cap: float = 2.0
    ratio: str = "behaviour"  # or "proximal": what the ratio of a loss is to
    cispo_cap: float = 5.0
    sapo_taus: tuple[float, float] = (1.0, 1.05)
    two_sided_delta: float = 4.0
    dppo_mask: float = 0.2
    dppo_square: float = 1e-3
    opsm_delta: float = 0.5
    m2po_tau: float = 0.04
    cov_share: float = 2e-4
    clip_cov_range: tuple[float, float] = (1.0, 5.0)
    kl_cov_coef: float = 1.0
    correction: str = "none"
    correction_low: float = 0.0
    correction_high: float = 0.0
    kl: str = "none"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    teacher_coef: float = 0.0


@dataclass(frozen=True)
class LossFacts:
    """Facts of a loss; `settings` are its paper's, by dotted key."""

    source: str
    ratio: bool = True  # clips or weights with a ratio to what learner.ratio names
    proximal: bool = False  # reads the proximal log-probabilities whatever learner.ratio says
    homogeneous: bool = True  # k times the advantages give k times the loss, for every k > 0
    chooses: bool = False  # among all tokens of an update
    teacher: bool = False  # reads the most probable tokens of one
    settings: Mapping[str, Any] = field(default_factory=dict)


LOSS_FACTS: dict[str, LossFacts] = {
    "ppo_clip": LossFacts("1707.06347"),
    "decoupled": LossFacts("2110.00641, 2505.24298", ratio=False, proximal=True),
    "gspo": LossFacts("2507.18071", settings={
        "learner.clip_low": 3e-4, "learner.clip_high": 4e-4, "learner.aggregation": "seq-mean-token-mean"}),
    "cispo": LossFacts("2506.13585"),
    "sapo": LossFacts("2511.20347", settings={"learner.aggregation": "seq-mean-token-mean"}),
    "gmpo": LossFacts("2507.20673", settings={
        "learner.clip_low": 0.4, "learner.clip_high": 0.4, "learner.aggregation": "seq-mean-token-mean"}),
    "two_sided": LossFacts("2505.07291", settings={
        "learner.clip_high": 0.2, "learner.aggregation": "seq-mean-token-mean"}),
    "dppo": LossFacts("prime-rl's default loss", ratio=False, homogeneous=False),
    "opsm": LossFacts("2512.02556"),
    "reinforce": LossFacts("Williams 1992", ratio=False),
    "m2po": LossFacts("2510.01161", proximal=True, chooses=True),
    "clip_cov": LossFacts("2505.22617", chooses=True, settings={"learner.clip_high": 0.2}),
    "kl_cov": LossFacts("2505.22617", homogeneous=False, chooses=True),
    "topk_kl": LossFacts("1503.02531", ratio=False, homogeneous=False, teacher=True, settings={
        "learner.advantage": "reward"}),
}

GROUP, SCALE, BATCH = "of its group", "of its group, divided by a number of the step", "of the whole step"
SAMPLE, TOKEN = "of its sample alone", "of each token, from a value head"
EARLIER = "of its sample, and a running mean of earlier groups"
GAE, EMA = "gae", "ema"  # the advantages that need a value head, and a mean that is kept
ADVANTAGE_FACTS: dict[str, str] = {  # name -> what an advantage is made of
    "group_std": GROUP, "group_mean": GROUP, "leave_one_out": GROUP, "mean_normalised": GROUP, "batch_std": SCALE,
    "batch_whiten": BATCH, "reward": SAMPLE, GAE: TOKEN, EMA: EARLIER,
}
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean")
# name -> (low, high) where learner.correction_low and correction_high are 0
CORRECTIONS: dict[str, tuple[float, float]] = {
    "none": (0.0, 0.0), "token_tis": (0.0, 2.0), "seq_tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mis": (0.5, 2.0),
    "geo_rs": (0.999, 1.001), "k3_rs": (0.0, 0.01),
}
KL_TERMS = ("none", "k1", "k2", "k3", "k3_is")


def _recipe(loss: str, advantage: str = "group_std", aggregation: str = "", **learner: Any) -> dict[str, Any]:
    """By dotted key; without an aggregation that of the loss or of the schema."""
    keys = {"loss": loss, "advantage": advantage, **({"aggregation": aggregation} if aggregation else {}), **learner}
    return {f"learner.{name}": value for name, value in keys.items()}


def _clipped(advantage: str, aggregation: str, clip_high: float = 0.2, **learner: Any) -> dict[str, Any]:
    return _recipe("ppo_clip", advantage, aggregation, clip_high=clip_high, dual_clip=NO_DUAL, **learner)


RECIPES: dict[str, dict[str, Any]] = {
    "grpo": _clipped("group_std", "seq-mean-token-mean", kl="k3", kl_coef=0.04),
    "dr_grpo": _clipped("group_mean", "seq-mean-token-sum-norm", length_norm=OfLimit(1)),
    "dapo": {**_clipped("group_std", "token-mean", 0.28), "reward.overlong_tokens": OfLimit(5)},
    "gspo": _recipe("gspo"),
    "cispo": _recipe("cispo", aggregation="token-mean"),
    "scalerl": {
        **_recipe("cispo", "batch_std", "prompt-mean"), "data.skip.max_pass_rate": 0.9, "data.skip.rest": 0,
    },
    "rloo": _recipe("reinforce", "leave_one_out", "seq-mean-token-sum", correction="token_tis"),
    "reinforce_pp": _clipped("batch_whiten", "token-mean"),
    "ppo": _clipped("gae", "token-mean"),
    "distill": _recipe("topk_kl", "reward", "token-mean"),
    **{name: _recipe(name) for name in (
        "sapo", "gmpo", "two_sided", "dppo", "opsm", "m2po", "clip_cov", "kl_cov")},
}


# -- by other names ----------------------------------------

ALIASES = {"reinforceplusplus": "reinforce_pp", "ppo2": "ppo", "onpolicydistillation": "distill"}  # of recipes


def letters(name: str) -> str:
    """The letters and digits of a name, in lower case: people write case and marks differently."""
    return re.sub("[^a-z0-9]", "", name.lower().replace("+", "p"))


def where_set(key: str, name: object) -> str:
    """Name the keys that set the algorithm which a key of [learner] was given; empty for an unknown name."""
    wanted = letters(str(name))
    recipe = ALIASES.get(wanted) or next((candidate for candidate in RECIPES if letters(candidate) == wanted), "")
    if recipe:
        sets = ", ".join(f'{part} = "{RECIPES[recipe][f"learner.{part}"]}"' for part in ("loss", "advantage"))
        return f'{recipe} is a whole algorithm: recipe = "{recipe}" sets {sets} and more'
    tables: dict[str, Iterable[str]] = {"loss": LOSS_FACTS, "advantage": ADVANTAGE_FACTS}
    for part, names in tables.items():
        for candidate in names:
            if letters(candidate) == wanted and f"learner.{part}" != key:
                return f'write {part} = "{candidate}", which is its {part}'
    return ""


# -- what follows from the keys of a topology --------------


def held_back(learner: Any) -> str:
    """The reason why a step with these [learner] keys is computed at once, "" where it may be streamed."""
    facts, advantage = LOSS_FACTS.get(learner.loss), ADVANTAGE_FACTS.get(learner.advantage, GROUP)
    if learner.updates_per_batch > 1 or learner.passes_per_batch > 1:
        return "several updates per batch"
    if facts is not None and facts.chooses:
        return f"{learner.loss} chooses among all tokens of the step"
    if advantage == TOKEN and learner.value.whiten:
        return f"{learner.advantage} is whitened over all tokens of the step"
    if advantage == BATCH:
        return f"{learner.advantage} compares all samples of the step"
    if advantage == SCALE and not scales(learner):
        return f"{learner.advantage} divides by a number of the step, and not all of the loss scales with it"
    return ""


def trains_flat(learner: Any) -> bool:
    """True if a group of equal rewards is trained: nothing is compared within a group."""
    return ADVANTAGE_FACTS.get(learner.advantage, GROUP) in (SAMPLE, TOKEN, EARLIER)


def taught(learner: Any) -> bool:
    facts = LOSS_FACTS.get(learner.loss)
    return learner.teacher_coef > 0 or (facts is not None and facts.teacher)


def scales(learner: Any) -> bool:
    """True if the whole loss is proportional to the advantages, so that they may be divided after the gradient."""
    facts = LOSS_FACTS.get(learner.loss)
    in_loss = learner.kl != "none" and learner.kl_in == "loss"
    others = in_loss or learner.entropy_coef or learner.balance or taught(learner)
    return facts is not None and facts.homogeneous and not others


def needs_proximal(learner: Any) -> bool:
    """True if the log-probabilities before the first of several updates are read."""
    facts = LOSS_FACTS.get(learner.loss)
    if facts is None or facts.proximal or learner.correction != "none":  # a loss of the user's may read them
        return True
    return facts.ratio and learner.ratio == "proximal"
