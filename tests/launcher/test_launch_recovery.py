"""What `launch` itself does about a death: slots at rest without a keeper, early readiness, and processes of others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from busrl.launcher.supervisor import Child, ForeignProcesses, is_titled
from busrl.paths import RunPaths
from busrl.ring import Fates, Ring, State
from busrl.topology.schema import Limits

PATIENCE = Limits(ready_s=60.0, progress_s=30.0, restart_attempts=5, crash_attempts=0)
ENDLESS = 1e9  # what the ring makes of infinity


@dataclass
class Entry:
    """A row of the process table."""

    pid: int
    label: str = "keeper"
    index: int = 4
    progress: int = 1
    activity: str = ""
    deadline_s: float = 0.0
    remote: bool = False


def test_slots_of_a_killed_child_return_to_rest_without_a_keeper(scripted):
    scripted.start({"rollout/0": "holds", "learner": "learner"})
    pid = scripted.life("rollout/0")
    ring = Ring.attach(RunPaths.of(scripted.root).ring_name)
    ring.register("scheduler", "test")
    ring.bind_fates(Fates(str(scripted.paths.fates)), None)
    [dispatched] = ring.dispatch(
        uid=3, group=0, admission=0, member=3, group_size=8, cls=0, task=b"{}", prompt_crc=0, max_new_tokens=4,
        temperature=1.0,
    )
    scripted.until(lambda: (scripted.root / "seen" / "holding").exists(), "the slot to be held")
    assert ring.line(dispatched[0])["state"] == State.GENERATING
    os.kill(pid, signal.SIGKILL)
    scripted.said(f"1 slots of rollout/0 (pid {pid}) went back from GENERATING to QUEUED")
    assert ring.line(dispatched[0])["state"] == State.QUEUED
    ring.close()
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


def test_a_child_ready_for_less_than_one_look_restarts_without_a_pause(scripted):
    scripted.start({"rollout/0": "dies_when_ready", "learner": "learner"}, restart_attempts=2)
    scripted.ready("rollout/0", 5)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "starting it again in" not in scripted.log() and "giving up" not in scripted.log()


def test_a_declared_endless_wait_never_counts_as_silence():
    child = Child("keeper", PATIENCE)
    child.started(1, 0.0)
    waiting = Entry(1, progress=0, activity="waits for pid 7", deadline_s=ENDLESS)
    assert not any(child.looked(waiting, 10.0) for _ in range(1000))
    assert not child.looked(Entry(1, progress=0, activity="starting"), 59.0)
    kill = child.looked(Entry(1, progress=0, activity="starting"), 2.0)
    assert "not ready for 61.0 s" in kill


def looks(
    strangers: ForeignProcesses, seconds: int, *entries: Entry, ours: tuple[int, ...] = ()
) -> list[tuple[int, str]]:
    return [stranger for _ in range(seconds) for stranger in strangers.look(entries, ours, 1.0)]  # type: ignore[arg-type]


def titled(name: str) -> subprocess.Popen[bytes]:
    """A process that shows itself as one of a run."""
    code = f"import setproctitle; setproctitle.setproctitle('busrl:{name}'); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    return child


def test_an_untitled_or_progressing_stranger_in_our_place_is_spared():
    child = titled("keeper")
    try:
        strangers = ForeignProcesses(["keeper"], PATIENCE)
        assert looks(strangers, 100, Entry(child.pid), ours=(child.pid,)) == []
        assert looks(strangers, 100, Entry(child.pid, label="rollout/0")) == []
        assert looks(strangers, 100, Entry(child.pid, deadline_s=ENDLESS)) == []
        moving = [strangers.look([Entry(child.pid, progress=n)], (), 1.0) for n in range(100)]  # type: ignore[list-item]
        assert not any(moving)
        assert looks(strangers, 29, Entry(child.pid, progress=99)) == []
        ((pid, why),) = looks(strangers, 3, Entry(child.pid, progress=99))
        assert pid == child.pid and "killing keeper" in why and "this launch did not start it" in why
        assert is_titled(child.pid, "keeper") and not is_titled(child.pid, "scheduler")
        assert looks(ForeignProcesses(["scheduler"], PATIENCE), 50, Entry(child.pid, label="scheduler")) == []
    finally:
        child.kill()
        child.wait()


def test_a_departed_stranger_is_forgotten_and_the_next_one_starts_afresh():
    strangers = ForeignProcesses(["keeper"], PATIENCE)
    looks(strangers, 29, Entry(os.getpid()))
    looks(strangers, 1)
    assert looks(strangers, 30, Entry(os.getpid())) == []
