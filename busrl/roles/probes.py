"""Probes of parity: an engine's short answers to fixed prompts, drawn whole by one version, for the learner to score.

Used by the rollout role, beside its intake; the learner (`roles/learner/parity.py`) asks here which versions are due,
and for the prompts that prove an update. Makes requests for the engine and messages for the learner. Knows nothing of
slots and of what the learner finds.

- The prompts of a comparison are the first ones that this process was given: fixed for its life, of whatever kind the
  run has. So the same prompts meet an engine's caches at each version.
- Those that prove an update are made up, the same for the learner, and others at each version: they meet other
  experts and other rows of the embedding. One token is drawn behind each, so the learner knows before what it is worth.
- An answer during which the version changed proves nothing, and is not sent.
- A probe that is lost costs a comparison, nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.data.vocabulary import vocabulary_size
from busrl.engines import Finished, Request
from busrl.engines.tokens import NO_IDS, Ids
from busrl.protocol import messages as m
from busrl.states import Finish
from busrl.topology import Topology
from busrl.topology.kinds import SERVED

PROMPTS, TOKENS, PROMPT_TOKENS = 4, 16, 256  # at most: prompts, tokens of an answer and of a prompt
BLOCKS = (1, 16)  # tokens that caches of prompts go by
UID = 1 << 62  # of the random numbers of a probe; no sample has it


def comparable(topology: Topology) -> bool:
    """True if engines can agree with the learner at all: with a model, without chance in its forward, and with the
    weights of the version."""
    return not (topology.scripted or topology.lora.dropout or topology.experiments.forced_age)


def due(every: int, version: int) -> bool:
    """True if a version is compared: two after each other, so that what is left of the first shows in the second. The
    samples of the first step stand for version 0."""
    return every > 0 and version > 0 and version % every in (0, every - 1)


def workers(topology: Topology) -> set[str]:
    """The processes that may answer for this model, by the names that they have on the bus."""
    own = (process.name for process in topology.processes()
           if process.role == "rollout" and process.spec.serves == "all" and topology.tag in topology.tags_of(process))
    return {name.replace("/", "-") for name in (*own, *topology.served_by)}


def by_chat(topology: Topology) -> bool:
    """True if an engine takes chats, which can neither be cut nor made up of ids."""
    return topology.openai.endpoint == "chat" and any(
        process.role == "rollout" and process.engine in SERVED for process in topology.process
    )


PROOFS, PROOF_TOKENS, DRAWS = 4, 32, 2  # prompts that prove an update, tokens of each, and of its answers


def proofs(topology: Topology, version: int) -> list[Ids]:
    """The prompts that prove an update to `version`; none where engines cannot be asked, or that is turned off."""
    words, length = vocabulary_size(Path(topology.model.path)), min(PROOF_TOKENS, topology.longest - 1)
    on = topology.learner.parity.updates != "off" and comparable(topology) and not by_chat(topology)
    if not on or not version or words < 4 or length < 1 or topology.generation.temperature <= 0:
        return []
    # Special tokens are the first or the last of most vocabularies; the raw stream is the same in every numpy.
    low, high = words // 8, words // 2
    drawn = np.random.Philox(key=version).random_raw(PROOFS * length) % np.uint64(high - low)
    return list((drawn.astype(np.int32) + low).reshape(PROOFS, length))


@dataclass
class Batch:
    """Requests of one message: those that wait for a row, those that run, by key, and those that have ended."""

    waiting: list[Request] = field(default_factory=list)
    running: dict[int, Request] = field(default_factory=dict)
    done: list[tuple[Request, Finished]] = field(default_factory=list)

    def take(self, room: int) -> list[Request]:
        requests, self.waiting = self.waiting[:room], self.waiting[room:]
        self.running.update((request.key, request) for request in requests)
        return requests

    def ended(self, answer: Finished) -> None:
        request = self.running.pop(answer.key, None)
        is_whole = answer.finish != Finish.ABORTED and not answer.refused and len(answer.token_ids) > 0
        if is_whole and request is not None:
            self.done.append((request, answer))

    def answers(self) -> list[tuple[Request, Finished]]:
        """All answers, once, when all have ended."""
        if self.waiting or self.running:
            return []
        done, self.done = self.done, []
        return done


class Prober:
    """The probes of one rollout process: those that are due, those that run, and their answers."""

    def __init__(self, topology: Topology, only_validates: bool) -> None:
        on = comparable(topology) and not only_validates and not topology.frozen
        self._topology, self._every = topology, topology.learner.parity.every if on else 0
        self._cut = not by_chat(topology)
        # Where keys of old weights may stay, a prompt loses its first token: what is kept on purpose begins otherwise.
        keeps = topology.generation.on_update == "keep" or topology.prefix_keep_s > 0
        self._first = 1 if self._cut and keeps else 0
        self._prompts: dict[bytes, Request] = {}
        self._version, self._wanted = 0, False  # whether answers are to be compared under this version
        self._proof, self._compared = Batch(), Batch()  # of this version; their keys, which no slot has, are below 0
        self._keys = itertools.count(-1, -1)

    def see(self, requests: Iterable[Request]) -> None:
        """Note the run's own requests: the first prompts of the process are those of the probe."""
        for request in requests if len(self._prompts) < PROMPTS and self._every else ():
            ids = request.prompt_ids[self._first :][:PROMPT_TOKENS] if self._cut else request.prompt_ids
            if 0 < len(ids) <= PROMPT_TOKENS and request.temperature > 0 and len(self._prompts) < PROMPTS:
                self._prompts.setdefault(ids.tobytes(), replace(request, prompt_ids=ids.copy()))

    def loaded(self, version: int) -> None:
        """The engine has the weights of another version."""
        self._version, self._wanted = version, due(self._every, version)
        self._proof, self._compared = Batch(self._proving()), Batch()

    def _proving(self) -> list[Request]:
        temperature, seed = self._topology.generation.temperature, self._topology.run.seed
        return [
            Request(next(self._keys), UID + PROMPTS + i, 0, ids, NO_IDS, 1, temperature, 1.0, seed)
            for i, ids in enumerate(proofs(self._topology, self._version) * DRAWS)
        ]

    def _begin(self) -> None:
        """Make the requests to compare of this version, if it is due and there are prompts."""
        if self._wanted and self._prompts:
            self._wanted, prompts = False, list(self._prompts.values())
            self._compared = Batch([
                replace(
                    prompts[i % len(prompts)], key=next(self._keys), uid=UID + i, segment=0, prefix_ids=NO_IDS,
                    max_new_tokens=TOKENS, top_p=1.0, stop_ids=(), routes_from=0,
                )
                for i in range(PROMPTS)
            ])

    def take(self, room: int) -> list[Request]:
        """At most `room` requests to submit, before anything else gets a row."""
        self._begin()
        requests = self._proof.take(room)
        return requests + self._compared.take(room - len(requests))

    def ended(self, answer: Finished) -> None:
        """End a request of its own, perhaps of an earlier version."""
        self._proof.ended(answer)
        self._compared.ended(answer)

    def messages(self, worker: str) -> list[m.ProbeDrawn]:
        """Messages for the learner, once all of the same kind have ended."""
        return [self._message(worker, done) for batch in (self._proof, self._compared) if (done := batch.answers())]

    def _message(self, worker: str, done: list[tuple[Request, Finished]]) -> m.ProbeDrawn:
        routes = _routes_of(done)
        kind = partial(m.ProbeRouted, routes=routes) if routes else m.ProbeDrawn
        return kind(
            worker_id=worker, version=self._version, model=m.of_model(self._topology.beside),
            lengths=[len(answer.token_ids) for _, answer in done],
            prompt_lengths=[len(request.prompt_ids) for request, _ in done],
            prompt_ids=_bytes("<i4", (request.prompt_ids for request, _ in done)),
            tokens=_bytes("<i4", (answer.token_ids for _, answer in done)),
            logprobs=_bytes("<f4", (answer.logprobs for _, answer in done)),
            versions=_bytes("<u4", (answer.versions for _, answer in done)),
            temperatures=[request.temperature for request, _ in done],
        )


def _routes_of(done: Sequence[tuple[Request, Finished]]) -> bytes:
    """The routes of these answers; empty where the engine gave none."""
    parts = (part for _, answer in done for part in (answer.prompt_routes, answer.routes) if part is not None)
    return b"".join(part.astype(part.dtype.newbyteorder("<")).tobytes() for part in parts)


def _bytes(dtype: str, parts: Iterable[npt.NDArray[Any]]) -> bytes:
    return np.concatenate(list(parts)).astype(dtype).tobytes()
