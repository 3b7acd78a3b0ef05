"""Exact match: 1 if the answer found in a completion equals the record's answer, else 0.

Talks to nothing. Knows nothing of numbers or mathematics: text is compared as text, without surrounding space.

- `extract` empty: the whole completion is the answer.
- `extract` with a group: group 1 of the last match. Without a group: the text after the last match that is not empty.
- A right answer that is no text counts as JSON writes it (72, 0.5, true); a whole number with a point also without.
- No match: reward 0. That is a wrong answer, not a broken reward.
"""

from __future__ import annotations

import json
import re
from typing import Any

from busrl.errors import RewardNotLoaded


class ExactMatch:
    """A reward function; `extract` is compiled once."""

    def __init__(self, extract: str = "", answer_key: str = "answer") -> None:
        self.answer_key = answer_key
        try:
            self.pattern = re.compile(extract) if extract else None
        except re.error as problem:
            raise RewardNotLoaded(f"reward.extract = {extract!r}: not a regular expression ({problem})") from None

    def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        answer = self.find(completion)
        return float(answer is not None and answer in spellings(record[self.answer_key]))

    def find(self, completion: str) -> str | None:
        """The answer in a completion, stripped; None if there is none."""
        if self.pattern is None:
            return completion.strip()
        matches = list(self.pattern.finditer(completion))
        if not matches:
            return None
        if self.pattern.groups:
            return (matches[-1].group(1) or "").strip()
        last = next((m for m in reversed(matches) if m.group()), matches[0])
        return completion[last.end() :].strip()


def spellings(answer: object) -> tuple[str, ...]:
    """How a right answer may be written."""
    if isinstance(answer, str):
        return (answer.strip(),)
    if isinstance(answer, float) and answer.is_integer():
        return (json.dumps(answer), str(int(answer)))
    return (json.dumps(answer),)
