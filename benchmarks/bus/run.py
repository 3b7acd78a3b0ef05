"""Typed messages against pyzmq's bare bytes, through the same broker in the same run.

    python -m benchmarks bus [--rounds N]

The rival sends the same number of bytes in the same two frames (topic, payload), and, as a second figure, in one frame.
Beside the clock's figures stands the CPU time of a message in a row (`*_ends`: both ends, `*_broker`, `*_cpu`: all of
it), which says on a busy machine what the clock can not: with fewer cores than threads it decides.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import RESULTS, ROOT
from benchmarks.common import sides
from benchmarks.common.judge import Bar, Log, Program, written

HERE = ROOT / "benchmarks" / "bus"
BARS = (
    Bar("throughput, typed over raw bytes in the same two frames", "typed_rate", "raw_rate_2", 0.75, False),
    Bar("throughput, typed over raw bytes in one frame", "typed_rate", "raw_rate_1", 0.75, False),
    Bar("CPU time of a message, raw bytes in the same two frames over typed", "raw_cpu_2", "typed_cpu", 0.75, False,
        "no bar of its own: what the first would be if nothing else ran"),
    Bar("round trip, typed over raw bytes in the same two frames", "typed_trip", "raw_trip_2", 1.15),
    Bar("round trip, typed over raw bytes in one frame", "typed_trip", "raw_trip_1", 1.15),
    Bar("encoding of a message, us", "encode", "one", 0.5),
)


@contextlib.contextmanager
def broker(python: str) -> Iterator[tuple[str, str, int]]:
    """The process `bus` of a run: its two addresses and its number."""
    with tempfile.TemporaryDirectory(prefix="busrl-bench-") as folder:
        process = sides.started(
            [python, str(HERE / "broker.py"), folder], env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise SystemExit("the broker of the benchmark did not start")
            yield f"ipc://{folder}/in", f"ipc://{folder}/out", process.pid
        finally:
            process.kill()
            process.wait()


def cpu_s(pid: int) -> float:
    """CPU that the process has used so far; it counts in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(log: Log, program: Program, pid: int) -> None:
    """Run one program; of a rate also what the broker `pid` spent on it."""
    before = cpu_s(pid)
    log.run(program)
    if program.argv[2] != "rate" or program.label in log.failures:
        return
    name = {"raw.py": "raw_{}_" + program.argv[-1], "typed.py": "typed_{}"}[Path(program.argv[1]).name]
    spent = (cpu_s(pid) - before) / int(program.argv[5]) * 1e6
    log.say(name.format("broker"), spent, "us")
    log.say(name.format("cpu"), spent + log.values[name.format("ends")][-1], "us")


def encoding() -> float:
    """Microseconds of one encoding, the median of many short chunks."""
    from benchmarks.bus.typed import task
    from busrl.protocol.codec import encode

    message, chunks = task(1000), []
    message.sender, message.msg_seq, message.time_ns = "scheduler", 1000, time.time_ns()
    for _ in range(300):
        start = time.perf_counter()
        for _ in range(100):
            encode(message)
        chunks.append(time.perf_counter() - start)
    return sorted(chunks)[len(chunks) // 2] / 100 * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--trips", type=int, default=4000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    log = Log()
    with broker(options.python) as (frontend, backend, pid):
        todo = [
            Program("", [options.python, str(HERE / file), what, frontend, backend, str(count), *frames])
            for what, count in (("rate", options.messages), ("trip", options.trips))
            for file, frames in (("raw.py", ["1"]), ("raw.py", ["2"]), ("typed.py", []))
        ]
        for turn in range(options.rounds):
            print(f"round {turn + 1} of {options.rounds}", flush=True)
            for program in todo[turn % len(todo) :] + todo[: turn % len(todo)]:
                measure(log, program, pid)
            log.say("encode", encoding(), "us")
            log.say("one", 1.0, "")
    result = written(log, BARS, "bus", options.out, rounds=options.rounds)
    return 1 if result["failures"] else 0
