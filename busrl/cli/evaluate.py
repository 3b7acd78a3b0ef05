"""`busrl evaluate`: the figures of a model folder or a checkpoint on held-out prompts, without a run; `busrl validate`:
a round of a run that is running.

Hands what is meant (`checkpoints`) to `busrl.evaluate`, or by a file in the run directory to the validator, and prints
the figures. Changes nothing but the file of rows and that request.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl.cli.checkpoints import as_a_model, find, with_model
from busrl.cli.command import progress
from busrl.cli.run import launch_pid
from busrl.config import Topology, materialise, recorded
from busrl.config.prompts import AskedSet
from busrl.data import JsonlStream
from busrl.errors import PeerTimeout, UserError
from busrl.files import json_lines
from busrl.paths import RunPaths
from busrl.roles.validator import Request

if TYPE_CHECKING:
    from busrl.evaluate import Evaluation, EvaluationFigures, Row

PATIENCE_S = 5.0
LOOK_MS = 200
SHOWN = 3  # kinds of failures that are printed


def evaluate(options: argparse.Namespace) -> int:
    """Measure and print; 1 if no sample got a reward."""
    from busrl.evaluate import Evaluation, MeasuredRound, write_rows

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
        rows = evaluation.run(progress(_progress, PATIENCE_S))
    with _writing(out):
        write_rows(out, rows)
    found = evaluation.found()
    if options.json:
        print(json.dumps({"model": topology.model.path, **dataclasses.asdict(found), "rows": str(out)}))
    else:
        print("\n".join(_lines(topology, of, found, rows, time.monotonic() - begun, out)))
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
    before = Request.read(paths)
    if before is not None and before.open:
        raise UserError(f"{paths.root}: a round was asked for and is not done yet ({before.state}); wait for it")
    request = Request(uuid.uuid4().hex, [known[name] for name in options.names or known], options.free)
    request.write(paths)
    answer = _await_round(paths, request, pid, options.wait)
    if answer.state == "refused":
        raise UserError(f"{paths.root}: {answer.text}")
    rows = [row for row in json_lines(paths.validation) if row.get("round") == answer.round]
    for row in (row for row in rows if row.get("set", "") in answer.sets):
        print(json.dumps(row) if options.json else _told(row))
    return 0


def _await_round(paths: RunPaths, request: Request, pid: int, wait_s: float) -> Request:
    """The request once it is done; PeerTimeout with its state if it is not in time, or if the run ends before."""
    end = time.monotonic() + wait_s
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise PeerTimeout(f"{paths.root}: the run has just ended; its next start does what was asked") from None
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while True:
            ended = bool(poller.poll(LOOK_MS))
            found = Request.read(paths)
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
    """A line of validation.jsonl for people."""
    versions = f"versions {row['versions'][0]} to {row['versions'][-1]}, mixed" if row["mixed"] else (
        f"version {row['version']}"
    )
    intervals = row.get("intervals", {})
    figures = {"reward": row["val/reward"], **{key[4:]: value for key, value in row.items() if "@" in key}}
    lines = [f"{row.get('set') or 'validation'}, round {row['round']} of {versions}: {row['samples']} answers"]
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
    """The set that is meant, with what the command line says instead."""
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
    lines = [
        f"{topology.model.path}",
        f"  mean reward {found.mean:.4f}{error} (standard error over {found.prompts} prompts), {found.samples} samples "
        f"of {of.data}",
        *(
            f"  {name} {one.value:.4f} (95 %: {one.low:.4f} to {one.high:.4f}, over {one.prompts} prompts)"
            for name, one in found.figures.items()
        ),
        *(f"  {tag}: reward {one['val/reward']:.4f} over {one['prompts']} prompts" for tag, one in found.by.items()),
        f"  {found.length:.1f} tokens per answer, {found.cut_share:.0%} cut at {of.max_new_tokens}; {seconds:.1f} s",
    ]
    if kinds := Counter(row.error.split("\n", 1)[0] for row in rows if row.error):
        lines.append(f"  {found.failed} samples without a reward are not in the mean:")
        lines += [f"    {count}× {kind[:300]}" for kind, count in kinds.most_common(SHOWN)]
    return [*lines, f"  rows: {out}"]


def _progress(evaluation: Evaluation) -> str:
    return f"{len(evaluation.rewards)} of {evaluation.asked.of.answers} samples, mean {evaluation.mean():.3f}"
