"""A run from Python, for notebooks and scripts: `busrl.check` looks at a topology, `busrl.launch` starts a run,
`busrl.attach` finds one, and a `Run` is read and ended.

Starts the command `busrl` and reads the files of the run directory. Knows nothing of the ring and the bus.

- A run does not depend on the program that started it: it goes on when that ends or when a kernel is interrupted.
- A topology is a file, or a map of sections as in one whose paths are relative to the current directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busrl.errors import NoSuchRun, PeerTimeout, UserError
from busrl.launcher import pythons
from busrl.pages import opened
from busrl.paths import RunPaths
from busrl.preflight import explain
from busrl.preflight.load import load
from busrl.status.reader import holder_of
from busrl.status.view import status
from busrl.system.files import LineFollower, read_map
from busrl.system.imports import interpreter
from busrl.topology import Topology

TopologyLike = Mapping[str, Any] | str | os.PathLike[str]
BUSRL = (*interpreter(), "busrl.cli")
LOOK_S = 0.5
START_S = 300.0  # within which a launch checks the model and tokenizes prompts
ALL = 1 << 40  # bytes of a file: all of it


@dataclass(frozen=True)
class Checked:
    """A topology that can be run, by `check`.

    `settings`: every key with its value, frozen, by section (`settings.learner.lr`), and what follows from them
    (`settings.derived`). `report`: the page that `busrl check --verbose` prints. `warnings`: a sentence each.
    """

    settings: Topology
    report: str
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return self.report


def check(topology: TopologyLike, overrides: Sequence[str] = ()) -> Checked:
    """Try a topology as `busrl check` does, its first prompt and its reward included; starts and changes nothing.

    `overrides` are those of --set: `["run.max_steps=100"]`. Raises TopologyError, whose `problems` have place, value,
    rule and remedy each, for what is wrong in it; another UserError for what this machine lacks.
    """
    with _as_file(topology) as file:
        settings = load(file, overrides)
        pythons.require_runnable(settings)
        explain.require_memory(settings)
        explain.require_cores_and_disk(settings, Path("runs"))
        return Checked(settings, opened(explain.report(settings)), tuple(map(opened, explain.warnings(settings))))


def launch(
    topology: TopologyLike, run_dir: str | os.PathLike[str] | None = None, overrides: Sequence[str] = (),
) -> Run:
    """Start a run, or go on with the one in `run_dir`, and return once its directory is there.

    `run_dir` is a new one below `runs/` where none is given. `overrides` are those of --set. Raises UserError with what
    `busrl launch` says against it, PeerTimeout if the run is not there within five minutes.
    """
    root = Path(run_dir or _new(topology))
    settings = [part for override in overrides for part in ("--set", override)]
    with _as_file(topology) as file, tempfile.TemporaryFile() as output:
        command = [*BUSRL, "launch", str(file), "--run-dir", str(root), *settings]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        run = Run(RunPaths.of(root), child)
        _await_start(run, child)
        if code := child.poll():
            output.seek(0)
            raise UserError(output.read().decode(errors="replace").strip() or f"busrl launch ended with {code}")
    return run


def _await_start(run: Run, child: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while read_map(run.paths.run_json).get("launch_pid") != child.pid and child.poll() is None:
        if time.monotonic() > end:
            child.kill()
            raise PeerTimeout(f"busrl launch (pid {child.pid}): no run in {run.paths.root} after {START_S:g} s")
        run.pause()


def _name(topology: TopologyLike) -> str:
    """The run's name as part of a file's name, before it is checked."""
    if not isinstance(topology, Mapping):
        return Path(topology).stem
    run = topology.get("run")
    return re.sub(r"[^\w.-]", "-", str(run.get("name", "run")))[:64] if isinstance(run, Mapping) else "run"


def _new(topology: TopologyLike) -> Path:
    return Path("runs") / f"{_name(topology)}-{time.strftime('%Y%m%d-%H%M%S')}"


def attach(run_dir: str | os.PathLike[str]) -> Run:
    """Find the run of a directory, whether it runs, stands still or is over; NoSuchRun if it holds none."""
    paths = RunPaths.of(run_dir)
    if not paths.topology.is_file():
        raise NoSuchRun(f"{paths.root}: no run directory (it has no topology.json)")
    return Run(paths)


@dataclass
class Run:
    """A run by its directory. With `follow` an iterator waits for more until the run ends; without, it ends at once."""

    paths: RunPaths
    child: subprocess.Popen[bytes] | None = None

    @property
    def live(self) -> bool:
        """True while a launch has the directory locked."""
        return holder_of(self.paths) is not None

    @property
    def topology(self) -> dict[str, Any]:
        """Every key with its value."""
        return read_map(self.paths.topology)

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of its end, with `outcome` and `why`; empty before."""
        return {} if self.live else read_map(self.paths.summary)

    def status(self) -> dict[str, Any]:
        """The object of `busrl status --json` (docs/run-directory.md)."""
        answer: dict[str, Any] = json.loads(status(self.paths.root, as_json=True))
        return answer

    def metrics(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """A map per step (docs/metrics.md); the file's other rows, which tell of idle waits, are left out."""
        return (row for row in self._rows(self.paths.metrics, follow) if "kind" not in row)

    def samples(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """The samples that the run writes as text, `log.samples` of each step."""
        return self._rows(self.paths.samples, follow)

    def validation(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """A map per round and set."""
        return self._rows(self.paths.validation, follow)

    def errors(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Warnings and errors of every process."""
        return self._rows(self.paths.errors, follow)

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code of the run, or -1 if another program started it; PeerTimeout if it has not ended by then."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self.live or (self.child is not None and self.child.poll() is None):
            if end is not None and time.monotonic() > end:
                raise PeerTimeout(f"{self.paths.root}: pid {holder_of(self.paths)} still runs it after {timeout_s:g} s")
            self.pause()
        return -1 if self.child is None else self.child.wait()

    def stop(self, timeout_s: float = 120.0) -> None:
        """End it in order, as `busrl stop`; UserError with what that says if it did not end."""
        command = [*BUSRL, "stop", str(self.paths.root), "--wait", f"{timeout_s:g}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s + 60)
        if done.returncode:
            raise UserError(done.stderr.strip() or done.stdout.strip())

    def _rows(self, path: Path, follow: bool) -> Iterator[dict[str, Any]]:
        lines = LineFollower(path, ALL)
        while True:
            live = follow and self.live  # before the look, which then sees the last lines of an ended run
            for line in lines.new():
                with contextlib.suppress(ValueError):  # damaged
                    if isinstance(row := json.loads(line), dict):
                        yield row
            if not live:
                return
            self.pause()

    def pause(self) -> None:
        """Wait until the run ends, at most the time between two looks."""
        pid = self.child.pid if self.child is not None and self.child.poll() is None else holder_of(self.paths)
        try:
            descriptor = os.pidfd_open(pid or 0)
        except OSError:
            return
        with open(descriptor, "rb", buffering=0):
            select.select([descriptor], [], [], LOOK_S)


@contextlib.contextmanager
def _as_file(topology: TopologyLike) -> Iterator[Path]:
    """The file of a topology; that of a map lies in the current directory, to which its paths are relative."""
    if not isinstance(topology, Mapping):
        yield Path(topology)
        return
    with tempfile.NamedTemporaryFile("w", prefix=f".{_name(topology)}-", suffix=".toml", dir=".") as file:
        file.write(toml(topology))
        file.flush()
        yield Path(file.name)


def toml(topology: Mapping[str, Any]) -> str:
    """A map of sections as TOML; UserError for a value that TOML cannot express."""
    return "".join(f"{_string(name)} = {_toml(value)}\n" for name, value in topology.items())


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_string(name)} = {_toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, (str, os.PathLike)):
        return _string(os.fspath(value))
    if isinstance(value, float):
        return repr(value)  # inf and nan as in TOML
    if not isinstance(value, int):
        raise UserError(f"a topology has tables, lists, strings, numbers, true and false, and no {value!r}")
    return json.dumps(value)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
