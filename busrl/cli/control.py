"""`busrl stop`, `pause`, `resume`, `checkpoint`, `set` and `scale`: what a person asks of a run that runs.

Each is a CONTROL message to the run's launch, sent until it is answered. Decides nothing: launch does.

- `stop` also works where the bus does not: it then signals the launch that run.json names through a pidfd, and only if
  the run's lock names the same pid as its holder; a pid alone is no proof.
"""

from __future__ import annotations

import argparse
import os
import pwd
import select
import signal
import time
import uuid
from contextlib import closing, suppress

from busrl.bus import Endpoint
from busrl.cli.run import launch_pid
from busrl.errors import BadEndpoint, BusNotReady, NoSuchRun, PeerTimeout, UserError
from busrl.files import read_map
from busrl.launch.rundir import belongs_to_another
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.protocol.codec import topic

AGAIN_S, READY_S = 0.5, 2.0
BUS_S = 5.0  # after which `stop` sends a signal instead


def control(options: argparse.Namespace) -> int:
    """Ask, wait for the answer, print it; 1 if it was refused."""
    paths, verb = RunPaths.of(options.run_dir), options.control
    if launch_pid(paths) is None:
        how = read_map(paths.summary).get("outcome") or "not over"
        raise NoSuchRun(f"{paths.root}: no process runs it (the run is {how}), so there is nobody to {verb} it; a "
                        "value for its next start is given with `busrl launch --set`")
    answer = ask(paths, verb, getattr(options, "key", ""), getattr(options, "value", ""), options.wait)
    if not answer.ok:
        raise UserError(f"{verb}: {answer.text}")
    print(f"{paths.root}: {answer.text}")
    return 0


def ask(paths: RunPaths, verb: str, key: str, value: str, wait_s: float) -> m.ControlDone:
    """The last answer of the run's launch; PeerTimeout names who has not answered, or not taken it up."""
    try:
        secret = paths.control_key.read_bytes()
    except PermissionError:
        whose = belongs_to_another(paths.root) or "it belongs to another user"
        raise UserError(f"{paths.root}: {whose}, and only they (or root) can {verb} it") from None
    except OSError as problem:
        raise PeerTimeout(f"{paths.control_key}: {problem.strerror}; is the run starting? Try again") from None
    asked = m.Control(id=uuid.uuid4().hex, verb=verb, key=key, value=value, who=_me(verb))
    asked.proof = asked.proof_with(secret)
    name, end, heard = f"control-{os.getpid()}", time.monotonic() + wait_s, None
    with closing(Endpoint(name, paths.frontend, paths.backend, subscribe=[topic(m.ControlDone, name)])) as bus:
        with suppress(BusNotReady):
            bus.ready(min(READY_S, wait_s))
        while (left := end - time.monotonic()) > 0:
            bus.send(asked)
            answer = bus.recv(min(AGAIN_S, left))
            if not isinstance(answer, m.ControlDone) or answer.id != asked.id or m.is_from_another(answer):
                continue
            heard = answer
            if not (answer.ok and answer.waits):
                return answer
            bus.wait(min(AGAIN_S, max(0.0, end - time.monotonic())))
    if heard is None:
        raise PeerTimeout(f"{paths.root}: no answer to {verb} in {wait_s:g} s; see {paths.log('launch')}")
    raise PeerTimeout(
        f"{paths.root}: {heard.text}; but {', '.join(heard.waits)} has not taken it up within {wait_s:g} s; it does so "
        "when it comes to it: see `busrl status`"
    )


def _me(verb: str) -> str:
    user = f"user {os.getuid()}"
    with suppress(KeyError):
        user = pwd.getpwuid(os.getuid()).pw_name
    return f"{user} (pid {os.getpid()}, busrl {verb})"


# -- stop -----


def stop(options: argparse.Namespace) -> int:
    """End a run and wait until it has ended; NoSuchRun if there is none, PeerTimeout if it does not end."""
    paths = RunPaths.of(options.run_dir)
    pid = launch_pid(paths)
    if pid is None:
        print(f"{paths.root}: no process runs it; nothing to stop")
        return 0
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        print(f"{paths.root}: it has just ended")
        return 0
    try:
        if launch_pid(paths) != pid:
            print(f"{paths.root}: it has just ended")
            return 0
        _ask_to_stop(paths, descriptor, pid, options)
        print(f"{paths.root}: asked process {pid} to stop", flush=True)
        _await(descriptor, pid, paths, options.wait)
    finally:
        os.close(descriptor)
    print(f"{paths.root}: ended")
    return 0


def _ask_to_stop(paths: RunPaths, descriptor: int, pid: int, options: argparse.Namespace) -> None:
    if paths.control_key.exists() and os.access(paths.control_key, os.R_OK):
        with suppress(PeerTimeout, BadEndpoint):
            answer = ask(paths, "stop", "", "now" if options.now else "", min(BUS_S, options.wait))
            if answer.ok:
                return
    try:
        for _ in range(2 if options.now else 1):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        whose = belongs_to_another(paths.root) or "it belongs to another user"
        raise UserError(f"{paths.root}: {whose}, and only they (or root) can stop process {pid}") from None


def _await(descriptor: int, pid: int, paths: RunPaths, wait_s: float) -> None:
    poller = select.poll()  # a pidfd is readable when its process has ended
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(wait_s * 1000):
        raise PeerTimeout(
            f"{paths.root}: process {pid} has not ended {wait_s:g} s after it was asked; see {paths.logs}, wait longer "
            f"(--wait), or end it with: kill -9 {pid} (the next launch continues from the ledger)"
        )
