"""Recovery from a kill: slots of a killed process at rest again, and the bus back after its broker was killed.

    python -m benchmarks recovery [--kills 40] [--out benchmarks/results]

Slots: from just before SIGKILL until none of the words that the process owned is still in place, looked at every
millisecond. Idle: a run whose only worker holds slots and does nothing. Busy: the quickstart as it is; once with the
keeper alive, once with the keeper killed in the same moment. Bus: from just before SIGKILL of the broker until an
endpoint that was connected hears its own ping again; until the new broker heard its own; and the latter from its exec.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.common import report
from benchmarks.common.runs import NEVER_ENDS, BenchRun, gone, kill, quantiles, run
from busrl.bus import Endpoint
from busrl.ring import Process

LOOK_S = 0.001
SPREAD_S = 1.0
ANY_DEATHS = "limits.crash_attempts=0"  # launch gives up none of those that are killed again and again, and never waits
HOLDER = ROOT / "benchmarks" / "common" / "holder.py"


def slots_at_rest(bench: BenchRun, victim: Process, with_keeper: bool) -> float | None:
    """Milliseconds until all that the process held rests; None if it held nothing."""
    held = bench.held(victim.index)
    if not held:
        return None
    keeper = bench.process("keeper") if with_keeper else None
    if keeper is not None:
        kill(keeper.pid)
    begun = kill(victim.pid)
    ring = bench.attach()
    held.update(bench.held(victim.index))  # what it took before the signal arrived
    while True:
        words = ring.words()
        if all(int(words[slot]) != word for slot, word in held.items()):
            return (time.monotonic() - begun) * 1e3
        time.sleep(LOOK_S)


def kill_workers(
    bench: BenchRun, names: list[str], times: int, with_keeper: bool, chance: random.Random
) -> list[float]:
    """Kill workers that hold something, at random moments."""
    times_ms: list[float] = []
    while len(times_ms) < times:
        name = names[len(times_ms) % len(names)]
        victim = bench.until(f"{name} to be ready", lambda name=name: bench.process(name))
        time.sleep(chance.uniform(0.0, SPREAD_S))
        bench.until(f"{name} to hold slots", lambda index=victim.index: bench.held(index), pause_s=0.0005)
        took = slots_at_rest(bench, victim, with_keeper)
        if took is not None:
            times_ms.append(took)
        if with_keeper:
            bench.until("the keeper to be back", lambda: bench.process("keeper"))
    return times_ms


def bus_back(bench: BenchRun, client: Endpoint) -> dict[str, float]:
    """Milliseconds from the broker's kill to the client's echo and to the new broker's own; that also from exec."""
    broker = bench.until("the broker", lambda: bench.process("bus"))
    pidfd = os.pidfd_open(broker.pid)
    client.ready(30)
    begun = kill(broker.pid)
    gone(pidfd)
    os.close(pidfd)
    client.ready(60)
    echo = time.monotonic() - begun
    new = bench.until("the new broker", lambda: bench.process("bus"), pause_s=LOOK_S)
    ready = time.monotonic() - begun
    return {"client_echo": echo * 1e3, "from_exec": from_exec(new) * 1e3, "seen_ready": ready * 1e3}


def from_exec(process: Process) -> float:
    """Seconds from exec to the first echo, which sets `ready`: the kernel's start time, and the first look after it."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def kill_brokers(bench: BenchRun, times: int, chance: random.Random) -> dict[str, Any]:
    by_part: dict[str, list[float]] = {}
    with Endpoint("bench", bench.paths.frontend, bench.paths.backend) as client:
        for _ in range(times):
            time.sleep(chance.uniform(0.0, SPREAD_S))
            for what, took in bus_back(bench, client).items():
                by_part.setdefault(what, []).append(took)
    return {what: quantiles(took) for what, took in by_part.items()}


def idle(times: int, chance: random.Random) -> dict[str, Any]:
    """A run whose worker only holds slots."""
    command = json.dumps([sys.executable, str(HOLDER)])
    with run(NEVER_ENDS, ANY_DEATHS, f"process.rollout.command={command}") as bench:
        bench.until("the holder", lambda: bench.process("rollout/0"))
        return {
            "slots": quantiles(kill_workers(bench, ["rollout/0"], times, False, chance)),
            "slots_keeper_dead_too": quantiles(kill_workers(bench, ["rollout/0"], times, True, chance)),
            "bus": kill_brokers(bench, times, chance),
        }


def busy(times: int, chance: random.Random) -> dict[str, Any]:
    """The quickstart at work."""
    with run(NEVER_ENDS, ANY_DEATHS) as bench:
        bench.until_step(3)
        names = ["reward/0", "reward/0", "reward/0", "rollout/0"]
        return {
            "slots": quantiles(kill_workers(bench, names, times, False, chance)),
            "slots_keeper_dead_too": quantiles(kill_workers(bench, names, times, True, chance)),
            "bus": kill_brokers(bench, times, chance),
        }


PARTS: dict[str, Callable[[int, random.Random], dict[str, Any]]] = {"idle": idle, "quickstart": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="of each kind (default 40)")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    chance = random.Random(0)
    result: dict[str, Any] = {
        "machine": report.machine(), "date": time.strftime("%Y-%m-%d"), "load_before": os.getloadavg(),
        "what": __doc__.split("\n")[0],
    }
    for part in options.parts:
        result[part] = PARTS[part](options.kills, chance)
        print(json.dumps({part: result[part]}, indent=2), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"recovery_{result['machine']['cores']}cores_{result['date']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path)
