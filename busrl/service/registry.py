"""Things that clients have made so far, as the request log tells: sessions, models, samplers, numbered requests.

Door and tuner each build it from the log, and follow it. Knows nothing of HTTP, of answers or of tensors.

- Everything here follows from the log alone, in its order: two processes that read it have the same.
- A model's numbers begin at 1; at 0 where its first request loads it from saved weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from busrl.service.bodies import SAVED
from busrl.service.requests import Place, Request
from busrl.service.sums import UserFault

RUN = "run"  # the name of the run's own key
FULL = "full"  # `tinker.weights` of a service that trains all weights
SAVES = {"save_weights": "weights", "save_weights_for_sampler": "sampler_weights",
         "save_weights_external": "external_weights"}  # kinds of what these operations save
Metadata = dict[str, Any] | None


class AdapterOf(msgspec.Struct, frozen=True):
    """The adapter of a model: its rank, the seed of its first weights, and the parts of the base that it changes. Rank
    0: all weights are trained."""

    rank: int
    seed: int
    attn: bool
    mlp: bool
    unembed: bool

    @property
    def told(self) -> dict[str, Any]:
        """Tell clients whether it is an adapter, and its rank."""
        return {"is_lora": self.rank > 0, "lora_rank": self.rank or None}


ALL_WEIGHTS = {"rank": 0, "seed": 0, "attn": True, "mlp": True, "unembed": True}


class Numbered(NamedTuple):
    """A numbered request of a model or sampler, whose record stands at `place`; `tokens`: of its data."""

    kind: str
    op: str
    digest: bytes
    place: Place
    tokens: int = 0


@dataclass
class Save:
    """Weights that a request is to save under a name, which begins with their kind: `weights/one`. `at`: when it was
    logged, `expires`: when they may go, in Unix seconds; 0: never."""

    name: str
    at: float
    expires: float = 0.0
    metadata: Metadata = None
    recipients: Sequence[str] = ()  # for whom its files are encrypted when they are downloaded
    deleted: bool = False

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    def is_over(self, now: float) -> bool:
        return self.deleted or 0 < self.expires <= now


@dataclass
class Model:
    id: str
    session: str
    adapter: AdapterOf
    first: int  # the number of its first request
    owner: str = RUN  # the name of the key under which it was made
    metadata: Metadata = None
    newest_at: float = 0.0  # when its newest request was logged
    published: list[int] = field(default_factory=list)  # numbers of the saves for samplers in flight
    requests: dict[int, Numbered] = field(default_factory=dict)
    saves: dict[int, Save] = field(default_factory=dict)  # by the number of the request

    def forget_to(self, number: int) -> None:
        """Forget the requests up to that one."""
        self.requests = {seq: asked for seq, asked in self.requests.items() if seq > number}


@dataclass
class Sampler:
    """Draws with the base, or with what the request `seq` of `model` saved; in flight, with what a later one published.
    `path` is what it was made from."""

    id: str
    model: str = ""
    seq: int = 0
    path: str = ""
    owner: str = RUN
    inflight: bool = False
    clones: int = 0
    requests: dict[int, Numbered] = field(default_factory=dict)


@dataclass
class Session:
    id: str
    owner: str = RUN
    metadata: Metadata = None
    name: str = ""
    ended: str = ""


class Registry:
    """`samples`: requests for samples are noted too."""

    def __init__(self, samples: bool = True) -> None:
        self._samples = samples
        self.sessions: dict[str, Session] = {}
        self.by_key: dict[tuple[str, str], str] = {}  # session by its owner, and the key of the call that made it
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self._decode = msgspec.json.Decoder().decode

    def add(self, request: Request, place: Place) -> None:
        """Take over the next record of the log."""
        getattr(self, f"_add_{request.kind}")(request, place)

    def session_of(self, id: str) -> Session:
        """The session of a model or sampler."""
        return self.sessions[session_of(id)]

    def recall(self, model: Model, log: Iterable[tuple[Request, Place]]) -> None:
        """Know the requests of a model again that were forgotten. `log`: all records."""
        for request, place in log:
            if request.id == model.id and request.kind in ("training", "refused"):
                model.requests[request.seq] = numbered(request, place)

    def _metadata(self, about: dict[str, Any]) -> Metadata:
        """A client's own words about what it makes, which stand in the log as JSON."""
        text = about.get("metadata")
        return self._decode(text) if text else None

    # -- kinds of records -----

    def _add_session(self, request: Request, place: Place) -> None:
        about = request.about
        session = Session(request.id, about.get("owner", RUN), self._metadata(about), about.get("name", ""))
        self.sessions[request.id] = session
        self.by_key[session.owner, about["key"]] = request.id

    def _add_finish(self, request: Request, place: Place) -> None:
        self.sessions[request.id].ended = request.about["reason"]

    def _add_model(self, request: Request, place: Place) -> None:
        about = request.about
        self.models[request.id] = Model(
            request.id, about["session"], msgspec.convert(about["adapter"], AdapterOf), about["first"],
            about.get("owner", RUN), self._metadata(about), request.at)

    def _add_sampler(self, request: Request, place: Place) -> None:
        self.samplers[request.id] = Sampler(request.id, **request.about)

    def _add_join(self, request: Request, place: Place) -> None:
        self.samplers[request.id].clones = request.seq

    def _add_training(self, request: Request, place: Place) -> None:
        model = self.models[request.id]
        model.requests[request.seq] = numbered(request, place)
        model.newest_at = request.at
        if request.op in SAVES:
            self._add_save(model, request, self._decode(request.body))

    def _add_save(self, model: Model, request: Request, body: dict[str, Any]) -> None:
        """Note what is saved under a name, or the sampler that is made of a model as it is."""
        kind = SAVES[request.op]
        if body.get("path"):
            expires = request.at + body["ttl_seconds"] if body.get("ttl_seconds") else 0.0
            model.saves[request.seq] = Save(
                f"{kind}/{body['path']}", request.at, expires, body.get("user_metadata"),
                body.get("age_encryption_recipients") or ())
            return
        sampler = f"{model.session}:sample:{body['sampling_session_seq_id']}"
        path = f"tinker://{model.id}/{kind}/ephemeral-{request.seq}"
        inflight = body.get("kind") == "inflight"
        self.samplers.setdefault(sampler, Sampler(sampler, model.id, request.seq, path, model.owner, inflight))
        model.published += [request.seq] if inflight else []

    def _add_delete(self, request: Request, place: Place) -> None:
        self.models[request.id].saves[request.seq].deleted = True

    def _add_ttl(self, request: Request, place: Place) -> None:
        self.models[request.id].saves[request.seq].expires = request.about["expires"]

    def _add_refused(self, request: Request, place: Place) -> None:
        self.models[request.id].requests[request.seq] = numbered(request, place)

    def _add_sample(self, request: Request, place: Place) -> None:
        if not self._samples:
            return
        self.samplers[request.id].requests[request.seq] = Numbered(request.kind, "asample", request.digest, place)


def numbered(request: Request, place: Place) -> Numbered:
    """The entry of a numbered request of a model."""
    return Numbered(request.kind, request.op, request.digest, place, request.tokens)


def session_of(id: str) -> str:
    """The session of a model or sampler."""
    return id.partition(":")[0]


def saved(path: str) -> tuple[str, str, str] | None:
    """Model, kind and name of a path of saved weights; None if it is no such path."""
    found = SAVED.fullmatch(path)
    return (found[1], found[2], found[3]) if found else None


def require_kind(name: str, theirs: int, ours: int) -> None:
    """UserFault if one of these ranks is an adapter's and the other stands for all weights."""
    if (theirs == 0) != (ours == 0):
        kinds = ("all weights of a model", 'tinker.weights = "full"'), ("an adapter", 'tinker.weights = "adapters"')
        raise UserFault(f"{name}: holds {kinds[theirs > 0][0]}, and this service trains {kinds[ours > 0][0]}; load it "
                        f"in a service with {kinds[theirs > 0][1]}")
