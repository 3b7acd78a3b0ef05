"""The tasks that another host holds: their slots in its ring, and the answers that are read from them.

`Holdings` takes the place of scheduler and learner for the local ring; `AnswerReader` copies what home needs out of
slots. Both talk to the ring and the tables of fates. Knows nothing of the bus, of home's address, or of engines.

- A local slot is the record of a claim: its line holds the task's slot, seq and uid at home. A new process finds there
  the tasks of the process before it.
- An answer stays in its slot, TRAINING, until home has settled it.
- A task that home has given to another host is dropped here: at once if no engine has it, else when the engine lets go.
- Local fates say only that a sample is here; home's alone count.
- Routes are compressed once: the task keeps the result, which is sent again as it is, until home has settled it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from busrl.data.episodes import NEEDED, TYPES
from busrl.errors import BadTensor, NoSuchTensor
from busrl.hosts import messages as g
from busrl.hosts.desk import DIGESTS, FATES, HOST, digest_of, tensor, zipped
from busrl.protocol import messages as m
from busrl.ring import UID_NONE, Fates, Ring, State, segments_of
from busrl.roles.answers import UNREADABLE, read_copies, read_generated, read_parts, text_of
from busrl.scheduling.admission import Lines
from busrl.states import VALIDATE_BIT, Fate, HeaderWord

TENSORS = ("tokens", "logprobs", "versions", "prompt_ids")
ROUTES = ("routes", "prompt_routes")
BESIDE = 512  # bytes of an answer in a message beside its tensors and its text
OF_TENSOR = 64  # bytes of an episode's tensor in a message beside its data
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
    failed: g.RemoteFail | None = None  # its outcome, where there is no answer
    sent_at: float = 0.0
    request: int = 0  # the number of the newest request when its outcome was sent
    lost: bool = False  # home has given it to others
    digest: int = 0
    zipped: dict[str, g.Tensor] = field(default_factory=dict)  # of its answer, what was compressed

    def __post_init__(self) -> None:
        self.digest = digest_of(self.task)

    @property
    def ended(self) -> bool:
        """Check whether its outcome is on the way home."""
        return bool(self.word) or self.failed is not None


class Holdings:
    """The tasks of this host, by their names at home."""

    def __init__(self, ring: Ring, fates: Fates, validate_fates: Fates) -> None:
        self.ring, self.fates, self.validate_fates = ring, fates, validate_fates
        self.by_name: dict[str, HeldTask] = {}
        self.waiting: dict[str, g.Task] = {}  # those without a slot
        self.lost: dict[str, HeldTask] = {}  # those that home has given to others
        self.over: dict[str, None] = {}  # claims that have ended, oldest first: a late copy of one is no task
        self.uids = np.full(ring.n_slots, UID_NONE, np.uint64)  # by slot, of the tasks that have not ended
        lines = ring.lines()
        for slot in (lines["state"] != State.FREE).nonzero()[0].tolist():  # tasks of an earlier life of this process
            task = HeldTask(_task_of(lines[slot]), int(lines["uid"][slot]), slot)
            self.by_name[task.task] = task
            self.uids[slot] = task.uid

    # -- messages from home -----

    def accept(self, tasks: Iterable[g.Task]) -> None:
        """Hold tasks from home; a copy of a task that is here, or was, changes nothing."""
        for task in tasks:
            if task.task not in self.by_name and task.task not in self.over:
                self.by_name[task.task] = HeldTask(task.task, task.uid)
                self.waiting[task.task] = task

    def settle(self, name: str) -> None:
        """End a task of which home needs nothing more: it is done, or another host's."""
        task = self.by_name.get(name)
        if task is None:
            return
        if task.word:  # home has the answer, or takes it no more
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
        for tasks in (self.by_name, self.waiting, self.lost):
            tasks.pop(task.task, None)
        if task.slot >= 0 and self.uids[task.slot] == task.uid:
            self.uids[task.slot] = UID_NONE
        self.over[task.task] = None
        if len(self.over) > REMEMBERED:
            del self.over[next(iter(self.over))]

    # -- figures -----

    @property
    def claimed(self) -> int:
        """The number of tasks that home counts as this host's, by the messages that have come."""
        return len(self.by_name) - len(self.lost)

    @property
    def unfinished(self) -> int:
        """The number of tasks whose outcome is not on the way home."""
        return sum(not task.ended for task in self.by_name.values())

    def digest(self) -> int:
        """The digest of the claims that home should have. An ended task is none of them: home settles an answer before
        it reads what is sent after it."""
        return sum(task.digest for task in self.by_name.values() if not (task.lost or task.ended)) % DIGESTS

    def names(self) -> list[str]:
        """The claims that home has given to no other host, by the messages that have come."""
        return [name for name, task in self.by_name.items() if not task.lost][:m.MAX_MAP]

    # -- the local ring -----

    def dispatch(self, dropped: Callable[[HeldTask], None]) -> Iterator[tuple[g.Task, int, int]]:
        """Put waiting tasks into free slots, the most urgent first; yields each with its slot and word.

        A task waits while an earlier claim of its uid is still here, and until the relay has written its version into
        the ring. `dropped` gets the task that had the slot, if it was dropped and not noticed yet. DiskFull,
        SharedMemoryFull: no room.
        """
        newest = self.ring.header(HeaderWord.VERSION)
        here = {task.uid for task in self.by_name.values() if task.slot >= 0} if self.waiting else set()
        for task in sorted(self.waiting.values(), key=lambda task: (-task.priority, task.admission, task.uid)):
            if task.uid in here or task.version > newest:
                continue
            here.add(task.uid)
            self._reset_fate(task.uid)
            step = self.ring.header(HeaderWord.VERSION_STEP)  # before the version: never newer than what is drawn
            placed = self.ring.dispatch(**_dispatched(task, self.ring.header(HeaderWord.VERSION), step))
            if not placed:
                return
            slot, word = placed[0]
            if self.uids[slot] != UID_NONE:  # of a task that was dropped here a moment ago
                dropped(next(before for before in self.by_name.values() if before.slot == slot and not before.ended))
            self.by_name[task.task].slot, self.uids[slot] = slot, task.uid
            del self.waiting[task.task]
            yield task, slot, word

    def answered(self, judged: bool, most: int = COLLECT_AT_ONCE) -> tuple[list[HeldTask], int]:
        """Take at most so many slots of answers that are ready, with their rewards where they are `judged` here.
        Returns the tasks, and the number of slots."""
        if not judged:
            for slot, word in self.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=COLLECT_AT_ONCE):
                self.ring.release(slot, word, State.REWARDED)
        slots = self.ring.take(State.REWARDED, State.TRAINING, cls=None, limit=most)
        ready = []
        for (slot, word), line in zip(slots, self.ring.lines([slot for slot, _ in slots])):
            task = self.by_name.get(_task_of(line))
            if task is not None and not task.lost:
                task.slot, task.word, self.uids[slot] = slot, word, UID_NONE
                ready.append(task)
                continue
            self.ring.finish(slot, word, Fate.TRAINED)
            if task is not None:
                self.forget(task)
        return ready, len(slots)

    def dropped(self) -> list[HeldTask]:
        """Tasks that engines, rewards or the keeper of this host gave up; they have left their slots."""
        lines = self.ring.lines()
        for task in list(self.lost.values()):  # the engine that had it is gone
            if lines["state"][task.slot] == State.QUEUED and int(lines["uid"][task.slot]) == task.uid:
                self.ring.drop(task.slot, int(lines["word"][task.slot]), Fate.OLD)
        gone = (self.uids != UID_NONE) & ((lines["state"] == State.FREE) | (lines["uid"] != self.uids))
        if not gone.any():
            return []
        return [task for task in self.by_name.values() if task.slot >= 0 and not task.ended and gone[task.slot]]

    def leave_slot(self, task: HeldTask) -> Fate | None:
        """Note that a task has left its slot without an answer. Returns its fate for home, NONE where home has to give
        it out again; None if home has given the task to another host already: it is forgotten."""
        self.uids[task.slot] = UID_NONE
        if task.lost:
            self.forget(task)
            return None
        table, index = self._place(task.uid)
        return next((fate for fate in DROPS if fate == table.get(index)), Fate.NONE)

    def let_go(self, count: int) -> None:
        """Drop `count` samples that no engine has; they go back to home."""
        lines = self.ring.lines()
        for slot in (lines["state"] == State.QUEUED).nonzero()[0][:count].tolist():
            self.ring.drop(slot, int(lines["word"][slot]), Fate.OLD)

    def _reset_fate(self, uid: int) -> None:
        """Clear the fate that the sample may have from an earlier claim; only this process dispatches here."""
        table, index = self._place(uid)
        table.reserve(index + 1)
        if table.get(index):
            with open(table.path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), b"\0", index)

    def _place(self, uid: int) -> tuple[Fates, int]:
        """The table and the index of a sample's fate."""
        return (self.validate_fates, uid & ~VALIDATE_BIT) if uid & VALIDATE_BIT else (self.fates, uid)


@dataclass
class ReadAnswer:
    """An answer as it was read from its slot; the slot keeps it until home has it."""

    task: HeldTask
    text: str
    finish: int
    reward: float
    parts: dict[str, float]
    tensors: dict[str, bytes]
    step: int  # that made the oldest weights which drew it
    episode: dict[str, g.Tensor]  # in place of the tensors
    routes: dict[str, g.Tensor]  # in a run with routes; none of an answer of validation

    @property
    def size(self) -> int:
        """An upper bound of its bytes on the wire."""
        pieces = (*self.episode.values(), *self.routes.values())
        episode = sum(OF_TENSOR + len(piece.data) for piece in pieces)
        return BESIDE + 4 * len(self.text) + sum(map(len, self.tensors.values())) + episode


class AnswerReader:
    """Reads answers from slots. `plays`: they are episodes; `judges`: this host makes their rewards too; `routed`: they
    have routes, which are compressed where it `zips`."""

    def __init__(self, ring: Ring, plays: bool, judges: bool, routed: bool = False, zips: bool = False) -> None:
        self.ring, self.plays, self.judges, self.routed, self.zips = ring, plays, judges, routed, zips

    def end_compression(self) -> None:
        """Compress nothing more."""
        self.zips = False

    def read(
        self, ready: list[HeldTask], unreadable: Callable[[HeldTask, Exception], None]
    ) -> Iterator[ReadAnswer]:
        """Yield the answer of each task; `unreadable` gets those that cannot be read."""
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
                self._zipped(task, tensors_of(self.ring, task.slot)) if self.plays else {},
                self._routes(task) if self.routed and not self.plays else {},
            )
            for at, (task, text, line) in enumerate(zip(ready, texts, lines))
        ]

    def _routes(self, task: HeldTask) -> dict[str, g.Tensor]:
        return task.zipped or self._zipped(task, routes_of(self.ring, task.slot, segments_of(task.word)))

    def _zipped(self, task: HeldTask, pieces: dict[str, g.Tensor]) -> dict[str, g.Tensor]:
        """The tensors with routes compressed, where that is asked for, and was not done yet."""
        if self.zips and not task.zipped:
            task.zipped = {name: zipped(piece) for name, piece in pieces.items() if name in ROUTES}
        return pieces | task.zipped

    def _columns(self, slots: list[tuple[int, int]], name: str) -> list[bytes]:
        """A tensor of each slot, its segments one behind the other."""
        if name == "prompt_ids" or all(segments_of(word) == 1 for _, word in slots):
            return read_copies(self.ring, slots, name)
        return [read_generated(self.ring, slot, name, segments_of(word)).tobytes() for slot, word in slots]


def _task_of(line: np.void) -> str:
    """The name of the task at home, which `_dispatched` wrote into the line of the local slot."""
    return f"{int(line['prompt_crc'])}.{int(line['group'])}.{int(line['uid'])}"


def _dispatched(task: g.Task, version: int, step: int) -> dict[str, Any]:
    """The line of a task's local slot. Nothing on this host groups samples or checks prompts: group and prompt_crc hold
    the claim's seq and slot at home."""
    return {
        "uid": task.uid, "group": task.seq, "prompt_crc": task.slot_id, "admission": task.admission, "member": 0,
        "group_size": 1, "cls": task.cls, "task": task.record.encode(), "priority": task.priority,
        "max_new_tokens": task.max_new_tokens, "temperature": task.temperature, "top_p": task.top_p,
        "version": version, "step": step,
    }


def tensors_of(ring: Ring, slot: int) -> dict[str, g.Tensor]:
    """The tensors of the episode in a slot that this process holds, as they travel; the receiver checks them."""
    arrays = {name: ring.get(slot, name, 0) for name in NEEDED}
    for name in (*(TYPES.keys() - arrays.keys()), "routes"):
        with contextlib.suppress(NoSuchTensor):
            arrays[name] = ring.get(slot, name, 0)
    return {name: tensor(array) for name, array in arrays.items()}


def routes_of(ring: Ring, slot: int, segments: int) -> dict[str, g.Tensor]:
    """The routes of the answer in a slot that this process holds, those of its segments joined; none where it has none.
    """
    pieces = {}
    with contextlib.suppress(NoSuchTensor):
        parts = [ring.get(slot, "routes", segment) for segment in range(segments)]
        if len({part.shape[1:] for part in parts}) > 1:
            raise BadTensor(f"slot {slot}: routes of its segments have the shapes {[part.shape for part in parts]}")
        pieces["routes"] = tensor(np.concatenate(parts))
        pieces["prompt_routes"] = tensor(ring.get(slot, "prompt_routes"))
    return pieces
