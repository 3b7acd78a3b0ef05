"""A reward worker: takes GENERATED slots, lets a child process judge them, writes the reward, commits REWARDED.

Talks to the ring and to its own child (`busrl.rewards`), where the user's function runs so that it may raise, hang or
crash. Consumes GENERATED slots, produces REWARDED ones and REWARD_COMPUTED; waits for DATA_GENERATED, unblocked by it
or by the timer. Knows nothing of tokenizers, groups or advantages.

Invariants:
- A sample whose judge raised, hung or gave no number is dropped with that reason; the others of its batch are judged.
- A slot stays REWARDING until its outcome is known: if this process dies, the slot goes back to GENERATED.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from busrl.protocol import messages as m
from busrl.rewards import Item, Outcome, RewardPool
from busrl.ring import SlotTooSmall, State, segments_of, seq_of
from busrl.roles.actor import Actor, Doorbell
from busrl.roles.trajectory import UNREADABLE, read_copies, read_generated, read_task, read_text, text_of, write_parts
from busrl.states import Fate

BATCH = 256
STREAM_BATCH, STREAM_PAUSE_S = 12, 0.05  # a little longer than the pause between two doorbells of a busy rollout
JUDGE_WAIT_S = 0.02
LOAD_LOOK_S = 0.5
WINDOW_S, BUSY = 10.0, 0.9  # a reward that worked all of this time, while samples waited, is slow
FATE_OF = {"raised": Fate.REWARD_RAISED, "hung": Fate.REWARD_HUNG, "malformed": Fate.MALFORMED}


class Load:
    """How busy the judges are, and what that costs when everybody waits for them. Pure: time comes from the caller."""

    def __init__(self, workers: int, processes: int, step_samples: int, now: float) -> None:
        self.workers, self.processes = workers, processes
        self.step_samples = step_samples
        self.busy_s = 0.0
        self._window_s, self._since, self._busy, self._judged = WINDOW_S, now, 0.0, 0

    def seen(self, busy_s: float) -> int:
        """Nanoseconds more since the last call."""
        more = max(0.0, busy_s - self.busy_s)
        self.busy_s += more
        return int(more * 1e9)

    def due(self, now: float) -> bool:
        """Whether the window that is judged together has ended."""
        return now - self._since >= self._window_s

    def slow(self, judged: int, waiting: int, now: float) -> str:
        """At the end of a window: what a reward costs that held everybody up all the time, "" if it did not."""
        passed, busy, count = now - self._since, self.busy_s - self._busy, judged - self._judged
        self._since, self._busy, self._judged = now, self.busy_s, judged
        if busy < BUSY * passed or waiting <= 2 * self.workers:
            return ""
        self._window_s *= 2  # said again, less and less often
        if not count:
            return f"the reward function gave no answer for {passed:.0f} s, {waiting} samples wait; {self._remedy()}"
        call_s = busy * self.workers / count
        step_s = self.step_samples * call_s / (self.workers * self.processes)
        return (
            f"the reward holds everything up: a call takes {call_s:.3g} s, a step's {self.step_samples} samples "
            f"{step_s:.3g} s, and {waiting} wait; {self._remedy()}"
        )

    def hung(self) -> str:
        """What a call that does not end costs, to be added to the warning of it."""
        return f"; each such call holds its worker up for so long: {self._remedy()}, or lower the limit"

    def _remedy(self) -> str:
        all_ = self.workers * self.processes
        return (
            f"{f'{all_} workers serve' if all_ > 1 else 'one worker serves'} all: raise reward.workers "
            f"({self.workers}) or make the function faster"
        )


class Reward(Actor):
    role = "reward"
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (m.DataGenerated,)

    def setup(self) -> None:
        self.pool = RewardPool(self.topology.reward)
        # Not ready before its function is: one that can not be loaded ends the run instead of being tried for ever.
        with self.activity("load the reward function", self.topology.limits.ready_s):
            while not self.stopping and not self.pool.wait_ready(LOAD_LOOK_S):
                pass
        self.held: dict[int, int] = {}  # slot -> the word that we own it by
        self.wants_ids = self.topology.reward.kind == "python"  # exact_match compares text
        self.bell = Doorbell()
        self.streaming = False
        self.rung, self.next_look = True, 0.0
        self.load = self._load()

    def _load(self) -> Load:
        topology, reward = self.topology, self.topology.reward
        processes = sum(one.role == "reward" for one in topology.processes())
        samples = topology.learner.trigger.n_min * topology.groups.size
        return Load(reward.workers, processes, samples, time.monotonic())

    def handle(self, message: m.Message) -> None:
        self.rung = True

    def step(self) -> bool:
        taken = self._take()
        if taken:
            self.pool.submit(self._items(taken))
        # In a stream of answers one look takes many; the last ones of a round come few at a time and are not kept.
        self.streaming = len(taken) >= STREAM_BATCH
        return bool(self._settle(0.0)) and not self.streaming

    def _take(self) -> list[tuple[int, int]]:
        """Look at the ring when a doorbell rang, or a tick after the last look; an answer of the judge is no reason."""
        now, limit = time.monotonic(), BATCH - len(self.held)
        if not self.rung and now < self.next_look:
            return []
        self.next_look = now + self.tick_s
        taken = self.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=limit)
        self.rung = len(taken) == limit  # there may be more than fitted
        return taken

    def idle(self, timeout_s: float) -> None:
        """In a stream let answers gather until the next doorbell: one wake-up for many of them, not one for each."""
        if self.streaming:
            super().idle(min(timeout_s, STREAM_PAUSE_S))
        elif not self.held:
            super().idle(timeout_s)
        elif not self._settle(0.0):
            self.bus.wait(min(timeout_s, JUDGE_WAIT_S), self.pool.fileno())

    def _settle(self, timeout_s: float) -> int:
        """Commit what the judges have answered, waiting at most `timeout_s` for a first answer."""
        outcomes = self.pool.poll(timeout_s)
        self._count_busy()
        self._commit([outcome for outcome in outcomes if outcome.error is None])
        for outcome in outcomes:
            if outcome.error is not None:
                said, _, trace = outcome.text.partition("\n")
                said += self.load.hung() if outcome.error == "hung" else ""
                self._drop(outcome.key, outcome.error, f"{outcome.error}: {said}", trace)
        self.ring_bell(self.bell)
        if outcomes:
            self.ring.add(samples=len(outcomes))
        return len(outcomes)

    def _count_busy(self) -> None:
        stats = self.pool.stats()
        if busy_ns := self.load.seen(stats.busy_s):
            self.ring.add(busy_ns=busy_ns)
        if self.load.due(now := time.monotonic()):
            waiting = len(self.held) + self.ring.stats().occupancy.get("GENERATED", 0)
            if slow := self.load.slow(sum((stats.judged, stats.raised, stats.malformed)), waiting, now):
                self.warn("reward", slow, kind="slow")

    def _items(self, taken: Sequence[tuple[int, int]]) -> list[Item]:
        """What the judge needs of each; a sample that can not be read is dropped as malformed."""
        self.held.update(taken)
        try:
            tasks = read_copies(self.ring, taken, "task")
            texts = map(text_of, read_copies(self.ring, taken, "text"))
            ids = [self._ids(slot, word) if self.wants_ids else [] for slot, word in taken]
            return [Item(held[0], *parts) for held, parts in zip(taken, zip(tasks, texts, ids))]
        except UNREADABLE:  # which of them it is, is found one by one
            return [item for slot, word in taken if (item := self._item(slot, word)) is not None]

    def _item(self, slot: int, word: int) -> Item | None:
        try:
            ids = self._ids(slot, word) if self.wants_ids else []
            return Item(slot, read_task(self.ring, slot), read_text(self.ring, slot, segments_of(word)), ids)
        except UNREADABLE as problem:
            self._drop(slot, "malformed", f"has a payload that can not be read: {problem}")
            return None

    def _ids(self, slot: int, word: int) -> list[int]:
        ids: list[int] = read_generated(self.ring, slot, "tokens", segments_of(word)).tolist()
        return ids

    def _commit(self, outcomes: Sequence[Outcome]) -> None:
        """Write the rewards of judged samples and let their slots go on."""
        owned = [(outcome.key, self.held.pop(outcome.key)) for outcome in outcomes]
        for (slot, word), outcome in zip(owned, outcomes):
            try:
                write_parts(self.ring, slot, word, outcome.parts)
            except SlotTooSmall as problem:  # they are for people: the reward counts all the same
                self.warn("reward", f"the parts of rewards are not kept: {problem}", kind="parts")
        if owned:
            self.bell.add(lambda: self._message(*owned[0], outcomes[0].value), len(owned))
            self.ring.commit_rewards(owned, [outcome.value for outcome in outcomes])

    def _message(self, slot: int, word: int, reward: float) -> m.RewardComputed:
        return m.RewardComputed(slot_id=slot, seq=seq_of(word), uid=int(self.ring.line(slot)["uid"]), reward=reward)

    def _drop(self, slot: int, error: str, text: str, trace: str = "") -> None:
        word = self.held.pop(slot)
        uid = int(self.ring.line(slot)["uid"])
        self.warn("reward", f"sample {uid} {text}", kind=error, uids=[uid], trace=trace)
        self.bell.add(lambda: self._message(slot, word, 0.0))
        self.ring.drop(slot, word, FATE_OF[error])

    def teardown(self) -> None:
        self.pool.close()
        for slot, word in self.held.items():
            self.ring.release(slot, word, State.GENERATED)


def main(run_dir: str, name: str) -> int:
    return Reward(run_dir, name).main()
