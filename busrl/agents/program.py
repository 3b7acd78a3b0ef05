"""Episodes as programs: one is started for each, with the door's address in its environment, and says its reward.

Talks to the operating system. The program is any OpenAI client: OPENAI_BASE_URL and OPENAI_API_KEY lead it to its
episode, BUSRL_TASK names a file with the line of the data; the last line that it writes is JSON with its `reward`.
Knows nothing of slots or HTTP.

- A program leads a session of its own, which ends with it: what it started is killed when it has ended.
- One that exits with another status than 0, or whose last line is no reward, has raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from busrl.agents.episode import Episode
from busrl.agents.llm import TEXT_LIMIT, Ended
from busrl.agents.pool import MAX_AGAIN, Played
from busrl.errors import CallUnanswered
from busrl.guardian import MARK, end_marked, own_mark
from busrl.rewards.base import MalformedReward, settle

LOOK_S = 0.05
OUTPUT_BYTES = 1 << 20
# Becomes the program, which then ends with this process (PR_SET_PDEATHSIG = 1 stays over exec). No import of busrl: an
# interpreter's start is paid for each episode.
LAUNCHER = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]): os._exit(1)
try: os.execvp(sys.argv[2], sys.argv[2:])
except OSError as problem: sys.exit(f"{sys.argv[2]}: {problem}")
"""


class Verdict(msgspec.Struct):
    """The last line of a program."""

    reward: float | dict[str, float] | None = None
    failed: bool = False
    again: bool = False
    why: str = ""


class Programs:
    """The programs of an agent process; as many run as episodes are played."""

    def __init__(self, command: Sequence[str], base_dir: str, run_dir: Path, episode_s: float) -> None:
        self._command = [part.replace("{here}", base_dir).replace("{run_dir}", str(run_dir)) for part in command]
        self._base_dir, self._episode_s = base_dir, episode_s

    async def play(self, begin: Callable[[], Episode], task: bytes) -> Played:
        """Run a program to its end, again where it asks for that."""
        attempts = 0
        while True:
            attempts += 1
            episode = begin()
            try:
                ended = await self._played(episode, task)
            finally:
                episode.close()
            if ended.how == "again" and attempts == MAX_AGAIN:
                ended = Ended("raised", text=f"it wanted to begin again {attempts} times; {ended.text}")
            if ended.how != "again":
                return Played(ended, episode, attempts)

    async def close(self) -> None:
        """Those that run were cancelled with their episodes."""

    async def _played(self, episode: Episode, task: bytes) -> Ended:
        wrong: asyncio.Future[CallUnanswered] = asyncio.get_running_loop().create_future()
        episode.gone_wrong = lambda problem: None if wrong.done() else wrong.set_result(problem)
        mark = own_mark()
        with tempfile.NamedTemporaryFile(prefix="busrl-task-", suffix=".json") as file:
            file.write(task)
            file.flush()
            names = {"OPENAI_BASE_URL": episode.openai["base_url"], "OPENAI_API_KEY": episode.openai["api_key"],
                     "BUSRL_TASK": file.name, MARK: mark}
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-c", LAUNCHER, str(os.getpid()), *self._command, cwd=self._base_dir,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, start_new_session=True,
                env={**os.environ, **names},
            )
            output = asyncio.ensure_future(_tail(process))
            try:
                return await self._ended(episode, process, output, wrong)
            finally:
                if process.returncode is None:
                    _kill(process.pid)
                output.cancel()
                await process.wait()
                await asyncio.to_thread(end_marked, mark)  # what it started in sessions of their own

    async def _ended(self, episode: Episode, process: asyncio.subprocess.Process, output: asyncio.Future[bytes],
                     wrong: asyncio.Future[CallUnanswered]) -> Ended:
        over = asyncio.ensure_future(process.wait())
        try:
            while not over.done() and not wrong.done():
                left = self._episode_s - episode.own_s()
                if left <= 0:
                    return Ended("hung", text=f"no end after {self._episode_s:g} s of its own time (agents.episode_s)")
                waited: set[asyncio.Future[Any]] = {over, wrong}
                await asyncio.wait(waited, timeout=max(LOOK_S, left), return_when=asyncio.FIRST_COMPLETED)
            if wrong.done():
                raise wrong.result()
        finally:
            over.cancel()
        _kill(process.pid)  # what it left behind may hold its output open
        return verdict_of(process.returncode or 0, await output)


def verdict_of(status: int, output: bytes) -> Ended:
    """How a program ended, by its exit status and the last of what it wrote."""
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else b""
    said = last[:TEXT_LIMIT].decode(errors="replace")
    if status:
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return Ended("raised", text=f"its program ended with {how}; its last line: {said or 'none'}")
    try:
        found = msgspec.json.decode(last, type=Verdict)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        return Ended("malformed", text=f'its last line must be JSON, {{"reward": 1.0}}: {problem}; it was: {said}')
    why = found.why[:TEXT_LIMIT]
    if found.again:
        return Ended("again", text=why)
    if found.reward is None:
        return Ended("used_up" if found.failed else "malformed", text=why or f"no reward in its last line: {said}")
    try:
        return Ended("failed" if found.failed else "returned", *settle(found.reward), why)
    except MalformedReward as problem:
        return Ended("malformed", text=str(problem)[:TEXT_LIMIT])


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


async def _tail(process: asyncio.subprocess.Process) -> bytes:
    """The last of what it writes to its standard output."""
    assert process.stdout is not None
    kept = b""
    while part := await process.stdout.read(1 << 16):
        kept = (kept + part)[-OUTPUT_BYTES:]
    return kept

