"""The role agent: plays the user's function, or a program of the user's, for each sample that it claims.

Talks to the children that run the user's code (`busrl.agents.pool`), and opens an HTTP server for their clients
(`busrl.agents.http`). Samples and calls are those of `busrl.agents.roles.holder`. Knows nothing of engines, groups or
advantages.

- User code runs in children alone, so it cannot block the loop of this process, which holds slots, trees and calls.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from busrl.agents.child import EpisodeSetup
from busrl.agents.episode import Episode
from busrl.agents.pool import Children, Programs
from busrl.agents.roles.holder import EpisodeHolder
from busrl.agents.sides import ClaimedSample
from busrl.errors import CallUnanswered
from busrl.topology.schema import AGENT

if TYPE_CHECKING:
    from busrl.agents.http import EpisodeServer


class Agent(EpisodeHolder):
    role = AGENT
    server: EpisodeServer | None = None

    def setup(self) -> None:
        super().setup()
        entries = [entry for entry in self.topology.processes() if entry.role == AGENT]
        spec = next((entry.spec for entry in entries if entry.name == self.name), entries[0].spec)
        agents = self.topology.agents
        self.standing: set[int] = set()  # pids of children whose loop user code blocks
        self.children: Children | Programs
        if spec.program:
            self.children = Programs(spec.program, self.topology.base_dir, self.paths.root, agents.episode_s)
            return
        episode_setup = EpisodeSetup(spec.function, self.topology.base_dir, spec.environment, spec.options,
                                     python=spec.python)
        self.children = Children(episode_setup, agents.children, agents.episode_s)
        with self.activity("load the function of episodes", self.topology.limits.ready_s):
            self.loop.run_until_complete(self.children.start())

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        if isinstance(self.children, Children) and importlib.util.find_spec("aiohttp") is None:
            yield  # functions need it for `llm.openai` alone
            return
        from busrl.agents.http import EpisodeServer  # only here: aiohttp is optional

        sampling, cards = self.topology.agents.sampling, self.cards
        async with EpisodeServer(self.limits.context, self.renderer, sampling, tell=self.strangers,
                                 cards=cards) as self.server:
            yield

    def work(self) -> bool:
        if isinstance(self.children, Children):
            self._watch_children(self.children)
        samples = self.samples.take(self.samples.room)
        for sample in samples:
            self.start(self._play(sample))
        return super().work() or bool(samples)

    def teardown(self) -> None:
        self.loop.run_until_complete(self.children.close())
        super().teardown()

    def _watch_children(self, children: Children) -> None:
        """Warn once of user code that blocks a child."""
        troubles = {child.pid: trouble for child in children.all if (trouble := child.trouble())}
        for pid in troubles.keys() - self.standing:
            text = f"agent child {pid}: {troubles[pid]}; no other episode in it goes on meanwhile"
            self.warn(self.role, text, kind="a child stands still")
        self.standing = {*troubles}
        where = next((child.where for child in children.all if child.pid in troubles), "")
        self.shown.usually(f"code stands at {where.rpartition('/')[2]}" if troubles else "")

    async def _play(self, sample: ClaimedSample) -> None:
        task = self.samples.task_of(sample)
        if task is None:
            return
        try:
            played = await self.children.play(lambda: self._attempt(sample), task)
        except CallUnanswered as problem:
            self.samples.begin_again(sample, problem)
            return
        self.samples.settle(sample, played.ended, played.episode)

    def _attempt(self, sample: ClaimedSample) -> Episode:
        episode = self.begin(sample)
        if self.server is not None:
            self.server.open(episode)
        return episode
