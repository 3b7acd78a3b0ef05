"""A storm of SIGKILLs over a run whose every port is held by strangers, whose environment names a proxy, and whose
bound on age changes at each start: programs as agents, servers with clients, engines, keeper, learner and launch.

Who is killed and how long it is calm before follow from the seed, not when exactly. BUSRL_STORM_KILLS sets how many in
all; they are dealt out over as many starts as there are bounds, and launch is killed between two of them.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, running
from test_agent_storm import clients, next_victim
from test_agents_in_a_run import AGENTS

KILLS = int(os.environ.get("BUSRL_STORM_KILLS", "60"))
STEPS, LIMIT_S = 3 * KILLS, max(1500.0, 60.0 * KILLS)
BOUNDS = (
    ("weights.mode=batch-async", "weights.max_staleness=4"), ("weights.mode=sync",),
    ("weights.mode=batch-async", "weights.max_staleness=1"), ("weights.mode=fully-async",),
    ("weights.mode=sync",), ("weights.mode=batch-async", "weights.max_staleness=2"),
)  # fmt: skip
VICTIMS = [
    "agent/0", "agent/1", "child", "serve/0", "serve/1", "rollout/0", "rollout/1", "keeper", "learner", "scheduler",
]
SETTINGS = (
    "process.agent.count=2", "process.rollout.count=2", "agents.episodes=8", "groups.size=4",
    "validation.data=", "learner.checkpoint_every=10", "limits.crash_attempts=0",
)  # fmt: skip
STRANGERS = 200  # silent connections to each port
GARBAGE = (
    b"", b"\0" * 512, b"GET / HTTP/1.1\r\n",
    b"POST /busrl/v1/episodes HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n{",
)
PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
LISTENING = "0A"


def ports_of(run: Run) -> set[int]:
    """Ports on which a process of the run listens, by the kernel's own tables."""
    inodes = set()
    for process in run.processes().values():
        with suppress(OSError):
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENING and row[9] in inodes}


class Strangers(threading.Thread):
    """Keeps silent or babbling connections to every port of a run open, until it is told to end."""

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.over, self.opened = run, threading.Event(), 0
        self.here: dict[int, list[socket.socket]] = {}

    def run(self) -> None:
        while not self.over.wait(0.5):
            ports = ports_of(self.run_dir)
            for gone in set(self.here) - ports:
                self.leave(gone)
            for port in ports:
                self.come(port)
        for port in list(self.here):
            self.leave(port)

    def come(self, port: int) -> None:
        """Fill up to STRANGERS connections; those that were cut off are replaced."""
        kept = [connection for connection in self.here.get(port, ()) if not cut_off(connection)]
        for number in range(len(kept), STRANGERS):
            with suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), timeout=1.0)
                connection.sendall(GARBAGE[number % len(GARBAGE)])
                kept.append(connection)
                self.opened += 1
        self.here[port] = kept

    def leave(self, port: int) -> None:
        for connection in self.here.pop(port):
            connection.close()


def cut_off(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def strangers(run: Run) -> Iterator[Strangers]:
    thread = Strangers(run)
    thread.start()
    try:
        yield thread
    finally:
        thread.over.set()
        thread.join(60)


@contextmanager
def proxy() -> Iterator[tuple[str, list[str]]]:
    """A proxy that serves nobody: its address, and from where it was asked."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def refuse() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(5)
                        with suppress(OSError):
                            asked.append(connection.recv(200).decode(errors="replace"))
        threading.Thread(target=refuse, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        listener.shutdown(socket.SHUT_RDWR)


def blow(run: Run, chance: random.Random, kills: int) -> int:
    """Kill so many processes that are ready, launch itself not counted; how many of them were programs of episodes,
    whose samples are dropped then (docs/serve.md)."""
    programs = 0
    for _ in range(kills - 1):
        name, pids = next_victim(run, chance, VICTIMS)
        for pid in pids[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                programs += name == "child"
    return programs


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_storm_among_strangers_with_changing_bounds_ends_clean(tmp_path: Path, quickstart: None) -> None:
    config = tmp_path / "hostile.toml"
    text = AGENTS.read_text().replace(
        'function = "two_tries.py:episode"',
        f'program = ["{sys.executable}", "{ROOT}/examples/agents/sort_program.py"]',  # no shim of a shell: many start
    )
    config.write_text(text + '\n[[process]]\nrole = "serve"\ncount = 2\n')
    chance, programs = random.Random(32), 0
    with proxy() as (address, asked):
        run = Run(tmp_path / "storm", *SETTINGS, config=config, steps=STEPS, env=dict.fromkeys(PROXIES, address))
        settings = run.settings
        run.settings = [*settings, *BOUNDS[0]]
        with running(run), strangers(run) as outside, clients(run):
            for bound in BOUNDS[1:]:
                before = run.step()
                programs += blow(run, chance, KILLS // len(BOUNDS))
                run.until_step(before + 2)  # each bound is in force for some steps
                run.kill_launch(30.0)
                run.settings = [*settings, *bound]
                run.start()
            programs += blow(run, chance, KILLS // len(BOUNDS))
            assert run.step() < STEPS, "the run was too short for the storm"
            code = run.wait(LIMIT_S)
    check_end(run, code, accidents=programs)
    assert outside.opened > STRANGERS, "nobody was at the doors"
    assert not asked, f"the proxy was asked for addresses of the run: {asked[:3]}"
