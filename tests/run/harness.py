"""Starts real runs for tests: `busrl launch` as a child, watched through the files and the ring that any user has."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import warm

from busrl.errors import RingError
from busrl.ledger.audit import AuditReport, audit
from busrl.paths import SHM, RunPaths
from busrl.ring import Process, Ring
from busrl.system.files import whole_file

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    "learner.trigger.n_min=8",
    "groups.size=4",
    "learner.warmup_groups=0",
    "learner.checkpoint_every=10",
    "validation.samples=32",
    "generation.max_batch=64",
]
READ_AT_START = {"PYTHONPATH", "HOME", "PATH", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD"}
LIMIT_S = 150.0
LOOK_EVERY_S = 0.01


class Run:
    """One `busrl launch` and the run directory that it writes. It may be started again in the same directory.
    `prefix`: what its command stands behind, to be in another namespace, say. `cold`: it imports all itself, and is
    what `program` is for Python."""

    prefix: tuple[str, ...] = ()
    cold = False
    program: tuple[str, ...] = ("-m", "busrl.cli")

    def __init__(
        self,
        directory: Path,
        *settings: str,
        config: Path | None = None,
        steps: int = 20,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.directory, self.paths = directory, RunPaths.of(directory)
        self.config = config or ROOT / "configs" / "quickstart.toml"
        self.settings = [*QUICK, f"run.max_steps={steps}", *settings]
        self.steps = steps
        self.env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **(env or {})}
        self.output = directory.parent / f"{directory.name}.out"
        self.child: subprocess.Popen[bytes] | warm.Warm | None = None
        self.pidfd = -1

    def start(self, *arguments: str) -> Run:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.forget()
        with open(self.output, "ab") as file:
            self.child = self._started([*self.command(), *arguments], file)
        self.pidfd = os.pidfd_open(self.child.pid)
        return self

    def command(self) -> list[str]:
        """The words of its start, behind `busrl`."""
        settings = [word for setting in self.settings for word in ("--set", setting)]
        return ["launch", str(self.config), "--run-dir", str(self.directory), *settings]

    def _started(self, arguments: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes] | warm.Warm:
        """A launch that shares the session's imports, where nothing is to be different while it imports."""
        if not (self.cold or self.prefix or self.env.keys() & READ_AT_START):
            return warm.nursery().start(arguments, warm.environment(self.env), output.fileno(), ROOT)
        return subprocess.Popen(
            [*self.prefix, sys.executable, *self.program, *arguments], stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, **self.env},
        )

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit code; a run that does not end is stopped, and its logs are shown."""
        assert self.child is not None
        try:
            return self.child.wait(limit_s)
        except subprocess.TimeoutExpired:
            text = self.tail()
            self.child.send_signal(signal.SIGTERM)
            raise AssertionError(f"the run did not end within {limit_s:.0f} s\n{text}") from None

    def until(self, what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """What `condition` gives once it is true. Fails at once, with the logs, if `launch` ends before that."""
        end = time.monotonic() + limit_s
        while not (value := condition()):
            # Other processes' files can not be waited on, but the end of launch can.
            if ended(self.pidfd, LOOK_EVERY_S):
                raise AssertionError(f"the run ended before {what}\n{self.tail()}")
            if time.monotonic() > end:
                raise AssertionError(f"waited {limit_s:.0f} s for {what}\n{self.tail()}")
        return value

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: self.step() >= step)

    def tail(self) -> str:
        logs = "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in self.paths.logs.glob("*.log")
        )
        return f"{self.text()[-3000:]}\n{logs}"

    def text(self) -> str:
        """What launch has printed, over all starts."""
        return self.output.read_text(errors="replace")

    def forget(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    # -- what one sees ------------------------------------------------------------------------------------------

    def processes(self) -> dict[str, Process]:
        """Registered processes of this machine that are not proven dead, by name."""
        try:
            ring = Ring.attach(self.paths.ring_name, read_only=True)
        except (RingError, OSError):
            return {}
        try:
            here = [process for process in ring.processes() if not process.remote]
            return {process.label: process for process in here if not ring.is_dead(process.index)}
        finally:
            ring.close()

    def pid(self, name: str) -> int:
        """Pid of a living process of the run, 0 if there is none."""
        process = self.processes().get(name)
        return process.pid if process else 0

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of steps; those of groups that ended without one have a `kind`."""
        return [row for row in read_lines(self.paths.metrics) if "kind" not in row]

    def step(self) -> int:
        rows = self.metrics()
        return int(rows[-1]["step"]) if rows else 0

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.paths.summary.read_text())
        return summary

    def restarts(self, name: str) -> int:
        return int(self.summary()["processes"][name]["restarts"])

    def told(self, name: str) -> dict[str, Any]:
        """Where the process of that name listens, as soon as it does."""
        file = self.paths.root / f"{name}.json"
        record: dict[str, Any] = json.loads(self.until(f"{name} listened", lambda: file.exists() and file.read_text()))
        return record

    def audit(self) -> AuditReport:
        return audit(self.directory)

    # -- faults -------------------------------------------------------------------------------------------------

    def kill(self, name: str, when: Callable[[Process], bool] = lambda process: True) -> int:
        """SIGKILL the process of that name, as soon as it is there and `when` holds; returns when it is gone."""

        def there() -> int:
            process = self.processes().get(name)
            return process.pid if process and when(process) else 0

        pid = self.until(f"{name} was there to be killed", there)
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            assert ended(descriptor, 30.0), f"{name} (pid {pid}) is not gone 30 s after SIGKILL"
        finally:
            os.close(descriptor)
        return int(pid)

    def kill_if_there(self, name: str) -> bool:
        """SIGKILL the process of that name if it lives now, ready or not."""
        pid = self.pid(name)
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pid)

    def let_pass(self, seconds: float) -> None:
        """Time for the run to go on; it must not end in it."""
        assert not ended(self.pidfd, seconds), f"the run ended early\n{self.tail()}"

    def kill_at_random_steps(self, names: Sequence[str], times: int, seed: int) -> list[int]:
        """Kill each of `names` at `times` seeded steps of the run's first half. Returns the pids."""
        chance = random.Random(f"{names} {seed}")
        moments = sorted((chance.randint(1, self.steps // 2), name) for name in names for _ in range(times))
        killed = []
        for moment, name in moments:
            self.until_step(moment)
            killed.append(self.kill(name))
        return killed

    def kill_launch(self, limit_s: float = 10.0) -> None:
        """SIGKILL `launch` itself; its children have to end by themselves within the limit."""
        assert self.child is not None
        descriptors = []
        for process in self.processes().values():
            with suppress(ProcessLookupError):  # one that was killed just before
                descriptors.append(os.pidfd_open(process.pid))
        assert descriptors
        self.child.kill()
        self.child.wait()
        end = time.monotonic() + limit_s
        late = [descriptor for descriptor in descriptors if not ended(descriptor, max(0.0, end - time.monotonic()))]
        for descriptor in descriptors:
            os.close(descriptor)
        assert not late, f"{len(late)} children live {limit_s:g} s after launch: {self.leftover_processes()}"

    # -- afterwards ---------------------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """Processes, shared memory and sockets that are still there."""
        files = [*SHM.glob(f"{self.paths.ring_name.removesuffix('.ring')}.*"), self.paths.runtime_dir]
        return [str(path) for path in files if path.exists()] + self.leftover_processes()

    def leftover_processes(self) -> list[str]:
        """Known by where they write: a title for `ps` takes the place of the environment that /proc shows."""
        leftovers, mark = [], f"BUSRL_RUN_DIR={self.paths.root}".encode()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and (
                    self._writes_here(entry) or mark in (entry / "environ").read_bytes().split(b"\0")
                ):
                    leftovers.append(f"pid {entry.name}: {(entry / 'cmdline').read_bytes().decode(errors='replace')}")
        return leftovers

    def _writes_here(self, entry: Path) -> bool:
        return os.readlink(entry / "fd" / "2").startswith(f"{self.paths.logs}/")


def ended(pidfd: int, timeout_s: float) -> bool:
    """Whether a process ends within the time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file that somebody may be writing, with its earlier parts: a torn last line is left out."""
    return [json.loads(line) for line in whole_file(path) if line.strip() and line.endswith(b"\n")]


@contextmanager
def running(run: Run) -> Iterator[Run]:
    """Start a run; whatever happens, end it and all that it started."""
    run.start()
    try:
        yield run
    finally:
        if run.child is not None and run.child.poll() is None:
            run.child.send_signal(signal.SIGTERM)
            try:
                run.child.wait(40)
            except subprocess.TimeoutExpired:
                run.child.kill()
                run.child.wait()
        run.forget()
        for path in SHM.glob(f"{run.paths.ring_name.removesuffix('.ring')}.*"):
            path.unlink(missing_ok=True)


@contextmanager
def beside(*command: str | Path) -> Iterator[None]:
    """A program that runs beside a run, at most until the end of the block."""
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        try:
            yield
        finally:
            child.kill()
