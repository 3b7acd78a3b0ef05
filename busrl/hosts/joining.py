"""`busrl host`: runs the processes that a run has on this host, from joining to their end.

Talks to home's relay, which lets the host join and gives it its topology, and to this host's scratch directory, ring
and children, by the parts of `busrl.launcher`. Knows nothing of tasks or weights: satellite and relay carry those.

- Everything below the scratch directory is this host's alone; deleting all of it costs tokens, never a sample.
- The exit code says what to do next: 0 nothing, the run is over; 2 mend something; 3 the run is lost to this host:
  start it again where it should work; any other: start it again here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import setproctitle

import busrl
from busrl.bus.addresses import check_endpoint, prepare, relay_endpoint
from busrl.cli.command import positive
from busrl.errors import PeerLost, PeerTimeout, UserError
from busrl.hosts import questions as q
from busrl.hosts.link import Asking
from busrl.hosts.membership import HostSource, Invitation
from busrl.launcher.children import Signals
from busrl.launcher.display import open_display
from busrl.launcher.identity import Start
from busrl.launcher.pythons import require_here
from busrl.launcher.run import ALONE, Launch, close_run
from busrl.launcher.rundir import LOCK_S, OpenRun, locked, make_directories, opened, unlink_segments
from busrl.launcher.supervisor import is_titled
from busrl.paths import RunPaths
from busrl.ring import OfdLock
from busrl.states import HOST_NAME
from busrl.system import files
from busrl.topology import Topology

ASK_S = 2.0
MOST_INPUT = 1 << 16  # bytes of a line of standard input


def host_options(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    add = parser.add_argument
    add("endpoint", metavar="ENDPOINT", help="tcp://ADDRESS:PORT, as in bus.endpoint of the run; or -, for hosts.start")
    add("--keys", type=Path, metavar="FILE", help="the file that `busrl keys add NAME` printed there")
    add("--name", default="", help="this host's name there (default: that of the key)")
    add("--scratch", type=Path, metavar="DIR", help="where its files lie (default: below ~/.cache/busrl/hosts)")
    add("--wait", type=positive, default=60.0, metavar="S", help="give up if the run does not answer (default 60)")
    return command


def command(options: argparse.Namespace) -> int:
    """Run `busrl host`; returns its exit code."""
    endpoint, keys, name = options.endpoint, options.keys, options.name
    if endpoint == "-":
        endpoint, keys, name = from_input(sys.stdin.buffer, options.wait)
    elif keys is None:
        raise UserError("--keys FILE is needed: the file that `busrl keys add NAME` printed at home")
    return host(endpoint, keys, name, options.scratch, options.wait)


def host(endpoint: str, key_file: Path, name: str, scratch: Path | None, wait_s: float) -> int:
    """Work for the run at `endpoint` until it is over; returns the exit code. `wait_s`: the time to wait for home's
    answer."""
    check_endpoint(endpoint, keys=True)
    name = name or key_file.name.removesuffix(".key_secret")
    if not HOST_NAME.fullmatch(name):
        raise UserError(f"--name {name}: expected a name as `busrl keys add` takes it: letters, digits, ., _ and -; "
                        "give --name, or a file of keys with such a name")
    home = HostSource(endpoint, str(key_file.resolve()), name, "", 0)  # the ring comes with the answer
    setproctitle.setproctitle(f"busrl:host {name}")
    with Signals() as signals:
        while True:
            try:
                welcome = _join(home, wait_s, signals)
            except PeerLost as problem:
                if signals.count:
                    return 128 + signals.first
                print(f"busrl: {problem}", file=sys.stderr)
                return ALONE
            source = replace(home, ring_hex=welcome.ring.hex(), life=welcome.life)
            scratch_dir = scratch or scratch_of(welcome.ring, name)
            code = _work(welcome, source, scratch_dir, signals)
            if code != ALONE or signals.count or HostSource.read(RunPaths.of(scratch_dir).host_source).replaced:
                return code


def from_input(stream: BinaryIO, wait_s: float) -> tuple[str, Path, str]:
    """Endpoint, file of keys and name, which launch at home wrote to the input of its command (`hosts/placement.py`).
    The keys get a file that only this user can read. UserError: nothing came, or something else."""
    if not select.select([stream], [], [], wait_s)[0]:
        raise UserError(f"standard input: nothing came for {wait_s:g} s; `-` is for hosts.start of a run's topology")
    invitation = Invitation.of_line(stream.readline(MOST_INPUT))
    file = _cache() / f"{hashlib.sha256(invitation.keys.encode()).hexdigest()[:12]}-{invitation.name}.key_secret"
    files.make_folder(file.parent, "set XDG_CACHE_HOME there to a folder that can be written")
    files.replace(file, invitation.keys.encode())
    return invitation.endpoint, file, invitation.name


def _cache() -> Path:
    return files.user_folder("XDG_CACHE_HOME", ".cache") / "busrl" / "hosts"


def scratch_of(ring: bytes, name: str) -> Path:
    """The folder of a run on this host, by the ring that it claims from."""
    return _cache() / f"{ring.hex()[:12]}-{name}"


def _join(source: HostSource, wait_s: float, signals: Signals) -> q.Welcome:
    """Ask home to let this host join. UserError: it refuses. PeerTimeout: it does not answer."""
    link = Asking(relay_endpoint(source.endpoint), source.client, source.name)
    end = time.monotonic() + wait_s
    try:
        while True:
            try:
                reply = link.ask(q.HostJoin(build=busrl.__version__), ASK_S)
            except PeerLost:
                if link.refused:
                    raise UserError(
                        f"{source.endpoint} does not know the key of {source.name} ({link.key}): list it there "
                        f"(`busrl keys add {source.name} --public KEY`), or give --keys the file that `busrl keys add` "
                        "made for the run's key directory (bus.keys)"
                    ) from None
                if time.monotonic() > end or signals.count:
                    raise PeerTimeout(
                        f"{source.endpoint} did not answer for {wait_s:g} s, at {relay_endpoint(source.endpoint)}: see "
                        f"that the run is there (`busrl status`), that this host can reach the port, and that "
                        f"{source.name}'s key is listed (`busrl keys list` on the run's host)") from None
                continue
            if isinstance(reply, q.Welcome):
                return reply
            raise UserError(f"{source.endpoint}: {reply.text if isinstance(reply, q.Declined) else reply}")
    finally:
        link.close()


def _work(welcome: q.Welcome, source: HostSource, scratch: Path, signals: Signals) -> int:
    """Run this host's processes to their end; returns the exit code."""
    topology = Topology.from_json(welcome.topology.decode())
    require_here(topology.processes())
    with contextlib.closing(open_display(sys.stdout, time.monotonic)) as display:
        opened = open_host(scratch, topology, source, welcome.holds)
        display.log = opened.paths.log("launch")
        display.say(f"{topology.run.name}: host {source.name} in {opened.paths.root}, run at {source.endpoint}")
        for note in opened.notes:
            display.say(note)
        outcome = Launch(opened, display, signals).run()
        display.settle()
        close_run(opened)
        display.say(f"host {source.name}: {outcome.why}")
    return outcome.exit_code


# -- its directory -----------------------------------------------------------------------------------------------------

def open_host(scratch: Path, topology: Topology, source: HostSource, holds: int = 0) -> OpenRun:
    """Open a run on another host, in its scratch directory.

    The ring of an earlier start is adopted if it claims from the same ring of home under the same topology, and no
    later start has taken its place (`holds`: the life whose claims home has, 0: none). All other files of it are
    removed.
    """
    paths = RunPaths.of(scratch)
    make_directories("--scratch", paths.root, paths.logs)
    _end_earlier(paths, f"host {source.name}")
    with locked(paths) as lock:
        before = files.read_map(paths.host_source)
        same = paths.topology.is_file() and paths.topology.read_text() == topology.to_json()
        same = same and before.get("ring_hex") == source.ring_hex and holds in (0, before.get("life"))
        adopted = same and paths.ring_file.exists()
        if not adopted:
            for file in (paths.fates, paths.validate_fates, paths.run_json, paths.open_bin):
                file.unlink(missing_ok=True)
            unlink_segments(paths.ring_name)
        replace(source, life=before["life"] if adopted else source.life).write(paths.host_source)
        for endpoint in (paths.frontend, paths.backend):
            prepare(endpoint)
        return opened(paths, topology, lock, Start())


def _end_earlier(paths: RunPaths, title: str) -> None:
    """Kill an earlier start of this host here. It works on where its starter lost the connection and starts it once
    more; the newer one counts, here as at home."""
    holder = OfdLock(str(paths.lock("run"))).holder()
    if holder and is_titled(holder, title):
        with suppress(ProcessLookupError), open(os.pidfd_open(holder), "rb") as process:
            signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
            select.select([process], [], [], LOCK_S)
