"""The samples that a process plays as episodes: from the claim of a slot to its commit, drop or return.

Talks to the ring of samples. With reward.kind = "agent" it commits rewards too. Knows nothing of model calls, of the
code of episodes, of engines or groups.

- A slot stays GENERATING until its episode has ended. Slots are claimed whatever their count of attempts, suspects
  included: a process that died is no evidence against an episode.
- The death of an engine, or new weights, cost an episode nothing but time.
- The reward of an episode lies in its slot, so if its process dies another one can commit it.
- Of an episode of several seats all sides end together, each with a commit or drop of its own: the first side last.
  Nothing is written before the episode has ended. A seat without a call is not used (fate u).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from busrl.agents.episode import Episode, partner_versions
from busrl.agents.llm import Ended
from busrl.agents.seats import Worth, worth_of
from busrl.agents.sides import LINE_FIELDS, ClaimedSample, Sides
from busrl.agents.tree import Trajectory, Tree
from busrl.data.episodes import CONTEXT, joined_keys
from busrl.errors import CallUnanswered, SlotTooSmall
from busrl.protocol import messages as m
from busrl.rewards.base import MalformedReward
from busrl.ring import Ring, State, seq_of
from busrl.roles.actor import Doorbell
from busrl.roles.answers import ANY_ATTEMPT, UNREADABLE, read_task, write_parts
from busrl.roles.episodes import commit_episode, reward_of, turn_rewards_of, write_episode, write_partners
from busrl.states import REWARD_FATES, Fate, shown_uid
from busrl.topology.schema import Agents

FATES = REWARD_FATES | {"crashed": Fate.POISON}
REWARDS_AT_ONCE = 256
UNANSWERED_LIMIT = 3  # a sample is dropped after so many episodes with a call that no engine answered


class Warn(Protocol):
    """Logs, publishes and files a line for people; lines of one `kind` are counted."""

    def __call__(self, text: str, severity: str = ..., *, kind: str = ..., uids: list[int] = ..., traceback: str = ...
                 ) -> None: ...


class EpisodeSamples:
    """Claims samples, and ends each once. `settings`: the table [agents] as it is now; `write_or_wait` calls a function
    that writes, again when a full disk has room, and returns False if the run stops before that; `sides`: where
    episodes have several."""

    def __init__(self, ring: Ring, settings: Callable[[], Agents], warn: Warn,
                 write_or_wait: Callable[[str, Callable[[], None]], bool], sides: Sides | None = None) -> None:
        self.ring, self._settings, self._warn, self._write_or_wait = ring, settings, warn, write_or_wait
        self._sides = sides
        self.claims: set[ClaimedSample] = set()  # of each episode the first side
        self.ends: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # of the episodes that were settled
        self.bell, self.reward_bell = Doorbell(), Doorbell()
        self._unanswered: Counter[int] = Counter()  # by number of the episode

    # -- claims -----

    @property
    def rings(self) -> list[Ring]:
        """Rings with samples of this process."""
        return [self.ring] if self._sides is None else self._sides.rings

    @property
    def room(self) -> int:
        """The number of episodes that this process may take."""
        return self._settings().episodes - len(self.claims)

    def take(self, most: int) -> list[ClaimedSample]:
        """Claim up to `most` queued episodes, best first."""
        if (limit := min(most, self.room)) <= 0:
            return []
        if self._sides is not None:
            samples = self._sides.take(limit)
            for sample in samples:
                if sample.alone:
                    self._plays_alone(sample)
        else:
            claimed = self.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=limit, max_attempt=ANY_ATTEMPT)
            lines = self.ring.lines([slot for slot, _ in claimed])[LINE_FIELDS].tolist() if claimed else []
            samples = [ClaimedSample(*claim, dict(zip(LINE_FIELDS, line))) for claim, line in zip(claimed, lines)]
        self.claims.update(samples)
        return samples

    def _plays_alone(self, sample: ClaimedSample) -> None:
        self.counts["alone"] += 1
        text = f"episode {sample.number} is played without some of its sides: they are over, or were lost"
        self._warn(text, kind="alone", uids=[sample.uid])

    def take_together(self, slots: list[int], lines: Any) -> list[ClaimedSample]:
        """Claim all of these slots, as `lines` show them; or none, if another process was faster."""
        samples: list[ClaimedSample] = []
        for slot in slots:
            if not (word := self.ring.claim(slot, int(lines["word"][slot]), State.GENERATING)):
                for sample in samples:
                    self.give_back(sample)
                return []
            line = dict(zip(LINE_FIELDS, lines[LINE_FIELDS][slot].tolist()))
            samples.append(ClaimedSample(slot, word, line))
            self.claims.add(samples[-1])
        return samples

    def task_of(self, sample: ClaimedSample) -> bytes | None:
        """The line of the data as JSON; None if it cannot be read, and then the sample is dropped."""
        try:
            return read_task(self._ring(sample), sample.slot)
        except UNREADABLE as problem:
            self.drop(sample, Fate.MALFORMED, f"its task cannot be read: {problem}")
            return None

    # -- ends -----

    def settle(self, sample: ClaimedSample, ended: Ended, episode: Episode) -> str:
        """Commit an episode that ended, or drop its samples; returns the reason of a drop, else ""."""
        self.ends[ended.how] += 1
        for one in episode.seats.values():
            self.counts.update(one.counts)
        self._unanswered.pop(sample.number, None)
        if ended.how in FATES:
            return self.drop(sample, FATES[ended.how], f"its episode {ended.how}: {ended.text}")
        if not (spoke := episode.spoke):
            return self.drop(sample, Fate.MALFORMED, "its episode ended without a model call")
        same = Worth(self._settings().failure_reward) if ended.how == "used_up" else Worth(ended.reward, ended.parts)
        try:
            worth = worth_of(episode.places, same, ended.seats, spoke)
        except MalformedReward as problem:
            return self.drop(sample, Fate.MALFORMED, f"its episode malformed: {problem}")
        if sample.validates:
            worth = {name: _with_others(name, own, ended.seats) for name, own in worth.items()}
            if versions := partner_versions(episode):
                write_partners(self._ring(sample), sample.slot, sample.word, versions)
        return self._settle_sides(sample, worth, episode)

    def _settle_sides(self, sample: ClaimedSample, worth: dict[str, Worth], episode: Episode) -> str:
        """End each side; those that are left when the run stops go back. Returns why the first one was dropped."""
        sides, switched = sample.ending(), sum(one.counts["opponent_switched"] for one in episode.seats.values())
        recorded = {side.seat or episode.seat.name for side in sides}
        others = {name: one.tree for name, one in episode.seats.items() if name not in recorded}
        fault: str | None = ""
        for side in sides:
            one, side.switched = episode.seats.get(side.seat, episode), switched
            fault = self._settle_side(side, worth, one, others if side is sample else {})
            if fault is None:
                return ""
            sample.siblings.pop(side.seat, None)
        return fault or ""

    def _settle_side(self, side: ClaimedSample, worth: dict[str, Worth], one: Episode, others: dict[str, Tree]
                     ) -> str | None:
        """Commit a side or drop it; returns why it was dropped, else "", and None if the run stops before."""
        trajectory = one.tree.trajectory()
        if trajectory is None:
            self.ends["unused"] += 1
            self._forget(side)
            self._ring(side).drop(side.slot, side.word, Fate.UNUSED)
            return ""
        own = worth[one.seat.name]
        try:
            if not self._write_or_wait("episodes", lambda: self._write(side, trajectory, own, one, others)):
                return None  # the run stops: the sample goes back
        except SlotTooSmall as problem:
            room = "; keys of turns take the room of agents.transcript_bytes" if trajectory.keys else ""
            return self._drop([side], Fate.MALFORMED, f"its episode does not fit: {problem}{room}")
        self.commit(side, trajectory)
        return ""

    def commit(self, sample: ClaimedSample, trajectory: Trajectory) -> None:
        """Commit the trajectory that was written into the slot."""
        ring = self._ring(sample)
        message = commit_episode(ring, sample.slot, sample.word, trajectory, trajectory.step)
        self._forget(sample)
        if message is not None:
            self.bell.add(lambda: message)
            ring.add(samples=1)

    def begin_again(self, sample: ClaimedSample, problem: CallUnanswered) -> None:
        """Give back the sample of an episode with a call that engines left unanswered, so that any process can take
        it; after `UNANSWERED_LIMIT` of them drop it."""
        self._unanswered[sample.number] += 1
        if problem.code == "poison":
            self.drop(sample, Fate.POISON, str(problem))
        elif self._unanswered[sample.number] >= UNANSWERED_LIMIT:
            self.drop(sample, Fate.REWARD_RAISED, f"its calls got no answer {UNANSWERED_LIMIT} times: {problem}")
        else:
            text = f"episode {shown_uid(sample.uid)} begins again: {problem}"
            self._warn(text, kind="unanswered", uids=[sample.uid])
            self.give_back(sample)

    def give_back(self, sample: ClaimedSample) -> None:
        self._forget(sample)
        for side in sample.ending():
            self._ring(side).release(side.slot, side.word, State.QUEUED)

    def give_back_all(self) -> None:
        for sample in list(self.claims):
            self.give_back(sample)

    def drop(self, sample: ClaimedSample, fate: Fate, why: str) -> str:
        """Drop a sample, with all sides of its episode, for this reason; returns the line for people."""
        self._unanswered.pop(sample.number, None)
        return self._drop(sample.ending(), fate, why)

    def _drop(self, sides: list[ClaimedSample], fate: Fate, why: str) -> str:
        text, _, traceback = why.partition("\n")
        uids = [side.uid for side in reversed(sides)]
        text = f"sample {', '.join(map(shown_uid, uids))} {'is' if len(uids) == 1 else 'are'} dropped: {text}"
        self._warn(text, kind=f"dropped {fate.letter}", uids=uids, traceback=traceback)
        for side in sides:
            self._forget(side)
            self._ring(side).drop(side.slot, side.word, fate)
        return text

    def _forget(self, sample: ClaimedSample) -> None:
        self.claims.discard(sample)

    def _ring(self, sample: ClaimedSample) -> Ring:
        return sample.ring or self.ring

    def _write(self, sample: ClaimedSample, trajectory: Trajectory, worth: Worth, one: Episode,
               others: dict[str, Tree]) -> None:
        ring = self._ring(sample)
        keys = -(-len(joined_keys(trajectory.keys)) // 64) * 64  # a tensor begins at a multiple
        counted = {"read": sample.read, "computed": sample.computed, **one.counts}
        context = [counted.get(name, 0) for name in CONTEXT]
        if sample.seat or sample.partner_tokens:
            context += [sample.alone, sample.partner_tokens, sample.partner_age]
            context += [sample.switched] if sample.switched else []
        more = keys + 8 * (len(context) - len(CONTEXT))  # which a slot may have no room for beside
        room = self._settings().transcript_bytes - more
        transcript = one.tree.transcript(max(0, room), others)
        write_episode(ring, sample.slot, sample.word, trajectory, trajectory.text, worth.reward, transcript, context)
        try:
            write_parts(ring, sample.slot, sample.word, worth.parts)
        except SlotTooSmall as problem:  # the parts are for people: the reward counts without them
            self._warn(f"the parts of rewards are not kept: {problem}", kind="parts")

    # -- rewards -----

    def commit_rewards(self) -> int:
        """Commit the rewards that lie in slots, whoever played their episodes; returns the number of slots that were
        looked at."""
        return sum(map(self._commit_rewards, self.rings))

    def _commit_rewards(self, ring: Ring) -> int:
        claimed = ring.take(State.GENERATED, State.REWARDING, cls=None, limit=REWARDS_AT_ONCE)
        values = [(slot, word, self._returned(ring, slot, word)) for slot, word in claimed]
        judged = [(slot, word, value) for slot, word, value in values if value is not None]
        for slot, word, value in judged:
            uid = int(ring.line(slot)["uid"])
            self.reward_bell.add(partial(m.RewardComputed, slot_id=slot, seq=seq_of(word), uid=uid, reward=value))
        if judged:
            ring.commit_rewards([(slot, word) for slot, word, _ in judged], [value for *_, value in judged])
        return len(claimed)

    def _returned(self, ring: Ring, slot: int, word: int) -> float | None:
        """The reward that lies in a slot; None if there is none, and then the sample is dropped."""
        uid = int(ring.line(slot)["uid"])
        try:
            reward, why = reward_of(ring, slot), "its slot holds no reward"
        except UNREADABLE as problem:
            reward, why = None, str(problem)
        if reward is None:
            self._warn(f"sample {shown_uid(uid)} is dropped: {why}", kind="no reward", uids=[uid])
            ring.drop(slot, word, Fate.MALFORMED)
            return None
        return reward[0] + turn_rewards_of(ring, slot)


def _with_others(name: str, own: Worth, each: dict[str, Worth]) -> Worth:
    """A seat's worth, with the rewards of the others among its parts."""
    return Worth(own.reward, {**own.parts, **{other: worth.reward for other, worth in each.items() if other != name}})
