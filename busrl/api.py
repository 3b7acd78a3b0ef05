"""A run from Python, for notebooks and scripts: `busrl.check` looks at a topology, `busrl.launch` starts a run,
`busrl.attach` finds one, and a `Run` is read and ended.

Starts the command `busrl` and reads the files of the run directory. Knows nothing of the ring and the bus.

- A run does not depend on the program that started it: it goes on when that ends or when a kernel is interrupted; a
  `with` ends it.
- A topology is a file, or a map of sections as in one whose paths are relative to the current directory.
- What the command line prints against something is raised here in the same words.
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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from busrl.errors import BugError, BusrlError, NoSuchRun, PeerTimeout, RunFailed, TopologyError, UserError
from busrl.launcher import pythons
from busrl.launcher.supervisor import is_titled
from busrl.pages import opened
from busrl.paths import RunPaths
from busrl.preflight import explain
from busrl.preflight.load import load
from busrl.status.reader import holder_of, summary_of
from busrl.status.view import status
from busrl.system.files import LineFollower, read_map
from busrl.system.imports import interpreter
from busrl.topology import Topology

TopologyLike = Mapping[str, Any] | str | os.PathLike[str]
Overrides = Mapping[str, Any] | Sequence[str]
BUSRL = (*interpreter(), "busrl.cli")
LOOK_S = 0.5
START_S = 300.0  # within which a launch checks the model and tokenizes prompts
END_S = 120.0  # for a launch whose caller was interrupted before it had the run
ALL = 1 << 40  # bytes of a file: all of it
SAID = 1 << 20  # bytes of what a launch prints until its run is there


@dataclass(frozen=True, repr=False)
class Checked:
    """A topology that can be run, and what `check` says of it.

    `settings`: every key with its value, frozen, by section (`settings.learner.lr`), and what follows from them
    (`settings.derived`). `report`: the page that `busrl check --verbose` prints. `warnings`: a sentence each.
    """

    settings: Topology
    report: str
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        return self.report


def check(topology: TopologyLike, overrides: Overrides = ()) -> Checked:
    """Try a topology as `busrl check` does, its first prompt and its reward included; starts and changes nothing.

    `overrides` are those of --set: `{"run.max_steps": 100}` or `["run.max_steps=100"]`. Raises TopologyError, whose
    `problems` have place, value, rule and remedy each, for what is wrong in it; another UserError or a MachineError
    for what this machine lacks.
    """
    with _as_file(topology) as file, _words_of_a_reader(topology, file):
        settings = load(file, _settings(overrides))
        pythons.require_runnable(settings)
        explain.require_memory(settings)
        explain.require_cores_and_disk(settings, Path("runs"))
        texts = explain.report(settings), *explain.warnings(settings)
        report, *more = (_said(text, topology, file) for text in texts)
        return Checked(settings, report, tuple(more))


def launch(
    topology: TopologyLike, run_dir: str | os.PathLike[str] | None = None, overrides: Overrides = (),
) -> Run:
    """Start a run, or go on with the one in `run_dir`, and return once its directory is there.

    `run_dir` is a new one below `runs/` where none is given. `overrides` are those of --set. What `busrl launch` warns
    of is a UserWarning. Raises UserError with what it says against the start, PeerTimeout if the run is not there
    within five minutes. An interrupt (Ctrl-C) before the run is there ends its launch.
    """
    root = Path(run_dir or _new(topology))
    settings = [part for setting in _settings(overrides) for part in ("--set", setting)]
    with _as_file(topology) as file, tempfile.TemporaryFile() as output:
        command = [*BUSRL, "launch", str(file), "--run-dir", str(root), *settings]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        run = Run(RunPaths.of(root), child)
        try:
            is_there = _await_start(run.paths, child)
            text = os.pread(output.fileno(), SAID, 0).decode(errors="replace")  # a seek would move the launch's place
            _report(_said(text, topology, file), is_there, child.returncode)
        except BaseException:  # an interrupt too: nobody has a `Run` yet by which to end it
            _end(child)
            raise
    return run


def _await_start(paths: RunPaths, child: subprocess.Popen[bytes]) -> bool:
    """Wait for the run of a launch; False if it ended without one."""
    end = time.monotonic() + START_S
    while read_map(paths.run_json).get("launch_pid") != child.pid:
        if child.poll() is not None:
            return read_map(paths.run_json).get("launch_pid") == child.pid
        if time.monotonic() > end:
            raise PeerTimeout(f"busrl launch (pid {child.pid}): no run in {paths.root} after {START_S:g} s")
        _await_end(child.pid)
    return True


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()


def _await_end(pid: int) -> None:
    """Wait until a process ends, at most the time between two looks."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # a process that cannot be seen from here
        select.select([], [], [], LOOK_S)
        return
    with open(descriptor, "rb", buffering=0):
        select.select([descriptor], [], [], LOOK_S)


def _report(text: str, is_there: bool, code: int | None) -> None:
    """Raise what a launch printed against its start, warn of what it warned of, and of a run that is finished already.
    """
    if not is_there and code:
        raise _refusal(text, code)
    for warning in re.findall(r"^warning: (.*)$", text, re.M) if is_there else [text.strip()]:
        warnings.warn(warning, stacklevel=3)


def _refusal(text: str, code: int) -> BusrlError:
    """The error that a command printed before it ended with this code."""
    _, _, said = f"\n{text}".partition("\nbusrl: ")
    family = BugError if code == BugError.exit_code else UserError
    return family(said.strip() or text.strip() or f"the command busrl ended with {code}")


def attach(run_dir: str | os.PathLike[str]) -> Run:
    """Find the run of a directory, whether it runs, stands still or is over; NoSuchRun if it holds none."""
    paths = RunPaths.of(run_dir)
    if not paths.topology.is_file():
        raise NoSuchRun(f"{paths.root}: no run directory (it has no topology.json)")
    return Run(paths)


@dataclass(eq=False, repr=False)
class Run:
    """A run by its directory. A `with` ends it in order, also when an exception or an interrupt (Ctrl-C) leaves it.

    Iterators yield what is there and end. With `follow` they wait for more until the run is over, and raise RunFailed,
    as `wait` does, if it has failed.
    """

    paths: RunPaths
    child: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        state = "running" if self.live else self.summary.get("outcome") or "not ended in order"
        return f"<busrl.Run {self.paths.root}: {state}>"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def live(self) -> bool:
        """True from the start of its launch until that has written the summary."""
        return self._pid() is not None

    @property
    def topology(self) -> dict[str, Any]:
        """Every key with its value, by section."""
        return read_map(self.paths.topology)

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of its end, with `outcome` ("finished", "stopped" or "failed") and `why`; empty before, and where
        its launch was killed."""
        return {} if self.live else summary_of(self.paths)

    def status(self) -> dict[str, Any]:
        """The object of `busrl status --json` (docs/run-directory.md)."""
        answer: dict[str, Any] = json.loads(status(self.paths.root, as_json=True))
        return answer

    def metrics(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """A map per step: `step`, `reward`, `loss`, `seconds`, ... with lengths in tokens (docs/metrics.md)."""
        return (row for row in self._rows(self.paths.metrics, follow) if "kind" not in row)

    def samples(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """The samples that the run writes as text, `log.samples` of each step: `step`, `prompt`, `completion`,
        `reward`, `versions`, ... (docs/run-directory.md)."""
        return self._rows(self.paths.samples, follow)

    def validation(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """A map per round and set (docs/evaluation.md)."""
        return self._rows(self.paths.validation, follow)

    def errors(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Warnings and errors of every process: `time` in seconds since 1970, `severity`, `process`, `text`."""
        return self._rows(self.paths.errors, follow)

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the run is over; its summary. One that was stopped has not failed.

        Raises RunFailed with the process that is to blame and why, or if the launch was killed; PeerTimeout if the run
        is not over after `timeout_s` seconds.
        """
        self._await_summary(timeout_s)
        return self._ended_well()

    def stop(self, timeout_s: float = 120.0) -> None:
        """End it in order, as `busrl stop`, and wait for its summary, unless it is over; UserError with what that
        command says, or PeerTimeout, if it has not ended after `timeout_s` seconds."""
        if not self.live:
            return
        command = [*BUSRL, "stop", str(self.paths.root), "--wait", f"{timeout_s:g}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s + 60)
        if done.returncode and self.live:
            raise _refusal(done.stderr or done.stdout, done.returncode)
        self._await_summary(timeout_s)

    def _pid(self) -> int | None:
        """The launch of the newest start until its end, at which it audits a run that it no longer holds; else a
        process that it left running."""
        launch, holder = read_map(self.paths.run_json).get("launch_pid"), holder_of(self.paths)
        if self.child is not None and self.child.poll() is None:
            return self.child.pid
        is_launch = isinstance(launch, int) and is_titled(launch, "launch")
        return launch if is_launch and (holder is not None or not summary_of(self.paths)) else holder

    def _await_summary(self, timeout_s: float | None) -> None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while (pid := self._pid()) is not None:
            if end is not None and time.monotonic() > end:
                raise PeerTimeout(f"{self.paths.root}: its launch (pid {pid}) still runs after {timeout_s:g} s")
            _await_end(pid)

    def _ended_well(self) -> dict[str, Any]:
        """The summary of a run that is over; RunFailed if it says so, or if there is none."""
        summary, root = self.summary, self.paths.root
        if summary.get("outcome") == "failed":
            raise RunFailed(f"{root}: {summary.get('why')}")
        if not summary:
            log = self.paths.log("launch")
            raise RunFailed(
                f"{root}: its launch was killed, or the machine went down, so there is no summary; see {log}. "
                "Launch it again with this run_dir: it goes on, and what was trained is trained"
            )
        return summary

    def _rows(self, path: Path, follow: bool) -> Iterator[dict[str, Any]]:
        lines = LineFollower(path, ALL)
        while True:
            pid = self._pid() if follow else None  # before the look, which then sees the last lines of an ended run
            for line in lines.new():
                with contextlib.suppress(ValueError):  # damaged
                    if isinstance(row := json.loads(line), dict):
                        yield row
            if pid is None:
                break
            _await_end(pid)
        if follow:
            self._ended_well()


# -- a topology as a file ----------------------------------------------------------------------------------------------


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


def _name(topology: TopologyLike) -> str:
    """The run's name as part of a file's name, before it is checked."""
    if not isinstance(topology, Mapping):
        return Path(topology).stem
    run = topology.get("run")
    return re.sub(r"[^\w.-]", "-", str(run.get("name", "run")))[:64] if isinstance(run, Mapping) else "run"


def _new(topology: TopologyLike) -> Path:
    return Path("runs") / f"{_name(topology)}-{time.strftime('%Y%m%d-%H%M%S')}"


def _said(text: str, topology: TopologyLike, file: Path) -> str:
    """A text as the command line has it, of a map without the name of the file that it was written to."""
    if isinstance(topology, Mapping):
        text = re.sub(rf"{re.escape(str(file))}(:\d+)?", "topology", text)
    return opened(text)


@contextlib.contextmanager
def _words_of_a_reader(topology: TopologyLike, file: Path) -> Iterator[None]:
    """Put what an error of this block says into the words of the command line."""
    try:
        yield
    except BusrlError as error:
        error.args = (_said(str(error), topology, file),)
        if isinstance(error, TopologyError):
            error.problems = tuple(
                replace(problem, **{name: _said(text, topology, file) for name, text in vars(problem).items()})
                for problem in error.problems
            )
        raise


def _settings(overrides: Overrides) -> list[str]:
    """The texts of --set."""
    if isinstance(overrides, Mapping):
        return [f"{key}={_toml(value)}" for key, value in overrides.items()]
    return [overrides] if isinstance(overrides, str) else list(overrides)


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
