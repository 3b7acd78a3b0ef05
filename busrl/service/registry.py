"""Things that clients have made so far, as the request log tells: sessions, models, samplers, numbered requests.

Door and tuner each build it from the log, and follow it. Knows nothing of HTTP, of answers or of tensors.

- Everything here follows from the log alone, in its order: two processes that read it have the same.
- A model's numbers begin at 1; at 0 where its first request loads it from saved weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from busrl.service.bodies import SAVED
from busrl.service.requests import Place, Request


class AdapterOf(msgspec.Struct, frozen=True):
    """The adapter of a model: its rank, the seed of its first weights, and the parts of the base that it changes."""

    rank: int
    seed: int
    attn: bool
    mlp: bool
    unembed: bool


class Numbered(NamedTuple):
    """A numbered request of a model or sampler, whose record stands at `place`."""

    kind: str
    op: str
    digest: bytes
    place: Place


@dataclass
class Model:
    id: str
    session: str
    adapter: AdapterOf
    first: int  # the number of its first request
    requests: dict[int, Numbered] = field(default_factory=dict)


@dataclass
class Sampler:
    """Draws with the base, or with what the request `seq` of `model` saved. `path` is what it was made from."""

    id: str
    model: str = ""
    seq: int = 0
    path: str = ""
    clones: int = 0
    requests: dict[int, Numbered] = field(default_factory=dict)


@dataclass
class Session:
    id: str
    ended: str = ""


class Registry:
    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.by_key: dict[str, str] = {}  # session by the key of the call that made it
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self._decode = msgspec.json.Decoder().decode

    def add(self, request: Request, place: Place) -> None:
        """Take over the next record of the log."""
        getattr(self, f"_add_{request.kind}")(request, place)

    # -- kinds of records -----

    def _add_session(self, request: Request, place: Place) -> None:
        self.sessions[request.id] = Session(request.id)
        self.by_key[request.about["key"]] = request.id

    def _add_finish(self, request: Request, place: Place) -> None:
        self.sessions[request.id].ended = request.about["reason"]

    def _add_model(self, request: Request, place: Place) -> None:
        about = request.about
        adapter = msgspec.convert(about["adapter"], AdapterOf)
        self.models[request.id] = Model(request.id, about["session"], adapter, about["first"])

    def _add_sampler(self, request: Request, place: Place) -> None:
        self.samplers[request.id] = Sampler(request.id, **request.about)

    def _add_join(self, request: Request, place: Place) -> None:
        self.samplers[request.id].clones = request.seq

    def _add_training(self, request: Request, place: Place) -> None:
        model = self.models[request.id]
        model.requests[request.seq] = Numbered(request.kind, request.op, request.digest, place)
        if request.op == "save_weights_for_sampler":
            body: dict[str, Any] = self._decode(request.body)
            if not body.get("path"):
                sampler = f"{model.session}:sample:{body['sampling_session_seq_id']}"
                path = f"tinker://{model.id}/sampler_weights/ephemeral-{request.seq}"
                self.samplers.setdefault(sampler, Sampler(sampler, model.id, request.seq, path))

    def _add_refused(self, request: Request, place: Place) -> None:
        self.models[request.id].requests[request.seq] = Numbered(request.kind, request.op, request.digest, place)

    def _add_sample(self, request: Request, place: Place) -> None:
        self.samplers[request.id].requests[request.seq] = Numbered(request.kind, "asample", request.digest, place)


def saved(path: str) -> tuple[str, str, str] | None:
    """Model, kind and name of a path of saved weights; None if it is no such path."""
    found = SAVED.fullmatch(path)
    return (found[1], found[2], found[3]) if found else None
