"""The role tinker: the process that clients of the service talk to.

Talks to clients through `door`, to engines through the ring of model calls, to the tuner through the two logs. Knows
nothing of tensors.

- Its port stays the same over all its lives, so a client finds the next one.
- A request for samples that its predecessor left without an answer is begun again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from aiohttp import web

from busrl.data.chat import LightTokenizer
from busrl.data.vocabulary import token_rows
from busrl.errors import UserError
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import Ring
from busrl.ring.calls import AsyncCaller
from busrl.roles.actor import Actor
from busrl.service.desk import Desk
from busrl.service.door import BaseModel, Door, Service
from busrl.service.folders import ServiceFolders
from busrl.service.sampling import Samples
from busrl.system.files import replace

FOLLOW_S = 0.005  # between two looks at the answers


class Tinker(Actor):
    role = "tinker"
    singleton = True
    failed: BaseException | None = None

    def setup(self) -> None:
        self.where = ServiceFolders(self.paths.root)
        self.where.root.mkdir(exist_ok=True)
        self.calls = Ring.attach(self.paths.calls_name, calls=True)
        self.calls.register(self.role, self.name)
        self.desk = Desk(self.where, self.topology.learner.wal == "sync")
        self.key = key_of(self.paths.root / "tinker.key")
        self.loop = asyncio.new_event_loop()

    def subscriptions(self) -> list[str]:
        return [*super().subscriptions(), topic(m.CallTokens, self.worker_id)]

    def work(self) -> bool:
        return False

    def run_passes(self) -> None:
        self.loop.run_until_complete(self._serve())

    def teardown(self) -> None:
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
            door = Door(service, samples, self.key, partial(self.warn, self.role))
            for sampler, seq in list(self.desk.open_samples()):
                samples.begin(self.desk.registry.samplers[sampler], seq)
            async with self._listening(door):
                follow = asyncio.ensure_future(self._follow_answers())
                await self._passes()
                follow.cancel()
            await samples.close()

    async def _passes(self) -> None:
        while not self.stopping:
            self.look_around()
            if self.failed is not None:
                raise self.failed
            if self.desk.census.due:
                self.desk.census.show(self.desk.registry)
            await asyncio.sleep(self.tick_s)

    async def _follow_answers(self) -> None:
        """Take over what the tuner answers, as it comes."""
        try:
            while True:
                self.desk.follow()
                await asyncio.sleep(FOLLOW_S)
        except Exception as problem:
            self._fail(problem)

    def _fail(self, problem: BaseException) -> None:
        self.failed = self.failed or problem

    @contextlib.asynccontextmanager
    async def _listening(self, door: Door) -> AsyncIterator[None]:
        """Serve, at the port of the topology or any, and tell where in RUN_DIR/tinker.json while it lasts."""
        host, told = self.topology.tinker.host, self.paths.root / "tinker.json"
        # aiohttp would unpack bodies by itself, without a limit.
        runner = web.AppRunner(door.app(), access_log=None, auto_decompress=False, shutdown_timeout=1.0)
        await runner.setup()
        port = self.topology.tinker.port or port_before(told)
        try:
            site = web.TCPSite(runner, host, port, reuse_address=True)
            try:
                await site.start()
            except OSError as problem:
                raise UserError(f"tinker.host = {host!r}, tinker.port = {port}: cannot listen there: {problem}; take "
                                "another, or port = 0 for any") from None
            port = runner.addresses[0][1]
            about = {"base_url": f"http://{host}:{port}", "port": port, "key": str(self.paths.root / "tinker.key"),
                     "pid": os.getpid()}
            replace(told, json.dumps(about).encode())
            yield
        finally:
            await runner.cleanup()


def key_of(path: Path) -> str:
    """The key of the run, which its first process that needs it writes, readable by its owner alone."""
    with contextlib.suppress(FileExistsError):
        file_no = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file_no, "w") as file:
            file.write(f"tml-{secrets.token_hex(16)}")
    return path.read_text().strip()


def port_before(told: Path) -> int:
    """The port of this process's last life; 0 if there was none."""
    try:
        return int(json.loads(told.read_bytes())["port"])
    except (FileNotFoundError, ValueError, KeyError):
        return 0


def base_of(folder: Path, name: str) -> BaseModel:
    """The base model of a folder, as its config.json describes it. `name`: of it for clients; empty: the folder."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as problem:
        raise UserError(f"model.path = {folder}: no config.json that can be read: {problem}") from None
    vocabulary = token_rows(folder).rows or int(config["vocab_size"])
    return BaseModel(name or str(folder), str(config.get("model_type", "")), vocabulary,
                     bool(config.get("tie_word_embeddings")))
