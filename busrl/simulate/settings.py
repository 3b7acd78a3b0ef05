"""From a topology and the command line to what a simulated run needs: service times and answers.

Reads traces, prompts and, through `fit`, a finished run. Says of everything where it came from. Knows nothing of
events or tables.

- Where the answers come from, the first of these: --trace, --fit, `data.train` if its lines have lengths, and else a
  generated trace, whose lengths are an assumption.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from busrl.data.stream import JsonlStream
from busrl.data.trace import parse, read
from busrl.data.tracemaker import Shape, generate
from busrl.errors import DataError, UserError
from busrl.simulate.answers import Answers, TraceAnswers
from busrl.simulate.control import refuse
from busrl.simulate.fit import Fitted
from busrl.simulate.times import Times
from busrl.topology import Topology
from busrl.topology.schema import TINY

GENERATED_PROMPTS = 2048
STATED = "assumed, [simulate]"
MAX_ACTORS = 1 << 20


@dataclass(frozen=True)
class Setting:
    """All that `World` takes besides the topology."""

    times: Times
    answers: Answers
    actors: int
    steps: int
    seed: int
    answers_note: str


@dataclass(frozen=True)
class Asked:
    """What the command line says; None or "" where it says nothing."""

    trace: Path | None = None
    actors: int | None = None
    steps: int | None = None
    seed: int | None = None


def make(topology: Topology, asked: Asked, fitted: Fitted | None = None) -> Setting:
    """The setting of one simulated run; `UserError` for what can not be."""
    refuse(topology)
    seed = topology.run.seed if asked.seed is None else asked.seed
    if seed < 0:
        raise UserError(f"--seed {seed}: must be >= 0; give another")
    steps = topology.run.max_steps if asked.steps is None else asked.steps
    if steps < 1:
        raise UserError(f"--steps {steps}: must be >= 1; leave it out for run.max_steps = {topology.run.max_steps}")
    answers, note = _answers(topology, asked.trace, fitted, seed)
    times = fitted.times if fitted is not None else stated(topology)
    return Setting(times, answers, actors_of(topology, asked.actors), steps, seed, note)


def stated(topology: Topology) -> Times:
    """The times of the topology's [simulate] section."""
    known = {one.name for one in dataclasses.fields(Times)}
    given = {name: value for name, value in dataclasses.asdict(topology.simulate).items() if name in known}
    if given["step_s"] + given["row_s"] <= 0:
        raise UserError("simulate.step_s = 0 and simulate.row_s = 0: a decoding step must take some time; raise one")
    return Times().with_source(dict.fromkeys(given, STATED), **given)


def actors_of(topology: Topology, asked: int | None) -> int:
    """How many rollout processes to simulate."""
    if asked is not None:
        if not 1 <= asked <= MAX_ACTORS:
            raise UserError(f"--actors {asked}: must be 1 to {MAX_ACTORS}; leave it out for those of the topology")
        return asked
    counted = sum(process.count for process in topology.process if process.role == "rollout")
    return topology.simulate.actors or max(1, counted)


def _answers(topology: Topology, trace: Path | None, fitted: Fitted | None, seed: int) -> tuple[Answers, str]:
    if trace is not None:
        return _traced(topology, trace, seed), f"trace {trace}"
    if fitted is not None:
        return fitted.answers(topology, seed), f"recorded in {fitted.run_dir}"
    path = Path(topology.data.train)
    if not topology.data.train.startswith(TINY) and _is_trace(path, topology.data.prompt_key):
        return _traced(topology, path, seed), f"trace data.train = {path}"
    return _generated(topology, seed)


def _traced(topology: Topology, path: Path, seed: int) -> Answers:
    """The lines of a trace, drawn in the order in which a run would draw them; an open stream in its own."""
    tasks = read(path, topology.data.prompt_key)
    stream = JsonlStream(path, topology.run.seed, topology.data.shuffle, topology.data.prompt_key)
    open_stream = tasks[0].arrival_s is not None
    if open_stream:
        tasks = sorted(tasks, key=lambda task: task.arrival_s or 0.0)
    return TraceAnswers(
        tasks,
        topology.groups.size,
        topology.generation.max_new_tokens,
        order=None if open_stream else lambda draw: stream.item(draw).index,
        flat_share=topology.simulate.flat_share,
        seed=seed,
        endless=not open_stream,
    )


def _is_trace(path: Path, prompt_key: str) -> bool:
    """Whether the first line has lengths."""
    try:
        with open(path, "rb") as file:
            first = file.readline().removesuffix(b"\n")
        return b'"lengths"' in first and bool(parse(first, f"{os.fspath(path)}:1", prompt_key))
    except (OSError, DataError):
        return False


def _generated(topology: Topology, seed: int) -> tuple[Answers, str]:
    limit = topology.generation.max_new_tokens
    median = topology.simulate.length_median or max(1, limit // 4)
    tasks = generate(GENERATED_PROMPTS, Shape(group_size=topology.groups.size, median=median, limit=limit), seed)
    answers = TraceAnswers(
        tasks, topology.groups.size, limit, flat_share=topology.simulate.flat_share, seed=seed, name="generated"
    )
    return answers, f"assumed: long-tailed, median {median} tokens, at most {limit} (simulate.length_median)"

