"""Service times and answers of a topology: fitted to a finished run, from a fit file, or assumed.

Reads the files of a run directory, and the fit file beside a topology. Knows nothing of events or tables.

- Each time comes from the first source that has it: `simulate.*` keys of the topology, --fit, `[mock]` (scripted
  engines), the fit file, and the defaults of [simulate], which are assumed. Every number carries its source.
- Actors: wall time without waits, over intervals of a quarter second, ~ step_s x steps + row_s x tokens + sequence_s x
  joined, by least squares without negative numbers.
- Learner: learner_token_s is the seconds in forward and backward over the tokens trained, as steps of one size have no
  slope. The rest of a step, without its waits, ~ learner_step_s + learner_group_s x groups set aside. A token takes at
  least `mock.learner_s_per_token`, as in a real run.
- Rewards, by Little's law: mean slots in GENERATED and REWARDING over the samples that passed through per second.
- Spreads over time stay 0: the residuals of intervals come mostly from the straight line, not from chance. Fitted as
  chance they made predicted throughput worse (on a busy machine 7 % off against 1 %).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.data.prompts import JsonlStream, plain_text, training_stream
from busrl.data.trace import TracedPrompt
from busrl.errors import DataError, NoSuchRun, UserError
from busrl.ledger.trained import of_step
from busrl.paths import RunPaths
from busrl.simulate.actors import PACE_S, STATED, TIMES, Times, reward_workers
from busrl.simulate.answers import Recorded, RecordedAnswers, chance
from busrl.states import TINY, draw_of, seat_of
from busrl.system.files import as_map, whole_file
from busrl.topology import Topology
from busrl.topology.recorded import recorded
from busrl.topology.schema import Simulate

# -- a finished run -------------------------------------------------------------------------------------------

Floats = npt.NDArray[np.float64]
LEAST_INTERVALS = 8  # of a rollout process, with at least one decoding step each
LEAST_STEPS = 5  # of the learner
PACE_KEYS = ("wall_s", "step_s", "weights_s", "idle_s", "steps", "tokens", "joined", "updates")
STEP_KEYS = (
    "step", "seconds", "wait_s", "publish_s", "checkpoint_s", "tokens", "forward_s", "backward_s", "groups",
    "groups_ended",
)
GROUP_KEYS = ("draws", "born", "lengths", "rewards")


@dataclass(frozen=True)
class Line:
    """A least-squares fit: its coefficients, the expectation for each observation, and mean error over mean."""

    values: tuple[float, ...]
    expected: Floats
    error: float


@dataclass(frozen=True)
class Seen:
    """The ranges in a run: tokens of a step, and running sequences of a rollout process."""

    tokens: tuple[float, float]
    rows: tuple[float, float]


@dataclass(frozen=True)
class Fitted:
    """The times and answers of a run. `notes`: each fit with its data and its error, for people."""

    run_dir: Path
    topology: Topology
    times: Times
    groups: tuple[Recorded, ...]
    notes: tuple[str, ...]
    seen: Seen

    def answers(self, topology: Topology, seed: int) -> RecordedAnswers:
        """The recorded groups, for those of `topology`: one of each seat for a draw, as that seat's were."""
        trained, data = self.topology.data.train, topology.data
        seats, recorded_seats = len(topology.seats), len(self.topology.seats)
        same = data.train in (trained, "") or data.train.startswith(TINY)  # "": made of sources, which a run has done
        path, sections = trained if same else data.train, self.topology.derived.sources if same else ()
        stream = JsonlStream(path, topology.run.seed, data.shuffle, data.prompt_key, sections=sections)

        def text_of(group: int) -> TracedPrompt:
            record = stream.record(stream.item(draw_of(group, seats)))
            return TracedPrompt(plain_text(record[stream.prompt_key]), (1,), tag=str(record.get("tag", "")))

        def line_of(group: int) -> int:
            index = stream.item(draw_of(group, seats)).index
            return _of_seat(index, seat_of(group, seats), recorded_seats) if same else -1

        return RecordedAnswers(self.groups, topology, seed, line_of, text_of)


def fit(run_dir: str | Path) -> Fitted:
    """Fit the times and answers of a run; `UserError` names a file that is missing or too short."""
    paths = RunPaths.of(run_dir)
    if not paths.topology.is_file():
        raise NoSuchRun(f"{run_dir}: not a run directory (no topology.json); give the --run-dir of a finished run")
    topology = recorded(paths.topology)
    paces, steps = _paces(paths), _steps(paths)
    parts = (
        _actors(paths, paces), _learner(paths, steps, topology.mock.learner_s_per_token),
        _rewards(paths, reward_workers(topology)),
    )
    values = {name: value for part, _ in parts for name, value in part.items()}
    groups = _groups(paths, topology)
    answers = f"answers: {len(groups)} groups of {sum(len(g.lengths) for g in groups)} samples by prompt and step"
    times = Times().with_source(dict.fromkeys(values, f"fitted, {paths.root.name}"), **values)
    tokens = [float(row["tokens"]) for row in steps]
    rows = [row["tokens"] / row["steps"] for _, row in paces if row["steps"]]
    seen = Seen((min(tokens), max(tokens)), (min(rows), max(rows)))
    return Fitted(paths.root, topology, times, groups, (*(note for _, note in parts), answers), seen)


def _paces(paths: RunPaths) -> list[tuple[str, dict[str, Any]]]:
    """The intervals of pace that the rollout processes wrote, each with the name of its process."""
    return [(path.stem, row) for path in sorted(paths.pace.glob("*.jsonl")) for row in _rows(path, PACE_KEYS)]


def _steps(paths: RunPaths) -> list[dict[str, Any]]:
    """The steps of the learner that count for its times: neither the first, nor those replayed from a log."""
    rows = _rows(paths.metrics, STEP_KEYS)
    return [row for row in rows if not row.get("replayed") and row["step"] > 1]


def _actors(paths: RunPaths, paces: Sequence[tuple[str, dict[str, Any]]]) -> tuple[dict[str, float], str]:
    names, rows = [name for name, row in paces if row["steps"]], [row for _, row in paces if row["steps"]]
    if len(rows) < LEAST_INTERVALS:
        raise _missing(paths.pace, f"{len(rows)} intervals with decoding steps, at least {LEAST_INTERVALS} are needed")
    at_work = np.array([row["wall_s"] - row["idle_s"] - row["weights_s"] for row in rows])
    line = nonnegative(np.array([[row["steps"], row["tokens"], row["joined"]] for row in rows], np.float64), at_work)
    masks = [np.array(names) == name for name in dict.fromkeys(names)]  # the intervals of each process
    factors = [at_work[mask].sum() / max(1e-12, line.expected[mask].sum()) for mask in masks]
    values = {
        "step_s": line.values[0], "row_s": line.values[1], "sequence_s": line.values[2], "prefill_token_s": 0.0,
        "weights_s": sum(row["weights_s"] for _, row in paces) / max(1, sum(row["updates"] for _, row in paces)),
        "busy_share": float(min(1.0, sum(row["step_s"] for row in rows) / at_work.sum())),
        "speed_spread": float(np.std(np.log(factors))),  # of measured over expected time, by process
        "step_spread": 0.0,
    }
    text = (
        f"actors: a step takes {1e3 * values['step_s']:.3g} ms + {1e6 * values['row_s']:.3g} us per row, a sequence "
        f"{1e6 * values['sequence_s']:.3g} us ({len(rows)} intervals of {len(dict(paces))} processes, "
        f"error {line.error:.0%})"
    )
    return values, text


def _learner(paths: RunPaths, rows: Sequence[dict[str, Any]], floor_s: float) -> tuple[dict[str, float], str]:
    """Times of the learner, and a note. `floor_s`: the least seconds of a token by [mock]."""
    if len(rows) < LEAST_STEPS:
        raise _missing(paths.metrics, f"{len(rows)} steps after the first, at least {LEAST_STEPS} are needed")
    of = {key: np.array([row[key] for row in rows], np.float64) for key in STEP_KEYS if key != "wait_s"}
    tokens, passes, publish = of["tokens"], of["forward_s"] + of["backward_s"], float(of["publish_s"].mean())
    saves = of["checkpoint_s"][of["checkpoint_s"] > 0]
    token_s = max(float(passes.sum() / max(1.0, tokens.sum())), floor_s)
    waits = np.array([sum(row["wait_s"].values()) for row in rows])
    busy = of["seconds"] - waits - of["publish_s"] - of["checkpoint_s"]
    rest = np.maximum(0.0, busy - np.maximum(passes, floor_s * tokens))
    line = nonnegative(np.column_stack((np.ones(len(rows)), of["groups_ended"] - of["groups"])), rest)
    values = {
        "learner_step_s": line.values[0], "learner_token_s": token_s, "learner_group_s": line.values[1],
        "learner_spread": 0.0, "publish_s": publish, "checkpoint_s": float(saves.mean()) if len(saves) else 0.0,
    }
    error = float(np.abs(line.expected + token_s * tokens - busy).mean() / max(1e-12, busy.mean()))
    text = (
        f"learner: a step takes {1e3 * line.values[0]:.3g} ms + {1e6 * token_s:.3g} us per token + "
        f"{1e6 * line.values[1]:.3g} us per group set aside ({len(rows)} steps of {tokens.min():.0f} to "
        f"{tokens.max():.0f} tokens, error {error:.0%}); publishing {1e3 * publish:.3g} ms"
    )
    return values, text


def _rewards(paths: RunPaths, workers: int) -> tuple[dict[str, float], str]:
    """Times of the reward, and a note. A call takes the busy share of the workers over their throughput; the wait of an
    answer is its stay without call and queueing."""
    if not paths.summary.is_file():
        raise _missing(paths.summary, "there is no such file: it is written when a run ends in order")
    try:
        summary = json.loads(paths.summary.read_bytes())
        slots = summary.get("slots") or {}
        seconds = float(slots["generated"]["stay_s"] + slots["rewarding"]["stay_s"])
        busy, rate = _reward_share(summary), float(slots["rewarding"].get("per_s") or 0.0)
    except KeyError:
        raise _missing(paths.summary, "no `slots` in it: the run was too short, or made by an older busrl") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{paths.summary}: damaged ({error}); was it edited? Fit another run") from None
    call_s = busy * workers / rate if rate > 0 else 0.0
    queue_s = busy / (2 * max(0.02, 1 - busy)) * call_s / workers  # as of one line before servers of a fixed time
    wait_s = max(0.0, seconds - call_s - queue_s)
    text = f"rewards: {1e3 * seconds:.3g} ms after the answer (mean slots over throughput)"
    return {"reward_s": wait_s, "reward_call_s": call_s}, f"{text}, a call takes {1e3 * call_s:.3g} ms"


def _reward_share(summary: dict[str, Any]) -> float:
    processes = summary.get("processes", {}).items()
    shares = [process.get("busy_share") for name, process in processes if name.startswith("reward")]
    measured = [float(share) for share in shares if share is not None]
    return sum(measured) / len(measured) if measured else 0.0


def _groups(paths: RunPaths, topology: Topology) -> tuple[Recorded, ...]:
    rows = _rows(paths.groups, GROUP_KEYS)
    if not rows:
        raise _missing(paths.groups, "no line in it: no step was made, or the run was made by an older busrl")
    seats = len(topology.seats)

    def line_of(group: int) -> int:
        return _of_seat(stream.item(draw_of(group, seats)).index, seat_of(group, seats), seats)

    try:
        with training_stream(topology) as stream:
            return tuple(
                Recorded(born, line_of(group), tuple(lengths), tuple(rewards))
                for row in rows
                for group, born, lengths, rewards in zip(row["draws"], row["born"], row["lengths"], row["rewards"])
            )
    except DataError as problem:
        raise UserError(f"{paths.root}: its prompts cannot be read any more: {problem}") from None


def _of_seat(line: int, seat: int, seats: int) -> int:
    """The number of a prompt as one seat of so many answers it: seats have lengths and rewards of their own."""
    return line * seats + seat % seats


def nonnegative(sums: Floats, seconds: Floats) -> Line:
    """Least squares with coefficients >= 0: the best fit over all subsets of the columns, scaled so that the total is
    that of the observations, as throughput depends on the total. `sums` [n, k], k small."""
    count, least = sums.shape[1], math.inf
    best, scale = np.zeros(count), np.maximum(sums.max(axis=0), 1e-12)
    for chosen in (list(columns) for size in range(1, count + 1) for columns in combinations(range(count), size)):
        part = sums[:, chosen] / scale[chosen]
        solved = np.linalg.lstsq(part, seconds, rcond=None)[0]
        left = float(((part @ solved - seconds) ** 2).sum())
        if (solved >= 0).all() and left < least:
            least, best = left, np.zeros(count)
            best[chosen] = solved / scale[chosen]
    best *= seconds.sum() / max(1e-12, (sums @ best).sum())
    expected = sums @ best
    error = float(np.abs(expected - seconds).mean() / max(1e-12, seconds.mean()))
    return Line(tuple(best.tolist()), expected, error)


def _rows(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The whole lines of a growing file, each with these keys, except those about groups that had no step."""
    rows = []
    for number, line in enumerate((line for line in whole_file(path) if line.endswith(b"\n") and line.strip()), 1):
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise UserError(f"{path}:{number}: a line is not JSON ({error}); was it edited? Fit another run") from None
        if not of_step(as_map(row)):
            continue
        if missing := [key for key in keys if key not in as_map(row)]:
            what = f"no {', '.join(missing)} in this line: it was edited, or made by another busrl"
            raise UserError(f"{path}:{number}: {what}; fit another run")
        rows.append(row)
    return rows


def _missing(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}; give a run of this busrl that made at least {LEAST_STEPS + 1} steps and ended")


# -- a fit file beside the topology -------------------------------------------------------------------------


@dataclass(frozen=True)
class FitFile:
    """The measured values beside a topology: times by name, and groups with their prompts.

    The file is `NAME.fit.jsonl` beside `NAME.toml`; `benchmarks/fit_file.py` makes one from a finished run. First
    line: {"source": text, "model": path, "data": path, "times": {name: seconds}}. Every further line is a group:
    [step of its weights, prompt, [length, ...], "0110..." (rewards)].
    """

    source: str
    times: dict[str, float]
    prompts: tuple[str, ...]
    groups: tuple[Recorded, ...]

    def answers(self, topology: Topology, seed: int) -> RecordedAnswers:
        """Answers for the draws of a topology: each draw is a random prompt of the file, with answers to a prompt of
        its kind at about the same step."""

        def prompt_of(group: int) -> str:
            draw = draw_of(group, len(topology.seats))
            return self.prompts[int(chance(topology.run.seed, draw) * len(self.prompts))]

        kind_of, text_of = lambda group: _kind_of(prompt_of(group)), lambda group: TracedPrompt(prompt_of(group), (1,))
        return RecordedAnswers(self.groups, topology, seed, kind_of, text_of)


def fit_file(topology: Topology) -> FitFile | None:
    """The fit file beside a topology. None if there is none, or if it is of another model or data; scripted answers
    have lengths of their own. `UserError` for a damaged one."""
    path = Path(topology.source).with_suffix(".fit.jsonl") if topology.source else None
    if path is None or topology.scripted or not path.is_file():
        return None
    try:
        head, *rows = (msgspec.json.decode(line) for line in path.read_bytes().splitlines())
        if (head["model"], head["data"]) != (topology.model.path, topology.data.train):
            return None
        groups = tuple(
            Recorded(int(step), _kind_of(prompt), tuple(lengths), tuple(float(reward) for reward in rewards))
            for step, prompt, lengths, rewards in rows
        )
        prompts = tuple(dict.fromkeys(str(row[1]) for row in rows))
        times = {str(name): float(value) for name, value in head["times"].items()}
        if not groups:
            raise ValueError("no group in it")
        return FitFile(str(head["source"]), times, prompts, groups)
    except (OSError, msgspec.DecodeError, ValueError, TypeError, KeyError, LookupError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); was it edited? Restore it, or remove it") from None


def _kind_of(prompt: str) -> int:
    """The kind of a prompt, within which answers have similar lengths: by the first digit, and the number of digits to
    sort."""
    return 1000 * ord(prompt[0]) + len(prompt)


# -- which time comes from where ----------------------------------------------------------------------------

SET, MOCK = "set in [simulate]", "stated in [mock]"
SLICE_S = 0.05  # a scripted engine draws its jitter again for each stretch of at most so long


def times_of(
    topology: Topology, written: Collection[str] = (), fitted: Times | None = None, measured: FitFile | None = None
) -> Times:
    """The times of one simulated run. `written`: dotted keys that topology file and overrides give."""
    stated, default = topology.simulate, Simulate()
    by_rank: list[tuple[str, Mapping[str, float]]] = [(STATED, {name: float(getattr(stated, name)) for name in TIMES})]
    if fitted is not None:
        by_rank.append((next(iter(fitted.source.values())), {name: getattr(fitted, name) for name in fitted.source}))
    elif topology.scripted:
        by_rank.append((MOCK, scripted(topology)))
    elif measured is not None:
        by_rank.append((measured.source, measured.times))
    changed = {name for name in TIMES if getattr(stated, name) != getattr(default, name)}
    chosen = (name for name in TIMES if name in changed or f"simulate.{name}" in written)
    by_rank.append((SET, {name: float(getattr(stated, name)) for name in chosen}))
    values, sources = dict[str, float](), dict[str, str]()
    for source, times in by_rank:  # a later source replaces an earlier one
        values.update(times)
        sources.update(dict.fromkeys(times, source))
    floor = topology.mock.learner_s_per_token
    if floor > values["learner_token_s"] and sources["learner_token_s"] != SET:
        values["learner_token_s"], sources["learner_token_s"] = floor, MOCK
    if values["step_s"] + values["row_s"] <= 0:
        raise UserError("simulate.step_s = 0 and simulate.row_s = 0: a decoding step must take some time; raise one")
    return Times().with_source(sources, **values)


def scripted(topology: Topology) -> dict[str, float]:
    """The times of engines by [mock]. Joining and new weights do not delay the deadlines of a scripted engine, so they
    cost nothing; its jitter averages out over the interval for which a simulated actor keeps its pace."""
    mock = topology.mock
    return {
        "step_s": mock.token_s, "row_s": mock.per_sequence_s, "prefill_token_s": mock.prefill_s_per_token,
        "sequence_s": 0.0, "weights_s": 0.0, "speed_spread": 0.0,
        "step_spread": mock.jitter * float((SLICE_S / (3 * PACE_S)) ** 0.5),
    }
