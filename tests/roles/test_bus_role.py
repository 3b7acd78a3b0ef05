"""The process `bus`: one per run, and its reports of who was turned away."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from busrl.bus import Refusal
from busrl.errors import BrokerRunning
from busrl.ring import OfdLock
from busrl.roles.bus import Refusals, wait_for_lock


def test_a_second_broker_of_a_run_names_the_first_when_it_does_not_end(tmp_path: Path) -> None:
    holder = OfdLock(str(tmp_path / "bus.lock"))
    holder.acquire(1.0)
    with pytest.raises(BrokerRunning, match=rf"bus\.lock: another broker serves this run \(pid {os.getpid()}\)"):
        wait_for_lock(OfdLock(str(tmp_path / "bus.lock")), threading.Event(), 0.1)
    holder.release()
    assert wait_for_lock(OfdLock(str(tmp_path / "bus.lock")), threading.Event(), 0.1)


def test_a_stop_ends_the_wait_for_the_lock(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert not wait_for_lock(OfdLock(str(tmp_path / "bus.lock")), stop, 10.0)


def test_refusals_of_one_address_are_one_line_with_all_of_them_counted(tmp_path: Path) -> None:
    errors = tmp_path / "errors.jsonl"
    refusals = Refusals(SimpleNamespace(paths=SimpleNamespace(errors=errors)))  # type: ignore[arg-type]
    for number in range(200):
        refusals.add(Refusal("10.0.0.9", f"key{number}", 2))
    refusals.add(Refusal("10.0.0.10", "other", 1))
    refusals.tell()
    first, second = errors.read_text().splitlines()
    assert "10.0.0.9 2 times: key key0" in first and "(2 refused in all)" in first
    assert "10.0.0.10: key other" in second and "(401 refused in all)" in second
