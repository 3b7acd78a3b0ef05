"""`busrl VERB ...` in processes forked from one that has imported what most verbs load, for tests of what they do.

After the imports all is as in a process that a user starts: its own arguments, environment, folder, streams and exit
code. What a start itself does (imports, a broken installation, PYTHONPATH) is tested with processes that start cold.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from busrl.system.imports import SAFE

IMPORTS = (
    "busrl.cli.run", "busrl.cli.init", "busrl.agents.trials", "busrl.bus.broker", "busrl.data.chat",
    "busrl.data.sources", "busrl.observe.monitor.recording", "busrl.observe.monitor.screen",
    "busrl.observe.monitor.sources", "busrl.observe.monitor.web.server", "busrl.preflight.doctor",
    "busrl.rewards.box.checks", "busrl.routes.rules", "busrl.service.defaults", "busrl.several.explained",
    "busrl.several.rules", "busrl.teachers.rules", "jinja2.ext", "jinja2.sandbox", "tokenizers",
)
ROOT = Path(__file__).resolve().parents[1]
START_S = 120.0
MOST_BYTES = 1 << 20
LOOK_EVERY_S = 0.05  # where another thread may have read the message


def busrl(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 120.0,
    root: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run `busrl ARGUMENTS` to its end. `env`: its whole environment, else pytest's; `root`: where its code lies."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    words = ["busrl", *map(str, arguments)]
    with Forked(words, root=root, cwd=cwd, env=env, text=True, **pipes) as child:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except BaseException:
            child.kill()
            raise
    return subprocess.CompletedProcess(words, child.returncode, out, err)


class Forked(subprocess.Popen[Any]):
    """A `Popen` whose process is forked: "busrl" and the words of a command, or "python", "-c", code and arguments.

    It is no child of this process, and has the streams, the folder and the environment that `Popen` is given; other
    options are not heeded."""

    def __init__(self, words: Sequence[str], *, root: Path = ROOT, **options: Any) -> None:
        self._nursery = nursery(root)
        super().__init__(words, **options)

    def _execute_child(
        self, args: Sequence[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, *more: Any,
    ) -> None:
        streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        environment = dict(os.environ if env is None else env)
        request = {"words": list(args), "env": environment, "cwd": str(cwd or Path.cwd())}
        self.pid = self._nursery.start(request, streams)
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.code_of(self.pid, 0.0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.code_of(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


class Nursery:
    """The process that forks, as pytest sees it. Threads of a test may use it side by side."""

    def __init__(self, root: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *SAFE, __file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, cwd="/", env={**os.environ, "PYTHONPATH": str(root)},
            )
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()  # of the socket: a message is read by whoever waits, for whom it may concern
        self._receive(START_S)  # it has imported all

    def start(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            while "started" not in (message := self._receive(START_S)):
                pass
            return int(message["started"])

    def code_of(self, pid: int, timeout_s: float | None) -> int | None:
        """Exit code of a process; None if it has not ended within the time."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                while select.select([self._socket], [], [], 0)[0]:
                    self._receive(0.0)
                if pid in self._codes:
                    return self._codes[pid]
            left_s = START_S if end is None else end - time.monotonic()
            if left_s <= 0:
                return None
            select.select([self._socket], [], [], min(left_s, LOOK_EVERY_S))

    def _receive(self, limit_s: float) -> dict[str, Any]:
        assert select.select([self._socket], [], [], limit_s)[0], f"no answer in {limit_s:g} s"
        data = self._socket.recv(MOST_BYTES)
        assert data, f"the process that forks has ended: {self._process.wait()}"
        message: dict[str, Any] = json.loads(data)
        if "started" in message:
            self._codes.pop(message["started"], None)  # of an earlier process with this number
        elif "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


@cache
def nursery(root: Path) -> Nursery:
    return Nursery(root)


# -- in the process that forks -----


def serve(connection: socket.socket) -> int:
    """Fork until pytest is gone; the exit code, in a forked process its own."""
    running: dict[int, int] = {}  # by pidfd
    while True:
        for ready in select.select([connection.fileno(), *running], [], [])[0]:
            if ready in running:
                pid = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                connection.send(json.dumps({"ended": pid, "code": code}).encode())
                continue
            message, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
            if not message:
                return 0
            pid = os.fork()
            if pid == 0:
                for descriptor in (connection.detach(), *running):
                    os.close(descriptor)
                return forked(json.loads(message), streams)
            for descriptor in streams:
                os.close(descriptor)
            running[os.pidfd_open(pid)] = pid
            connection.send(json.dumps({"started": pid}).encode())


def forked(request: Mapping[str, Any], streams: Sequence[int]) -> int:
    """Be the process that was asked for."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in streams:
        os.close(descriptor)
    # New ones: where those of the start could seek, as files can, they would do so in a pipe.
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=os.isatty(1))  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    program, *words = request["words"]
    if program == "python":
        sys.argv = words  # "-c" stays in the place of the code, as in a process that Python starts
        exec(sys.argv.pop(1), {"__name__": "__main__"})
        return 0
    sys.argv = ["busrl", *words]
    return int(importlib.import_module("busrl.cli.command").main())


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    for name in IMPORTS:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"imports have started threads: {threads}"
    gc.freeze()
    connection.send(b"{}")
    leave = importlib.import_module("busrl.system.template").leave
    try:
        code = serve(connection)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    leave(code)


if __name__ == "__main__":
    main()
