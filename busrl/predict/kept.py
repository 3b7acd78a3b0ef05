"""The length predictor of a run: built as the topology states, guarded, and saved in `predictor.npz`.

Talks to files: the run's own state, the copy in each checkpoint, the user's table of keywords. Used by the scheduler
(builds, restores, saves) and by the learner (`copy_into` a checkpoint). Knows nothing of policies or slots.

- A lost state costs order, never a sample: an unusable file causes a warning, and a failed save is tried again later. A
  save replaces the file as a whole.
- The state in a checkpoint is recent: it is saved with the first answers, before each step that may end in a
  checkpoint, and every few seconds, so seldom that saving takes at most a hundredth of the scheduler's time.
- A start takes the run's own file, or else that of the newest checkpoint that has one.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.data import JsonlStream
from busrl.data.trace import parse
from busrl.errors import UserError
from busrl.paths import CHECKPOINT, RunPaths
from busrl.predict.lengths import Guard, Keywords, LengthsOf, RulesPredictor, make_predictor
from busrl.predict.lengths.keywords import read_keywords
from busrl.system.files import replacing
from busrl.topology import Topology

log = logging.getLogger("busrl")
SAVE_EVERY_S, SAVE_COSTS = 5.0, 100.0  # between two saves: seconds, or multiples of a save's time, whichever is more
MOST_COSTS = 2.0  # between two saves before steps that may end in a checkpoint: multiples of a save's time
Warn = Callable[[str], None]
ARRAY, TEXT = "$array", "data"


def save_plain(path: Path, data: Mapping[str, Any]) -> None:
    """Write numbers, strings, lists, dicts with string keys, and arrays among them as a NumPy archive without pickle:
    the arrays under numbers, and a JSON text with the place of each. OSError if the disk refuses."""
    arrays: list[npt.NDArray[Any]] = []

    def place(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value.item()
        arrays.append(value)
        return {ARRAY: len(arrays) - 1}

    text = json.dumps(data, default=place).encode()
    members = {f"a{number}": array for number, array in enumerate(arrays)}
    with replacing(path, durable=False) as descriptor, open(descriptor, "wb", closefd=False) as file:
        np.savez(file, allow_pickle=False, **{TEXT: np.frombuffer(text, np.uint8)}, **members)


def load_plain(path: Path) -> dict[str, Any] | None:
    """The data of a file, tuples as lists; None if there is no file. ValueError if it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            data: dict[str, Any] = json.loads(
                archive[TEXT].tobytes(),
                object_hook=lambda entry: archive[f"a{entry[ARRAY]}"] if entry.keys() == {ARRAY} else entry,
            )
            return data
    except FileNotFoundError:
        return None
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as problem:
        raise ValueError(f"{path}: cannot be read ({problem}); it is not used") from None


class PredictorState:
    """The predictor of a run, and its file; `warn` gets the problems in words."""

    def __init__(self, topology: Topology, paths: RunPaths, stream: JsonlStream, warn: Warn) -> None:
        self.paths, self._warn = paths, warn
        words = _keywords(topology, warn)
        inner = make_predictor(topology.scheduler.predictor, keywords=words, lengths_of=_lengths(topology, stream))
        self.predictor = Guard(inner, RulesPredictor(words), clock=time.perf_counter, report=warn)
        self._saved_at = 0  # answers in the saved state
        self._last_save, self._cost_s = -math.inf, 0.0
        self._before = -1  # the step before whose checkpoint the last save was

    def restore(self) -> bool:
        """Load the state of an earlier scheduler; False if there is no usable one."""
        for path in _candidates(self.paths):
            try:
                state = load_plain(path)
                if state is not None:
                    self.predictor.load(state)
                    log.info("the predictor continues from %s", path)
                    return True
            except Exception as problem:  # a damaged file may lead to anything, and must not end the run
                self._warn(f"{path}: what the predictor learned is not used: {problem}")
        return False

    def keep(self, now: float, before: int | None = None) -> None:
        """Save if there are new answers: from time to time, and once for each step `before` which may end in a
        checkpoint."""
        due = before is not None and before != self._before
        wait = MOST_COSTS * self._cost_s if due else max(SAVE_EVERY_S, SAVE_COSTS * self._cost_s)
        if self.predictor.answers == self._saved_at or now < self._last_save + wait:
            return
        begun = time.perf_counter()
        self.save()
        self._last_save, self._cost_s = now, time.perf_counter() - begun
        self._before = self._before if before is None else before

    def save(self) -> None:
        if self.predictor.answers == self._saved_at:
            return
        try:
            save_plain(self.paths.predictor, self.predictor.state())
            self._saved_at = self.predictor.answers
        except Exception as problem:  # a predictor whose state fails must not end the run either
            self._warn(f"what the predictor learned is not saved: {problem}")

    def close(self) -> None:
        self.save()
        if self.predictor.answers or self.predictor.fallbacks:
            figures = self.predictor.metrics().items()
            shown = ", ".join(f"{name.removeprefix('predictor_')} {value:.4g}" for name, value in figures)
            log.info("predictor %s: %s", self.predictor.name, shown)


def unkept(topology: Topology, lengths_of: LengthsOf, oracle: bool) -> Guard:
    """The predictor of a simulated run: the topology's, or with `oracle` that one. UserError for a table of keywords
    with a fault."""
    words, path = None, topology.scheduler.keywords
    if path:
        words, problems = read_keywords(path)
        if problems:
            raise UserError(f"{path}: {problems[0]}")
    name = "oracle" if oracle else topology.scheduler.predictor
    return Guard(make_predictor(name, keywords=words, lengths_of=lengths_of), RulesPredictor(words))


def copy_into(checkpoint: Path, paths: RunPaths) -> None:
    """Copy the saved state into a checkpoint that is being written. OSError if the disk refuses."""
    try:
        shutil.copyfile(paths.predictor, checkpoint / paths.predictor.name)
    except FileNotFoundError:
        pass  # `rules` has no state, and a new run has none yet


def _candidates(paths: RunPaths) -> Iterator[Path]:
    """Files to restore from, best first."""
    yield paths.predictor
    copies = paths.checkpoints.glob(f"{CHECKPOINT}*/{paths.predictor.name}")
    yield from sorted(copies, key=lambda path: path.parent.stat().st_mtime, reverse=True)


def _keywords(topology: Topology, warn: Warn) -> Keywords | None:
    """The user's table; None for the shipped one. `launch` has checked it: a problem here is newer than that."""
    if not topology.scheduler.keywords:
        return None
    keywords, problems = read_keywords(topology.scheduler.keywords)
    for problem in problems:
        warn(f"{topology.scheduler.keywords}: {problem}; left out")
    return keywords if keywords.words or keywords.tags else None


def _lengths(topology: Topology, stream: JsonlStream) -> LengthsOf | None:
    """The lengths of a draw's members, from the trace that is `data.train`; None unless the predictor is the oracle."""

    if topology.scheduler.predictor != "oracle":
        return None

    def of(draw: int) -> Sequence[int]:
        item = stream.item(draw)
        task = parse(item.line, f"{stream.path}:{item.index + 1}", stream.prompt_key)
        return [task.length(member) for member in range(topology.groups.size)]

    return of
