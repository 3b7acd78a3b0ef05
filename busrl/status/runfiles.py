"""The files of a run, read while the run writes them: facts once, and lines as they come.

Opens files for reading only, and keeps none open. Knows nothing of the bus, of the ring or of views.

- A line counts once it has its end; an incomplete last line is read later. A damaged or foreign line is skipped.
- The first read takes the end of a long file only, so attaching to an old run takes no longer than to a young one.
- A file may hold anything: a value that should be a number and is none counts as missing.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

import msgspec
import numpy as np

from busrl.errors import NoSuchRun
from busrl.ledger.controls import Controls
from busrl.ledger.trained import of_step
from busrl.paths import RunPaths
from busrl.states import Fate, fate_name
from busrl.status.state import ErrorRecord, Facts, MetricsLine, RoundRecord, RunState
from busrl.status.words import safe
from busrl.system.files import PART_BYTES, LineFollower, as_map, json_lines, last_change, read_map, size_of

SAMPLES_KEPT: Final = 24
ROUNDS_BYTES: Final = 1 << 26
SAMPLE_BYTES: Final = 1 << 18
HEAD_LINES: Final = 100
WORDS: Final[dict[int, str]] = {
    Fate.DISPATCHED: "open",
    Fate.FLAT: "flat (all rewards of the group equal)",
    Fate.OLD: "too old",
    Fate.INCOMPLETE: "of groups that lost members",
    Fate.LONG: "with a prompt that is too long",
    Fate.SKIPPED: "draws left out by pass rate",
    Fate.UNUSED: "of seats that were not used",
    Fate.POISON: "given up after killing their process twice",
    Fate.REWARD_RAISED: "whose reward raised",
    Fate.REWARD_HUNG: "whose reward hung",
}
PROMPT, ANSWER = 90, 120  # characters of a sample that are shown
IN_TOPOLOGY: Final = {  # a fact, and the key that holds it
    "name": "run.name", "max_steps": "run.max_steps", "group_size": "groups.size",
    "n_min": "learner.trigger.n_min", "t_max_s": "learner.trigger.t_max_s", "mode": "weights.mode",
    "max_staleness": "weights.max_staleness", "progress_s": "limits.progress_s", "transport": "weights.transport",
    "reward_function": "reward.function", "reward_kind": "reward.kind", "stall_steps": "limits.stall_steps",
    "stall_s": "limits.stall_s",
}
KINDS: Final = get_type_hints(Facts)
T = TypeVar("T")


class RunFiles:
    """The files of one run directory. `samples`: the newest samples of samples.jsonl, the newest last."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._metrics, self._errors = LineFollower(paths.metrics), LineFollower(paths.errors)
        self._rounds = LineFollower(paths.validation, ROUNDS_BYTES)  # enough to hold the first round
        self._samples = LineFollower(paths.samples, SAMPLE_BYTES)
        self.samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES_KEPT)
        self._topology: dict[str, Any] = {}
        self._controls = 0  # bytes of control.jsonl that were folded into the state

    @property
    def newest_sample(self) -> dict[str, Any]:
        return self.samples[-1] if self.samples else {}

    def facts(self) -> Facts:
        """The facts of run.json and topology.json; those that are missing keep their defaults."""
        run, topology = read_map(self._paths.run_json), read_map(self._paths.topology)
        self._topology = topology
        if not run:
            raise NoSuchRun(f"{self._paths.root}: no run.json there; name the directory that `busrl launch` printed")
        values = {name: run.get(name) for name in ("run_id", "uuid", "launch_pid", "started")}
        values |= {name: _at(topology, key) for name, key in IN_TOPOLOGY.items()}
        listed = topology.get("process")
        entries = [as_map(entry) for entry in listed] if isinstance(listed, list) else []
        values["agent_function"] = next((entry["function"] for entry in entries if entry.get("function")), None)
        learners = [entry for entry in entries if entry.get("role") == "learner"]
        values["learns"] = not learners or any(entry.get("count") != 0 or entry.get("model") for entry in learners)
        values["beside"] = "" if topology.get("models") else topology.get("tag")
        facts: dict[str, Any] = {}
        for name, value in values.items():
            with suppress(msgspec.ValidationError):
                facts[name] = msgspec.convert(math.inf if value == "inf" else value, KINDS[name])
        return Facts(run_dir=str(self._paths.root), **facts)

    def tap(self) -> str:
        tap = read_map(self._paths.run_json).get("tap")
        return tap if tap and isinstance(tap, str) else self._paths.tap

    def step_age_s(self) -> float | None:
        """Seconds since a step was written; None if there is none."""
        written = last_change(self._paths.metrics)
        return None if written is None else max(0.0, time.time() - written)

    def new_samples(self) -> list[dict[str, Any]]:
        """The samples that were written since the last call, at most the newest `SAMPLES_KEPT`."""
        rows = []
        for line in self._samples.new()[-SAMPLES_KEPT:]:
            with suppress(ValueError, RecursionError):
                row = as_map(json.loads(line))
                if sample_line(row):
                    rows.append(row)
        return rows

    def fold_into(self, state: RunState, ended: float | None = None) -> None:
        """Fold all lines since the last call into the state of the run; `ended`: when its newest step ended."""
        for row in _decoded(self._metrics, MetricsLine):
            if row.kind:
                state.idle = row
            else:
                state.step(row, ended)
                state.idle = None
        for done in _decoded(self._rounds, RoundRecord):
            state.validated(done)
        if state.first_reward is None:
            state.first_reward = self._first_reward()
        self.samples.extend(self.new_samples())
        state.sample = sample_line(self.newest_sample)
        if (size := size_of(self._paths.control)) != self._controls:
            self._controls, state.changed = size, "; ".join(Controls.read(self._paths).words())
        for error in _decoded(self._errors, ErrorRecord):
            state.errors.add(error, "file")
        state.errors.skipped(self._errors.skipped)
        self._errors.skipped = 0
        told = as_map(read_map(self._paths.supervisor).get("processes"))
        children = {name: child for name, child in told.items() if _is_of(self._topology, name, told)}
        state.restarts = {name: whole_number(as_map(child).get("restarts")) for name, child in children.items()}
        latest = {name: as_map(child).get("latest") for name, child in children.items()}
        state.deaths = {name: str(death) for name, death in latest.items() if death}

    def _first_reward(self) -> float | None:
        """Mean reward of the first step in metrics.jsonl, over all starts of the run."""
        with suppress(OSError):
            for row in islice(json_lines(self._paths.metrics), HEAD_LINES):
                if "reward" in row and of_step(row):
                    return number(row["reward"])
        return None


def run_of_files(files: RunFiles) -> RunState:
    """The state of a run from its files alone, over all its starts."""
    run = RunState(facts=files.facts())
    files.fold_into(run)
    return run


def _is_of(topology: dict[str, Any], process: str, names: Collection[str]) -> bool:
    """Tell whether what became of a process, one of `names`, says something of the model of a topology.json: of several
    each has rollouts and a learner, of its own or shared (`busrl.topology.models`); the scheduler of the lead waits for
    all learners."""
    role, _, rest = process.partition("/")
    models, served_by = topology.get("models"), topology.get("served_by")
    apart = whole_number(topology.get("apart")) or (len(models) if isinstance(models, list) else 0)
    if role == "rollout" and rest.isdecimal() and apart > 1:
        own = (int(rest) - whole_number(topology.get("first"))) % apart == 0
        return own or (isinstance(served_by, list) and process in served_by)
    return role != "learner" or bool(models) or process == _learner_of(topology, names)


def _learner_of(topology: dict[str, Any], names: Collection[str]) -> str:
    """The name, one of `names`, of the process that trains the model of a topology.json beside the lead."""
    listed = topology.get("process")
    entries = [as_map(entry) for entry in listed] if isinstance(listed, list) else []
    shared = (entry.get("model") for entry in entries if entry.get("role") == "learner")
    owner = next((tags[0] for tags in shared if isinstance(tags, list) and tags), topology.get("tag") or "")
    own = f"learner/{owner}" if owner else "learner"
    return "learner" if owner != topology.get("tag") and own not in names else own


def _decoded(lines: LineFollower, kind: type[T]) -> Iterator[T]:
    decoder = msgspec.json.Decoder(kind, strict=False)
    for line in lines.new():
        with suppress(ValueError, RecursionError):
            yield decoder.decode(line)


def _at(value: Any, key: str) -> Any:
    """The value under a dotted key of nested maps; None if it is missing."""
    for part in key.split("."):
        value = as_map(value).get(part)
    return value


def number(value: Any) -> float | None:
    """The value as a finite number; None if it is anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with suppress(OverflowError):  # an integer of hundreds of digits
        finite = float(value)
        return finite if math.isfinite(finite) else None
    return None


def fates(path: Path) -> dict[str, int]:
    """Count samples by fate, the most interesting fates first; {} if the table cannot be read."""
    counts = np.zeros(256, np.int64)
    with suppress(OSError), open(path, "rb") as file:
        while block := file.read(PART_BYTES):
            counts += np.bincount(np.frombuffer(block, np.uint8), minlength=256)
    order = sorted(range(1, 256), key=lambda code: (code != Fate.TRAINED, code == Fate.DISPATCHED, -counts[code]))
    return {WORDS.get(code, fate_name(code)): int(counts[code]) for code in order if counts[code]}


def in_words(fate: str) -> str:
    """An explanation of a fate that is named as in the audit."""
    return next((text for code, text in WORDS.items() if fate_name(code) == fate), fate)


def sample_line(sample: dict[str, Any]) -> str:
    """A line with a sample of the model's answers; "" if there is none."""
    if "completion" not in sample:
        return ""
    prompt, answer, reward = _prompt(sample.get("prompt")), str(sample["completion"]), number(sample.get("reward"))
    shown = safe(prompt, len(prompt))[-PROMPT:]
    text = safe(answer, len(answer))
    cut = f"{text[: ANSWER // 2]} … {text[-ANSWER // 2 :]}" if len(text) > ANSWER else text
    return f"{shown!r} → {cut!r}" + (f", reward {reward:g}" if reward is not None else "")


def _prompt(value: Any) -> str:
    """The prompt as text; it may be the whole line of the data file."""
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError, RecursionError):
            line = json.loads(value)
            value = line.get("prompt", value) if isinstance(line, dict) else value
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def whole_number(value: Any) -> int:
    """The value as an integer; 0 if it is no number."""
    return int(number(value) or 0)
