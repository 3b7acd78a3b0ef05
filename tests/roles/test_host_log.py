"""What home is told of its hosts: their errors, and when they came and went."""

from __future__ import annotations

import json
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from busrl.hosts.membership import Roster, write_lines
from busrl.hosts.satellite import HostErrors
from busrl.ledger.errors import record_error
from busrl.paths import RunPaths
from busrl.protocol import messages as m

SILENT_S = 10.0


def events(log: Roster, **seen: tuple[int, float, int]) -> list[str]:
    return [f"{line['host']} {line['event']}" for line in log.changes(seen)]


def test_each_change_of_a_host_is_one_line() -> None:
    log = Roster(["a", "b"])
    assert events(log, a=(1, 0.0, 0), stranger=(1, 0.0, 0)) == ["a joined"]
    assert events(log, a=(1, 0.1, 3)) == []
    assert events(log, a=(1, SILENT_S, 3), b=(1, 0.0, 0)) == ["a silent", "b joined"]
    assert events(log, a=(1, 2 * SILENT_S, 3), b=(1, 0.0, 0)) == []
    assert events(log, a=(1, 0.0, 3), b=(2, 0.0, 0)) == ["a back", "b replaced"]
    assert events(log, a=(1, 0.0, 3)) == ["b gone"]
    assert events(log) == ["a gone"]
    assert events(log) == []


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 3), st.sampled_from([0.0, SILENT_S]))), max_size=20))
def test_lines_of_joining_and_going_alternate(looks: list[tuple[int, float] | None]) -> None:
    log, told = Roster(["a"]), list[str]()
    for look in looks:
        told += events(log, **({} if look is None else {"a": (*look, 0)}))
    doors = [event for event in told if event in ("a joined", "a gone")]
    assert doors == ["a joined", "a gone"] * (len(doors) // 2) + ["a joined"] * (len(doors) % 2)
    assert (len(doors) % 2 == 1) == (bool(looks) and looks[-1] is not None)


def test_news_of_hosts_are_lines_of_a_file(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    write_lines(paths, Roster(["a"]).changes({"a": (7, 0.0, 0)}))
    [line] = paths.hosts.read_text().splitlines()
    assert json.loads(line) | {"time": 0} == {"time": 0, "host": "a", "event": "joined", "life": 7, "holds": 0}


def test_new_errors_of_a_host_become_messages_once(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    old = {"time": time.time() - 3600, "process": "relay", "severity": "error", "where": "x", "text": "long ago"}
    paths.errors.write_text(f"{json.dumps(old)}\nno line of ours\n")
    errors = HostErrors(paths)
    record_error(paths, "rollout/0", "error", "rollout", "it is broken", "a trace")
    [error] = errors.new()
    assert (error.severity, error.where, error.text, error.traceback) == (
        "error", "rollout/0", "it is broken", "a trace",
    )
    assert list(errors.new()) == []
    record_error(paths, "bus", "no severity " * 20, "x", "y" * (2 * m.MAX_TEXT))
    assert len(list(errors.new())) == 1
