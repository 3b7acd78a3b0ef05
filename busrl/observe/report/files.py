"""The files of a run, each read once from beginning to end, and the faults of those that could not be read as a whole.

Opens files of a run directory for reading only. Knows nothing of pages, timelines and the ring.

- A damaged or half-written line is left out, counted, and named in `faults` with its file and number.
- A line of a step replaces all earlier ones with its step or a later one, as in the train log.
- Files may hold anything: a value that should be a number and is none counts as not known.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.capabilities import plugs
from busrl.errors import NoSuchRun
from busrl.ledger import controls
from busrl.ledger.controls import ControlLine
from busrl.ledger.trained import of_step
from busrl.paths import RunPaths
from busrl.states import Fate
from busrl.status.reader import holder_of, summary_of
from busrl.status.runfiles import number
from busrl.status.state import RoundRecord, RunState
from busrl.system.files import as_map, dropped, read_map, whole_file

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
T = TypeVar("T")
Whole = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
# Fields of a step that are kept: a run of a hundred thousand steps has to fit into memory.
KEPT = (
    "step", "version", "cause", "time", "seconds", "waits", "wait_s", "forward_s", "backward_s", "update_s",
    "publish_s", "checkpoint_s", "reward", "reward_trained", "length_ended", "length_mean", "length_p95", "entropy",
    "ess", "age_mean", "age_max", "flat_share", "cut_share", "never_trained", "masked", "tokens", "samples",
    "grad_norm", "reward_parts",
)
WHOLE = ("topology", "run_json", "summary", "supervisor")  # files that are one map


class GroupsLine(msgspec.Struct):
    step: Whole
    draws: list[Whole]
    fates: str
    born: list[Whole]
    lengths: list[list[Whole]]


@dataclass(frozen=True)
class Groups:
    """The groups that ended, in the order of their lines: a row each. `lengths` has those of all samples, one after the
    other, `sizes` the number of each group's. `undone`: trained, and undone by a return to a checkpoint."""

    steps: Ints
    draws: Ints
    fates: Ints
    born: Ints
    sizes: Ints
    lengths: Ints
    undone: npt.NDArray[np.bool_]

    @property
    def of_sample(self) -> Ints:
        """The row of each sample's group."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @property
    def tokens(self) -> Ints:
        return np.bincount(self.of_sample, self.lengths, len(self.sizes)).astype(np.int64)


@dataclass
class RunRecord:
    """The files of a run that were read, and `faults` of them; large files are read by methods."""

    paths: RunPaths
    steps: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # a few: the best, the worst, the last
    requests: list[ControlLine] = field(default_factory=list)  # to the run while it ran
    pace: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by rollout process
    topology: dict[str, Any] = field(default_factory=dict)
    run_json: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    supervisor: dict[str, Any] = field(default_factory=dict)  # what launch counted of its children
    faults: list[str] = field(default_factory=list)
    chapters: list[Any] = field(default_factory=list)  # what optional parts of busrl tell of the run

    @property
    def has_steps(self) -> bool:
        """False for a run that did what others asked for, which its chapters tell, and made no step of its own."""
        return bool(self.steps) or not self.chapters

    @property
    def name(self) -> str:
        return str(as_map(self.topology.get("run")).get("name") or self.paths.root.name)

    @property
    def state(self) -> str:
        """The state of the run: "running" while a launch has its directory, else the outcome of its summary."""
        if holder_of(self.paths) is not None:
            return "running"
        return str(self.summary.get("outcome") or "not ended in order: it has no summary")

    def column(self, name: str) -> Floats:
        return column_of(self.steps, name)

    def validation(self) -> RunState:
        """The rounds in a `RunState`, which decides as for every view which of them stand and which had no result."""
        state = RunState()
        for row in self.rounds:
            with suppress(msgspec.ValidationError):
                state.validated(msgspec.convert(row, RoundRecord, strict=False))
        return state

    def errors(self) -> Iterator[dict[str, Any]]:
        return self._lines(self.paths.errors, dict[str, Any])

    def validated(self) -> Iterator[dict[str, Any]]:
        return self._lines(self.paths.validation_log, dict[str, Any])

    def put_back(self) -> int:
        """The number of samples that starts put back."""
        rows = self._lines(self.paths.draws, dict[str, Any])
        return sum(len(uids) for row in rows if isinstance(uids := row.get("uids"), list))

    def groups(self) -> Groups:
        rows, lengths, lines = array("q"), array("q"), 0
        trained = array("q")  # number and step of each line with a trained group
        for line in self._lines(self.paths.groups, GroupsLine):
            if not len(line.draws) == len(line.fates) == len(line.born) == len(line.lengths):
                self.faults.append(f"{self.paths.groups.name}: lists of unequal lengths, step {line.step}")
                continue
            lines += 1
            for draw, fate, born, of_group in zip(line.draws, line.fates, line.born, line.lengths, strict=True):
                rows.extend((lines, draw, ord(fate), born, len(of_group)))
                lengths.extend(of_group)
            trained.extend((lines, line.step) if Fate.TRAINED.letter in line.fates else ())
        at, draws, fates, born_at, sizes = np.array(rows, np.int64).reshape(-1, 5).T
        trained_lines = np.array(trained, np.int64).reshape(-1, 2)
        later = np.minimum.accumulate(trained_lines[::-1, 1])[::-1] if len(trained_lines) else trained_lines[:, 1]
        undone_lines = trained_lines[:-1, 0][trained_lines[:-1, 1] >= later[1:]]
        steps = np.zeros(lines + 1, np.int64)
        steps[trained_lines[:, 0]] = trained_lines[:, 1]
        undone = np.isin(at, undone_lines)
        return Groups(steps[at], draws, fates, born_at, sizes, np.array(lengths, np.int64), undone)

    def _lines(self, path: Path, kind: type[T]) -> Iterator[T]:
        """The lines of a file that are of this kind; a text about the others goes into `faults`."""
        decoder, bad, first, last = msgspec.json.Decoder(kind), 0, 0, False
        if lost := dropped(path):
            name = path.relative_to(self.paths.root)
            self.faults.append(f"{name}: its first {lost / 1e6:.3g} MB are not kept any more (log.keep_mb)")
        try:
            for n, text in enumerate(whole_file(path), 1):
                try:
                    yield decoder.decode(text)
                except (ValueError, RecursionError):  # UnicodeDecodeError and msgspec's errors are ValueErrors
                    if text.strip():
                        bad, first, last = bad + 1, first or n, not text.endswith(b"\n")
        except OSError as problem:
            self.faults.append(f"{path.relative_to(self.paths.root)}: {problem.strerror}")
        if bad:
            half = "its last line is half written" if bad == 1 and last else ""
            what = half or f"{bad} of its lines cannot be read, first line {first}"
            self.faults.append(f"{path.relative_to(self.paths.root)}: {what}")


def column_of(rows: Iterable[dict[str, Any]], name: str) -> Floats:
    """A number of every line; nan if it is not known."""
    numbers = (number(row.get(name)) for row in rows)
    return np.array([np.nan if value is None else value for value in numbers], np.float64)


def few_of(rows: Iterable[dict[str, Any]], most: int = 3) -> dict[str, list[dict[str, Any]]]:
    """A few samples of many, in one pass: those with the highest and the lowest rewards (of equals the newest), and the
    last."""
    best, worst = list[tuple[float, int, dict[str, Any]]](), list[tuple[float, int, dict[str, Any]]]()
    last: deque[dict[str, Any]] = deque(maxlen=most)
    for at, row in enumerate(rows):
        if not {"completion", "turns", "messages"} & row.keys() or (reward := number(row.get("reward"))) is None:
            continue
        last.append(row)
        for heap, worth in ((best, reward), (worst, -reward)):
            (heapq.heappush if len(heap) < most else heapq.heappushpop)(heap, (worth, at, row))
    ordered = {"best": sorted(best, reverse=True), "worst": sorted(worst, reverse=True)}
    few = {name: [row for *_, row in entries] for name, entries in ordered.items()} | {"last": [*last]}
    return {name: samples for name, samples in few.items() if samples}


def read(run_dir: str | Path) -> RunRecord:
    """Read a run's files; `NoSuchRun` if the directory holds no run."""
    paths = RunPaths.of(run_dir)
    files = (paths.run_json, paths.topology, paths.metrics, paths.starts)
    if not any(path.exists() for path in files):
        what = "no run is in it (no run.json, no metrics.jsonl)" if paths.root.is_dir() else "no such folder"
        raise NoSuchRun(f"{run_dir}: {what}; name a directory that `busrl launch --run-dir` was given")
    record = RunRecord(paths)
    for name in WHOLE:
        path = getattr(paths, name)
        content = read_map(path)
        setattr(record, name, content)
        if not content and path.exists():
            record.faults.append(f"{path.name}: cannot be read, or holds no map")
    record.summary = summary_of(paths)
    for row in record._lines(paths.metrics, dict[str, Any]):
        if of_step(row) and isinstance(row.get("step"), int):
            while record.steps and record.steps[-1]["step"] >= row["step"]:
                record.steps.pop()
            record.steps.append({name: row[name] for name in KEPT if name in row})
    record.starts = list(record._lines(paths.starts, dict[str, Any]))
    record.rounds = list(record._lines(paths.validation, dict[str, Any]))
    record.samples = few_of(record._lines(paths.samples, dict[str, Any]))
    record.requests = [*controls.read_lines(paths)]
    for path in sorted(paths.pace.glob("*.jsonl")):
        record.pace[path.stem] = list(record._lines(path, dict[str, Any]))
    record.chapters = [part for chapter in plugs("chapters") if (part := chapter(paths.root)) is not None]
    missing = [path.name for path in (paths.metrics, paths.groups) if record.has_steps and not path.exists()]
    record.faults += [f"{name}: not there; no step was made yet, or it was removed" for name in missing]
    return record
