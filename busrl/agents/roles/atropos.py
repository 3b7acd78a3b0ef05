"""The trainer that environments of Atropos see: groups that they made and scored become samples of the ledger.

Talks to environments through `busrl.agents.scored_groups`; samples and calls are those of `busrl.agents.roles.holder`.
Knows nothing of the environments' code, of engines or advantages.

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
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.agents.episode import Call, EngineAnswer, Episode
from busrl.agents.roles.holder import EpisodeHolder, run_key
from busrl.agents.samples import LINE_FIELDS, ClaimedSample, EpisodeSamples, Warn
from busrl.agents.scored_groups import AtroposServer, Rules, RunProgress
from busrl.agents.tree import Ids, Trajectory
from busrl.data.episodes import BEGIN, END, EpisodeLimits
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


# -- what this run drew, and which groups it has -----


class DrawnTurns:
    """The newest turns that the run's own engines drew for this process, by their ids and log-probabilities."""

    def __init__(self, kept: int = ANSWERS_KEPT) -> None:
        self._kept = kept
        self._answers: dict[bytes, EngineAnswer] = {}  # by a digest of all ids up to its end, and with its log-probs

    def add(self, ids: Ids, answer: EngineAnswer) -> None:
        """Remember an answer, with all `ids` up to its end."""
        self._answers |= {digest_of(ids): answer, digest_of(ids, answer.logprobs): answer}
        while len(self._answers) > 2 * self._kept:
            del self._answers[next(iter(self._answers))]

    def numbered(self, posted: Trajectory) -> Trajectory:
        """A posted episode with the log-probabilities and versions of those turns that were drawn here. The same ids
        may have been drawn twice: the log-probabilities that were posted say which of them it is."""
        logprobs, versions, step, at = posted.logprobs.copy(), posted.versions.copy(), posted.step, 0
        for begin, end in posted.turns[:, [BEGIN, END]].tolist():
            sampled, ids = slice(at, at + end - begin), posted.ids[:end]
            answer = self._answers.get(digest_of(ids, logprobs[sampled])) or self._answers.get(digest_of(ids))
            if answer is not None and len(answer.ids) == end - begin:
                logprobs[sampled], versions[sampled] = answer.logprobs, answer.versions
                step = min(step, answer.step)
            at += end - begin
        return replaced(posted, logprobs=logprobs, versions=versions, step=step)


class KeptGroups:
    """The groups that are kept, by their digests, with their draws: in memory and in a file, of which the newest
    `most` last."""

    def __init__(self, path: Path, uncommitted: Iterable[int] = (), most: int = DIGESTS_KEPT) -> None:
        """`uncommitted`: draws with members that are still to be committed; the last group counts if it is none."""
        digests = read_digests(path, most)
        if digests and digests[-1][1] in uncommitted:
            digests.pop()
        write_digests(path, digests)
        self._path, self._most, self._draws = path, most, dict(digests)
        self._file = LineFile(path)

    def __contains__(self, digest: object) -> bool:
        return digest in self._draws

    def write(self, digest: bytes, draw: int) -> None:
        """Add a group to the file; MachineError where the disk has no room."""
        self._file.append(b"%s %d" % (digest.hex().encode(), draw))

    def know(self, digest: bytes, draw: int) -> None:
        """Add a group that stands in the file; the oldest are forgotten, there too, once they are as many as those that
        are kept."""
        self._draws[digest] = draw
        if len(self._draws) >= 2 * self._most:
            newest = list(self._draws.items())[-self._most :]
            with contextlib.suppress(MachineError):
                write_digests(self._path, newest)
                self._draws = dict(newest)

    def close(self) -> None:
        self._file.close()


def digest_of(ids: Ids, logprobs: npt.ArrayLike = ()) -> bytes:
    parts = np.asarray(ids, np.int32).tobytes(), np.asarray(logprobs, np.float32).tobytes()
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def write_digests(path: Path, digests: Iterable[tuple[bytes, int]]) -> None:
    replace(path, b"".join(b"%s %d\n" % (digest.hex().encode(), draw) for digest, draw in digests))


def read_digests(path: Path, most: int = DIGESTS_KEPT) -> list[tuple[bytes, int]]:
    """The newest of them, with their draws; a line that a death cut is none."""
    text = path.read_text("ascii", "replace") if path.exists() else ""
    rows = re.findall("^([0-9a-f]{32}) ([0-9]+)$", text, re.M)
    return [(bytes.fromhex(digest), int(draw)) for digest, draw in rows[-most:]]


# -- the slots of a group -----


class GroupSlots:
    """Takes and commits groups whole: all members of a draw, of `size` each."""

    def __init__(self, samples: EpisodeSamples, groups: KeptGroups, size: int, warn: Warn) -> None:
        self._samples, self._groups, self._size, self._warn = samples, groups, size, warn

    def take(self) -> list[ClaimedSample]:
        """Claim all members of the draw that was admitted first, of those that wait whole; none if there is none."""
        lines = self._samples.ring.lines()
        waiting = np.flatnonzero((lines["state"] == State.QUEUED) & (lines["cls"] == SampleClass.TRAIN))
        draws, first, counts = np.unique(lines["group"][waiting], return_index=True, return_counts=True)
        for place in np.argsort(lines["admission"][waiting[first]], kind="stable"):
            slots = waiting[lines["group"][waiting] == draws[place]]
            if counts[place] == self._size and (samples := self._samples.take_together(slots.tolist(), lines)):
                return samples
        return []

    def commit(self, digest: bytes, samples: list[ClaimedSample], members: list[Trajectory], scores: list[float],
               source: str) -> None:
        """Commit a whole group; nothing of one that does not fit."""
        messages = msgspec.json.encode([[{"role": "environment", "content": source}]])
        draw = int(samples[0].line["group"])
        try:
            for sample, member, score in zip(samples, members, scores):
                write_episode(self._samples.ring, sample.slot, sample.word, member, member.text, score, messages)
            self._groups.write(digest, draw)
        except (SlotTooSmall, MachineError) as problem:
            for sample in samples:
                self._samples.give_back(sample)
            if isinstance(problem, SlotTooSmall):
                raise CallRefused("invalid", f"tokens: a sequence does not fit: {problem}", "tokens") from None
            self._warn(f"a group is not taken: {problem}", "error", kind="digests")
            raise CallRefused("no_room", f"no room for a group now: {problem}") from None
        self._groups.know(digest, draw)
        for sample, member in zip(samples, members):
            self._samples.commit(sample, member)

    def set_halves_aside(self) -> None:
        """Drop members of a group of which others were committed, or lost, before: nothing whole can be made of it."""
        lines = self._samples.ring.lines()
        train = lines["cls"] == SampleClass.TRAIN
        queued = np.flatnonzero(train & (lines["state"] == State.QUEUED))
        begun = np.isin(lines["group"][queued], lines["group"][train & np.isin(lines["state"], COMMITTED)])
        again = place_of(lines["uid"][queued], self._size)[1] > 0
        for slot in queued[begun | again].tolist():
            for sample in self._samples.take_together([slot], lines):
                self._samples.drop(sample, Fate.INCOMPLETE, "its group has lost members")


# -- the role -----


class Atropos(EpisodeHolder):
    """Trains what environments post (`busrl.agents.scored_groups.Trainer`)."""

    role = "atropos"
    singleton = True

    def setup(self) -> None:
        super().setup()
        self.size = self.topology.groups.size
        self.key = run_key(self.paths.serve_key)
        lines = self.ring.lines()
        waiting = (lines["cls"] == SampleClass.TRAIN) & np.isin(lines["state"], UNCOMMITTED)
        self.groups = KeptGroups(self.paths.atropos_seen, set(lines["group"][waiting].tolist()))
        self.slots = GroupSlots(self.samples, self.groups, self.size, partial(self.warn, "atropos"))
        self.drawn = DrawnTurns()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        serve, generation = self.topology.serve, self.topology.generation
        rules = Rules(self.size, self.renderer.vocabulary, self.limits, self.renderer.end_ids)
        sampling = self.topology.agents.sampling, generation.temperature, generation.top_p
        server = AtroposServer(self, rules, self.renderer, sampling, serve.host, serve.port, self.topology.run.name,
                               self.key, self.strangers)
        async with server:
            with self.announced(url=server.url, base_url=server.base_url):
                yield

    def work(self) -> bool:
        self.slots.set_halves_aside()
        return super().work()

    # -- requests of environments -----

    async def keep(self, digest: bytes, members: list[Trajectory], scores: list[float], env: int | None) -> bool:
        end = time.monotonic() + ROOM_S
        members = [self.drawn.numbered(member) for member in members]
        while not self.known(digest):
            if samples := self.slots.take():
                self.slots.commit(digest, samples, members, scores, SOURCE.format(env))
            elif (left := end - time.monotonic()) <= 0 or not await self.next_pass(left):
                return False
        return True

    def known(self, digest: bytes) -> bool:
        return digest in self.groups

    def state(self) -> RunProgress:
        """The version's step before it: new weights in between make tokens look too old, never too new."""
        lines, step = self.ring.lines(), self.ring.header(HeaderWord.VERSION_STEP)
        waiting = np.unique(lines["group"][np.isin(lines["state"], COMMITTED)])
        return RunProgress(
            self.ring.header(HeaderWord.STEP), self.topology.run.max_steps, len(waiting),
            self.topology.learner.trigger.n_min * self.size, self.ring.header(HeaderWord.VERSION), step,
        )

    def unclaimed(self) -> Episode:
        generation = self.topology.generation
        line = {**dict.fromkeys(LINE_FIELDS, 0), "uid": CALLER_UID + secrets.randbits(60), "top_p": generation.top_p,
                "max_new_tokens": generation.max_new_tokens, "temperature": generation.temperature}
        return self.begin(ClaimedSample(-1, 0, line), EpisodeLimits(self.limits.context))

    async def _ask(self, sample: ClaimedSample, call: Call) -> EngineAnswer:
        """Remember what the run's own engines drew: with its versions, whoever posts it."""
        answer = await super()._ask(sample, call)
        self.drawn.add(np.concatenate([call.prompt, answer.ids]), answer)
        return answer
