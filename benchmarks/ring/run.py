"""The ring against raw memory and against what people use instead; every bar with its ratio.

    python -m benchmarks ring --rivals-python DIR/bin/python       (see requirements.txt)

`array:busrl` waits by looking, on a core for each side, which no process of a run does; `array:busrl blocking` sleeps
until it is woken, as they do. `NAME cpu` is the CPU time of one round trip, in all processes of a system.

Each round runs every program once, in turn. Rivals run in the Python that is given, busrl's own programs too, so that
all have the same interpreter and NumPy; busrl itself comes from this checkout and must be built in place.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import RESULTS, ROOT
from benchmarks.common import sides
from benchmarks.common.judge import Bar, Log, Program, written

PAGE, MEGA = "4096", str(1 << 20)
SIZES = (64, 256, 1024, 4096, 16384, 65536)

HERE = ROOT / "benchmarks" / "ring"
ONE_BY_ONE = ("mp.Queue", "faster-fifo", "ray put+get")
NO_BAR = "no bar of its own: what a process that waits asleep has of it"
BARS = (
    Bar("C++ hand-off, 48 bytes of the control line's first cache line, over a raw line", "ring_line", "raw_line", 2.0),
    Bar("C++ hand-off, 48 bytes written by the owner on both cache lines", "ring_both_lines", "raw_line", 2.0),
    Bar("C++ hand-off with 4 KiB over the same lines moved raw", "ring_4k", "raw_4k", 2.0),
    Bar("blocking hand-off over a raw futex pair", "ring_blocking", "raw_futex", 1.3),
    Bar("filling and handing over 1 MiB over memcpy into the same memory", "ring_fill_1m", "memcpy_1m", 0.85, False),
    *(Bar(f"claim at {n} slots over claim at 64", f"take_{n}", "take_64", 1.2) for n in SIZES[1:]),
    *(Bar(f"commit at {n} slots over commit at 64", f"commit_{n}", "commit_64", 1.2) for n in SIZES[1:]),
    *(Bar(f"full scan of {n} slots, ns a slot", f"scan_{n}", "one", 10.0) for n in SIZES),
    Bar("Python round trip at 4 KiB over iceoryx2", "4k:busrl", "4k:iceoryx2", 1.0),
    Bar("Python round trip at 1 MiB, unfilled, over iceoryx2", "1m:busrl", "1m:iceoryx2", 1.5),
    Bar("multiprocessing.Queue over busrl, 1 MiB there and back", "array:mp.Queue", "array:busrl", 40.0, False),
    Bar("faster-fifo over busrl, 1 MiB there and back", "array:faster-fifo", "array:busrl", 25.0, False),
    Bar("Ray put and get over busrl, 1 MiB there and back", "array:ray put+get", "array:busrl", 20.0, False),
    *(Bar(f"{rival} over busrl that sleeps, 1 MiB there and back", f"array:{rival}", "array:busrl blocking", 1.0, False,
          NO_BAR) for rival in ONE_BY_ONE),
    *(Bar(f"{rival} over busrl that sleeps, CPU time", f"array:{rival} cpu", "array:busrl blocking cpu", 1.0, False,
          NO_BAR) for rival in ONE_BY_ONE),
    Bar("TransferQueue over busrl, one sample of 1 MiB", "array:TransferQueue", "array:busrl", 50.0, False),
    Bar("TransferQueue over busrl, 256 samples of 4 KiB", "batch:TransferQueue", "batch:busrl", 10.0, False),
)


def core(out: str) -> str:
    """The compiled C++ program."""
    command = ["g++", "-std=c++17", "-O2", "-pthread", f"-I{ROOT}/csrc/include", str(HERE / "core.cpp"), "-o", out]
    sides.ran(command, check=True, keep_errors=False)
    return out


def programs(python: str, binary: str) -> list[Program]:
    here, rivals = HERE / "rivals", ("busrl_ring.py", "iceoryx2_pubsub.py")

    def program(label: str, file: str, *more: str) -> Program:
        uses_ray = file in ("ray_store.py", "transfer_queue_kv.py")
        return Program(label, [python, file, *more], here, settle_s=5.0 if uses_ray else 0.0)

    return [
        Program("", [binary, "1"]),
        *(program("4k", file, "--size", PAGE, "--count", "5000", "--own") for file in rivals),
        *(program("1m", file, "--size", MEGA, "--count", "5000", "--own") for file in rivals),
        program("filled", "busrl_ring.py", "--count", "600", "--own", "--fill"),
        program("filled", "iceoryx2_pubsub.py", "--count", "600", "--own", "--fill"),
        program("array", "busrl_ring.py", "--count", "600", "--fill"),
        program("array", "busrl_ring.py", "--count", "600", "--fill", "--blocking"),
        program("array", "mp_queue.py", "--count", "150"),
        program("array", "faster_fifo_queue.py", "--count", "150"),
        program("array", "ray_store.py", "--count", "60"),
        program("array", "transfer_queue_kv.py", "--count", "40"),
        program("batch", "busrl_batch.py", "--size", PAGE, "--batch", "256", "--count", "100"),
        program("batch", "transfer_queue_kv.py", "--size", PAGE, "--batch", "256", "--count", "20"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rivals-python", default=sys.executable, help="a Python with requirements.txt installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="run only programs whose label or file contains this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    log = Log()
    result: dict[str, object] = {"failures": {}}
    with tempfile.TemporaryDirectory() as folder:
        rivals = os.path.abspath(options.rivals_python)  # programs run elsewhere
        todo = [p for p in programs(rivals, core(f"{folder}/core")) if options.only in " ".join(p.argv)]
        for turn in range(options.rounds):
            print(f"round {turn + 1} of {options.rounds}", flush=True)
            for program in todo[turn % len(todo) :] + todo[: turn % len(todo)]:
                log.run(program)
            log.say("one", 1.0, "")
            # After each round, so that a run that is cut short keeps its rounds.
            result = written(log, BARS, "ring", options.out, rounds=turn + 1)
    return 1 if result["failures"] else 0
