"""Whole runs on the device, as a user starts them: the quickstart, with each transport that one device allows."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from gpucheck.frame import ROOT, Context, Skipped
from gpucheck.stop import dies_with_parent

NEEDED = ("zmq", "msgspec", "setproctitle")
TELLING_S = 12.0  # kept for telling where a run stood that does not end
SMALL = ("learner.trigger.n_min=4", "validation.samples=16", "generation.max_batch=32", "groups.size=4")


def _need_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"a run needs packages that are not installed here: {', '.join(missing)}")
    if importlib.util.find_spec("busrl._ring") is None:
        raise Skipped("the extension modules are not built")


def quickstart(context: Context) -> None:
    """A short run, through shared memory."""
    _run(context, "shm")


def quickstart_one_copy(context: Context) -> None:
    """The same with the learner training the engine's own weights."""
    _run(context, "cuda_ipc", "weights.transport=cuda_ipc")


def vllm(context: Context) -> None:
    """The same with vLLM in place of the torch engine."""
    _need_packages()
    from busrl.engines.vllm_versions import vllm_installed, vllm_objection

    why, remedy = vllm_objection(*vllm_installed())
    if why:
        raise Skipped(f"{why}; {remedy}")
    _run(context, "vllm", "process.rollout.engine=vllm")


def _run(context: Context, name: str, *settings: str) -> None:
    _need_packages()
    from busrl.ledger.trained import step_lines

    steps = 3 if context.small else 20
    directory = context.file.parent / "run"
    command = [sys.executable, "-m", "busrl.cli", "launch", "configs/quickstart.toml", "--run-dir", str(directory)]
    for setting in (f"model.device={context.device}", f"run.max_steps={steps}", *settings,
                    *(SMALL if context.small else ())):
        command += ["--set", setting]
    code = _exit_code(context, command, directory)
    context.bar(f"{name}: exit code", code, at_most=0)
    if code:
        _tell_errors(context, directory)
        return
    audit = subprocess.run([sys.executable, "-m", "busrl.cli", "audit", str(directory)], cwd=ROOT, timeout=60,
                           stdin=subprocess.DEVNULL, capture_output=True, text=True)
    context.bar(f"{name}: exit code of busrl audit", audit.returncode, at_most=0)
    rows = step_lines(directory / "metrics.jsonl")
    context.figure(f"{name}: steps", rows[-1]["step"])
    fifth = max(1, len(rows) // 5)
    for what, part in (("first", rows[:fifth]), ("last", rows[-fifth:])):
        context.figure(f"{name}: mean reward, {what} {fifth} steps", sum(r["reward"] for r in part) / len(part))


def _exit_code(context: Context, command: list[str], directory: Path) -> int:
    """Of the run; TimeoutExpired, after a note on where it stood, if this check's time ends first."""
    run = subprocess.Popen(dies_with_parent(*command), cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        return run.wait(max(1.0, context.left_s - TELLING_S))
    except subprocess.TimeoutExpired:
        _tell_where_it_stood(context, directory)
        raise
    finally:
        run.kill()
        run.wait()


def _tell_where_it_stood(context: Context, directory: Path) -> None:
    """What `busrl status` says of it, and the last line of each process."""
    with suppress(subprocess.SubprocessError):
        said = subprocess.run([sys.executable, "-m", "busrl.cli", "status", str(directory)], cwd=ROOT, text=True,
                              timeout=TELLING_S / 2, stdin=subprocess.DEVNULL, capture_output=True)
        context.note("busrl status: " + " / ".join((said.stdout + said.stderr).split("\n"))[-1500:])
    for log in sorted((directory / "logs").glob("*.log")):
        context.note(f"{log.name}: {(log.read_text(errors='replace').splitlines() or [''])[-1][:300]}")


def _tell_errors(context: Context, directory: Path) -> None:
    """The end of the processes' output."""
    errors = directory / "errors.jsonl"
    lines = errors.read_text().splitlines()[-3:] if errors.exists() else []
    for line in lines:
        context.note(json.loads(line).get("text", "")[:300])
    if not lines:
        context.note(f"no words of its processes in {os.fspath(errors)}")
