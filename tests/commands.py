"""`busrl VERB ...` in processes forked from one that has imported what most verbs load, for tests of what is printed.

After the imports all is as in a process that a user starts: its own arguments, environment, folder, streams and exit
code. What a start itself does (imports, a broken installation, PYTHONPATH) is tested with processes that start cold.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any

IMPORTS = (
    "busrl.cli.run", "busrl.cli.init", "busrl.agents.trials", "busrl.data.chat", "busrl.data.sources",
    "busrl.preflight.doctor", "busrl.rewards.box.checks", "busrl.routes.rules", "busrl.service.defaults",
    "busrl.several.explained", "busrl.several.rules", "busrl.teachers.rules", "jinja2.ext", "jinja2.sandbox",
    "tokenizers",
)
ROOT = Path(__file__).resolve().parents[1]
START_S = 120.0
MOST_BYTES = 1 << 20


def busrl(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 120.0,
    root: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """What `busrl ARGUMENTS` gives. `env`: its whole environment, else that of pytest; `root`: where its busrl lies."""
    words, whole = list(map(str, arguments)), dict(os.environ if env is None else env)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _nursery(root).run(words, whole, str(cwd or Path.cwd()), out, err, timeout_s)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(["busrl", *words], code, *texts)


class Nursery:
    """The process that forks commands, one at a time, as pytest sees it."""

    def __init__(self, root: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, cwd="/", env={**os.environ, "PYTHONPATH": str(root)},
            )
        self._answer(START_S)  # it has imported all

    def run(
        self, words: list[str], env: dict[str, str], cwd: str, out: IO[bytes], err: IO[bytes], timeout_s: float
    ) -> int:
        request = json.dumps({"words": words, "env": env, "cwd": cwd}).encode()
        socket.send_fds(self._socket, [request], [out.fileno(), err.fileno()])
        pid = self._answer(START_S)["pid"]
        try:
            return int(self._answer(timeout_s)["code"])
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            self._answer(START_S)
            raise subprocess.TimeoutExpired(["busrl", *words], timeout_s) from None

    def _answer(self, limit_s: float) -> dict[str, Any]:
        if not select.select([self._socket], [], [], limit_s)[0]:
            raise TimeoutError(f"the process that forks commands did not answer within {limit_s:g} s")
        data = self._socket.recv(MOST_BYTES)
        assert data, f"the process that forks commands has ended: {self._process.wait()}"
        answer: dict[str, Any] = json.loads(data)
        return answer


@cache
def _nursery(root: Path) -> Nursery:
    return Nursery(root)


# -- in the other process -----


def serve(connection: socket.socket) -> int:
    """Fork commands until pytest is gone; the exit code, in a command its own."""
    connection.send(b"{}")
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 2)
        if not message:
            return 0
        pid = os.fork()
        if pid == 0:
            connection.close()
            return command(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps({"pid": pid}).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.send(json.dumps({"code": code}).encode())


def command(request: Mapping[str, Any], out: int, err: int) -> int:
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["busrl", *request["words"]]
    return int(importlib.import_module("busrl.cli.command").main())


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    for name in IMPORTS:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"imports have started threads: {threads}"
    gc.freeze()
    from busrl.system.template import leave

    try:
        code = serve(connection)
    except SystemExit as ended:  # argparse
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    leave(code)


if __name__ == "__main__":
    main()
