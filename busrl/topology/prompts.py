"""The tables about prompts: [data], [[data.source]], [validation] and [[validation.set]], and what follows from them.

A part of `schema`; `busrl.data.sources` reads what these tables name.

- What can be read for training can be read for validation: the keys of `Rows` mean the same in each of these tables.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from busrl.topology.declare import REQUIRED, Rule, Table, key

# -- where rows come from, and which of them are prompts -----


class Rows(Table):
    """Keys by which [[data.source]], [validation] and [[validation.set]] choose the rows that become prompts."""

    format: str = key("auto", "what the file or folder is; auto = by its name, or by function or tasks",
                      choices=("auto", "jsonl", "parquet", "hf", "function", "reasoning_gym", "environment"))
    split: str = key("", "hf: which split of the folder; empty = train, for validation test")
    function: str = key("", "instead of a file: package.module:function or file.py:function, which yields maps")
    tasks: dict[str, float] = field(default_factory=dict, metadata={"rule": Rule(
        "instead of a file: tasks of reasoning-gym with their weights: { gsm_symbolic = 1.0 }; seeded by run.seed, "
        "for validation by one that no training has")})
    task_options: dict[str, dict[str, Any]] = field(default_factory=dict, metadata={"rule": Rule(
        "options of a task, as reasoning-gym names them: { chain_sum = { max_terms = 3 } }")})
    size: int = key(0, "rows that are kept at most, 0 = all; of tasks and environments the number that is made", low=0,
                    high=10**8)
    prompt_key: str = key("", "column of the prompt; empty = data.prompt_key")
    prompt_text: str = key("", 'the prompt as a text with columns in it, for example "{question} Think first."')
    answer_key: str = key("", "column of the right answer; empty = data.answer_key")
    tag: str = key("", "a name that every line without one gets as its key tag; empty = that of file or task")
    where: str = key("", "rows to keep: conditions on columns, 'pass_rate >= 0.1 and level != \"hard\"'")
    filter: str = key("", "rows to keep: package.module:function or file.py:function, record -> bool")
    dedupe: bool = key(False, "leave out a prompt that a row before had, in this source or an earlier one")
    min_prompt_tokens: int = key(0, "leave out shorter prompts", low=0, high=1 << 20)
    max_prompt_tokens: int = key(0, "no prompt has more tokens; 0 = no limit", low=0, high=1 << 20)
    too_long: str = key("drop", "a longer one is left out, or its (last) text loses its beginning or its end",
                        choices=("drop", "truncate_left", "truncate_right"))


class _Weighted(Table):
    path: str = key("", "a JSONL or Parquet file, the folder of a data set, or an agent's environment", path=True)
    weight: float = key(1.0, "its share of the draws, in relation to the other sources", above=0, high=1e6)


class DataSource(Rows, _Weighted):
    """[[data.source]]: prompts of one origin, made into lines once at the start; several are mixed by weight."""


class Skip(Table):
    """[data.skip]: prompts that are left out for a while by how often the run itself answered them right."""

    max_pass_rate: float = key(0.0, "a prompt answered right this often or more is left out; 0 = none is",
                              low=0, high=1)
    min_pass_rate: float = key(0.0, "a prompt answered right less often is left out; 0 = none is", low=0, high=1)
    after: int = key(0, "answers that it is judged by: those of its newest groups; 0 = its newest group alone",
                     low=0, high=1 << 20)
    rest: int = key(3, "passes over the prompts until it is tried again; 0 = never", low=0, high=1 << 20)

    @property
    def on(self) -> bool:
        return self.max_pass_rate > 0 or self.min_pass_rate > 0


class Data(Table):
    """[data]: prompts, one JSON object per line."""

    train: str = key(REQUIRED, "JSONL file of training prompts, tiny:sort, or the environment of an agent, whose "
                     "seeds are made", path=True, unless="source")
    source: tuple[DataSource, ...] = ()
    prompt_key: str = key("prompt", "the key of a line that holds the prompt")
    answer_key: str = key("answer", "the key of a line that holds the right answer")
    shuffle: bool = key(True, "draw the lines of each epoch in an order given by run.seed")
    arrivals: bool = key(False, "an open stream: a prompt is there arrival_s seconds (of its line) after the start")
    template: str = key("none", "the prompt as it stands, or by the model's chat template: as a user turn, or as the "
                        "messages that it is a list of", choices=("none", "chat"))
    system: str = key("", "template = chat: the system message of every prompt that has none of its own")
    tools_key: str = key("", "template = chat: the key of a line that holds the tools that the template offers")
    template_arguments: dict[str, Any] = field(default_factory=dict, metadata={"rule": Rule(
        "template = chat: further arguments of the template: { enable_thinking = false }")})
    skip: Skip = field(default_factory=Skip)


# -- measuring -----


class _Named(Table):
    name: str = key(REQUIRED, "its name in validation.jsonl and on the screen")
    data: str = key("", "its prompts: a JSONL or Parquet file, the folder of a data set, or tiny:sort", path=True)
    samples: int | str = key("auto", "prompts a round; all (or 0) = every line of the file once",
                             words=("auto", "all"), low=0, high=1 << 24)
    k: int | str = key("auto", "answers to each prompt", words=("auto",), low=1, high=4096)
    temperature: float | str = key("auto", "0 = greedy", words=("auto",), low=0, high=10)
    top_p: float | str = key("auto", "nucleus sampling", words=("auto",), above=0, high=1)
    max_new_tokens: int | str = key("auto", "an answer is cut after this many tokens", words=("auto",), low=0,
                                    high=1 << 20)
    every_steps: int | str = key("auto", "a round every so many steps; 0 = never during the run", words=("auto",),
                                 low=0)


class ValidationSet(Rows, _Named):
    """[[validation.set]]: one more measurement, by name; k, samples and the like are as in [validation] if left out."""


class _Measured(Table):
    data: str = key("", "validation prompts: a JSONL or Parquet file, the folder of a data set, or tiny:sort; empty = "
                    "none but those of sets", path=True)
    every: int = key(0, "a round every so many steps (of n_min groups); 0 = only before and after the run",
                     low=0)
    samples: int | str = key(512, "prompts a round, spread over the file; its prompts count the same; all (or 0) = "
                             "every line once", words=("all",), low=0, high=1 << 24)
    k: int = key(1, "answers to each prompt: for pass@k and maj@k", low=1, high=4096)
    temperature: float = key(1.0, "0 = greedy", low=0, high=10)
    top_p: float = key(1.0, "nucleus sampling", above=0, high=1)
    max_new_tokens: int = key(0, "an answer is cut after this many tokens; 0 = generation.max_new_tokens", low=0,
                              high=1 << 20)
    solved: float = key(1.0, "an answer with at least this reward counts as right in pass@k and maj@k")
    tag_key: str = key("", "key of a line by whose values figures are given too; empty = source or tag, where lines "
                           "have it")
    at_start: bool = key(True, "one round before the first step")
    at_end: bool = key(True, "one round after the last step")
    mode: str = key("hold", "a round pins the version (hold), has rollouts that keep it (dedicated), or lets it "
                    "move (free: metric mixed)", choices=("hold", "dedicated", "free"))


class Validation(Rows, _Measured):
    """[validation]: measuring without training; on when it or a set names prompts: a validator is started then."""

    set: tuple[ValidationSet, ...] = ()

    @property
    def names_prompts(self) -> bool:
        return bool(self.data or self.function or self.tasks or self.set)


# -- what follows from them -----


class AskedSet(Table):
    """The questions of a round to one set: [validation] itself (name "") or a [[validation.set]], every key settled.

    A round has the answers of all sets one behind the other: this one's from place `first` on, k to each prompt.
    """

    name: str
    data: str
    lines: int  # of the file
    prompts: int  # asked in a round
    k: int
    temperature: float
    top_p: float
    max_new_tokens: int
    every: int
    first: int

    @property
    def answers(self) -> int:
        return self.prompts * self.k

    @property
    def title(self) -> str:
        return self.name or "validation"


class SourceLines(Table):
    """The place of a [[data.source]]'s lines in data.train, and its share of every 1000 draws."""

    name: str
    start: int  # line, from 0
    count: int
    share: int
    text: str  # how many rows were kept, and why the others were not


class MadeSet(Table):
    """Prompts of validation that were made of other rows: of which set ("" is [validation]), by which settings and of
    files of which age, and how many rows were kept."""

    name: str
    key: str
    text: str
