"""The role serve: clients anywhere claim samples over HTTP, make their model calls here, and post the rewards.

Talks to clients through `busrl.agents.http`; samples and calls are those of `busrl.agents.roles.holder`. Knows nothing
of the clients' code, of engines, groups or advantages.

States of an episode: claimed -> committed | dropped | given back | lost. A claim is a lease of `limits.lease_s`, which
every request with its key and every open call renews. When it runs out the episode is lost, and its sample is given
back. Time in which this process could read no request is not counted.

- A sample is claimed when a client asks for it, not before: a sample that nobody plays stays QUEUED for other
  processes. On another host it is fetched from home then, so a client's wish is sent on at once.
- A key is valid until its episode ends; later calls are refused.
- A repeated `/end` gets the answer of the first.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from busrl.agents.episode import Episode
from busrl.agents.http import ClaimBody, EndBody, EpisodeServer
from busrl.agents.llm import TEXT_LIMIT, Ended, How, RewardRequest
from busrl.agents.pool import MAX_AGAIN
from busrl.agents.roles.holder import EpisodeHolder, run_key
from busrl.agents.samples import EpisodeSamples, Warn
from busrl.agents.seats import Worth, settled, shown, worth_of
from busrl.agents.sides import ClaimedSample
from busrl.data.episodes import LARGEST_REWARD
from busrl.errors import CallRefused, CallUnanswered
from busrl.rewards.base import MalformedReward, settle
from busrl.ring import seq_of
from busrl.states import SampleClass

ANSWERS_KEPT = 10_000
MISSED_S = 3.0  # longer than the time between two requests for tasks
LOST = "lost"  # the outcome of a lease that ran out


@dataclass(eq=False)
class Lease:
    """A client's claim to an episode, until `until` (monotonic)."""

    name: str
    sample: ClaimedSample
    episode: Episode
    until: float


class Leases:
    """The desk (`busrl.agents.http.ClaimDesk`) where clients claim and end episodes. `begin` makes the episode of a
    sample, which clients can reach; `next_pass` waits for new samples, and returns False if the process stops;
    `judges_itself`: whether `/end` must bring a reward."""

    def __init__(self, samples: EpisodeSamples, begin: Callable[[ClaimedSample], Episode], lease_s: float,
                 clients: WaitingClients, next_pass: Callable[[float], Awaitable[bool]],
                 judges_itself: Callable[[], bool], warn: Warn) -> None:
        self._samples, self._begin, self._lease_s = samples, begin, lease_s
        self._clients, self._next_pass = clients, next_pass
        self._judges_itself, self._warn = judges_itself, warn
        self.open: dict[str, Lease] = {}
        self._by_episode: dict[Episode, Lease] = {}
        self._answers: dict[str, tuple[str, dict[str, Any]]] = {}  # by name: the key, and the answer to `/end`
        self._again: Counter[int] = Counter()  # by number of the episode

    def expire(self, now: float, deaf_s: float) -> None:
        """Lose the leases that ran out; `deaf_s`: the time in which no request could be read is not counted."""
        for lease in list(self.open.values()):
            lease.until += deaf_s
            if lease.episode.busy:  # its client waits for an answer: the lease begins with that
                lease.until = now + self._lease_s
            elif lease.until < now:
                self._lose(lease, f"its client was silent for {self._lease_s:g} s (limits.lease_s)")
                self._samples.give_back(lease.sample)

    # -- requests of clients -----

    async def claim(self, body: ClaimBody) -> list[dict[str, Any]]:
        """Lease up to `n` episodes, waiting for the first at most `wait_s`."""
        end, leases = time.monotonic() + body.wait_s, self._take(body.n)
        if not leases:
            with self._clients.waiting(body.n):
                while not leases and (left := end - time.monotonic()) > 0 and await self._next_pass(left):
                    leases = self._take(body.n)
        self._clients.left(0 if leases else body.n)
        return leases

    def end(self, name: str, body: EndBody) -> dict[str, Any]:
        """Commit or drop the episode, or give it back; a repeated request gets the same answer."""
        earlier = self._answers.get(name, ("", {}))[1]
        if earlier and earlier["outcome"] != LOST:
            return earlier
        lease = self._opened(name)
        ended = verdict_of(body, lease.episode, self._judges_itself())
        reward_turns(lease.episode, body)
        counts = self._counted(lease)
        if ended.how == "again" and self._again[lease.sample.number] + 1 < MAX_AGAIN:
            self._again[lease.sample.number] += 1
            answer = self._forget(lease, {**counts, "outcome": "given back", "why": ended.text})
            self._samples.give_back(lease.sample)
            return answer
        if ended.how == "again":
            ended = Ended("raised", text=f"it wanted to begin again {MAX_AGAIN} times; {ended.text}")
        self._again.pop(lease.sample.number, None)
        fault = self._samples.settle(lease.sample, ended, lease.episode)
        return self._forget(lease, {**counts, "outcome": "dropped" if fault else "committed", "why": fault})

    def renew(self, name: str) -> dict[str, Any]:
        lease = self._opened(name)
        self.touch(lease.episode)
        return {"episode": name, "deadline_s": self._lease_s}

    def look(self, name: str) -> dict[str, Any]:
        if name in self._answers:
            return self._answers[name][1]
        lease = self._opened(name)
        left = max(0.0, lease.until - time.monotonic())
        return {**self._counted(lease), "outcome": "open", "deadline_s": round(left, 3)}

    def touch(self, episode: Episode) -> None:
        if (lease := self._by_episode.get(episode)) is not None:
            lease.until = time.monotonic() + self._lease_s

    def key_of(self, name: str) -> str:
        if (lease := self.open.get(name)) is not None:
            return lease.episode.openai["api_key"]
        return self._answers[name][0] if name in self._answers else ""

    # -- internals -----

    def _take(self, most: int) -> list[dict[str, Any]]:
        leases = [self._lease(sample) for sample in self._samples.take(most)]
        return [lease for lease in leases if lease is not None]

    def _lease(self, sample: ClaimedSample) -> dict[str, Any] | None:
        task = self._samples.task_of(sample)
        if task is None:
            return None
        episode = self._begin(sample)
        name = f"{sample.uid}-{seq_of(sample.word)}"
        if sample.seat:  # samples of several ledgers may have the same number
            name = f"{name}-{sample.seat}"
        lease = Lease(name, sample, episode, time.monotonic() + self._lease_s)
        episode.on_unanswered(lambda problem: self._unanswered(lease, problem))
        self.open[name] = self._by_episode[episode] = lease
        return {
            "episode": name, **episode.openai, **({"keys": episode.keys} if episode.keys else {}),
            "task": msgspec.Raw(task), "uid": sample.number, "group": int(sample.line["group"]),
            "class": SampleClass(sample.line["cls"]).name.lower(), "deadline_s": self._lease_s,
        }

    def _unanswered(self, lease: Lease, problem: CallUnanswered) -> None:
        if lease.name in self.open:
            self._lose(lease, str(problem))
            self._samples.begin_again(lease.sample, problem)

    def _lose(self, lease: Lease, why: str) -> None:
        """End the lease of a client that has not ended it."""
        self._warn(f"episode {lease.name} goes back: {why}", kind=LOST, uids=[lease.sample.uid])
        self._forget(lease, {"outcome": LOST, "why": why})

    def _opened(self, name: str) -> Lease:
        if (lease := self.open.get(name)) is None:
            why = self._answers[name][1].get("why", "") if name in self._answers else "no client has it"
            raise CallRefused("ended", f"episode {name} is not open: {why}")
        return lease

    def _forget(self, lease: Lease, answer: dict[str, Any]) -> dict[str, Any]:
        lease.episode.close()
        del self.open[lease.name], self._by_episode[lease.episode]
        answer = {"episode": lease.name, **answer}
        self._answers[lease.name] = (lease.episode.openai["api_key"], answer)
        if len(self._answers) > ANSWERS_KEPT:
            del self._answers[next(iter(self._answers))]
        return answer

    def _counted(self, lease: Lease) -> dict[str, Any]:
        trees = [one.tree for one in lease.episode.seats.values()]
        return {"turns": sum(len(tree.turns) for tree in trees),
                "sequences": sum(len(tree.sequences()) for tree in trees),
                "tokens": sum(len(turn.ids) for tree in trees for turn in tree.turns)}


# -- bodies of `/end` -----


def verdict_of(body: EndBody, episode: Episode, judges_itself: bool) -> Ended:
    """The end that a client gives an episode; CallRefused where it is none."""
    why = body.why[:TEXT_LIMIT]
    if body.again:
        return Ended("again", text=why)
    how: How = "failed" if body.failed else "returned"
    if body.rewards and (body.reward is not None or body.parts):
        raise CallRefused("invalid", "rewards: give these, or one reward for all seats", "rewards")
    if body.rewards:
        return Ended(how, text=why, seats=_rewards_of(body, episode))
    if body.reward is None and not body.parts:
        if body.failed:
            return Ended("used_up", text=why)
        if judges_itself:
            raise CallRefused("invalid", "reward: a number is needed, for the episode judges itself", "reward")
    try:
        reward, parts = settle(body.parts or body.reward or 0.0)
    except MalformedReward as problem:
        raise CallRefused("invalid", f"reward: {problem}", "reward") from None
    return Ended(how, reward if body.reward is None else body.reward, parts, why)


def _rewards_of(body: EndBody, episode: Episode) -> dict[str, Worth]:
    """The reward of each seat; CallRefused where one is no number, or a seat that made calls has none."""
    if len(episode.seats) == 1:
        raise CallRefused("invalid", "rewards: this run has one seat: give reward, and parts of it", "rewards")
    try:
        each = {seat: Worth(*settled(value)[:2]) for seat, value in body.rewards.items()}
        worth_of(episode.places, Worth(), each, episode.spoke)
    except MalformedReward as problem:
        raise CallRefused("invalid", f"rewards: {problem}", "rewards") from None
    return each


def reward_turns(episode: Episode, body: EndBody) -> None:
    """Add the rewards of turns; CallRefused if one is not finite, or belongs to no call."""
    by_seat = body.turn_rewards if isinstance(body.turn_rewards, dict) else {}
    if not any(isinstance(value, (dict, list)) for value in by_seat.values()):
        rewarded = [(episode, _by_turn(episode, body.turn_rewards))]
    elif (unknown := next((name for name in by_seat if name not in episode.seats), None)) is not None:
        raise CallRefused("invalid", f"turn_rewards: {shown(unknown)} is no seat", "turn_rewards")
    else:
        rewarded = [(episode.seats[name], _by_turn(episode.seats[name], value)) for name, value in by_seat.items()]
    for one, by_turn in rewarded:
        for turn, value in by_turn.items():
            one.reward(RewardRequest(turn, value))


def _by_turn(episode: Episode, given: Any) -> dict[int, float]:
    """The rewards of a seat's turns, by the number of the call."""
    if not isinstance(given, (dict, list)):
        raise CallRefused("invalid", f"turn_rewards of {episode.seat.name}: must be a map or a list", "turn_rewards")
    rewards = given if isinstance(given, dict) else dict(enumerate(given))
    try:
        by_turn = {int(turn): float(value) for turn, value in rewards.items()}
    except ValueError:
        raise CallRefused("invalid", "turn_rewards: its keys are numbers of calls", "turn_rewards") from None
    had = {turn.number: turn.reward or 0.0 for turn in episode.tree.turns}
    kept = {turn for turn, value in by_turn.items() if turn in had and abs(had[turn] + value) <= LARGEST_REWARD}
    if wrong := [turn for turn in by_turn if turn not in kept]:
        raise CallRefused("invalid", f"turn_rewards: no finite reward of a call, for {wrong[0]}", "turn_rewards")
    return by_turn


class WaitingClients:
    """Counts the samples that clients wait for, or waited for in vain until lately: they may ask again. `begun` is
    called when a client begins to wait."""

    def __init__(self, begun: Callable[[], None]) -> None:
        self._begun, self._wanted, self._missed = begun, 0, 0
        self._missed_until = 0.0

    @contextlib.contextmanager
    def waiting(self, count: int) -> Iterator[None]:
        self._wanted += count
        self._begun()
        try:
            yield
        finally:
            self._wanted -= count

    def left(self, without: int) -> None:
        """Note that a client has stopped waiting, and did not get so many samples."""
        self._missed, self._missed_until = without, time.monotonic() + MISSED_S

    def count(self) -> int:
        return max(self._wanted, self._missed if time.monotonic() < self._missed_until else 0)


class Serve(EpisodeHolder):
    role = "serve"

    def setup(self) -> None:
        super().setup()
        self.clients = WaitingClients(self._request_at_once)
        self.leases = Leases(
            self.samples, self._reachable, self.topology.limits.lease_s, self.clients, self.next_pass,
            lambda: self.topology.reward.of_episodes, partial(self.warn, self.role),
        )
        self.key = run_key(self.paths.serve_key)
        self.looked = math.inf  # when leases were last looked at

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        serve = self.topology.serve
        number = int(self.name.partition("/")[2] or 0)
        port = serve.port + number if serve.port else 0
        async with EpisodeServer(self.limits.context, self.renderer, self.topology.agents.sampling, serve.host, port,
                                 self.topology.run.name, self.leases, self.key, self.strangers,
                                 cards=self.cards) as self.server:
            with self.announced(base_url=self.server.base_url):
                yield

    def work(self) -> bool:
        now = time.monotonic()
        deaf_s, self.looked = max(0.0, now - self.looked - self.tick_s), now
        self.leases.expire(now, deaf_s)
        return super().work()

    @property
    def rows(self) -> int:
        """The number of samples to play at once; on another host as many as clients have or want, lest others idle."""
        if not self.topology.here:
            return super().rows
        return len(self.samples.claims) + min(self.samples.room, self.clients.count())

    def _reachable(self, sample: ClaimedSample) -> Episode:
        episode = self.begin(sample)
        self.server.open(episode)
        return episode

    def _request_at_once(self) -> None:
        """Make a pass now, which sends the request for tasks."""
        self._next_request = 0.0
        self.news.set()
