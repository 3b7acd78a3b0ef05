"""What arrives on the bus and is no good: a role hears it, says who it was, keeps little of it, and goes on."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from role_parts import parts

from busrl.errors import RUN_FAILED, CannotTrain, PeerLost, process_code
from busrl.hosts.gateway import NamedLines
from busrl.protocol import messages as m
from busrl.ring import Fates
from busrl.roles import bus as bus_role
from busrl.roles.keeper import Keeper
from busrl.roles.scheduler import Scheduler, require_fates
from busrl.scheduling.admission import Rows
from busrl.topology.sizes import MOST_SAMPLES
from tools.reference.catalog import ROUTES

MOST = 8
SLOTS = 256


class Heard:
    """Stands in for what a role writes to: keeps the lines that it would tell."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, where: str, text: str, severity: str = "warning", kind: str = "", uids: Any = ()) -> None:
        self.lines.append((kind, text))


@pytest.fixture
def scheduler(tmp_path: Path) -> Any:
    """A scheduler that was never attached to a run."""
    ring, fates = SimpleNamespace(n_slots=SLOTS, header=lambda name: 0), SimpleNamespace(capacity=1 << 20)
    role: Any = Scheduler(tmp_path, "scheduler", parts(ring=ring, fates=fates))
    role.rows, role.warn = Rows(64, 10.0, most=MOST), Heard()
    role.told = []
    role.policy = SimpleNamespace(feedback=role.told.append)
    role.trained = 0
    return role


@pytest.mark.parametrize("name", ["two words", "", "a/b", "ärger", "x\n", "\x00"])
def test_a_worker_whose_name_fits_no_topic_is_named_and_not_rung(scheduler, name):
    scheduler.receive(m.TaskRequest(worker_id=name, capacity=4, rows=4, sender="stranger"))
    assert scheduler.rows.workers(0.0) == []
    assert [kind for kind, _ in scheduler.warn.lines] == ["TASK_REQUEST"] and "'stranger'" in scheduler.warn.lines[0][1]


def test_ever_new_workers_are_remembered_up_to_a_bound(scheduler):
    for number in range(1000):
        scheduler.receive(m.TaskRequest(worker_id=f"worker-{number}-of-many", sender=f"worker-{number}"))
    assert len(scheduler.rows.workers(time.monotonic())) == MOST
    assert {kind for kind, _ in scheduler.warn.lines} == {"TASK_REQUEST"}


def test_a_worker_has_no_more_rows_than_there_are_slots(scheduler):
    scheduler.receive(m.TaskRequest(worker_id="w", capacity=2**63, rows=2**64 - 1, sender="w"))
    assert scheduler.rows.total(0) == SLOTS


def test_the_learners_state_counts_from_the_learner_alone_and_as_numbers(scheduler):
    scheduler.receive(m.LearnerStateUpdate(step=5, metrics={"groups_total": 1e18}, sender="stranger"))
    scheduler.receive(m.LearnerStateUpdate(step=5, entropy=float("nan"), sender="learner"))
    assert scheduler.told == [] and scheduler.trained == 0 and "'stranger'" in scheduler.warn.lines[0][1]
    scheduler.receive(m.LearnerStateUpdate(step=5, metrics={"groups_total": 7.0}, sender="learner"))
    assert len(scheduler.told) == 1 and scheduler.trained == 7
    scheduler.receive(m.LearnerStateUpdate(step=6, metrics={"groups_total": float("nan")}, sender="learner"))
    assert scheduler.trained == 7


@pytest.mark.parametrize(("state", "sender", "ends"), [(0, "launch", False), (2, "launch", True), (1, "other", False)])
def test_a_stop_counts_from_launch_once_the_ring_says_so(tmp_path, state, sender, ends):
    keeper: Any = Keeper(tmp_path, "keeper", parts(ring=SimpleNamespace(header=lambda name: state)))
    keeper.warn = Heard()
    keeper.receive(m.Stop(reason="enough", sender=sender))
    assert bool(keeper.stopping) == ends and len(keeper.warn.lines) == int(not ends)


def test_the_page_and_the_roles_agree_on_what_only_one_process_sends():
    assert all(ROUTES[kind].sent_by == sender for kind, sender in m.ONLY_FROM.items())


def test_refusals_of_ever_new_names_are_few_kinds_of_lines():
    lines = NamedLines(16)
    kinds = {lines.name(f"worker-{number}") for number in range(10_000)}
    assert len(kinds) == 17 and lines.name("worker-0") == "worker-0"


def test_a_full_table_of_fates_ends_the_run_with_the_remedy(scheduler):
    fates, path = scheduler.fates, scheduler.paths.fates
    require_fates(fates, path, 1 << 20, 8)
    with pytest.raises(CannotTrain, match=r"/fates.bin is full.*65536 prompts.*new run directory") as raised:
        require_fates(fates, path, (1 << 20) + 1, 8)
    assert process_code(raised.value) == RUN_FAILED


def test_the_table_of_fates_has_room_for_what_check_and_watch_assume(tmp_path):
    fates = Fates(str(tmp_path / "fates.bin"), create=True)
    assert fates.capacity == MOST_SAMPLES >= 1 << 32
    fates.reserve(1)
    assert len(fates) < 1 << 20 and (tmp_path / "fates.bin").stat().st_size < 1 << 20
    fates.close()


def test_the_bus_drops_queues_of_idle_readers_and_names_them(monkeypatch):
    monkeypatch.setattr(bus_role.time, "monotonic_ns", lambda: 20_000_000_000)
    entry = SimpleNamespace(remote=False, role="keeper", label="keeper", progress_ns=8_000_000_000)
    other = SimpleNamespace(remote=False, role="learner", label="learner", progress_ns=19_900_000_000)
    ring: Any = SimpleNamespace(processes=lambda: [entry, other])
    bus_role.check_queues(ring, bus_role.MOST_QUEUED_MIB)
    with pytest.raises(PeerLost, match=r"900 MiB.*keeper has not moved for 12 s\)"):
        bus_role.check_queues(ring, 900.0)
    assert 1 < bus_role.resident_mib() < 100_000
