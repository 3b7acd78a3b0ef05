"""Figures of the answers to a set of prompts: means over prompts, pass@k, maj@k, and how sure each figure is.

Used by a round of validation and by `busrl evaluate`, so that both give the same figures for the same answers. Talks to
nothing; knows nothing of engines, rewards, rounds or files.

- Every prompt has the same weight, however many answers to it were judged; one without a judged answer is left out.
- pass@k is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374), over prompts with k judged answers.
- An interval is of 95 % over prompts, as if they had been drawn from many more; the same answers give the same one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Z = 1.959963984540054  # of the normal distribution: 95 % lie within so many standard deviations
BOOTSTRAP, BOOTSTRAP_SEED, AT_ONCE = 1000, 0, 1 << 21
MOST_TAGS = 32
TAG_KEYS = ("source", "tag")
TAG_LENGTH = 64


@dataclass(frozen=True)
class Judged:
    """A judged answer to the prompt of `line`. `asking`: the number of the request for k answers to which it belongs.
    `answer`: the part of the text that the reward compares, None if there is none."""

    line: int
    asking: int
    reward: float
    answer: str | None = None
    tokens: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A mean over `prompts`, with the ends of its interval."""

    value: float
    low: float
    high: float
    prompts: int

    @property
    def interval(self) -> list[float]:
        return [self.low, self.high]


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k answers is right, from n >= k answers of which c are: 1 - C(n - c, k) / C(n, k)."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} right answers of {n}: needs 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def majority(votes: Iterable[tuple[str | None, bool]]) -> float:
    """1 if the commonest answer is right, 0 if it is wrong or there is none; with a tie the share of right ones among
    the commonest. A completion without an answer has no vote; an answer that was judged both right and wrong counts by
    the share of its right judgements."""
    count: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for answer, is_right in votes:
        if answer is not None:
            count[answer] += 1
            right[answer] += is_right
    most = max(count.values(), default=0)
    best = [answer for answer, number in count.items() if number == most]
    return sum(right[answer] / most for answer in best) / len(best) if best else 0.0


def powers(k: int) -> list[int]:
    """1, 2, 4, ... and k."""
    return sorted({*(1 << i for i in range(k.bit_length())), k})


def figure(of_prompt: Sequence[float], answers: int) -> Figure | None:
    """The mean of one value for each prompt, from so many answers in all; None without any."""
    if not len(of_prompt):
        return None
    values = np.asarray(of_prompt, np.float64)
    bounded = bool(((values >= 0) & (values <= 1)).all())
    low, high = _wilson(values, answers) if bounded else _bootstrap(values)
    return Figure(float(values.mean()), low, high, len(values))


def standard_error(of_prompt: Sequence[float]) -> float | None:
    """The standard error of the mean, as if the prompts had been drawn from many more; None with fewer than two."""
    return float(np.std(of_prompt, ddof=1) / math.sqrt(len(of_prompt))) if len(of_prompt) > 1 else None


def _wilson(values: npt.NDArray[np.float64], answers: int) -> tuple[float, float]:
    """Wilson's score interval (1927) for values within [0, 1]. Its sample size is the number of prompts that would have
    this variance if each were right or wrong: at most the number of answers; where all values are equal, the number of
    prompts."""
    mean, variance = float(values.mean()), float(values.var(ddof=1)) if len(values) > 1 else 0.0
    size = float(len(values))
    if variance > 0:
        size = min(mean * (1 - mean) * size / variance, float(max(answers, len(values))))
    middle = (mean + Z * Z / (2 * size)) / (1 + Z * Z / size)
    half = Z / (1 + Z * Z / size) * math.sqrt(mean * (1 - mean) / size + Z * Z / (4 * size * size))
    return max(0.0, min(middle - half, mean)), min(1.0, max(middle + half, mean))


def _bootstrap(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of the means of resampled prompts (Efron 1979), from a fixed seed."""
    chance, rows = np.random.Generator(np.random.PCG64(BOOTSTRAP_SEED)), max(1, AT_ONCE // len(values))
    means: list[npt.NDArray[np.float64]] = []
    for begun in range(0, BOOTSTRAP, rows):
        drawn = chance.integers(0, len(values), (min(rows, BOOTSTRAP - begun), len(values)))
        means.append(values[drawn].mean(axis=1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Figures:
    """The figures of a set of judged answers, `k` to each request. `solved`: the least reward of a right answer;
    `votes`: whether the reward takes an answer from a completion."""

    judged: Sequence[Judged]
    k: int = 1
    solved: float = 1.0
    votes: bool = False

    def of_prompt(self, value: str = "reward") -> list[float]:
        """The mean of a field over the answers to each prompt."""
        return _means((answer.line, float(getattr(answer, value))) for answer in self.judged)

    def mean(self, value: str = "reward") -> float | None:
        """The mean over prompts; None without any: a set of no answers has no mean, and not the mean 0."""
        return float(np.mean(means)) if (means := self.of_prompt(value)) else None

    def parts(self) -> dict[str, float]:
        names = dict.fromkeys(name for answer in self.judged for name in answer.parts)
        return {
            name: float(np.mean(_means((at.line, at.parts[name]) for at in self.judged if name in at.parts)))
            for name in names
        }

    def by_name(self) -> dict[str, Figure]:
        """reward, avg@k (the same, under the name it has where k > 1), pass@1, pass@2, ..., pass@k, maj@k."""
        figures = {"reward": figure(self.of_prompt(), len(self.judged))}
        if self.k > 1:
            figures[f"avg@{self.k}"] = figures["reward"]
        figures |= {f"pass@{k}": figure(self._passed(k), len(self.judged)) for k in powers(self.k)}
        if self.k > 1 and self.votes:
            figures[f"maj@{self.k}"] = figure(self._majorities(), len(self.judged))
        return {name: entry for name, entry in figures.items() if entry is not None}

    def among(self, lines: frozenset[int]) -> Figures:
        return Figures([answer for answer in self.judged if answer.line in lines], self.k, self.solved, self.votes)

    def record(self) -> dict[str, Any]:
        """The figures as the keys of a line of validation.jsonl."""
        figures = self.by_name()
        values = {f"val/{name}": entry.value for name, entry in figures.items() if name != "reward"}
        return {
            "val/reward": self.mean(), **values, "prompts": len(self.of_prompt()), "samples": len(self.judged),
            "intervals": {name: entry.interval for name, entry in figures.items()},
        }

    def _passed(self, k: int) -> list[float]:
        """pass@k of each prompt with at least k judged answers."""
        by_line: dict[int, list[bool]] = defaultdict(list)
        for answer in self.judged:
            by_line[answer.line].append(answer.reward >= self.solved)
        return [pass_at_k(len(right), sum(right), k) for right in by_line.values() if len(right) >= k]

    def _majorities(self) -> list[float]:
        """The mean of the votes of a prompt, one vote for each request for k answers."""
        votes: dict[tuple[int, int], list[tuple[str | None, bool]]] = defaultdict(list)
        for entry in self.judged:
            votes[entry.line, entry.asking].append((entry.answer, entry.reward >= self.solved))
        return _means((line, majority(ballots)) for (line, _), ballots in votes.items())


def _means(values: Iterable[tuple[int, float]]) -> list[float]:
    of_prompt: dict[int, list[float]] = defaultdict(list)
    for line, value in values:
        of_prompt[line].append(value)
    return [float(np.mean(numbers)) for numbers in of_prompt.values()]


def tag_of(record: Mapping[str, Any], key: str) -> str:
    """The tag of a prompt: the value of `key` in its line; without a key, that of `source` or `tag`; "" if it has
    none."""
    value = next((record[name] for name in ([key] if key else TAG_KEYS) if name in record), None)
    return str(value)[:TAG_LENGTH] if isinstance(value, (str, int, float)) else ""


def tags_of(records: Mapping[int, Mapping[str, Any]], key: str) -> dict[int, str]:
    return {line: tag for line, record in records.items() if (tag := tag_of(record, key))}


def by_tag(figures: Figures, tags: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """The figures of each tag, the commonest tags first, `MOST_TAGS` at most. `tags`: the tags by line."""
    of_tag: dict[str, set[int]] = defaultdict(set)
    for line in {answer.line for answer in figures.judged}:
        if tags.get(line):
            of_tag[tags[line]].add(line)
    commonest = sorted(of_tag, key=lambda tag: (-len(of_tag[tag]), tag))[:MOST_TAGS]
    return {tag: figures.among(frozenset(of_tag[tag])).record() for tag in commonest}
