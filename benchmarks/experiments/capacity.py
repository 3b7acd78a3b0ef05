"""Share of its own speed that a learner reaches when generation is 0.8 to 1.3 times as fast as it needs.

    python -m benchmarks capacity

A real learner (the quickstart's model, one thread, a core of its own) with 16 scripted actors whose pace is set from
the speed that the same learner has with recorded batches in memory. After every run its own batches, from its
write-ahead log, are fed to the same TrainingStep in a fresh process: trained tokens per second of the run over those
from memory is the figure. `cpu_ratio` compares CPU seconds per token instead, without waiting: what the learner role
costs beside training, also on a machine that others use. Busy is forward, backward and optimiser alone.
`ratio_beside` compares with the same batches from memory while processes that do nothing but count use as much CPU as
the rest of the run did: what busrl costs where cores share caches and memory, which slows down any two processes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import COMMAND, ROOT
from benchmarks.common import live, sides
from busrl.ledger.wal import Record, frames
from busrl.topology import Topology

ACTORS = 16
FIRST = 4  # steps left out: buffers fill
SHOWN = ("ratio", "ratio_beside", "cpu_ratio", "busy", "busy_from_memory", "actors_busy", "age_mean")
BAR = {1.0: 0.90, 1.1: 0.95, 1.3: 0.95}


# -- the same learner, fed from memory ------------------------------------------------------------------------------


def records(folder: Path) -> list[Record]:
    decoder = msgspec.msgpack.Decoder(Record)
    parts = (frames(path.read_bytes()) for path in sorted(folder.glob("*.wal")))
    return [decoder.decode(payload) for part in parts for payload, _ in part]


def feed(topology_file: Path, log: Path) -> dict[str, float]:
    """Train the batches of a log as fast as they can be; runs in a process of its own."""
    from busrl.roles.learner.step import TrainingStep

    training = TrainingStep(Topology.from_json(topology_file.read_text()))
    batches = records(log)
    gc.collect()
    gc.freeze()  # as every process of a run does
    seconds = cpu = busy = tokens = 0.0
    for record in batches:
        begun, used = time.perf_counter(), time.process_time()
        stats = training.train(record.samples, len(record.groups), record.version)
        if record.step > FIRST:
            seconds += time.perf_counter() - begun
            cpu += time.process_time() - used
            busy += stats.forward_s + stats.backward_s + stats.step_s
            tokens += stats.tokens
    return {"tokens_per_s": tokens / seconds, "busy": busy / seconds, "cpu_per_token": cpu / tokens}


NEIGHBOUR = """
import os, sys, time
share, parent = float(sys.argv[1]), os.getppid()
while os.getppid() == parent:  # 10 ms turns, as a scripted actor and the light processes have
    end = time.process_time() + 0.01 * share
    while time.process_time() < end:
        pass
    time.sleep(0.01 * (1 - share))
"""


@contextlib.contextmanager
def neighbours(share: float) -> Iterator[None]:
    """Processes that use so many cores together, half a core each at most."""
    count = math.ceil(share / 0.5)
    children = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(share / count)]) for _ in range(count)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def fed(topology_file: Path, log: Path) -> dict[str, float]:
    command = [*COMMAND, "capacity", "--feed", str(topology_file), str(log)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    ended = sides.ran(command, env=env, check=True, timeout_s=live.LIMIT_S)
    figures: dict[str, float] = json.loads(ended.output.splitlines()[-1])
    return figures


class Used:
    """CPU seconds of the learner when each step had been made: they do not depend on what else the machine does."""

    def __init__(self, run: live.runs.BenchRun) -> None:
        self.run, self.at, self.pid = run, {0: 0.0}, 0

    def look(self) -> None:
        step = self.run.attach().header("step")
        if step <= self.last:
            return
        self.pid = self.pid or self.run.process("learner").pid
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            self.at[step] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def last(self) -> int:
        """The last step that was seen."""
        return max(self.at)

    def after(self, first: int) -> tuple[int, int, float]:
        """A step from `first` on, the last one, and the CPU seconds between them."""
        begin = min(step for step in self.at if step >= first)
        return begin, self.last, self.at[self.last] - self.at[begin]


# -- a run ----------------------------------------------------------------------------------------------------------


def settings_of(options: argparse.Namespace, trace: Path, capacity: float) -> dict[str, object]:
    """`capacity`: tokens per second of all actors together."""
    rows = options.rows
    return {
        "data.train": trace, "groups.size": 8, "generation.max_new_tokens": options.limit, "generation.max_batch": rows,
        "mock.token_s": ACTORS * rows / capacity, "mock.per_sequence_s": 0, "mock.prefill_s_per_token": 0,
        "mock.jitter": 0, "scheduler.ahead": 0, "learner.trigger.n_min": options.groups,
        "weights.max_staleness": options.staleness, "run.max_steps": options.steps,
        "learner.checkpoint_every": 0, "learner.micro_batch_min_samples": 64,
        "learner.micro_batch_tokens": options.micro_batch_tokens, "process.learner.cpus": options.learner_cpus,
    }


def measure(options: argparse.Namespace, folder: Path, trace: Path, capacity: float) -> dict[str, Any]:
    """Make a run, and its own batches from memory."""
    kept = Path(tempfile.mkdtemp(dir=folder))
    load = os.getloadavg()[0]
    with live.runs.run(*live.flat(settings_of(options, trace, capacity)), config=live.SCRIPTED) as run:
        run.until("the topology", run.paths.topology.exists)
        (kept / "topology.json").write_text(run.paths.topology.read_text())
        used = Used(run)
        live.watch(run, used.look, done=lambda: live.keep_log(run, kept / "wal"))
        if run.wait():
            raise RuntimeError(run.tail())
        rows, summary = live.rows_of(run)[FIRST:], run.summary()
    seconds = sum(row["seconds"] for row in rows)
    busy = sum(row["forward_s"] + row["backward_s"] + row["update_s"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    memory = fed(kept / "topology.json", kept / "wal")
    others = sum(part["cpu_share"] for name, part in summary["processes"].items() if name != "learner")
    with neighbours(others):
        beside = fed(kept / "topology.json", kept / "wal")
    begin, end, cpu = used.after(FIRST)
    cpu /= sum(row["tokens"] for row in rows if begin < row["step"] <= end)
    waits: dict[str, float] = {}
    for row in rows:
        for name, value in row["wait_s"].items():
            waits[name] = round(waits.get(name, 0.0) + value / seconds, 4)
    actors = [part["busy_share"] for name, part in summary["processes"].items() if name.startswith("rollout/")]
    return {
        "tokens_per_s": round(tokens / seconds), "from_memory": round(memory["tokens_per_s"]),
        "ratio": round(tokens / seconds / memory["tokens_per_s"], 3), "busy": round(busy / seconds, 3),
        "busy_from_memory": round(memory["busy"], 3), "others_cores": round(others, 3),
        "beside": round(beside["tokens_per_s"]), "ratio_beside": round(tokens / seconds / beside["tokens_per_s"], 3),
        "cpu_ratio": round(memory["cpu_per_token"] / cpu, 3), "seconds_per_step": round(seconds / len(rows), 3),
        "waits": waits, "age_mean": round(statistics.fmean(row["age_mean"] for row in rows), 2),
        "actors_busy": round(statistics.fmean(actors), 3), "load_before": round(load, 2),
    }


def need(options: argparse.Namespace, folder: Path, trace: Path) -> float:
    """Tokens per second of the learner fed from memory: from a run whose actors are faster than any learner."""
    figures = measure(options, folder, trace, 200_000.0)
    print(f"from memory {figures['from_memory']} tokens/s; with plenty {figures}", flush=True)
    return float(figures["from_memory"])


def experiment(options: argparse.Namespace) -> dict[str, Any]:
    cells = []
    with tempfile.TemporaryDirectory(prefix="busrl-capacity-") as name:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        live.make_trace(trace, 1024, 0, group_size=8, median=options.median, limit=options.limit)
        needed = need(options, folder, trace)
        for turn in range(options.rounds):
            for share in options.shares[:: 1 if turn % 2 == 0 else -1]:
                figures = {"share": share, "round": turn, **measure(options, folder, trace, share * needed)}
                cells.append(figures)
                print(json.dumps(figures), flush=True)
    table = []
    for share in options.shares:
        mine = [cell for cell in cells if cell["share"] == share]
        medians = {key: statistics.median(cell[key] for cell in mine) for key in SHOWN}
        bar = BAR.get(share)
        table.append({"share": share, **medians, "bar": bar, "met": None if bar is None else medians["ratio"] >= bar})
    shown = {key: value for key, value in vars(options).items() if key != "feed"}
    return {"settings": shown, "need_tokens_per_s": needed, "table": table, "runs": cells}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8, 0.9, 1.0, 1.1, 1.3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=32, help="groups of 8 per step")
    parser.add_argument("--median", type=float, default=20.0, help="median length of an answer, tokens")
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4, help="sequences that an actor generates at once")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--learner-cpus", default="0", help="a core of its own; empty = it shares all with the actors")
    parser.add_argument("--name", default="capacity")
    parser.add_argument("--feed", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.feed:
        print(json.dumps(feed(*options.feed)))
        return 0
    result = experiment(options)
    live.save(options.name, result)
    for row in result["table"]:
        print(row)
    return 0
