"""The story of a run as its files tell it: reward, speed, waste, validation, one sample, and what became of every one.

Reads metrics.jsonl, validation.jsonl, samples.jsonl and the table of fates; changes nothing. Knows nothing of rings,
the bus or terminals. From the first step ever, whoever started the run how often, so a resumed run has one story.

- Bounded: the first line and the end of each file are read, the table of fates in blocks.
- Torn, damaged and foreign lines are left out; a number that is none is not known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from busrl.launch.printable import safe
from busrl.ledger.fates import Fate, name_of
from busrl.ledger.trainlog import of_step
from busrl.paths import RunPaths

TAIL_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
RECENT = 10  # steps that a present value is the mean of
PACE_S = 20.0  # a speed is that of the newest steps which together took so long
BLOCK = 1 << 20
PROMPT, ANSWER = 90, 120
WORDS = {
    Fate.DISPATCHED: "open",
    Fate.FLAT: "flat (all rewards of the group equal)",
    Fate.OLD: "too old",
    Fate.INCOMPLETE: "of groups that lost members",
    Fate.LONG: "with a prompt that is too long",
    Fate.POISON: "given up after killing their process twice",
    Fate.REWARD_RAISED: "whose reward raised",
    Fate.REWARD_HUNG: "whose reward hung",
}


def is_step(value: object) -> bool:
    """Whether a line's number can be a step's: what others wrote into a file may be anything."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


@dataclass(frozen=True)
class Story:
    """Lines as they stand in the files: the first step ever, the newest ones, rounds of validation, the last sample."""

    first: dict[str, Any] = field(default_factory=dict)
    rows: tuple[dict[str, Any], ...] = ()
    rounds: tuple[dict[str, Any], ...] = ()
    sample: dict[str, Any] = field(default_factory=dict)
    idle: dict[str, Any] = field(default_factory=dict)  # of groups that ended since the newest step, which gave none

    @classmethod
    def of(cls, paths: RunPaths) -> Story:
        """Empty where there is nothing (yet)."""
        found = [row for row in tail_rows(paths.metrics) if is_step(row.get("step"))]
        rows = [row for row in found if of_step(row)]
        # A line about groups without a step is the newest there is to tell; the next step's has its groups as well.
        idle = found[-1] if found and not of_step(found[-1]) else {}
        rounds = [row for row in tail_rows(paths.validation) if is_step(row.get("round"))]
        samples = tail_rows(paths.samples)
        first = next((row for row in _head(paths.metrics) if "reward" in row and of_step(row)), {})
        return cls(first, tuple(rows), tuple(rounds), samples[-1] if samples else {}, idle)

    @property
    def step(self) -> int:
        """The newest step that has a line."""
        return max((row["step"] for row in (*self.rows, self.idle) if row), default=0)

    @property
    def first_reward(self) -> float | None:
        """Mean reward of the first step ever."""
        return number(self.first.get("reward"))

    def rewards(self) -> list[float]:
        """Mean reward of each of the newest steps, oldest first."""
        return [value for row in self.rows if (value := number(row.get("reward"))) is not None]

    def means(self) -> list[tuple[int, float, int]]:
        """Round, mean reward and samples of each round of validation that judged any."""
        known = [(row["round"], number(row.get("val/reward")), row.get("samples")) for row in self.rounds]
        return [(at, mean, count) for at, mean, count in known if mean is not None and isinstance(count, int) and count]

    def recent(self, name: str) -> float | None:
        """Mean of a number over the newest steps that tell it."""
        told = [value for row in self.rows[-RECENT:] if (value := number(row.get(name))) is not None]
        return sum(told) / len(told) if told else None

    def flat_share(self) -> float | None:
        """Share of flat groups among all that ended in the newest steps."""
        told = (*self.rows[-RECENT:], self.idle)
        rows = [(row, ended) for row in told if (ended := number(row.get("groups_ended")))]
        flat = sum((number(row.get("flat_share")) or 0.0) * ended for row, ended in rows)
        return flat / sum(ended for _, ended in rows) if rows else None

    def pace(self, quiet_s: float = 0.0) -> tuple[float, float] | None:
        """Steps and trained tokens per second lately, the last step having ended `quiet_s` ago; None: not known."""
        steps, tokens, span = 0, 0.0, 0.0
        for row in reversed(self.rows):
            seconds = number(row.get("seconds")) or 0.0
            if seconds > 0:
                steps, tokens, span = steps + 1, tokens + (number(row.get("tokens")) or 0.0), span + seconds
            if span >= PACE_S:
                break
        if not steps:
            return None
        over = span + max(0.0, quiet_s - span / steps)  # a step that takes longer than the others counts against it
        return steps / over, tokens / over


def fates(path: Path) -> dict[str, int]:
    """How many samples have each fate, most interesting first; empty where the table can not be read."""
    counts = np.zeros(256, np.int64)
    with suppress(OSError), open(path, "rb") as file:
        while block := file.read(BLOCK):
            counts += np.bincount(np.frombuffer(block, np.uint8), minlength=256)
    order = sorted(range(1, 256), key=lambda code: (code != Fate.TRAINED, code == Fate.DISPATCHED, -counts[code]))
    return {WORDS.get(code, name_of(code)): int(counts[code]) for code in order if counts[code]}  # type: ignore[call-overload]


def in_words(fate: str) -> str:
    """A fate as the audit names it, for somebody who does not know the word."""
    return next((text for code, text in WORDS.items() if name_of(code) == fate), fate)


def sample_line(sample: dict[str, Any]) -> str:
    """What the model wrote lately, in one line; "" if nothing is known."""
    if "completion" not in sample:
        return ""
    prompt, answer, reward = _prompt(sample.get("prompt")), str(sample["completion"]), number(sample.get("reward"))
    shown = safe(prompt, len(prompt))[-PROMPT:]
    told = safe(answer, len(answer))
    cut = f"{told[: ANSWER // 2]} … {told[-ANSWER // 2 :]}" if len(told) > ANSWER else told
    return f"{shown!r} → {cut!r}" + (f", reward {reward:g}" if reward is not None else "")


def _prompt(found: Any) -> str:
    """The prompt as text, also where the whole line of the data file stands for it."""
    if isinstance(found, str) and found.startswith("{"):
        with suppress(ValueError, RecursionError):
            line = json.loads(found)
            found = line.get("prompt", found) if isinstance(line, dict) else found
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)


def number(value: Any) -> float | None:
    """The finite number that a value of a JSON file is; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with suppress(OverflowError):  # a whole number of hundreds of digits
        found = float(value)
        return found if math.isfinite(found) else None
    return None


def _head(path: Path) -> list[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            return _rows(file.read(HEAD_BYTES).split(b"\n")[:-1])
    except OSError:
        return []


def tail_rows(path: Path) -> list[dict[str, Any]]:
    """The maps in the newest lines of a file, oldest first; none if it is not there."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    return _rows(lines[1 if size > TAIL_BYTES else 0 : -1])  # the first may be cut, the last is not ended


def _rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            found += [row] if isinstance(row, dict) else []
    return found
