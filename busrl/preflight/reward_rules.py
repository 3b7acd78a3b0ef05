"""Rules about rewards: [reward], its parts, and the packages and folders that kinds of parts need.

Looks at settings, at which packages are there (without importing them), at the environment and at model folders.

- A key that the kind of its part does not read is refused: it would do nothing.
- What costs every sample of a run is refused before it starts; what costs a few is the run's to report.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from busrl.data import pretrained
from busrl.preflight import unfit_models
from busrl.preflight.findings import Check, Clash, Finding, by_path, clashes, is_url
from busrl.preflight.process_rules import PLAYS
from busrl.topology.declare import items
from busrl.topology.reader import show
from busrl.topology.rewards import EXACT_MATCH, PYTHON, RETURNED, REWARD_KINDS, RewardKind, RewardPart
from busrl.topology.schema import Topology

TABLE = (
    Clash(("reward.function", "reward.kind"), lambda t: t.reward.function and t.reward.kind == EXACT_MATCH,
          'exact_match calls no function; set kind = "python", or remove function'),
    Clash(("reward.extract", "reward.kind"), lambda t: t.reward.extract and t.reward.kind == PYTHON,
          "only exact_match extracts an answer; remove it", warning=True),
    Clash(("reward.function",), lambda t: t.reward.function and t.reward.part,
          'a reward has a function or parts; write kind = "python" and function into a [[reward.part]]',
          hidden=("reward.part",)),
    Clash(("reward.extract",), lambda t: t.reward.extract and t.reward.part,
          "a reward with parts compares nothing itself; write extract into the [[reward.part]] that compares",
          hidden=("reward.part",)),
    Clash(("reward.truncated", "reward.truncated_penalty"),
          lambda t: t.reward.truncated != "reward" and t.reward.truncated_penalty,
          "a cut answer is worth either a fixed number or its reward less a penalty; remove one of them"),
    Clash(("reward.overlong_tokens", "generation.max_new_tokens"),
          lambda t: t.reward.overlong_tokens > t.generation.max_new_tokens,
          "an answer has at most generation.max_new_tokens tokens, and the last overlong_tokens of them cost; "
          "give fewer, for example a quarter of the limit"),
    Clash(("reward.overlong_tokens", "reward.overlong_penalty"),
          lambda t: t.reward.overlong_tokens and t.reward.overlong_penalty == 0,
          "a penalty of 0 changes no reward; set overlong_penalty, or remove overlong_tokens", warning=True),
    Clash(("reward.overlong_penalty",), lambda t: t.reward.overlong_penalty != 1 and t.reward.overlong_tokens == 0,
          "it is used with overlong_tokens only, which is 0; remove it, or set overlong_tokens",
          hidden=("reward.overlong_tokens",), warning=True),
    Clash(("reward.overlong_tokens", "reward.truncated_penalty"),
          lambda t: t.reward.overlong_tokens and t.reward.truncated_penalty,
          "an answer that the limit cut would be punished twice; remove one of them", warning=True),
)
BY_EVERY_KIND = ("kind", "name", "weight", "timeout_s")
FILLED_IN = ("answer_key",)  # of a checked topology, from other tables
CLASSIFIER = "ForSequenceClassification"
BOX_S = 20.0  # of a call that judges code, besides the code's own time


def _without_parts(t: Topology) -> Iterator[Finding]:
    if t.reward.kind == PYTHON and not t.reward.part:
        keys = ("reward.function", "reward.kind")
        yield from by_path(keys, t.reward.function, _example(REWARD_KINDS[PYTHON]), 'kind = "python"')
    yield from _expression("reward.extract", t.reward.extract)


def _parts(t: Topology) -> Iterator[Finding]:
    names: dict[str, int] = {}
    for index, part in enumerate(t.reward.part):
        at = f"reward.part.{index}"
        if part.name in names:
            rule = f"the part before it (number {names[part.name] + 1}) has the name {part.name!r} too"
            yield Finding((f"{at}.name",), rule, 'give each a name of its own, for example name = "style"')
        names.setdefault(part.name, index)
        if part.kind not in REWARD_KINDS:  # reported as what it is
            continue
        if not re.fullmatch(r"[\w.-]{1,64}", part.name):
            rule = "a name is 1 to 64 letters, digits, dots, dashes or underscores"
            yield Finding((f"{at}.name",), rule, 'for example name = "style"')
        yield from _keys(t, at, part)
    if t.reward.part and not any(part.weight for part in t.reward.part):
        yield Finding(("reward.part.0.weight",), "every part has weight 0: all rewards would be 0", "give one a weight")


def _keys(t: Topology, at: str, part: RewardPart) -> Iterator[Finding]:
    kind = REWARD_KINDS[part.kind]
    for item in items(RewardPart).values():
        idle = item.name not in (*kind.keys, *BY_EVERY_KIND, *FILLED_IN)
        if idle and getattr(part, item.name) != item.default:
            keys = ", ".join(kind.keys) or "nothing of its own"
            rule = f"a part of kind {part.kind} does not read it, it reads {keys}"
            yield Finding((f"{at}.{item.name}", f"{at}.kind"), rule, "remove it, or change kind")
    if kind.needs and not getattr(part, kind.needs):
        yield Finding((f"{at}.{kind.needs}", f"{at}.kind"), f"a part of kind {part.kind} needs it", _example(kind))
    elif part.kind == PYTHON:
        yield from by_path((f"{at}.function",), part.function, _example(kind))
    elif part.kind == RETURNED and not t.has_callers:
        yield Finding((f"{at}.kind", "process"), "no episode returns a reward", PLAYS)
    for name in ("extract", "pattern", "verdict"):
        yield from _expression(f"{at}.{name}", getattr(part, name))
    if part.verdict and _groups(part.verdict) == 0:
        rule = "it has no group: group 1 is the number, yes or no"
        yield Finding((f"{at}.verdict",), rule, r"for example 'Score: *([0-9.]+)'")
    if part.base_url and not is_url(part.base_url):
        yield Finding((f"{at}.base_url",), "is not the address of an endpoint", "for example http://127.0.0.1:8000/v1")
    if part.template and "{completion}" not in part.template:
        yield Finding((f"{at}.template",), "the judge would not see the answer", "write {completion} where it belongs")
    if part.kind == "code" and part.timeout_s < part.total_s + BOX_S:
        rule = f"all runs of an answer may take total_s = {part.total_s:g}, and making their boxes {BOX_S:g} more"
        yield Finding((f"{at}.timeout_s", f"{at}.total_s"), rule, f"at least {part.total_s + BOX_S:g}, or less total_s")


def _example(kind: RewardKind) -> str:
    return f"for example {kind.needs} = {kind.example}"


def _expression(key: str, text: str) -> Iterator[Finding]:
    try:
        re.compile(text)
    except re.error as error:
        yield Finding((key,), f"not a regular expression: {error}", "quote it as '...' in TOML")


def _groups(text: str) -> int:
    try:
        return re.compile(text).groups
    except re.error:
        return 1  # reported as what it is


def _surroundings(t: Topology) -> Iterator[Finding]:
    """Report what parts lack outside of the topology: packages, variables of the environment, model folders."""
    for index, part in enumerate(t.reward.part):
        at = f"reward.part.{index}"
        kind = REWARD_KINDS.get(part.kind)
        if kind and kind.package and importlib.util.find_spec(kind.package) is None:
            rule = f"kind = {show(part.kind)} needs the package {kind.package}, which is not installed"
            yield Finding((f"{at}.kind",), rule, f"pip install '{kind.extra}'")
        if part.api_key_env and not os.environ.get(part.api_key_env):
            rule = f"${part.api_key_env} is not set in this environment"
            yield Finding((f"{at}.api_key_env",), rule, "export it, or remove api_key_env")
        if kind and kind.has_model and part.path:
            yield from _classifier(t, at, part)


def _classifier(t: Topology, at: str, part: RewardPart) -> Iterator[Finding]:
    folder = Path(part.path)
    config = pretrained.read_json(folder / "config.json")
    remedy = "give a Hugging Face folder with config.json, a tokenizer and weights of a sequence classifier"
    if not folder.is_dir():
        yield Finding((f"{at}.path",), "no such folder", remedy)
    elif not isinstance(config, dict):
        yield Finding((f"{at}.path",), "no config.json in this folder, or it is no JSON object", remedy)
    else:
        kinds = [str(kind) for kind in config.get("architectures") or ()]
        if not any(kind.endswith(CLASSIFIER) for kind in kinds):
            rule = f"its architecture is {', '.join(kinds) or 'not named'}, and a reward model is a ...{CLASSIFIER}"
            yield Finding((f"{at}.path",), rule, remedy)
        if fault := unfit_models.weight_fault(folder):
            yield Finding((f"{at}.path",), fault[1], fault[2], place=fault[0])
        context = pretrained.context_of(config)
        if context and t.longest > context:
            rule = f"it takes {context} tokens, a prompt and its answer may have {t.longest}"
            remedy = "of a longer one it sees the last tokens only"
            yield Finding((f"{at}.path",), rule, remedy, warning=True)


CHECKS: tuple[Check, ...] = (lambda t: clashes(t, TABLE), _without_parts, _parts, _surroundings)
