"""The routes of a service that list what a key has: sessions, training runs (models), checkpoints (saved weights).

Talks to clients over HTTP, to the `Desk` for what was logged, to the folders of saved weights. Knows nothing of
tensors.

- A checkpoint that is deleted, or whose time is over, is gone for clients at once; its folder goes by and by.
- A deletion is logged before it is answered: a request that is run again brings nothing back for long.
- A file is downloaded without a key, by an address that is signed and is good for `URL_S`: clients hand it on to tools.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import shutil
import tarfile
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from busrl.service import bodies, folders
from busrl.service.desk import Desk
from busrl.service.folders import META, ServiceFolders
from busrl.service.registry import Model, Save
from busrl.service.requests import Request
from busrl.service.routes import NO_SUCH, Refusal, Service
from busrl.service.sealing import SUFFIX, seal

TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
RUN, CHECKPOINT = "/api/v1/training_runs/{run}", "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
FILES = "/api/v1/files/"
ARCHIVE = "archive.tar"
URL_S, MOST_LISTED, CHUNK_BYTES = 900.0, 1000, 1 << 20
Item = TypeVar("Item")


class Checkpoint(NamedTuple):
    """Saved weights that are there: the request `seq` of `model` saved them in `folder`, and described them so."""

    model: Model
    seq: int
    save: Save
    folder: Path
    described: dict[str, Any]

    def files(self, where: ServiceFolders) -> list[Path]:
        """The files that a client may want: of what was saved for a sampler, those of its snapshot."""
        number = self.described["weights"]
        folder = where.snapshot(number) if number else self.folder
        return sorted(path for path in folder.iterdir() if path.is_file() and path.name != META)

    def told(self, where: ServiceFolders) -> dict[str, Any]:
        """The checkpoint as clients see it."""
        return {
            "checkpoint_id": self.save.name, "checkpoint_type": TYPES[self.save.kind], "time": iso(self.save.at),
            "tinker_path": f"tinker://{self.model.id}/{self.save.name}", "public": False,
            "size_bytes": sum(path.stat().st_size for path in self.files(where)), "user_metadata": self.save.metadata,
            "expires_at": iso(self.save.expires) if self.save.expires else None,
        }


class Checkpoints:
    """The saved weights of models."""

    def __init__(self, desk: Desk, where: ServiceFolders) -> None:
        self._desk, self._where = desk, where

    def of(self, model: Model) -> list[Checkpoint]:
        """List those of a model that a client may see, newest first."""
        now, present = time.time(), list[Checkpoint]()
        for seq, save in model.saves.items():
            if not save.is_over(now) and (there := self._there(model, seq, save)) is not None:
                present.append(there)
        return sorted(present, key=lambda checkpoint: checkpoint.save.at, reverse=True)

    def _there(self, model: Model, seq: int, save: Save) -> Checkpoint | None:
        """The folder of a save; None if there is none, or it is of another save under that name."""
        folder = self._where.saved_as(model.id, save.kind, save.name.partition("/")[2])
        described = folders.about(folder)
        if described is None or described["by"] != f"{model.id}:{seq}":
            return None
        return Checkpoint(model, seq, save, folder, described)

    def over(self) -> list[Checkpoint]:
        """List those that are deleted or whose time is over, and whose folder is there."""
        now = time.time()
        listed = ((model, seq, save) for model in self._desk.registry.models.values()
                  for seq, save in model.saves.items() if save.is_over(now))
        return [there for place in listed if (there := self._there(*place)) is not None]

    def remove(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Remove folders; one that another save has taken meanwhile stays."""
        for checkpoint in checkpoints:
            doomed = self._where.trash / uuid.uuid4().hex
            doomed.parent.mkdir(exist_ok=True)
            try:
                os.rename(checkpoint.folder, doomed)
            except FileNotFoundError:
                continue
            if folders.about(doomed) != checkpoint.described:
                os.rename(doomed, checkpoint.folder)
                continue
            shutil.rmtree(doomed, ignore_errors=True)
            if checkpoint.described["weights"]:
                shutil.rmtree(self._where.snapshot(checkpoint.described["weights"]), ignore_errors=True)


class ListRoutes:
    """Routes that list sessions, training runs and checkpoints."""

    def __init__(self, at: Service) -> None:
        self._at, self._checkpoints = at, Checkpoints(at.desk, at.where)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/v1/sessions", self._sessions), web.get("/api/v1/sessions/{id}", self._session),
            web.get("/api/v1/training_runs", self._runs), web.get(RUN, self._run),
            web.get(f"{RUN}/checkpoints", self._checkpoints_of_run), web.get("/api/v1/checkpoints", self._all),
        ]

    async def _sessions(self, request: web.Request) -> web.Response:
        sessions, _ = page(request, self._at.things().sessions()[::-1])
        return web.json_response({"sessions": [session.id for session in sessions]})

    async def _session(self, request: web.Request) -> web.Response:
        things = self._at.things()
        session = things.session(request.match_info["id"])
        return web.json_response({
            "training_run_ids": [model.id for model in things.models() if model.session == session.id],
            "sampler_ids": [id for id in self._at.registry.samplers if id.partition(":")[0] == session.id],
            "user_metadata": session.metadata, "display_name": session.name or None,
        })

    async def _runs(self, request: web.Request) -> web.Response:
        models = sorted(self._at.things().models(), key=lambda model: model.newest_at, reverse=True)
        if request.query.get("project_id"):
            models = []  # there are no projects here
        listed, cursor = page(request, models)
        return web.json_response({"training_runs": [self._told(model) for model in listed], "cursor": cursor})

    async def _run(self, request: web.Request) -> web.Response:
        return web.json_response(self._told(self._at.things().model(request.match_info["run"])))

    def _told(self, model: Model) -> dict[str, Any]:
        newest: dict[str, dict[str, Any]] = {}
        for checkpoint in self._checkpoints.of(model):
            newest.setdefault(checkpoint.save.kind, checkpoint.told(self._at.where))
        return {
            "training_run_id": model.id, "base_model": self._at.base.name, "model_owner": model.owner,
            **model.adapter.told, "corrupted": False, "last_request_time": iso(model.newest_at),
            "last_checkpoint": newest.get("weights"), "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": model.metadata,
        }

    async def _checkpoints_of_run(self, request: web.Request) -> web.Response:
        present = self._checkpoints.of(self._at.things().model(request.match_info["run"]))
        return web.json_response({"checkpoints": [checkpoint.told(self._at.where) for checkpoint in present]})

    async def _all(self, request: web.Request) -> web.Response:
        present = [it for model in self._at.things().models() for it in self._checkpoints.of(model)]
        present.sort(key=lambda checkpoint: checkpoint.save.at, reverse=True)
        listed, cursor = page(request, present)
        told = [checkpoint.told(self._at.where) for checkpoint in listed]
        return web.json_response({"checkpoints": told, "cursor": cursor})


class CheckpointRoutes:
    """Routes of one checkpoint: its end, and its files. `secret` signs addresses."""

    def __init__(self, at: Service, secret: bytes) -> None:
        self._at, self._secret, self._checkpoints = at, secret, Checkpoints(at.desk, at.where)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.delete(CHECKPOINT, self._delete), web.put(f"{CHECKPOINT}/ttl", self._set_ttl),
            web.post(f"{CHECKPOINT}/publish", self._publish), web.delete(f"{CHECKPOINT}/publish", self._publish),
            web.get(f"{CHECKPOINT}/external_weights_urls", self._urls), web.get(f"{CHECKPOINT}/archive", self._archive),
            web.get(f"{FILES}{{run}}/{{kind}}/{{name}}/{{file}}", self._file),
        ]

    async def _delete(self, request: web.Request) -> web.Response:
        model, name = self._named(request)
        newest = max((seq for seq, save in model.saves.items() if save.name == name), default=None)
        if newest is not None and model.saves[newest].deleted:  # the request came again
            return web.Response(status=204)
        checkpoint = self._checkpoint(model, name)
        self._at.desk.log(Request("delete", model.id, checkpoint.seq))
        await self._at.desk.durable()
        await asyncio.to_thread(self._checkpoints.remove, [checkpoint])
        return web.Response(status=204)

    async def _set_ttl(self, request: web.Request) -> web.Response:
        model, name = self._named(request)
        body, checkpoint = await self._at.body(request, bodies.SetTtl), self._checkpoint(model, name)
        expires = time.time() + body.ttl_seconds if body.ttl_seconds is not None else 0.0
        self._at.desk.log(Request("ttl", model.id, checkpoint.seq, about={"expires": expires}))
        await self._at.desk.durable()
        return web.Response(status=204)

    async def _publish(self, request: web.Request) -> web.Response:
        raise Refusal(400, "checkpoints are never public here; hand the folder on that `busrl export` makes")

    # -- files -----

    async def _urls(self, request: web.Request) -> web.Response:
        checkpoint = self._checkpoint(*self._named(request))
        expires = time.time() + URL_S
        ending = SUFFIX if checkpoint.save.recipients else ""
        names = [path.name + ending for path in checkpoint.files(self._at.where)]
        urls = {name: self._signed(request, checkpoint, name, expires) for name in names}
        return web.json_response({"urls": urls, "expires": iso(expires)})

    async def _archive(self, request: web.Request) -> web.Response:
        """Send the client on to the archive: older versions of the SDK want a status 302 with the address."""
        checkpoint = self._checkpoint(*self._named(request))
        if checkpoint.save.kind != "sampler_weights":
            raise Refusal(400, f"{checkpoint.save.name}: archives are of sampler_weights, which "
                          "save_weights_for_sampler makes; external_weights have an address for each file")
        expires = time.time() + URL_S
        headers = {"Location": self._signed(request, checkpoint, ARCHIVE, expires),
                   "Expires": format_datetime(datetime.fromtimestamp(expires, timezone.utc), usegmt=True)}
        return web.Response(status=302, headers=headers)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """A file of a checkpoint, or all of them as a tar, by a signed address."""
        expires, file = request.query.get("expires", ""), request.match_info["file"]
        signature = self._signature(request.match_info["run"], self._name(request), file, expires)
        signed = hmac.compare_digest(signature.encode(), request.query.get("signature", "").encode())
        if not signed or float(expires) < time.time():
            raise Refusal(401, "the address of this file is not signed, or too old; ask for another one")
        checkpoint = self._checkpoint(self._at.registry.models[request.match_info["run"]], self._name(request))
        files, recipients = checkpoint.files(self._at.where), checkpoint.save.recipients
        if file == ARCHIVE:
            return await sent_as_tar(request, files)
        for path in files:
            if path.name == file and not recipients:
                return web.FileResponse(path)
            if path.name + SUFFIX == file and recipients:
                return await self._sent_sealed(request, path, recipients)
        raise Refusal(404, f"{file} {NO_SUCH}")

    async def _sent_sealed(self, request: web.Request, path: Path, recipients: Sequence[str]) -> web.StreamResponse:
        sealed = self._at.where.trash / uuid.uuid4().hex
        sealed.parent.mkdir(exist_ok=True)
        try:
            await asyncio.to_thread(seal, path, recipients, sealed)
            response = web.FileResponse(sealed)
            await response.prepare(request)
            return response
        finally:
            sealed.unlink(missing_ok=True)

    def _signed(self, request: web.Request, checkpoint: Checkpoint, file: str, expires: float) -> str:
        run, name, until = checkpoint.model.id, checkpoint.save.name, f"{expires:.0f}"
        query = {"expires": until, "signature": self._signature(run, name, file, until)}
        return str(request.url.origin().with_path(f"{FILES}{run}/{name}/{file}").with_query(query))

    def _signature(self, run: str, name: str, file: str, expires: str) -> str:
        return hmac.new(self._secret, f"{run}/{name}/{file} {expires}".encode(), hashlib.sha256).hexdigest()

    # -- which checkpoint -----

    def _named(self, request: web.Request) -> tuple[Model, str]:
        return self._at.things().model(request.match_info["run"]), self._name(request)

    def _name(self, request: web.Request) -> str:
        return f"{request.match_info['kind']}/{request.match_info['name']}"

    def _checkpoint(self, model: Model, name: str) -> Checkpoint:
        for checkpoint in self._checkpoints.of(model):
            if checkpoint.save.name == name:
                return checkpoint
        raise Refusal(404, f"tinker://{model.id}/{name[:200]} {NO_SUCH}")


async def sent_as_tar(request: web.Request, files: Sequence[Path]) -> web.StreamResponse:
    """Answer with an uncompressed archive of files, a piece at a time."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-tar"})
    await response.prepare(request)
    pieces = tar_of(files)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        await response.write(piece)
    return response


def tar_of(files: Sequence[Path]) -> Iterator[bytes]:
    for path in files:
        entry = tarfile.TarInfo(path.name)
        entry.size = size = path.stat().st_size
        yield entry.tobuf()
        with open(path, "rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def page(request: web.Request, items: Sequence[Item]) -> tuple[Sequence[Item], dict[str, int]]:
    """The part of a list that `limit` and `offset` of a request name, and how it lies in the whole."""
    try:
        limit, offset = int(request.query.get("limit", 20)), int(request.query.get("offset", 0))
    except ValueError:
        limit = offset = -1
    if not 0 <= limit <= MOST_LISTED or offset < 0:
        raise Refusal(400, f"limit and offset: limit is 0 to {MOST_LISTED}, offset 0 or more; send numbers")
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()
