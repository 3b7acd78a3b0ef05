"""The tables about rewards, [reward] and [[reward.part]], and the table of all kinds of rewards.

A part of `schema`. The kinds are read by the checks, the trial before a run, and `busrl.rewards.pool`, whose children
import a kind's module. Imports nothing of `busrl.rewards`.

- A kind of reward is one row of `REWARD_KINDS`: what else depends on the kind is asked there.
- A key of [[reward.part]] reaches the children as the field of that name in `busrl.rewards.base.Setup`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from busrl.topology.declare import REQUIRED, Table, key

EXACT_MATCH, PYTHON = "exact_match", "python"  # what [reward] is without a function, and with one
RETURNED = "agent"  # the kind of reward that the episode of an agent returns


@dataclass(frozen=True)
class RewardKind:
    """A kind of reward: what makes its function from a `Setup`, as "module:name" with the module below `busrl`, and the
    keys that it reads of a [[reward.part]] besides name, weight and timeout_s.

    `needs`: the key that it cannot do without, `example`: a value of it. `timeout_s`: where reward.timeout_s does not
    fit it. `package`: one that it imports, `extra`: what installs it. `finder`: makes from `extract` the function that
    finds the answer in a completion (as "module:name"); `without_extract`: so without one too.
    """

    maker: str
    keys: tuple[str, ...] = ()
    needs: str = ""
    example: str = ""
    timeout_s: float = 0.0
    package: str = ""
    extra: str = ""
    finder: str = ""
    without_extract: bool = True
    alone: bool = False  # reward.kind may name it, without a [[reward.part]]
    with_ids: bool = False  # reads more than the text: token ids, and the episode
    one_child: bool = False  # a reward process needs one child for it, which has a model or makes many calls at a time
    has_model: bool = False
    is_tried: bool = False  # runs code of others: no run starts before it was tried


COMPARED = ("extract", "answer_key")
ANSWER = "rewards.base:answer_finder"
REWARD_KINDS: dict[str, RewardKind] = {
    EXACT_MATCH: RewardKind("rewards.base:ExactMatch", COMPARED, finder=ANSWER, alone=True),
    "numeric": RewardKind("rewards.kinds:Numeric", ("tolerance", *COMPARED), finder="rewards.kinds:number_finder"),
    "regex": RewardKind("rewards.kinds:Regex", ("pattern",), "pattern", "'^<think>'"),
    # What math-verify finds in a whole completion is no text that could be compared with another.
    "math": RewardKind("rewards.kinds:Math", COMPARED, package="math_verify", extra="busrl[rewards]", finder=ANSWER,
                       without_extract=False),
    "gym": RewardKind("rewards.kinds:Gym", COMPARED, package="reasoning_gym", extra="busrl[rewards]",
                      finder="rewards.kinds:gym_finder"),
    PYTHON: RewardKind("rewards.base:user_function", ("function", "batch"), "function", '"rewards.py:score"',
                         alone=True, with_ids=True, is_tried=True),
    RETURNED: RewardKind("rewards.kinds:Returned", alone=True, with_ids=True),
    "model": RewardKind("rewards.model:Scorer", ("path", "batch_tokens"), "path", '"/models/my-reward-model"',
                        timeout_s=120.0, package="transformers", extra="busrl[train]", one_child=True, has_model=True),
    "judge": RewardKind("rewards.judge:Judge",
                        ("base_url", "model", "template", "verdict", "max_tokens", "concurrency", "retries",
                         "api_key_env", "answer_key"), "base_url", '"http://127.0.0.1:8000/v1"', timeout_s=60.0,
                        package="aiohttp", extra="busrl[rewards]", one_child=True),
    "code": RewardKind("rewards.box.programs:Code",
                       ("tests", "entry", "share", "extract", "run_s", "total_s", "cpu_s", "run_mb", "at_once",
                        "trust"), timeout_s=60.0, one_child=True, is_tried=True),
}


class RewardPart(Table):
    """[[reward.part]]: what an answer is judged by; the reward is the weighted sum of all parts: docs/rewards.md."""

    kind: str = key(REQUIRED, "what judges", choices=tuple(REWARD_KINDS))
    name: str = key("", "its name in metrics and messages; empty = the kind")
    weight: float = key(1.0, "what it is multiplied by in the sum; 0 = only logged")
    timeout_s: float = key(0.0, "a call that takes longer is ended, the sample ends as H; 0 = reward.timeout_s, for a "
                                "model 120, for a judge 60 a try, for code 60", low=0)
    answer_key: str = key("", "key of the right answer; empty = reward.answer_key")
    extract: str = key("", "exact_match, numeric, math, gym: as reward.extract; code: the program, empty = the last "
                           "block between three backticks")
    pattern: str = key("", "regex: 1 where this regular expression is found in the answer, else 0")
    tolerance: float = key(1e-6, "numeric: how far the last number may be from the right one", low=0)
    function: str = key("", "python: package.module:function or file.py:function, plain or async")
    batch: bool = key(False, "python: the function takes lists, of up to 64 answers, and returns a list")
    path: str = key("", "model: a Hugging Face folder of a sequence classifier; its first output is the reward",
                    path=True)
    batch_tokens: int = key(16384, "model: padded tokens of a forward pass", low=1, high=1 << 24)
    base_url: str = key("", "judge: an OpenAI-compatible API, for example http://127.0.0.1:8000/v1")
    model: str = key("", "judge: the model's name there")
    template: str = key("", "judge: what it is asked, with {prompt}, {completion}, {answer} or any key of the line; "
                            "empty = busrl's own")
    verdict: str = key("", "judge: regular expression; group 1 of its last match is a number, yes or no; empty = a "
                           "word after VERDICT:")
    max_tokens: int = key(1024, "judge: tokens of its answer", low=1, high=1 << 20)
    concurrency: int = key(16, "judge: requests at the same time", low=1, high=4096)
    retries: int = key(4, "judge: tries after the first that failed; then the sample is drawn again", low=0, high=100)
    api_key_env: str = key("", "judge: environment variable that holds the key; empty = no key is sent")
    tests: str = key("tests", "code: key of the line's tests: asserts, or inputs and outputs")
    entry: str = key("entry_point", "code: key with the name of the function that check(candidate) of the tests gets")
    share: bool = key(False, "code: the share of tests that pass; else 1 for all of them, 0 for fewer")
    run_s: float = key(5.0, "code: seconds of one run, of one input or of all asserts; then it has failed", above=0)
    total_s: float = key(30.0, "code: seconds of all runs of an answer; tests that are left have failed", above=0)
    cpu_s: int = key(10, "code: processor seconds of each process of a run", low=1, high=86400)
    run_mb: int = key(512, "code: address space of each process of a run in MiB", low=32, high=1 << 24)
    at_once: int = key(0, "code: answers that are judged at the same time; 0 = one for each core", low=0, high=4096)
    trust: bool = key(False, "code: run answers without a box, as this user, where the kernel has none")


class Reward(Table):
    """[reward]: what an answer is worth."""

    kind: str = key("exact_match", "compare with the answer, call a Python function (so where one is given), or "
                    "take what an agent's episode returned (so where there are agents)",
                    choices=tuple(name for name, kind in REWARD_KINDS.items() if kind.alone))
    function: str = key("", "kind = python: package.module:function or file.py:function")
    extract: str = key("", "exact_match: regular expression; its last match (group 1, or what follows) is the answer")
    answer_key: str = key("", "key of the right answer; empty = data.answer_key")
    timeout_s: float = key(10.0, "a single call that takes longer is killed, the sample ends as H", above=0)
    workers: int = key(1, "child processes that call the function (or a part), per reward process", low=1, high=256)
    memory_mb: int = key(0, "address space of each of them in MiB, but that of a model; a call that needs more raises "
                            "MemoryError; 0 = no limit", low=0, high=1 << 24)
    truncated: float | str = key("reward", "what a training answer is worth that the limit cut: its reward, this, or "
                                 "(mask) its reward, and none of its tokens is trained", words=("reward", "mask"))
    truncated_penalty: float = key(0.0, "subtracted from the reward of a training answer that the limit cut", low=0)
    overlong_tokens: int = key(0, "a training answer is worth less over the last so many tokens before the limit; "
                                  "0 = off", low=0, high=1 << 20)
    overlong_penalty: float = key(1.0, "by so much at the limit, in proportion before it", low=0)
    part: tuple[RewardPart, ...] = ()

    @property
    def of_episodes(self) -> bool:
        """Tell whether the reward needs what an episode returns, which a single answer does not have."""
        return RETURNED in (self.kind, *(part.kind for part in self.part))

    @property
    def finder(self) -> tuple[str, str] | None:
        """For maj@k the "module:name" of what makes the function that finds the answer in a completion, and its
        `extract`; None where nothing compares answers."""
        parts: tuple[Any, ...] = self.part or (self,)
        kinds = ((REWARD_KINDS[part.kind], part.extract) for part in parts if part.kind in REWARD_KINDS)
        finders = ((kind.finder, extract) for kind, extract in kinds if extract or kind.without_extract)
        return next((finder for finder in finders if finder[0]), None)
