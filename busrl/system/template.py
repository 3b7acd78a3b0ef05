"""A template process: it has imported what others need, and forks one of them for each request of its owner.

Talks to its owner over a socket, a JSON message each way, and to the kernel. `Template` is the owner's side; this
module, run as a program, is the template itself. Knows nothing of roles or topologies: a request names a function.

- A child of the template is a child of the owner: a process in between ends at once, and the kernel gives its orphan to
  the nearest ancestor that adopts orphans, which the owner does during a request. So its end, its pidfd and its death
  with the owner are those of a child that the owner started itself, and the template's own death touches no child.
- A child waits until the owner has been sent its pid: no child runs of which the owner does not know.
- A template forks only while it has one thread and uses no accelerator; else it says why not. Children may have more.
- A child has the environment, threads, descriptors and cores of its request; its session and random numbers are new.
- A request that is not answered in time costs the template its life.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import setproctitle

from busrl.errors import BusrlError, cause
from busrl.system.guardian import stat_of
from busrl.system.parent import adopting_orphans, bind, die_with

MOST_BYTES, MOST_DESCRIPTORS = 1 << 20, 16
LET_GO = b"1"
END_S, KILL_S = 0.5, 1.0
# What libraries read when they are imported, and a child's number of threads afterwards.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
OPENBLAS = re.compile(r"/\S*openblas\S*\.so\S*")
SET_OPENBLAS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads64_",
                "openblas_set_num_threads")


class TemplateRefused(BusrlError):
    """The template could not do what was asked; the text says why, and the owner starts its process itself."""


class TemplateGone(TemplateRefused):
    """The template has ended, by itself or because it did not answer; another one may serve."""


def readable(descriptor: int, limit_s: float) -> bool:
    """Tell whether there is something to read, or the other end is closed, within the time."""
    poller = select.poll()  # select(2) knows no descriptor from 1,024 on
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(limit_s * 1000))


# -- the owner's side --------------------------------------------------------------------------------------------------


class Template:
    """A template as its owner sees it. `command` starts this module; the number of a descriptor is its last argument.

    One request is under way at a time: `call` begins one that may take long, and `answered` tells when it is over.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise TemplateRefused("a template is started by the main thread, with whose end the kernel ends it")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.getpid()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())], env={**environment, **dict.fromkeys(THREAD_VARIABLES, "1")},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs.fileno(),), start_new_session=True,
                preexec_fn=lambda: die_with(owner),
            )
        self._socket, self.busy = ours, False

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable when a request is answered, and when the template is gone."""
        return self._socket.fileno()

    def call(self, function: str, *arguments: Any) -> None:
        """Let the template itself run a function ("module:name"), to import what its children will need."""
        self._send({"call": function, "arguments": arguments}, ())
        self.busy = True

    def answered(self) -> bool:
        """Tell whether nothing is under way any more; TemplateRefused if the last call failed."""
        if self.busy and readable(self.fileno(), 0.0):
            self.busy = False
            self._reply(0.0)
        return not self.busy

    def fork(
        self, function: str, arguments: Sequence[Any], environment: Mapping[str, str], descriptors: Sequence[int],
        cores: Sequence[int], limit_s: float,
    ) -> int:
        """Fork a child that runs the function and ends with what that returns; its pid.

        `descriptors`: its standard output and error (one), then others, whose numbers it gets as first argument.
        """
        request = {
            "fork": function, "arguments": arguments, "environment": dict(environment), "cores": list(cores),
            "owner": os.getpid(),
        }
        try:
            with adopting_orphans():
                self._send(request, descriptors)
                return int(self._reply(limit_s)["pid"])
        except OSError as problem:
            raise TemplateRefused(str(problem)) from None

    def _send(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors), socket.MSG_DONTWAIT)
        except ConnectionError:
            raise TemplateGone(f"the template (pid {self.pid}) has ended") from None
        except OSError as problem:
            raise TemplateRefused(f"the template (pid {self.pid}) takes no request: {problem}") from None

    def _reply(self, limit_s: float) -> dict[str, Any]:
        late = not readable(self.fileno(), limit_s)
        if late:
            self.kill()  # from here on it answers no more; it may just have
        try:
            data = self._socket.recv(MOST_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            data = b""
        if not data and late:
            raise TemplateGone(f"the template (pid {self.pid}) did not answer within {limit_s:g} s")
        if not data:
            raise TemplateGone(f"the template (pid {self.pid}) has ended")
        reply: dict[str, Any] = json.loads(data)
        if "error" in reply:
            raise TemplateRefused(reply["error"])
        return reply

    def ended(self) -> bool:
        """Tell whether it has ended, or will: nothing was asked and there is something to read."""
        return self._process.poll() is not None or (not self.busy and readable(self.fileno(), 0.0))

    def kill(self) -> None:
        """End it; its children live on. One that is stuck in the kernel ends later, with its owner at the latest."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)

    def close(self) -> None:
        """Let it end by itself, so that what libraries have made for it is removed; else kill it."""
        self._socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()


# -- the template ------------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> int:
    """Answer requests until the owner is gone; returns the exit code, in a child that of its function."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_DESCRIPTORS)
        if not message:
            return 0
        request, leash = json.loads(message), os.pipe()
        reply = _answer(request)
        if reply.get("pid") == 0:
            connection.close()
            os.close(leash[1])
            return _become(request, descriptors, leash[0])
        try:
            connection.send(json.dumps(reply).encode())
        except ConnectionError:
            return 0
        if "pid" in reply:
            os.write(leash[1], LET_GO)  # both ends are open here: it is never refused
        for descriptor in (*descriptors, *leash):
            os.close(descriptor)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Do what is asked; the reply to the owner, in a new child with 0 as pid."""
    try:
        if "fork" in request:
            return {"pid": _forked(request["owner"])}
        _function(request["call"])(*request["arguments"])
        gc.freeze()  # what is imported stays: a child that looks for cycles copies none of these pages
    except (Exception, SystemExit) as problem:  # of a library's import, of any kind: the owner starts as without us
        return {"error": cause(problem)}
    return {}


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def unfit() -> str:
    """Tell why this process must not fork; empty if it may."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"something that was imported has started threads: there are {threads}, and a fork copies one"
    torch = sys.modules.get("torch")
    for kind in ("cuda", "npu"):
        part: Any = getattr(torch, kind, None)
        if part is not None and part.is_initialized():
            return f"something that was imported uses {kind}, which no fork can"
    return ""


def _forked(owner: int) -> int:
    """Fork a process in between that forks the child and ends: 0 in the child, in the template the child's pid."""
    if reason := unfit():
        raise TemplateRefused(reason)
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    between = os.fork()
    if between == 0:
        _fork_and_end(write)  # comes back in the child alone
        os.close(read)
        os.close(write)
        return 0
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(between, 0)  # from here on the child belongs to the owner
    if not text.isdigit():
        raise TemplateRefused(f"it could not fork: {text or 'the process in between was killed'}")
    _check_parent(int(text), owner)
    return int(text)


def _check_parent(child: int, owner: int) -> None:
    """Refuse a child that the kernel gave to another process than the owner; it has not run yet, and never does."""
    parent = (stat_of(child) or ["", ""])[1]
    if parent != str(owner):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        raise TemplateRefused(f"the kernel gave the forked process to pid {parent or '?'}, not to its owner ({owner})")


def _driver_started() -> str:
    """Name the driver that an import has started, seen from a fork, which cannot use it; "" if there is none."""
    torch = sys.modules.get("torch")
    for kind in ("cuda", "npu"):
        unusable = getattr(getattr(torch, kind, None), "_is_in_bad_fork", None)
        if unusable is not None and unusable():
            return f"something that was imported has started the driver of {kind}, which no fork survives"
    return ""


def _fork_and_end(write: int) -> None:
    """Fork the child, name it, and end; returns in the child."""
    if driver := _driver_started():
        os.write(write, driver.encode())
        os._exit(1)
    try:
        child = os.fork()
    except OSError as problem:
        os.write(write, str(problem).encode())
        os._exit(1)
    if child:
        os.write(write, str(child).encode())
        os._exit(0)


def _become(request: Mapping[str, Any], descriptors: Sequence[int], leash: int) -> int:
    """Be the process that was asked for, from its session to its exit code. `leash`: readable once it may run."""
    os.setsid()
    output, *others = descriptors
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in enumerate((nothing, output, output)):
        os.dup2(source, number)
    os.close(nothing)
    os.close(output)
    if os.read(leash, 1) != LET_GO:
        os.write(2, b"the template died before its owner could know of this process, which ends\n")
        os._exit(1)
    os.close(leash)
    die_with(request["owner"])
    bind(request["cores"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _draw_other_numbers()
    _set_threads(int(os.environ.get(THREAD_VARIABLES[0], 1)))
    return int(_function(request["fork"])(others, *request["arguments"]))


def _draw_other_numbers() -> None:
    """Seed from the kernel what a new process seeds when it imports it; torch begins with the same seed in each."""
    random.seed()
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()


def _set_threads(count: int) -> None:
    """Give the libraries that are imported already the number of threads of this process; others read it then."""
    if count == 1:
        return
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)
    with open("/proc/self/maps") as file:
        libraries = set(OPENBLAS.findall(file.read()))
    for library in map(ctypes.CDLL, libraries):
        name = next((name for name in SET_OPENBLAS if hasattr(library, name)), "")
        if name:
            getattr(library, name)(count)


# -- the end of both ---------------------------------------------------------------------------------------------------


def leave(code: int) -> NoReturn:
    """End this process in order, but leave its objects and its libraries to the kernel.

    The interpreter would take apart all that was imported, and so copy most pages that this process shares. What a
    program may rely on is done: threads are waited for, exit handlers run, files are flushed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as `multiprocessing` ends its children
    atexit._run_exitfuncs()
    # Of what was imported, which is frozen and not listed, the streams alone.
    for opened in (sys.stdout, sys.stderr, *gc.get_objects()):
        if issubclass(type(opened), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(OSError, ValueError):  # a full disk, a closed file
                opened.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


def main(argv: Sequence[str]) -> NoReturn:
    setproctitle.setproctitle("busrl:template")  # before a child changes its environment, which lies beside the title
    with socket.socket(fileno=int(argv[-1])) as connection:
        connection.set_inheritable(False)
        code = serve(connection)
    leave(code)


if __name__ == "__main__":
    main(sys.argv)
