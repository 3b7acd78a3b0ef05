"""An agent: plays the user's function, or a program of the user's, for each sample that it claims.

Talks to its children (`busrl.agents`), which run the user's code, and opens a door over HTTP for their clients
(`busrl.agents.http`). All else is in `busrl.agents.roles.holder`. Knows nothing of engines, groups or advantages.

- User code runs in children alone: this process holds slots, trees and calls, and its loop cannot be blocked by it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from busrl.agents.child import EpisodeSetup
from busrl.agents.episode import Episode
from busrl.agents.pool import Children, Programs
from busrl.agents.roles.holder import Claim, EpisodeHolder
from busrl.errors import CallUnanswered
from busrl.topology.schema import AGENT

if TYPE_CHECKING:
    from busrl.agents.http import Door


class Agent(EpisodeHolder):
    role = AGENT
    door: Door | None = None

    def setup(self) -> None:
        super().setup()
        entries = [one for one in self.topology.processes() if one.role == AGENT]
        spec = next((one.spec for one in entries if one.name == self.name), entries[0].spec)
        own = self.topology.agents
        self.standing: set[int] = set()  # pids of children whose loop user code blocks
        self.children: Children | Programs
        if spec.program:
            self.children = Programs(spec.program, self.topology.base_dir, self.paths.root, own.episode_s)
            return
        played = EpisodeSetup(spec.function, self.topology.base_dir, spec.environment, spec.options, python=spec.python)
        self.children = Children(played, own.children, own.episode_s)
        with self.activity("load the function of episodes", self.topology.limits.ready_s):
            self.loop.run_until_complete(self.children.start())

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        if isinstance(self.children, Children) and importlib.util.find_spec("aiohttp") is None:
            yield  # functions do without it, but for `llm.openai`
            return
        from busrl.agents.http import Door  # only here: aiohttp is optional

        sampling = self.topology.agents.sampling
        async with Door(self.limits.context, self.renderer, sampling, tell=self.strangers) as self.door:
            yield

    def work(self) -> bool:
        if isinstance(self.children, Children):
            self._watch_children(self.children)
        taken = self.take(self.room)
        for claim in taken:
            self.start(self._play(claim))
        return super().work() or bool(taken)

    def teardown(self) -> None:
        self.loop.run_until_complete(self.children.close())
        super().teardown()

    def _watch_children(self, children: Children) -> None:
        """Say once which code keeps the episodes of a child from being played."""
        troubles = {child.pid: trouble for child in children.all if (trouble := child.trouble())}
        for pid in troubles.keys() - self.standing:
            text = f"agent child {pid}: {troubles[pid]}; no other episode in it goes on meanwhile"
            self.warn(self.role, text, kind="a child stands still")
        self.standing = {*troubles}
        where = next((child.where for child in children.all if child.pid in troubles), "")
        self.shown.usually(f"code stands at {where.rpartition('/')[2]}" if troubles else "")

    async def _play(self, claim: Claim) -> None:
        task = self.task_of(claim)
        if task is None:
            return
        try:
            played = await self.children.play(lambda: self._attempt(claim), task)
        except CallUnanswered as problem:
            self.gone_wrong(claim, problem)
            return
        self.settle(claim, played.ended, played.episode)

    def _attempt(self, claim: Claim) -> Episode:
        episode = self.begin(claim)
        if self.door is not None:
            self.door.open(episode, claim.line["temperature"], claim.line["top_p"])
        return episode
