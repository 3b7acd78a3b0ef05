"""`busrl host`: the processes of one run on another host, from the first contact with home to their end.

Talks to home's relay (who joins, with which topology), to a scratch directory on this host, and to `Launch`, which
starts and watches children as it does at home. Knows nothing of tasks or weights: satellite and relay carry those.

- Everything below the scratch directory is this host's alone; deleting all of it costs tokens, never a sample.
- Exit codes say what whoever started it should do: 0 the run is over, 2 mend something, 3 the run is lost to this host
  (start it again where it should work), any other: start it again here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import setproctitle

import busrl
from busrl import files
from busrl.bus.link import Asking
from busrl.bus.security import check_endpoint, relay_endpoint
from busrl.config import HostSource, Topology
from busrl.config.hosts import Invitation
from busrl.errors import PeerLost, UserError
from busrl.launch.children import Signals
from busrl.launch.display import open_display
from busrl.launch.run import ALONE, Launch, close_run
from busrl.launch.rundir import open_host
from busrl.paths import RunPaths
from busrl.protocol import hosts as h

ASK_S = 2.0
MOST_INPUT = 1 << 16


def host(endpoint: str, key_file: Path, name: str, scratch: Path | None, wait_s: float) -> int:
    """Work for the run at `endpoint` until it is over; the exit code. `wait_s`: for an answer of home."""
    check_endpoint(endpoint, keys=True)
    name = name or key_file.name.removesuffix(".key_secret")
    known = HostSource(endpoint, str(key_file.resolve()), name, "", 0)
    setproctitle.setproctitle(f"busrl:host {name}")
    with Signals() as signals:
        while True:
            try:
                welcome = _joined(known, wait_s, signals)
            except PeerLost as problem:
                if signals.count:
                    return 128 + signals.first
                print(f"busrl: {problem}", file=sys.stderr)
                return ALONE
            source = replace(known, ring_hex=welcome.ring.hex(), life=welcome.life)
            scratch_dir = scratch or scratch_of(welcome.ring, name)
            code = _work(welcome, source, scratch_dir, signals)
            if code != ALONE or signals.count or HostSource.read(RunPaths.of(scratch_dir).host_source).replaced:
                return code


def from_input(stream: BinaryIO, wait_s: float) -> tuple[str, Path, str]:
    """Endpoint, file of keys and name as launch at home wrote them to the input of its command (`launch/placement.py`).
    The keys get a file of this user alone. UserError: nothing came, or something else."""
    if not select.select([stream], [], [], wait_s)[0]:
        raise UserError(f"standard input: nothing came for {wait_s:g} s; `-` is for hosts.start of a run's topology")
    found = Invitation.of_line(stream.readline(MOST_INPUT))
    file = _cache() / f"{hashlib.sha256(found.keys.encode()).hexdigest()[:12]}-{found.name}.key_secret"
    file.parent.mkdir(parents=True, exist_ok=True)
    files.replace(file, found.keys.encode())
    return found.endpoint, file, found.name


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")) / "busrl" / "hosts"


def scratch_of(ring: bytes, name: str) -> Path:
    """Where this host keeps what belongs to a run, by the ring that it claims from."""
    return _cache() / f"{ring.hex()[:12]}-{name}"


def _joined(source: HostSource, wait_s: float, signals: Signals) -> h.Welcome:
    """What home says to this host. UserError: it refuses. PeerTimeout: it does not answer."""
    link = Asking(relay_endpoint(source.endpoint), source.client, source.name)
    end = time.monotonic() + wait_s
    try:
        while True:
            try:
                reply = link.ask(h.HostJoin(build=busrl.__version__), ASK_S)
            except PeerLost:
                if time.monotonic() > end or signals.count:
                    raise
                continue
            if isinstance(reply, h.Welcome):
                return reply
            raise UserError(f"{source.endpoint}: {reply.text if isinstance(reply, h.Refused) else reply}")
    finally:
        link.close()


def _work(welcome: h.Welcome, source: HostSource, scratch: Path, signals: Signals) -> int:
    """Run this host's processes to their end; the exit code."""
    topology = Topology.from_json(welcome.topology.decode())
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
