"""The scripted engine (`engine = "mock"`): no model, answers of given lengths at a given pace, in real time.

Implements `busrl.engines.base.Engine` so that a whole run can be tried out, with any number of actors on a small
machine, before machines are rented. Reads the trace that is data.train. Imports no torch; knows nothing of weights
apart from their versions.

- A sample's answer depends on (seed, uid) and its line alone: any actor can continue another actor's segment.
- Where agents make the samples, each request is one of their calls and gets all the tokens that it allows.
- Time is scripted: n decoding steps with k sequences take n x (token_s + k x per_sequence_s), and a sequence that joins
  makes all wait for its prefill. One `step()` is as many decoding steps as fit before the next end, at most a slice.
- The deadline of a step is counted from the deadline before it, so waking up late does not slow the run down.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from busrl.data import JsonlStream, Prompt, plain_text, trace, training_stream
from busrl.data.pretrained import Vocabulary, vocabulary
from busrl.engines.base import Engine, Finished, Request, Statistics
from busrl.engines.tokens import Ids
from busrl.errors import UserError
from busrl.states import Finish, place_of
from busrl.topology.schema import BYTES_PER_TOKEN, Scripted
from busrl.weights.shm import VersionReceiver

if TYPE_CHECKING:
    from busrl.topology import Topology
    from busrl.weights.base import Receiver
    from busrl.weights.factory import TransportSettings

LINES_KEPT = 4096
RIGHT = 0.5  # a reward of the trace that is at least this is a right answer
WRONG = "wrong"
SLICE_S = 0.01  # a request that comes while others run joins after this at the latest
FULL_SLICE_S = 0.05  # no row is free: there is nothing to look for but new weights and the end of the run
LATEST_S = 0.25  # the most that a late process makes up for: a longer stop stays lost time


class Script:
    """Answers by uid, which names a draw of the trace and a member: lengths and rewards of the trace, made-up tokens.

    Tokens are drawn evenly from the model's plain ids and carry the log-probability of this draw, so that a real
    learner can train on them, though it learns nothing. `right` is the share of right answers among lines that record
    no reward.
    """

    def __init__(
        self, stream: JsonlStream, ids: Vocabulary, group_size: int, *, seed: int = 0, right: float = 0.5,
        answer_key: str = "answer",
    ) -> None:
        self.stream, self.group_size, self.seed, self.right = stream, group_size, seed, right
        self.answer_key = answer_key
        self._plain = np.array(ids.plain, np.int32)
        self._eos = ids.eos
        self._line = lru_cache(LINES_KEPT)(self._read)

    def length(self, uid: int) -> int:
        """Tokens of the whole answer, the end of sequence included."""
        return self._line_of(uid)[0].length(place_of(uid, self.group_size)[2])

    def tokens(
        self, uid: int, begin: int, end: int, ended: bool, *stream: int
    ) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Ids and log-probabilities of tokens [begin, end) of the answer; the last is EOS if the answer has `ended`.
        `stream` is the random stream of a call."""
        places = np.random.default_rng([self.seed, uid, *stream]).integers(len(self._plain), size=end)[begin:]
        ids = self._plain[places]
        if ended:
            ids[-1] = self._eos
        return ids, np.full(len(ids), -math.log(len(self._plain) + 1), np.float32)

    def text(self, uid: int, ended: bool) -> str:
        """The right answer or a wrong one; an answer that was cut is wrong."""
        task, answer = self._line_of(uid)
        reward = task.reward(place_of(uid, self.group_size)[2])
        coin = zlib.crc32(f"{self.seed} {uid}".encode()) / (1 << 32)
        right = coin < self.right if reward is None else reward >= RIGHT
        if right and ended:
            return answer
        return WRONG if answer != WRONG else f"not {WRONG}"

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt as plain ids, one for each four bytes; of a chat the words count, not the template."""
        data = plain_text(prompt).encode()
        words = np.frombuffer(data.ljust(-(-len(data) // BYTES_PER_TOKEN) * BYTES_PER_TOKEN, b" "), "<u4")
        ids: list[int] = self._plain[words % len(self._plain)].tolist()
        return ids

    def decode(self, ids: Sequence[int] | Ids, ended: bool = True) -> str:
        """The ids as numbers: they mean nothing. The text of an answer is that of `text`."""
        return " ".join(str(int(i)) for i in ids)

    def _line_of(self, uid: int) -> tuple[trace.TracedPrompt, str]:
        return self._line(place_of(uid, self.group_size)[0])

    def _read(self, draw: int) -> tuple[trace.TracedPrompt, str]:
        item = self.stream.item(draw)
        place = f"{self.stream.path}:{item.index + 1}"
        answer = self.stream.record(item).get(self.answer_key, "")
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return trace.parse(item.line, place, self.stream.prompt_key), text.strip()


@dataclass
class _Row:
    """A request, the decoding steps at which it joined and ends, and the versions in use since then."""

    request: Request
    joined: int
    ends: int
    versions: list[tuple[int, int]] = field(default_factory=list)  # (first decoding step, version)

    def version_of_each(self, until: int) -> npt.NDArray[np.uint32]:
        """The versions of the tokens that are there at decoding step `until`."""
        begins = [begin for begin, _ in self.versions] + [until]
        return np.repeat(np.array([version for _, version in self.versions], np.uint32), np.diff(begins))


class ScriptedEngine(Engine):
    """`capacity` rows. `clock` and `wait` are those of the process; tests pass others."""

    def __init__(
        self, script: Script, pace: Scripted, *, capacity: int, max_length: int, seed: Sequence[int] = (0,),
        calls: bool = False, clock: Callable[[], float] = time.monotonic, wait: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(script, capacity, max_length, clock)
        self.script, self.pace, self._calls = script, pace, calls
        self._wait = wait
        self._random = np.random.default_rng(list(seed))
        self._running: dict[int, _Row] = {}
        self._now = 0.0  # when the decoding steps so far are done, by the script
        self._owed = 0.0  # prefill that comes before the next step

    @property
    def decoding(self) -> int:
        return 0 if self.paused else len(self._running) * self._planned()

    def _begin(self, requests: list[Request]) -> None:
        if not self._running:
            self._now = max(self._now, self._clock())
        for request in requests:
            left = max(1, self._length(request) - len(request.prefix_ids))
            now = self._counts.steps
            ends = now + min(request.max_new_tokens, left)
            self._running[request.key] = _Row(request, now, ends, [(now, self.version)])
            read = len(request.prompt_ids) + len(request.prefix_ids)
            self._counts.prefill_tokens += read
            self._owed += self.pace.prefill_s_per_token * read

    def step(self) -> list[Finished]:
        done = self._take_done()
        if not self._running or self.paused:
            return done
        steps = self._planned()
        self._pass(self._owed + steps * self._step_s())
        self._owed = 0.0
        self._counts.steps += steps
        self._counts.tokens += steps * len(self._running)
        self._end_now([key for key, row in self._running.items() if row.ends == self._counts.steps])
        return done + self._take_done()

    def resume(self) -> None:
        super().resume()
        self._now = max(self._now, self._clock())

    def receiver(self, settings: TransportSettings, name: str) -> Receiver | None:
        """A receiver that follows versions and loads nothing: there is no model."""
        return VersionReceiver(settings.segment, timeout_s=settings.timeout_s)

    def _update(self, receiver: Receiver) -> tuple[int, int]:
        assert receiver.kind == "tensors"  # by the rules of a topology
        version, step = receiver.fetch({})
        for row in self._running.values():
            if row.versions[-1][0] == self._counts.steps:
                row.versions.pop()
            row.versions.append((self._counts.steps, version))
        return version, step

    def statistics(self) -> Statistics:
        return replace(
            super().statistics(), waiting=sum(row.joined == self._counts.steps for row in self._running.values())
        )

    # -- internals -----

    def _length(self, request: Request) -> int:
        """Tokens of the whole answer."""
        return request.max_new_tokens if self._calls else self.script.length(request.uid)

    def _planned(self) -> int:
        """Decoding steps of the next `step`: to the next end of a row, or as many as fit into a slice."""
        if not self._running:
            return 0
        to_end = min(row.ends for row in self._running.values()) - self._counts.steps
        slice_s = FULL_SLICE_S if self.active == self.capacity else SLICE_S
        return min(to_end, max(1, int(slice_s / self._step_s())))

    def _step_s(self) -> float:
        return self.pace.token_s + self.pace.per_sequence_s * len(self._running)

    def _pass(self, seconds: float) -> None:
        """Let the scripted time pass: a pace, not a wait for anything."""
        if self.pace.jitter:
            seconds *= 1 + self.pace.jitter * self._random.uniform(-1, 1)
        here = self._clock()
        self._now = max(self._now, here - LATEST_S) + seconds
        if self._now > here:
            self._wait(self._now - here)

    def _end_now(self, keys: list[int]) -> None:
        """End each answer: EOS or LENGTH if it has all its tokens, ABORTED otherwise."""
        for key in keys:
            row, now = self._running.pop(key), self._counts.steps
            uid, before = row.request.uid, len(row.request.prefix_ids)
            end = before + now - row.joined
            ended = before < end and end >= self._length(row.request)
            stream = (row.request.segment,) if self._calls else ()
            ids, logprobs = self.script.tokens(uid, before, end, ended, *stream)
            finish = Finish.EOS if ended else Finish.LENGTH if now == row.ends else Finish.ABORTED
            text = None if finish == Finish.ABORTED or self._calls else self.script.text(uid, ended)
            versions, computed = row.version_of_each(now), before + len(row.request.prompt_ids)
            self._done.append(Finished(key, ids, logprobs, versions, finish, text, computed=computed))


def make(topology: Topology, process: str) -> ScriptedEngine:
    """The engine of a rollout process; `UserError` if the model does not say which token ids it has."""
    generation, seed = topology.generation, topology.run.seed
    ids, number = vocabulary(Path(topology.model.path)), process.rpartition("/")[2]
    if ids is None:
        raise UserError(f"{topology.model.path}: config.json does not say vocab_size and eos_token_id; see model.path")
    stream = training_stream(topology)
    right, answer_key = topology.mock.right, topology.reward.answer_key
    return ScriptedEngine(
        Script(stream, ids, topology.groups.size, seed=seed, right=right, answer_key=answer_key), topology.mock,
        capacity=generation.max_batch, max_length=topology.longest, calls=topology.has_callers,
        seed=(seed, int(number) if number.isdigit() else 0),
    )
