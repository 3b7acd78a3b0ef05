"""A reward worker: claims GENERATED slots, has child processes judge them, writes the reward, commits REWARDED.

Talks to the ring and to its children (`busrl.rewards`), where the user's function may raise, hang or crash. Knows
nothing of tokenizers, groups or advantages.

- A sample whose function raised, hung or returned no number is dropped with that reason; the others are judged.
- A slot stays REWARDING until its outcome is known: if this process dies, the slot goes back to GENERATED.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from busrl.data.vocabulary import token_rows
from busrl.errors import SharedMemoryFull, SlotTooSmall
from busrl.protocol import messages as m
from busrl.rewards.base import Item, Outcome
from busrl.rewards.pool import RewardPool
from busrl.ring import State, segments_of, seq_of
from busrl.roles.actor import Actor, Doorbell, ring_bells
from busrl.roles.answers import UNREADABLE, read_copies, read_generated, read_task, read_text, text_of, write_parts
from busrl.roles.episodes import last_call, seen_by_reward, turn_rewards_of
from busrl.states import REWARD_FATES, shown_uid
from busrl.topology.rewards import REWARD_KINDS

BATCH = 256
STREAM_BATCH, STREAM_PAUSE_S = 12, 0.05  # a little longer than the pause between two doorbells of a busy rollout
JUDGE_WAIT_S = 0.02
LOAD_LOOK_S = 0.5
LONG_S = 1.0  # a call is shown from then on
WINDOW_S, BUSY = 10.0, 0.9  # a reward that was busy for this share of a window, while samples waited, is slow


class RewardLoad:
    """Measures how busy the reward functions are, and what that costs when samples wait. Pure: time comes from the
    caller."""

    def __init__(self, workers: int, processes: int, step_samples: int, now: float) -> None:
        self.workers, self.processes, self.step_samples = workers, processes, step_samples
        self.busy_s = 0.0
        self._window_s, self._since, self._busy, self._judged = WINDOW_S, now, 0.0, 0

    def seen(self, busy_s: float) -> int:
        """Nanoseconds more since the last call."""
        more = max(0.0, busy_s - self.busy_s)
        self.busy_s += more
        return int(more * 1e9)

    def due(self, now: float) -> bool:
        """True once the window has ended."""
        return now - self._since >= self._window_s

    def slow(self, judged: int, waiting: int, now: float) -> str:
        """End a window; returns a warning if the run waited for the rewards all the time, else ""."""
        passed, busy, count = now - self._since, self.busy_s - self._busy, judged - self._judged
        self._since, self._busy, self._judged = now, self.busy_s, judged
        if busy < BUSY * passed or waiting <= 2 * self.workers:
            return ""
        self._window_s *= 2  # repeated, less and less often
        if not count:
            return f"the reward function gave no answer for {passed:.0f} s, {waiting} samples wait; {self._remedy()}"
        call_s = busy * self.workers / count
        step_s = self.step_samples * call_s / (self.workers * self.processes)
        return (
            f"the run waits for the reward: a call takes {call_s:.3g} s, a step's {self.step_samples} samples "
            f"{step_s:.3g} s, and {waiting} wait; {self._remedy()}"
        )

    def hung(self) -> str:
        """The end of the warning of a hung call."""
        return f"; each such call blocks its worker for so long: {self._remedy()}, or lower the limit"

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
        reward, device = self.topology.reward, self.topology.device_of(self.name)
        ready_s, prompt_key = self.topology.limits.ready_s, self.topology.data.prompt_key
        base_dir = self.topology.base_dir
        self.pool = RewardPool(reward, base_dir=base_dir, ready_s=ready_s, prompt_key=prompt_key, device=device)
        # Not ready before its function is: one that cannot be loaded ends the run instead of many restarts.
        with self.activity("load the reward function", self.topology.limits.ready_s):
            while not self.stopping and not self.pool.wait_ready(LOAD_LOOK_S):
                pass
        self.claimed: dict[int, int] = {}  # slot -> the word that we own it by
        kinds = {part.kind for part in reward.part} or {reward.kind}
        self.wants_ids = any(REWARD_KINDS[kind].with_ids for kind in kinds)
        self.bell = Doorbell()
        self.known = token_rows(Path(self.topology.model.path))
        self.streaming = False
        self.call_s = 0.0  # of the longest call
        self.rung, self.next_look = True, 0.0
        processes = sum(process.role == "reward" for process in self.topology.processes())
        samples = self.topology.learner.trigger.n_min * self.topology.groups.size
        self.load = RewardLoad(self.topology.reward.workers, processes, samples, time.monotonic())

    def handle(self, message: m.Message) -> None:
        self.rung = True

    def work(self) -> bool:
        claims = self._take()
        if claims:
            self.pool.submit(self.items(claims))
        # In a stream of answers one look takes many; the last ones of a round come few at a time and are not kept.
        self.streaming = len(claims) >= STREAM_BATCH
        return bool(self._settle()) and not self.streaming

    def _take(self) -> list[tuple[int, int]]:
        """Claim slots when a doorbell rang, or a tick after the last look; a reward that arrived is no reason."""
        now, limit = time.monotonic(), BATCH - len(self.claimed)
        if not self.rung and now < self.next_look:
            return []
        self.next_look = now + self.tick_s
        claims = self.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=limit)
        self.rung = len(claims) == limit  # there may be more than fitted
        return claims

    def idle(self, timeout_s: float) -> None:
        """Wait; in a stream let answers gather until the next doorbell: a wake-up for many of them, not for each."""
        if self.streaming:
            super().idle(min(timeout_s, STREAM_PAUSE_S))
        elif not self.claimed:
            super().idle(timeout_s)
        elif not self._settle():
            self.bus.wait(min(timeout_s, JUDGE_WAIT_S), self.pool.fileno())

    def _settle(self) -> int:
        outcomes = self.pool.poll(0.0)
        self._count_busy()
        self._show_call()
        self._commit([outcome for outcome in outcomes if not outcome.error])
        for outcome in outcomes:
            if outcome.error:
                text, _, traceback = outcome.text.partition("\n")
                text += self.load.hung() if outcome.error == "hung" else ""
                self._drop(outcome.key, outcome.error, f"{outcome.error}: {text}", traceback)
        ring_bells(self.bus, self.bell)
        if outcomes:
            self.ring.add(samples=len(outcomes))
        return len(outcomes)

    def _count_busy(self) -> None:
        if busy_ns := self.load.seen(self.pool.busy_s):
            self.ring.add(busy_ns=busy_ns)
        if self.load.due(now := time.monotonic()):
            counts, waiting = self.pool.counts, len(self.claimed) + self.ring.stats().occupancy.get("GENERATED", 0)
            if slow := self.load.slow(counts.total() - counts["hung"], waiting, now):
                self.warn("reward", slow, kind="slow")

    def _show_call(self) -> None:
        what, seconds = self.pool.longest()
        self.shown.usually(f"in {what}" if seconds >= LONG_S else "", again=LONG_S <= seconds < self.call_s)
        self.call_s = seconds

    def items(self, claims: Sequence[tuple[int, int]]) -> list[Item]:
        """The input of the function for each claimed sample; one that cannot be read is dropped as malformed."""
        self.claimed.update(claims)
        if self.known.without:
            claims = [claim for claim in claims if self._is_text(*claim)]
        try:
            both = zip(read_copies(self.ring, claims, "task"), map(text_of, read_copies(self.ring, claims, "text")))
            return [Item(slot, *read, *self._more(slot, word)) for (slot, word), read in zip(claims, both)]
        except UNREADABLE:  # one by one, to find which of them
            return [item for slot, word in claims if (item := self._item(slot, word)) is not None]

    def _is_text(self, slot: int, word: int) -> bool:
        """True if all ids of an answer stand for tokens; it is dropped if not: a program that is no rollout of busrl's
        has written it. Calls of episodes were answered by rollouts."""
        with contextlib.suppress(*UNREADABLE):
            if len(wrong := self.known.foreign(read_generated(self.ring, slot, "tokens", segments_of(word)))):
                self._drop(slot, "malformed", f"is dropped: {self.known.describe(wrong)}")
                return False
        return True

    def _item(self, slot: int, word: int) -> Item | None:
        try:
            text = read_text(self.ring, slot, segments_of(word))
            return Item(slot, read_task(self.ring, slot), text, *self._more(slot, word))
        except UNREADABLE as problem:
            self._drop(slot, "malformed", f"has a payload that cannot be read: {problem}")
            return None

    def _more(self, slot: int, word: int) -> tuple[list[int], dict[str, Any] | None]:
        """The token ids, none where only the text is judged; and of an episode all that a function may ask for."""
        if not self.wants_ids:
            return [], None
        if (last := last_call(self.ring, slot)) is not None:
            return last["tokens"].tolist(), seen_by_reward(self.ring, slot)
        return read_generated(self.ring, slot, "tokens", segments_of(word)).tolist(), None

    def _commit(self, outcomes: Sequence[Outcome]) -> None:
        owned = [(outcome.key, self.claimed.pop(outcome.key)) for outcome in outcomes]
        rewards = [outcome.value + turn_rewards_of(self.ring, outcome.key) for outcome in outcomes]
        for (slot, word), outcome in zip(owned, outcomes):
            try:
                write_parts(self.ring, slot, word, outcome.parts)
            except (SlotTooSmall, SharedMemoryFull) as problem:  # they are for people: the reward counts all the same
                self.warn("reward", f"the parts of rewards are not kept: {problem}", kind="parts")
        if owned:
            self.bell.add(lambda: self._message(*owned[0], rewards[0]), len(owned))
            self.ring.commit_rewards(owned, rewards)

    def _message(self, slot: int, word: int, reward: float) -> m.RewardComputed:
        return m.RewardComputed(slot_id=slot, seq=seq_of(word), uid=int(self.ring.line(slot)["uid"]), reward=reward)

    def _drop(self, slot: int, error: str, text: str, traceback: str = "") -> None:
        word = self.claimed.pop(slot)
        uid = int(self.ring.line(slot)["uid"])
        self.warn("reward", f"sample {shown_uid(uid)} {text}", kind=error, uids=[uid], traceback=traceback)
        self.bell.add(lambda: self._message(slot, word, 0.0))
        self.ring.drop(slot, word, REWARD_FATES[error])

    def teardown(self) -> None:
        self.pool.close()
        for slot, word in self.claimed.items():
            self.ring.release(slot, word, State.GENERATED)
