"""The whole loop at 10 M parameters: busrl, its own sync mode, a plain PyTorch loop and TRL, alternated in rounds.

    python -m benchmarks loop-10m --trl-python .venv/trl/bin/python        (about 20 minutes on two quiet cores)
    python -m benchmarks loop-10m --shape words-10m

A turn starts a side as its user would, leaves out its first steps, and counts samples, tokens, seconds and CPU seconds
of all its processes from one end of a step to another, at least `--seconds` later. A round has a turn of each side.
Where drawing runs ahead of training, a sample counts once it is both drawn and trained within the turn: the smaller of
the two numbers, so that nothing drawn before is had for nothing.

Equal for all: model folder (random weights; `body-10m` has nearly all in its layers, `words-10m` in its embedding),
prompts, reward, samples per step, the distribution of lengths (long-tailed, from the model's own end token), float32,
temperature 1, clip 0.2/0.28, advantages by group, the mean over the tokens of a step, fused AdamW (0.9, 0.95), lr.
Not equal:
- busrl's `batch-async` draws with weights up to two steps old; the others with the newest. Nothing is learned here, so
  what that costs in updates is not seen: `compare` shows it.
- busrl records the log-probability of each token as it is drawn, and writes a log and metrics; the others take the
  ratio for 1 and write nothing.
- busrl decodes up to `--rows` sequences as they come, the others all of a step, and wait for the longest.
- `-1` and `-2`: threads of each numeric process. busrl and TRL have two such processes of one thread, a loop has one.
  `sync-2` and `loop-2` use both cores in turn, `sync-1` and `loop-1` leave one idle, and spend less.
- `batch`: the plain loop drawn by transformers' continuous batching, `loop` by `generate`; so for `trl-batch`, `trl`.
- torchrun gives each rank of TRL a session of its own, so on a loaded machine TRL gets more of the clock than others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.common import sides, systems
from benchmarks.common.judge import Bar, Log, in_rounds
from benchmarks.rivals.work import SHAPES, Work

LOOK_S = 0.02
SHARE_OF_TRL, SHARE_OF_LOOP, SHARE_OF_SYNC = 2.5, 1.5, 1.2  # bars
# No validation and no checkpoints; a step has as many groups as the others draw.
TOPOLOGY = """
[run]
name = "loop-10m"
max_steps = 100000
[model]
path = "{folder}/model"
device = "cpu"
[data]
train = "{folder}/train.jsonl"
[groups]
size = {work.group}
[generation]
max_new_tokens = {work.longest}
max_prompt_tokens = {work.prompt}
max_batch = {rows}
[learner]
lr = {work.lr}
betas = [0.9, 0.95]
checkpoint_every = 0
[learner.trigger]
n_min = {work.groups}
count = "ended"
t_max_s = "inf"
[weights]
mode = "{mode}"
[reward]
function = "{reward}:score"
[[process]]
role = "rollout"
threads = {threads}
[[process]]
role = "learner"
threads = {threads}
[[process]]
role = "reward"
"""


@dataclass(frozen=True)
class Turn:
    """Where a side runs and with what; `folder` has the work, `place` is empty at its start."""

    folder: Path
    place: Path
    work: Work
    options: argparse.Namespace


@dataclass(frozen=True)
class Side:
    """Makes a command, and the file to which it adds a line of JSON at the end of each step."""

    start: Callable[[Turn], tuple[list[str], Path]]
    threads: int = 1
    skipped: int = 1  # steps before the counted ones
    runs_ahead: bool = False


# -- the sides ---------------------------------------------------------------------------------------------------------


def busrl(mode: str, threads: int) -> Callable[[Turn], tuple[list[str], Path]]:
    def start(turn: Turn) -> tuple[list[str], Path]:
        topology, run = turn.place / "loop.toml", turn.place / "run"
        reward = ROOT / "benchmarks" / "rivals" / "work.py"
        topology.write_text(TOPOLOGY.format(
            folder=turn.folder, work=turn.work, mode=mode, threads=threads, reward=reward, rows=turn.options.rows))
        command = [sys.executable, "-m", "busrl.cli", "launch", str(topology), "--run-dir", str(run)]
        return [*command, *(part for pair in turn.options.overrides for part in ("--set", pair))], run / "metrics.jsonl"

    return start


def plain(threads: int, *more: str) -> Callable[[Turn], tuple[list[str], Path]]:
    def start(turn: Turn) -> tuple[list[str], Path]:
        lines = turn.place / "steps.jsonl"
        command = [sys.executable, "-m", "benchmarks.rivals.plain", "loop", str(turn.folder), str(lines)]
        return [*command, f"--threads={threads}", *more], lines

    return start


def trl(*more: str) -> Callable[[Turn], tuple[list[str], Path]]:
    def start(turn: Turn) -> tuple[list[str], Path]:
        lines = turn.place / "steps.jsonl"
        command = [*systems.trl_command(turn.options.trl_python), f"--folder={turn.folder}", f"--steps-file={lines}"]
        return [*command, f"--groups={turn.work.groups}", f"--lr={turn.work.lr}", "--max-updates=100000", *more], lines

    return start


SIDES = {
    "busrl": Side(busrl("batch-async", 1), skipped=3, runs_ahead=True),  # after 3 steps it is as far ahead as it may be
    "sync-1": Side(busrl("sync", 1)),
    "sync-2": Side(busrl("sync", 2), 2),
    "loop-1": Side(plain(1)),
    "loop-2": Side(plain(2), 2),
    "batch-1": Side(plain(1, "--continuous")),
    "batch-2": Side(plain(2, "--continuous"), 2),
    "trl": Side(trl()),
    "trl-batch": Side(trl("--continuous")),
}


# -- a turn ------------------------------------------------------------------------------------------------------------


class StepLines:
    """The lines that a side has written of its steps so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.read, self.tail = path, 0, b""
        self.rows: list[dict[str, Any]] = []

    def look(self) -> int:
        """Number of finished steps."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                file.seek(self.read)
                fresh = file.read()
            self.read += len(fresh)
            *lines, self.tail = (self.tail + fresh).split(b"\n")
            self.rows += [row for row in map(json.loads, lines) if "samples" in row]
        return len(self.rows)


class Drawn:
    """Number of answers that a run has drawn so far, by its ring's own counter."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def __call__(self) -> int:
        from busrl.paths import RunPaths
        from busrl.ring import Ring, State

        ring = Ring.attach(RunPaths.of(self.run_dir).ring_name, read_only=True)
        try:
            return int(ring.transitions(State.GENERATED))
        finally:
            ring.close()


@dataclass(frozen=True)
class Counted:
    """Figures of a turn, and the CPU milliseconds of a sample by process."""

    figures: dict[str, float]
    by_process: dict[str, float]


def measure(name: str, turn: Turn) -> Counted:
    """Start a side, look at it until its counted steps are over, and end it."""
    side = SIDES[name]
    command, lines = side.start(turn)
    with (turn.place / "said").open("w+") as said:
        child = sides.started(
            command, env=systems.environment(side.threads), stdin=subprocess.DEVNULL, stdout=said,
            stderr=subprocess.STDOUT, cwd=turn.place,
        )
        try:
            drawn = Drawn(lines.parent) if side.runs_ahead else None
            return counted(child, side.skipped, StepLines(lines), turn.options, drawn)
        except systems.RunFailed as failed:
            said.seek(0)
            raise systems.RunFailed(f"{failed}: {said.read()[-2000:]}") from failed
        finally:
            systems.stop(child)


def counted(
    child: subprocess.Popen[Any], skipped: int, steps: StepLines, options: argparse.Namespace,
    drawn: Callable[[], int] | None = None,
) -> Counted:
    """Figures between two ends of steps of a running side."""
    tree, deadline = sides.CpuOfTree(child.pid), time.monotonic() + options.limit
    begun = cpu = 0.0
    first = before = ahead = 0
    names: dict[str, float] = {}
    while True:
        done = steps.look()
        if done > before and done >= skipped:
            before, now, used = done, time.monotonic(), tree.now()
            if not first:
                first, begun, cpu, ahead, names = done, now, used, drawn() if drawn else 0, tree.by_name()
            elif now - begun >= options.seconds and done - first >= options.steps:
                break
        if child.poll() is not None:
            raise systems.RunFailed(f"ended with {child.returncode} after {done} steps")
        if time.monotonic() > deadline:
            raise systems.RunFailed(f"made {done} steps within {options.limit:g} s")
        time.sleep(LOOK_S)
    rows = steps.rows[first:done]
    trained = sum(row.get("samples_ended", row["samples"]) for row in rows)
    answers = drawn() - ahead if drawn else trained
    samples, tokens = min(trained, answers), sum(row["tokens"] for row in rows)
    seconds, cpu_seconds = now - begun, used - cpu
    by_process = {
        name: round(1e3 * (spent - names.get(name, 0.0)) / samples, 2) for name, spent in tree.by_name().items()}
    return Counted({
        "samples_per_cpu_s": samples / cpu_seconds, "samples_per_s": samples / seconds, "cores": cpu_seconds / seconds,
        "tokens_per_cpu_s": tokens * samples / trained / cpu_seconds,
        "tokens_per_sample": tokens / sum(row["samples"] for row in rows),
        "drawn_per_trained": answers / trained, "steps": len(rows), "seconds": seconds,
    }, by_process)


UNITS = {"samples_per_cpu_s": "samples/CPU s", "samples_per_s": "samples/s", "cores": "CPU s/s",
         "tokens_per_cpu_s": "tokens/CPU s", "tokens_per_sample": "tokens", "drawn_per_trained": "", "steps": "",
         "seconds": "s"}


# -- the comparison ----------------------------------------------------------------------------------------------------


def bars(chosen: list[str]) -> list[Bar]:
    """Ratios of busrl over each rival. By the clock only the bar against `sync` is one that the project has set."""
    rows = []
    for rival in chosen[1:] if chosen[0] == "busrl" else []:
        limits = {"sync": (1.0, SHARE_OF_SYNC), "trl": (SHARE_OF_TRL, 1.0)}.get(
            rival.partition("-")[0], (SHARE_OF_LOOP, 1.0))
        for figure, limit in zip(("samples_per_cpu_s", "samples_per_s"), limits):
            what = f"busrl over {rival}, {UNITS[figure].replace('/', ' per ')}"
            note = "" if limit != 1.0 else "no bar of its own: 1 is as fast"
            rows.append(Bar(what, f"busrl:{figure}", f"{rival}:{figure}", limit, False, note))
    return rows


def table(log: Log, chosen: list[str], result: dict[str, Any]) -> str:
    """Medians and ratios as Markdown."""
    ratios = {bar["rival"]: bar["ratio"] for bar in result["bars"]}
    lines = ["| side | samples per CPU s | busrl is | samples per s | busrl is | cores | tokens per sample |",
             "|---|---|---|---|---|---|---|"]
    for side in chosen:
        if f"{side}:seconds" in log.values:
            median = {figure: result["medians"][f"{side}:{figure}"]["value"] for figure in UNITS}
            cells = [side]
            for figure in ("samples_per_cpu_s", "samples_per_s"):
                ratio = ratios.get(f"{side}:{figure}")
                cells += [f"{median[figure]:.2f}", f"{ratio:.2f} times" if ratio else ""]
            cells += [f"{median['cores']:.2f}", f"{median['tokens_per_sample']:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(options: argparse.Namespace, chosen: list[str]) -> int:
    log, turns = Log(), []
    work = Work(options.shape, groups=options.groups, longest=options.longest, mean=options.mean)

    def measure_round(number: int) -> None:
        for name in chosen[number % len(chosen) :] + chosen[: number % len(chosen)]:
            one_turn(log, turns, name, work, options)

    shown = {key: value for key, value in vars(options).items() if key not in ("out", "made", "trl_python")}
    result = in_rounds(
        log, options.rounds, measure_round, bars(chosen),
        "loop-10m" if options.shape == "body-10m" else f"loop-10m-{options.shape}", options.out,
        settings=shown, model=SHAPES[options.shape], turns=turns)
    print(table(log, chosen, result))
    return 1 if log.failures else 0


def one_turn(
    log: Log, turns: list[dict[str, Any]], name: str, work: Work, options: argparse.Namespace
) -> None:
    """Measure a side once; a side that fails is kept with its last words."""
    with tempfile.TemporaryDirectory(prefix="busrl-bench-") as place:
        folder = options.made
        before = os.getloadavg()[0]
        try:
            turn = measure(name, Turn(folder, Path(place), work, options))
        except systems.RunFailed as failed:
            log.failures[name] = str(failed)
            print(f"  {name}: {failed}", file=sys.stderr, flush=True)
            return
    log.loads.append(before)
    turns.append({
        "side": name, "before": before, "after": os.getloadavg()[0], "cpu_ms_per_sample": turn.by_process})
    figures = turn.figures
    for figure, value in figures.items():
        log.say(f"{name}:{figure}", value, UNITS[figure])
    print(f"  {name:9} {figures['samples_per_cpu_s']:6.2f} samples per CPU s, {figures['samples_per_s']:6.2f} per s, "
          f"{figures['steps']:g} steps, load {before:.1f}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[name for name in SIDES if name != "loop-2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="that are counted in a turn, at least")
    parser.add_argument("--steps", type=int, default=2, help="that are counted in a turn, at least")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a turn may take")
    parser.add_argument("--shape", choices=SHAPES, default="body-10m")
    parser.add_argument("--groups", type=int, default=4, help="of 8 samples in a step")
    parser.add_argument("--mean", type=float, default=40.0, help="length of a completion")
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64, help="sequences that busrl's rollout draws at the same time")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="for busrl")
    parser.add_argument("--trl-python", default=os.environ.get("BUSRL_TRL_PYTHON", ""), help="Python that has TRL")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    options.trl_python = options.trl_python and os.path.abspath(options.trl_python)
    chosen = [name for name in options.sides if options.trl_python or not name.startswith("trl")]
    if chosen != options.sides:
        print("without --trl-python TRL is not measured: see benchmarks/README.md", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="busrl-bench-") as folder:
        options.made = Path(folder)
        Work(options.shape, groups=options.groups, longest=options.longest, mean=options.mean).write(options.made)
        return compare(options, chosen)
