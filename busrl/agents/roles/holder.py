"""The base of roles whose samples are episodes: holds their slots, trees and model calls until they end.

Talks to the ring of samples and to that of model calls (`busrl.ring.calls`); with reward.kind = "agent" it commits
rewards too. Knows nothing of whose code an episode is, of engines, groups or advantages.

- A slot stays GENERATING until its episode has ended: if this process dies the slot goes back to QUEUED, with a new
  tree; the keeper frees its calls. So attempts accuse no episode here, and suspects are taken like others.
- An engine that dies, or new weights, cost an episode nothing but time.
- What an episode returned lies in its slot, so any such process may commit the reward of one that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from busrl.agents.episode import Answer, Call, Episode, Settings
from busrl.agents.llm import Ended
from busrl.agents.parsers import MessageMaker, parser_of
from busrl.agents.renderer import Renderer, report
from busrl.agents.tree import Trajectory
from busrl.data.chat import LightTokenizer, template_of
from busrl.data.episodes import CONTEXT, EpisodeLimits
from busrl.data.vocabulary import end_ids
from busrl.errors import AgentNotLoaded, BugError, CallUnanswered, SlotTooSmall
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import Ring, State, seq_of
from busrl.ring.calls import AsyncCaller, CallAnswer, ModelCall, RingWatch
from busrl.roles.actor import Actor, Doorbell
from busrl.roles.answers import ANY_ATTEMPT, UNREADABLE, read_task, write_parts
from busrl.roles.episodes import commit_episode, reward_of, turn_rewards_of, write_episode
from busrl.states import REWARD_FATES, Fate, shown_uid
from busrl.system.files import replace
from busrl.topology.schema import AGENT

log = logging.getLogger("busrl")
FATES = REWARD_FATES | {"crashed": Fate.POISON}
LINE_FIELDS = ["uid", "cls", "version", "step", "max_new_tokens", "temperature", "top_p", "priority", "admission",
               "group"]
REWARDS_AT_ONCE = 256
REQUEST_EVERY_S = 1.0
UNANSWERED_LIMIT = 3  # episodes of one sample that an engine left without an answer, until the sample is dropped


@dataclass
class Claim:
    """A sample of this process: its slot, the word that owns it, and what its line said at the claim."""

    slot: int
    word: int
    line: dict[str, Any]
    read: int = 0  # ids that its calls read, all of them together
    computed: int = 0  # of them, those that no engine had kept

    @property
    def uid(self) -> int:
        return int(self.line["uid"])


class EpisodeHolder(Actor):
    """A role gives `serving` and decides in `work` how many samples it `take`s; an episode is `begin`ning with a
    claim, and ends with `settle`, `gone_wrong`, `drop` or `give_back`. What was written otherwise is `commit`ted."""

    failed: BaseException | None = None  # what ended a task of this process: a fault of its own

    def setup(self) -> None:
        self._understand(Path(self.topology.model.path))
        self.calls = Ring.attach(self.paths.calls_name, calls=True)
        self.calls.register(self.role, self.name)
        self.claims: dict[int, Claim] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.ends: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # of the episodes that were settled
        self.unanswered: Counter[int] = Counter()  # by uid
        self.bell, self.reward_bell = Doorbell(), Doorbell()
        self._next_request = 0.0
        self._passed = asyncio.Event()  # of the pass that is next
        self.loop = asyncio.new_event_loop()

    def _understand(self, folder: Path) -> None:
        """How messages become ids and ids messages, and how much of both an episode may have."""
        own, text = self.topology.agents, LightTokenizer.of(folder)
        if text is None:
            raise AgentNotLoaded(f"{folder}: no tokenizer.json that can be read; episodes need one, and the packages "
                                 "tokenizers and jinja2")
        self.renderer = Renderer(text, end_ids(folder), "template" if own.history == "template" else "extend")
        source = template_of(folder, True) or ""
        if source:
            *kinds, last = report(self.renderer.probes)
            log.info("turns are continued as the chat template allows:\n%s", "\n".join([*kinds, last]))
            if any(probe.how == "fresh" for probe in self.renderer.probes):
                self.warn(self.role, last, kind="fresh turns")
        self.maker = MessageMaker(parser_of(own.tools, source, self.topology.base_dir), own.reasoning)
        self.limits = EpisodeLimits.of(self.topology)

    def subscriptions(self) -> list[str]:
        return [*super().subscriptions(), topic(m.CallTokens, self.worker_id)]

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.CallTokens):
            self.caller.tokens(message)

    def run_passes(self) -> None:
        self.loop.run_until_complete(self._passes())

    def teardown(self) -> None:
        for claim in list(self.claims.values()):
            self.give_back(claim)
        log.info("episodes by their ends: %s; calls by how they were rendered: %s; requests: %s", dict(self.ends),
                 dict(self.renderer.counts), dict(self.counts))
        self.loop.close()
        self.calls.close()

    @abstractmethod
    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """What stands while passes are made."""

    def work(self) -> bool:
        self._request_tasks()
        judged = self._commit_rewards() if self.topology.reward.kind == AGENT else 0
        self.ring_bells(self.bell, self.reward_bell)
        return bool(judged)

    # -- the loop -----

    async def _passes(self) -> None:
        self.news = asyncio.Event()
        watches = [RingWatch(self.ring, state, self.news.set) for state in (State.QUEUED, State.GENERATED)]
        async with AsyncCaller(self.calls, self.bus.send) as self.caller, self.serving():
            for watch in watches:
                watch.start()
            try:
                await self._until_stopped()
            finally:
                await asyncio.gather(*(watch.stop() for watch in watches))
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _until_stopped(self) -> None:
        while not self.stopping:
            self.look_around()
            self.work()
            self._passed.set()  # whoever waits for a sample looks again
            self._passed = asyncio.Event()
            self.news.clear()  # which come when an episode has ended, or a slot of samples is QUEUED or GENERATED
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.news.wait(), self.tick_s)
            if self.failed is not None:
                raise self.failed

    async def next_pass(self, timeout_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._passed.wait(), timeout_s)

    @contextlib.contextmanager
    def told(self, **about: str) -> Iterator[None]:
        """Where this process listens, in a file for its owner alone."""
        file, about = self.paths.served(self.worker_id), {**about, "key": str(self.paths.serve_key)}
        replace(file, msgspec.json.encode({**about, "pid": os.getpid()}))
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    def strangers(self, text: str) -> None:
        """Tell what a listener says of connections that nobody should have made."""
        self.warn(self.role, text, kind="strangers")

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it run beside the passes; what it raises ends this process."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.news.set()
        if not task.cancelled():
            self.failed = self.failed or task.exception()

    def _request_tasks(self) -> None:
        if (now := time.monotonic()) >= self._next_request:
            self._next_request = now + REQUEST_EVERY_S
            self.bus.send(m.TaskRequest(worker_id=self.worker_id, capacity=self.room, rows=self.rows))

    # -- samples -----

    @property
    def room(self) -> int:
        """How many samples more it may hold."""
        return self.topology.agents.episodes - len(self.claims)

    @property
    def rows(self) -> int:
        return self.topology.agents.episodes

    def take(self, most: int) -> list[Claim]:
        """Samples that nobody holds, best first."""
        if (limit := min(most, self.room)) <= 0:
            return []
        taken = self.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=limit, max_attempt=ANY_ATTEMPT)
        lines = self.ring.lines([slot for slot, _ in taken])[LINE_FIELDS].tolist() if taken else []
        made = [Claim(*one, dict(zip(LINE_FIELDS, values))) for one, values in zip(taken, lines)]
        self.claims.update({claim.slot: claim for claim in made})
        return made

    def task_of(self, claim: Claim) -> bytes | None:
        """Its line of the data as JSON; None: it cannot be read, and is dropped."""
        try:
            return read_task(self.ring, claim.slot)
        except UNREADABLE as problem:
            self.drop(claim, Fate.MALFORMED, f"its task cannot be read: {problem}")
            return None

    def begin(self, claim: Claim, limits: EpisodeLimits | None = None) -> Episode:
        """The calls of an attempt at it."""
        settings = Settings(int(claim.line["max_new_tokens"]), limits or self.limits, self.topology.agents.parallel)
        return Episode(claim.uid, lambda call: self._ask(claim, call), self.renderer, self.maker, settings)

    async def _ask(self, claim: Claim, call: Call) -> Answer:
        line, own = claim.line, self.topology
        asked = ModelCall(
            call.prompt, call.max_new_tokens, uid=call.uid, stream=call.stream, temperature=line["temperature"],
            top_p=line["top_p"], priority=line["priority"], admission=line["admission"], cls=line["cls"],
            engine=max(0, call.near) if own.keeps_prefixes else 0, affinity_s=own.agents.affinity_ms / 1e3,
        )
        found = await self._answered(asked, call)
        claim.read, claim.computed = claim.read + len(call.prompt), claim.computed + found.computed
        waited, made = int(1e3 * found.waited_s), int(1e3 * found.generated_s)
        return Answer(found.ids, found.logprobs, found.versions, found.finish, found.engine, waited, made,
                      found.step)

    async def _answered(self, asked: ModelCall, call: Call) -> CallAnswer:
        limit = self.topology.limits.work_s
        if call.heard is None:
            return await self.caller.ask(asked, limit)
        async for found in self.caller.stream(asked, limit):
            if isinstance(found, CallAnswer):
                return found
            call.heard(found)
        raise BugError("a stream of ids ended without the answer")

    # -- ends -----

    def settle(self, claim: Claim, ended: Ended, episode: Episode) -> str:
        """Commit an episode that ended; or drop its sample, and say why."""
        self.ends[ended.how] += 1
        self.counts.update(episode.counts)
        self.unanswered.pop(claim.uid, None)
        if ended.how in FATES:
            return self.drop(claim, FATES[ended.how], f"its episode {ended.how}: {ended.text}")
        made = episode.tree.trajectory()
        if made is None:
            return self.drop(claim, Fate.MALFORMED, "its episode ended without a model call")
        try:
            if not self.write_or_wait("episodes", lambda: self._write(claim, made, ended, episode)):
                return ""  # the run stops: the sample goes back
        except SlotTooSmall as problem:
            return self.drop(claim, Fate.MALFORMED, f"its episode does not fit: {problem}")
        self.commit(claim, made)
        return ""

    def commit(self, claim: Claim, made: Trajectory) -> None:
        """What was written of it is its sample."""
        message = commit_episode(self.ring, claim.slot, claim.word, made, made.step)
        del self.claims[claim.slot]
        if message is not None:
            self.bell.add(lambda: message)
            self.ring.add(samples=1)

    def _write(self, claim: Claim, made: Trajectory, ended: Ended, episode: Episode) -> None:
        own = self.topology.agents
        reward = own.failure_reward if ended.how == "used_up" else ended.reward
        transcript = episode.tree.transcript(own.transcript_bytes)
        counted = {"read": claim.read, "computed": claim.computed, **episode.counts}
        context = [counted.get(name, 0) for name in CONTEXT]
        write_episode(self.ring, claim.slot, claim.word, made, made.text, reward, transcript, context)
        try:
            write_parts(self.ring, claim.slot, claim.word, ended.parts)
        except SlotTooSmall as problem:  # they are for people: the reward counts all the same
            self.warn(self.role, f"the parts of rewards are not kept: {problem}", kind="parts")

    def gone_wrong(self, claim: Claim, problem: CallUnanswered) -> None:
        """Engines gave no answer to a call. The episode is begun again, by whoever takes it, but not for ever."""
        self.unanswered[claim.uid] += 1
        if problem.code == "poison":
            self.drop(claim, Fate.POISON, str(problem))
        elif self.unanswered[claim.uid] >= UNANSWERED_LIMIT:
            self.drop(claim, Fate.REWARD_RAISED, f"its calls got no answer {UNANSWERED_LIMIT} times: {problem}")
        else:
            text = f"episode {shown_uid(claim.uid)} begins again: {problem}"
            self.warn(self.role, text, kind="unanswered", uids=[claim.uid])
            self.give_back(claim)

    def give_back(self, claim: Claim) -> None:
        del self.claims[claim.slot]
        self.ring.release(claim.slot, claim.word, State.QUEUED)

    def drop(self, claim: Claim, fate: Fate, why: str) -> str:
        """Its sample is lost, for this reason, which is returned."""
        text, _, trace = why.partition("\n")
        del self.claims[claim.slot]
        self.unanswered.pop(claim.uid, None)
        text = f"sample {shown_uid(claim.uid)} is dropped: {text}"
        self.warn(self.role, text, kind=f"dropped {fate.letter}", uids=[claim.uid], trace=trace)
        self.ring.drop(claim.slot, claim.word, fate)
        return text

    def _commit_rewards(self) -> int:
        """What episodes returned, also those of other processes that are gone."""
        taken = self.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=REWARDS_AT_ONCE)
        judged = [(slot, word, value) for slot, word in taken if (value := self._returned(slot, word)) is not None]
        for slot, word, value in judged:
            uid = int(self.ring.line(slot)["uid"])
            self.reward_bell.add(partial(m.RewardComputed, slot_id=slot, seq=seq_of(word), uid=uid, reward=value))
        if judged:
            self.ring.commit_rewards([(slot, word) for slot, word, _ in judged], [value for *_, value in judged])
        return len(taken)

    def _returned(self, slot: int, word: int) -> float | None:
        """The reward of an episode in its slot; None if it is dropped, for it holds none."""
        uid = int(self.ring.line(slot)["uid"])
        try:
            found, why = reward_of(self.ring, slot), "its slot holds no reward"
        except UNREADABLE as problem:
            found, why = None, str(problem)
        if found is None:
            self.warn(self.role, f"sample {shown_uid(uid)} is dropped: {why}", kind="no reward", uids=[uid])
            self.ring.drop(slot, word, Fate.MALFORMED)
            return None
        return found[0] + turn_rewards_of(self.ring, slot)


def run_key(path: Path) -> str:
    """The key of the run: made by the first that needs it, for its owner's eyes alone."""
    with contextlib.suppress(FileExistsError):
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(made, "w") as file:
            file.write(secrets.token_hex(16))
    return path.read_text()
