"""The role atropos: the trainer that environments of Atropos see. Groups that they scored become samples of the ledger.

Talks to environments through `busrl.agents.scored_groups`; samples and calls are those of `busrl.agents.roles.holder`.
Knows nothing of the environments' code, of engines or advantages.

- A group takes a draw that waits: all its G slots are claimed and written, and then committed one after the other,
  without a wait in between. The client gets its 200 after the last commit.
- If this process dies before the first commit nothing has changed. If it dies between two commits it leaves half a
  group: its next life drops the members that were not committed (fate i), and the learner the others. The client got no
  answer, and posts the group again.
- Turns that the run's engines drew for this process keep the engines' log-probabilities and versions. All other turns
  get the posted log-probabilities, and the version at receipt.
- The digest of a group is written before its first commit: a later process recognises a group that is posted again,
  unless half of it was dropped. So is what a teacher said of it, where that is posted (learner.teacher.posted).
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
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl import capabilities
from busrl.agents.episode import Call, EngineAnswer, Episode
from busrl.agents.roles.holder import EpisodeHolder, run_key
from busrl.agents.samples import EpisodeSamples, Warn
from busrl.agents.scored_groups import AtroposServer, Rules, RunProgress
from busrl.agents.sides import LINE_FIELDS, ClaimedSample
from busrl.agents.tree import Ids, Trajectory
from busrl.data.episodes import BEGIN, END, EpisodeLimits
from busrl.errors import CallRefused, MachineError, SlotTooSmall
from busrl.ring import State
from busrl.roles.episodes import write_episode
from busrl.states import Fate, HeaderWord, SampleClass, place_of
from busrl.system.files import LineFile, replace

ROOM_S = 20.0  # for which a group waits for a draw
DIGESTS_KEPT, ANSWERS_KEPT = 100_000, 20_000
CALLER_UID = 1 << 61  # from here on: names the random numbers of calls that belong to no sample
UNCOMMITTED = (State.QUEUED, State.GENERATING)
COMMITTED = (State.GENERATED, State.REWARDING, State.REWARDED, State.TRAINING)
SOURCE = "env_id {}; what this run did not draw has the log-probabilities that were posted, and the version at receipt"


# -- turns that this run drew, and groups that it has -----


class SampledTurns:
    """The newest turns that the run's engines drew for this process, by their ids and log-probabilities."""

    def __init__(self, most: int = ANSWERS_KEPT) -> None:
        self._most = most
        self._answers: dict[bytes, EngineAnswer] = {}  # by digests: of all ids up to its end; with its log-probs

    def add(self, ids: Ids, answer: EngineAnswer) -> None:
        """Add an answer, with all `ids` up to its end."""
        self._answers |= {digest_of(ids): answer, digest_of(ids, answer.logprobs): answer}
        while len(self._answers) > 2 * self._most:
            del self._answers[next(iter(self._answers))]

    def numbered(self, posted: Trajectory) -> Trajectory:
        """A posted episode, with the log-probabilities and versions of the turns that were drawn here. If the same ids
        were drawn twice, the posted log-probabilities decide between them."""
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
    """The newest `most` groups that were kept, by their digests, with their draws: in memory and in a file."""

    def __init__(self, path: Path, uncommitted: Iterable[int] = (), most: int = DIGESTS_KEPT) -> None:
        """`uncommitted`: draws with members that are not committed. A last group with one of them was not kept."""
        digests = read_digests(path, most)
        if digests and digests[-1][1] in uncommitted:
            digests.pop()
        write_digests(path, digests)
        self._path, self._most, self._draws = path, most, dict(digests)
        self._file = LineFile(path)

    def __contains__(self, digest: object) -> bool:
        return digest in self._draws

    def write(self, digest: bytes, draw: int) -> None:
        """Add a group to the file; MachineError if the disk has no room."""
        self._file.append(b"%s %d" % (digest.hex().encode(), draw))

    def remember(self, digest: bytes, draw: int) -> None:
        """Add a group that stands in the file. At twice `most` groups the older half is forgotten, in the file too."""
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
    """Read the newest digests with their draws; an incomplete line, left by a death, is skipped."""
    text = path.read_text("ascii", "replace") if path.exists() else ""
    rows = re.findall("^([0-9a-f]{32}) ([0-9]+)$", text, re.M)
    return [(bytes.fromhex(digest), int(draw)) for digest, draw in rows[-most:]]


# -- the slots of a group -----


class GroupSlots:
    """Claims and commits whole groups: all `size` members of a draw."""

    def __init__(self, samples: EpisodeSamples, groups: KeptGroups, size: int, warn: Warn, taught: Any = None) -> None:
        """`taught`: the store of what teachers said, where that is posted."""
        self._samples, self._groups, self._size, self._warn, self._taught = samples, groups, size, warn, taught

    def take(self) -> list[ClaimedSample]:
        """Claim all members of the first admitted draw of which all wait; [] if there is none."""
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
        """Commit a group; nothing of it if a member does not fit."""
        messages = msgspec.json.encode([[{"role": "environment", "content": source}]])
        draw = int(samples[0].line["group"])
        try:
            for sample, member, score in zip(samples, members, scores):
                write_episode(self._samples.ring, sample.slot, sample.word, member, member.text, score, messages)
            if self._taught is not None:
                numbers = [int(place_of(sample.uid, self._size)[2]) for sample in samples]
                self._taught.write(draw, [members[numbers.index(number)].taught for number in range(self._size)])
            self._groups.write(digest, draw)
        except (SlotTooSmall, MachineError) as problem:
            for sample in samples:
                self._samples.give_back(sample)
            if isinstance(problem, SlotTooSmall):
                raise CallRefused("invalid", f"tokens: a sequence does not fit: {problem}", "tokens") from None
            self._warn(f"a group is not taken: {problem}", "error", kind="digests")
            raise CallRefused("no_room", f"no room for a group now: {problem}") from None
        self._groups.remember(digest, draw)
        for sample, member in zip(samples, members):
            self._samples.commit(sample, member)

    def set_halves_aside(self) -> None:
        """Drop queued members of groups that can no longer be whole: other members were committed, or lost."""
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
        posted = any(row.posted for row in self.topology.learner.teacher)
        self.taught = capabilities.plug("teachers", "posted_rows") if posted else None
        store = capabilities.plug("teachers", "store")(self.paths.taught) if posted else None
        self.slots = GroupSlots(self.samples, self.groups, self.size, partial(self.warn, "atropos"), store)
        self.sampled = SampledTurns()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        serve, sampling = self.topology.serve, self.topology.agents.sampling
        rules = Rules(self.size, self.renderer.vocabulary, self.limits, self.renderer.end_ids, self.taught,
                      self.topology.learner.teacher_k)
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
        members = [self.sampled.numbered(member) for member in members]
        while not self.has(digest):
            if samples := self.slots.take():
                self.slots.commit(digest, samples, members, scores, SOURCE.format(env))
            elif (left := end - time.monotonic()) <= 0 or not await self.next_pass(left):
                return False
        return True

    def has(self, digest: bytes) -> bool:
        return digest in self.groups

    def state(self) -> RunProgress:
        """The progress of the run. The version's step is read before the version: if weights change in between, tokens
        look too old, never too new."""
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
        """Answer a call, and keep the answer for groups that are posted with its ids."""
        answer = await super()._ask(sample, call)
        self.sampled.add(np.concatenate([call.prompt, answer.ids]), answer)
        return answer
