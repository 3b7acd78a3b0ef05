"""`busrl status`: what a run is doing now, or how it ended, as plain data and in some lines. Attaches to nothing.

Reads the run directory and the ring once, without the bus, so it works with the broker down. A monitor, which also
listens to the bus, shows the same data and more.

- The keys of the data stand in docs/operating.md: they are only ever added to.
- Every line is made safe to print, whoever wrote what stands in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from busrl import capabilities
from busrl.errors import NoSuchRun, first_line
from busrl.ledger.controls import Controls
from busrl.ledger.skips import newest_skips
from busrl.paths import RunPaths
from busrl.protocol.messages import SEVERITIES
from busrl.states import RunPhase
from busrl.status import waits, words
from busrl.status.reader import RunReader, holder_of, newest_run
from busrl.status.runfiles import fates, number
from busrl.status.state import OVER, ProcessRow, RingRecord, RunState
from busrl.status.words import alike, duration, printable, short
from busrl.system.files import TAIL_BYTES, as_map, json_lines, read_map

SCHEMA = 1
JSON = msgspec.json.Encoder(enc_hook=str)
LIVING = (*(one.name.lower() for one in RunPhase), "left")  # states with a ring
HEARD = ("replay", "unknown")  # states of what is known by an endpoint alone
MOST_KINDS = 5
TEXT = 340
# A ring that is there and cannot be used; the files still tell how far the run is.
REMEDY_NOBODY = (
    "  nobody runs, and the next start refuses: `busrl ring clean {root} --force`, then start it again (what was in "
    "its slots is generated again)"
)
REMEDY_RUNNING = (
    "  launch (pid {pid}) continues with what its processes have mapped; none can be started again: "
    "`busrl stop {root}` ends it in order, and a start continues from checkpoint and log"
)


@dataclass(frozen=True)
class RunStatus:
    """A look at a run: its state, and what stands beside that in its directory, where that is known."""

    paths: RunPaths | None
    run: RunState
    now: float
    state: str  # that of `run`, or starting, unfinished, or the outcome that its summary tells
    holder: int | None = None  # pid of the launch that holds the directory
    sample: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, paths: RunPaths, run: RunState, now: float, sample: dict[str, Any]) -> RunStatus:
        holder, summary, state = holder_of(paths), read_map(paths.summary), run.state
        if state in ("ended", "unknown"):
            state = "starting" if holder is not None else str(summary.get("outcome")) if summary else "unfinished"
        return cls(paths, run, now, state, holder, sample, summary)

    @property
    def processes(self) -> list[ProcessRow]:
        """Rows of processes that are not dead."""
        return [row for row in self.run.rows(self.now) if row.state != "dead"]


def status(run_dir: str | os.PathLike[str] | None = None, *, as_json: bool = False, host: str = "") -> str:
    """The state of a run in some lines, or as one JSON object; without a directory that of the newest under `runs/`.
    `host`: only that of this other host."""
    paths = RunPaths.of(run_dir if run_dir is not None else newest_run(Path("runs")))
    reader, now = RunReader(paths), time.monotonic()
    reader.refresh(now)
    reader.close()
    if host:
        told = reader.run.hosts.get(host)
        if told is None:
            known = ", ".join(sorted(reader.run.hosts)) or "none"
            raise NoSuchRun(f"{host}: no host of the run in {paths.root} now (there: {known})")
        return to_json(told) if as_json else "\n".join(map(printable, words.host_lines(reader.run, host)))
    found = RunStatus.of(paths, reader.run, now, reader.files.newest_sample)
    return to_json(as_data(found)) if as_json else "\n".join(map(printable, _lines(found, paths)))


# -- as data ----------------------------------------------------------------------------------------------------------

def to_json(data: dict[str, Any]) -> str:
    """JSON with null for what is no number: files of a run may hold anything, and NaN is not JSON."""
    return JSON.encode(data).decode()


def as_data(found: RunStatus) -> dict[str, Any]:
    run, steps, facts = found.run, found.run.steps, found.run.facts
    speed = run.speed(found.now) if run.state not in OVER else steps.pace(0.0)
    idle, newest = run.idle, steps.newest
    return {
        "schema": SCHEMA, "time": time.time(),
        **{key: getattr(facts, key) or None for key in ("name", "run_dir", "run_id", "launch_pid", "started")},
        "state": found.state, "step": run.at_step, "version": run.version, "max_steps": facts.max_steps or None,
        "reward": {"first": run.first_reward, "last_10_steps": steps.recent(lambda one: one.reward)},
        **run.judged(),
        **steps.policy(idle),
        "newest_step": asdict(newest) if newest is not None else None,
        "sample": found.sample or None,
        "idle": {"groups": idle.idle_groups, "limit": idle.idle_limit, "causes": idle.idle_causes} if idle else None,
        "restarts": run.restarts,
        **vars(speed),
        **(_of_files(found.paths) if found.paths is not None else {}),
        **_more(found),
    }


def _of_files(paths: RunPaths) -> dict[str, Any]:
    asked = Controls.read(paths)
    paused = asked.paused and {"who": asked.paused.who, "time": asked.paused.time}
    return {
        "paused": paused, "changed": {key: line.new for key, line in asked.settings.items()},
        "samples": fates(paths.fates), "left_out": _left_out(paths), "problems": problems(paths.errors),
        "errors_from_outside": list(_from_outside(paths)), "refusals": list(_refusals(paths)),
    }


def _more(found: RunStatus) -> dict[str, Any]:
    run, summary = found.run, found.summary
    if found.state in (*LIVING, *HEARD):
        living: dict[str, Any] = {
            "left_s": run.left_s(found.now), "processes": [asdict(row) for row in found.processes], "hosts": run.hosts,
            "waits": msgspec.to_builtins(waits.chain(run, found.now)), "stalled_s": waits.stalled_s(run, found.now),
        }
        return living | (_of_ring(run.ring) if run.ring is not None else {})
    if found.state == "damaged":
        return {"problem": run.damage, "holder": found.holder}
    if found.state == "starting":
        return {"holder": found.holder}
    if found.state == "unfinished":
        return {}
    kept = ("why", "seconds", "open_samples", "exit_code", "max_steps", "waits")
    known = {key: number(summary.get(name)) for key, name in (("step", "steps"), ("version", "version"))}
    numbers = {key: None if value is None else int(value) for key, value in known.items()}
    return {**{name: summary.get(name) for name in kept}, **numbers}


def _of_ring(ring: RingRecord) -> dict[str, Any]:
    return {
        "slots": {name: count for name, count in ring.occupancy.items() if count},
        "groups": {"open": ring.groups_open, "ready": ring.groups_ready} if ring.groups_open >= 0 else None,
        "reaps": ring.reaps,
        **({"calls": ring.calls, "episodes": ring.episodes} if ring.calls else {}),
    }


def problems(path: Path) -> list[dict[str, Any]]:
    """Every kind of problem in the end of errors.jsonl, the newest first: severity, process, text, time, count.

    Lines of one process that differ in their digits alone are of one kind.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    with suppress(OSError):
        for row in json_lines(path, tail=TAIL_BYTES):
            at = number(row.get("time"))
            if at is None or not {"process", "severity", "text"} <= row.keys():
                continue
            process, severity, said = str(row["process"]), str(row["severity"]), first_line(str(row["text"]), TEXT)
            new = {"severity": severity, "process": process, "text": said, "time": at, "count": 0}
            kind = found.setdefault((process, alike(said)), new)
            kind.update(text=said, time=at, count=kind["count"] + 1)
    return sorted(found.values(), key=lambda kind: -kind["time"])


def _left_out(paths: RunPaths) -> dict[str, dict[str, int]]:
    """By source: draws left out by pass rate, prompts that rest now, and all prompts; {} where none was left out."""
    line = newest_skips(paths.skips)
    return {} if line is None else {
        name: {"draws": count, "resting": line.resting.get(name, 0), "prompts": line.prompts.get(name, 0)}
        for name, count in line.left_out.items()
    }


def _from_outside(paths: RunPaths) -> Iterator[str]:
    """ERRORs of senders that do not file their own, counted by launch."""
    kinds = {severity: severity for severity in reversed(SEVERITIES)}
    return _counted(paths.supervisor, "errors_from_outside", kinds, "ERROR from")


def _refusals(paths: RunPaths) -> Iterator[str]:
    """Refusals of the keeper's gateway, by worker."""
    codes = [code for codes in capabilities.plugs("refusals") for code in codes]
    return _counted(paths.gateway, "workers", {code: code.replace("_", " ") for code in codes}, "gateway refused")


def _counted(path: Path, section: str, kinds: dict[str, str], what: str) -> Iterator[str]:
    for name, found in as_map(read_map(path).get(section)).items():
        counts = as_map(found)
        if some := [f"{counts[kind]} {name}" for kind, name in kinds.items() if counts.get(kind)]:
            yield f"{what} {name}: {', '.join(some)}; the latest {counts.get('latest', '')}"


# -- in lines ---------------------------------------------------------------------------------------------------------

def _lines(found: RunStatus, paths: RunPaths) -> Iterator[str]:
    run = found.run
    yield from _headline(found, paths)
    if found.state not in ("starting", "unfinished") or len(run.steps):
        yield from words.facts(run, found.now)
    if samples := fates(paths.fates):
        yield f"  samples   {' · '.join(f'{short(count)} {name}' for name, count in samples.items())}"
    for name, own in _left_out(paths).items():
        yield (f"  left out  {short(own['draws'])} draws of {words.safe(name, 40)} by pass rate; "
               f"{short(own['resting'])} of {short(own['prompts'])} prompts rest")
    if run.ring is not None and run.ring.reaps:
        yield f"  {short(run.ring.reaps)} slots taken back from dead processes"
    rows = found.processes if found.state in LIVING else []
    yield from map(words.process_line, rows)
    yield from _restarts(found, {row.name for row in rows})
    yield from problem_lines(paths.errors)
    yield from (f"  {line}" for line in (*_from_outside(paths), *_refusals(paths)))
    yield f"  {paths.root}"


def _headline(found: RunStatus, paths: RunPaths) -> Iterator[str]:
    facts, root, summary, holder = found.run.facts, paths.root, found.summary, found.holder
    name = facts.run_id
    match found.state:
        case "left":
            yield f"{name}: nobody runs; the next `busrl launch` in this directory adopts its ring"
        case state if state in LIVING:
            since = duration(max(0.0, time.time() - (facts.started or time.time())))
            yield f"{name}: {state}, {since} since launch (pid {facts.launch_pid or None})"
        case "damaged":
            yield f"{name}: damaged, its ring cannot be used: {found.run.damage}"
            yield (REMEDY_NOBODY if holder is None else REMEDY_RUNNING).format(root=root, pid=holder)
        case "starting":
            yield (
                f"{name}: launch (pid {holder}) is there, but no ring: it is starting or ending, or "
                f"{paths.ring_file} was removed; if this stays so, `busrl stop {root}` and start it again"
            )
        case "unfinished":
            yield f"{name}: no ring and no summary; the run was never finished. Start it again to continue"
        case state:
            yield f"{name}: {state}, {summary.get('why')}; it took {duration(number(summary.get('seconds')) or 0.0)}"
            if summary.get("open_samples"):
                yield f"  {summary['open_samples']} samples are open: the next start generates them again"


def _restarts(found: RunStatus, shown: set[str]) -> Iterator[str]:
    missing = {name: count for name, count in found.run.restarts.items() if count and name not in shown}
    if found.state in LIVING:
        yield from (f"    {name:<14} not in the ring now · restarted {count}×" for name, count in missing.items())
    elif missing and found.state != "damaged":
        yield f"  restarted: {', '.join(f'{name} {count}×' for name, count in missing.items())}"


def problem_lines(path: Path) -> Iterator[str]:
    found = problems(path)
    if found:
        yield f"  problems (all of them: {path})"
    for kind in found[:MOST_KINDS]:
        times = f"{kind['count']} times, last " if kind["count"] > 1 else ""
        ago = duration(max(0.0, time.time() - kind["time"]))
        yield f"    {times}{ago} ago  {kind['process']} {kind['severity']}: {kind['text']}"
    if len(found) > MOST_KINDS:
        yield f"    and {len(found) - MOST_KINDS} older kinds"
