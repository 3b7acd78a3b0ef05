"""The prompt files that a topology names: their lines, the trace that some runs need, and the limit on prompts.

Reads files line by line, without torch; the tokenizer is `prompt_tokens`'s. Findings go to a `Report`; changes nothing.

- Every broken line has its own file:line; a missing file is reported at the key that names it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from busrl.data import pretrained, trace
from busrl.data.prompts import Scan, scan
from busrl.data.sources import PARQUET
from busrl.errors import DataError, Problem
from busrl.preflight.findings import Finding, Report
from busrl.preflight.model_folders import task_of
from busrl.preflight.prompt_tokens import UNKNOWN, Limit, limit_of
from busrl.states import TINY
from busrl.topology import reader
from busrl.topology.rewards import EXACT_MATCH, REWARD_KINDS
from busrl.topology.schema import Topology

TINY_LINE_BYTES = 512  # no line of a tiny task is longer; they are made on first use


@dataclass(frozen=True)
class Lines:
    """Size of a prompt file: how many lines, and bytes of the longest; as it is where a file cannot be read."""

    count: int = 0
    longest: int = TINY_LINE_BYTES


class PromptFiles:
    """The prompt files of one topology; `lines` reads one of them, and the other methods look at what was read."""

    def __init__(self, topology: Topology, report: Report) -> None:
        self._t, self._report = topology, report
        self._scans: dict[str, Scan] = {}  # of the files without a problem, by their keys

    def lines(self, key: str, path: str) -> Lines | None:
        """Read a prompt file; None where none is named."""
        if not path or not self._report.sound(key):
            return None
        if path.startswith(TINY):
            return self._of_task(key, path)
        if path.endswith(PARQUET) or Path(path).is_dir():
            what = "a folder" if Path(path).is_dir() else "a Parquet file"
            remedy = f"write [[data.source]] with path = {reader.show(path)} in the place of train"
            self._report.add(key, f"{what} is no file of lines", remedy)
            return Lines()
        try:
            result = scan(path, self._t.data.prompt_key, answer_key(self._t) if compares(self._t) else "")
        except DataError as error:
            rule, _, remedy = str(error).removeprefix(f"{path}: ").rpartition(": ")
            self._report.add(key, rule, pretrained.of_hub(self._t.source, path, pretrained.DATA_SET) or remedy)
            return Lines()
        if result.absent:
            self._report.findings += _absent(result, key)
            return Lines()
        self._look_at(key, result)
        return Lines(result.count, result.longest_line)

    def lines_of_set(self, index: int) -> Lines:
        """Read the prompts of a [[validation.set]]; what has a problem counts as a short file."""
        if not self._report.sound("validation.set"):
            return Lines()
        return self.lines(f"validation.set.{index}.data", self._t.validation.set[index].data) or Lines()

    def _of_task(self, key: str, path: str) -> Lines:
        """Take the size from the recipe, so that it does not depend on whether the task was made already."""
        task = task_of(self._report, key, path)
        if task is None:
            return Lines()
        return Lines(int(task.train_prompts if key == "data.train" else task.validation_prompts))

    def _look_at(self, key: str, result: Scan) -> None:
        """Report the broken lines of a file, and messages where prompts are plain text."""
        path = str(result.path)
        for problem in result.problems:
            self._report.add_problem(key, problem)
        if not result.problems:
            self._scans[key] = result
        if result.more:
            rest = ", ".join(f"{number} x {rule}" for rule, number in result.more)
            text = f"and {sum(number for _, number in result.more)} more broken lines ({rest})"
            self._report.add_problem(key, Problem(path, "", text, "correct those above first"))
        if result.chats and self._t.data.template == "none" and not self._t.scripted:
            rule = f"{result.chats} of the {result.count} prompts of {path} are lists of messages"
            self._report.add("data.template", rule, 'set data.template = "chat"')

    def check_trace(self) -> None:
        """Require lengths for scripted answers, and times for prompts that arrive."""
        path = self._t.data.train
        if not (self._t.scripted or self._t.data.arrivals) or self._report.blames("data.train"):
            return
        if path.startswith(TINY):
            rule = "a trace is needed: lines with prompt, answer and lengths"
            self._report.add("data.train", rule, "give a trace file; busrl.data.trace makes one")
            return
        try:
            times = [task.arrival_s for task in trace.read(path, self._t.data.prompt_key)]
        except DataError as error:  # "file:line: rule; remedy", or "rule: remedy" after the place
            place, _, rest = str(error).partition(": ")
            rule, _, remedy = rest.rpartition("; " if "; " in rest else ": ")
            why = 'engine = "mock"' if self._t.scripted else "data.arrivals"
            self._report.add_problem("data.train", Problem(place, "", rule, f"{remedy} ({why} needs a trace)"))
            return
        if self._t.data.arrivals:
            self._check_times(path, times)

    def _check_times(self, path: str, times: list[float | None]) -> None:
        """Report the first line whose prompt arrives before that of the line above, or at no time."""
        late = 0.0
        for number, time in enumerate(times, 1):
            if time is None or time < late:
                rule = "no arrival_s" if time is None else f"arrival_s = {time}, after {late} on the line before"
                problem = Problem(f"{path}:{number}", "", rule, "give every line one, ascending")
                self._report.add_problem("data.train", problem)
                return
            late = time

    def limit(self, context: int) -> Limit:
        """The limit on prompts, from the tokens of all files; `context`: tokens that the model takes, 0 if unknown."""
        keys = ("data.train", "data.template", "model.path")
        sound = self._report.sound(*keys, "generation.max_prompt_tokens", "generation.max_new_tokens")
        if sound and self._t.data.train and not self._report.blames(*keys[1:]):
            limit = limit_of(self._t, self._scans, context)
            self._report.findings += limit.findings
            return limit
        setting = self._t.generation.max_prompt_tokens
        return Limit(setting if isinstance(setting, int) else UNKNOWN)


def _absent(result: Scan, key: str) -> Iterator[Finding]:
    """Report a key that no line of a file has once, with the keys that are there."""
    for column, absent in result.absent.items():
        remedy = f"set it to one of them, or correct {result.path}"
        if near := difflib.get_close_matches(absent, result.keys, n=1):
            remedy = f"did you mean {reader.show(near[0])}?"
        there = ", ".join(result.keys) or "none"
        rule = f"the key {absent!r} is missing in all {result.count} lines of {result.path}; they have {there}"
        yield Finding((f"data.{column}", key), rule, remedy, value=f"data.{column} = {reader.show(absent)}")


def answer_key(topology: Topology) -> str:
    return topology.reward.answer_key or topology.data.answer_key


def compares(topology: Topology) -> bool:
    """Tell whether every line needs a right answer; foreign code reports itself what it lacks."""
    reward, key = topology.reward, answer_key(topology)
    if not reward.part:
        return reward.kind == EXACT_MATCH and not reward.function
    comparing = [name for name, kind in REWARD_KINDS.items() if kind.finder]
    return any(part.kind in comparing and part.answer_key == key for part in reward.part)


def longest_line(path: str) -> tuple[int, int]:
    """Number, from 1, and bytes of the longest line of a file."""
    with open(path, "rb") as file:
        sizes = ((len(line.removesuffix(b"\n")), number) for number, line in enumerate(file, 1))
        size, number = max(sizes, default=(0, 0))
    return number, size
