"""A view of a service for `busrl status` and monitors, during a run and after it.

Reads the files that tuner and door show their figures in (`figures`), and writes nothing. Knows nothing of the logs,
which may hold gigabytes, nor of the state of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from busrl.service.folders import ServiceFolders
from busrl.service.registry import RUN
from busrl.status.words import duration, joined, printable, short
from busrl.system import files

MODELS, SAMPLERS, SESSIONS = 8, 4, 4  # most lines of each
MIB = 1 << 20


class Overview(NamedTuple):
    """A service as people see it, under its name. `data`: for JSON; `lines`: the sum of all first."""

    name: str
    data: dict[str, Any]
    lines: list[str]


def overview(run_dir: str | Path) -> Overview | None:
    """The view of the service in a run directory; None if no service ran there."""
    where = ServiceFolders(Path(run_dir))
    if not where.root.is_dir():
        return None
    told = files.read_map(where.clients_shown)
    trained = files.read_map(where.models_shown)
    rows = files.as_map(told.get("models"))
    figures = files.as_map(trained.get("models"))
    data = {
        "models": {name: {**files.as_map(rows.get(name)), **files.as_map(figures.get(name))}
                   for name in {**rows, **figures}},
        **{key: files.as_map(told.get(key)) for key in ("sessions", "samplers", "counts", "queue", "samples")},
        "aside": told.get("aside", 0), "replays": trained.get("replays", 0), "executing": executing(where),
    }
    return Overview("service", data, [*lines_of(data, time.time())])


def executing(where: ServiceFolders) -> dict[str, Any] | None:
    """The request that the tuner is at, and since when; None if it is at none."""
    at = files.read_map(where.executing)
    since = files.last_change(where.executing)
    return {key: at.get(key) for key in ("id", "seq", "op")} | {"since": since} if at else None


def lines_of(data: Mapping[str, Any], now: float) -> Iterator[str]:
    yield f"  service   {_headline(data, now)}"
    at = data["executing"]
    if at is not None:
        yield f"    executing {short_name(at['id'])}:{at['seq']} ({at['op']}) for {_age(at['since'], now)}"
    models = sorted(data["models"].items(), key=lambda item: (-item[1].get("waiting", 0), -item[1].get("applied", 0)))
    yield from (_model(name, row, at, now) for name, row in models[:MODELS])
    yield from _more(len(models) - MODELS, "models")
    waiting = [(name, row) for name, row in data["samplers"].items() if row.get("waiting")]
    yield from (_sampler(name, row, now) for name, row in waiting[-SAMPLERS:])
    sessions = sorted(data["sessions"].items(), key=lambda item: -item[1].get("heard", 0))
    for name, row in sessions[:SESSIONS]:
        heard = f"last heard {_age(row.get('heard'), now)} ago"
        yield f"    session   {joined(short_name(name) + _owner(row), heard)}"
    yield from _more(len(sessions) - SESSIONS, "sessions")


def _headline(data: Mapping[str, Any], now: float) -> str:
    counted = [f"{count} {name if count != 1 else name.removesuffix('s')}" for name, count in data["counts"].items()]
    waits = [_waiting(data[key], name, now) for key, name in (("queue", "request"), ("samples", "request for samples"))]
    aside = [f"{data['aside']} aside until their clients are back"] if data["aside"] else []
    again = [f"{data['replays']} to run again"] if data["replays"] else []
    return joined(*(counted or ["no client yet"]), *waits, *aside, *again)


def _waiting(row: Mapping[str, Any], what: str, now: float) -> str:
    count = row.get("waiting")
    if not count:
        return ""
    what = what if count == 1 else what.replace("request", "requests")
    return f"{count} {what} waiting, {row['bytes'] / MIB:.1f} MB, the first for {_age(row['since'], now)}"


def _model(name: str, row: Mapping[str, Any], at: Mapping[str, Any] | None, now: float) -> str:
    busy = at is not None and at["id"] == name
    waits = f"waits {_age(row['since'], now)} for the tuner" if row.get("waiting") and not busy else ""
    done = f"step {row.get('steps', 0)}", f"{short(row.get('tokens', 0))} tokens"
    answered = f"answered {row.get('answered', row.get('applied', 0))} of {row.get('logged', 0)}"
    figures = [f"{key} {row[key]:.4g}" for key in ("loss", "norm") if row.get(key) is not None]
    parked = "parked" if row.get("parked") else ""
    return "    model     " + joined(short_name(name) + _owner(row), *done, *figures, answered, parked, waits)


def _owner(row: Mapping[str, Any]) -> str:
    """The name of the key that it belongs to, unless that is the run's own."""
    return f" of {printable(row['owner'])}" if row.get("owner", RUN) != RUN else ""


def _sampler(name: str, row: Mapping[str, Any], now: float) -> str:
    drawn = f"snapshot {row['weights']}" if row.get("weights") else "the base"
    return "    sampler   " + joined(short_name(name), drawn, _waiting(row, "request", now))


def _more(count: int, what: str) -> Iterator[str]:
    if count > 0:
        yield f"    and {count} more {what}"


def _age(since: float | None, now: float) -> str:
    return duration(max(0.0, now - since)) if since else "?"


def short_name(name: str) -> str:
    """A session, model or sampler by the first letters of its session's name."""
    session, *rest = str(name).split(":")
    return printable(":".join([session[:8], *rest]))
