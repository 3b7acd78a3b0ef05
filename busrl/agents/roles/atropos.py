"""The trainer that environments of Atropos see: groups that they made and scored become samples of the ledger.

Talks to environments through `busrl.agents.atropos`; calls and rewards are those of `busrl.agents.roles.holder`. Knows
nothing of the environments' code, of engines or advantages.

- A group takes a draw that waits: all its G slots are claimed, written, and then committed one behind the other, with
  no wait in between. 200 is said after the last commit.
- A process that dies before the first commit has changed nothing. One that dies between two leaves half a group: its
  next life sets the other members aside (fate i), the learner these. The client, who got no answer, posts it again.
- Turns that the run's own engines drew for this process have their own log-probabilities and versions. All others have
  those posted, and the version at receipt.
- Digests of groups are written before their first commit: one posted again to a later process is known, unless it was
  left in halves.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.agents.atropos import AtroposDoor, Progress, Rules
from busrl.agents.episode import Answer, Call, Episode
from busrl.agents.roles.holder import LINE_FIELDS, Claim, EpisodeHolder, run_key
from busrl.agents.tree import Ids, Trajectory
from busrl.data.episodes import EpisodeLimits
from busrl.errors import CallRefused, MachineError, SlotTooSmall
from busrl.ring import State
from busrl.roles.episodes import write_episode
from busrl.states import Fate, HeaderWord, SampleClass, place_of
from busrl.system.files import LineFile, replace

ROOM_S = 20.0  # that a group waits for a draw
DIGESTS_KEPT, ANSWERS_KEPT = 100_000, 20_000
CALLER_UID = 1 << 61  # from here on: names the random numbers of calls that belong to no sample
UNCOMMITTED = (State.QUEUED, State.GENERATING)
COMMITTED = (State.GENERATED, State.REWARDING, State.REWARDED, State.TRAINING)
SOURCE = "env_id {}; what this run did not draw has the log-probabilities that were posted, and the version at receipt"


class Atropos(EpisodeHolder):
    role = "atropos"
    singleton = True

    def setup(self) -> None:
        super().setup()
        self.size = self.topology.groups.size
        self.key = run_key(self.paths.serve_key)
        self.seen = self._kept_before()
        self.drawn: dict[bytes, Answer] = {}  # by a digest of all ids up to its end, and with its log-probabilities
        self.kept = LineFile(self.paths.atropos_seen)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        own, generation = self.topology.serve, self.topology.generation
        rules = Rules(self.size, self.renderer.vocabulary, self.limits, self.renderer.end_ids)
        sampling = self.topology.agents.sampling, generation.temperature, generation.top_p
        door = AtroposDoor(self, rules, self.renderer, sampling, own.host, own.port, self.topology.run.name, self.key,
                           self.strangers)
        async with door:
            with self.told(url=door.url, base_url=door.base_url):
                yield

    def work(self) -> bool:
        self._set_halves_aside()
        return super().work()

    # -- what environments post (`busrl.agents.atropos.Trainer`) -----

    async def keep(self, digest: bytes, members: list[Trajectory], scores: list[float], env: int | None) -> bool:
        end = time.monotonic() + ROOM_S
        members = [self._own(made) for made in members]
        while not self.known(digest):
            if claims := self._claim_group():
                self._commit(digest, claims, members, scores, SOURCE.format(env))
            elif (left := end - time.monotonic()) <= 0 or self.stopping:
                return False
            else:
                await self.next_pass(left)
        return True

    def known(self, digest: bytes) -> bool:
        return digest in self.seen

    def state(self) -> Progress:
        """The version's step before it: new weights in between make tokens look too old, never too new."""
        lines, step = self.ring.lines(), self.ring.header(HeaderWord.VERSION_STEP)
        waiting = np.unique(lines["group"][np.isin(lines["state"], COMMITTED)])
        return Progress(self.ring.header(HeaderWord.STEP), self.topology.run.max_steps, len(waiting),
                     self.topology.learner.trigger.n_min * self.size, self.ring.header(HeaderWord.VERSION), step)

    def unclaimed(self) -> Episode:
        own = self.topology.generation
        line = {**dict.fromkeys(LINE_FIELDS, 0), "uid": CALLER_UID + secrets.randbits(60), "top_p": own.top_p,
                "max_new_tokens": own.max_new_tokens, "temperature": own.temperature}
        return self.begin(Claim(-1, 0, line), EpisodeLimits(self.limits.context))

    async def _ask(self, claim: Claim, call: Call) -> Answer:
        """Keep what the run's own engines drew: with its versions, whoever posts it."""
        answer = await super()._ask(claim, call)
        self._remember(np.concatenate([call.prompt, answer.ids]), answer)
        return answer

    def _remember(self, ids: Ids, answer: Answer) -> None:
        self.drawn |= {digest_of(ids): answer, digest_of(ids, answer.logprobs): answer}
        while len(self.drawn) > 2 * ANSWERS_KEPT:
            del self.drawn[next(iter(self.drawn))]

    def _own(self, made: Trajectory) -> Trajectory:
        """With the log-probabilities and versions of those turns that this process has asked for. The same ids may have
        been drawn twice: those posted say which of them it is."""
        logprobs, versions, step, at = made.logprobs.copy(), made.versions.copy(), made.step, 0
        for begin, end in made.turns[:, 1:3].tolist():
            own, ids = slice(at, at + end - begin), made.ids[:end]
            answer = self.drawn.get(digest_of(ids, logprobs[own])) or self.drawn.get(digest_of(ids))
            if answer is not None and len(answer.ids) == end - begin:
                logprobs[own], versions[own], step = answer.logprobs, answer.versions, min(step, answer.step)
            at += end - begin
        return replaced(made, logprobs=logprobs, versions=versions, step=step)

    # -- slots -----

    def _claim_group(self) -> list[Claim]:
        """All members of the draw that was admitted first, of those that wait whole; none if there is none."""
        lines = self.ring.lines()
        waiting = np.flatnonzero((lines["state"] == State.QUEUED) & (lines["cls"] == SampleClass.TRAIN))
        draws, first, counts = np.unique(lines["group"][waiting], return_index=True, return_counts=True)
        for place in np.argsort(lines["admission"][waiting[first]], kind="stable"):
            slots = waiting[lines["group"][waiting] == draws[place]]
            if counts[place] == self.size and (claims := self._claim(slots, lines)):
                return claims
        return []

    def _claim(self, slots: Any, lines: Any) -> list[Claim]:
        """All of these slots, or none: another process was faster."""
        claims: list[Claim] = []
        for slot in slots.tolist():
            if not (word := self.ring.claim(slot, int(lines["word"][slot]), State.GENERATING)):
                for claim in claims:
                    self.give_back(claim)
                return []
            line = dict(zip(LINE_FIELDS, lines[LINE_FIELDS][slot].tolist()))
            claims.append(Claim(slot, word, line))
            self.claims[slot] = claims[-1]
        return claims

    def _commit(self, digest: bytes, claims: list[Claim], members: list[Trajectory], scores: list[float],
                source: str) -> None:
        """Nothing is committed of a group that does not fit."""
        messages = msgspec.json.encode([[{"role": "environment", "content": source}]])
        draw = int(claims[0].line["group"])
        try:
            for claim, made, score in zip(claims, members, scores):
                write_episode(self.ring, claim.slot, claim.word, made, made.text, score, messages)
            self.kept.append(b"%s %d" % (digest.hex().encode(), draw))
        except (SlotTooSmall, MachineError) as problem:
            for claim in claims:
                self.give_back(claim)
            if isinstance(problem, SlotTooSmall):
                raise CallRefused("invalid", f"tokens: a sequence does not fit: {problem}", "tokens") from None
            self.warn("atropos", f"a group is not taken: {problem}", "error", kind="digests")
            raise CallRefused("no_room", f"no room for a group now: {problem}") from None
        self._know(digest, draw)
        for claim, made in zip(claims, members):
            self.commit(claim, made)

    def _know(self, digest: bytes, draw: int) -> None:
        """It stands in the file; the oldest are forgotten, there too, once they are as many as those that are kept."""
        self.seen[digest] = draw
        if len(self.seen) >= 2 * DIGESTS_KEPT:
            newest = list(self.seen.items())[-DIGESTS_KEPT:]
            with contextlib.suppress(MachineError):
                write_digests(self.paths.atropos_seen, newest)
                self.seen = dict(newest)

    def _set_halves_aside(self) -> None:
        """Members of a group of which others were committed, or lost, before: nothing whole can be made of it."""
        lines = self.ring.lines()
        own = lines["cls"] == SampleClass.TRAIN
        queued = np.flatnonzero(own & (lines["state"] == State.QUEUED))
        begun = np.isin(lines["group"][queued], lines["group"][own & np.isin(lines["state"], COMMITTED)])
        again = place_of(lines["uid"][queued], self.size)[1] > 0
        for slot in queued[begun | again]:
            for claim in self._claim(np.array([slot]), lines):
                self.drop(claim, Fate.INCOMPLETE, "its group has lost members")

    def _kept_before(self) -> dict[bytes, int]:
        """Draws of groups by their digests. The last one counts if no member of it is still to be committed."""
        lines = self.ring.lines()
        waiting = (lines["cls"] == SampleClass.TRAIN) & np.isin(lines["state"], UNCOMMITTED)
        found = read_digests(self.paths.atropos_seen)
        if found and found[-1][1] in lines["group"][waiting]:
            found.pop()
        write_digests(self.paths.atropos_seen, found)
        return dict(found)


def digest_of(ids: Ids, logprobs: npt.ArrayLike = ()) -> bytes:
    parts = np.asarray(ids, np.int32).tobytes(), np.asarray(logprobs, np.float32).tobytes()
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def write_digests(path: Path, found: Iterable[tuple[bytes, int]]) -> None:
    replace(path, b"".join(b"%s %d\n" % (one.hex().encode(), draw) for one, draw in found))


def read_digests(path: Path) -> list[tuple[bytes, int]]:
    """The newest of them, with their draws; a line that a death cut is none."""
    found = re.findall("^([0-9a-f]{32}) ([0-9]+)$", path.read_text("ascii", "replace") if path.exists() else "", re.M)
    return [(bytes.fromhex(digest), int(draw)) for digest, draw in found[-DIGESTS_KEPT:]]
