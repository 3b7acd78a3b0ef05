"""This checkout beside another one, figure by figure in turn: imports of the roles, the bus, a run's start and steps.

    python -m benchmarks trees --other TREE [--rounds 5] [--only imports bus start restart]

`imports`: CPU, resident memory and busrl's modules of `import busrl.roles.NAME` in a process of its own. `bus`: typed
messages a second, CPU of a message at both ends and a round trip, through one broker. `start`: the quickstart with 20
steps: seconds, CPU and memory (PSS, all processes) up to its first finished answer, then seconds and CPU of the whole
run. `restart`: the learner and then the rollout of the quickstart killed; seconds until each is ready again, and until
the first step after that. Each figure is a ratio of this checkout over the other, taken round by round, with the median
judged. The other tree needs its compiled modules (copy `busrl/*.so` and `busrl/ring/capi/*` where its C++ is the
same). `learner steps --against TREE` does the same for the learner's step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks import RESULTS, ROOT
from benchmarks.bus.run import HERE as BUS
from benchmarks.bus.run import broker
from benchmarks.common import report, sides
from benchmarks.common.judge import Bar, Log, written
from benchmarks.common.runs import LIMIT_S, QUICKSTART
from busrl.errors import RingError
from busrl.paths import RunPaths
from busrl.ring import Ring, State

ROLES = ("actor", "scheduler", "rollout", "reward", "learner")
IMPORT = """
import json, resource, sys, time
begun = time.process_time()
import busrl.roles.{role}
cpu, memory = time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
mine = [name for name in sys.modules if name.split(".")[0] == "busrl"]
print(json.dumps({{"cpu": cpu, "memory": memory, "modules": len(mine)}}))
"""
FIRST_FINISHED = int(State.GENERATED)
TICKS = os.sysconf("SC_CLK_TCK")
Value = TypeVar("Value")


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def imports(log: Log, name: str, tree: Path) -> None:
    """Import every role once in a fresh process."""
    for role in ROLES:
        command = [sys.executable, "-c", IMPORT.format(role=role)]
        ended = sides.ran(command, env=environment(tree), cwd="/", check=True)
        for figure, value in json.loads(ended.output).items():
            log.say(f"{name}:{role}_{figure}", value, {"cpu": "s", "memory": "MiB", "modules": ""}[figure])


def bus(log: Log, name: str, tree: Path, frontend: str, backend: str) -> None:
    """Send 100,000 messages and go 2,000 round trips with the endpoints of one tree."""
    for what, count in (("rate", 100_000), ("trip", 2_000)):
        command = [sys.executable, str(BUS / "typed.py"), what, frontend, backend, str(count)]
        ended = sides.ran(command, env=environment(tree), cwd="/", check=True)
        for line in map(json.loads, ended.output.splitlines()):
            log.say(f"{name}:{line['name']}", line["value"], line["unit"])


def descendants(pid: int) -> list[int]:
    """The process and all that it started, as far as they live."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
    family = [pid]
    for parent in family:
        family += [child for child, its_parent in parents.items() if its_parent == parent]
    return family


def used_by(pids: Sequence[int]) -> tuple[float, float]:
    """CPU seconds of living processes and of children that they waited for, and their PSS in MiB."""
    cpu = memory = 0.0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        cpu += sum(map(int, fields[11:15])) / TICKS
        memory += sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) / 1024
    return cpu, memory


class TreeRun:
    """The quickstart by one tree's code, in a temporary directory, until `with` ends."""

    def __init__(self, tree: Path, steps: int) -> None:
        directory = Path(tempfile.mkdtemp(prefix="busrl-bench-")) / "run"
        self.paths, self.output = RunPaths.of(directory), Path(f"{directory}.out")
        command = [sys.executable, "-m", "busrl.cli", "launch", str(tree / QUICKSTART.relative_to(ROOT))]
        command += ["--run-dir", str(directory), "--set", f"run.max_steps={steps}"]
        self.begun = time.monotonic()
        with open(self.output, "wb") as output:
            self.child = sides.started(
                command, cwd=directory.parent, env=environment(tree), stdout=output, stderr=output
            )

    def ring(self) -> Ring:
        return self.until("ring", self._attached)

    def _attached(self) -> Ring | None:
        try:
            return Ring.attach(self.paths.ring_name, read_only=True)
        except (RingError, OSError):
            return None

    def until(self, what: str, condition: Callable[[], Value | None]) -> Value:
        """Wait for what `condition` gives once it is true."""
        end = time.monotonic() + LIMIT_S
        while not (value := condition()):
            if self.child.poll() is not None or time.monotonic() > end:
                said = self.output.read_text(errors="replace")[-2000:]
                raise SystemExit(f"the run ended, or {LIMIT_S:g} s passed, before its {what}: {said}")
            time.sleep(0.005)
        return value

    def __enter__(self) -> TreeRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.returncode is None and self.child.poll() is None:
            self.child.terminate()
            self.child.wait(LIMIT_S)
        shutil.rmtree(self.output.parent, ignore_errors=True)


def start(log: Log, name: str, tree: Path) -> None:
    """Run 20 steps of the quickstart by one tree's code."""
    with TreeRun(tree, 20) as run:
        ring = run.ring()
        run.until("first answer", lambda: int((ring.words() >> 58).max()) >= FIRST_FINISHED)
        ring.close()
        first_s, (first_cpu, first_memory) = time.monotonic() - run.begun, used_by(descendants(run.child.pid))
        _, status, used = os.wait4(run.child.pid, 0)
        run.child.returncode = os.waitstatus_to_exitcode(status)
        if status:
            raise SystemExit(run.output.read_text()[-2000:])
        figures = {"first_s": (first_s, "s"), "first_cpu": (first_cpu, "s"), "first_memory": (first_memory, "MiB"),
                   "run_s": (time.monotonic() - run.begun, "s"), "run_cpu": (used.ru_utime + used.ru_stime, "s")}
        for figure, (value, unit) in figures.items():
            log.say(f"{name}:{figure}", value, unit)


def restart(log: Log, name: str, tree: Path) -> None:
    """Kill the learner and then the rollout of a quickstart by one tree's code."""
    with TreeRun(tree, 100_000) as run:
        ring = run.ring()
        for role in ("learner", "rollout/0"):
            run.until("fifth step", partial(is_past, ring, ring.header("step") + 4))
            dead = run.until(role, partial(ready, ring, role))
            begun = time.monotonic()
            os.kill(dead, signal.SIGKILL)
            run.until(f"next {role}", partial(ready, ring, role, dead))
            ready_s = time.monotonic() - begun
            run.until("next step", partial(is_past, ring, ring.header("step")))
            log.say(f"{name}:{role}_ready_s", ready_s, "s")
            log.say(f"{name}:{role}_step_s", time.monotonic() - begun, "s")
        ring.close()


def is_past(ring: Ring, step: int) -> bool:
    return ring.header("step") > step


def ready(ring: Ring, role: str, other_than: int = 0) -> int:
    """Process number of the role once it is ready, and is not the dead one; 0 before."""
    here = (process.pid for process in ring.processes() if process.label == role and process.state == "ready")
    return next((pid for pid in here if pid != other_than), 0)


def bars(log: Log) -> list[Bar]:
    """Make a row for each figure of both trees. A ratio above 1: this checkout needs more; of a rate: it sends more."""
    names = [name.removeprefix("this:") for name in log.values if name.startswith("this:")]
    return [
        Bar(name, f"this:{name}", f"other:{name}", 0.9 if name == "typed_rate" else 1.1, name != "typed_rate")
        for name in names if not name.endswith("_modules")
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--other", type=Path, required=True, help="another checkout with its compiled modules")
    arguments.add_argument("--rounds", type=int, default=5)
    parts = ["imports", "bus", "start", "restart"]
    arguments.add_argument("--only", nargs="+", choices=parts, default=parts)
    arguments.add_argument("--out", type=Path, default=RESULTS)
    options = arguments.parse_args()
    log, trees = Log(), {"this": ROOT, "other": options.other.resolve()}
    with broker(sys.executable) as (frontend, backend, _):
        for round_ in range(options.rounds):
            print(f"round {round_ + 1} at load {os.getloadavg()[0]:.1f}", flush=True)
            log.loads.append(os.getloadavg()[0])
            for name, tree in list(trees.items())[:: -1 if round_ % 2 else 1]:
                if "imports" in options.only:
                    imports(log, name, tree)
                if "bus" in options.only:
                    bus(log, name, tree, frontend, backend)
                if "start" in options.only:
                    start(log, name, tree)
                if "restart" in options.only:
                    restart(log, name, tree)
    written(log, bars(log), "trees", options.out, other=report.commit(options.other))
