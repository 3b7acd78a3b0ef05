"""Launches forked from a process that has imported all that a run needs: whole runs of a session share its imports.

A `Nursery` is started once for a session of tests and forks a `busrl launch` for each run; such a launch has a
template already (`busrl/system/template.py`), a fork of itself. After the imports all is a user's launch. A run with a
prefix, another interpreter or variables that are read by imports starts cold: `Run.start` decides.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import setproctitle

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
IMPORTS = (
    "busrl.cli.run", "busrl.launcher", "busrl.preflight.load", "busrl.preflight.trial", "busrl.roles.__main__",
    "busrl.roles.learner", "busrl.roles.rollout", "busrl.roles.scheduler", "busrl.roles.keeper", "busrl.roles.reward",
    "busrl.roles.validator", "busrl.engines.torch.engine", "busrl.weights.shm",
    "transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2",
)
MOST_BYTES = 1 << 20
START_S = 120.0
LOOK_EVERY_S = 0.05


# -- in pytest -----


class Nursery:
    """The process that forks launches, as pytest sees it. Threads of a test may use it side by side."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "warm.py"), str(theirs.fileno())], pass_fds=(theirs.fileno(),),
                env=environment({}), stdin=subprocess.DEVNULL,
            )
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()  # of the socket: a message is read by whoever waits, for whom it may concern
        self._pidfds: list[int] = []
        self._receive(START_S)  # it has imported all

    def start(self, arguments: Sequence[str], env: Mapping[str, str], output: int, cwd: Path) -> Warm:
        request = {"arguments": list(arguments), "environment": dict(env), "cwd": str(cwd)}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [output])
            while "started" not in (message := self._receive(START_S)):
                pass
            return Warm(message["started"], self._pidfds.pop(), self)

    def code_of(self, pid: int, timeout_s: float) -> int | None:
        """Exit code of a launch; None if it has not ended within the time."""
        end = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if select.select([self._socket], [], [], 0)[0]:
                    self._receive(0.0)
                if pid in self._codes:
                    return self._codes[pid]
            if time.monotonic() > end:
                return None
            select.select([self._socket], [], [], min(LOOK_EVERY_S, timeout_s))

    def _receive(self, limit_s: float) -> dict[str, Any]:
        assert select.select([self._socket], [], [], limit_s)[0], f"the nursery did not answer within {limit_s:g} s"
        data, pidfds, _, _ = socket.recv_fds(self._socket, MOST_BYTES, 1)
        assert data, f"the nursery has ended: {self._process.wait()}"
        message: dict[str, Any] = json.loads(data)
        if "started" in message:
            self._codes.pop(message["started"], None)  # of an earlier launch with this number
            self._pidfds += pidfds
        elif "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


class Warm:
    """A launch that was forked, with as much of `subprocess.Popen` as tests use."""

    def __init__(self, pid: int, pidfd: int, nursery: Nursery) -> None:
        self.pid, self._pidfd, self._nursery = pid, pidfd, nursery
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.code_of(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        limit_s = 86_400.0 if timeout is None else timeout
        code = self.poll()
        if code is None:
            code = self.returncode = self._nursery.code_of(self.pid, limit_s)
        if code is None:
            raise subprocess.TimeoutExpired(f"launch (pid {self.pid})", limit_s)
        return code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)


@cache
def nursery() -> Nursery:
    return Nursery()


def environment(more: Mapping[str, str]) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
    fixed = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **threads, **fixed, "PYTHONPATH": str(ROOT), **more}


# -- in the nursery -----


def serve(connection: socket.socket) -> int:
    """Fork launches until pytest is gone; the exit code, in a launch its own."""
    running: dict[int, int] = {}  # by pidfd
    while True:
        for ready in select.select([connection, *running], [], [])[0]:
            if ready is not connection:
                pid = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                connection.send(json.dumps({"ended": pid, "code": code}).encode())
                continue
            message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 1)
            if not message:
                return 0
            pid = os.fork()
            if pid == 0:
                for descriptor in (connection, *running):
                    os.close(descriptor if isinstance(descriptor, int) else descriptor.detach())
                return launched(json.loads(message), descriptors[0])
            os.close(descriptors[0])
            running[pidfd := os.pidfd_open(pid)] = pid
            socket.send_fds(connection, [json.dumps({"started": pid}).encode()], [pidfd])


def launched(request: Mapping[str, Any], output: int) -> int:
    """Be `busrl launch` with these arguments, and its template in a fork."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if (template := forked_template()) is not None:
        return template
    from busrl.cli.command import main

    sys.argv = ["busrl", *request["arguments"]]
    return main()


def forked_template() -> int | None:
    """Fork the template of this launch, which the launch takes in place of starting one: None in the launch, in the
    template and its children their exit code."""
    from busrl.launcher import forks
    from busrl.system import parent, template

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launch, pid = os.getpid(), os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        parent.die_with(launch)
        setproctitle.setproctitle("busrl:template")
        return template.serve(theirs)
    theirs.close()
    forks.Template = taking(ours, pid)  # type: ignore[assignment, misc]
    return None


def taking(ours: socket.socket, pid: int) -> Callable[..., Any]:
    """A maker of templates whose first one is there already."""
    from busrl.system import template

    started = template.Template

    class Forked(template.Template):
        def __init__(self) -> None:
            self._socket, self.busy, self._process = ours, False, ForkedProcess(pid)  # type: ignore[assignment]

    makers: list[Callable[..., Any]] = [lambda *_: Forked()]
    return lambda *arguments: (makers.pop() if makers else started)(*arguments)


class ForkedProcess:
    """A child of this process, with as much of `subprocess.Popen` as a template needs."""

    def __init__(self, pid: int) -> None:
        self.pid, self._ended = pid, False

    def poll(self) -> int | None:
        self._ended = self._ended or os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return 0 if self._ended else None

    def kill(self) -> None:
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        if self.poll() is not None:
            return
        pidfd = os.pidfd_open(self.pid)
        ended = select.select([pidfd], [], [], timeout)[0]
        os.close(pidfd)
        if not ended:
            raise subprocess.TimeoutExpired(f"template (pid {self.pid})", timeout)
        self.poll()


def main() -> int:
    setproctitle.setproctitle("busrl:nursery")
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTS:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"imports have started threads: {threads}"
    connection.send(b"{}")
    return serve(connection)


if __name__ == "__main__":
    del sys.path[0]  # tests/run: a user's launch finds nothing there
    code = main()
    from busrl.system.template import leave

    leave(code)
