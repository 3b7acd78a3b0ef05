"""`busrl launch`: one run from its topology to its summary; and `busrl host`: its processes on another host.

Talks to everything a run has on this host: directory, ring, children, bus; `host` also to home's relay, which says who
joins and with which topology. Never imports torch: what needs it (making a quickstart model, the roles) runs in
processes of its own. Knows nothing of tasks or weights: on another host satellite and relay carry those.

- Everything below the scratch directory is that host's alone; deleting all of it costs tokens, never a sample.
- Exit codes of `host` say what whoever started it should do: 0 the run is over, 2 mend something, 3 the run is lost to
  this host (start it again where it should work), any other: start it again here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TextIO

import setproctitle

import busrl
from busrl.bus.security import check_endpoint, relay_endpoint
from busrl.errors import BusrlError, MachineError, PeerLost, RunFinished, UserError
from busrl.hosts import link_messages as h
from busrl.hosts.invitation import HostSource, Invitation
from busrl.hosts.link import Asking
from busrl.launch.children import Interrupted, Signals
from busrl.launch.display import Display, open_display
from busrl.launch.identity import made_prompts
from busrl.launch.pythons import require_here
from busrl.launch.run import ALONE, Launch, close_run
from busrl.launch.rundir import open_host, open_run
from busrl.launch.summary import RunOutcome, build, final_lines
from busrl.ledger.audit import audit
from busrl.paths import RunPaths
from busrl.preflight.load import materialise
from busrl.system import files
from busrl.topology import Topology

__all__ = ["from_input", "host", "launch"]

ASK_S = 2.0
MOST_INPUT = 1 << 16  # bytes of a line of standard input


def launch(
    topology: Topology, run_dir: str | os.PathLike[str], *, resume: bool = True, stream: TextIO | None = None,
) -> int:
    """Run a topology in a directory; the exit code: 0 if its goal was reached, 128 + n after signal n, else 1.

    Adopts what an earlier launch left in the directory; `resume=False` refuses a directory that holds a run.
    """
    setproctitle.setproctitle("busrl:launch")
    with Signals() as signals, contextlib.closing(open_display(stream or sys.stdout, time.monotonic)) as display:
        topology = materialise(topology)
        try:
            opened = open_run(run_dir, topology, resume=resume)
        except RunFinished as nothing_to_do:
            display.say(str(nothing_to_do))
            return nothing_to_do.exit_code
        display.log = opened.paths.log("launch")
        display.say(f"{topology.run.name} in {opened.paths.root}")
        for note in opened.notes:
            display.say(note)
        running = Launch(opened, display, signals)
        outcome = running.run()
        display.settle()
        for line in opened.restore():
            display.say(line)
        still_open = close_run(opened)
        if opened.displaced:  # the run is another launch's, and so is its summary
            return outcome.exit_code
        return _conclude(opened.paths.root, running, outcome, still_open, signals, display)


def _conclude(
    root: Path, running: Launch, outcome: RunOutcome, still_open: int, signals: Signals, display: Display
) -> int:
    """Audit, summary, the last lines. Nothing is held any more."""
    report, unaudited = None, ""
    try:
        with signals.interrupting():
            report = audit(root, prompts=made_prompts(running.topology))
    except Interrupted as name:
        unaudited = f"{name} interrupted it; `busrl audit {root}` makes it"
    except (OSError, BusrlError) as problem:  # whatever happened to the run's files, a run has a summary
        unaudited = str(problem)
    if unaudited:
        display.say(f"no audit is made: {unaudited}")
    if outcome.exit_code == 0 and (report is None or report.errors):
        said = "the audit found errors" if report else f"no audit is made: {unaudited}"
        outcome = RunOutcome("failed", f"the goal was reached, but {said}", 1)
    summary = build(
        outcome, running.progress, report, still_open, running.usage.summary(), running.residence.summary(),
        running.crashes.missing(),
    )
    paths = RunPaths.of(root)
    try:
        files.replace(paths.summary, json.dumps(summary, indent=2, ensure_ascii=False, default=str).encode() + b"\n")
    except MachineError as problem:
        display.say(f"no summary.json is written: {problem}")
    for line in final_lines(summary, report, paths):
        display.say(line)
    return outcome.exit_code


# -- on another host ---------------------------------------------------------------------------------------------------

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
    """Endpoint, file of keys and name as launch at home wrote them to the input of its command (`hosts/placement.py`).
    The keys get a file of this user alone. UserError: nothing came, or something else."""
    if not select.select([stream], [], [], wait_s)[0]:
        raise UserError(f"standard input: nothing came for {wait_s:g} s; `-` is for hosts.start of a run's topology")
    found = Invitation.of_line(stream.readline(MOST_INPUT))
    file = _cache() / f"{hashlib.sha256(found.keys.encode()).hexdigest()[:12]}-{found.name}.key_secret"
    files.make_folder(file.parent, "set XDG_CACHE_HOME there to a folder that can be written")
    files.replace(file, found.keys.encode())
    return found.endpoint, file, found.name


def _cache() -> Path:
    return files.user_folder("XDG_CACHE_HOME", ".cache") / "busrl" / "hosts"


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
                if link.refused:
                    raise UserError(
                        f"{source.endpoint} does not know the key of {source.name} ({link.key}): list it there "
                        f"(`busrl keys add {source.name} --public KEY`), or give --keys the file that `busrl keys add` "
                        "made for the run's key directory (bus.keys)"
                    ) from None
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
