"""The tasks that another host holds: their slots in its ring, and the answers that are read of them.

`Holdings` is scheduler and learner to the local ring; `AnswerReader` copies what home needs out of slots. Both talk to
the ring and the tables of fates. Knows nothing of the bus, of home's address, or of engines.

- A local slot is the record of a claim: its line holds the task's slot, seq and uid at home. A new process finds there
  what the one before it held.
- An answer stays in its slot, TRAINING, until home has said what became of it.
- What home has given to others is dropped here: at once if no engine has it, else when the engine lets go.
- Local fates say only that a sample is here; home's alone count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from busrl.hosts import messages as g
from busrl.hosts.desk import DIGESTS, FATES, HOST, digest_of
from busrl.hosts.episodes import tensors_of
from busrl.protocol import messages as m
from busrl.ring import UID_NONE, Fates, Ring, State, segments_of
from busrl.roles.answers import UNREADABLE, read_copies, read_generated, read_parts, text_of
from busrl.scheduling.admission import Lines
from busrl.states import VALIDATE_BIT, Fate, HeaderWord

TENSORS = ("tokens", "logprobs", "versions", "prompt_ids")
BESIDE, OF_TENSOR = 512, 64  # bytes of an answer in a message beside its tensors and its text; of an episode's tensor
COLLECT_AT_ONCE = 256
REMEMBERED = 8192
DROPS = {fate: word for word, fate in FATES[HOST].items()}


@dataclass
class HeldTask:
    """A task of this host. States: waiting (slot -1, no room in the ring yet) -> in a slot -> answered -> gone."""

    task: str
    uid: int
    slot: int = -1
    word: int = 0  # the word that owns the slot, once its answer is ready
    failed: g.RemoteFail | None = None
    sent_at: float = 0.0
    request: int = 0  # the number of the newest request when its outcome was sent
    lost: bool = False  # home has given it to others
    digest: int = 0

    def __post_init__(self) -> None:
        self.digest = digest_of(self.task)

    @property
    def ended(self) -> bool:
        """True while its outcome is on the way home."""
        return bool(self.word) or self.failed is not None


class Holdings:
    """The tasks of this host, by their names at home."""

    def __init__(self, ring: Ring, fates: Fates, validate_fates: Fates) -> None:
        self.ring, self.fates, self.validate_fates = ring, fates, validate_fates
        self.held: dict[str, HeldTask] = {}
        self.waiting: dict[str, g.Task] = {}  # of these, those without a slot
        self.lost: dict[str, HeldTask] = {}  # and those that home has given to others
        self.over: dict[str, None] = {}  # claims that have ended, oldest first: a late copy of one is no task
        self.uids = np.full(ring.n_slots, UID_NONE, np.uint64)  # of each slot with a task that has not ended
        lines = ring.lines()
        for slot in (lines["state"] != State.FREE).nonzero()[0].tolist():  # of an earlier life of this process
            task = HeldTask(_task_of(lines[slot]), int(lines["uid"][slot]), slot)
            self.held[task.task] = task
            self.uids[slot] = task.uid

    # -- what home gives and takes back -----

    def accept(self, tasks: Iterable[g.Task]) -> None:
        """Tasks from home; a copy of one that is here, or was, changes nothing."""
        for task in tasks:
            if task.task not in self.held and task.task not in self.over:
                self.held[task.task] = HeldTask(task.task, task.uid)
                self.waiting[task.task] = task

    def settle(self, name: str) -> None:
        """Home needs nothing more of this task: it is done, or somebody else's now."""
        task = self.held.get(name)
        if task is None:
            return
        if task.word:  # an answer that home has, or will not take any more
            self.ring.finish(task.slot, task.word, Fate.TRAINED)
            self.forget(task)
            return
        task.lost, self.lost[name] = True, task
        line = None if task.slot < 0 else self.ring.line(task.slot)
        if line is None or line["state"] == State.FREE or int(line["uid"]) != task.uid:
            self.forget(task)
        elif line["state"] == State.QUEUED:
            self.ring.drop(task.slot, int(line["word"]), Fate.OLD)  # unless an engine takes it this moment

    def forget(self, task: HeldTask) -> None:
        for tasks in (self.held, self.waiting, self.lost):
            tasks.pop(task.task, None)
        if task.slot >= 0 and self.uids[task.slot] == task.uid:
            self.uids[task.slot] = UID_NONE
        self.over[task.task] = None
        if len(self.over) > REMEMBERED:
            del self.over[next(iter(self.over))]

    # -- figures -----

    @property
    def claimed(self) -> int:
        """Tasks that home counts as this host's, as far as is known here."""
        return len(self.held) - len(self.lost)

    @property
    def unfinished(self) -> int:
        return sum(not task.ended for task in self.held.values())

    def digest(self) -> int:
        """The digest of what home should have here; it settles an answer before it reads what is sent after it."""
        return sum(task.digest for task in self.held.values() if not (task.lost or task.ended)) % DIGESTS

    def names(self) -> list[str]:
        """The claims that home has given to nobody else, as far as is known here."""
        return [name for name, task in self.held.items() if not task.lost][:m.MAX_MAP]

    # -- the local ring -----

    def dispatch(self, dropped: Callable[[HeldTask], None]) -> Iterator[tuple[g.Task, int, int]]:
        """Put tasks that wait into free slots, the most urgent first: each with its slot and word.

        A uid that is still here from before waits, and so does a task of a version that the relay of this host does not
        know yet. `dropped` gets a task whose slot was free before that was seen. DiskFull, SharedMemoryFull: no room.
        """
        known = self.ring.header(HeaderWord.VERSION)
        here = {task.uid for task in self.held.values() if task.slot >= 0} if self.waiting else set()
        for task in sorted(self.waiting.values(), key=lambda task: (-task.priority, task.admission, task.uid)):
            if task.uid in here or task.version > known:
                continue
            here.add(task.uid)
            self._reset_fate(task.uid)
            step = self.ring.header(HeaderWord.VERSION_STEP)  # before the version: never newer than what is drawn
            placed = self.ring.dispatch(**_dispatched(task, self.ring.header(HeaderWord.VERSION), step))
            if not placed:
                return
            slot, word = placed[0]
            if self.uids[slot] != UID_NONE:  # of a task that was dropped here a moment ago
                dropped(next(held for held in self.held.values() if held.slot == slot and not held.ended))
            self.held[task.task].slot, self.uids[slot] = slot, task.uid
            del self.waiting[task.task]
            yield task, slot, word

    def answered(self, judged: bool) -> tuple[list[HeldTask], int]:
        """Own the answers that are ready, with their rewards where they are `judged` here. Returns the tasks, and how
        many slots were taken."""
        if not judged:
            for slot, word in self.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=COLLECT_AT_ONCE):
                self.ring.release(slot, word, State.REWARDED)
        taken = self.ring.take(State.REWARDED, State.TRAINING, cls=None, limit=COLLECT_AT_ONCE)
        ready = []
        for (slot, word), line in zip(taken, self.ring.lines([slot for slot, _ in taken])):
            task = self.held.get(_task_of(line))
            if task is not None and not task.lost:
                task.slot, task.word, self.uids[slot] = slot, word, UID_NONE
                ready.append(task)
                continue
            self.ring.finish(slot, word, Fate.TRAINED)
            if task is not None:
                self.forget(task)
        return ready, len(taken)

    def dropped(self) -> list[HeldTask]:
        """Tasks that have left their slots without an answer: engines, rewards or the keeper here gave them up."""
        lines = self.ring.lines()
        for task in list(self.lost.values()):  # the engine that had it is gone
            if lines["state"][task.slot] == State.QUEUED and int(lines["uid"][task.slot]) == task.uid:
                self.ring.drop(task.slot, int(lines["word"][task.slot]), Fate.OLD)
        gone = (self.uids != UID_NONE) & ((lines["state"] == State.FREE) | (lines["uid"] != self.uids))
        if not gone.any():
            return []
        return [task for task in self.held.values() if task.slot >= 0 and not task.ended and gone[task.slot]]

    def leave_slot(self, task: HeldTask) -> Fate | None:
        """The task has left its slot without an answer. Returns its fate here, NONE if that says nothing to home; None
        if home has given the task to others, so that it is forgotten."""
        self.uids[task.slot] = UID_NONE
        if task.lost:
            self.forget(task)
            return None
        table, index = self._place(task.uid)
        return next((fate for fate in DROPS if fate == table.get(index)), Fate.NONE)

    def let_go(self, count: int) -> None:
        """Drop so many samples that no engine has: they go back to home."""
        lines = self.ring.lines()
        for slot in (lines["state"] == State.QUEUED).nonzero()[0][:count].tolist():
            self.ring.drop(slot, int(lines["word"][slot]), Fate.OLD)

    def _reset_fate(self, uid: int) -> None:
        """The sample may have been here before, under an earlier claim; only this process dispatches here."""
        table, index = self._place(uid)
        table.reserve(index + 1)
        if table.get(index):
            with open(table.path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), b"\0", index)

    def _place(self, uid: int) -> tuple[Fates, int]:
        """The table that has the fate of a sample, and where."""
        return (self.validate_fates, uid & ~VALIDATE_BIT) if uid & VALIDATE_BIT else (self.fates, uid)


@dataclass
class ReadAnswer:
    """An answer as it is read of a slot for home; the slot keeps it until home has it."""

    held: HeldTask
    text: str
    finish: int
    reward: float
    parts: dict[str, float]
    tensors: dict[str, bytes]
    step: int  # of the oldest weights that drew it
    episode: dict[str, g.Tensor]  # instead of the tensors

    @property
    def size(self) -> int:
        """An upper bound of its bytes on the wire."""
        episode = sum(OF_TENSOR + len(piece.data) for piece in self.episode.values())
        return BESIDE + 4 * len(self.text) + sum(map(len, self.tensors.values())) + episode


class AnswerReader:
    """Reads answers out of slots: `plays` where they are episodes, `judges` where their rewards are made here too."""

    def __init__(self, ring: Ring, plays: bool, judges: bool) -> None:
        self.ring, self.plays, self.judges = ring, plays, judges

    def read(
        self, ready: list[HeldTask], unreadable: Callable[[HeldTask, Exception], None]
    ) -> Iterator[ReadAnswer]:
        """Copy what home needs of each task; `unreadable` gets those of which it cannot be read."""
        try:
            yield from self._read_all(ready)
        except UNREADABLE:  # one by one, to find which of them
            for task in ready:
                try:
                    yield from self._read_all([task])
                except UNREADABLE as problem:
                    unreadable(task, problem)

    def _read_all(self, ready: list[HeldTask]) -> list[ReadAnswer]:
        slots = [(task.slot, task.word) for task in ready]
        lines: Lines = self.ring.lines([slot for slot, _ in slots])
        columns = {} if self.plays else {name: self._columns(slots, name) for name in TENSORS}
        texts = map(text_of, read_copies(self.ring, slots, "text"))
        return [
            ReadAnswer(
                task, text, int(line["finish"]), float(line["reward"]),
                read_parts(self.ring, task.slot) if self.judges else {},
                {name: column[at] for name, column in columns.items()}, int(line["step"]),
                tensors_of(self.ring, task.slot) if self.plays else {},
            )
            for at, (task, text, line) in enumerate(zip(ready, texts, lines))
        ]

    def _columns(self, slots: list[tuple[int, int]], name: str) -> list[bytes]:
        """A tensor of each slot, of all its segments."""
        if name == "prompt_ids" or all(segments_of(word) == 1 for _, word in slots):
            return read_copies(self.ring, slots, name)
        return [read_generated(self.ring, slot, name, segments_of(word)).tobytes() for slot, word in slots]


def _task_of(line: np.void) -> str:
    """The name of the task at home, as `_dispatched` wrote it into the line of the local slot."""
    return f"{int(line['prompt_crc'])}.{int(line['group'])}.{int(line['uid'])}"


def _dispatched(task: g.Task, version: int, step: int) -> dict[str, Any]:
    """The local slot of a task. Nobody here groups samples or keeps prompts, so that group and prompt_crc have seq and
    slot of the claim."""
    return {
        "uid": task.uid, "group": task.seq, "prompt_crc": task.slot_id, "admission": task.admission, "member": 0,
        "group_size": 1, "cls": task.cls, "task": task.record.encode(), "priority": task.priority,
        "max_new_tokens": task.max_new_tokens, "temperature": task.temperature, "top_p": task.top_p,
        "version": version, "step": step,
    }
