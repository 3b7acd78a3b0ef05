"""Cost of hosts that only hold tasks: 64 simulated satellites with 1,024 claims each, over TCP with keys.

    python -m benchmarks host-beats [--hosts 64] [--claims 1024] [--seconds 60] [--out FILE]

Bus and keeper are real, with a real ring; a satellite is its two sockets and the messages of one that waits for its
engines. CPU of bus and keeper, in percent of one core, is taken while all satellites are silent (what a ring of that
size costs by itself), while they beat as satellites do (a digest 4 times a second), and while they name all claims
each time, as before there was a digest. `asked` and `open`: requests that were sent, and those that had no answer yet
at the end: where they are many, home had too little of the machine to read all. Nobody generates or trains.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import sides
from benchmarks.common.report import commit, machine
from busrl import curve
from busrl.bus import Endpoint, tcp_pair
from busrl.hosts import messages as g
from busrl.hosts.desk import DIGESTS, HOST, digest_of
from busrl.hosts.satellite import ANSWERS, CLAIM_S, NAME_AFTER, PRESENT_S
from busrl.launcher.rundir import OpenRun, open_run, remove_runtime_dir, unlink_segments
from busrl.preflight.load import load

LIMIT_S, MEMORY_S = 240.0, 2.0
SILENT_S, NAMES_S = 8.0, 15.0  # the first below a lease
SPARE = 1024  # slots that validation would have
SILENT, DIGEST, NAMES = "silent", "digest", "names"


class Beats:
    """Satellite that only beats. `lost`: tasks that home did not renew."""

    def __init__(self, name: str, endpoint: str, client: curve.ClientKeys, claims: int) -> None:
        frontend, backend = tcp_pair(endpoint)
        self.home = Endpoint(name, frontend, backend, subscribe=[f"{kind}/{name}/" for kind in ANSWERS], keys=client)
        self.home.ready(LIMIT_S)
        self.claims, self.life, self.request = claims, time.time_ns() // 1000, 0
        self.held: dict[str, int] = {}
        self.joined, self.lost, self.differed, self.differing, self.answered = False, 0, 0, 0, 0
        self._next_claim = self._next_presence = 0.0

    def turn(self, way: str) -> None:
        for message in self.home.drain():
            self._heard(message)
        now = time.monotonic()
        if way == SILENT:
            return
        if now >= self._next_presence:
            self._next_presence = now + PRESENT_S
            self.home.heartbeat(HOST, f"host, holds {len(self.held)}")
            if way == NAMES:
                self._ask(g.RemoteExtend(life=self.life, holding=list(self.held)))
        if now >= self._next_claim:
            self._next_claim = now + CLAIM_S
            self._claim(way)

    def _claim(self, way: str) -> None:
        if not self.joined:
            self._ask(g.RemoteJoin(life=self.life, role=HOST))
        elif way == NAMES or self.differing >= NAME_AFTER:
            self.differing = 0
            self._ask(g.RemoteClaim(life=self.life, capacity=self.claims, holding=list(self.held)))
        else:
            digest = sum(self.held.values()) % DIGESTS
            self._ask(g.RemoteClaim(life=self.life, capacity=self.claims, digest=digest))

    def _heard(self, message: Any) -> None:
        if isinstance(message, g.GatewayWelcome):
            self.joined = True
        elif isinstance(message, g.GatewayTasks):
            self.held |= {task.task: digest_of(task.task) for task in message.tasks}
            self.differed += message.differs
            self.differing = self.differing + 1 if message.differs else 0
            self.answered = max(self.answered, message.req)
        elif isinstance(message, g.GatewayAnswer):
            self.answered = max(self.answered, message.req)
            self.lost += len(message.lost)

    def _ask(self, message: g.Remote) -> None:
        self.request += 1
        message.req = self.request
        self.home.send(message)


class Home:
    """Bus and keeper of a run whose samples all wait."""

    def __init__(self, folder: Path, hosts: int, claims: int, port: int) -> None:
        self.endpoint, self.names = f"tcp://127.0.0.1:{port}", [f"gpu-{number}" for number in range(hosts)]
        curve.init(folder / "keys")
        for name in self.names:
            curve.add(folder / "keys", name)
        listed = ", ".join(f'"{name}"' for name in self.names)
        topology = load(ROOT / "configs" / "quickstart.toml", [
            f'bus.endpoint="{self.endpoint}"', f'bus.keys="{folder / "keys"}"', f"process.rollout.hosts=[{listed}]",
            f"ring.slots={hosts * claims + SPARE}", f"ring.processes={max(64, 2 * hosts)}", "limits.lease_s=60",
        ])
        self.run: OpenRun = open_run(folder / "home", topology)
        self.run.ring.register("scheduler", "scheduler")
        for uid in range(hosts * claims):
            assert self.run.ring.dispatch(
                uid=uid, group=uid // 8, admission=0, member=uid % 8, group_size=8, cls=0, task=b'{"prompt": "1"}',
                prompt_crc=1, max_new_tokens=64, temperature=1.0, version=0, step=0,
            )
        self.children = {name: self._start(name) for name in ("bus", "keeper")}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "busrl.roles", str(self.run.paths.root), name]
        return sides.started(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})

    def seconds(self) -> dict[str, float]:
        """CPU that each process has used."""
        stats = {name: Path(f"/proc/{child.pid}/stat").read_text() for name, child in self.children.items()}
        ticks = {name: sum(map(int, text.rpartition(")")[2].split()[11:13])) for name, text in stats.items()}
        return {name: count / os.sysconf("SC_CLK_TCK") for name, count in ticks.items()}

    def private_mb(self) -> dict[str, float]:
        """Memory of each process without the ring that it shares."""
        texts = {name: Path(f"/proc/{child.pid}/status").read_text() for name, child in self.children.items()}
        return {name: int(text.partition("RssAnon:")[2].split()[0]) / 1024 for name, text in texts.items()}

    def close(self) -> None:
        for child in self.children.values():
            child.send_signal(signal.SIGTERM)
        for child in self.children.values():
            child.wait(60)
        unlink_segments(self.run.paths.ring_name)
        remove_runtime_dir(self.run.paths)
        self.run.release()


def measured(home: Home, hosts: list[Beats], way: str, seconds: float) -> dict[str, Any]:
    """CPU and memory while all hosts beat in this way."""
    begun, before, memory = time.monotonic(), home.seconds(), [home.private_mb()]
    asked = sum(host.request for host in hosts)
    while (passed := time.monotonic() - begun) < seconds:
        for host in hosts:
            host.turn(way)
        if passed > MEMORY_S * len(memory):
            memory.append(home.private_mb())
        time.sleep(0.005)
    after, passed = home.seconds(), time.monotonic() - begun
    figures = {
        "way": way, "seconds": passed, "load": os.getloadavg()[0], "lost": sum(host.lost for host in hosts),
        "differed": sum(host.differed for host in hosts), "asked": sum(host.request for host in hosts) - asked,
        "open": sum(host.request - host.answered for host in hosts) if way != SILENT else 0,
        "percent": {name: 100 * (after[name] - before[name]) / passed for name in before},
        "private_mb": {name: [round(sample[name], 1) for sample in memory] for name in before},
    }
    print(figures, flush=True)
    return figures


def all_hold(home: Home, hosts: list[Beats], claims: int) -> None:
    """Until every host has its tasks and nothing that was asked for waits at home."""
    end, asked = time.monotonic() + LIMIT_S, dict[str, int]()
    while len(asked) < len(hosts) or any(host.answered < asked[host.home.name] for host in hosts):
        if time.monotonic() > end or any(child.poll() is not None for child in home.children.values()):
            raise RuntimeError(f"hosts hold {sorted(len(host.held) for host in hosts)} of {claims} tasks each")
        for host in hosts:
            host.turn(DIGEST)
            if len(host.held) == claims:
                asked.setdefault(host.home.name, host.request)
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--claims", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--port", type=int, default=5680)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder), options.hosts, options.claims, options.port)
        try:
            files = [curve.client_file(Path(folder) / "keys", name) for name in home.names]
            clients = [curve.load_client(file) for file in files]
            hosts = [Beats(name, home.endpoint, client, options.claims) for name, client in zip(home.names, clients)]
            all_hold(home, hosts, options.claims)
            rows = [measured(home, hosts, DIGEST, 5.0)]
            for way, seconds in ((SILENT, SILENT_S), (DIGEST, options.seconds), (NAMES, NAMES_S)):
                rows.append(measured(home, hosts, way, seconds))
        finally:
            home.close()
    if options.out:
        result = {"machine": machine(), "commit": commit(ROOT), "hosts": options.hosts, "claims": options.claims}
        options.out.write_text(json.dumps({**result, "rows": rows[1:]}, indent=1))
