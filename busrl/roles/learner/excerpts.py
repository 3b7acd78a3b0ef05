"""Samples of a step as texts for samples.jsonl: the prompt as the model got it, the answer, its reward.

Talks to the slots of claimed groups and to the model folder's chat template. Knows nothing of training, which does not
depend on it: in place of an unreadable text stands the problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.data import plain_text, prompt_of
from busrl.data.chat import LightTokenizer, tools_of_chats
from busrl.errors import DataError
from busrl.ledger.wal import SampleRecord
from busrl.ring import Ring, segments_of
from busrl.roles import answers
from busrl.roles.answers import UNREADABLE
from busrl.roles.episodes import messages_of
from busrl.roles.learner.groups import Claimed
from busrl.states import Finish, episode_of, seat_of, side_of
from busrl.topology import Topology

EXCERPT = 1 << 15  # characters of a text
GAPS = 512  # tokens whose difference of log-probabilities is given one by one


def excerpt(text: str) -> str:
    """Cut a text that is too long for samples.jsonl of a long run to its begin and end."""
    if len(text) <= EXCERPT:
        return text
    half = EXCERPT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"


class Excerpts:
    """Makes samples for people: prompt, answer and reward; `log.samples` of them for each step. `sides`: the seats of
    each trained model of the run, by its tag."""

    def __init__(self, topology: Topology, sides: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.data, self.tag, self.size = topology.data, topology.tag, topology.groups.size
        self.sides = sides or {topology.tag: topology.seats}
        self.per_step = topology.log.samples
        self._chat = LightTokenizer(Path(topology.model.path), None, tools_of_chats(topology.openai))

    def follow(self, topology: Topology) -> None:
        """Keep as many samples as the topology asks for now."""
        self.per_step = topology.log.samples

    def of_step(self, ring: Ring, groups: Sequence[Claimed]) -> list[dict[str, Any]]:
        """A sample of every group, then a second of each, and so on, up to `log.samples`."""
        most = max((len(group.records) for group in groups), default=0)
        order = [(group, k) for k in range(most) for group in groups if k < len(group.records)]
        count = len(order) if isinstance(self.per_step, str) else self.per_step
        return [self._of(ring, group, k) for group, k in order[:count]]

    def watched(self, groups: Sequence[Claimed]) -> set[int]:
        """Uids of the samples that `of_step` may show: the groups of a step are complete only at its end."""
        most = None if isinstance(self.per_step, str) else self.per_step
        return {record.uid for group in groups for record in group.records[:most]}

    def glimpse(self, ring: Ring, slot: int, line: np.void) -> dict[str, object]:
        """A sample that is not claimed. If its slot moves meanwhile, it is shown without texts."""
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
            **self._place(record),
            **self._texts(ring, slot, word),
            "reward": record.reward,
            "tokens": record.tokens,
            "finish": "length" if record.finish == Finish.LENGTH else "end",
            "version": record.version,
            "versions": sorted(set(record.version_array().tolist())),
            "version_runs": [[version, len(list(run))] for version, run in groupby(record.version_array().tolist())],
            "rewards_of_group": [other.reward for other in claimed.records],
            **({"reward_parts": parts} if (parts := answers.read_parts(ring, slot)) else {}),
            **(_episode(ring, slot, record) if record.turns else {}),
        }

    def _place(self, record: SampleRecord) -> dict[str, Any]:
        """The seat of a sample, and the samples of the same episode in other seats, where there are several."""
        places = [(tag, seat, names) for tag, names in self.sides.items() for seat in range(len(names))]
        if len(places) == 1:
            return {}
        count = len(self.sides[self.tag])
        episode, own = episode_of(record.uid, self.size, count), (self.tag, seat_of(record.group, count))
        siblings = {names[seat]: side_of(episode, seat, self.size, len(names))
                    for tag, seat, names in places if (tag, seat) != own}
        return {"seat": self.sides[self.tag][own[1]], "siblings": siblings}

    def _texts(self, ring: Ring, slot: int, word: int) -> dict[str, Any]:
        """The prompt, the other fields of its line (the right answer, say), and the completion."""
        task = _text_or_problem(lambda: answers.read_task(ring, slot).decode("utf-8", "replace"))
        prompt, rest = self.prompt(task)
        completion = _text_or_problem(lambda: answers.read_text(ring, slot, segments_of(word)))
        return {"prompt": excerpt(prompt), "record": rest, "completion": excerpt(completion)}

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


def gap_of(logprobs: npt.NDArray[np.float32] | None) -> dict[str, Any]:
    """Fields of a sample about its tokens' log-probabilities, the learner's minus the engine's: mean and largest size,
    where that is, and the first tokens one by one. Nothing where it was trained elsewhere or one is no number."""
    if logprobs is None or not len(logprobs) or not np.isfinite(logprobs).all():
        return {}
    size, each = np.abs(logprobs), np.round(logprobs[:GAPS].astype(np.float64), 5)
    figures = {"mean": float(size.mean()), "most": float(size.max()), "at": int(size.argmax()), "each": each.tolist()}
    return {"logprob_gap": figures}


def _episode(ring: Ring, slot: int, record: SampleRecord) -> dict[str, Any]:
    """Further fields of an episode, whose text is that of its last turn."""
    rewards = {"turn_rewards": record.turn_rewards} if record.turn_rewards else {}
    keys = {"keys": record.keys} if record.keys else {}
    return {"turns": len(record.turn_array()), "sequences": len(record.seqs), **rewards, **keys,
            "messages": messages_of(ring, slot)}


def _text_or_problem(read_it: Callable[[], str]) -> str:
    try:
        return read_it()
    except UNREADABLE as problem:
        return f"({problem})"
