"""Guessing a number on a server of openenv itself, by the Python of `make openenv-env`; prints its port.

What `Guessing` of test_adapters.py stands for. At most so many sessions at a time as its argument says."""

from __future__ import annotations

import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Said(Observation):
    said: str = ""
    tries: int = 0


class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Said:
        self._secret, self._tries = (seed or 0) % 10, 0
        return Said(said="guess", done=False)

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Said:
        self._tries += 1
        right = action.guess == self._secret
        said = "right" if right else "higher" if action.guess < self._secret else "lower"
        return Said(said=said, tries=self._tries, done=right, reward=1.0 if right else -0.25)

    @property
    def state(self) -> State:
        return State(step_count=self._tries)


app = create_app(Number, Guess, Said, env_name="number", max_concurrent_envs=int(sys.argv[1]))
with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
