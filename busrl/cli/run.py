"""Verbs about a run: `launch`, `check`, `schema`, `recipes`, `status`, `logs`, `audit` and `version`, and the
requests to a running run: `stop`, `pause`, `resume`, `checkpoint`, `set` and `scale`.

Talks to preflight, which reads and checks topologies, to `busrl.launcher`, and to the files and the bus of a run. A
request goes to the run's launch, which decides. Knows nothing of roles.

- The same run directory is the same run: a start there continues it, unless --resume never forbids it.
- A key that was set in flight stays set at the next start, over the file and over --set.
- `stop` also works where the bus does not: it then signals, through a pidfd, the launch that run.json names, if that
  pid also holds the run's lock. A pid alone is no proof.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import select
import signal
import sys
import time
import uuid
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

import busrl
from busrl import capabilities, launcher
from busrl.bus import Endpoint
from busrl.data.pretrained import task_prompts
from busrl.errors import BadEndpoint, BusNotReady, NoSuchRun, PeerTimeout, RingError, UserError, escaped
from busrl.launcher import pythons
from busrl.launcher.rundir import belongs_to_another
from busrl.ledger.controls import Controls
from busrl.pages import opened
from busrl.paths import RunPaths
from busrl.preflight import changeable, explain
from busrl.preflight.json_schema import json_schema
from busrl.preflight.load import load, materialise
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import OfdLock, Ring
from busrl.states import HeaderWord, RunPhase
from busrl.status import view
from busrl.status.reader import holder_of, summary_of
from busrl.status.words import printable
from busrl.system.files import LineFollower, as_map, read_map
from busrl.system.guardian import halted, stat_of
from busrl.topology import Topology
from busrl.topology.recorded import recorded


def launch(options: argparse.Namespace) -> int:
    """Run a topology; the exit code of the run."""
    if options.emit:
        print(capabilities.plug("hosts", "manifest")(options), end="")
        return 0
    run_dir = options.run_dir or (Path(options.resume) if options.resume not in ("auto", "never") else None)
    topology = _as_set_in_flight(load(options.topology, options.overrides, run_dir), options, run_dir)
    directory = directory_of(topology, options.run_dir, options.resume)
    if options.dry_run:
        print(escaped(opened(explain.dry_run(topology))), end="")
        return 0
    pythons.require_runnable(topology)
    topology = materialise(topology)
    if not RunPaths.of(directory).ring_file.exists():  # an adopted ring has its memory already
        explain.require_memory(topology)
    for text in explain.warnings(topology):
        print(escaped(opened(f"warning: {text}")), file=sys.stderr)
    explain.require_cores_and_disk(topology, directory)
    return launcher.launch(topology, directory, resume=options.resume != "never")


def _as_set_in_flight(topology: Topology, options: argparse.Namespace, run_dir: Path | None) -> Topology:
    """The topology with the keys that were set while the run of this directory ran. A ring that exists keeps its size,
    if that is enough."""
    if run_dir is None:
        return topology
    paths = RunPaths.of(run_dir)
    if more := Controls.read(paths).overrides():
        topology = load(options.topology, [*options.overrides, *more], run_dir)
    if not (paths.ring_file.exists() and paths.topology.is_file()):
        return topology
    return changeable.with_sizes_of(topology, recorded(paths.topology))


def check(options: argparse.Namespace) -> int:
    topology = load(options.topology, options.overrides)
    print(escaped(opened(explain.report(topology, options.verbose))), end="", flush=True)
    versions = pythons.versions_of(topology)
    for line in pythons.lines(topology, versions):
        print(line)
    pythons.require_runnable(topology, versions)
    explain.require_memory(topology)
    explain.require_cores_and_disk(topology, Path("runs"))
    return 0


def schema(_: argparse.Namespace) -> int:
    print(opened(json.dumps(json_schema(), indent=1, allow_nan=False)))
    return 0


def recipes(options: argparse.Namespace) -> int:
    print(opened(explain.recipes(options.names)))
    return 0


def directory_of(topology: Topology, run_dir: Path | None, resume: str) -> Path:
    """The directory of the run: --run-dir, that of --resume, or a new one named after the run and the time."""
    if resume in ("auto", "never"):
        return run_dir or Path("runs") / f"{topology.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = Path(resume)
    if run_dir is not None and run_dir.resolve() != directory.resolve():
        raise UserError(f"--run-dir {run_dir} and --resume {resume}: two different run directories; give one of them")
    if not RunPaths.of(directory).topology.is_file():
        raise UserError(
            f"--resume {resume}: expected auto, never, or a run directory (one that holds topology.json); a run goes "
            "on from the newest of its checkpoints and its log by itself"
        )
    return directory


def status(options: argparse.Namespace) -> int:
    print(opened(view.status(options.run_dir, as_json=options.json, host=options.host)))
    return 0


# -- logs -----

LOGS_EVERY_S = 0.25
PART, ALL = 1 << 20, 1 << 62


def logs(options: argparse.Namespace) -> int:
    paths = RunPaths.of(options.run_dir)
    if not paths.logs.is_dir():
        raise NoSuchRun(f"{paths.logs}: no logs there; name the directory that `busrl launch` or `busrl host` printed")
    if options.name and not paths.log(options.name).is_file():
        names = ", ".join(path.stem for path in _files(paths)) or "none"
        raise UserError(f"{options.name}: no process of that name has a log in {paths.logs}; there are {names}")
    with suppress(KeyboardInterrupt):
        _print(paths, options.name, options.follow)
    return 0


def _files(paths: RunPaths) -> list[Path]:
    return sorted(paths.logs.glob("*.log"))


def _on_a_terminal(line: bytes) -> bytes:
    """A line without what the terminal would obey: user code prints into logs, among others what a model wrote."""
    return escaped(line.decode(errors="backslashreplace")).encode()


def _print(paths: RunPaths, name: str, follow: bool) -> None:
    followers: dict[Path, LineFollower] = {}
    out = sys.stdout.buffer
    shown = _on_a_terminal if sys.stdout.isatty() else bytes
    while True:
        lives = follow and holder_of(paths) is not None  # before the files are read: their last lines come at the end
        files = [paths.log(name)] if name else _files(paths)
        width = max((len(path.stem) for path in files), default=0)
        for path in files:
            before = b"" if name else f"{path.stem:<{width}} | ".encode()
            log = followers.setdefault(path, LineFollower(path, ALL))
            while lines := log.new(rest=not lives, most=PART):
                out.writelines(before + shown(line) + b"\n" for line in lines)
        out.flush()
        if not lives:
            return
        time.sleep(LOGS_EVERY_S)


def launch_pid(paths: RunPaths) -> int | None:
    """The pid of the living `launch`, None if the run is not running."""
    run = read_map(paths.run_json)
    if not run:
        raise NoSuchRun(f"{paths.root}: no readable run.json, so this is no run directory; see `ls runs/`")
    if not paths.lock("run").is_file():
        return None
    holder = OfdLock(str(paths.lock("run"))).holder()  # looks, without taking the lock
    if holder is None:
        return None
    pid = run.get("launch_pid")
    if not isinstance(pid, int) or holder not in (pid, -1) or not stat_of(pid):
        raise PeerTimeout(
            f"{paths.root}: its launch (pid {pid}) is gone, but a child still holds the run's lock; children end with "
            "their parent: try again in a moment"
        )
    return pid


def audit(options: argparse.Namespace) -> int:
    make, text_of = (capabilities.plug("ledger/audit", place) for place in ("run_audit", "audit_text"))
    train = as_map(read_map(RunPaths.of(options.run_dir).topology).get("data")).get("train")
    report = make(options.run_dir, prompts=task_prompts(str(train)))
    looks = capabilities.plugs("audits")
    parts = [audited for look in looks if (audited := look(options.run_dir, options.waste)) is not None]
    # A run that such a part is all of has no groups, and no steps of its own.
    counted = options.waste and all(audited.beside for audited in parts)
    more, lines = capabilities.plug("observe", "waste")(options.run_dir) if counted else ({}, [])
    for audited in parts:
        found = {key: value for key, value in audited._asdict().items() if value is not None}
        more, lines = {**more, **found}, [*lines, *audited.lines()]
    if options.json:
        print(json.dumps({**report.to_json(), **more}, indent=2))
    else:
        print("\n".join(map(printable, "\n".join([text_of(report), *lines]).split("\n"))))
    return report.exit_code or int(any(audited.errors for audited in parts))


def version(_options: argparse.Namespace) -> int:
    print(f"busrl {busrl.__version__}, Python {sys.version.split()[0]}")
    for package in ("numpy", "pyzmq", "msgspec", "torch", "transformers"):
        try:
            print(f"{package} {version_of(package)}")
        except PackageNotFoundError:
            print(f"{package} is not installed")
    return 0


# -- requests to a running run: a message to its launch, which decides; sent until it is answered -----

AGAIN_S, READY_S = 0.5, 2.0
BUS_S = 5.0  # after which `stop` sends a signal instead
TELL_S, MOST_NAMED = 10.0, 4  # how often `stop` prints which processes it waits for, and how many of them


def control(options: argparse.Namespace) -> int:
    """Send the request, wait for the answer and print it; UserError if it was refused."""
    paths, verb = RunPaths.of(options.run_dir), options.control
    if launch_pid(paths) is None:
        how = summary_of(paths).get("outcome") or "not over"
        raise NoSuchRun(f"{paths.root}: no process runs it (the run is {how}), so there is nobody to {verb} it; a "
                        "value for its next start is given with `busrl launch --set`")
    answer = ask(paths, verb, getattr(options, "key", ""), getattr(options, "value", ""), options.wait)
    if not answer.ok:
        raise UserError(f"{verb}: {answer.text}")
    print(f"{paths.root}: {answer.text}")
    return 0


def ask(paths: RunPaths, verb: str, key: str, value: str, wait_s: float) -> m.ControlDone:
    """Send a request to the run's launch until it is carried out; the last answer. PeerTimeout names the process that
    has not answered, or not taken it up, or says that the run has ended meanwhile."""
    try:
        secret = paths.control_key.read_bytes()
    except PermissionError:
        whose = belongs_to_another(paths.root) or "it belongs to another user"
        raise UserError(f"{paths.root}: {whose}, and only they (or root) can {verb} it") from None
    except OSError as problem:
        raise PeerTimeout(f"{paths.control_key}: {problem.strerror}; is the run starting? Try again") from None
    request = m.Control(id=uuid.uuid4().hex, verb=verb, key=key, value=value, who=_requester(verb))
    request.proof = request.proof_with(secret)
    name, end, heard = f"control-{os.getpid()}", time.monotonic() + wait_s, None
    with closing(Endpoint(name, paths.frontend, paths.backend, subscribe=[topic(m.ControlDone, name)])) as bus:
        with suppress(BusNotReady):
            bus.ready(min(READY_S, wait_s))
        while (left := end - time.monotonic()) > 0:
            bus.send(request)
            answer = bus.recv(min(AGAIN_S, left))
            if not isinstance(answer, m.ControlDone) or answer.id != request.id or m.is_from_another(answer):
                if answer is None and launch_pid(paths) is None:
                    raise PeerTimeout(f"{paths.root}: the run ended before {verb} was carried out")
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


def _requester(verb: str) -> str:
    """The sender of a request: the user, this process and its verb."""
    user = f"user {os.getuid()}"
    with suppress(KeyError):
        user = pwd.getpwuid(os.getuid()).pw_name
    return f"{user} (pid {os.getpid()}, busrl {verb})"


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
        how = _ask_to_stop(paths, descriptor, pid, options)
        print(f"{paths.root}: asked process {pid} to stop{how}", flush=True)
        _await(descriptor, pid, paths, options.wait)
    finally:
        os.close(descriptor)
    print(f"{paths.root}: ended")
    return 0


def _ask_to_stop(paths: RunPaths, descriptor: int, pid: int, options: argparse.Namespace) -> str:
    """Request the end by a message; by a signal, which cannot be lost, if no answer comes. How it was done, if not by
    the message."""
    if paths.control_key.exists() and os.access(paths.control_key, os.R_OK):
        with suppress(PeerTimeout, BadEndpoint, NoSuchRun):
            answer = ask(paths, "stop", "", "now" if options.now else "", min(BUS_S, options.wait))
            if answer.ok:
                return ""
    try:
        for _ in range(2 if options.now else 1):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except ProcessLookupError:
        return ", which has just ended"
    except PermissionError:
        whose = belongs_to_another(paths.root) or "it belongs to another user"
        raise UserError(f"{paths.root}: {whose}, and only they (or root) can stop process {pid}") from None
    return " by SIGTERM, as no message was answered"


def _await(descriptor: int, pid: int, paths: RunPaths, wait_s: float) -> None:
    end, printed = time.monotonic() + wait_s, ""
    while (left := end - time.monotonic()) > 0:
        if select.select([descriptor], [], [], min(left, TELL_S))[0]:  # a pidfd is readable when its process has ended
            return
        if (still := still_there(paths, pid)) != printed and left > TELL_S:
            print(f"{paths.root}: {still}", file=sys.stderr, flush=True)
            printed = still
    raise PeerTimeout(
        f"{paths.root}: process {pid} has not ended {wait_s:g} s after it was asked: {still_there(paths, pid)}; see "
        f"{paths.logs}, wait longer (--wait), or end it with: kill -9 {pid} (the next launch continues from the ledger)"
    )


def still_there(paths: RunPaths, pid: int) -> str:
    """A text that names the processes that keep a stopping run from its end."""
    if how := halted(pid):
        return f"its launch is {how}"
    try:
        with closing(Ring.attach(paths.ring_name, read_only=True)) as ring:
            phase, table = ring.header(HeaderWord.RUN_STATE), ring.processes()
            living = [process for process in table if not process.remote and not ring.is_dead(process.index)]
    except (RingError, OSError):
        return "it has no ring: its launch begins, or audits the run and writes summary.json"
    if phase == RunPhase.RUNNING:
        return f"its launch has not taken it up (load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores)"
    doing = [f"{process.label} ({halted(process.pid) or process.activity or process.state})" for process in living]
    if not doing:
        return "all its processes have ended; its launch closes the ring"
    more = f" and {len(doing) - MOST_NAMED} more" if len(doing) > MOST_NAMED else ""
    return f"{', '.join(doing[:MOST_NAMED])}{more} {'has' if len(doing) == 1 else 'have'} still to end"
