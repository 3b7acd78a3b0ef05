"""Whole groups out of the ring: claimed for training, given back or ended; their samples as texts for samples.jsonl.

Talks to the ring and to the model folder's chat template, and makes the write-ahead log's sample records. Knows nothing
of losses, weights or the trigger; imports no torch.

- All members of a group are claimed, or none: a compare-and-swap that fails gives back what was taken.
- A record is a copy: it stays good after its slot was freed.
- A sample whose payload is malformed (counts that differ, a log-probability above 0, NaN, an unknown id) is dropped
  with fate M; the rest of its group goes back to rest.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.data import plain_text, prompt_of
from busrl.data.chat import LightTokenizer, tools_of_chats
from busrl.data.figures import tag_of
from busrl.errors import DataError
from busrl.ledger.wal import SampleRecord
from busrl.ring import Ring, State, segments_of
from busrl.roles import answers
from busrl.roles.answers import UNREADABLE
from busrl.roles.episodes import context_of, messages_of, read_episode
from busrl.states import Fate, Finish, SampleClass
from busrl.topology import Topology
from busrl.topology.schema import Reward

# -- claims --------------------------------------------------------------------


@dataclass(frozen=True)
class Claimed:
    """One claimed group: slots with the words that own them, and a record of each sample."""

    slots: tuple[tuple[int, int], ...]
    records: tuple[SampleRecord, ...]

    @property
    def group(self) -> int:
        return self.records[0].group


Lines = npt.NDArray[Any]
Owned = Sequence[tuple[int, int]]  # slots, with the words that own them
Fault = Callable[[Sequence[SampleRecord]], "tuple[int, str] | None"]
FIELDS = (
    "uid", "group", "admission", "member", "attempt", "prompt_crc", "reward", "temperature", "version", "step", "finish"
)
TENSORS = ("prompt_ids", "token_ids", "logprobs", "versions")
SEGMENTED = ("tokens", "logprobs", "versions")


class Malformed(Exception):
    """The payload of the sample at `position` breaks the rules of the ledger."""

    def __init__(self, position: int, text: str) -> None:
        super().__init__(text)
        self.position = position


def claim_groups(
    ring: Ring, lines: Lines, groups: Sequence[Sequence[int]], fault: Fault
) -> list[Claimed] | Malformed | None:
    """Claim the REWARDED slots of whole groups, all or none, as `lines` (a copy of all control lines) shows them.

    `fault` names a record that cannot be trained, and why. Returns the groups; None when a slot moved meanwhile;
    Malformed with that sample dropped. After either of the last two look again, with new lines.
    """
    slots = [slot for group in groups for slot in group]
    own = lines[slots]  # they hold: a claim succeeds only while the word is the one read with them
    owned: list[tuple[int, int]] = []
    for slot, word in zip(slots, own["word"].tolist()):
        if not (taken := ring.claim(slot, word, State.TRAINING)):
            give_back(ring, owned)
            return None
        owned.append((slot, taken))
    try:
        records = make_records(ring, owned, own)
        if (found := fault(records)) is not None:
            raise Malformed(*found)
    except Malformed as problem:
        ring.drop(*owned.pop(problem.position), Fate.MALFORMED)
        give_back(ring, owned)
        return Malformed(problem.position, f"sample {own['uid'][problem.position]}: {problem}")
    held = iter(zip(owned, records))
    return [Claimed(*zip(*(next(held) for _ in group))) for group in groups]


def make_records(ring: Ring, owned: Owned, own: Lines) -> list[SampleRecord]:
    """Copy samples out of their slots, checked."""
    fields = zip(*(own[name].tolist() for name in FIELDS))
    records = []
    for position, (values, payload) in enumerate(zip(fields, _payloads(ring, owned))):
        counts = [len(payload[name]) // 4 for name in TENSORS[1:]]
        if "turns" not in payload and not counts[0] == counts[1] == counts[2] > 0:
            raise Malformed(position, "{} tokens, {} log-probs, {} versions".format(*counts))
        records.append(SampleRecord(**dict(zip(FIELDS, values)), **payload))
    return records


Payload = dict[str, Any]  # fields of a record


def _payloads(ring: Ring, owned: Owned) -> Iterable[Payload]:
    """Per slot: bytes of prompt, tokens, log-probabilities, versions; the tokens of each segment if several; or those
    of an episode, checked."""
    if all(segments_of(word) == 1 for _, word in owned):
        with contextlib.suppress(*UNREADABLE):  # which slot it is, is found one by one below
            whole = zip(*(answers.read_copies(ring, owned, name) for name in ("prompt_ids", *SEGMENTED)))
            return [dict(zip(TENSORS, payload)) for payload in whole]
    return [_payload(ring, position, slot, segments_of(word)) for position, (slot, word) in enumerate(owned)]


def _payload(ring: Ring, position: int, slot: int, segments: int) -> Payload:
    try:
        if segments == 1 and (episode := read_episode(ring, slot)) is not None:
            return episode.logged()
        parts = [[answers.read_segment(ring, slot, name, k) for k in range(max(1, segments))] for name in SEGMENTED]
        prompt = answers.read_prompt_ids(ring, slot).tobytes()
    except UNREADABLE as problem:
        raise Malformed(position, str(problem)) from None
    sizes = [[len(part) for part in name] for name in parts]
    if segments > 1 and not (sizes[0] == sizes[1] == sizes[2] and all(sizes[0])):
        raise Malformed(position, "its segments have {} tokens, {} log-probs, {} versions".format(*sizes))
    payload = dict(zip(TENSORS, (prompt, *(np.concatenate(name).tobytes() for name in parts))))
    return {**payload, "segments": sizes[0]} if segments > 1 else payload


def give_back(ring: Ring, owned: Owned) -> None:
    for slot, word in owned:
        ring.release(slot, word, State.REWARDED)


def end(ring: Ring, claimed: Claimed, fate: Fate) -> None:
    """Store the fate of every sample of a claimed group and free its slots."""
    for slot, word in claimed.slots:
        ring.finish(slot, word, fate)


def parts_of(ring: Ring, slots: Iterable[int]) -> list[dict[str, float]]:
    """The parts of the rewards in these slots; nothing is looked for where the first has none."""
    found: list[dict[str, float]] = []
    for slot in slots:
        parts = answers.read_parts(ring, slot)
        if not parts and not found:
            return []
        found.append(parts)
    return found


def context_at(ring: Ring, group: Claimed) -> Counter[str]:
    """What a group's episodes count besides tokens and rewards (`busrl.data.episodes.CONTEXT`)."""
    found = (context_of(ring, slot) for (slot, _), record in zip(group.slots, group.records) if record.turns)
    return sum(found, Counter[str]())


def tag_at(ring: Ring, slot: int, key: str) -> str:
    """The tag of the prompt in a slot (`busrl.data.figures.tag_of`); "" where its line has none."""
    with contextlib.suppress(*UNREADABLE, msgspec.DecodeError):
        return tag_of(msgspec.json.decode(answers.read_task(ring, slot), type=dict[str, Any]), key)
    return ""


def shaped(lines: Lines, reward: Reward, limit: int) -> Lines:
    """Change, in place, the rewards of training answers: of those that the limit (in tokens) cut, to the number
    reward.truncated, or less a penalty; of those that come near it, less the soft overlong punishment.

    The learner applies it to its copy of the ring's lines, so it holds for every kind of reward worker, and the slot
    keeps the original. Validation is not touched: it measures the task itself.
    """
    truncated, penalty = reward.truncated, reward.truncated_penalty
    if isinstance(truncated, str) and not penalty and not reward.overlong_tokens:
        return lines
    state = lines["state"]
    whole = ((state == State.REWARDED) | (state == State.TRAINING)) & (lines["cls"] == SampleClass.TRAIN)
    if reward.overlong_tokens:
        lengths = lines["response_tokens"].astype(np.int64)
        lines["reward"] += np.where(whole, overlong(lengths, limit, reward.overlong_tokens, reward.overlong_penalty), 0)
    cut = whole & (lines["finish"] == Finish.LENGTH)
    worth = lines["reward"] - penalty if isinstance(truncated, str) else truncated
    lines["reward"] = np.where(cut, worth, lines["reward"])
    return lines


def overlong(lengths: npt.NDArray[np.int64], limit: int, buffer: int, penalty: float) -> npt.NDArray[np.float64]:
    """What is added to the reward of answers of these lengths: 0 up to `limit - buffer` tokens, -penalty at the limit,
    on a straight line between them (soft overlong punishment, DAPO, arXiv 2503.14476, equation 13)."""
    over = np.clip(lengths - (limit - buffer), 0, buffer)
    return -(penalty * over / buffer)


# -- samples.jsonl -------------------------------------------------------------


EXCERPT = 1 << 15  # characters of a text
GAPS = 512  # tokens of which the difference of log-probabilities is told one by one


def excerpt(text: str) -> str:
    """Begin and end of a text that is too long to keep one of for every step of a long run."""
    if len(text) <= EXCERPT:
        return text
    half = EXCERPT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"


class Excerpts:
    """Samples to read: the prompt as the model got it, the answer, its reward; `log.samples` of them for each step.

    Training does not depend on it: a text that cannot be shown says so in its place.
    """

    def __init__(self, topology: Topology) -> None:
        self.data = topology.data
        self.kept = topology.log.samples
        self._chat = LightTokenizer(Path(topology.model.path), None, tools_of_chats(topology.openai))

    def of_step(self, ring: Ring, groups: Sequence[Claimed]) -> list[dict[str, Any]]:
        """One sample of every group, then a second one of each, and so on, up to the number that is kept."""
        most = max((len(group.records) for group in groups), default=0)
        order = [(group, k) for k in range(most) for group in groups if k < len(group.records)]
        kept = len(order) if isinstance(self.kept, str) else self.kept
        return [self._of(ring, group, k) for group, k in order[:kept]]

    def watched(self, groups: Sequence[Claimed]) -> set[int]:
        """Those of these groups that `of_step` may tell of: which groups a step has is not known before its end."""
        most = None if isinstance(self.kept, str) else self.kept
        return {record.uid for group in groups for record in group.records[:most]}

    def glimpse(self, ring: Ring, slot: int, line: np.void) -> dict[str, object]:
        """A sample that is not claimed; its slot may move meanwhile, which costs the texts."""
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
            "tokens": record.tokens,
            "finish": "length" if record.finish == Finish.LENGTH else "end",
            "version": record.version,
            "versions": sorted(set(record.version_array().tolist())),
            "version_runs": [[version, len(list(own))] for version, own in groupby(record.version_array().tolist())],
            "rewards_of_group": [one.reward for one in claimed.records],
            **({"reward_parts": parts} if (parts := answers.read_parts(ring, slot)) else {}),
            **(_episode(ring, slot, record) if record.turns else {}),
        }

    def _texts(self, ring: Ring, slot: int, word: int) -> dict[str, Any]:
        """The prompt, what else its line holds (the right answer, say), and the completion."""
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
    """What a sample says of its tokens' log-probabilities, the learner's minus the engine's: mean and largest size,
    where that is, and the first tokens one by one. Nothing where it was trained elsewhere or one is no number."""
    if logprobs is None or not len(logprobs) or not np.isfinite(logprobs).all():
        return {}
    size, each = np.abs(logprobs), np.round(logprobs[:GAPS].astype(np.float64), 5)
    told = {"mean": float(size.mean()), "most": float(size.max()), "at": int(size.argmax()), "each": each.tolist()}
    return {"logprob_gap": told}


def _episode(ring: Ring, slot: int, record: SampleRecord) -> dict[str, Any]:
    """What an episode has beside its last turn's text."""
    rewards = {"turn_rewards": record.turn_rewards} if record.turn_rewards else {}
    return {"turns": len(record.turn_array()), "sequences": len(record.seqs), **rewards,
            "messages": messages_of(ring, slot)}


def _text_or_problem(read_it: Callable[[], str]) -> str:
    try:
        return read_it()
    except UNREADABLE as problem:
        return f"({problem})"
