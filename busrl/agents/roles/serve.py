"""A server of episodes: clients anywhere claim samples over HTTP, make their calls there, and say what they were worth.

Talks to clients through `busrl.agents.http`; all else is in `busrl.agents.roles.holder`. Knows nothing of the clients'
code, of engines, groups or advantages.

States of an episode: claimed -> committed | dropped | given back | lost. It is a lease of `limits.lease_s`, renewed
by every request with its key and by every open call; a silent one is lost, and its sample given back. Time in which
this process heard nobody is not counted.

- A sample is claimed when a client asks for it, and not before: what nobody plays stays QUEUED for others. On another
  host it is fetched from home then, so clients' wishes are told at once.
- A key ends with its claim: late calls are refused, and nothing of them is kept.
- `/end` may be asked again: it gets the first answer.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from busrl.agents.episode import Episode
from busrl.agents.http import ClaimBody, Door, EndBody
from busrl.agents.llm import TEXT_LIMIT, Ended, RewardRequest
from busrl.agents.pool import MAX_AGAIN
from busrl.agents.roles.holder import Claim, EpisodeHolder, run_key
from busrl.errors import CallRefused, CallUnanswered
from busrl.rewards.base import MalformedReward, settle
from busrl.ring import seq_of
from busrl.states import SampleClass

ANSWERS_KEPT = 10_000
MISSED_S = 3.0  # longer than the pause between two words to whoever fetches samples
LOST = "lost"  # the outcome of a lease that its client has not ended


@dataclass(eq=False)
class Lease:
    """An episode of a client's, until `until` (monotonic)."""

    name: str
    claim: Claim
    episode: Episode
    until: float


class Serve(EpisodeHolder):
    role = "serve"

    def setup(self) -> None:
        super().setup()
        self.lease_s = self.topology.limits.lease_s
        self.leases: dict[str, Lease] = {}
        self.by_episode: dict[Episode, Lease] = {}
        self.answers: dict[str, tuple[str, dict[str, Any]]] = {}  # by name: key, and what `/end` was answered
        self.again: Counter[int] = Counter()  # by uid
        self.wanted = 0  # samples that clients wait for
        self.missed, self.missed_until = 0, 0.0  # that one went away without, who may ask again
        self.key = run_key(self.paths.serve_key)
        self.looked = math.inf  # when leases were looked at last

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        own = self.topology.serve
        place = int(self.name.partition("/")[2] or 0)
        port = own.port + place if own.port else 0
        async with Door(self.limits.context, self.renderer, self.topology.agents.sampling, own.host, port,
                        self.topology.run.name, self, self.key, self.strangers) as self.door:
            with self.told(base_url=self.door.base_url):
                yield

    def work(self) -> bool:
        now = time.monotonic()
        deaf_s, self.looked = max(0.0, now - self.looked - self.tick_s), now
        for lease in list(self.leases.values()):
            lease.until += deaf_s
            if lease.episode.busy:  # its client waits: the lease begins when that has an answer
                lease.until = now + self.lease_s
            elif lease.until < now:
                self._lose(lease, f"its client was silent for {self.lease_s:g} s (limits.lease_s)")
                self.give_back(lease.claim)
        return super().work()

    # -- what clients ask for (`busrl.agents.http.ClaimDesk`) -----

    async def claim(self, body: ClaimBody) -> list[dict[str, Any]]:
        """Up to `n` episodes, waiting for the first at most `wait_s`."""
        end, made = time.monotonic() + body.wait_s, self._take_leases(body.n)
        if not made:
            self.wanted, self._next_request = self.wanted + body.n, 0.0  # a client waits, which is told at once
            self.news.set()
            try:
                while not made and (left := end - time.monotonic()) > 0 and not self.stopping:
                    await self.next_pass(left)
                    made = self._take_leases(body.n)
            finally:
                self.wanted -= body.n
        self.missed, self.missed_until = 0 if made else body.n, time.monotonic() + MISSED_S
        return made

    def _take_leases(self, most: int) -> list[dict[str, Any]]:
        return [lease for claim in self.take(most) if (lease := self._lease(claim)) is not None]

    @property
    def rows(self) -> int:
        """On another host what clients have or want: more would lie there while nobody plays it."""
        if not self.topology.here:
            return super().rows
        missed = self.missed if time.monotonic() < self.missed_until else 0
        return len(self.claims) + min(self.room, max(self.wanted, missed))

    def end(self, name: str, body: EndBody) -> dict[str, Any]:
        """Commit, drop or give back; the same answer to those that ask again."""
        known = self.answers.get(name, ("", {}))[1]
        if known and known["outcome"] != LOST:
            return known
        lease = self._open(name)
        rewards = body.turn_rewards if isinstance(body.turn_rewards, dict) else dict(enumerate(body.turn_rewards))
        ended = self._verdict(body)
        numbers = {turn.number for turn in lease.episode.tree.turns}
        try:
            given = {int(turn): float(value) for turn, value in rewards.items()}
        except ValueError:
            raise CallRefused("invalid", "turn_rewards: its keys are numbers of calls", "turn_rewards") from None
        if wrong := [turn for turn, value in given.items() if turn not in numbers or not math.isfinite(value)]:
            raise CallRefused("invalid", f"turn_rewards: no finite reward of a call, for {wrong[0]}", "turn_rewards")
        for turn, value in given.items():
            lease.episode.reward(RewardRequest(turn, value))
        made = self._counted(lease)
        if ended.how == "again" and self.again[lease.claim.uid] + 1 < MAX_AGAIN:
            self.again[lease.claim.uid] += 1
            answer = self._forget(lease, {**made, "outcome": "given back", "why": ended.text})
            self.give_back(lease.claim)
            return answer
        if ended.how == "again":
            ended = Ended("raised", text=f"it wanted to begin again {MAX_AGAIN} times; {ended.text}")
        self.again.pop(lease.claim.uid, None)
        fault = self.settle(lease.claim, ended, lease.episode)
        return self._forget(lease, {**made, "outcome": "dropped" if fault else "committed", "why": fault})

    def renew(self, name: str) -> dict[str, Any]:
        lease = self._open(name)
        self.touch(lease.episode)
        return {"episode": name, "deadline_s": self.lease_s}

    def look(self, name: str) -> dict[str, Any]:
        if name in self.answers:
            return self.answers[name][1]
        lease = self._open(name)
        left = max(0.0, lease.until - time.monotonic())
        return {**self._counted(lease), "outcome": "open", "deadline_s": round(left, 3)}

    def touch(self, episode: Episode) -> None:
        if (lease := self.by_episode.get(episode)) is not None:
            lease.until = time.monotonic() + self.lease_s

    def key_of(self, name: str) -> str:
        if (lease := self.leases.get(name)) is not None:
            return lease.episode.openai["api_key"]
        return self.answers[name][0] if name in self.answers else ""

    # -- internals -----

    def _lease(self, claim: Claim) -> dict[str, Any] | None:
        task = self.task_of(claim)
        if task is None:
            return None
        episode = self.begin(claim)
        self.door.open(episode, claim.line["temperature"], claim.line["top_p"])
        name = f"{claim.uid}-{seq_of(claim.word)}"
        lease = Lease(name, claim, episode, time.monotonic() + self.lease_s)
        episode.gone_wrong = lambda problem: self._unanswered(lease, problem)
        self.leases[name] = self.by_episode[episode] = lease
        return {
            "episode": name, **episode.openai, "task": msgspec.Raw(task), "uid": claim.uid,
            "group": int(claim.line["group"]), "class": SampleClass(claim.line["cls"]).name.lower(),
            "deadline_s": self.lease_s,
        }

    def _unanswered(self, lease: Lease, problem: CallUnanswered) -> None:
        if lease.name in self.leases:
            self._lose(lease, str(problem))
            self.gone_wrong(lease.claim, problem)

    def _lose(self, lease: Lease, why: str) -> None:
        """It is its client's no longer, though that has not ended it."""
        self.warn(self.role, f"episode {lease.name} goes back: {why}", kind=LOST, uids=[lease.claim.uid])
        self._forget(lease, {"outcome": LOST, "why": why})

    def _open(self, name: str) -> Lease:
        if (lease := self.leases.get(name)) is None:
            why = self.answers[name][1].get("why", "") if name in self.answers else "no client has it"
            raise CallRefused("ended", f"episode {name} is not open: {why}")
        return lease

    def _forget(self, lease: Lease, answer: dict[str, Any]) -> dict[str, Any]:
        lease.episode.close()
        del self.leases[lease.name], self.by_episode[lease.episode]
        answer = {"episode": lease.name, **answer}
        self.answers[lease.name] = (lease.episode.openai["api_key"], answer)
        if len(self.answers) > ANSWERS_KEPT:
            del self.answers[next(iter(self.answers))]
        return answer

    def _counted(self, lease: Lease) -> dict[str, Any]:
        tree = lease.episode.tree
        return {"turns": len(tree.turns), "sequences": len(tree.sequences()),
                "tokens": sum(len(turn.ids) for turn in tree.turns)}

    def _verdict(self, body: EndBody) -> Ended:
        why = body.why[:TEXT_LIMIT]
        if body.again:
            return Ended("again", text=why)
        if body.reward is None and not body.parts:
            if body.failed:
                return Ended("used_up", text=why)
            if self.topology.reward.of_episodes:
                raise CallRefused("invalid", "reward: a number is needed, for the episode judges itself", "reward")
        try:
            reward, parts = settle(body.parts or body.reward or 0.0)
        except MalformedReward as problem:
            raise CallRefused("invalid", f"reward: {problem}", "reward") from None
        whole = reward if body.reward is None else body.reward
        return Ended("failed" if body.failed else "returned", whole, parts, why)
