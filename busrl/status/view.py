"""`busrl status`: the state of a run now, or its end, as plain data and in some lines. Attaches to nothing.

Reads the run directory and the ring once, without the bus, so it works without the broker. A monitor, which also
listens to the bus, shows the same data and more.

- The keys of the data stand in docs/run-directory.md. Keys may be added, never changed.
- Every line is safe to print, whatever the files hold.
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
from busrl.status.reader import RunReader, holder_of, newest_run, summary_of
from busrl.status.runfiles import fates, number
from busrl.status.state import OVER, ProcessRow, RingRecord, RunState
from busrl.status.words import alike, duration, printable, short
from busrl.system.files import TAIL_BYTES, as_map, json_lines, read_map

SCHEMA = 1
JSON = msgspec.json.Encoder(enc_hook=str)
LIVING = (*(phase.name.lower() for phase in RunPhase), "left")  # states with a ring
HEARD = ("replay", "unknown")  # states of a run that is known by an endpoint alone
MOST_KINDS = 5
TEXT = 340
# For a ring that exists and cannot be used; the files still hold the progress of the run.
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
    """A look at a run: its state, and other data of its directory, if there is one."""

    paths: RunPaths | None
    run: RunState
    now: float
    state: str  # that of `run`, or starting, unfinished, or the outcome in its summary
    holder: int | None = None  # pid of the launch that holds the directory
    sample: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, paths: RunPaths, run: RunState, now: float, sample: dict[str, Any]) -> RunStatus:
        holder, summary, state = holder_of(paths), summary_of(paths), run.state
        if state in ("ended", "unknown"):
            state = "starting" if holder is not None else str(summary.get("outcome")) if summary else "unfinished"
        return cls(paths, run, now, state, holder, sample, summary)

    @property
    def processes(self) -> list[ProcessRow]:
        """The rows of processes that are not dead."""
        return [row for row in self.run.rows(self.now) if row.state != "dead"]


def status(run_dir: str | os.PathLike[str] | None = None, *, as_json: bool = False, host: str = "") -> str:
    """The state of a run in some lines, or as one JSON object; without a directory that of the newest under `runs/`.
    `host`: only that of this other host."""
    paths = RunPaths.of(run_dir if run_dir is not None else newest_run(Path("runs")))
    reader, now = RunReader(paths), time.monotonic()
    reader.refresh(now)
    reader.close()
    if host:
        report = reader.run.hosts.get(host)
        if report is None:
            names = ", ".join(sorted(reader.run.hosts)) or "none"
            raise NoSuchRun(f"{host}: no host of the run in {paths.root} now (there: {names})")
        return to_json(report) if as_json else "\n".join(map(printable, words.host_lines(reader.run, host)))
    look = RunStatus.of(paths, reader.run, now, reader.files.newest_sample)
    return to_json(as_data(look)) if as_json else "\n".join(map(printable, _lines(look, paths)))


# -- as data ----------------------------------------------------------------------------------------------------------

def to_json(data: dict[str, Any]) -> str:
    """JSON of the data, with null for NaN, which is not JSON: files of a run may hold anything."""
    return JSON.encode(data).decode()


def as_data(look: RunStatus) -> dict[str, Any]:
    run, steps, facts = look.run, look.run.steps, look.run.facts
    speed = run.speed(look.now) if run.state not in OVER else steps.pace(0.0)
    idle, newest = run.idle, steps.newest
    return {
        "schema": SCHEMA, "time": time.time(),
        **{key: getattr(facts, key) or None for key in ("name", "run_dir", "run_id", "launch_pid", "started")},
        "state": look.state, "step": run.at_step, "version": run.version, "max_steps": facts.max_steps or None,
        "reward": {"first": run.first_reward, "last_10_steps": steps.recent(lambda record: record.reward)},
        **run.judged(),
        **steps.policy(idle),
        "newest_step": asdict(newest) if newest is not None else None,
        "sample": look.sample or None,
        "idle": {"groups": idle.idle_groups, "limit": idle.idle_limit, "causes": idle.idle_causes} if idle else None,
        "restarts": run.restarts,
        **vars(speed),
        **(_of_files(look.paths) if look.paths is not None else {}),
        **_more(look),
    }


def _of_files(paths: RunPaths) -> dict[str, Any]:
    controls = Controls.read(paths)
    paused = controls.paused and {"who": controls.paused.who, "time": controls.paused.time}
    return {
        "paused": paused, "changed": {key: line.new for key, line in controls.settings.items()},
        "samples": fates(paths.fates), "left_out": _left_out(paths), "problems": problems(paths.errors),
        "errors_from_outside": list(_from_outside(paths)), "refusals": list(_refusals(paths)),
        **{part.name: part.data for part in overviews(paths.root)},
    }


def overviews(run_dir: str | os.PathLike[str]) -> list[Any]:
    """Views of optional parts that the run uses, each with `name`, `data` for JSON and `lines`; none without a
    directory."""
    looks = capabilities.plugs("overviews") if run_dir else ()
    return [part for look in looks if (part := look(run_dir)) is not None]


def _more(look: RunStatus) -> dict[str, Any]:
    run, summary = look.run, look.summary
    if look.state in (*LIVING, *HEARD):
        living: dict[str, Any] = {
            "left_s": run.left_s(look.now), "processes": [asdict(row) for row in look.processes], "hosts": run.hosts,
            "waits": msgspec.to_builtins(waits.chain(run, look.now)), "stalled_s": waits.stalled_s(run, look.now),
        }
        return living | (_of_ring(run.ring) if run.ring is not None else {})
    if look.state == "damaged":
        return {"problem": run.damage, "holder": look.holder}
    if look.state == "starting":
        return {"holder": look.holder}
    if look.state == "unfinished":
        return {}
    stated = ("why", "seconds", "open_samples", "exit_code", "max_steps", "waits")
    numbers = {key: number(summary.get(name)) for key, name in (("step", "steps"), ("version", "version"))}
    numbers = {key: None if value is None else int(value) for key, value in numbers.items()}
    return {**{name: summary.get(name) for name in stated}, **numbers}


def _of_ring(ring: RingRecord) -> dict[str, Any]:
    return {
        "slots": {name: count for name, count in ring.occupancy.items() if count},
        "groups": {"open": ring.groups_open, "ready": ring.groups_ready} if ring.groups_open >= 0 else None,
        "reaps": ring.reaps,
        **({"calls": ring.calls, "episodes": ring.episodes} if ring.calls else {}),
    }


def problems(path: Path) -> list[dict[str, Any]]:
    """The kinds of problems in the end of errors.jsonl, newest first, each with severity, process, text, time, count.

    Lines of one process that differ in their digits alone are of one kind.
    """
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    with suppress(OSError):
        for row in json_lines(path, tail=TAIL_BYTES):
            at = number(row.get("time"))
            if at is None or not {"process", "severity", "text"} <= row.keys():
                continue
            process, severity, shown = str(row["process"]), str(row["severity"]), first_line(str(row["text"]), TEXT)
            new = {"severity": severity, "process": process, "text": shown, "time": at, "count": 0}
            kind = kinds.setdefault((process, alike(shown)), new)
            kind.update(text=shown, time=at, count=kind["count"] + 1)
    return sorted(kinds.values(), key=lambda kind: -kind["time"])


def _left_out(paths: RunPaths) -> dict[str, dict[str, int]]:
    """For each source: draws left out by pass rate, prompts that rest, and all prompts; {} where none was left out."""
    line = newest_skips(paths.skips)
    return {} if line is None else {
        name: {"draws": count, "resting": line.resting.get(name, 0), "prompts": line.prompts.get(name, 0)}
        for name, count in line.left_out.items()
    }


def _from_outside(paths: RunPaths) -> Iterator[str]:
    """ERRORs of senders that write no file of errors, as launch counted them."""
    kinds = {severity: severity for severity in reversed(SEVERITIES)}
    return _counted(paths.supervisor, "errors_from_outside", kinds, "ERROR from")


def _refusals(paths: RunPaths) -> Iterator[str]:
    """Refusals of the keeper's gateway, for each worker."""
    codes = [code for codes in capabilities.plugs("refusals") for code in codes]
    return _counted(paths.gateway, "workers", {code: code.replace("_", " ") for code in codes}, "gateway refused")


def _counted(path: Path, section: str, kinds: dict[str, str], what: str) -> Iterator[str]:
    for name, entry in as_map(read_map(path).get(section)).items():
        counts = as_map(entry)
        if some := [f"{counts[kind]} {name}" for kind, name in kinds.items() if counts.get(kind)]:
            yield f"{what} {name}: {', '.join(some)}; the latest {counts.get('latest', '')}"


# -- in lines ---------------------------------------------------------------------------------------------------------

def _lines(look: RunStatus, paths: RunPaths) -> Iterator[str]:
    run = look.run
    yield from _headline(look, paths)
    if look.state not in ("starting", "unfinished") or len(run.steps):
        yield from words.facts(run, look.now)
    if samples := fates(paths.fates):
        yield f"  samples   {' · '.join(f'{short(count)} {name}' for name, count in samples.items())}"
    for name, counts in _left_out(paths).items():
        yield (f"  left out  {short(counts['draws'])} draws of {words.safe(name, 40)} by pass rate; "
               f"{short(counts['resting'])} of {short(counts['prompts'])} prompts rest")
    if run.ring is not None and run.ring.reaps:
        yield f"  {short(run.ring.reaps)} slots taken back from dead processes"
    yield from (line for part in overviews(paths.root) for line in part.lines)
    rows = look.processes if look.state in LIVING else []
    yield from map(words.process_line, rows)
    beside = (row.name for rows_of_model in run.rows_beside().values() for row in rows_of_model)
    yield from _restarts(look, {row.name for row in rows}.union(beside))
    yield from problem_lines(paths.errors)
    yield from (f"  {line}" for line in (*_from_outside(paths), *_refusals(paths)))
    yield f"  {paths.root}"


def _headline(look: RunStatus, paths: RunPaths) -> Iterator[str]:
    facts, root, summary, holder = look.run.facts, paths.root, look.summary, look.holder
    name = facts.run_id
    match look.state:
        case "left":
            yield f"{name}: nobody runs; the next `busrl launch` in this directory adopts its ring"
        case state if state in LIVING:
            since = duration(max(0.0, time.time() - (facts.started or time.time())))
            yield f"{name}: {state}, {since} since launch (pid {facts.launch_pid or None})"
        case "damaged":
            yield f"{name}: damaged, its ring cannot be used: {look.run.damage}"
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


def _restarts(look: RunStatus, shown: set[str]) -> Iterator[str]:
    missing = {name: count for name, count in look.run.restarts.items() if count and name not in shown}
    if look.state in LIVING:
        yield from (f"    {name:<14} not in the ring now · restarted {count}×" for name, count in missing.items())
    elif missing and look.state != "damaged":
        yield f"  restarted: {', '.join(f'{name} {count}×' for name, count in missing.items())}"


def problem_lines(path: Path) -> Iterator[str]:
    kinds = problems(path)
    if kinds:
        yield f"  problems (all of them: {path})"
    for kind in kinds[:MOST_KINDS]:
        times = f"{kind['count']} times, last " if kind["count"] > 1 else ""
        ago = duration(max(0.0, time.time() - kind["time"]))
        yield f"    {times}{ago} ago  {kind['process']} {kind['severity']}: {kind['text']}"
    if len(kinds) > MOST_KINDS:
        yield f"    and {len(kinds) - MOST_KINDS} older kinds"
