"""The door of a service: the routes of Tinker's interface, their statuses and waits.

Talks to clients over HTTP, and to the `Desk`, which logs and finds answers. Samples are begun by a function that it
gets. Knows nothing of engines or tensors.

- A numbered request that can be read is never refused with a status: it would leave a gap that its client waits behind
  for ever. What is wrong with it is the answer of its future.
- Never 5xx for what a client sent: the SDK would send it again at once, without a pause.
- A wait is held `HOLD_S` at most: the SDK gives up after 45 s, and asks again.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from busrl.errors import MachineError
from busrl.service import bodies
from busrl.service.bodies import BadBody, as_logged, read_body
from busrl.service.desk import Found
from busrl.service.keys import Keys
from busrl.service.registry import ALL_WEIGHTS, AdapterOf, Model, Sampler, require_kind, session_of
from busrl.service.requests import Request
from busrl.service.routes import (
    ACCOUNT,
    BESIDE_BYTES,
    BODY_BYTES,
    HELD,
    NO_SUCH,
    Held,
    Refusal,
    Service,
    Things,
)
from busrl.service.runs import FILES, CheckpointRoutes, ListRoutes
from busrl.service.sampling import Samples
from busrl.service.sealing import require_recipients
from busrl.service.sums import UserFault, check
from busrl.service.wire import NoRoom, digest, read_forward_backward

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

log = logging.getLogger("busrl")
HOLD_S, HOLD_MANY_S = 20.0, 30.0
INLINE_BYTES = 1 << 20  # larger answers are announced first, where the client allows it
PROTO = "application/x-protobuf"
PARTS = ("attn", "mlp", "unembed")
TRAINING = ("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external",
            "load_weights")
MOST_SESSIONS, MOST_KEY, MOST_WHY = 1000, 256, 900
UNFOLDED_BYTES = 1 << 20  # of tensors: bodies that unfold into more are read beside the loop
MOST_WAITING = 4096  # requests of a model that the tuner has not answered
ONE_MODEL = ("all weights of {base} are trained, for one model at a time (tinker.weights), and {whose} has the place: "
             "end its session (ServiceClient.close), or load other weights into it (load_state); without a heartbeat "
             "the place is free after {silence:g} s")
WHOLE = "all weights of {} are trained here, for one model at a time; rank and parts of a lora_config count for nothing"
MODELS = "end a session that is not needed any more: those that go on have the {} models"
PAST = "its answer was fetched, or was kept for its time (tinker.keep_answers_s)"
PAUSED = "the service is paused by whoever runs it"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": True, "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000, "fwdbwd_dispatch_bytes_semaphore_size": 50 << 20,
    "proto_write_fwdbwd": True, "fwd_via_fwdbwd": True, "create_model_via_load_weights": True,
    "sample_use_retrieve_futures": True, "sample_join_sampling_session": True, "custom_loss_server_side": False,
    "use_pyqwest_transport": True,
}
DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 100}
STRANGER = 401  # the status of what has no key
TESTED = ("0.24.1", "0.38.0")  # versions of the SDK
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def written(metadata: bodies.Metadata) -> bytes:
    """A client's own words for the log, which knows fewer numbers than JSON does."""
    return msgspec.json.encode(metadata) if metadata else b""


def refused(name: tuple[str, int], op: str, meaning: bytes, problem: Exception) -> Request:
    """The record of a request whose future fails."""
    return Request("refused", *name, op, meaning, about={"why": str(problem)[:MOST_WHY]})


def require_same(number: str, made: object, asked: object) -> None:
    """Refusal for a number that stands for something else already."""
    if made != asked:
        raise Refusal(400, f"{number} stands for another one, which was made with {made or 'the base'}; count on")


class SessionRoutes:
    """Routes about the service and its sessions."""

    def __init__(self, at: Service, samples: Samples) -> None:
        self._at, self._samples = at, samples

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/v1/client/config", self._client_config),
            web.post("/api/v1/client/dynamic_config", self._dynamic_config),
            web.get("/api/v1/get_server_capabilities", self._capabilities),
            web.get("/api/v1/healthz", self._health),
            web.post("/api/v1/telemetry", self._telemetry),
            web.post("/api/v1/create_session", self._create_session),
            web.post("/api/v1/session_heartbeat", self._heartbeat),
            web.post("/api/v1/sessions/{id}/finish", self._finish),
        ]

    async def _client_config(self, request: web.Request) -> web.Response:
        inflight = {"sample_max_concurrent_requests": self._at.things().account.samples_in_flight}
        return web.json_response({**CLIENT_CONFIG, **inflight, "proto_compress_fwdbwd": self._compresses()})

    def _compresses(self) -> bool:
        """True if clients had better compress large bodies: they come over a network, and can be read."""
        return self._at.settings.host not in LOOPBACK and find_spec("zstandard") is not None

    async def _dynamic_config(self, request: web.Request) -> web.Response:
        return web.json_response(DYNAMIC_CONFIG)

    async def _capabilities(self, request: web.Request) -> web.Response:
        model = {"model_name": self._at.base.name, "max_context_length": self._at.settings.context, "trainable": True,
                 "sampleable": True}
        return web.json_response({"supported_models": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _telemetry(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "accepted"})

    async def _create_session(self, request: web.Request) -> web.Response:
        body, owner = await self._at.body(request, bodies.CreateSession), self._at.things().account.name
        key = request.headers.get("X-Idempotency-Key", "")[:MOST_KEY] or uuid.uuid4().hex
        if not (key.isascii() and key.isprintable()):
            raise Refusal(400, f"X-Idempotency-Key: {key!r} is not of printable ASCII; send a UUID")
        if (owner, key) not in self._at.registry.by_key:
            if sum(map(self._at.goes_on, self._at.things().sessions())) >= MOST_SESSIONS:
                raise Refusal(400, f"{MOST_SESSIONS} sessions are open; close some (ServiceClient.close)")
            about = {"key": key, "owner": owner, "name": body.display_name or "",
                     "metadata": written(body.user_metadata)}
            self._at.desk.log(Request("session", uuid.uuid4().hex, about=about))
        await self._at.desk.durable()
        made = {"type": "create_session", "session_id": self._at.registry.by_key[owner, key]}
        if self._at.whole:
            made["info_message"] = WHOLE.format(self._at.base.name)
        if body.sdk_version and body.sdk_version not in TESTED:
            made["warning_message"] = (f"busrl was tested with the SDK's versions {' and '.join(TESTED)}, not with "
                                       f"{body.sdk_version[:40]}")
        return web.json_response(made)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body = await self._at.body(request, bodies.SessionHeartbeat)
        self._at.things().open_session(body.session_id)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request) -> web.Response:
        session = self._at.things().session(request.match_info["id"])
        body = await self._at.body(request, bodies.FinishSession)
        if not session.ended:
            self._at.desk.log(Request("finish", session.id, about={"reason": body.reason.type}))
            await self._at.desk.durable()
        self._samples.stop_session(session.id)  # also when it comes again: the first time there may have been no room
        return web.Response(status=204)


class ModelRoutes:
    """Routes of models and their numbered requests."""

    def __init__(self, at: Service) -> None:
        self._at = at

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/v1/create_model", self._create_model),
            web.post("/api/v1/get_info", self._get_info),
            web.post("/api/v1/weights_info", self._weights_info),
            *(web.post(f"/api/v1/{op}", self._training) for op in TRAINING),
        ]

    async def _create_model(self, request: web.Request) -> web.Response:
        body, things = await self._at.body(request, bodies.CreateModel), self._at.things()
        id = f"{things.open_session(body.session_id).id}:train:{body.model_seq_id}"
        self._at.require_base(body.base_model)
        adapted = ALL_WEIGHTS if self._at.whole else self._adapted(body.lora_config)
        if id not in self._at.registry.models:
            self._open_model(things, id, adapted, 1, body.user_metadata)
        require_same(f"model_seq_id {body.model_seq_id}", self._at.registry.models[id].adapter,
                     msgspec.convert(adapted, AdapterOf))
        await self._at.desk.durable()
        return web.json_response({"request_id": f"{id}:0", "model_id": id})

    def _adapted(self, wanted: bodies.LoraConfig | None) -> dict[str, Any]:
        """The adapter that a client asks for. Refusal for one that cannot be served."""
        if wanted is None:
            raise Refusal(400, "lora_config is missing: adapters are trained here (tinker.weights); send one with a "
                          "rank")
        most = self._at.settings.max_rank
        if wanted.rank > most:
            raise Refusal(400, f"lora_config.rank {wanted.rank}: 1 to {most} are served (tinker.max_rank)")
        if wanted.train_unembed and self._at.base.tied_head:
            raise Refusal(400, f"train_unembed: the head of {self._at.base.name} is its embedding; create the model "
                          "with train_unembed=False")
        return {"rank": wanted.rank, "seed": wanted.seed or 0,
                **{name: getattr(wanted, f"train_{name}") for name in PARTS}}

    def _open_model(
        self, things: Things, id: str, adapter: dict[str, Any], first: int, metadata: bodies.Metadata
    ) -> None:
        owner, registry = things.account.name, self._at.registry
        going_on = [model for model in registry.models.values() if self._at.goes_on(registry.sessions[model.session])]
        if self._at.whole and going_on:
            whose = going_on[-1].id if going_on[-1].owner == owner else "another key's model"
            raise Refusal(400, ONE_MODEL.format(base=self._at.base.name, whose=whose,
                                                silence=self._at.settings.session_s))
        owners = [model.owner for model in going_on]
        if len(owners) >= self._at.settings.models:
            raise Refusal(400, f"{MODELS.format(self._at.settings.models)} of this service (tinker.models)")
        if owners.count(owner) >= things.account.models:
            raise Refusal(400, f"{MODELS.format(things.account.models)} of {owner} (models of its [[tinker.key]])")
        about = {"session": id.partition(":")[0], "adapter": adapter, "first": first, "owner": owner,
                 "metadata": written(metadata)}
        self._at.desk.log(Request("model", id, about=about))

    async def _get_info(self, request: web.Request) -> web.Response:
        body = await self._at.body(request, bodies.GetInfo)
        model = self._at.things().model(body.model_id)
        about = {"arch": self._at.base.arch, "model_name": self._at.base.name,
                 "tokenizer_id": self._at.settings.tokenizer or None}
        return web.json_response({
            "type": "get_info", "model_id": model.id, "model_name": self._at.base.name, **model.adapter.told,
            "model_data": about,
        })

    async def _training(self, request: web.Request) -> web.Response:
        """Log a numbered request. One that is wrong and has a number is logged as refused: its future fails."""
        op, raw, things = request.path.rpartition("/")[2], await self._at.raw(request), self._at.things()
        taken = await self._read_where_it_fits(things, op, raw)
        self._take(things, taken)
        await self._at.desk.durable()
        return web.json_response({"request_id": f"{taken.id}:{taken.seq}", "model_id": taken.id})

    async def _read_where_it_fits(self, things: Things, op: str, raw: bytes) -> Request:
        """Read a body: beside the loop if it is large, or becomes so. Bodies of JSON may log what they make."""
        if len(raw) <= BESIDE_BYTES or op != "forward_backward":
            with contextlib.suppress(NoRoom):
                return self._read(things, op, raw, UNFOLDED_BYTES)
        return await self._at.beside(self._read, things, op, raw)

    def _read(self, things: Things, op: str, raw: bytes, room: int | None = None) -> Request:
        """The record of a body of that operation. NoRoom: its tensors unfold into more than `room` bytes. BadBody: it
        is wrong and has no number."""
        try:
            return self._asked(things, op, raw, room)
        except BadBody as problem:
            if problem.request is None or (room is not None and isinstance(problem, NoRoom)):
                raise
            return refused(problem.request, op, digest(op, raw), problem)

    def _asked(self, things: Things, op: str, raw: bytes, room: int | None) -> Request:
        if op == "forward_backward":
            asked = read_forward_backward(raw, room)
            name, meaning = (asked.model_id, asked.seq_id), digest(op, asked)
            try:
                check(asked.data, asked.loss_fn, asked.config, self._at.settings.context, self._at.base.vocabulary)
            except UserFault as problem:
                wrong = refused(name, op, meaning, problem)
                if asked.forward_only:
                    wrong.about["forward_only"] = True
                return wrong
            return Request("training", *name, op, meaning, raw, tokens=asked.tokens)
        body: Any = read_body(bodies.BODIES[op], raw)
        if op == "load_weights":
            return self._load(things, body)
        if op == "save_weights_external":
            self._require_recipients(body)
        if op == "save_weights_for_sampler" and not body.path:
            self._require_new_sampler(things.model(body.model_id), body)
        return Request("training", body.model_id, body.seq_id, op, digest(op, body), as_logged(body))

    def _require_recipients(self, body: bodies.SaveWeightsExternal) -> None:
        try:
            require_recipients(body.age_encryption_recipients or ())
        except BadBody as problem:
            problem.request = body.model_id, body.seq_id
            raise

    def _require_new_sampler(self, model: Model, body: bodies.SaveWeightsForSampler) -> None:
        """BadBody if a sampler has the number already, which another request made."""
        known = self._at.registry.samplers.get(f"{model.session}:sample:{body.sampling_session_seq_id}")
        if known is not None and (known.model, known.seq) != (model.id, body.seq_id):
            rule = f"{body.sampling_session_seq_id} is another sampler's of this session"
            raise BadBody("sampling_session_seq_id", rule, "count on", (body.model_id, body.seq_id))

    def _load(self, things: Things, body: bodies.LoadWeights) -> Request:
        """The record of a load, which may be the first request of the model that it makes."""
        meaning, logged = digest("load_weights", body), as_logged(body)
        if body.model_id is None or body.seq_id is None:
            return Request("training", self._loaded(things, body), 0, "load_weights", meaning, logged)
        try:  # whether the path is there is known when its turn comes: a save may wait before it
            things.require_not_anothers(body.path)
        except Refusal:
            nothing = Refusal(404, f"{body.path} {NO_SUCH}")
            return refused((body.model_id, body.seq_id), "load_weights", meaning, nothing)
        return Request("training", body.model_id, body.seq_id, "load_weights", meaning, logged)

    def _loaded(self, things: Things, body: bodies.LoadWeights) -> str:
        """The model that a load makes."""
        id = f"{things.open_session(body.session_id).id}:train:{body.model_seq_id}"
        adapter = things.saved(body.path, "weights")["adapter"]
        try:
            require_kind(body.path, adapter["rank"], 0 if self._at.whole else 1)
        except UserFault as problem:
            raise Refusal(400, str(problem)) from None
        if id not in self._at.registry.models:
            self._open_model(things, id, adapter, 0, body.user_metadata)
        return id

    def _take(self, things: Things, request: Request) -> None:
        """Log a numbered request, once."""
        model = things.model(request.id)
        self._at.heard(model.id)
        known = model.requests.get(request.seq)
        if known is not None:
            if known.digest != request.digest:
                raise Refusal(400, f"request {request.seq} of {model.id} was another one")
            return
        if self._at.desk.is_forgotten((request.id, request.seq)):
            raise Refusal(400, f"request {request.seq} of {model.id} is past: {PAST}")
        if not model.first <= request.seq < 2**31:
            raise Refusal(400, f"seq_id {request.seq}: numbers of {model.id} begin at {model.first}")
        newest = next(reversed(self._at.registry.models))
        if self._at.whole and newest != model.id:
            raise Refusal(400, f"{model.id} is over: all weights of {self._at.base.name} are trained, for one model at "
                          "a time, and a later one has begun; load what this one saved into a new model")
        things.open_session(model.session)
        things.require_tokens()
        # What all others wait for must come in, however much they are.
        if request.seq != model.first and not self._at.desk.is_answered((model.id, request.seq - 1)):
            self._require_room(model.id, len(request.body))
        self._at.desk.log(request)

    def _require_room(self, model: str, size: int) -> None:
        desk, most = self._at.desk, self._at.settings.pending_mb
        if desk.waiting_bytes[model] + size > most << 20:
            raise Refusal(429, f"{model} has {most} MiB of requests that wait (tinker.pending_mb)", 1)
        if desk.waiting[model] >= MOST_WAITING:
            raise Refusal(429, f"{model} has {MOST_WAITING} requests that wait", 1)

    async def _weights_info(self, request: web.Request) -> web.Response:
        adapter = self._at.things().adapter((await self._at.body(request, bodies.WeightsInfo)).tinker_path)
        about = {"base_model": self._at.base.name, **adapter.told}
        return web.json_response({**about, **{f"train_{name}": getattr(adapter, name) for name in PARTS}})


class SamplerRoutes:
    """Routes of samplers."""

    def __init__(self, at: Service, samples: Samples) -> None:
        self._at, self._samples = at, samples

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/v1/create_sampling_session", self._create_sampler),
            web.get("/api/v1/samplers/{id}", self._get_sampler),
            web.post("/api/v1/join_sampling_session", self._join),
            web.post("/api/v1/asample", self._asample),
        ]

    async def _create_sampler(self, request: web.Request) -> web.Response:
        body, things = await self._at.body(request, bodies.CreateSamplingSession), self._at.things()
        id = f"{things.open_session(body.session_id).id}:sample:{body.sampling_session_seq_id}"
        if id not in self._at.registry.samplers:
            about: dict[str, Any] = {"owner": things.account.name}
            if body.model_path:
                model, _, seq = things.saved(body.model_path, "sampler_weights")["by"].rpartition(":")
                about |= {"model": model, "seq": int(seq), "path": body.model_path}
            else:
                self._at.require_base(body.base_model)
            self._at.desk.log(Request("sampler", id, about=about))
        require_same(f"sampling_session_seq_id {body.sampling_session_seq_id}", self._at.registry.samplers[id].path,
                     body.model_path or "")
        await self._at.desk.durable()
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": id})

    async def _get_sampler(self, request: web.Request) -> web.Response:
        sampler = self._at.things().sampler(request.match_info["id"])
        about = {"sampler_id": sampler.id, "base_model": self._at.base.name, "model_path": sampler.path or None}
        return web.json_response(about)

    async def _join(self, request: web.Request) -> web.Response:
        body = await self._at.body(request, bodies.JoinSamplingSession)
        sampler = self._at.things().sampler(body.sampling_session_id)
        counter = sampler.clones + 1
        self._at.desk.log(Request("join", sampler.id, counter))
        await self._at.desk.durable()
        return web.json_response({"type": "join_sampling_session", "client_counter": counter})

    async def _asample(self, request: web.Request) -> web.Response:
        body, things = await self._at.body(request, bodies.Sample), self._at.things()
        tokens = body.prompt.ids(self._at.base.vocabulary, self._at.settings.context).size
        if body.target_prompt_logprobs is not None:
            body.target_prompt_logprobs.require(tokens - 1, self._at.base.vocabulary)
        sampler, seq = things.sampler(body.sampling_session_id), body.seq_id
        self._at.heard(sampler.id)
        meaning, known = digest("asample", body), sampler.requests.get(seq)
        if known is not None and known.digest != meaning:
            raise Refusal(400, f"request {seq} of {sampler.id} was another one")
        if known is None:
            if self._at.desk.is_forgotten((sampler.id, seq)):
                raise Refusal(400, f"request {seq} of {sampler.id} is past: {PAST}")
            things.open_session(session_of(sampler.id))
            weights = self._weights(sampler)
            self._require_room(things, body.num_samples)
            about = {"samples": body.num_samples}
            logged = as_logged(body)
            self._at.desk.log(Request("sample", sampler.id, seq, "asample", meaning, logged, about, tokens=tokens))
            self._samples.begin(sampler, seq, weights)
        await self._at.desk.durable()
        id = f"{sampler.id}:{seq}"
        named = [f"{id}:{index}" for index in range(body.num_samples)]
        return web.json_response({"request_id": id, "sample_sequence_ids": named})

    def _weights(self, sampler: Sampler) -> int:
        """The number of the snapshot that a sampler draws with, 0 if it is not known yet, or may change. Refusal if the
        snapshot was there, and is not any more."""
        save = None if sampler.inflight else self._at.desk.found((sampler.model, sampler.seq))
        if save is None or not save.weights:
            return 0
        if not self._at.where.snapshot(save.weights).is_dir():
            raise Refusal(404, f"the weights of {sampler.path or sampler.id} are gone; save them again, or make the "
                          "sampler from others")
        return save.weights

    def _require_room(self, things: Things, samples: int) -> None:
        things.require_tokens()
        owner, most = things.account.name, things.account.samples_in_flight
        under_way = self._at.desk.under_way.of[owner]
        if under_way and under_way + samples > most:  # one request alone goes on, however many its samples are
            raise Refusal(429, f"{under_way} samples of {owner} are under way, {most} may be (samples_in_flight)", 1)


class FutureRoutes:
    """Routes by which clients wait for answers."""

    def __init__(self, at: Service, samples: Samples) -> None:
        self._at, self._samples = at, samples

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/v1/retrieve_future", self._retrieve),
            web.post("/api/v1/retrieve_futures", self._retrieve_many),
            web.post("/api/v1/cancel_future", self._cancel),
        ]

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await self._at.body(request, bodies.RetrieveFuture)
        id, name = body.request_id, self._future(self._at.things(), body.request_id)
        model = self._at.registry.models.get(name[0])
        if model is not None and name[1] == 0 and model.first == 1:  # the creation, which the log alone answers
            return web.json_response({"type": "create_model", "model_id": model.id})
        with self._at.there(name[0]):
            found = await self._at.desk.answer(name, HOLD_S)
        if found is None:
            state, reason = ("paused_capacity", PAUSED) if self._at.paused() else ("active", None)
            waits = {"type": "try_again", "request_id": id, "queue_state": state, "queue_state_reason": reason}
            return web.json_response(waits, status=408)
        if body.allow_metadata_only and found.size > INLINE_BYTES:
            return web.json_response({"status": "complete_metadata", "response_payload_size": found.size})
        payload, kind = found.payload(), PROTO if found.proto else "application/json"
        if not payload:
            raise Refusal(410, f"{id[:200]}: its answer is kept no longer (tinker.keep_answers_s)")
        self._at.desk.fetched(name)
        return web.Response(body=payload, content_type=kind)

    def _future(self, things: Things, id: str) -> tuple[str, int]:
        """Model or sampler and number of a future; Refusal 410 if it is none or too old: the SDK then asks again."""
        owner, _, digits = id.rpartition(":")
        known = things.numbered(owner)
        if known is not None and digits.isascii() and digits.isdigit() and len(digits) < 20:
            name = owner, int(digits)
            created = isinstance(known, Model) and known.first == 1 and name[1] == 0
            if created or name[1] in known.requests:
                return name
        raise Refusal(410, f"{id[:200]} is unknown here, or its answer was not fetched in time")

    async def _retrieve_many(self, request: web.Request) -> web.Response:
        body = await self._at.body(request, bodies.RetrieveFutures)
        sampler = self._at.things().sampler(body.target.sampling_session_id)
        clone, cursor = body.target.cloned_sampler_id or 0, body.prev_cursor or 0
        hold_s = HOLD_MANY_S if body.timeout is None else min(body.timeout, HOLD_MANY_S)
        with self._at.there(sampler.id):
            new, cursor = await self._at.desk.completions(sampler.id, clone, cursor, hold_s)
        told = [self._completion(name, found) for name in new if (found := self._at.desk.found(name)) is not None]
        return web.json_response({"cursor": cursor, "completions": told})

    def _completion(self, name: tuple[str, int], found: Found) -> dict[str, Any]:
        return {"state": "finished" if found.state == "done" else "failed", "request_id": f"{name[0]}:{name[1]}",
                "response_payload_uncompressed_size": found.size}

    async def _cancel(self, request: web.Request) -> web.Response:
        body = await self._at.body(request, bodies.CancelFuture)
        name = self._future(self._at.things(), body.request_id)
        if name[0] in self._at.registry.samplers:
            self._samples.stop(name)
        return web.Response(status=204)


class Door:
    """The application of a service. `keys` let clients in; `warn` takes lines for people."""

    def __init__(self, service: Service, samples: Samples, keys: Keys, warn: Callable[[str], None]) -> None:
        self._keys, self._warn = keys, warn
        self._read_bytes: Counter[str] = Counter()  # by owner
        self._parts = (SessionRoutes(service, samples), ModelRoutes(service), SamplerRoutes(service, samples),
                       FutureRoutes(service, samples), ListRoutes(service), CheckpointRoutes(service, keys.secret))

    def app(self, *around: Middleware) -> web.Application:
        app = web.Application(middlewares=[*around, self._guard], client_max_size=BODY_BYTES)
        for part in self._parts:
            app.add_routes(part.routes())
        return app

    @contextlib.contextmanager
    def _reading(self, owner: str, request: web.Request) -> Iterator[None]:
        """Count a large body while it is in memory. Refusal where those of its key are too many already."""
        if (request.content_length or 0) > BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(BODY_BYTES, request.content_length or 0)
        unknown, held = BODY_BYTES if request.body_exists else 0, Held(self._read_bytes, owner)
        HELD.set(held)
        try:
            held.add(unknown if request.content_length is None else request.content_length)
            yield
        finally:
            held.release()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and answer refusals in words."""
        try:
            account = self._keys.account(request.headers.get("X-API-Key", ""))
            if account is None and request.path != "/api/v1/healthz" and not request.path.startswith(FILES):
                raise Refusal(STRANGER, "the key is none of this service; the run's own is in RUN_DIR/tinker.key")
            if account is None:
                return await handler(request)
            ACCOUNT.set(account)
            with self._reading(account.name, request):
                return await handler(request)
        except Refusal as refusal:
            after = {"retry-after": str(refusal.retry_after_s)} if refusal.retry_after_s else {}
            return web.json_response({"detail": str(refusal)}, status=refusal.status, headers=after)
        except BadBody as problem:
            return web.json_response({"detail": str(problem)}, status=problem.status)
        except MachineError as problem:  # nothing was logged
            return web.json_response({"detail": str(problem)}, status=429, headers={"retry-after": "10"})
        except web.HTTPException as problem:
            text = f"{request.method} {request.path}: {problem.reason}"
            return web.json_response({"detail": text}, status=problem.status)
        except Exception as problem:  # a fault of ours; with 5xx the SDK would send it again at once, for ever
            log.exception("%s", request.path)
            self._warn(f"{request.path}: {type(problem).__name__}: {problem}")
            return web.json_response({"detail": f"a fault of the service: {problem}"}, status=400)
