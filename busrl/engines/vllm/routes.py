"""Routes of the requests of a vLLM engine: asked for with a request, and joined to its tokens when it has ended.

Used by the vLLM engine where a run carries routes. On a CPU they are noted in the worker (`capture`) and called for, on
an accelerator vLLM gives them itself. Knows nothing of slots, the bus or what a learner does with routes.

- No request ends before its routes are here, or are known to be lost.
- An aborted request whose routes are lost keeps no token, so it is drawn again. Any other ends without routes, with a
  warning: whoever asked refuses it.
- A vLLM that gives no sound routes for its first token is refused at the start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from busrl.data.routing import Routing, first_fault
from busrl.engines.base import Routes as Rows
from busrl.engines.vllm.capture import MARK
from busrl.engines.vllm_versions import FIRST_ROUTE
from busrl.errors import UserError
from busrl.states import Finish

if TYPE_CHECKING:
    from busrl.engines.vllm.engine import Running
    from busrl.engines.vllm.process import Core

log = logging.getLogger("busrl")


class Routes:
    """The routes of one life of vLLM, from its start on. `native`: vLLM gives them itself; `skips`: without those that
    the caller of a request has."""

    def __init__(self, core: Core, routing: Routing, *, native: bool, skips: bool) -> None:
        self._core, self._routing, self._native, self._skips = core, routing, native, native and skips
        self._waiting: list[Running] = []  # ended, without their routes
        self._calling = asyncio.Lock()
        self._count = 0
        if not native:
            said = core.rpc("busrl_note_routes", list(routing.layers), routing.top_k, str(routing.dtype))
            if why := next(filter(None, said), ""):
                raise self._refused(why)

    def begin(self, running: Running) -> None:
        """Give a request the name by which its routes are noted. vLLM takes a name twice, and an aborted request that
        goes on has that of its beginning."""
        self._count += 1
        running.name = f"{MARK}{self._count}.{running.id}"

    def settings(self, running: Running) -> dict[str, int]:
        """Settings of sampling by which vLLM itself leaves out the rows that the caller has."""
        return {FIRST_ROUTE: running.request.routes_from} if self._skips else {}

    async def join(self, ended: list[Running], end: Callable[[list[Running]], None]) -> None:
        """Join routes to the tokens of requests that have ended, then `end` them. Those that another call is fetching
        have ended too when this returns."""
        self._waiting += ended
        async with self._calling:
            waiting = list({running.id: running for running in self._waiting if not running.over}.values())
            self._waiting = []
            given = [running.routed for running in waiting] if self._native else await self._noted(waiting)
            for running, rows in zip(waiting, given):
                if running.token_ids:
                    self._add(running, rows)
            end(waiting)

    async def prove(self, running: Running) -> None:
        """UserError if the first answer of a vLLM comes without sound routes."""
        await self.join([running], lambda _: None)
        if running.prompt_routes is None:
            raise self._refused("its first answer came without any")
        rows = np.concatenate([running.prompt_routes, *running.routes])
        if why := first_fault(rows, len(running.known_ids) - 1, self._routing):
            raise self._refused(f"its first answer came with wrong ones: {why}")

    def _refused(self, why: str) -> UserError:
        text = f"vLLM {self._core.version} cannot say which experts it chose: {why}"
        return UserError(f'{text}; set learner.routes = "own", see docs/experts.md')

    async def _noted(self, ended: list[Running]) -> list[Rows | None]:
        """Rows of these requests, by one call of the workers: the first of them has noted all, and forgets them."""
        if not ended:
            return []
        wanted = [[one.id, one.request.routes_from, len(one.known_ids) - 1] for one in ended]
        texts = (await self._core.engine.collective_rpc("busrl_take_routes", args=(wanted,)))[0]
        return [np.frombuffer(text, self._routing.dtype).reshape(-1, *self._routing.shape) for text in texts]

    def _add(self, running: Running, rows: Rows | None) -> None:
        first = running.request.routes_from
        before = len(running.known_ids) - len(running.token_ids) - 1 - first  # rows of the prompt
        if rows is not None and self._native:
            rows = self._of_experts(rows[0 if self._skips else first :])
        if rows is not None and len(rows) == before + len(running.token_ids):
            running.prompt_routes, running.routes = rows[:before], [rows[before:]]
        elif running.finish == Finish.ABORTED:
            running.forget()
        else:
            log.warning("vLLM gave no routes for request %s, which ended with %d tokens", running.id,
                        len(running.token_ids))

    def _of_experts(self, rows: Rows) -> Rows | None:
        """vLLM's own array without the layers that have no experts; None if it is none of this model. An id that the
        number type of routes does not hold would become another expert's."""
        layers = list(self._routing.layers)
        if rows.ndim != 3 or rows.shape[1] <= layers[-1] or rows.shape[2] != self._routing.top_k:
            return None
        chosen, most = rows[:, layers], np.iinfo(self._routing.dtype).max
        if chosen.dtype != self._routing.dtype and (wrong := chosen[(chosen < 0) | (chosen > most)]).size:
            log.warning("vLLM named expert %d, and the model has %d", wrong[0], self._routing.experts)
            return None
        return np.ascontiguousarray(chosen, self._routing.dtype)
