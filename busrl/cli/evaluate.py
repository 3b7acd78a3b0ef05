"""`busrl evaluate`: the figures of a model folder or a checkpoint on held-out prompts, without a run; `busrl validate`:
a round of a run that is running; `busrl export`: the model of a checkpoint as a folder that stands alone.

Resolves a run directory with a step, the folder of a checkpoint, or any model folder. Measures with an engine and
reward children in this process, asks the validator of a run by a file in its directory, and exports by
`training.checkpoint`, which loads torch. Changes nothing but the file of rows, that request, and the folder asked for.

- A sample is a function of seed, uid and weights: the checkpoint of step N, asked as the run's own round N, gives the
  numbers of that round (where the engine draws by the sample, see docs/engines.md).
- Every sample has one row: its reward, or why it has none; the mean is over those that have one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.cli.run import launch_pid
from busrl.data import JsonlStream, prompt_of
from busrl.data.figures import Figure, Figures, Judged, by_tag, standard_error, tags_of
from busrl.data.prompts import PromptLine, limit_in_words, lines_of, open_lines
from busrl.data.vocabulary import token_rows
from busrl.engines import Engine, Finished, Request, make_engine
from busrl.engines.tokens import NO_IDS
from busrl.errors import PeerTimeout, UserError, escaped
from busrl.launch.pythons import require_here
from busrl.ledger.trained import checkpoints_of, is_checkpoint, step_of
from busrl.paths import RunPaths
from busrl.preflight.load import load, materialise
from busrl.preflight.model_folders import model_folder
from busrl.rewards.kinds import finder
from busrl.rewards.pool import Item, Outcome, RewardPool
from busrl.roles import validator
from busrl.states import TINY, VALIDATE_BIT, Finish
from busrl.status.words import nothing
from busrl.system.files import json_lines
from busrl.topology import Topology
from busrl.topology.prompts import AskedSet
from busrl.topology.recorded import recorded

PATIENCE_S = 5.0
READY_S = 120.0
LOOK_S = 0.2
SHOWN = 3  # kinds of failures that are printed


def evaluate(options: argparse.Namespace) -> int:
    """Measure and print; 1 if no sample got a reward."""
    named, step, folder, out = find(options.target, options.checkpoint, options.overrides)
    if named.reward.of_episodes:
        raise UserError(
            f"{options.target}: its rewards are what episodes return, and `busrl evaluate` draws single answers; "
            "`busrl validate RUN_DIR` has the agents of a running run play the validation prompts"
        )
    topology = materialise(with_model(named, folder))
    of = _asked(topology, options)
    others = sum(one.answers for one in topology.sets if one.name != of.name)
    asked = MeasuredRound(of, others + of.answers, step)
    out = options.out or out
    with _writing(out):  # before anything is computed; rows of an earlier time stay until there are new ones
        out.parent.mkdir(parents=True, exist_ok=True)
        open(out, "ab").close()
    begun = time.monotonic()
    with as_a_model(folder, out.parent) as model:
        evaluation = Evaluation(with_model(topology, model) if model != folder else topology, asked)
        with _told_of(evaluation, folder):
            rows = evaluation.run()
    with _writing(out):
        write_rows(out, rows)
    found = evaluation.found()
    if options.json:
        print(json.dumps({"model": topology.model.path, **dataclasses.asdict(found), "rows": str(out)}))
    else:
        print(escaped("\n".join(_lines(topology, of, found, rows, time.monotonic() - begun, out))))
    return 0 if found.samples else 1


def validate(options: argparse.Namespace) -> int:
    """Ask the run's validator for a round, wait for it and print its figures."""
    paths = RunPaths.of(options.run_dir)
    pid = launch_pid(paths)
    if pid is None:
        remedy = f"`busrl evaluate {paths.root}` measures its newest checkpoint"
        raise UserError(f"{paths.root}: no process runs it, so nobody can validate; {remedy}")
    topology = recorded(paths.topology)
    known = {one.title: one.name for one in topology.sets}
    if not known:
        raise UserError(f"{paths.root}: this run has no [validation] with prompts; use busrl evaluate --data FILE")
    if unknown := [name for name in options.names if name not in known]:
        raise UserError(f"{unknown[0]}: no set of this run; it has {', '.join(known)}")
    before = validator.Request.read(paths)
    if before is not None and before.open:
        raise UserError(f"{paths.root}: a round was asked for and is not done yet ({before.state}); wait for it")
    request = validator.Request(uuid.uuid4().hex, [known[name] for name in options.names or known], options.free)
    request.write(paths)
    answer = _await_round(paths, request, pid, options.wait)
    if answer.state == "refused":
        raise UserError(f"{paths.root}: {answer.text}")
    rows = [row for row in json_lines(paths.validation) if row.get("round") == answer.round]
    for row in (row for row in rows if row.get("set", "") in answer.sets):
        print(json.dumps(row) if options.json else _told(row))
    return 0


def _await_round(paths: RunPaths, request: validator.Request, pid: int, wait_s: float) -> validator.Request:
    """The request once it is done; PeerTimeout with its state if it is not in time, or if the run ends before."""
    end = time.monotonic() + wait_s
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise PeerTimeout(f"{paths.root}: the run has just ended; its next start does what was asked") from None
    try:
        while True:
            ended = bool(select.select([descriptor], [], [], LOOK_S)[0])
            found = validator.Request.read(paths)
            if found is not None and found.id == request.id and not found.open:
                return found
            if ended:
                raise PeerTimeout(f"{paths.root}: the run ended before the round; its next start does what was asked")
            if time.monotonic() > end:
                state = "no validator has begun it" if found is None or found.state == "asked" else "it goes on"
                raise PeerTimeout(f"{paths.root}: the round is not done after {wait_s:g} s; {state}: see busrl monitor")
    finally:
        os.close(descriptor)


def _told(row: dict[str, Any]) -> str:
    versions = f"versions {row['versions'][0]} to {row['versions'][-1]}, mixed" if row["mixed"] else (
        f"version {row['version']}"
    )
    intervals = row.get("intervals", {})
    title, asked = f"{row.get('set') or 'validation'}, round {row['round']}", row["samples"] + row["dropped"]
    if not row["samples"]:
        return f"{title}: {nothing(asked)}"
    figures = {"reward": row["val/reward"], **{key[4:]: value for key, value in row.items() if "@" in key}}
    count = f"{row['samples']} of {asked} answers" if row["dropped"] else f"{asked} answers"
    lines = [f"{title} of {versions}: {count}"]
    for name, value in figures.items():
        low, high = intervals.get(name, (value, value))
        lines.append(f"  {name} {value:.4f} (95 %: {low:.4f} to {high:.4f})")
    return "\n".join(lines)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise UserError(f"{out}: the rows cannot be written there ({problem.strerror}); give --out FILE") from problem


def _asked(topology: Topology, options: argparse.Namespace) -> AskedSet:
    own, name = topology.validation, options.validation
    of = next((one for one in topology.sets if one.name == (topology.sets[0].name if name is None else name)), None)
    if name is not None and of is None:
        known = ", ".join(one.name or '""' for one in topology.sets) or "none"
        raise UserError(f"--validation {name}: no set of this name; there are {known}")
    if of is None:
        data = own.data or topology.data.train
        if not own.data and options.data is None:
            print("busrl: no validation.data in the topology: prompts of data.train are asked", file=sys.stderr)
        limit = own.max_new_tokens or topology.generation.max_new_tokens
        samples = own.samples if isinstance(own.samples, int) else 0
        of = AskedSet("", data, 0, samples, own.k, own.temperature, own.top_p, limit, 0, 0)
    if options.data is not None:
        open_lines(options.data).close()
        of = dataclasses.replace(of, data=str(options.data))
    given = {"prompts": options.samples, "k": options.k, "temperature": options.temperature}
    of = dataclasses.replace(of, **{key: value for key, value in given.items() if value is not None})
    if of.prompts:
        return of
    with JsonlStream(of.data, 0, False, topology.data.prompt_key) as stream:
        return dataclasses.replace(of, prompts=len(stream))


def _lines(
    topology: Topology, of: AskedSet, found: EvaluationFigures, rows: list[Row], seconds: float, out: Path
) -> list[str]:
    error = f" ± {found.standard_error:.4f}" if found.standard_error is not None else ""
    samples = f"{found.samples} samples" if not found.failed else f"{found.samples} of {of.answers} samples"
    lines = [
        f"{topology.model.path}",
        f"  {nothing(of.answers)}, of {of.data}" if found.mean is None else f"  mean reward {found.mean:.4f}{error} "
        f"(standard error over {found.prompts} prompts), {samples} of {of.data}",
        *(
            f"  {name} {one.value:.4f} (95 %: {one.low:.4f} to {one.high:.4f}, over {one.prompts} prompts)"
            for name, one in found.figures.items()
        ),
        *(f"  {tag}: reward {one['val/reward']:.4f} over {one['prompts']} prompts" for tag, one in found.by.items()),
        f"  {found.length:.1f} tokens per answer, {found.cut_share:.0%} cut at {of.max_new_tokens}; {seconds:.1f} s"
        if found.length is not None and found.cut_share is not None else f"  {seconds:.1f} s",
    ]
    if kinds := Counter(row.error.split("\n", 1)[0] for row in rows if row.error):
        lines.append(f"  {found.failed} samples without a reward are not in the mean:")
        lines += [f"    {count}× {kind[:1000]}" for kind, count in kinds.most_common(SHOWN)]
    return [*lines, f"  rows: {out}"]


@contextlib.contextmanager
def _told_of(evaluation: Evaluation, folder: str) -> Iterator[None]:
    """Say on standard error what is begun, and every few seconds how far it is, however long one step of it takes."""
    begun, over, of = time.monotonic(), threading.Event(), evaluation.asked.of
    print(f"busrl: {folder}: {of.answers} answers to {of.prompts} prompts of {of.data}", file=sys.stderr, flush=True)

    def tell() -> None:
        while not over.wait(PATIENCE_S):
            text = f"busrl: {time.monotonic() - begun:.0f} s: {_progress(evaluation)}"
            with contextlib.suppress(OSError):  # nobody reads any more
                print(text, file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _progress(evaluation: Evaluation) -> str:
    """Asked from another thread than the one that measures; its rows are all there once it has no other phase."""
    if evaluation.phase:
        return evaluation.phase
    mean, answered = evaluation.mean(), sum(bool(row.finish) for row in list(evaluation.rows.values()))
    known = f", mean {mean:.3f}" if mean is not None else ""
    failed = sum(bool(row.error) for row in list(evaluation.rows.values()))
    return (
        f"{answered} of {evaluation.asked.of.answers} answers are there, {len(evaluation.rewards)} judged{known}"
        f"{f', {failed} have no reward' if failed else ''}"
    )


# -- which checkpoint is meant, and its model -----


def export(options: argparse.Namespace) -> int:
    """Write the model folder and say what it holds; UserError where there is no such checkpoint, or a damaged one."""
    from busrl.training.checkpoint import export_checkpoint, fault_of

    paths, out = RunPaths.of(options.run_dir), options.out.absolute()
    if not paths.topology.is_file():
        raise UserError(f"{options.run_dir}: no topology.json in it; give the directory of a run")
    step, folder = _of_run(paths, recorded(paths.topology), str(options.step or ""), "--step")
    if not step:
        raise UserError(f"{paths.checkpoints}: no checkpoint yet; learner.checkpoint_every says when there is one")
    if fault := fault_of(Path(folder)):
        raise UserError(f"{folder}: the checkpoint is damaged ({fault}); name another one with --step")
    if os.path.lexists(out):
        raise UserError(f"--out {options.out}: it is there, and nothing is overwritten; name a new folder")
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {options.out}: {out.parent} is no folder that can be written; make it, or name another")
    export_checkpoint(Path(folder), out, options.dtype or "")
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: the model of step {step}, {size / 1e6:.1f} MB")
    return 0


def find(named: Path, checkpoint: str, overrides: list[str]) -> tuple[Topology, int, str, Path]:
    """The meaning of the command line: the topology, the step and the folder of the weights to measure, and where the
    rows go; UserError if there is no such checkpoint."""
    paths = RunPaths.of(named)
    if not named.is_dir():
        topology = load(named, overrides)
        step, folder = _folder(checkpoint) if checkpoint else (0, topology.model.path)
        out = Path("evaluated") / f"{topology.run.name}{f'-{Path(checkpoint).name}' if checkpoint else ''}.jsonl"
        return topology, step, folder, out
    if not paths.topology.is_file():
        raise UserError(f"{named}: no topology.json in it; give a topology file, or the directory of a run")
    if overrides:
        raise UserError(f"--set changes a topology file, and {named} is a run with its own; give a file instead")
    topology = recorded(paths.topology)
    step, folder = _of_run(paths, topology, checkpoint)
    return topology, step, folder, paths.evaluated / f"step_{step}.jsonl"


def _of_run(
    paths: RunPaths, topology: Topology, checkpoint: str, option: str = "--checkpoint"
) -> tuple[int, str]:
    """Step and model folder: 0 is what the run began with, nothing the newest checkpoint."""
    if checkpoint == "0":
        return 0, topology.model.path
    if checkpoint and not (checkpoint.isascii() and checkpoint.isdigit()):
        return _folder(checkpoint)
    folders = {step_of(one): one for one in reversed(checkpoints_of(paths.checkpoints))}
    wanted = int(checkpoint) if checkpoint else max(folders, default=0)
    if wanted not in (*folders, 0):
        known = f"it has those of steps {', '.join(map(str, [0, *folders]))} (0 is the model that it began with)"
        raise UserError(f"{option} {checkpoint}: {paths.checkpoints} has no such step; {known}")
    return (wanted, str(folders[wanted])) if wanted else (0, topology.model.path)


def _folder(checkpoint: str) -> tuple[int, str]:
    """A model folder, or a checkpoint of any run, whose step its name tells."""
    folder = Path(checkpoint).resolve()
    return step_of(folder) if is_checkpoint(folder) else 0, str(folder)


@contextlib.contextmanager
def as_a_model(folder: str, near: Path) -> Iterator[str]:
    """The folder, or, of a checkpoint in shards, a model folder that is there for this time alone."""
    if not (Path(folder) / "shards").is_dir():
        yield folder
        return
    from busrl.training.checkpoint import export_checkpoint, fault_of

    if fault := fault_of(Path(folder)):
        raise UserError(f"{folder}: the checkpoint is damaged ({fault}); name another one with --checkpoint")
    with tempfile.TemporaryDirectory(prefix=".model-", dir=near) as made:
        export_checkpoint(Path(folder), Path(made) / "model")
        yield str(Path(made) / "model")


def with_model(topology: Topology, folder: str) -> Topology:
    """Load these weights; UserError if the folder holds no model."""
    folder = model_folder(folder)
    if not folder.startswith(TINY) and not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"{folder}: no config.json in it; --checkpoint takes a step of the run, the folder of a checkpoint "
            "(global_step_N), or any Hugging Face model folder"
        )
    return dataclasses.replace(topology, model=dataclasses.replace(topology.model, path=folder))


# -- measuring: the prompts, what is drawn for each and how the mean is taken are those of a round of validation -----


@dataclasses.dataclass(frozen=True)
class MeasuredRound:
    """The set that is measured: `of`, drawn as the round of that number draws it, in a run whose rounds have
    `answers`."""

    of: AskedSet
    answers: int
    round: int = 0


@dataclasses.dataclass
class Row:
    """A sample and its measured answer."""

    line: int  # of the prompt file, from 1
    prompt: Any
    completion: str = ""
    reward: float | None = None
    parts: dict[str, float] | None = None
    tokens: int = 0
    finish: str = ""  # end, length or aborted
    error: str = ""  # why it has no reward
    answer: str | None = None  # what the reward takes from the completion, where answers of a prompt are compared


@dataclasses.dataclass(frozen=True)
class EvaluationFigures:
    """The figures of a measurement, over `samples` of `prompts` different prompts; `failed`: those without a reward.
    `figures`: pass@k and the others by name; `by`: the same of each tag, as in validation.jsonl."""

    mean: float | None  # nothing was measured
    standard_error: float | None
    samples: int
    prompts: int
    failed: int
    length: float | None
    cut_share: float | None
    figures: dict[str, Figure]
    by: dict[str, dict[str, Any]]


class Evaluation:
    """`run` once: rows by their place in the round. The engine lives in this process, or where it puts itself."""

    def __init__(self, topology: Topology, asked: MeasuredRound) -> None:
        self.topology, self.asked = topology, asked
        self.stream = JsonlStream(asked.of.data, topology.run.seed, False, topology.data.prompt_key)
        self.lines: npt.NDArray[np.int64] = lines_of(asked.of.prompts, len(self.stream), asked.of.k)
        compares = topology.reward.compares if asked.of.k > 1 else None
        self.find = None if compares is None else finder(*compares)
        self.rows: dict[int, Row] = {}
        self._waiting: list[Request] = []
        self._known = token_rows(Path(topology.model.path))
        self.phase = "loads the reward"  # before the first answer

    def run(self) -> list[Row]:
        """Every row in order."""
        rollouts = [one for one in self.topology.processes() if one.role == "rollout"]
        require_here(rollouts[:1])
        device, prompt_key = self.topology.device_of("reward/0"), self.topology.data.prompt_key
        own, base_dir = self.topology.reward, self.topology.base_dir
        with RewardPool(own, base_dir=base_dir, prompt_key=prompt_key, device=device, ready_s=READY_S) as pool:
            if not pool.wait_ready(READY_S):
                raise UserError(f"reward.function: not loaded within {READY_S:g} s; see what it does when imported")
            self.phase = "loads the model and its engine"
            engine = make_engine(self.topology, rollouts[0].name if rollouts else "")
            try:
                self.phase = "reads the prompts"
                self._waiting = list(self._requests(engine))[::-1]
                self.phase = ""
                self._until_done(engine, pool)
            finally:
                engine.close()
        return [self.rows[place] for place in range(self.asked.of.answers)]

    @property
    def rewards(self) -> dict[int, float]:
        """By place, of the samples that have one (so far)."""
        return {place: row.reward for place, row in self.rows.items() if row.reward is not None}

    def found(self) -> EvaluationFigures:
        judged = [self.rows[place] for place in self.rewards]
        figures = self._figures()
        tags = tags_of(self.stream.records(self.lines), self.topology.validation.tag_key)
        return EvaluationFigures(
            figures.mean(),
            standard_error(figures.of_prompt()),
            len(judged),
            len({row.line for row in judged}),
            sum(bool(row.error) for row in self.rows.values()),
            float(np.mean([row.tokens for row in judged])) if judged else None,
            float(np.mean([row.finish == "length" for row in judged])) if judged else None,
            {name: one for name, one in figures.by_name().items() if name != "reward"},
            by_tag(figures, tags),
        )

    def mean(self) -> float | None:
        return self._figures().mean()

    def _figures(self) -> Figures:
        k = self.asked.of.k
        judged = [
            Judged(int(self.lines[place]), place // k, reward, self.rows[place].answer)
            for place, reward in self.rewards.items()
        ]
        return Figures(judged, k, self.topology.validation.solved, self.find is not None)

    def _requests(self, engine: Engine) -> Iterator[Request]:
        """Make a request for each sample; a prompt that cannot be asked has its row already."""
        limit = self.topology.max_prompt_tokens
        asked = self.asked.of
        first = VALIDATE_BIT | (self.asked.round * self.asked.answers + asked.first)
        for place in range(asked.answers):
            line = self.stream.at(int(self.lines[place]))
            row = self.rows[place] = Row(line.index + 1, None)
            ids = self._ids(engine, line, row)
            if not 0 < len(ids) <= limit:
                row.error = row.error or f"its prompt has {len(ids)} tokens; {limit_in_words(self.topology)}"
                continue
            yield Request(
                key=place, uid=first + place, segment=0, prompt_ids=ids, prefix_ids=NO_IDS,
                max_new_tokens=asked.max_new_tokens, temperature=asked.temperature, top_p=asked.top_p,
                seed=self.topology.run.seed,
            )

    def _ids(self, engine: Engine, line: PromptLine, row: Row) -> npt.NDArray[np.int32]:
        try:
            row.prompt = prompt_of(msgspec.json.decode(line.line), self.topology.data)
            return np.asarray(engine.encode(row.prompt), np.int32)
        except Exception as problem:  # a chat template is foreign code
            row.error = f"the prompt cannot be rendered: {problem}"
            return NO_IDS

    def _until_done(self, engine: Engine, pool: RewardPool) -> None:
        while self._waiting or engine.active or len(pool):
            room = engine.capacity - engine.active
            joining = [self._waiting.pop() for _ in range(min(room, len(self._waiting)))]
            if joining:
                engine.submit(joining)
            if engine.active:
                self._ended(engine, pool, engine.step())
            self._judged(pool.poll(0.0 if engine.active or self._waiting else 1.0))

    def _ended(self, engine: Engine, pool: RewardPool, finished: Sequence[Finished]) -> None:
        items = []
        for one in finished:
            row, ids = self.rows[one.key], one.token_ids.tolist()
            if one.refused:
                row.error = f"the engine refused it: {one.refused}"
                continue
            if one.finish == Finish.ABORTED or not ids:  # as in a run: part of an answer, or none, is not judged
                row.finish = "aborted"
                gave_up = one.finish == Finish.ABORTED
                row.error = "the engine gave it up" if gave_up else "its prompt leaves no room to answer"
                continue
            if len(wrong := self._known.foreign(one.token_ids)):  # its text is not what was drawn
                row.error = self._known.describe(wrong)
                continue
            row.completion = one.text if one.text is not None else engine.decode(ids, one.finish == Finish.EOS)
            row.answer = self.find(row.completion) if self.find is not None else None
            row.tokens = len(ids)
            row.finish = "end" if one.finish == Finish.EOS else "length"
            line = self.stream.at(int(self.lines[one.key]))
            items.append(Item(one.key, line.line, row.completion, ids))
        pool.submit(items)

    def _judged(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            row = self.rows[outcome.key]
            if outcome.error:
                row.error = f"reward {outcome.error}: {outcome.text}"
            else:
                row.reward, row.parts = outcome.value, outcome.parts or None


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a line of JSON per sample; what is empty is left out."""
    with open(path, "wb") as file:
        for row in rows:
            known = {key: value for key, value in dataclasses.asdict(row).items() if value not in ("", None)}
            file.write(msgspec.json.encode(known) + b"\n")
