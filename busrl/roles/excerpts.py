"""Samples as a person reads them, for samples.jsonl: the prompt as the model was given it, the answer, its reward.

Talks to the ring, and to the model folder's chat template where prompts are chats. Imports no torch. Nothing of
training depends on it: what can not be shown says so in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from busrl.data import plain_text, prompt_of
from busrl.data.chat import LightTokenizer
from busrl.errors import DataError
from busrl.ring import Ring
from busrl.roles.trajectory import UNREADABLE, read_parts, read_task, read_text, segments_of
from busrl.topology.prompts import tools_of_chats

if TYPE_CHECKING:
    from busrl.roles.gather import Claimed
    from busrl.topology import Topology

LENGTH = 2


class Excerpts:
    """`log.samples` of them for each step."""

    def __init__(self, topology: Topology) -> None:
        self.data = topology.data
        self.kept = topology.log.samples
        self._chat = LightTokenizer(Path(topology.model.path), None, tools_of_chats(topology))

    def of_step(self, ring: Ring, groups: Sequence[Claimed]) -> list[dict[str, Any]]:
        """One sample of every group, then a second one of each, and so on, up to the number that is kept."""
        most = max((len(group.records) for group in groups), default=0)
        order = [(group, k) for k in range(most) for group in groups if k < len(group.records)]
        kept = len(order) if isinstance(self.kept, str) else self.kept
        return [self._of(ring, group, k) for group, k in order[:kept]]

    def glimpse(self, ring: Ring, slot: int, line: np.void) -> dict[str, object]:
        """A sample that nobody claimed; its slot may move meanwhile, which costs the texts."""
        return {
            "uid": int(line["uid"]),
            "group": int(line["group"]),
            **self._texts(ring, slot, int(line["word"])),
            "reward": float(line["reward"]),
            "version": int(line["version"]),
        }

    def _of(self, ring: Ring, claimed: Claimed, member: int) -> dict[str, Any]:
        slot, word = claimed.slots[member]
        record = claimed.records[member]
        return {
            "uid": record.uid,
            "group": record.group,
            **self._texts(ring, slot, word),
            "reward": record.reward,
            "tokens": len(record.token_ids) // 4,
            "finish": "length" if record.finish == LENGTH else "end",
            "version": record.version,
            "versions": sorted(set(np.frombuffer(record.versions, np.uint32).tolist())),
            "rewards_of_group": claimed.rewards.tolist(),
            **({"reward_parts": parts} if (parts := read_parts(ring, slot)) else {}),
        }

    def _texts(self, ring: Ring, slot: int, word: int) -> dict[str, Any]:
        """The prompt, what else its line holds (the right answer, say), and the completion."""
        task = _for_people(lambda: read_task(ring, slot).decode("utf-8", "replace"))
        prompt, rest = self.prompt(task)
        completion = _for_people(lambda: read_text(ring, slot, segments_of(word)))
        return {"prompt": prompt, "record": rest, "completion": completion}

    def prompt(self, task: str) -> tuple[str, dict[str, Any]]:
        """The prompt of a line as text, a chat as its template writes it, and the line's other keys."""
        try:
            record = msgspec.json.decode(task, type=dict[str, Any])
        except msgspec.DecodeError:
            return task, {}
        rest = {key: value for key, value in record.items() if key != self.data.prompt_key}
        try:
            return self._chat.text(prompt_of(record, self.data)), rest
        except DataError:  # of a scripted run, say, whose model needs no template
            return plain_text(record.get(self.data.prompt_key, "")), rest


def _for_people(read_it: Callable[[], str]) -> str:
    """A text that training does not need: a sample without it is trained all the same."""
    try:
        return read_it()
    except UNREADABLE as problem:
        return f"({problem})"
