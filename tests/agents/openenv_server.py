"""Guessing a number on a server of openenv itself, by the Python of `make openenv-env`; prints its port.

    python openenv_server.py SESSIONS [TRIES WORDS]

What `Guessing` of test_adapters.py stands for. SESSIONS at a time, TRIES in each; WORDS: what it says first, and of a
guess that is too low, too high, or right."""

from __future__ import annotations

import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

SESSIONS, TRIES, WORDS = sys.argv[1:] if sys.argv[2:] else [sys.argv[1], "100", "guess higher lower right"]
FIRST, HIGHER, LOWER, RIGHT = WORDS.split()


class Guess(Action):
    guess: int


class Said(Observation):
    said: str = ""
    tries: int = 0


class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Said:
        self._secret, self._tries = (seed or 0) % 10, 0
        return Said(said=FIRST, done=False)

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Said:
        self._tries += 1
        right = action.guess == self._secret
        hint = RIGHT if right else HIGHER if action.guess < self._secret else LOWER
        over = right or self._tries == int(TRIES)
        return Said(said=hint, tries=self._tries, done=over, reward=1.0 if right else -0.25)

    @property
    def state(self) -> State:
        return State(step_count=self._tries)


app = create_app(Number, Guess, Said, env_name="number", max_concurrent_envs=int(SESSIONS))
with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
