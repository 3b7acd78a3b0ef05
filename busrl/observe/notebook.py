"""A run from Python, for notebooks and scripts: `launch` starts one, `attach` finds one, and a `Run` is read and ended.

Starts the command `busrl` and reads the files of the run directory. Knows nothing of the ring and the bus.

- The run does not depend on the notebook: it goes on when that ends or when its kernel is interrupted.
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
from busrl.paths import RunPaths
from busrl.status.reader import holder_of
from busrl.status.view import status
from busrl.system.files import LineFollower, read_map
from busrl.system.imports import interpreter

BUSRL = (*interpreter(), "busrl.cli")
LOOK_S = 0.5
START_S = 300.0  # within which a launch checks the model and tokenizes prompts
ALL = 1 << 40  # bytes of a file: all of it


def launch(
    topology: Mapping[str, Any] | str | os.PathLike[str], run_dir: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
) -> Run:
    """Start a run, or go on with the one in `run_dir`, and return once its directory is there.

    `topology` is a file, or a map of sections as in one (`{"run": {"max_steps": 100}, "process": [...]}`) whose paths
    are relative to the current directory. `overrides` are those of --set. UserError has what `busrl launch` says
    against it.
    """
    if isinstance(topology, Mapping):
        with _as_file(topology) as file:
            return launch(file, run_dir or _new(_name(topology)), overrides)
    root = Path(run_dir or _new(Path(topology).stem))
    settings = [part for override in overrides for part in ("--set", override)]
    command = [*BUSRL, "launch", os.fspath(topology), "--run-dir", str(root), *settings]
    with tempfile.TemporaryFile() as output:
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


def _name(topology: Mapping[str, Any]) -> str:
    """The run's name as part of a file's name, before launch has checked it."""
    run = topology.get("run")
    return re.sub(r"[^\w.-]", "-", str(run.get("name", "run")))[:64] if isinstance(run, Mapping) else "run"


def _new(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def attach(run_dir: str | os.PathLike[str]) -> Run:
    """The run of a directory, whether it runs, stands still or is over."""
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
        """A map per step (docs/metrics.md)."""
        return self._rows(self.paths.metrics, follow)

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
def _as_file(topology: Mapping[str, Any]) -> Iterator[Path]:
    """A topology file in the current directory, to which its paths are relative, while launch reads it."""
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
