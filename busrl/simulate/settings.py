"""The setting of a simulated run, from a topology and the command line: service times and answers, with their origins.

Reads traces and prompts. Knows nothing of events or tables.

- Answers come from the first of these: --trace, --fit, `data.train` if its lines have lengths, the fit file beside the
  topology, and else a generated trace, whose lengths are an assumption.
- A live run follows the arrivals of `data.train` only with `data.arrivals`, and then goes through the file again and
  again. A trace of --trace is an open stream if its lines have arrival times, and ends with its last line.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from busrl.data.prompts import JsonlStream
from busrl.data.trace import Shape, TracedPrompt, make_trace, parse, read
from busrl.errors import DataError, UserError
from busrl.scheduling.admission import Arrivals
from busrl.simulate import fit
from busrl.simulate.actors import Times
from busrl.simulate.answers import Answers, Recorded, RecordedAnswers, TraceAnswers
from busrl.simulate.fit import FitFile, Fitted
from busrl.states import TINY
from busrl.topology import Topology

# -- answers -------------------------------------------------------------------------------------------------

GENERATED_PROMPTS = 2048


def answers_of(
    topology: Topology, trace: Path | None, fitted: Fitted | None, measured: FitFile | None, seed: int
) -> tuple[Answers, str]:
    """The answers, and a line for people about their origin and the changes to them."""
    train, tiny = Path(topology.data.train), topology.data.train.startswith(TINY)
    groups: Sequence[Recorded | TracedPrompt]
    if trace is not None:
        answers, note, groups = _traced(topology, trace, seed)
    elif fitted is not None:
        answers, note, groups = _recorded(topology, fitted, seed), f"recorded in {fitted.run_dir}", fitted.groups
    elif not tiny and (topology.scripted or topology.data.arrivals or _is_trace(train, topology)):
        answers, note, groups = _trained_on(topology, train, seed)
    elif measured is not None:
        answers, groups = measured.answers(topology, seed), measured.groups
        note = f"{measured.source} ({len(groups)} groups of it, by step)"
    else:
        return _generated(topology, train, seed)
    if topology.segments.on and any(getattr(group, "turns", ()) for group in groups):
        raise UserError("segments.length: these answers are episodes (turns), which are made whole; remove [segments]")
    return answers, note + _changes([_calls(group) for group in groups], topology)


def _is_trace(path: Path, topology: Topology) -> bool:
    try:
        with open(path, "rb") as file:
            first = file.readline().removesuffix(b"\n")
        return b'"lengths"' in first and bool(parse(first, f"{os.fspath(path)}:1", topology.data.prompt_key))
    except (OSError, DataError):
        return False


def _traced(topology: Topology, path: Path, seed: int) -> tuple[Answers, str, Sequence[TracedPrompt]]:
    """The answers of --trace: its lines as a run would draw them, or an open stream once, in its own order."""
    tasks = read(path, topology.data.prompt_key)
    if tasks[0].arrival_s is None:
        return _repeated(topology, path, tasks, seed), f"trace {path}", tasks
    tasks = sorted(tasks, key=lambda task: task.arrival_s or 0.0)
    answers = _of_tasks(topology, tasks, seed, endless=False)
    return answers, f"trace {path}; open stream: arrivals obeyed", tasks


def _trained_on(topology: Topology, path: Path, seed: int) -> tuple[Answers, str, Sequence[TracedPrompt]]:
    """The answers of a `data.train` with lengths, as a live run draws from it."""
    tasks = read(path, topology.data.prompt_key)
    arrivals = _arrivals(path, tasks) if topology.data.arrivals else None
    note = f"trace data.train = {path}"
    if arrivals is not None:
        note += "; open stream: arrivals obeyed"
    elif tasks[0].arrival_s is not None:
        note += "; its arrival_s are ignored, as in a run with data.arrivals = false"
    return _repeated(topology, path, tasks, seed, arrivals), note, tasks


def _recorded(topology: Topology, fitted: Fitted, seed: int) -> RecordedAnswers:
    """The answers of a recorded run, whose prompts arrive when those of `data.train` do."""
    answers, path = fitted.answers(topology, seed), Path(topology.data.train)
    if topology.data.arrivals:
        text_of, arrivals = answers.text_of, _arrivals(path, read(path, topology.data.prompt_key))
        answers.text_of = lambda draw: replace(text_of(draw), arrival_s=arrivals.time_of(draw))
    return answers


def _arrivals(path: Path, tasks: Sequence[TracedPrompt]) -> Arrivals:
    times = [task.arrival_s for task in tasks]
    listed = [time for time in times if time is not None]
    if len(listed) < len(times):
        raise UserError(f"{path}: data.arrivals = true, and no line has arrival_s; add them, or set it to false")
    for number, (before, time) in enumerate(pairwise(listed), 2):
        if time < before:
            raise UserError(
                f"{path}:{number}: arrival_s = {time}, after {before} on the line before: prompts arrive in the order "
                "of their lines; sort them"
            )
    return Arrivals(listed)


def _repeated(
    topology: Topology, path: Path, tasks: Sequence[TracedPrompt], seed: int, arrivals: Arrivals | None = None
) -> Answers:
    stream = JsonlStream(path, topology.run.seed, topology.data.shuffle, topology.data.prompt_key)
    arrival = None if arrivals is None else arrivals.time_of
    return _of_tasks(topology, tasks, seed, order=lambda draw: stream.item(draw).index, arrival=arrival)


def _of_tasks(topology: Topology, tasks: Sequence[TracedPrompt], seed: int, **more: Any) -> TraceAnswers:
    size, limit = topology.groups.size, topology.generation.max_new_tokens
    return TraceAnswers(tasks, size, limit, flat_share=topology.simulate.flat_share, seed=seed, **more)


def _generated(topology: Topology, train: Path, seed: int) -> tuple[Answers, str]:
    limit, size = topology.generation.max_new_tokens, topology.groups.size
    median = topology.simulate.length_median or max(1, limit // 4)
    tasks = make_trace(GENERATED_PROMPTS, Shape(group_size=size, median=median, limit=limit), seed)
    answers = _of_tasks(topology, tasks, seed, name="generated")
    text = f"assumed: long-tailed, median {median} tokens, at most {limit} (simulate.length_median)"
    missing = not topology.data.train.startswith(TINY) and not train.is_file()
    return answers, text + (f"; data.train = {train} is not there" if missing else "")


def _calls(group: Recorded | TracedPrompt) -> Sequence[int]:
    """The tokens of each answer; of an episode, those of its longest call, as each call has the limit."""
    turns = getattr(group, "turns", ())
    return [max(tokens for tokens, _ in calls) for calls in turns] or group.lengths


def _changes(lengths: Sequence[Sequence[int]], topology: Topology) -> str:
    """The changes that the topology makes to answers of these lengths by group, in words: cut, or repeated."""
    size, limit = topology.groups.size, topology.generation.max_new_tokens
    cut = sum(group[member % len(group)] > limit for group in lengths for member in range(size))
    short = sum(len(group) < size for group in lengths)
    text = f"; {cut} of {size * len(lengths)} answers cut by generation.max_new_tokens = {limit}" if cut else ""
    if short:
        text += f"; {short} of {len(lengths)} groups have fewer lengths than groups.size = {size}: they repeat"
    return text


def notes(noted: Iterable[tuple[str, str]]) -> list[str]:
    """The notes on the answers of each point of a sweep, each note once."""
    by: dict[str, list[str]] = {}
    for point, note in noted:
        by.setdefault(note, []).append(point)
    return list(by) if len(by) == 1 else [f"{', '.join(points)}: {note}" for note, points in by.items()]


# -- the setting ---------------------------------------------------------------------------------------------

MAX_ACTORS = 1 << 20
STEPS = 60  # played unless --steps is given: enough to be past the beginning of a run, and done in seconds


@dataclass(frozen=True)
class Setting:
    """The arguments of `World` beside the topology."""

    times: Times
    answers: Answers
    actors: int
    steps: int
    seed: int
    answers_note: str


def make(
    topology: Topology, fitted: Fitted | None = None, written: Collection[str] = frozenset(), *,
    trace: Path | None = None, actors: int | None = None, steps: int | None = None, seed: int | None = None,
) -> Setting:
    """The setting of one simulated run; `UserError` for one that cannot be. `written`: the keys in the topology file.
    The keyword arguments are options of the command line, None where they are left out."""
    if topology.learner.controller.mode == "act":
        raise UserError(
            'learner.controller.mode = "act": the controller follows the entropy of the policy, and a simulation '
            "trains none; add --set learner.controller.mode=off"
        )
    if topology.data.skip.on:
        raise UserError(
            "data.skip: which prompts are left out follows from how the policy answers them, and a simulation trains "
            "none; add --set data.skip.max_pass_rate=0 --set data.skip.min_pass_rate=0"
        )
    seed = topology.run.seed if seed is None else seed
    if seed < 0:
        raise UserError(f"--seed {seed}: must be >= 0; give another")
    steps = min(STEPS, topology.run.max_steps) if steps is None else steps
    if steps < 1:
        raise UserError(f"--steps {steps}: must be >= 1; leave it out for the first {STEPS}")
    measured = fit.fit_file(topology)
    times = fit.times_of(topology, written, None if fitted is None else fitted.times, measured)
    answers, note = answers_of(topology, trace, fitted, measured, seed)
    return Setting(times, answers, actors_of(topology, actors), steps, seed, note)


def actors_of(topology: Topology, chosen: int | None) -> int:
    if chosen is not None:
        if not 1 <= chosen <= MAX_ACTORS:
            raise UserError(f"--actors {chosen}: must be 1 to {MAX_ACTORS}; leave it out for those of the topology")
        return chosen
    counted = sum(process.count for process in topology.process if process.role == "rollout")
    return topology.simulate.actors or max(1, counted)
