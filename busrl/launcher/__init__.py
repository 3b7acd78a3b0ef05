"""`busrl launch`: one run from its topology to its summary.

Talks to everything that a run has on this host: directory, ring, children, bus. Never imports torch: what needs it
(making a quickstart model, the roles) runs in other processes. Knows nothing of tasks or weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import setproctitle

from busrl import capabilities
from busrl.data.pretrained import task_prompts
from busrl.errors import BusrlError, MachineError, RunFinished
from busrl.launcher.children import Interrupted, Signals
from busrl.launcher.display import Display, open_display
from busrl.launcher.run import Launch, close_run
from busrl.launcher.rundir import open_run
from busrl.launcher.summary import Audit, RunOutcome, build, final_lines
from busrl.paths import RunPaths
from busrl.preflight.load import materialise
from busrl.system import files
from busrl.topology import Topology

__all__ = ["launch"]


def launch(
    topology: Topology, run_dir: str | os.PathLike[str], *, resume: bool = True, stream: TextIO | None = None,
) -> int:
    """Run a topology in a directory; the exit code: 0 if its goal was reached, 128 + n after signal n, else 1.

    Adopts what an earlier launch left in the directory; `resume=False` refuses a directory that holds a run.
    """
    setproctitle.setproctitle("busrl:launch")
    with Signals() as signals, contextlib.closing(open_display(stream or sys.stdout, time.monotonic)) as display:
        topology = materialise(topology)
        try:
            opened = open_run(run_dir, topology, resume=resume)
        except RunFinished as nothing_to_do:
            display.say(str(nothing_to_do))
            return nothing_to_do.exit_code
        display.log = opened.paths.log("launch")
        display.say(f"{topology.run.name} in {opened.paths.root}")
        for note in opened.notes:
            display.say(note)
        running = Launch(opened, display, signals)
        outcome = running.run()
        display.settle()
        for line in opened.restore():
            display.say(line)
        still_open = close_run(opened)
        if opened.displaced:  # the run belongs to another launch, and so does its summary
            return outcome.exit_code
        return _conclude(opened.paths.root, topology, running, outcome, still_open, signals, display)


def _conclude(
    root: Path, topology: Topology, running: Launch, outcome: RunOutcome, still_open: int, signals: Signals,
    display: Display,
) -> int:
    """Audit the run, write its summary and print the last lines. The run directory is released already."""
    report: Audit | None = None
    unaudited, beside, wrong = "", dict[str, Any](), list[str]()
    try:
        with signals.interrupting():
            for audit in capabilities.plugs("run_audit"):
                report = audit(root, prompts=task_prompts(topology.data.train))
            for look in capabilities.plugs("summaries"):
                beside, wrong = look(root, topology)
    except Interrupted as name:
        unaudited = f"{name} interrupted it; `busrl audit {root}` makes it"
    except (OSError, BusrlError) as problem:  # a run has a summary, also if its files cannot be read
        unaudited = str(problem)
    if unaudited:
        display.say(f"no audit is made: {unaudited}")
    if outcome.exit_code == 0 and (unaudited or (report and report.errors) or wrong):
        found = " ".join(["the audit found errors", *([f"({', '.join(wrong)})"] if wrong else [])])
        why = f"no audit is made: {unaudited}" if unaudited else found
        outcome = RunOutcome("failed", f"the goal was reached, but {why}", 1)
    summary = build(
        outcome, running.progress, report, still_open, running.usage.summary(), running.residence.summary(),
        running.crashes.missing(),
    )
    summary |= beside
    paths = RunPaths.of(root)
    try:
        files.replace(paths.summary, json.dumps(summary, indent=2, ensure_ascii=False, default=str).encode() + b"\n")
    except MachineError as problem:
        display.say(f"no summary.json is written: {problem}")
    for line in final_lines(summary, report, paths):
        display.say(line)
    return outcome.exit_code
