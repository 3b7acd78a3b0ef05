"""`busrl evaluate`, `busrl validate` and `busrl export`: what a model or a checkpoint is worth, and its folder.

`evaluate` measures a model folder or a checkpoint on held-out prompts, without a run, with an engine in this process
and reward children. `validate` requests a round from the validator of a running run, by a file in its directory.
`export` writes the model of a checkpoint as a folder that stands alone, by `training.checkpoint`, which loads torch.

- Nothing changes but the file of rows, that request, and the exported folder.
- A sample is a function of seed, uid and weights: the checkpoint of step N, drawn as the run's own round N, gives the
  numbers of that round (where the engine draws by the sample, see docs/engines.md).
- A checkpoint that its run removes meanwhile is read to the end.
- Every sample has one row: its reward, or why it has none. The mean is over those that have one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import select
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl import capabilities
from busrl.cli.run import launch_pid
from busrl.data import JsonlStream, prompt_of
from busrl.data.figures import Figure, Figures, Judged, by_tag, standard_error, tags_of
from busrl.data.prompts import PromptLine, limit_in_words, lines_of, open_lines
from busrl.data.vocabulary import token_rows
from busrl.engines import Engine, Finished, Request, make_engine
from busrl.engines.tokens import NO_IDS
from busrl.errors import DiskFull, PeerTimeout, UserError, escaped
from busrl.launcher.pythons import require_here
from busrl.ledger.trained import checkpoints_of, is_checkpoint, step_of
from busrl.paths import RunPaths
from busrl.preflight.load import load, materialise
from busrl.preflight.model_folders import model_folder
from busrl.rewards.base import Item, Outcome
from busrl.rewards.pool import RewardPool
from busrl.roles import validator
from busrl.states import TINY, VALIDATE_BIT, Finish
from busrl.status.words import nothing
from busrl.system.files import FULL, json_lines, sync
from busrl.system.imports import of_busrl
from busrl.topology import Topology
from busrl.topology.prompts import AskedSet
from busrl.topology.recorded import recorded

PATIENCE_S = 5.0  # between two lines of progress
READY_S = 120.0
LOOK_S = 0.2
SHOWN = 3  # kinds of failures that are printed


def evaluate(options: argparse.Namespace) -> int:
    """Measure and print; 1 if no sample got a reward."""
    described, step, folder, out = find(options.target, options.checkpoint, options.overrides)
    if described.reward.of_episodes:
        raise UserError(
            f"{options.target}: its rewards are what episodes return, and `busrl evaluate` draws single answers; "
            "`busrl validate RUN_DIR` has the agents of a running run play the validation prompts"
        )
    measured_model, out = with_model(described, folder).model.path, options.out or out
    with _writing(out):  # before anything is computed; the rows of an earlier evaluation stay until there are new ones
        out.parent.mkdir(parents=True, exist_ok=True)
        open(out, "ab").close()
    begun = time.monotonic()
    with as_a_model(folder, out.parent) as model:
        topology = materialise(with_model(described, model))
        prompts = _prompts(topology, options)
        others = sum(entry.answers for entry in topology.sets if entry.name != prompts.name)
        evaluation = Evaluation(topology, MeasuredRound(prompts, others + prompts.answers, step))
        heading = f"{folder}: {prompts.answers} answers to {prompts.prompts} prompts of {prompts.data}"
        with progress_shown(heading, evaluation.progress):
            rows = evaluation.run()
    with _writing(out):
        write_rows(out, rows)
    figures = evaluation.figures()
    if options.json:
        print(json.dumps({"model": measured_model, **dataclasses.asdict(figures), "rows": str(out)}))
    else:
        print(escaped("\n".join(_lines(measured_model, prompts, figures, rows, time.monotonic() - begun, out))))
    return 0 if figures.samples else 1


def validate(options: argparse.Namespace) -> int:
    """Request a round from the run's validator, wait for it and print its figures."""
    paths = RunPaths.of(options.run_dir)
    pid = launch_pid(paths)
    if pid is None:
        remedy = f"`busrl evaluate {paths.root}` measures its newest checkpoint"
        raise UserError(f"{paths.root}: no process runs it, so nobody can validate; {remedy}")
    topology = recorded(paths.topology)
    names = {entry.title: entry.name for entry in topology.sets}
    if not names:
        raise UserError(f"{paths.root}: this run has no [validation] with prompts; use busrl evaluate --data FILE")
    if unknown := [name for name in options.names if name not in names]:
        raise UserError(f"{unknown[0]}: no set of this run; it has {', '.join(names)}")
    before = validator.Request.read(paths)
    if before is not None and before.open:
        raise UserError(f"{paths.root}: a round was asked for and is not done yet ({before.state}); wait for it")
    own = _asked_about(topology, options.tag)
    asked = [names[name] for name in options.names or names]
    request = validator.Request(uuid.uuid4().hex, asked, options.free, model=own.beside or msgspec.UNSET)
    request.write(paths)
    answer = _await_round(paths, request, pid, options.wait)
    if answer.state == "refused":
        raise UserError(f"{paths.root}: {answer.text}")
    rows = [row for row in json_lines(paths.validation) if row.get("round") == answer.round]
    for row in (row for row in rows if row.get("set", "") in answer.sets):
        print(json.dumps(row) if options.json else seats_text(row, own) if own.beside else round_text(row))
    return 0


def _asked_about(topology: Topology, tag: str | None) -> Topology:
    """The topology of the model that a round is asked about; UserError for one without rewards."""
    own = topology.of(tag or "")
    if own.frozen:
        raise UserError(f"--model {tag}: it only serves, so no episode gives it a reward; those that learn are "
                        f"{', '.join(topology.trained_tags)}")
    return own


def seats_text(row: dict[str, Any], own: Topology) -> str:
    """The text of a row of validation.jsonl for a person, of the seats of a model beside the lead."""
    versions, parts = row.get(f"val/versions/{own.tag}") or [], row.get("val/parts", {})
    of = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}, mixed"
    title = f"{row.get('set') or 'validation'}, round {row['round']}, {own.tag}"
    if not versions:
        return f"{title}: it made no call in {row['samples']} episodes"
    figures = (f"  {seat} {parts[seat]:.4f}" if seat in parts else f"  {seat}: no reward" for seat in own.seats)
    return "\n".join([f"{title} of {of}: {row['samples']} episodes", *figures])


def _await_round(paths: RunPaths, request: validator.Request, pid: int, wait_s: float) -> validator.Request:
    """Wait for a request; the request when it is done. PeerTimeout with its state if that takes longer, or if the run
    ends before."""
    end = time.monotonic() + wait_s
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise PeerTimeout(f"{paths.root}: the run has just ended; its next start does what was asked") from None
    try:
        while True:
            ended = bool(select.select([descriptor], [], [], LOOK_S)[0])
            current = validator.Request.read(paths)
            if current is not None and current.id == request.id and not current.open:
                return current
            if ended:
                raise PeerTimeout(f"{paths.root}: the run ended before the round; its next start does what was asked")
            if time.monotonic() > end:
                state = "no validator has begun it" if current is None or current.state == "asked" else "it goes on"
                raise PeerTimeout(f"{paths.root}: the round is not done after {wait_s:g} s; {state}: see busrl monitor")
    finally:
        os.close(descriptor)


def round_text(row: dict[str, Any]) -> str:
    """The text of a row of validation.jsonl for a person: a line for the round, and a line per figure."""
    versions = f"versions {row['versions'][0]} to {row['versions'][-1]}, mixed" if row["mixed"] else (
        f"version {row['version']}"
    )
    intervals = row.get("intervals", {})
    title, answers = f"{row.get('set') or 'validation'}, round {row['round']}", row["samples"] + row["dropped"]
    if not row["samples"]:
        return f"{title}: {nothing(answers)}"
    figures = {"reward": row["val/reward"], **{key[4:]: value for key, value in row.items() if "@" in key}}
    count = f"{row['samples']} of {answers} answers" if row["dropped"] else f"{answers} answers"
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


def _prompts(topology: Topology, options: argparse.Namespace) -> AskedSet:
    """The prompts to measure on and how they are drawn: a set of the topology, changed by the options."""
    prompts = _set_of(topology, options.validation) or _set_without_name(topology, warn=options.data is None)
    changes = {"prompts": options.samples, "k": options.k, "temperature": options.temperature}
    if options.data is not None:
        open_lines(options.data).close()
        changes["data"] = str(options.data)
    prompts = dataclasses.replace(prompts, **{key: value for key, value in changes.items() if value is not None})
    if prompts.prompts:
        return prompts
    with JsonlStream(prompts.data, 0, False, topology.data.prompt_key) as stream:
        return dataclasses.replace(prompts, prompts=len(stream))


def _set_of(topology: Topology, name: str | None) -> AskedSet | None:
    """The set of this name, by default the first; None if there is no set and no name. UserError for another name."""
    if name is None:
        return next(iter(topology.sets), None)
    by_name = {entry.name: entry for entry in reversed(topology.sets)}
    if name not in by_name:
        names = ", ".join(entry.name or '""' for entry in topology.sets) or "none"
        raise UserError(f"--validation {name}: no set of this name; there are {names}")
    return by_name[name]


def _set_without_name(topology: Topology, warn: bool) -> AskedSet:
    """The set of a topology that asks none: its [validation], on the prompts of training where it names no others."""
    validation = topology.validation
    if warn and not validation.data:
        print("busrl: no validation.data in the topology: prompts of data.train are asked", file=sys.stderr)
    return AskedSet(
        "", validation.data or topology.data.train, 0, validation.samples if isinstance(validation.samples, int) else 0,
        validation.k, validation.temperature, validation.top_p,
        validation.max_new_tokens or topology.generation.max_new_tokens, 0, 0,
    )


def _lines(
    model: str, prompts: AskedSet, figures: EvaluationFigures, rows: list[Row], seconds: float, out: Path
) -> list[str]:
    lines = [model]
    if figures.mean is None:
        lines.append(f"  {nothing(prompts.answers)}, of {prompts.data}")
    else:
        error = f" ± {figures.standard_error:.4f}" if figures.standard_error is not None else ""
        mean = f"mean reward {figures.mean:.4f}{error} (standard error over {figures.prompts} prompts)"
        samples = f"{figures.samples} of {prompts.answers}" if figures.failed else f"{figures.samples}"
        lines.append(f"  {mean}, {samples} samples of {prompts.data}")
    for name, figure in figures.figures.items():
        interval = f"95 %: {figure.low:.4f} to {figure.high:.4f}, over {figure.prompts} prompts"
        lines.append(f"  {name} {figure.value:.4f} ({interval})")
    for tag, row in figures.by.items():
        lines.append(f"  {tag}: reward {row['val/reward']:.4f} over {row['prompts']} prompts")
    lengths = ""
    if figures.length is not None and figures.cut_share is not None:
        lengths = f"{figures.length:.1f} tokens per answer, {figures.cut_share:.0%} cut at {prompts.max_new_tokens}; "
    lines.append(f"  {lengths}{seconds:.1f} s")
    if kinds := Counter(row.error.split("\n", 1)[0] for row in rows if row.error):
        lines.append(f"  {figures.failed} samples without a reward are not in the mean:")
        lines += [f"    {count}× {kind[:1000]}" for kind, count in kinds.most_common(SHOWN)]
    return [*lines, f"  rows: {out}"]


@contextlib.contextmanager
def progress_shown(heading: str, progress: Callable[[], str]) -> Iterator[None]:
    """Print the heading on standard error, and every few seconds the progress, from a thread of its own: a step of the
    evaluation may take long."""
    begun, over = time.monotonic(), threading.Event()
    print(f"busrl: {heading}", file=sys.stderr, flush=True)

    def report() -> None:
        while not over.wait(PATIENCE_S):
            text = f"busrl: {time.monotonic() - begun:.0f} s: {progress()}"
            with contextlib.suppress(OSError):  # the other end of standard error is closed
                print(text, file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def progress_text(rows: Collection[Row], answers: int, mean: float | None) -> str:
    """A text about the answers that are there and those that have rewards, with the mean of these."""
    answered, failed = sum(bool(row.finish) for row in rows), sum(bool(row.error) for row in rows)
    judged = sum(row.reward is not None for row in rows)
    text = f"{answered} of {answers} answers are there, {judged} judged"
    if mean is not None:
        text += f", mean {mean:.3f}"
    return f"{text}, {failed} have no reward" if failed else text


# -- which checkpoint is meant, and its model -----


def export(options: argparse.Namespace) -> int:
    """Write the model folder and print its size; UserError where the checkpoint is missing or damaged."""
    paths, out = RunPaths.of(options.run_dir), options.out.absolute()
    if not paths.topology.is_file():
        raise UserError(f"{options.run_dir}: no topology.json in it; give the directory of a run")
    if os.path.lexists(out):
        raise UserError(f"--out {options.out}: it is there, and nothing is overwritten; name a new folder")
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {options.out}: {out.parent} is no folder that can be written; make it, or name another")
    what = options.saved
    with new_folder(out) as folder:
        topology = recorded(paths.topology)
        if what:
            write = capabilities.plug("service", "export")
            write(paths.root, topology, options.saved, folder, options.dtype or "", options.adapter)
        else:
            what = f"the model of step {_export_step(options, paths, topology, folder)}"
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {what}, {size / 1e6:.1f} MB")
    return 0


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that becomes `out`, complete or not at all; nothing is overwritten. DiskFull."""
    from busrl.training.checkpoint import sync_tree

    temporary = out.parent / f".{out.name}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        os.rename(temporary, out)
        sync(out.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in FULL:
            raise DiskFull(f"{out}: {error.strerror} while it was written; nothing of it is left; make room") from error
        raise


def _export_step(options: argparse.Namespace, paths: RunPaths, topology: Topology, out: Path) -> int:
    """Write the model of a checkpoint of the run into a folder; its step."""
    from busrl.training.checkpoint import export_checkpoint, fault_of

    if options.adapter:
        raise UserError("--adapter: it is for what clients of a service saved; name it (tinker://MODEL/KIND/NAME)")
    step, folder = _of_run(paths, topology, str(options.step or ""), "--step")
    if not step:
        raise UserError(f"{paths.checkpoints}: no checkpoint yet; learner.checkpoint_every says when there is one")
    with held(Path(folder)) as checkpoint:
        if fault := fault_of(checkpoint):
            raise UserError(f"{folder}: the checkpoint is damaged ({fault}); name another one with --step")
        export_checkpoint(checkpoint, out, options.dtype or "")
    return step


def find(target: Path, checkpoint: str, overrides: list[str]) -> tuple[Topology, int, str, Path]:
    """Resolve the command line: the topology, step and folder of the weights to measure, and the file of the rows.
    UserError if there is no such checkpoint."""
    paths = RunPaths.of(target)
    if not target.is_dir():
        topology = load(target, overrides)
        step, folder = _folder(checkpoint) if checkpoint else (0, topology.model.path)
        out = Path("evaluated") / f"{topology.run.name}{f'-{Path(checkpoint).name}' if checkpoint else ''}.jsonl"
        return topology, step, folder, out
    if not paths.topology.is_file():
        raise UserError(f"{target}: no topology.json in it; give a topology file, or the directory of a run")
    if overrides:
        raise UserError(f"--set changes a topology file, and {target} is a run with its own; give a file instead")
    topology = recorded(paths.topology)
    step, folder = _of_run(paths, topology, checkpoint)
    return topology, step, folder, paths.evaluated / f"step_{step}.jsonl"


def _of_run(
    paths: RunPaths, topology: Topology, checkpoint: str, option: str = "--checkpoint"
) -> tuple[int, str]:
    """Step and model folder of a checkpoint: "0" is the model that the run began with, "" the newest checkpoint."""
    if checkpoint == "0":
        return 0, topology.model.path
    if checkpoint and not (checkpoint.isascii() and checkpoint.isdigit()):
        return _folder(checkpoint)
    folders = {step_of(path): path for path in reversed(checkpoints_of(paths.checkpoints))}
    wanted = int(checkpoint) if checkpoint else max(folders, default=0)
    if wanted not in (*folders, 0):
        exports = option == "--step"  # and the model that a run began with is a folder already
        there = ", ".join(map(str, folders if exports else [0, *folders])) or "none so far"
        steps = f"it has those of steps {there}{'' if exports else ' (0 is the model that it began with)'}"
        raise UserError(f"{option} {checkpoint}: {paths.checkpoints} has no such step; {steps}")
    return (wanted, str(folders[wanted])) if wanted else (0, topology.model.path)


def _folder(checkpoint: str) -> tuple[int, str]:
    """Step and path of a model folder, or of a checkpoint of any run, which has its step in its name."""
    folder = Path(checkpoint).resolve()
    return step_of(folder) if is_checkpoint(folder) else 0, str(folder)


@contextlib.contextmanager
def as_a_model(folder: str, near: Path) -> Iterator[str]:
    """The folder; of a checkpoint one that stays although its run removes it, made to a model if it is in shards."""
    if not is_checkpoint(Path(folder)):
        yield folder
        return
    with held(Path(folder)) as checkpoint:
        from busrl.training.checkpoint import MODEL, export_checkpoint, fault_of

        in_shards = (checkpoint / "shards").is_dir()
        if fault := fault_of(checkpoint, "" if in_shards else f"{MODEL}/"):
            raise UserError(f"{folder}: the checkpoint is damaged ({fault}); name another one with --checkpoint")
        if not in_shards:
            yield str(checkpoint)
            return
        with tempfile.TemporaryDirectory(prefix=".model-", dir=near) as scratch:
            model = Path(scratch) / "model"
            model.mkdir()
            export_checkpoint(checkpoint, model)
            yield str(model)


@contextlib.contextmanager
def held(checkpoint: Path) -> Iterator[Path]:
    """Hard links to the files of a checkpoint, in a folder beside it that goes at the end; the checkpoint itself where
    none can be made, and a UserError if it is removed meanwhile."""
    with contextlib.ExitStack() as stack:
        twin = checkpoint
        with contextlib.suppress(OSError):
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=".held-", dir=checkpoint.parent))
            twin = shutil.copytree(checkpoint, Path(scratch) / checkpoint.name, copy_function=os.link)
        try:
            yield twin
        except Exception as problem:
            if twin != checkpoint or checkpoint.is_dir():
                raise
            raise UserError(
                f"{checkpoint}: its run has removed it while it was read (learner.keep_last says how many it keeps); "
                "the same command without a step takes the newest one"
            ) from problem


def with_model(topology: Topology, folder: str) -> Topology:
    """The topology with the model of this folder; UserError if the folder holds none."""
    folder = model_folder(folder)
    if not folder.startswith(TINY) and not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"{folder}: no config.json in it; --checkpoint takes a step of the run, the folder of a checkpoint "
            "(global_step_N), or any Hugging Face model folder"
        )
    return dataclasses.replace(topology, model=dataclasses.replace(topology.model, path=folder))


# -- measuring: prompts, draws and the mean are those of a round of validation -----


@dataclasses.dataclass(frozen=True)
class MeasuredRound:
    """The round that is measured: the set `of`, drawn as the round of that number in a run whose rounds have `answers`
    in all."""

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
    """The figures of a measurement, over `samples` of `prompts` different prompts; `failed` counts the samples without
    a reward. `figures` has pass@k and the others by name, `by` the same of each tag, as in validation.jsonl."""

    mean: float | None  # None: nothing was measured
    standard_error: float | None
    samples: int
    prompts: int
    failed: int
    length: float | None
    cut_share: float | None
    figures: dict[str, Figure]
    by: dict[str, dict[str, Any]]


class Evaluation:
    """A measurement: `run` once, then `figures`. `rows` are by their place in the round; `phase` says what goes on
    before the first answer. The engine lives in this process, or in processes of its own."""

    def __init__(self, topology: Topology, measured: MeasuredRound) -> None:
        self.topology, self.measured = topology, measured
        self.stream = JsonlStream(measured.of.data, topology.run.seed, False, topology.data.prompt_key)
        self.lines: npt.NDArray[np.int64] = lines_of(measured.of.prompts, len(self.stream), measured.of.k)
        finder = topology.reward.finder if measured.of.k > 1 else None
        self.find = None if finder is None else of_busrl(finder[0])(finder[1])
        self.rows: dict[int, Row] = {}
        self._waiting: list[Request] = []
        self._known = token_rows(Path(topology.model.path))
        self.phase = "loads the reward"

    def run(self) -> list[Row]:
        """Draw and judge every sample; the rows in order."""
        rollouts = [entry for entry in self.topology.processes() if entry.role == "rollout"]
        require_here(rollouts[:1])
        device, prompt_key = self.topology.device_of("reward/0"), self.topology.data.prompt_key
        reward, base_dir = self.topology.reward, self.topology.base_dir
        with RewardPool(reward, base_dir=base_dir, prompt_key=prompt_key, device=device, ready_s=READY_S) as pool:
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
        return [self.rows[place] for place in range(self.measured.of.answers)]

    @property
    def rewards(self) -> dict[int, float]:
        """The rewards so far, by place."""
        return {place: row.reward for place, row in self.rows.items() if row.reward is not None}

    def progress(self) -> str:
        """The progress as a text; may be called from another thread, as no row is added after the last phase."""
        return self.phase or progress_text(list(self.rows.values()), self.measured.of.answers, self._scores().mean())

    def figures(self) -> EvaluationFigures:
        judged = [self.rows[place] for place in self.rewards]
        scores = self._scores()
        tags = tags_of(self.stream.records(self.lines), self.topology.validation.tag_key)
        return EvaluationFigures(
            scores.mean(),
            standard_error(scores.of_prompt()),
            len(judged),
            len({row.line for row in judged}),
            sum(bool(row.error) for row in self.rows.values()),
            float(np.mean([row.tokens for row in judged])) if judged else None,
            float(np.mean([row.finish == "length" for row in judged])) if judged else None,
            {name: figure for name, figure in scores.by_name().items() if name != "reward"},
            by_tag(scores, tags),
        )

    def _scores(self) -> Figures:
        k = self.measured.of.k
        judged = [
            Judged(int(self.lines[place]), place // k, reward, self.rows[place].answer)
            for place, reward in self.rewards.items()
        ]
        return Figures(judged, k, self.topology.validation.solved, self.find is not None)

    def _requests(self, engine: Engine) -> Iterator[Request]:
        """A request for each sample. A prompt that cannot be drawn for gets its row at once, with the error."""
        limit = self.topology.max_prompt_tokens
        prompts = self.measured.of
        first = VALIDATE_BIT | (self.measured.round * self.measured.answers + prompts.first)
        for place in range(prompts.answers):
            line = self.stream.at(int(self.lines[place]))
            row = self.rows[place] = Row(line.index + 1, None)
            ids = self._ids(engine, line, row)
            if not 0 < len(ids) <= limit:
                row.error = row.error or f"its prompt has {len(ids)} tokens; {limit_in_words(self.topology)}"
                continue
            yield Request(
                key=place, uid=first + place, segment=0, prompt_ids=ids, prefix_ids=NO_IDS,
                max_new_tokens=prompts.max_new_tokens, temperature=prompts.temperature, top_p=prompts.top_p,
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
                self._add_answers(engine, pool, engine.step())
            self._add_rewards(pool.poll(0.0 if engine.active or self._waiting else 1.0))

    def _add_answers(self, engine: Engine, pool: RewardPool, finished: Sequence[Finished]) -> None:
        """Enter answers into their rows and submit them to the reward, or enter why they cannot be judged."""
        items = []
        for answer in finished:
            row, ids = self.rows[answer.key], answer.token_ids.tolist()
            if answer.refused:
                row.error = f"the engine refused it: {answer.refused}"
                continue
            if answer.finish == Finish.ABORTED or not ids:  # as in a run, a part of an answer is not judged
                row.finish = "aborted"
                gave_up = answer.finish == Finish.ABORTED
                row.error = "the engine gave it up" if gave_up else "its prompt leaves no room to answer"
                continue
            if len(wrong := self._known.foreign(answer.token_ids)):  # decoded, they are not what was drawn
                row.error = self._known.describe(wrong)
                continue
            row.completion = answer.text if answer.text is not None else engine.decode(ids, answer.finish == Finish.EOS)
            row.answer = self.find(row.completion) if self.find is not None else None
            row.tokens = len(ids)
            row.finish = "end" if answer.finish == Finish.EOS else "length"
            line = self.stream.at(int(self.lines[answer.key]))
            items.append(Item(answer.key, line.line, row.completion, ids))
        pool.submit(items)

    def _add_rewards(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            row = self.rows[outcome.key]
            if outcome.error:
                row.error = f"reward {outcome.error}: {outcome.text}"
            else:
                row.reward, row.parts = outcome.value, outcome.parts or None


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a line of JSON per sample, without its empty fields."""
    with open(path, "wb") as file:
        for row in rows:
            filled = {key: value for key, value in dataclasses.asdict(row).items() if value not in ("", None)}
            file.write(msgspec.json.encode(filled) + b"\n")
