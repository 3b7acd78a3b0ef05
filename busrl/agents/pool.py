"""Processes that play episodes, and may raise, hang, crash or be killed: children that share episodes, or programs.

`Children` runs the user's functions in a few processes (`busrl.agents.child`), and passes their requests to the
`Episode`. `Programs` starts a program for each episode, any OpenAI client: OPENAI_BASE_URL and OPENAI_API_KEY lead it
to its episode (BUSRL_KEYS, as JSON: to each of several seats), BUSRL_TASK names a file with the line of the data. Knows
nothing of slots, fates, engines or HTTP.

- An episode ends once. Each attempt has its own tree; the tree of the last attempt is trained.
- When a child dies, each of its episodes gets a new attempt, alone in a new child. An episode that was alone in two
  children that died has crashed.
- An episode that takes longer than `episode_s` of its own time is cancelled. If it does not end then its child is
  killed, and the other episodes in it begin again.
- Each child and program leads its own session. It is killed with its process group, and with all that user code has
  started; it also ends when this process is killed.
- The last line that a program prints is JSON with its `reward`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from busrl.agents.child import Answered, Asked, Beat, Begin, Cancel, EpisodeSetup, FromChild, Over, Ready, ToChild
from busrl.agents.episode import Episode
from busrl.agents.llm import TEXT_LIMIT, Ended, Refusal, judged
from busrl.agents.seats import ONLY, Seat
from busrl.errors import AgentNotLoaded, CallUnanswered, MachineError
from busrl.system import proxies
from busrl.system.guardian import MARK, end_marked, halted, own_mark
from busrl.system.imports import APART, interpreter

READY_S = 120.0  # importing the user's code may take long
GRACE_S = 2.0  # for an episode that was cancelled, and for a child that may end by itself
DRAIN_S = 0.2  # to read the rest of the errors of a program that has ended
END_S = 5.0  # a killed process that does not end within this time is stuck in the kernel
SILENT_S, LOOK_S = 4.0, 0.02
NO_END = "no end after {:g} s of its own time (agents.episode_s)"
LINE_BYTES = 256 << 20
MOST_ALONE = 4  # children for one episode each, at the same time
MAX_AGAIN, MAX_DEATHS, MAX_STARTS = 3, 2, 3
_frames: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)


class ChildLost(Exception):
    """The child of an episode died; `alone`: it played no other episode."""

    def __init__(self, text: str, alone: bool) -> None:
        self.alone = alone
        super().__init__(text)


@dataclass
class Played:
    """The end of an episode, the calls of its last attempt, and the number of attempts."""

    ended: Ended
    episode: Episode
    attempts: int


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


async def ended_in_time(episode: Episode, episode_s: float, *ends: asyncio.Future[Any]) -> bool:
    """Wait for the first of these ends; False if the episode's own time was over before."""
    while not any(end.done() for end in ends):
        left = episode_s - episode.own_s()
        if left <= 0:
            return False
        await asyncio.wait(ends, timeout=max(LOOK_S, left), return_when=asyncio.FIRST_COMPLETED)
    return True


def bounded(ended: Ended, again: int) -> Ended:
    """The end of an episode that began again `again` times: after too many times it counts as raised."""
    if ended.how == "again" and again == MAX_AGAIN:
        return Ended("raised", text=f"it wanted to begin again {again} times; {ended.text}")
    return ended


# -- functions, in children -------------------------------


class Child:
    """A process, and the episodes in it. `start` it first; `lost`: how it ended, "" while it runs."""

    def __init__(self) -> None:
        self.lost, self.load = "", 0
        self.stood_s, self.where = 0.0, ""
        self._heard = time.monotonic()
        self._episodes: dict[int, tuple[Episode, asyncio.Future[Ended]]] = {}
        self._number = 0
        self._blamed = self._ended = False  # killed for an episode that did not end; killed or dead
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._work: set[asyncio.Task[None]] = set()

    async def start(self, setup: EpisodeSetup) -> None:
        """Start the process and load the function. AgentNotLoaded if that fails; ChildLost if the process dies."""
        # From the main thread: the child is tied to the life of the thread that starts it.
        self._mark = own_mark()
        self._process = subprocess.Popen(
            [*interpreter(setup.python), "busrl.agents.child", str(os.getpid())],
            env={**proxies.environment(), MARK: self._mark},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
        )
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout)
        self._in, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._process.stdin)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self.kill)  # its pipe may stay open in a process that it forked
        self._reading = asyncio.ensure_future(self._read(reader))
        self._send(setup)
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), READY_S)
        except asyncio.TimeoutError:
            self.kill()
            raise AgentNotLoaded(f"{setup.function or setup.environment}: not imported after {READY_S:g} s") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def trouble(self) -> str:
        """A line for people on how user code blocks this process; "" if it does not."""
        silent = time.monotonic() - self._heard
        if self.lost or not silent > SILENT_S:
            return f"its loop has stood still for {self.stood_s:.0f} s, at {self.where}" if self.stood_s else ""
        why = halted(self.pid) or "code that keeps Python from running"
        return f"nothing was heard of it for {silent:.0f} s: {why}"

    async def play(self, episode: Episode, task: bytes, episode_s: float) -> Ended:
        """Run an episode to its end; ChildLost if the process dies before, or has died already."""
        if self.lost:
            raise ChildLost(f"agent child {self.pid}: {self.lost}", alone=False)
        self._number += 1
        key = self._number
        over: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._episodes[key] = (episode, over)
        episode.on_unanswered(lambda problem: None if over.done() else over.set_exception(problem))
        places = [] if episode.places == [ONLY] else episode.places
        self._send(Begin(key, msgspec.Raw(task), episode.uid, episode.openai, places, episode.keys))
        try:
            if await ended_in_time(episode, episode_s, over):
                return over.result()
            return await self._overdue(key, over, episode_s)
        finally:
            if self._episodes.pop(key, None):  # the caller was cancelled, or an engine failed: end the code, too
                self._send(Cancel(key))

    async def _overdue(self, key: int, over: asyncio.Future[Ended], episode_s: float) -> Ended:
        why = self.trouble()
        self._episodes[key][0].close()
        self._send(Cancel(key))
        if not (await asyncio.wait({over}, timeout=GRACE_S))[0]:
            del self._episodes[key]
            self._blamed = True
            self.kill()
        elif (problem := over.exception()) is not None and not isinstance(problem, ChildLost):
            raise problem
        return Ended("hung", text="; ".join(filter(None, [NO_END.format(episode_s), why])))

    async def close(self) -> None:
        """End the process: by itself where it plays nothing, or killed."""
        self._in.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reading), 0.0 if self._episodes else GRACE_S)
        self.kill()
        await self._reading
        await self._swept  # of the processes that it started in other sessions

    def kill(self) -> None:
        """Kill the process group. The child is not reaped yet, so its number belongs to no other process."""
        if not self._ended:
            self._ended = True
            asyncio.get_running_loop().remove_reader(self._pidfd)
            kill_group(self._process.pid)
            self._swept = asyncio.get_running_loop().run_in_executor(None, end_marked, self._mark)

    def _send(self, frame: ToChild) -> None:
        if not self.lost and not self._in.is_closing():
            self._in.write(msgspec.json.encode(frame) + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        fault = ""
        try:
            while line := await reader.readline():
                self._take(_frames.decode(line))
        except (msgspec.MsgspecError, ValueError):
            fault = "it wrote to the pipe of its requests"
        self.kill()
        try:
            status = await asyncio.to_thread(self._process.wait, END_S)
        except subprocess.TimeoutExpired:
            raise MachineError(f"agent child {self.pid} does not end {END_S:g} s after SIGKILL") from None
        os.close(self._pidfd)
        self._in.close()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        self._end(fault or how)

    def _end(self, how: str) -> None:
        self.lost, alone = how, len(self._episodes) == 1 and not self._blamed
        for episode, over in list(self._episodes.values()):
            episode.close()
            if not over.done():
                over.set_exception(ChildLost(f"agent child {self.pid}: {how}", alone))
        if not self._ready.done():
            self._ready.set_exception(ChildLost(f"agent child {self.pid}: {how}", True))

    def _take(self, frame: FromChild) -> None:
        self._heard = time.monotonic()
        if isinstance(frame, Beat):
            self.stood_s, self.where = frame.stood_s, frame.where
        elif isinstance(frame, Ready) and not self._ready.done():
            if frame.error:
                self._ready.set_exception(AgentNotLoaded(frame.error))
            else:
                self._ready.set_result(None)
        elif isinstance(frame, Over):
            _, over = self._episodes.pop(frame.key, (None, None))
            if over is not None and not over.done():
                over.set_result(frame.ended)
        elif isinstance(frame, Asked):
            task = asyncio.ensure_future(self._answer(frame))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    async def _answer(self, frame: Asked) -> None:
        """Answer every request, so that no code waits for ever; a refusal where the episode is over."""
        playing, answered = self._episodes.get(frame.key), None
        if playing is not None:
            try:
                answered = await playing[0].seats.get(frame.seat, playing[0]).answer(frame.request)
            except asyncio.CancelledError:  # of its calls
                pass
            except CallUnanswered as problem:  # the engines failed, not the episode
                playing[0].unanswered(problem)
            except Exception as problem:
                if not playing[1].done():
                    playing[1].set_exception(problem)
        if answered is None or frame.key not in self._episodes:
            self._send(Answered(frame.call, Refusal("ended", "this episode is over")))
            return
        delivery, response = answered
        self._send(Answered(frame.call, response))
        delivery.delivered()


class Children:
    """`count` children that share the episodes, and others for episodes that have to be alone."""

    def __init__(self, setup: EpisodeSetup, count: int, episode_s: float) -> None:
        self._setup, self._count, self._episode_s = setup, count, episode_s
        self._shared: list[Child] = []
        self._starting = asyncio.Lock()
        self._alone = asyncio.Semaphore(max(count, MOST_ALONE))
        self._spare: list[Child] = []  # children with one episode each

    async def start(self) -> None:
        """Start the shared children; AgentNotLoaded if the function cannot be loaded."""
        async with self._starting:
            children = await asyncio.gather(*(self._started() for _ in range(self._count)), return_exceptions=True)
            self._shared = [child for child in children if isinstance(child, Child)]
        for child in children:
            if isinstance(child, BaseException):
                await self.close()
                raise child

    @property
    def all(self) -> list[Child]:
        return [*self._shared, *self._spare]

    async def play(self, begin: Callable[[], Episode], task: bytes) -> Played:
        """Run an episode to its end, over as many attempts as that takes; `begin` makes the `Episode` of an attempt."""
        alone, deaths, again, attempts = False, 0, 0, 0
        while True:
            attempts += 1
            async with self._child(alone) as child:
                episode = begin()
                try:
                    ended = await child.play(episode, task, self._episode_s)
                except ChildLost as lost:
                    deaths, alone = deaths + (lost.alone or alone), True
                    if deaths < MAX_DEATHS:
                        continue
                    ended = Ended("crashed", text=f"{lost}, twice, with this episode alone in it")
                finally:
                    episode.close()
            again += ended.how == "again"
            ended = bounded(ended, again)
            if ended.how != "again":
                return Played(ended, episode, attempts)

    async def close(self) -> None:
        await asyncio.gather(*(child.close() for child in self.all))

    @contextlib.asynccontextmanager
    async def _child(self, alone: bool) -> AsyncIterator[Child]:
        if not alone:
            child = await self._least()
            child.load += 1
            try:
                yield child
            finally:
                child.load -= 1
            return
        async with self._alone:
            child = await self._started()
            self._spare.append(child)
            try:
                yield child
            finally:
                self._spare.remove(child)
                await child.close()

    async def _least(self) -> Child:
        """The shared child with the fewest episodes; starts another if all are busy and some are gone."""
        async with self._starting:
            living = self._shared = [child for child in self._shared if not child.lost]
            if all(child.load for child in living) and len(living) < self._count:
                living.append(await self._started())
            return min(living, key=lambda child: child.load)  # if it is lost by now, `play` raises that

    async def _started(self) -> Child:
        lost: Any = None
        for _ in range(MAX_STARTS):
            child = Child()
            try:
                await child.start(self._setup)
                return child
            except ChildLost as problem:
                lost = problem
        raise AgentNotLoaded(f"function = {self._setup.function!r}: its process ended before it was ready, "
                             f"{MAX_STARTS} times in a row ({lost}); see its log")


# -- programs ---------------------------------------------


OUTPUT_BYTES = 1 << 20
ERRORS = 2  # the descriptor of this process's errors
# Becomes the program, which then ends with this process (PR_SET_PDEATHSIG = 1 survives exec). It imports nothing of
# busrl: each episode pays for the start of an interpreter.
LAUNCHER = APART + """import ctypes, os
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]): os._exit(1)
try: os.execvp(sys.argv[2], sys.argv[2:])
except OSError as problem: sys.exit(f"{sys.argv[2]}: {problem}")
"""


class Verdict(msgspec.Struct):
    """The last line that a program prints."""

    reward: float | dict[str, float | dict[str, float]] | None = None
    failed: bool = False
    again: bool = False
    why: str = ""


class Programs:
    """Runs a program for each episode, in as many processes."""

    def __init__(self, command: Sequence[str], base_dir: str, run_dir: Path, episode_s: float) -> None:
        self._command = [part.replace("{here}", base_dir).replace("{run_dir}", str(run_dir)) for part in command]
        self._base_dir, self._episode_s = base_dir, episode_s

    async def play(self, begin: Callable[[], Episode], task: bytes) -> Played:
        """Run a program to its end, and again if its last line asks for that."""
        attempts = 0
        while True:
            attempts += 1
            episode = begin()
            try:
                ended = await self._played(episode, task)
            finally:
                episode.close()
            ended = bounded(ended, attempts)
            if ended.how != "again":
                return Played(ended, episode, attempts)

    async def close(self) -> None:
        """Do nothing: cancelling an episode ends its program."""

    async def _played(self, episode: Episode, task: bytes) -> Ended:
        wrong: asyncio.Future[CallUnanswered] = asyncio.get_running_loop().create_future()
        episode.on_unanswered(lambda problem: None if wrong.done() else wrong.set_result(problem))
        mark = own_mark()
        with tempfile.NamedTemporaryFile(prefix="busrl-task-", suffix=".json") as file:
            file.write(task)
            file.flush()
            names = {"OPENAI_BASE_URL": episode.openai["base_url"], "OPENAI_API_KEY": episode.openai["api_key"],
                     "BUSRL_TASK": file.name, MARK: mark}
            if episode.keys:
                names["BUSRL_KEYS"] = json.dumps(episode.keys)
            errors, write_end = await Tail.of_a_pipe(ERRORS)
            with contextlib.closing(errors):
                process = await self._process(write_end, names)
                assert process.stdout is not None
                output = Tail(process.stdout)
                try:
                    return await self._ended(episode, process, output, errors, wrong)
                finally:
                    if process.returncode is None:
                        kill_group(process.pid)
                    output.close()
                    await process.wait()
                    await asyncio.to_thread(end_marked, mark)  # processes that it started in other sessions

    async def _process(self, errors: int, names: dict[str, str]) -> asyncio.subprocess.Process:
        """Start the program with its errors going to this descriptor, which is closed here."""
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-c", LAUNCHER, str(os.getpid()), *self._command, cwd=self._base_dir,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=errors,
                start_new_session=True, env={**proxies.environment(), **names},
            )
        finally:
            os.close(errors)

    async def _ended(self, episode: Episode, process: asyncio.subprocess.Process, output: Tail, errors: Tail,
                     wrong: asyncio.Future[CallUnanswered]) -> Ended:
        over = asyncio.ensure_future(process.wait())
        try:
            if not await ended_in_time(episode, self._episode_s, over, wrong):
                return Ended("hung", text=errors.cause() + NO_END.format(self._episode_s))
            if wrong.done():
                raise wrong.result()
        finally:
            over.cancel()
        kill_group(process.pid)  # processes that it left behind may hold its output open
        await output.reading
        await asyncio.wait({errors.reading}, timeout=DRAIN_S)  # a process in another session may hold this open
        return verdict_of(process.returncode or 0, output.data, errors.cause(), episode.places)


def verdict_of(status: int, output: bytes, cause: str = "", seats: Sequence[Seat] = (ONLY,)) -> Ended:
    """The end of a program by its exit status and the tail of its output; `cause`: the last line of its errors."""
    last = last_line(output)
    shown = last[:TEXT_LIMIT].decode(errors="replace")
    if status:
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return Ended("raised", text=f"{cause}its program ended with {how}; its last line: {shown or 'none'}")
    try:
        verdict = msgspec.json.decode(last, type=Verdict)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        rule = f'its last line must be JSON, {{"reward": 1.0}}: {problem}; it was: {shown}'
        return Ended("malformed", text=cause + rule)
    why = verdict.why[:TEXT_LIMIT]
    if verdict.again:
        return Ended("again", text=why)
    if verdict.reward is None:
        return Ended("used_up" if verdict.failed else "malformed", text=why or f"no reward in its last line: {shown}")
    return judged("failed" if verdict.failed else "returned", verdict.reward, why, seats)


class Tail:
    """The last bytes that a program writes; all of them are copied to the descriptor `to`, if there is one."""

    _pipe: asyncio.BaseTransport | None = None

    def __init__(self, stream: asyncio.StreamReader, to: int = -1) -> None:
        self.data, self._to = b"", to
        self.reading = asyncio.ensure_future(self._read(stream))

    @classmethod
    async def of_a_pipe(cls, to: int) -> tuple[Tail, int]:
        """The tail of a new pipe, and the descriptor to write to. With a pipe of asyncio's, a program would not end
        while a process that it left behind holds the pipe open."""
        read, write = os.pipe()
        stream = asyncio.StreamReader()
        tail = cls(stream, to)
        file = os.fdopen(read, "rb", 0)
        tail._pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), file)
        return tail, write

    def close(self) -> None:
        self.reading.cancel()
        if self._pipe is not None:
            self._pipe.close()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(1 << 16):
            self.data = (self.data + part)[-OUTPUT_BYTES:]
            if self._to >= 0:
                with contextlib.suppress(OSError):  # a full disk costs the log
                    os.write(self._to, part)

    def cause(self) -> str:
        """The last line, to be put before the end of its program."""
        line = last_line(self.data)[:TEXT_LIMIT].decode(errors="replace").strip()
        return f"{line}: " if line else ""


def last_line(output: bytes) -> bytes:
    return next((line for line in reversed(output.splitlines()) if line.strip()), b"")
