"""Deaths and cut cables in a run with two other hosts: lost, doubled, named and back after each, one row each.

    python -m benchmarks torture [--only NAME ...] [--steps 40] [--out benchmarks/results/torture_HERE.json]
    python -m benchmarks torture --storm 600 [--seed 0]     one row more: deaths and cuts by chance for so many seconds

One scripted run (no model that matters) with two hosts goes on through all rows. A row kills, or cuts, and then lets
the run train `--steps` more steps; what was killed from outside (`launch`, `busrl host`) is started again at once. Home
and each host are network namespaces of their own, with cables to a bridge; without the rights to make them they meet on
loopback, and rows of cables are left out.

- `named`: seconds until a line of errors.jsonl, hosts.jsonl or launch's log, at home or there, names it (`line`).
- `back`: seconds until what was disturbed works again: a new process is ready, and a step, or an answer of its host,
  after it. Of a cut: from when the cable is whole. `pause`: the longest time between two steps in the row.
- `tokens`: generated on the hosts over those that came home, over the same of the row without a fault. What home had
  taken and lost with its ring is not in it: `per_sample` is for each sample trained.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common.report import commit, machine
from busrl import curve
from busrl.errors import RingError, UserError
from busrl.ledger.audit import audit
from busrl.paths import SHM, RunPaths
from busrl.ring import Process, Ring
from busrl.system import files

NAMES = ("h0", "h1")
LEASE_S, ORPHAN_S = 10.0, 75.0
LIMIT_S = 240.0
CUT = r"nothing heard|lease|silent"
LOST = r"^home/(?!.*\bstarted\b).*h0"
SETTINGS = (
    "run.max_steps=1000000", "generation.max_new_tokens=64", "generation.max_batch=16", "mock.token_s=0.02",
    "mock.prefill_s_per_token=0", "learner.trigger.n_min=4", "scheduler.ahead=8", "process.rollout.count=1",
    "limits.crash_attempts=0", f"limits.lease_s={LEASE_S}", f"hosts.orphan_s={ORPHAN_S}", "learner.checkpoint_every=20",
)


# -- where it runs -----


class Net:
    """A bridge in home's namespace, and a cable to each host's; `whole` is False where there are no namespaces."""

    def __init__(self) -> None:
        mark = f"bt{os.getpid()}"
        self.spaces = {name: f"{mark}{name}" for name in ("home", *NAMES)}
        self.why = ""

    @property
    def endpoint(self) -> str:
        return "tcp://127.0.0.1:5690" if self.why else "tcp://10.78.0.1:5690"

    def prefix(self, name: str) -> list[str]:
        return [] if self.why else ["ip", "netns", "exec", self.spaces[name]]

    def __enter__(self) -> Net:
        try:
            self._lay()
        except (OSError, subprocess.CalledProcessError) as problem:
            self.__exit__()
            self.why = f"no network namespaces: {problem}"
        return self

    def _lay(self) -> None:
        home = self.spaces["home"]
        for space in self.spaces.values():
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", home, "link", "add", "br0", "type", "bridge")
        _ip("-n", home, "addr", "add", "10.78.0.1/24", "dev", "br0")
        _ip("-n", home, "link", "set", "br0", "up")
        for number, name in enumerate(NAMES):
            space = self.spaces[name]
            _ip("-n", home, "link", "add", name, "type", "veth", "peer", "name", "cable", "netns", space)
            _ip("-n", home, "link", "set", name, "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"10.78.0.{2 + number}/24", "dev", "cable")
            _ip("-n", space, "link", "set", "cable", "up")

    def __exit__(self, *_: object) -> None:
        for space in self.spaces.values():
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def plug(self, name: str, state: str) -> None:
        _ip("-n", self.spaces["home"], "link", "set", name, state)

    def one_way(self, name: str, cut: bool) -> None:
        """Cut one way: what the host sends goes to a card that nobody has; what home sends arrives."""
        where = ("-n", self.spaces[name], "neigh")
        if cut:
            _ip(*where, "replace", "10.78.0.1", "lladdr", "02:00:00:00:00:99", "dev", "cable", "nud", "permanent")
        else:
            _ip(*where, "del", "10.78.0.1", "dev", "cable")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Side:
    """Home or a host: a command that may be started again, its directory, its ring."""

    name: str
    directory: Path
    command: list[str]
    child: subprocess.Popen[bytes] | None = None
    ring: Ring | None = None
    tokens_before: int = 0  # of rings that are gone
    tokens_here: int = 0
    file: int = 0

    @property
    def paths(self) -> RunPaths:
        return RunPaths.of(self.directory)

    def start(self) -> None:
        with open(f"{self.directory}.out", "ab") as output:
            self.child = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            )

    def attached(self) -> Ring | None:
        """Its ring as it is now; another file under its name is another ring."""
        with suppress(RingError, OSError):
            ring = Ring.attach(self.paths.ring_name, read_only=True)
            file = os.stat(self.paths.ring_file).st_ino
            if file != self.file:  # the uuid is the run's, not the ring's
                self.file = file
                self.tokens_before += self.tokens_here
                self.tokens_here = 0
            if self.ring is not None:
                self.ring.close()
            self.ring = ring
            self.tokens_here = ring.stats().tokens
            return ring
        return None

    def processes(self) -> list[Process]:
        ring = self.attached()
        here = [process for process in ring.processes() if not process.remote] if ring else []
        return [process for process in here if ring is not None and not ring.is_dead(process.index)]

    def pid(self, label: str) -> int:
        """Number of the ready process of that name; 0: there is none."""
        ready = (process for process in self.processes() if process.label == label and process.state == "ready")
        return next((process.pid for process in ready), 0)

    def kill_all(self) -> None:
        """All of it at the same time, as when its machine is gone."""
        assert self.child is not None
        for pid in [process.pid for process in self.processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.child.kill()
        self.child.wait()

    def drop_ring(self) -> None:
        for path in SHM.glob(f"{self.paths.ring_name.removesuffix('.ring')}.*"):
            path.unlink(missing_ok=True)


class World:
    """The run, its hosts, and what they say."""

    def __init__(self, folder: Path, net: Net) -> None:
        self.net = net
        curve.init(folder / "keys")
        settings = [*SETTINGS, f'bus.endpoint="{net.endpoint}"', f'bus.keys="{folder}/keys"',
                    'process.rollout.hosts=["h0", "h1"]']
        busrl = [sys.executable, "-m", "busrl.cli"]
        home = [*net.prefix("home"), *busrl, "launch", str(ROOT / "configs/scripted.toml"), "--run-dir",
                str(folder / "run"), *(part for setting in settings for part in ("--set", setting))]
        self.home = Side("home", folder / "run", home)
        self.hosts: dict[str, Side] = {}
        for name in NAMES:
            curve.add(folder / "keys", name)
            command = [*net.prefix(name), *busrl, "host", net.endpoint, "--keys",
                       str(curve.client_file(folder / "keys", name)), "--scratch", str(folder / name), "--wait", "60"]
            self.hosts[name] = Side(name, folder / name, command)
        self.read: dict[Path, int] = {}
        self.steps: list[tuple[float, int]] = []
        self.lines: list[tuple[float, str, str]] = []

    @property
    def sides(self) -> list[Side]:
        return [self.home, *self.hosts.values()]

    def look(self) -> None:
        """Note new steps and new lines, with the time at which they were seen."""
        now = time.monotonic()
        step = self.step()
        if step and (not self.steps or step != self.steps[-1][1]):
            self.steps.append((now, step))
        for side in self.sides:
            for path in (side.paths.errors, side.paths.hosts, side.paths.log("launch"), Path(f"{side.directory}.out")):
                self._read(now, side.name, path)

    def _read(self, now: float, name: str, path: Path) -> None:
        with suppress(OSError):
            size, done = path.stat().st_size, self.read.get(path, 0)
            if size < done:
                done = 0
            if size > done:
                with open(path, "rb") as file:
                    file.seek(done)
                    data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self.read[path] = done + len(whole)
                lines = whole.decode(errors="replace").splitlines()
                self.lines += [(now, f"{name}/{path.name}", line) for line in lines]

    def step(self) -> int:
        ring = self.home.attached()
        return int(ring.header("step")) if ring else 0

    def answered(self, name: str) -> tuple[int, int]:
        """Life and count of answers that home has taken of a host in it."""
        ring = self.home.attached()
        entries = [process for process in ring.processes() if process.remote and process.label == name] if ring else []
        return (entries[0].started_ns, entries[0].samples) if entries else (0, 0)

    def held(self, name: str) -> int:
        """Slots of home that a host holds."""
        ring = self.home.attached()
        if ring is None:
            return 0
        entry = [process.index for process in ring.processes() if process.remote and process.label == name]
        lines = ring.lines()
        return int(((lines["state"] == 3) & (lines["owner"] == entry[0])).sum()) if entry else 0

    def tokens(self) -> int:
        """Generated on all hosts so far."""
        for side in self.hosts.values():
            side.attached()
        return sum(side.tokens_before + side.tokens_here for side in self.hosts.values())

    def taken(self) -> int:
        """Tokens that home has taken so far, from hosts alone: at home nothing generates."""
        self.home.attached()
        return self.home.tokens_before + self.home.tokens_here

    def until(self, what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> float:
        """The time at which it came true."""
        end = time.monotonic() + limit_s
        while not condition():
            self.look()
            if time.monotonic() > end:
                raise RuntimeError(f"waited {limit_s:g} s for {what}")
            time.sleep(0.02)
        self.look()
        return time.monotonic()

    def pass_time(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()
            time.sleep(0.02)

    def until_answer(self, name: str) -> float:
        """A host's next answer but those that were on their way."""
        life, count = self.answered(name)

        def more() -> bool:
            now_life, now = self.answered(name)
            return (now > 0 and now_life != life) or now > count

        return self.until(f"an answer of {name}", more)

    def until_step(self, more: int) -> float:
        goal = self.step() + more
        return self.until(f"step {goal}", lambda: self.step() >= goal)


# -- the rows -----


@dataclass
class Row:
    """`disturb` gives the time at which all worked again, and from when that is counted (None: from the event)."""

    name: str
    culprit: str  # a pattern of the line that names it
    disturb: Callable[[World], tuple[float, float | None]]
    cable: bool = False


def process(where: str, label: str) -> Callable[[World], tuple[float, float | None]]:
    def disturb(world: World) -> tuple[float, float | None]:
        side = world.home if where == "home" else world.hosts[where]
        old = side.pid(label)
        assert old, f"{label} is not there"
        os.kill(old, signal.SIGKILL)
        world.until(f"{label} of {where} to be back", lambda: side.pid(label) not in (0, old))
        return (world.until_step(1) if where == "home" else world.until_answer(where)), None

    return disturb


def command_at_home(ring_too: bool) -> Callable[[World], tuple[float, float | None]]:
    def disturb(world: World) -> tuple[float, float | None]:
        home = world.home
        assert home.child is not None
        if ring_too:
            home.kill_all()
            home.drop_ring()
        else:
            home.child.kill()
            home.child.wait()
        home.start()
        if ring_too:
            home.attached()
        world.until("home's learner to be back", lambda: home.pid("learner"))
        return world.until_step(1), None

    return disturb


def command_of_host(everything: bool, returns: bool) -> Callable[[World], tuple[float, float | None]]:
    def disturb(world: World) -> tuple[float, float | None]:
        host = world.hosts["h0"]
        assert host.child is not None
        if everything:
            host.kill_all()
            host.drop_ring()
            shutil.rmtree(host.directory, ignore_errors=True)
        else:
            host.child.kill()
            host.child.wait()
        if not returns:
            back = world.until("its claims to be back at home", lambda: not world.held("h0"))
            world.until_step(5)
            host.start()
            world.until_answer("h0")
            return back, None
        host.start()
        world.until("its satellite to be there", lambda: host.pid("satellite"))
        return world.until_answer("h0"), None

    return disturb


def cut(seconds: float) -> Callable[[World], tuple[float, float | None]]:
    def disturb(world: World) -> tuple[float, float | None]:
        world.net.plug("h0", "down")
        world.pass_time(seconds)
        world.net.plug("h0", "up")
        whole = time.monotonic()
        return world.until_answer("h0"), whole

    return disturb


def cut_for_ever(world: World) -> tuple[float, float | None]:
    """`back`: until its claims are with others. The command of the host has to end with 3."""
    host = world.hosts["h0"]
    assert host.child is not None
    world.net.plug("h0", "down")
    back = world.until("its claims to be back at home", lambda: not world.held("h0"))
    code = host.child
    world.until("the host to end", lambda: code.poll() is not None)
    world.net.plug("h0", "up")
    if code.returncode != 3:
        raise RuntimeError(f"the host ended with {code.returncode}, not 3")
    host.start()
    world.until_answer("h0")
    return back, None


def cut_one_way(world: World) -> tuple[float, float | None]:
    world.net.one_way("h0", True)
    world.pass_time(30.0)
    world.net.one_way("h0", False)
    whole = time.monotonic()
    return world.until_answer("h0"), whole


def flapping(world: World) -> tuple[float, float | None]:
    for _ in range(10):
        world.net.plug("h0", "down")
        world.pass_time(2.0)
        world.net.plug("h0", "up")
        world.pass_time(2.0)
    whole = time.monotonic()
    return world.until_answer("h0"), whole


def storm(seconds: float, seed: int, blows: Counter[str]) -> Callable[[World], tuple[float, float | None]]:
    """Every few seconds a process of any side, the command of one, or a cable, whether or not the last one is back."""
    def disturb(world: World) -> tuple[float, float | None]:
        chance, end = random.Random(seed), time.monotonic() + seconds
        while time.monotonic() < end:
            world.pass_time(chance.uniform(1.0, 8.0))
            side = chance.choice(world.sides)
            blow = chance.choices(("process", "command", "cable"), (8, 1, 2))[0]
            if blow == "process" and (there := side.processes()):
                victim = chance.choice(there)
                blows[f"{side.name}: {victim.label}"] += 1
                with suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
            elif blow == "cable" and side is not world.home and not world.net.why:
                blows[f"{side.name}: cable"] += 1
                world.net.plug(side.name, "down")
                world.pass_time(chance.uniform(0.5, 6.0))
                world.net.plug(side.name, "up")
            elif blow == "command" and side.child is not None:
                blows[f"{side.name}: command"] += 1
                side.child.kill()
                side.child.wait()
            for side in world.sides:  # what was killed, and what gave up
                if side.child is not None and side.child.poll() is not None:
                    side.start()
        whole = time.monotonic()
        for name in NAMES:
            world.until_answer(name)
        return world.until_step(5), whole

    return disturb


def undisturbed(world: World) -> tuple[float, float | None]:
    return time.monotonic(), None


def rows() -> Iterator[Row]:
    yield Row("nothing", "", undisturbed)
    for label in ("bus", "keeper", "scheduler", "learner", "reward/0", "relay"):
        yield Row(f"home: {label}", rf"\b{label}\b", process("home", label))
    for label in ("bus", "keeper", "relay", "satellite", "rollout/0"):
        yield Row(f"host: {label}", rf"\b{label}\b", process("h0", label))
    yield Row("`busrl host`", "adopted", command_of_host(everything=False, returns=True))
    yield Row("the whole host, started again", LOST, command_of_host(everything=True, returns=True))
    yield Row("the whole host, for a while", LOST, command_of_host(everything=True, returns=False))
    yield Row("`busrl launch`", "adopted", command_at_home(ring_too=False))
    yield Row("home with its ring", "new ring|were in no slot", command_at_home(ring_too=True))
    yield Row("cable, 1 s", CUT, cut(1.0), cable=True)
    yield Row("cable, 60 s", CUT, cut(60.0), cable=True)
    yield Row("cable, host to home only, 30 s", CUT, cut_one_way, cable=True)
    yield Row("cable, 2 s off 2 s on, 10 times", CUT, flapping, cable=True)
    yield Row("cable, for ever", CUT, cut_for_ever, cable=True)


def measured(world: World, row: Row, steps: int) -> dict[str, Any]:
    world.until_step(2)
    first_line, first_step, tokens, taken = len(world.lines), world.step(), world.tokens(), world.taken()
    trained = _trained(world)
    begun = time.monotonic()
    back, since = row.disturb(world)
    took, meanwhile = time.monotonic() - begun, world.step() - first_step
    world.until_step(steps)
    ended = time.monotonic()
    lines = world.lines[first_line:]
    texts = [(at - begun, f"{where}: {text}") for at, where, text in lines]
    named = [line for line in texts if row.culprit and re.search(row.culprit, line[1])]
    times = [begun, *(at for at, _ in world.steps if begun < at < ended)]
    report = audited(world)
    samples = _trained(world) - trained
    return {
        "row": row.name, "named_s": named[0][0] if named else None, "line": named[0][1][:300] if named else "",
        "back_s": back - (since if since is not None else begun) if row.culprit else None, "took_s": took,
        "pause_s": max(b - a for a, b in pairwise(times)),
        "tokens": (world.tokens() - tokens) / max(1, world.taken() - taken), "samples": samples,
        "per_sample": (world.tokens() - tokens) / max(1, samples),
        "steps": world.step() - first_step, "steps_meanwhile": meanwhile,
        "seconds": ended - begun, "load": os.getloadavg()[0], **report,
    }


def audited(world: World) -> dict[str, Any]:
    report = audit(world.home.directory)
    return {"lost": report.counts.lost, "twice": report.counts.trained_twice,
            "errors": [str(error) for error in report.errors], "accidents": dict(report.accidents)}


def _trained(world: World) -> int:
    """Samples of all steps, each step once: a learner that was killed may do its last ones again."""
    steps = {row["step"]: row["samples"] for row in files.json_lines(world.home.paths.train_log) if "step" in row}
    return sum(value if isinstance(value, int) else len(value) for value in steps.values())


@contextmanager
def world_of(net: Net, folder: Path) -> Iterator[World]:
    world = World(folder, net)
    try:
        for side in world.sides:
            side.start()
        for name in NAMES:
            world.until(f"answers of {name}", lambda name=name: world.answered(name)[1] > 0)
        world.until_step(20)
        yield world
    finally:
        for side in world.sides:
            if side.child is not None and side.child.poll() is None:
                side.child.terminate()
        for side in world.sides:
            if side.child is not None:
                with suppress(subprocess.TimeoutExpired):
                    side.child.wait(60)
                side.child.kill()
            side.drop_ring()


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    base = next((result["tokens"] for result in results if result["row"] == "nothing"), None)

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    lines = ["| what is killed or cut | lost | twice | tokens | named, s | back, s | longest pause of steps, s |",
             "|---|---:|---:|---:|---:|---:|---:|"]
    for result in results:
        if "skipped" in result:
            lines.append(f"| {result['row']} | left out: {result['skipped']} | | | | | |")
            continue
        share = f"{result['tokens'] / base:.2f}" if base else "-"
        times = (seconds(result[key]) for key in ("named_s", "back_s", "pause_s"))
        cells = (result["row"], result["lost"], result["twice"], share, *times)

        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names hold one of these")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--storm", type=float, default=0.0, help="seconds of a storm, as a last row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    folder = Path(tempfile.mkdtemp(prefix="busrl-torture-"))
    failed = ""
    blows: Counter[str] = Counter()
    last = [Row("storm", "", storm(options.storm, options.seed, blows))] if options.storm else []
    with Net() as net, world_of(net, folder) as world:
        for row in (*rows(), *last):
            if options.only and row.name != "nothing" and not any(part in row.name for part in options.only):
                continue
            if row.cable and net.why:
                results.append({"row": row.name, "skipped": net.why})
                continue
            try:
                results.append(measured(world, row, options.steps))
            except (RuntimeError, AssertionError, UserError) as problem:
                failed = f"{row.name}: {problem}"
                break
            print(json.dumps(results[-1]), flush=True)
    print(table(results))
    if options.out:
        data = {"machine": machine(), "commit": commit(ROOT), "rows": results, "failed": failed, "storm": dict(blows)}
        options.out.write_text(json.dumps(data, indent=1))
    if failed:
        print(f"stopped at {failed}; what it left is in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return int(any(result.get("lost") or result.get("twice") or result.get("errors") for result in results))
