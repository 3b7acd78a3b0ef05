"""Players of seats, one for each model: how texts become ids for it, and how its calls come to an engine and back.

Talks to the ring of model calls (`busrl.ring.calls`) and to the model folder. Knows nothing of samples, of the code of
episodes, of groups or advantages.

- A call is drawn as the sample's line says that it is claimed with; the calls of one that is not recorded, as the
  topology says.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.agents.episode import Call, Engine, EngineAnswer, Episode, Settings
from busrl.agents.parsers import MessageMaker, parser_of
from busrl.agents.renderer import Renderer, report
from busrl.agents.seats import Seat
from busrl.agents.sides import ClaimedSample
from busrl.data.chat import LightTokenizer, template_of
from busrl.data.episodes import EpisodeLimits
from busrl.data.routing import Routing, first_fault
from busrl.data.vocabulary import end_ids
from busrl.errors import AgentNotLoaded, BugError, CallUnanswered
from busrl.protocol import messages as m
from busrl.ring import Ring
from busrl.ring.calls import GIVES, ROUTES, AsyncCaller, CallAnswer, ModelCall, Send
from busrl.states import SampleClass
from busrl.topology import Topology
from busrl.topology.sizes import count

log = logging.getLogger("busrl")


class Player:
    """Plays the seats of one model, whose topology this is. `attach` gives the ring of its calls; `warn` takes lines
    for people. Open `calling` first."""

    caller: AsyncCaller

    def __init__(self, topology: Topology, attach: Callable[[], Ring], warn: Callable[[str], None]) -> None:
        self.topology = topology
        self.seats = [Seat(name, topology.tag, not topology.frozen) for name in topology.seats]
        self.folder, agents = Path(topology.model.path), topology.agents
        text = LightTokenizer.of(self.folder)
        if text is None:
            raise AgentNotLoaded(f"{self.folder}: no tokenizer.json that can be read; episodes need one, and the "
                                 "packages tokenizers and jinja2")
        self.renderer = Renderer(text, end_ids(self.folder), "template" if agents.history == "template" else "extend")
        source = template_of(self.folder, True) or ""
        if source:
            *kinds, last = report(self.renderer.probes)
            log.info("turns are continued as the chat template allows:\n%s", "\n".join([*kinds, last]))
            if any(probe.how == "fresh" for probe in self.renderer.probes):
                warn(last)
        self.maker = MessageMaker(parser_of(agents.tools, source, topology.base_dir), agents.reasoning)
        self.limits = EpisodeLimits.of(topology)
        self.calls = attach()
        self.follow(topology)

    def follow(self, topology: Topology) -> None:
        """Go on with this topology, changed in flight."""
        self.topology, self._keeps_prefixes = topology, topology.keeps_prefixes
        self._pool = bool(topology.follows) and count(topology, "rollout") > 1  # engines of different weights

    def calling(self, send: Send) -> AsyncCaller:
        """A context in which calls can be made; `send` sends messages to engines."""
        self.caller = AsyncCaller(self.calls, partial(self._send, send))
        return self.caller

    def _send(self, send: Send, message: m.Message, address: str) -> None:
        """Send a message about a call with the name of the model, which is in the ring of that model."""
        tag = self.topology.beside
        send(msgspec.structs.replace(message, model=tag) if tag else message, address)

    def line_of(self, sample: ClaimedSample, seat: Seat) -> dict[str, Any]:
        """The line by which calls of a seat are drawn that this sample does not record: a round of validation asks all
        trained models alike."""
        if sample.validates and seat.trained:
            return sample.line
        generation = self.topology.generation
        return {**sample.line, "max_new_tokens": generation.max_new_tokens, "temperature": generation.temperature,
                "top_p": generation.top_p}

    def episode(self, number: int, engine: Engine, settings: Settings, **of_seats: Any) -> Episode:
        """The calls of an episode, or of a seat of it (`seat`, `own`, `others`), that `engine` answers."""
        return Episode(number, engine, self.renderer, self.maker, settings, **of_seats)

    def settings(self, line: dict[str, Any], limits: EpisodeLimits | None = None, salt: int = 0) -> Settings:
        """Bounds for the calls of a sample with this line."""
        parallel = self.topology.agents.parallel
        return Settings(int(line["max_new_tokens"]), limits or self.limits, parallel, temperature=line["temperature"],
                        top_p=line["top_p"], salt=salt, stays=self._pool)

    async def ask(self, line: dict[str, Any], call: Call, counted: ClaimedSample | None) -> EngineAnswer:
        """Answer a call of a sample with this line; ids that it read are counted for the sample that records it."""
        routing = self.topology.derived.routing if line["cls"] == SampleClass.TRAIN else None
        model_call = ModelCall(
            call.prompt, call.max_new_tokens, uid=call.uid, stream=call.stream, temperature=line["temperature"],
            top_p=line["top_p"], priority=line["priority"], admission=line["admission"], cls=line["cls"],
            engine=max(0, call.near) if self._keeps_prefixes or self._pool else 0,
            affinity_s=self.topology.limits.progress_s if self._pool else self.topology.agents.affinity_ms / 1e3,
            extra={GIVES: [*ROUTES], "routes_from": call.routes_from} if routing else {},
        )
        answer = await self._answered(model_call, call)
        if counted is not None:
            counted.read, counted.computed = counted.read + len(call.prompt), counted.computed + answer.computed
        waited_ms, generated_ms = int(1e3 * answer.waited_s), int(1e3 * answer.generated_s)
        return EngineAnswer(answer.ids, answer.logprobs, answer.versions, answer.finish, answer.engine, waited_ms,
                            generated_ms, answer.step, _routes(call, answer, routing) if routing else None)

    async def _answered(self, model_call: ModelCall, call: Call) -> CallAnswer:
        limit_s = self.topology.limits.work_s
        if call.on_ids is None:
            return await self.caller.ask(model_call, limit_s)
        async for news in self.caller.stream(model_call, limit_s):
            if isinstance(news, CallAnswer):
                return news
            call.on_ids(news)
        raise BugError("a stream of ids ended without the answer")


def _routes(call: Call, answer: CallAnswer, routing: Routing) -> npt.NDArray[Any]:
    """The routes that came with an answer, those of the prompt first; CallUnanswered if they are not sound."""
    sizes = (len(answer.ids), len(call.prompt) - 1 - call.routes_from)
    parts = [answer.extra[name] for name in ROUTES]
    for name, part, rows in zip(ROUTES, parts, sizes, strict=True):
        if fault := first_fault(part, rows, routing):
            raise CallUnanswered("malformed", f"{name} of the answer: {fault}")
    return np.concatenate(parts[::-1])


class Players:
    """The players of all models of a run, the lead's first; `seats`: who plays which. `attach` gives the ring of calls
    of a topology."""

    def __init__(self, run: Topology, attach: Callable[[Topology], Ring], warn: Callable[[str], None]) -> None:
        self._all = [Player(topology, partial(attach, topology), warn) for topology in _models_of(run)]
        self.lead = self._all[0]
        self.seats = {seat: player for player in self._all for seat in player.seats}

    def __iter__(self) -> Iterator[Player]:
        return iter(self._all)

    def follow(self, run: Topology) -> None:
        """Go on with the topologies of this run, changed in flight."""
        for player, topology in zip(self._all, _models_of(run)):
            player.follow(topology)

    def tokens(self, message: m.CallTokens) -> None:
        """Take over tokens of an answer under way; call it in the loop."""
        for player in self._all:
            if player.topology.beside == m.model_of(message):
                player.caller.tokens(message)

    @contextlib.asynccontextmanager
    async def calling(self, send: Send) -> AsyncIterator[None]:
        """A context in which calls can be made; `send` sends messages to engines."""
        async with contextlib.AsyncExitStack() as stack:
            for player in self._all:
                await stack.enter_async_context(player.calling(send))
            yield

    def close(self) -> None:
        for player in self._all:
            player.calls.close()


def _models_of(run: Topology) -> list[Topology]:
    """Topologies of all models, the lead's first."""
    return [run, *(run.of(tag) for tag in run.tags if tag not in ("", run.lead))]
