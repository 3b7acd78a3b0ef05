"""The engine behind an OpenAI-compatible endpoint: this process keeps the answers, a server draws the tokens.

The rollout role drives it through `busrl.engines.base.Engine`. Talks to the endpoint through `client`. The tokenizer is
that of the model folder; no model is loaded here.

- By completions requests and answers are token ids. An update cuts a request, which keeps its tokens and continues from
  prompt and tokens: the later tokens agree with a forward pass of the new version.
- By chat a request is text and an answer cannot be cut: an update waits until the answers under way have ended.
- A policy version is what this engine had the server load: an adapter under a new name, or a model folder.
- A server that went away loads the newest version again. A server whose load failed stays paused: it never serves half
  of a version, and the next update loads all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import queue
import re
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from busrl.data.chat import parts_of
from busrl.data.vocabulary import ALL_ROWS, TokenRows, token_rows
from busrl.engines.base import Engine, Finished, PartialAnswer, Pause, Request, Statistics
from busrl.engines.openai.client import Client, Message, Sent, tools_of
from busrl.engines.tokens import PROMPTS_KEPT, Tokens, tokens_of
from busrl.errors import BugError, BusrlError, PeerLost, PeerTimeout, UserError
from busrl.paths import ADAPTER_CONFIG
from busrl.states import Finish, shown_uid
from busrl.weights.base import NOTHING, TensorReceiver

if TYPE_CHECKING:
    import torch

    from busrl.data import Prompt
    from busrl.data.prompts import Chat
    from busrl.topology import Topology
    from busrl.topology.schema import Openai
    from busrl.weights.base import Receiver
    from busrl.weights.factory import TransportSettings

    SentChat = list[dict[str, Any]] | Chat

log = logging.getLogger("busrl")
MOMENT_S = 0.02  # a step without messages waits this long: the role looks for new slots after it
ADAPTER_PREFIX = "busrl-"  # of the names of adapters
CLOSE_S = 3.0
LOADED_ALREADY = re.compile(r"already (been loaded|loaded|exists)")
NEVER = -100.0  # the least bias that the API knows: what is left of a probability is below float32
MOST_BIASED = 1024  # ids of one request: the servers' own limit
UPDATE_SHARE = 0.8  # of the time that the role declares for new weights, so that an error comes before its end


# -- new weights for the server -----

class FixedReceiver(TensorReceiver):
    """A receiver that never has a version: the endpoint keeps the weights of its start, version 0."""

    def newest(self) -> tuple[int, int]:
        return NOTHING

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        return NOTHING

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        raise BugError('an endpoint with openai.update = "none" has no new weights')

    def close(self) -> None:
        """Nothing was opened."""


class ServerWeights:
    """Loads new weights into a server, while the engine has stopped its own requests. `kind`: "vllm" or "sglang".

    - Each load has a name of its own: a server that keys its prefix cache by the name cannot serve stale keys. The name
      holds the run's id, so that two runs with one server do not use each other's adapters.
    - If the name is loaded already (the reply to the first attempt was lost, or an earlier process loaded it) that
      adapter is dropped and the version gets another name, because the loaded adapter may be of older files.
    """

    def __init__(self, client: Client, kind: str, base_model: str) -> None:
        self._client, self._kind, self._base = client, kind, base_model
        self._root = client.url.removesuffix("/v1")
        self._prefix = f"{ADAPTER_PREFIX}v"
        self._adapter = ""
        self._deadline = math.inf

    def name_for(self, folders: str) -> None:
        """Name adapters after the run whose versions are in `folders` on this host."""
        run = hashlib.blake2b(f"{socket.gethostname()} {folders}".encode(), digest_size=6).hexdigest()
        self._prefix = f"{ADAPTER_PREFIX}{run}-v"

    def load(self, version: int, path: Path, adapter: bool, deadline: float = math.inf) -> None:
        """Make the server load `version` from `path`; requests name the right model afterwards. PeerTimeout after
        `patience_s` of one call, or at the deadline (of the monotonic clock)."""
        self._deadline = deadline
        try:
            if adapter:
                self._load_adapter(version, path)
            else:
                self._load_folder(version, path)
        except UserError as problem:
            remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            hint = f"; {remedy}" if self._kind == "vllm" and ": 404" in str(problem) else ""
            raise UserError(f"new weights, version {version}: {problem}{hint}") from problem

    def _load_adapter(self, version: int, path: Path) -> None:
        name, old = f"{self._prefix}{version}", self._adapter
        try:
            self._name_adapter(version, path, name)
        except UserError as problem:
            if not LOADED_ALREADY.search(str(problem)):
                raise
            fresh = f"{name}.{secrets.token_hex(3)}"
            self._name_adapter(version, path, fresh)
            self._drop_adapter(name)
        if old not in ("", name):
            self._drop_adapter(old)

    def _name_adapter(self, version: int, path: Path, name: str) -> None:
        """Load the adapter under that name, and make requests use it."""
        body = {"lora_name": name, "lora_path": str(path)}
        self._post(f"{self._routes}/load_lora_adapter", body, f"loading adapter version {version}")
        self._adapter = name
        self._client.name_model(name)

    def _drop_adapter(self, name: str, once: bool = False) -> None:
        with contextlib.suppress(BusrlError):  # a leftover does no harm, and the server may have dropped it by itself
            self._post(f"{self._routes}/unload_lora_adapter", {"lora_name": name}, f"unloading adapter {name}", once)

    def close(self) -> None:
        """Leave nothing of the run in the server, if it drops the adapter within `CLOSE_S`."""
        if self._adapter:
            self._deadline = time.monotonic() + CLOSE_S
            self._drop_adapter(self._adapter, once=True)
            self._adapter = ""
            self._client.name_model(self._base)

    @property
    def _routes(self) -> str:
        return "/v1" if self._kind == "vllm" else ""

    def _load_folder(self, version: int, path: Path) -> None:
        phase = f"loading version {version}"
        if self._kind == "vllm":
            self._post("/pause?mode=keep", None, f"{phase}: pause")
            work = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            self._post("/collective_rpc", work, phase)
            self._post("/reset_prefix_cache?reset_running_requests=true", None, f"{phase}: prefix cache")
            self._post("/resume", None, f"{phase}: resume")
        else:
            self._post("/pause_generation", {}, f"{phase}: pause")
            self._check_success(self._post("/update_weights_from_disk", {"model_path": str(path)}, phase), phase)
            self._post("/flush_cache", None, f"{phase}: prefix cache")
            self._post("/continue_generation", {}, f"{phase}: resume")
        self._client.name_model(self._base)

    def _check_success(self, reply: str, phase: str) -> None:
        """PeerLost if SGLang reports a failure, which it does in a 200."""
        with contextlib.suppress(ValueError):
            answer = json.loads(reply)
            if isinstance(answer, dict) and answer.get("success") is False:
                raise PeerLost(f"{self._root} ({phase}): {answer.get('message', reply)}")

    def _post(self, path: str, body: Mapping[str, object] | None, phase: str, once: bool = False) -> str:
        return self._client.send("POST", self._root + path, body, phase, self._deadline, once)


# -- requests -----

class RequestBodies:
    """Makes the bodies of requests, without the part that depends on the tokens so far. Keeps, by chat, the messages of
    the prompts by their ids."""

    def __init__(self, settings: Openai, known: TokenRows, eos_ids: frozenset[int]) -> None:
        self._chat, self._eos_ids = settings.endpoint == "chat", eos_ids
        self._tools, self._bias = tools_of(settings), _bias(known)
        self._chats: OrderedDict[bytes, SentChat] = OrderedDict()

    def remember(self, prompt: Prompt, ids: Sequence[int]) -> None:
        """Keep the chat of a prompt that was encoded to these ids."""
        if self._chat:
            chat: SentChat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            self._chats[np.asarray(ids, np.int32).tobytes()] = chat
            if len(self._chats) > PROMPTS_KEPT:
                self._chats.popitem(last=False)

    def of(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "n": 1, "temperature": request.temperature, "top_p": request.top_p, "return_token_ids": True,
            "stream": True, "stop_token_ids": sorted(self._eos_ids.union(request.stop_ids)), **self._bias,
        }
        if not self._chat:
            return body | {"logprobs": 1}
        chat = self._chats.get(request.prompt_ids.astype(np.int32).tobytes())
        if chat is None or len(request.prefix_ids):
            raise ValueError(f"request {request.key}: by chat a prompt is a chat, and an answer is made in one go")
        messages, tools, arguments = parts_of(chat)
        body |= {"messages": messages, "logprobs": True, "stream_options": {"include_usage": True}}
        body |= {"chat_template_kwargs": arguments} if arguments else {}  # as vLLM and SGLang call them
        return body | ({"tools": tools or self._tools} if tools or self._tools else {})


def _bias(known: TokenRows) -> dict[str, Any]:
    """The part of a request that forbids rows without a token. A server may ignore it, and there may be too many such
    rows for it; so answers are checked for such ids all the same."""
    ids = known.left_out()
    if len(ids) > MOST_BIASED:
        log.warning("%d rows of the model have no token: too many to forbid in a request (logit_bias)", len(ids))
        return {}
    return {"logit_bias": {str(token): NEVER for token in ids}} if ids else {}


# -- the engine -----

class ServedEngine(Engine):
    """At most `capacity` requests at a time. `tokens` encodes prompts and decodes ids. `update_s`: the seconds of an
    update after which a supervisor considers the process stuck."""

    def __init__(
        self, settings: Openai, tokens: Tokens, *, capacity: int, max_length: int, known: TokenRows = ALL_ROWS,
        eos_ids: frozenset[int] = frozenset(), update_s: float = 120.0,
    ) -> None:
        super().__init__(tokens, capacity, max_length)
        self._settings, self._eos_ids = settings, eos_ids
        self._chat = settings.endpoint == "chat"
        self._bodies = RequestBodies(settings, known, eos_ids)
        self._client = Client(settings, known.rows, eos_ids)
        self._running: dict[int, PartialAnswer] = {}
        self._messages: list[Message] = []  # the next step handles them
        self._loaded: tuple[int, Path, bool] | None = None  # version, path, adapter: what the server loaded last
        self._restore: threading.Thread | None = None  # loads the version again into a server that went away
        self._restoring = False
        self._opening = threading.Lock()  # so that a restore that ends does not open the gate after a pause began
        self._update_limit_s = UPDATE_SHARE * update_s
        self._updating = self._lost = False  # lost: the server went away and does not have its version
        try:
            if not settings.model:
                self._client.name_model(_only_model(self._client, settings))
            self._weights = ServerWeights(self._client, settings.update, self._client.model)
        except BaseException:
            self._client.close()
            raise

    # -- the interface -----

    @property
    def decoding(self) -> int:
        """Tokens that have arrived; the next step adds them."""
        self._receive()
        return sum(len(message.part.ids) for message in self._messages if message.part and message.key in self._running)

    def _begin(self, requests: list[Request]) -> None:
        sending = []
        for request in requests:
            self._running[request.key] = answer = PartialAnswer(request)
            prompt = answer.known_ids
            answer.computed = len(prompt)  # an upper bound: the server reports no hits of its cache
            self._counts.prefill_tokens += len(prompt)
            sending.append(Sent(request, self._bodies.of(request), prompt))
        self._client.start(sending)

    def step(self) -> list[Finished]:
        self._counts.steps += 1
        if not self._messages and not self._done:
            self._receive(MOMENT_S)
            return []
        self._handle_taken()
        return self._take_done()

    def _end_now(self, keys: list[int]) -> None:
        for key in keys:
            self._client.drop(key)
        self._settle()  # some may have ended by themselves
        for key in keys:
            if key in self._running:
                self._end(key, Finish.ABORTED)

    def pause(self, how: Pause) -> list[Finished]:
        return self._pause(how, self._settings.timeout_s + self._settings.patience_s)

    def _pause(self, how: Pause, limit_s: float) -> list[Finished]:
        with self._opening:  # first of all: a restore that ends from now on opens nothing
            self.hold()
        if how == "wait":
            self._drain(limit_s)
        else:
            self._client.close_gate(cut=how == "abort" or not self._chat)
        if how == "abort":
            self._end_now(list(self._running))
        return self._take_done()

    def resume(self) -> None:
        super().resume()
        self._open()

    def receiver(self, settings: TransportSettings, name: str) -> Receiver | None:
        """A receiver without versions where the server loads no weights; else None, for the ordinary receiver."""
        if self._settings.update == "none":
            return FixedReceiver()
        self._weights.name_for(settings.folders)
        return None

    def _update(self, receiver: Receiver) -> tuple[int, int]:
        """After WeightsRefused the version before stays. After any error requests continue if they ran before."""
        deadline = time.monotonic() + self._update_limit_s
        self._wait_for_restore(min(self._settings.patience_s, self._update_limit_s))
        assert receiver.kind != "tensors"  # the rules of a topology allow no other kind
        version, step, path = receiver.take()
        paused, self._updating = self.paused, True
        try:
            self._done += self._pause("wait" if self._chat else "keep", deadline - time.monotonic())
            self._settle()
            self._load(version, path, deadline)
        finally:
            self._updating = False
            self._begin_restore()  # only if the server went away meanwhile and the new version is not there
            if not paused:
                self.resume()
        return version, step

    def statistics(self) -> Statistics:
        waiting = sum(not answer.token_ids for answer in self._running.values())
        return replace(super().statistics(), waiting=waiting, errors=self._client.errors)

    def encode(self, prompt: Prompt) -> list[int]:
        ids = super().encode(prompt)
        self._bodies.remember(prompt, ids)
        return ids

    def close(self) -> None:
        for key in list(self._running):
            with contextlib.suppress(PeerTimeout):
                self._client.drop(key)
        self._running.clear()
        self._weights.close()
        self._client.close()

    # -- requests -----

    def _receive(self, wait_s: float = 0.0) -> None:
        """Take the messages that are there; if there are none, the first that comes within the time."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._messages.append(self._client.messages.get(timeout=wait_s))
                wait_s = 0.0

    def _handle_taken(self) -> None:
        messages, self._messages = self._messages, []
        for message in messages:
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if message.problem is not None:
            raise message.problem
        if message.lost:
            self._lost = True
            self._begin_restore()
        answer, part = self._running.get(message.key), message.part
        if answer is None:
            return
        if message.refused:
            self._end(message.key, Finish.ABORTED, message.refused)
        if part is None:
            return
        if part.prompt_ids is not None and self._chat:
            self._check_prompt(answer.request, part.prompt_ids)
        answer.add(part.ids, part.logprobs, [message.version] * len(part.ids))
        self._counts.tokens += len(part.ids)
        if message.ended:
            stopped = part.finish != "length" or not self._eos_ids.isdisjoint(answer.token_ids[-1:])
            self._end(message.key, Finish.EOS if stopped else Finish.LENGTH)

    def _end(self, key: int, finish: int, refused: str = "") -> None:
        self._done.append(self._running.pop(key).finished(finish, refused=refused))

    def _check_prompt(self, request: Request, theirs: list[int]) -> None:
        """UserError if the server's prompt ids differ from ours, after which the trained tokens would stand."""
        ours = request.prompt_ids.tolist()
        if ours != theirs:
            at = next((k for k, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            raise UserError(
                f"{self._settings.base_url} renders the prompt of uid {shown_uid(request.uid)} to {len(theirs)} "
                f"tokens, the model folder to {len(ours)}; they differ from token {at} on. Give the server the same "
                'model folder and chat template, or set openai.endpoint = "completions", which sends token ids'
            )

    def _settle(self, wait_s: float = 0.0) -> None:
        """Handle all messages now; the next step returns what ended."""
        self._receive(wait_s)
        self._handle_taken()

    def _drain(self, limit_s: float) -> None:
        """Let the answers under way end, and none begin; PeerTimeout with the number that did not end."""
        self._client.close_gate(cut=False)
        deadline = time.monotonic() + limit_s
        while self._client.asking:
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"{self._settings.base_url}: {len(self._running)} answers under way did not end within "
                    f"{limit_s:.1f} s of a pause"
                )
            self._settle(MOMENT_S)
        self._settle()

    # -- the server -----

    def _load(self, version: int, path: Path, deadline: float = math.inf) -> None:
        """Make the server load a version; its tokens carry the number from now on."""
        adapter = (path / ADAPTER_CONFIG).is_file()  # the kind of the receiver does not decide it
        self._weights.load(version, path, adapter, deadline)
        self._loaded, self._lost = (version, path, adapter), False
        self._client.note_version(version)

    def _begin_restore(self) -> None:
        """If the server went away, load its version again, in a thread, because the role's loop must go on. Nothing to
        do during an update, which brings a newer version."""
        if not self._lost or self._loaded is None or self._restoring or self._updating:
            return
        self._lost, self._restoring = False, True
        log.warning("%s went away; version %d is loaded again", self._settings.base_url, self._loaded[0])
        self._restore = threading.Thread(target=self._load_again, args=self._loaded, name="restore", daemon=True)
        self._restore.start()

    def _load_again(self, version: int, path: Path, adapter: bool) -> None:
        try:
            self._weights.load(version, path, adapter)
        except Exception as problem:
            self._restoring = False
            self._client.messages.put(Message(-1, problem=problem))
        else:
            self._restoring = False
            self._open()

    def _wait_for_restore(self, limit_s: float) -> None:
        """Wait for a restore: it reads files that the next `take` may remove, and must not load an older version last.
        """
        if self._restore is None:
            return
        self._restore.join(limit_s)
        if self._restore.is_alive():
            raise PeerTimeout(
                f"{self._settings.base_url}: version {self._loaded and self._loaded[0]}, which it lost, is still being "
                f"loaded again after {limit_s:.1f} s more; phase: before a new version"
            )

    def _open(self) -> None:
        """Let requests continue, unless there is a pause or the server still lacks its version."""
        with self._opening:
            if not self.paused and not self._restoring:
                self._client.open_gate()


def _only_model(client: Client, settings: Openai) -> str:
    """The name of the one model that the endpoint serves; UserError if there are several, or none."""
    reply = client.send("GET", f"{client.url}/models", None, "asking which models there are")
    names = []
    with contextlib.suppress(ValueError, KeyError, TypeError):
        served = [str(entry["id"]) for entry in json.loads(reply)["data"]]
        names = [name for name in served if not name.startswith(ADAPTER_PREFIX)]  # adapters that were loaded before
    if len(names) != 1:
        raise UserError(f"{settings.base_url}/models names {names or 'nothing usable'}; set openai.model")
    return names[0]


def make(topology: Topology, process: str) -> ServedEngine:
    folder, generation = Path(topology.model.path), topology.generation
    tokens = tokens_of(folder, topology.data.template == "chat", tools_of(topology.openai))
    return ServedEngine(
        topology.openai, tokens, capacity=generation.max_batch, max_length=topology.longest,
        known=token_rows(folder), eos_ids=tokens.eos_ids, update_s=topology.limits.ready_s,
    )
