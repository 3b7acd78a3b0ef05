"""The samples that a process plays as episodes: from the claim of a slot to its commit, drop or return.

Talks to the ring of samples. With reward.kind = "agent" it commits rewards too. Knows nothing of model calls, of the
code of episodes, of engines or groups.

- A slot stays GENERATING until its episode has ended. Slots are claimed whatever their count of attempts, suspects
  included: a process that died is no evidence against an episode.
- The death of an engine, or new weights, cost an episode nothing but time.
- The reward of an episode lies in its slot, so if its process dies another one can commit it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from busrl.agents.episode import Episode
from busrl.agents.llm import Ended
from busrl.agents.tree import Trajectory
from busrl.data.episodes import CONTEXT
from busrl.errors import CallUnanswered, SlotTooSmall
from busrl.protocol import messages as m
from busrl.ring import Ring, State, seq_of
from busrl.roles.actor import Doorbell
from busrl.roles.answers import ANY_ATTEMPT, UNREADABLE, read_task, write_parts
from busrl.roles.episodes import commit_episode, reward_of, turn_rewards_of, write_episode
from busrl.states import REWARD_FATES, Fate, shown_uid
from busrl.topology.schema import Agents

FATES = REWARD_FATES | {"crashed": Fate.POISON}
LINE_FIELDS = ["uid", "cls", "version", "step", "max_new_tokens", "temperature", "top_p", "priority", "admission",
               "group"]
REWARDS_AT_ONCE = 256
UNANSWERED_LIMIT = 3  # a sample is dropped after so many episodes with a call that no engine answered


@dataclass
class ClaimedSample:
    """A sample of this process: its slot, the state word of the claim, and its line at the claim."""

    slot: int
    word: int
    line: dict[str, Any]
    read: int = 0  # ids that its calls read, in sum
    computed: int = 0  # those of them that no engine had in its prefix cache

    @property
    def uid(self) -> int:
        return int(self.line["uid"])


class Warn(Protocol):
    """Logs, publishes and files a line for people; lines of one `kind` are counted."""

    def __call__(self, text: str, severity: str = ..., *, kind: str = ..., uids: list[int] = ..., traceback: str = ...
                 ) -> None: ...


class EpisodeSamples:
    """Claims samples, and ends each once. `settings`: the table [agents] as it is now; `write_or_wait` calls a function
    that writes, again when a full disk has room, and returns False if the run stops before that."""

    def __init__(self, ring: Ring, settings: Callable[[], Agents], warn: Warn,
                 write_or_wait: Callable[[str, Callable[[], None]], bool]) -> None:
        self.ring, self._settings, self._warn, self._write_or_wait = ring, settings, warn, write_or_wait
        self.claims: dict[int, ClaimedSample] = {}  # by slot
        self.ends: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # of the episodes that were settled
        self.bell, self.reward_bell = Doorbell(), Doorbell()
        self._unanswered: Counter[int] = Counter()  # by uid

    # -- claims -----

    @property
    def room(self) -> int:
        """The number of samples that this process may take."""
        return self._settings().episodes - len(self.claims)

    def take(self, most: int) -> list[ClaimedSample]:
        """Claim up to `most` queued samples, best first."""
        if (limit := min(most, self.room)) <= 0:
            return []
        claimed = self.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=limit, max_attempt=ANY_ATTEMPT)
        lines = self.ring.lines([slot for slot, _ in claimed])[LINE_FIELDS].tolist() if claimed else []
        samples = [ClaimedSample(*claim, dict(zip(LINE_FIELDS, line))) for claim, line in zip(claimed, lines)]
        self.claims.update({sample.slot: sample for sample in samples})
        return samples

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
            self.claims[slot] = samples[-1]
        return samples

    def task_of(self, sample: ClaimedSample) -> bytes | None:
        """The line of the data as JSON; None if it cannot be read, and then the sample is dropped."""
        try:
            return read_task(self.ring, sample.slot)
        except UNREADABLE as problem:
            self.drop(sample, Fate.MALFORMED, f"its task cannot be read: {problem}")
            return None

    # -- ends -----

    def settle(self, sample: ClaimedSample, ended: Ended, episode: Episode) -> str:
        """Commit an episode that ended, or drop its sample; returns the reason of a drop, else ""."""
        self.ends[ended.how] += 1
        self.counts.update(episode.counts)
        self._unanswered.pop(sample.uid, None)
        if ended.how in FATES:
            return self.drop(sample, FATES[ended.how], f"its episode {ended.how}: {ended.text}")
        trajectory = episode.tree.trajectory()
        if trajectory is None:
            return self.drop(sample, Fate.MALFORMED, "its episode ended without a model call")
        try:
            if not self._write_or_wait("episodes", lambda: self._write(sample, trajectory, ended, episode)):
                return ""  # the run stops: the sample goes back
        except SlotTooSmall as problem:
            return self.drop(sample, Fate.MALFORMED, f"its episode does not fit: {problem}")
        self.commit(sample, trajectory)
        return ""

    def commit(self, sample: ClaimedSample, trajectory: Trajectory) -> None:
        """Commit the trajectory that was written into the slot."""
        message = commit_episode(self.ring, sample.slot, sample.word, trajectory, trajectory.step)
        del self.claims[sample.slot]
        if message is not None:
            self.bell.add(lambda: message)
            self.ring.add(samples=1)

    def begin_again(self, sample: ClaimedSample, problem: CallUnanswered) -> None:
        """Give back the sample of an episode with a call that engines left unanswered, so that any process can take
        it; after `UNANSWERED_LIMIT` of them drop it."""
        self._unanswered[sample.uid] += 1
        if problem.code == "poison":
            self.drop(sample, Fate.POISON, str(problem))
        elif self._unanswered[sample.uid] >= UNANSWERED_LIMIT:
            self.drop(sample, Fate.REWARD_RAISED, f"its calls got no answer {UNANSWERED_LIMIT} times: {problem}")
        else:
            text = f"episode {shown_uid(sample.uid)} begins again: {problem}"
            self._warn(text, kind="unanswered", uids=[sample.uid])
            self.give_back(sample)

    def give_back(self, sample: ClaimedSample) -> None:
        del self.claims[sample.slot]
        self.ring.release(sample.slot, sample.word, State.QUEUED)

    def give_back_all(self) -> None:
        for sample in list(self.claims.values()):
            self.give_back(sample)

    def drop(self, sample: ClaimedSample, fate: Fate, why: str) -> str:
        """Drop a sample for this reason; returns the line for people."""
        text, _, traceback = why.partition("\n")
        del self.claims[sample.slot]
        self._unanswered.pop(sample.uid, None)
        text = f"sample {shown_uid(sample.uid)} is dropped: {text}"
        self._warn(text, kind=f"dropped {fate.letter}", uids=[sample.uid], traceback=traceback)
        self.ring.drop(sample.slot, sample.word, fate)
        return text

    def _write(self, sample: ClaimedSample, trajectory: Trajectory, ended: Ended, episode: Episode) -> None:
        settings = self._settings()
        reward = settings.failure_reward if ended.how == "used_up" else ended.reward
        transcript = episode.tree.transcript(settings.transcript_bytes)
        counted = {"read": sample.read, "computed": sample.computed, **episode.counts}
        context = [counted.get(name, 0) for name in CONTEXT]
        write_episode(self.ring, sample.slot, sample.word, trajectory, trajectory.text, reward, transcript, context)
        try:
            write_parts(self.ring, sample.slot, sample.word, ended.parts)
        except SlotTooSmall as problem:  # the parts are for people: the reward counts without them
            self._warn(f"the parts of rewards are not kept: {problem}", kind="parts")

    # -- rewards -----

    def commit_rewards(self) -> int:
        """Commit the rewards that lie in slots, whoever played their episodes; returns the number of slots that were
        looked at."""
        claimed = self.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=REWARDS_AT_ONCE)
        judged = [(slot, word, value) for slot, word in claimed if (value := self._returned(slot, word)) is not None]
        for slot, word, value in judged:
            uid = int(self.ring.line(slot)["uid"])
            self.reward_bell.add(partial(m.RewardComputed, slot_id=slot, seq=seq_of(word), uid=uid, reward=value))
        if judged:
            self.ring.commit_rewards([(slot, word) for slot, word, _ in judged], [value for *_, value in judged])
        return len(claimed)

    def _returned(self, slot: int, word: int) -> float | None:
        """The reward that lies in a slot; None if there is none, and then the sample is dropped."""
        uid = int(self.ring.line(slot)["uid"])
        try:
            reward, why = reward_of(self.ring, slot), "its slot holds no reward"
        except UNREADABLE as problem:
            reward, why = None, str(problem)
        if reward is None:
            self._warn(f"sample {shown_uid(uid)} is dropped: {why}", kind="no reward", uids=[uid])
            self.ring.drop(slot, word, Fate.MALFORMED)
            return None
        return reward[0] + turn_rewards_of(self.ring, slot)
