"""The process in which the code of episodes runs: `python -m busrl.agents.child PARENT_PID`.

Talks to its parent alone, in lines of JSON over `busrl.system.pipes` (`busrl.agents.pool` has the parent's side): it
reads an EpisodeSetup, then Begin, Answered and Cancel, and writes Ready, Beat, Asked and Over. Knows nothing of ids,
trees or slots.

- Episodes run concurrently on one loop; a function that does not await gets a thread for each episode.
- User code may block the loop, so a separate thread sends the beats, with how long and where the loop stands still.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from busrl.agents import adapters
from busrl.agents.llm import Ended, Llm, Request, Response, blocking, play, seated
from busrl.agents.seats import ONLY, Seat
from busrl.errors import AgentNotLoaded, cause
from busrl.system import imports, parent, pipes

BEAT_S = 0.5
LINE_BYTES = 1 << 31  # of a frame: far more than any needs
MOST_THREADS = 1 << 14  # more than there are episodes: one that waited for a thread would be taken for hung
STANDS_S = 2.0  # after this time without a step the loop stands still


class EpisodeSetup(msgspec.Struct, tag="setup"):
    """The function of episodes, or its class, by its import path; or an environment with its options. `trial`: begin an
    episode of the environment at once. `python`: the interpreter of the child, where it is another."""

    function: str
    base_dir: str
    environment: str = ""
    options: dict[str, Any] = {}
    trial: bool = False
    python: str = ""


class Begin(msgspec.Struct, tag="begin"):
    """Run an episode for a line of the data. `seats`, where they have names; `keys`: that of each for clients over
    HTTP, where there are several."""

    key: int
    task: msgspec.Raw
    uid: int = 0
    openai: dict[str, str] = {}
    seats: list[Seat] = []
    keys: dict[str, str] = {}

    def llm(self, ask: Callable[[str, Request], Awaitable[Response]]) -> Llm:
        """The model as the code of the episode sees it; `ask` gets the name of a seat, "" for the only one."""
        task = msgspec.json.decode(self.task)
        if not self.seats:
            return Llm(partial(ask, ""), task, uid=self.uid, openai=self.openai)
        openai = {seat.name: self.openai for seat in self.seats}
        openai |= {name: {**self.openai, "api_key": key} for name, key in self.keys.items()}
        return seated(ask, task, self.uid, self.seats, openai)


class Answered(msgspec.Struct, tag="answered"):
    call: int
    response: Response


class Cancel(msgspec.Struct, tag="cancel"):
    """Cancel an episode. A thread cannot be cancelled: its code runs on until its next request."""

    key: int


class Ready(msgspec.Struct, tag="ready"):
    """The function is loaded and set up; with `error` it is not."""

    error: str = ""


class Beat(msgspec.Struct, tag="beat"):
    """The process is alive. If the loop stands still: for how long (`stood_s`), and at which line (`where`)."""

    stood_s: float = 0.0
    where: str = ""


class Asked(msgspec.Struct, tag="asked"):
    """A request of an episode to the model in a seat; `call` is this process's number for it."""

    key: int
    call: int
    request: Request
    seat: str = ""


class Over(msgspec.Struct, tag="over"):
    key: int
    ended: Ended


ToChild = EpisodeSetup | Begin | Answered | Cancel
FromChild = Ready | Beat | Asked | Over
_frames: msgspec.json.Decoder[ToChild] = msgspec.json.Decoder(ToChild)


def main() -> int:
    parent.die_with(int(sys.argv[1]))
    requests, answers = pipes.private_pipes()
    return asyncio.run(Process(requests, answers).serve())


class Process:
    """The episodes of this process, which ends when the parent closes the pipe."""

    def __init__(self, requests: pipes.Requests, answers: int) -> None:
        self._requests, self._fd, self._lock = requests, answers, threading.Lock()
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._calls = 0
        self._stepped = time.monotonic()
        self._main = threading.get_ident()
        self._function: Callable[..., Any] = lambda task, llm: 0.0
        self._close: Callable[[], Any] | None = None
        self._threads = ThreadPoolExecutor(MOST_THREADS, "episode")
        self._package = ""  # of the user's module, where it has a name of its own

    async def serve(self) -> int:
        loop, frames = asyncio.get_running_loop(), asyncio.StreamReader(LINE_BYTES)
        pipe = os.fdopen(self._requests.fd, "rb", 0)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(frames), pipe)
        self._step(loop)
        threading.Thread(target=self._beat, daemon=True).start()
        if not (setup := await frames.readline()):
            return 0
        try:
            await self._load(msgspec.json.decode(setup, type=EpisodeSetup))
        except BaseException as problem:
            self._write(Ready(cause(problem)))
            return 1
        self._write(Ready())
        async for frame in frames:
            self._take(_frames.decode(frame))
        if self._close is not None:
            await _awaited(self._close())
        return 0

    async def _load(self, setup: EpisodeSetup) -> None:
        """Load the function. A class is made once, and may keep state: `setup()` runs first, `close()` last."""
        if setup.environment:
            beside = os.path.realpath(setup.base_dir)
            imports.search_beside(Path(beside))
            # For programs that an environment starts: verifiers runs a tool server as a module.
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [beside, os.environ.get("PYTHONPATH")]))
            adapter = await adapters.load(setup.environment, setup.options, setup.trial, beside)
            self._function, self._close = adapter.episode, adapter.close
            return
        module = setup.function.rpartition(":")[0]
        self._package = "" if module.endswith(".py") else module.rpartition(".")[0] or module
        loaded: Any = imports.load("function", setup.function, AgentNotLoaded, setup.base_dir)
        if not inspect.isclass(loaded):
            self._function = loaded
            return
        user: Any = loaded()
        if not callable(getattr(user, "episode", None)):
            raise AgentNotLoaded(f"function = {setup.function!r}: the class has no method episode(task, llm)")
        self._function, self._close = user.episode, getattr(user, "close", None)
        if begin := getattr(user, "setup", None):
            await _awaited(begin())

    def _write(self, frame: FromChild) -> None:
        """Write a frame as a line at once; any thread may."""
        pipes.write(self._fd, pipes.line_of(frame), self._lock)

    def _take(self, frame: ToChild) -> None:
        if isinstance(frame, Begin):
            self._episodes[frame.key] = asyncio.ensure_future(self._run(frame))
        elif isinstance(frame, Answered):
            future = self._waiting.pop(frame.call, None)
            if future is not None and not future.done():
                future.set_result(frame.response)
        elif isinstance(frame, Cancel) and frame.key in self._episodes and not blocking(self._function):
            self._episodes[frame.key].cancel()

    async def _run(self, begin: Begin) -> None:
        async def ask(seat: str, request: Request) -> Response:
            self._calls += 1
            call, future = self._calls, asyncio.get_running_loop().create_future()
            line = msgspec.json.encode(Asked(begin.key, call, request, seat)) + b"\n"  # raises if no frame can hold it
            self._waiting[call] = future
            try:
                pipes.write(self._fd, line, self._lock)
                return await future  # type: ignore[no-any-return]
            finally:
                self._waiting.pop(call, None)

        try:
            llm = begin.llm(ask)
            ended = await play(self._function, llm.task, llm, self._threads, begin.seats or (ONLY,))
        except asyncio.CancelledError:
            ended = Ended("raised", text="cancelled")
        except BaseException as problem:  # such as that of an exception whose text raises another
            ended = Ended("raised", text=f"its end could not be told: {type(problem).__name__}")
        del self._episodes[begin.key]
        pipes.printed.begin()
        self._write(Over(begin.key, ended))

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        self._stepped = time.monotonic()
        loop.call_later(BEAT_S / 2, self._step, loop)

    def _beat(self) -> None:
        while True:
            stood = time.monotonic() - self._stepped
            self._write(Beat(stood, self._where()) if stood > STANDS_S else Beat())
            time.sleep(BEAT_S)

    def _where(self) -> str:
        return user_line(sys._current_frames().get(self._main), self._package)


def user_line(frame: FrameType | None, package: str) -> str:
    """The innermost line of user code on a stack: of a user's file, or of the `package` of the function; without any
    the innermost line of all."""
    place = ""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        users = module.startswith("busrl_user_") or (package != "" and f"{module}.".startswith(f"{package}."))
        if users or not place:
            name = os.path.basename(frame.f_code.co_filename)
            place = f"{name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        if users:
            break
        frame = frame.f_back
    return place


async def _awaited(value: Any) -> None:
    if inspect.isawaitable(value):
        await value


if __name__ == "__main__":
    sys.exit(main())
