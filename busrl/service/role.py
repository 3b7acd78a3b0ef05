"""The role tinker: the process that clients of the service talk to.

Talks to clients through `door`, to engines through the ring of model calls, to the tuner through the two logs. Knows
nothing of tensors.

- Launch gives it a socket that outlives it: a client that comes while it starts again waits, and is not refused.
- A request for samples that its predecessor left without an answer is begun again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from busrl.data.chat import LightTokenizer
from busrl.data.vocabulary import token_rows
from busrl.errors import SOCKET, UserError
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import Ring
from busrl.ring.calls import AsyncCaller
from busrl.roles.actor import Actor
from busrl.service.desk import Desk
from busrl.service.door import STRANGER, Door, Handler
from busrl.service.folders import ServiceFolders
from busrl.service.keys import Keys, key_of
from busrl.service.messages import AnswersLogged, RequestsLogged
from busrl.service.routes import BaseModel, Service
from busrl.service.runs import Checkpoints
from busrl.service.sampling import Samples
from busrl.system.files import replace
from busrl.system.listener import Listener, room

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

FOLLOW_S = 0.1  # between two looks at the answers without a message
CLIENTS_S = 1.0  # between two looks for clients that went silent, or came back
EXPIRE_S = 10.0  # between two looks for what is over


class Tinker(Actor):
    role = "tinker"
    singleton = True
    failed: BaseException | None = None

    def setup(self) -> None:
        self.where = ServiceFolders(self.paths.root)
        self.where.root.mkdir(exist_ok=True)
        shutil.rmtree(self.where.trash, ignore_errors=True)  # of a predecessor that died
        self.calls = Ring.attach(self.paths.calls_name, calls=True)
        self.calls.register(self.role, self.name)
        settings = self.topology.tinker
        self.keys = Keys(key_of(self.paths.root / "tinker.key"), settings)
        self.desk = Desk(self.where, self.topology.learner.wal == "sync", settings.keep_answers_s,
                         lambda: self.bus.send(RequestsLogged()))
        self.loop, self.answers_logged = asyncio.new_event_loop(), asyncio.Event()

    def subscriptions(self) -> list[str]:
        return [*super().subscriptions(), topic(AnswersLogged)]

    def handle(self, message: m.Message) -> None:
        if isinstance(message, AnswersLogged):
            self.answers_logged.set()

    def work(self) -> bool:
        return False

    def run_passes(self) -> None:
        self.loop.run_until_complete(self._serve())

    def teardown(self) -> None:
        self._show()  # what came since it was shown last
        self.desk.close()
        self.loop.close()
        self.calls.close()

    # -- the loop -----

    async def _serve(self) -> None:
        folder, settings = Path(self.topology.model.path), self.topology.tinker
        async with AsyncCaller(self.calls, self.bus.send) as caller:
            samples = Samples(
                self.desk, self.where, caller, LightTokenizer.of(folder), settings.context,
                self.topology.generation.max_new_tokens, self.topology.limits.work_s, self._fail)
            service = Service(
                self.desk, self.where, settings, base_of(folder, settings.base), lambda: self.paused)
            door = Door(service, samples, self.keys, partial(self.warn, self.role))
            for sampler, seq in self.desk.under_way:
                samples.begin(self.desk.registry.samplers[sampler], seq)
            async with self._listening(door), self._following():
                await self._passes(samples)
            await samples.close()

    async def _passes(self, samples: Samples) -> None:
        checkpoints, expire_at, silent_at = Checkpoints(self.desk, self.where), 0.0, 0.0
        silent_s, keep_s = self.topology.tinker.silent_s, self.topology.tinker.keep_answers_s
        while not self.stopping:
            self.look_around()
            if (now := time.monotonic()) >= silent_at:
                samples.follow_clients(silent_s, keep_s)
                silent_at = now + CLIENTS_S
            if now >= expire_at:
                self.desk.expire(now)
                await asyncio.to_thread(checkpoints.remove, checkpoints.over())
                expire_at = now + EXPIRE_S
            if self.failed is not None:
                raise self.failed
            if self.desk.census.due:
                self._show()
            await asyncio.sleep(self.tick_s)

    @contextlib.asynccontextmanager
    async def _following(self) -> AsyncIterator[None]:
        """Take over what the tuner answers, as it comes, while it lasts."""
        self.loop.add_reader(self.bus.fileno(), self._receive_all)
        follow = asyncio.ensure_future(self._follow_answers())
        yield
        follow.cancel()
        self.loop.remove_reader(self.bus.fileno())

    def _receive_all(self) -> None:
        for message in self.bus.drain():
            self.receive(message)

    async def _follow_answers(self) -> None:
        try:
            while True:
                self.answers_logged.clear()
                self.desk.follow()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.answers_logged.wait(), FOLLOW_S)
        except Exception as problem:
            self._fail(problem)

    def _show(self) -> None:
        self.desk.census.show(self.desk.registry, self.desk.under_way.aside)

    def _fail(self, problem: BaseException) -> None:
        self.failed = self.failed or problem

    @contextlib.asynccontextmanager
    async def _listening(self, door: Door) -> AsyncIterator[None]:
        """Serve, and tell where in RUN_DIR/tinker.json."""
        settings = self.topology.tinker
        bound = handed_socket() or own_socket(settings.host, settings.port)
        listener = Listener(bound, room(), partial(self.warn, self.role, kind="strangers"))
        # aiohttp would unpack bodies by itself, without a limit.
        runner = web.AppRunner(door.app(ends_strangers(listener)), access_log=None, auto_decompress=False,
                               shutdown_timeout=1.0)
        await runner.setup()
        await listener.open(runner.server)
        try:
            port, host = bound.getsockname()[1], f"[{settings.host}]" if ":" in settings.host else settings.host
            about = {"base_url": f"http://{host}:{port}", "port": port, "key": str(self.paths.root / "tinker.key"),
                     "pid": os.getpid()}
            replace(self.paths.root / "tinker.json", json.dumps(about).encode())
            yield
        finally:
            listener.close()
            await runner.cleanup()


def ends_strangers(listener: Listener) -> Middleware:
    """Tell the listener who has asked for something; the connection of a client without a key ends with its answer."""
    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        listener.heard(request.protocol)
        response = await handler(request)
        if response.status == STRANGER:
            response.force_close()
            listener.answered(request.protocol)
        return response

    return note


def handed_socket() -> socket.socket | None:
    """The socket that launch holds for all lives of this process; None where it gave none."""
    number = os.environ.pop(SOCKET, "")
    if not number:
        return None
    os.set_inheritable(int(number), False)
    return socket.socket(fileno=int(number))


def own_socket(host: str, port: int) -> socket.socket:
    """A socket of this process alone. UserError: it cannot be bound there."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as problem:
        raise UserError(f"tinker.host = {host!r}, tinker.port = {port}: cannot listen there: {problem}; take "
                        "another, or port = 0 for any") from None


def base_of(folder: Path, name: str) -> BaseModel:
    """The base model of a folder, as its config.json describes it. `name`: of it for clients; empty: the folder."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as problem:
        raise UserError(f"model.path = {folder}: no config.json that can be read: {problem}") from None
    vocabulary = token_rows(folder).rows or int(config["vocab_size"])
    return BaseModel(name or str(folder), str(config.get("model_type", "")), vocabulary,
                     bool(config.get("tie_word_embeddings")))
