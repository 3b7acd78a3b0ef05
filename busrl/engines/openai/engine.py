"""What came of each request to a server so far: tokens, log-probabilities, versions.

Used by the served engine, which writes down what it hears. Knows nothing of HTTP, servers or gates.

The engine behind an OpenAI-compatible endpoint: the rollout process keeps the book, a server draws the tokens.

The rollout role drives it through `busrl.engines.base.Engine`. Talks to the endpoint through `client` and, where the
server can take new weights, `updates`. The tokenizer is that of the model folder; no model is loaded here.

- By completions a request is token ids, both ways. At an update it is cut, keeps its tokens, and goes on with the new
  weights from prompt and tokens: what comes then agrees with a forward pass of the new version.
- By chat a request is text and an answer can not be cut: an update waits until those under way have ended.
- Versions are those that this engine had the server load; a server that went away gets the newest ones again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from busrl.config.machine import vocabulary_size
from busrl.engines.base import ABORTED, EOS, LENGTH, Event, Finished, Pause, Pauses, Request, Statistics
from busrl.engines.openai.client import Ask, Client, Message, endpoint_of, tools_of
from busrl.engines.openai.weights import NAME, FixedReceiver, Restore, Updates
from busrl.errors import PeerTimeout, UserError

if TYPE_CHECKING:
    from busrl.config import Topology
    from busrl.config.schema import Openai
    from busrl.data import Prompt
    from busrl.engines.tokens import Tokens
    from busrl.weights.base import FolderReceiver, Receiver
    from busrl.weights.factory import Settings



# -- What came of each request to a server so far: tokens, log-probabilities, versions --------------------------------


@dataclass
class PartialAnswer:
    """What came of one request."""

    request: Request
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    told: int = 0  # tokens that events have told of

    def arrays(self, begin: int = 0) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.uint32]]:
        logprobs = np.asarray(self.logprobs[begin:], np.float32)
        if self.request.temperature <= 0:
            logprobs[:] = 0.0  # a distribution with one point, as in the other engines
        return np.asarray(self.ids[begin:], np.int32), logprobs, np.asarray(self.versions[begin:], np.uint32)

    def event(self, finish: int | None = None) -> Event:
        """What came since the last event."""
        ids, logprobs, versions = self.arrays(self.told)
        self.told = len(self.ids)
        return Event(self.request.key, ids, logprobs, versions, finish)

    def ended(self, finish: int, refused: str = "") -> Finished:
        """All of it, as the sequence that it is in the end."""
        ids, logprobs, versions = self.arrays()
        return Finished(self.request.key, ids, logprobs, versions, finish, refused=refused)


def seed_of(request: Request) -> int:
    """The server's seed: a function of (seed, uid, segment)."""
    text = f"{request.seed} {request.uid} {request.segment}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def nothing(request: Request) -> Finished:
    """The end of a request that has no room for a token."""
    empty = np.empty(0, np.int32)
    return Finished(request.key, empty, empty.astype(np.float32), empty.astype(np.uint32), LENGTH)


# -- The engine behind an OpenAI-compatible endpoint: the rollout process keeps the book, a server draws the tokens ---


log = logging.getLogger("busrl")
MOMENT_S = 0.02  # a step without news waits so long: the role looks for new slots after it
PROMPTS_KEPT = 65536
UPDATE_SHARE = 0.8  # of the time that the role declares for new weights: the error that says why comes before its end
ADAPTER = "adapter_config.json"  # a version with this file is an adapter, whatever kind its receiver has


class ServedEngine:
    """At most `capacity` requests at a time. `tokens` makes ids of prompts and text of ids; `update_s`: what an update
    may take, for whoever watches the process."""

    def __init__(
        self,
        settings: Openai,
        tokens: Tokens,
        *,
        capacity: int,
        max_length: int,
        vocabulary: int = 0,
        eos_ids: frozenset[int] = frozenset(),
        update_s: float = 120.0,
    ) -> None:
        self._settings, self._tokens, self._eos_ids = settings, tokens, eos_ids
        self._stops = sorted(eos_ids)
        self._capacity, self._max_length = capacity, max_length
        self._chat = settings.endpoint == "chat"
        self._tools = tools_of(settings)
        self._client = Client(endpoint_of(settings, vocabulary, eos_ids))
        self._books: dict[int, PartialAnswer] = {}
        self._chats: OrderedDict[bytes, Prompt] = OrderedDict()  # by chat: the messages of a prompt's ids
        self._taken: list[Message] = []  # news that the next step is about
        self._done: list[Finished] = []
        self._events: list[Event] = []
        self._pauses = Pauses()
        self._loaded: tuple[int, Path, bool] | None = None  # version, path, adapter: what the server was told last
        self._restore = Restore(settings.base_url, self._open, self._not_restored)
        self._opening = threading.Lock()  # a restore that ends, against a pause that begins
        self._update_limit_s = UPDATE_SHARE * update_s
        self._updating = self._lost = False  # lost: the server went away, and has not got its version again
        self._steps = self._drawn = self._prefilled = self._updates = 0
        self._update_s = 0.0
        try:
            model = settings.model or self._only_model()
            self._client.model = model
            self._updates_of = Updates(self._client, settings.update, model)
        except BaseException:
            self._client.close()
            raise

    # -- the protocol -------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def active(self) -> int:
        return len(self._books) + len(self._done)

    @property
    def drawing(self) -> int:
        """Tokens that have come; the next step is about these."""
        while True:
            try:
                self._taken.append(self._client.messages.get_nowait())
            except queue.Empty:
                break
        return sum(len(message.part.ids) for message in self._taken if message.part and message.key in self._books)

    @property
    def max_length(self) -> int:
        return self._max_length

    def submit(self, requests: Sequence[Request]) -> None:
        if self.active + len(requests) > self._capacity:
            raise ValueError(f"{len(requests)} requests for {self._capacity - self.active} free rows; look at capacity")
        asks = []
        for request in requests:
            known = len(request.prompt_ids) + len(request.prefix_ids)
            limit = min(request.max_new_tokens, self._max_length - known)
            if limit <= 0:
                self._done.append(nothing(request))
                continue
            self._books[request.key] = PartialAnswer(request)
            self._prefilled += known
            asks.append(self._ask(request, limit))
        self._client.ask(asks)

    def step(self) -> list[Finished]:
        self._steps += 1
        finished, self._done = self._done, []
        if not self._taken and not finished:
            try:
                self._taken.append(self._client.messages.get(timeout=MOMENT_S))
            except queue.Empty:
                pass
            return []
        taken, self._taken = self._taken, []
        return finished + [ended for message in taken if (ended := self._note(message)) is not None]

    def abort(self, key: int) -> Finished | None:
        if key in self._books:
            self._client.forget(key)
            self._settle()
        ended = next((one for one in self._done if one.key == key), None)  # by itself, before or meanwhile
        if ended is not None:
            self._done = [one for one in self._done if one is not ended]
            return ended
        return self._end(self._books[key], ABORTED) if key in self._books else None

    def events(self) -> list[Event]:
        told, self._events = self._events, []
        for book in self._books.values():
            if book.request.stream and book.told < len(book.ids):
                told.append(book.event())
        return told

    def pause(self, how: Pause) -> list[Finished]:
        return self._pause(how, self._settings.timeout_s + self._settings.patience_s)

    def _pause(self, how: Pause, limit_s: float) -> list[Finished]:
        ended: list[Finished] = []
        with self._opening:  # first of all: a restore that ends from now on opens nothing
            self._pauses.begin()
        if how == "abort":
            self._client.close_gate()
            ended = [one for key in list(self._books) if (one := self.abort(key)) is not None]
        elif how == "wait":
            self._drain(limit_s)
        elif self._chat:
            self._client.hold_gate()
        else:
            self._client.close_gate()
        done, self._done = self._done, []
        return done + ended

    def resume(self) -> None:
        self._pauses.end()
        self._open()

    def receiver(self, settings: Settings, name: str) -> Receiver | None:
        """None where the server can be told of new weights; else one that never has any."""
        if self._settings.update == "none":
            return FixedReceiver()
        self._updates_of.name_for(settings.folders)
        return None

    def update_weights(self, receiver: Receiver) -> tuple[int, int]:
        """WeightsRefused for a version that can not be used here: the one before stays. After any error requests go on
        if they did before."""
        begun = time.monotonic()
        deadline = begun + self._update_limit_s
        self._restore.wait(min(self._settings.patience_s, self._update_limit_s))  # it reads files that `take` may end
        version, step, path = cast("FolderReceiver", receiver).take()  # the rules of a topology see to its kind
        paused, self._updating = self._pauses.on, True
        try:
            self._done += self._pause("wait" if self._chat else "keep", deadline - time.monotonic())
            self._settle()
            self._load(version, path, deadline)
        finally:
            self._updating = False
            self._begin_restore()  # only if the server went away meanwhile and the new version is not there
            if not paused:
                self.resume()
        self._updates += 1
        self._update_s += time.monotonic() - begun
        return version, step

    def statistics(self) -> Statistics:
        waiting = sum(not book.ids for book in self._books.values())
        return Statistics(
            active=self.active, waiting=waiting, paused=self._pauses.on, version=self._client.version,
            steps=self._steps, tokens=self._drawn, prefill_tokens=self._prefilled, updates=self._updates,
            update_s=self._update_s, pause_s=self._pauses.seconds, errors=self._client.errors,
        )

    def encode(self, prompt: Prompt) -> list[int]:
        ids = self._tokens.encode(prompt)
        if self._chat:
            chat: Prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            self._chats[np.asarray(ids, np.int32).tobytes()] = chat
            if len(self._chats) > PROMPTS_KEPT:
                self._chats.popitem(last=False)
        return ids

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int32], ended: bool = True) -> str:
        return self._tokens.decode(ids, ended)

    def close(self) -> None:
        for key in list(self._books):
            with contextlib.suppress(PeerTimeout):
                self._client.forget(key)
        self._books.clear()
        self._updates_of.close()
        self._client.close()

    # -- requests -------------------------------------------------------------------------------------------------

    def _ask(self, request: Request, limit: int) -> Ask:
        body: dict[str, Any] = {
            "n": 1, "temperature": request.temperature, "top_p": request.top_p, "return_token_ids": True,
            "stream": True, "stop_token_ids": self._stops,
        }
        if self._chat:
            chat = self._chats.get(request.prompt_ids.astype(np.int32).tobytes())
            if chat is None or len(request.prefix_ids):
                raise ValueError(f"request {request.key}: by chat a prompt is a chat, and an answer is made in one go")
            body |= {"messages": chat, "logprobs": True}
            body["stream_options"] = {"include_usage": True}
            body |= {"tools": self._tools} if self._tools else {}
        else:
            body["logprobs"] = 1
        prompt = [*request.prompt_ids.tolist(), *request.prefix_ids.tolist()]
        return Ask(request.key, body, prompt, limit, seed_of(request))

    def _note(self, message: Message) -> Finished | None:
        """Write down what came; the finished sequence if that was all."""
        if message.problem is not None:
            raise message.problem
        if message.lost:
            self._lost = True
            self._begin_restore()
        book = self._books.get(message.key)
        if book is None:
            return None
        if message.refused:
            return self._end(book, ABORTED, message.refused)
        part = message.part
        if part is None:
            return None
        if part.prompt_ids is not None and self._chat:
            self._same_prompt(book.request, part.prompt_ids)
        book.ids += part.ids
        book.logprobs += part.logprobs
        book.versions += [message.version] * len(part.ids)
        self._drawn += len(part.ids)
        if not message.ended:
            return None
        stopped = part.finish != "length" or (bool(book.ids) and book.ids[-1] in self._eos_ids)
        return self._end(book, EOS if stopped else LENGTH)

    def _end(self, book: PartialAnswer, finish: int, refused: str = "") -> Finished:
        del self._books[book.request.key]
        if book.request.stream:
            self._events.append(book.event(finish))
        return book.ended(finish, refused)

    def _same_prompt(self, request: Request, theirs: list[int]) -> None:
        """The tokens that are trained follow the prompt that we know: the server's has to be the same."""
        ours = request.prompt_ids.tolist()
        if ours != theirs:
            at = next((k for k, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            raise UserError(
                f"{self._settings.base_url} renders the prompt of uid {request.uid} to {len(theirs)} tokens, the model "
                f"folder to {len(ours)}; they differ from token {at} on. Give the server the same model folder and "
                'chat template, or set openai.endpoint = "completions", which sends token ids'
            )

    def _settle(self) -> None:
        """Take in all news at once; what ended is kept for the next step."""
        _ = self.drawing
        taken, self._taken = self._taken, []
        self._done += [ended for message in taken if (ended := self._note(message)) is not None]

    def _drain(self, limit_s: float) -> None:
        """Nobody new begins, and those under way end; PeerTimeout names those that do not."""
        self._client.hold_gate()
        deadline = time.monotonic() + limit_s
        while self._client.asking:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerTimeout(
                    f"{self._settings.base_url}: {len(self._books)} answers under way did not end within "
                    f"{limit_s:.1f} s of a pause"
                )
            try:
                self._taken.append(self._client.messages.get(timeout=min(left, MOMENT_S)))
            except queue.Empty:
                continue
            self._settle()
        self._settle()

    # -- the server -----------------------------------------------------------------------------------------------

    def _load(self, version: int, path: Path, deadline: float = math.inf) -> None:
        """Have the server load a version; its tokens carry the number from now on."""
        adapter = (path / ADAPTER).is_file()
        self._updates_of.apply(version, path, adapter, deadline)
        self._loaded, self._client.given, self._lost = (version, path, adapter), True, False
        self._client.version = version

    def _begin_restore(self) -> None:
        """Where the server went away: give it its version again. An update under way does that with a newer one."""
        if not self._lost or self._loaded is None or self._restore.on or self._updating:
            return
        self._lost = False
        version = self._loaded[0]
        log.warning("%s went away; version %d is loaded again", self._settings.base_url, version)
        self._restore.begin(f"version {version}", partial(self._updates_of.apply, *self._loaded))

    def _not_restored(self, problem: Exception) -> None:
        self._client.messages.put(Message(-1, problem=problem))

    def _open(self) -> None:
        """Let requests go on, unless there is a pause, or the server has not got its version again."""
        with self._opening:
            if not self._pauses.on and not self._restore.on:
                self._client.open_gate()

    def _only_model(self) -> str:
        """The name of the one model that the endpoint has."""
        said = self._client.send("GET", f"{self._client.endpoint.url}/models", None, "asking which models there are")
        try:
            found = [str(entry["id"]) for entry in json.loads(said)["data"]]
            names = [name for name in found if not name.startswith(NAME)]  # adapters that were loaded before
        except (ValueError, KeyError, TypeError):
            names = []
        if len(names) != 1:
            raise UserError(f"{self._settings.base_url}/models names {names or 'nothing usable'}; set openai.model")
        return names[0]


def make(topology: Topology) -> ServedEngine:
    """The engine of a rollout process whose topology says `engine = "openai"`."""
    from busrl.engines.tokens import tokens_of

    folder, generation = Path(topology.model.path), topology.generation
    tokens = tokens_of(folder, topology.data.template == "chat", tools_of(topology.openai))
    return ServedEngine(
        topology.openai,
        tokens,
        capacity=generation.max_batch,
        max_length=topology.max_prompt_tokens + generation.max_new_tokens,
        vocabulary=vocabulary_size(folder),
        eos_ids=tokens.eos_ids,
        update_s=topology.limits.ready_s,
    )
