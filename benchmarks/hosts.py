"""Rollouts on two other hosts beside the same two at home: the quickstart until its reward is there, in turn.

    python -m benchmarks hosts [--rounds 3] [--goal 0.85] [--out FILE]     whole runs, both ways, over loopback
    python -m benchmarks hosts rate [--mb 200] [--rounds 5] [--out FILE]   a version to one host, beside a plain socket
    python -m benchmarks hosts chain [--mb 100] [--rounds 5] [--out FILE]  to one host and to three, links of 200 Mbit/s

Both hosts of the first are processes of this machine, with rings, buses and segments of their own, so that they cost
what further processes cost on the same cores. Seconds are from the first step to the goal: the mean reward of ten
steps in a row; `cpu_us` are microseconds of CPU per generated answer of each process in that time, to be read where
others load the machine. The second copies a segment of so many MB through relay and TCP with keys to a second segment,
and the same bytes through one TCP connection without keys, with the CPU of both sides. The third has the relays alone,
each in a network namespace (as root), with links of that rate there and back: to one host, to three in a chain, to
three from home each, and to three of which one has 20 Mbit/s. Its seconds are from the publication until the last
host (of the fast ones) has the version.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import sides

sys.path.insert(0, str(ROOT / "tests" / "roles"))

from benchmarks.common.report import commit, machine
from benchmarks.common.runs import BenchRun
from busrl import curve
from busrl.errors import RingError
from busrl.paths import RunPaths
from busrl.ring import Ring

NAMES = ("one", "two")
SETTINGS = ("generation.max_batch=128", "validation.at_start=false", "validation.at_end=false", "run.max_steps=150")
MOST_S = 240.0
PIECE = 1 << 20


def whole_run(folder: Path, apart: bool, goal: float, port: int, seed: int) -> dict[str, Any]:
    """Make a run with two rollouts, at home or on two hosts; seconds from its first step to the goal."""
    settings = [*SETTINGS, f"run.seed={seed}"]
    if apart:
        settings += [f'bus.endpoint="tcp://127.0.0.1:{port}"', f'bus.keys="{folder}/keys"',
                     'process.rollout.hosts=["one", "two"]']
        curve.init(folder / "keys")
        for name in NAMES:
            curve.add(folder / "keys", name)
    else:
        settings.append("process.rollout.count=2")
    run = BenchRun(folder / "run", settings)
    hosts = [_host(folder, name, port) for name in NAMES] if apart else []
    places = {"home": run.paths} | {name: RunPaths.of(folder / name) for name in (NAMES if apart else ())}
    try:
        begun, rewards = 0.0, list[float]()
        run.until_step(1)
        begun, before = time.monotonic(), used(places)
        while statistics.fmean((rewards := _rewards(run))[-10:] or [0.0]) < goal or len(rewards) < 10:
            if run.child.poll() is not None or time.monotonic() - begun > MOST_S:
                break
            time.sleep(0.05)
        seconds, cpu = time.monotonic() - begun, per_answer(before, used(places))
    finally:
        for child in (run.child, *hosts):
            child.terminate()
        for child in (run.child, *hosts):
            child.wait(60)
    reached = statistics.fmean(rewards[-10:] or [0.0]) >= goal
    return {"way": "hosts" if apart else "home", "seed": seed, "seconds": seconds, "steps": len(rewards),
            "reached": reached, "load": os.getloadavg()[0], "cpu_us": cpu}


def used(places: dict[str, RunPaths]) -> dict[str, tuple[float, int]]:
    """Seconds of CPU of every process, and the answers that it generated."""
    seconds = {}
    for place, paths in places.items():
        try:
            ring = Ring.attach(paths.ring_name, read_only=True)
        except (RingError, OSError):
            continue
        for process in ring.processes():
            if not process.remote and not ring.is_dead(process.index):
                times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                answers = process.samples if process.role == "rollout" else 0
                seconds[f"{place}:{process.label}"] = (sum(map(int, times)) / os.sysconf("SC_CLK_TCK"), answers)
        ring.close()
    return seconds


def per_answer(before: dict[str, tuple[float, int]], after: dict[str, tuple[float, int]]) -> dict[str, int]:
    """Microseconds of CPU per generated answer: of each process, and of all that neither generate nor train."""
    spent = {name: after[name][0] - before[name][0] for name in before.keys() & after.keys()}
    answers = sum(count for _, count in after.values()) - sum(count for _, count in before.values())
    each = {name: round(1e6 * spent[name] / max(1, answers)) for name in sorted(spent)}
    others = sum(us for name, us in each.items() if not name.partition(":")[2].startswith(("rollout", "learner")))
    return {**each, "all but rollouts and learner": others, "answers": answers}


def _host(folder: Path, name: str, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "busrl.cli", "host", f"tcp://127.0.0.1:{port}", "--keys",
               str(curve.client_file(folder / "keys", name)), "--scratch", str(folder / name)]
    return sides.started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
                            env={**os.environ, "PYTHONPATH": str(ROOT)})


def _rewards(run: BenchRun) -> list[float]:
    try:
        rows = [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return [row["reward"] for row in rows if "kind" not in row]


# -- the rate of weights -----


def rate(megabytes: int, rounds: int, port: int) -> list[dict[str, Any]]:
    """Seconds of a version through the relay's way, and of the same bytes through a plain socket."""
    import torch

    from busrl.bus.broker import CurveListener
    from busrl.hosts.link import Answering, Asking
    from busrl.hosts.versions import SegmentCopy, Snapshot
    from busrl.weights.shm import ShmSender

    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, tempfile.TemporaryDirectory() as folder:
        curve.init(Path(folder) / "keys")
        curve.add(Path(folder) / "keys", "one")
        client = curve.load_client(curve.client_file(Path(folder) / "keys", "one"))
        sender = ShmSender(Path(shm) / "home")
        listener = CurveListener(f"tcp://127.0.0.1:{port}", Path(folder) / "keys", (f"tcp://127.0.0.1:{port}",))
        home, source = Answering(listener), Snapshot(Path(shm) / "home", PIECE)
        away, copy = Asking(f"tcp://127.0.0.1:{port}", client, "one"), SegmentCopy(Path(shm) / "away")
        stop = threading.Event()
        serving = threading.Thread(target=_serve, args=(home, source, stop))
        serving.start()
        weights = {"w": torch.zeros(megabytes << 18)}
        for version in range(1, rounds + 1):
            sender.publish(version, version, weights)
            taken = source.take()
            plain_s, plain_cpu_s = _timed(lambda: _plain(megabytes << 20))
            relay_s, relay_cpu_s = _timed(partial(_fetch, away, taken, copy))
            rows.append({"relay_s": relay_s, "plain_s": plain_s, "relay_cpu_s": relay_cpu_s,
                          "plain_cpu_s": plain_cpu_s, "mb": megabytes})
        stop.set()
        serving.join()
        for part in (away, home, copy, source, sender):
            part.close()
    return rows


def _timed(do: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and those of processors, of both sides."""
    begun, busy = time.monotonic(), time.process_time()
    do()
    return time.monotonic() - begun, time.process_time() - busy


def _serve(home: Any, source: Any, stop: threading.Event) -> None:
    from busrl.hosts import questions as q

    while not stop.is_set():
        for asked in home.waiting(0.05):
            question = asked.question
            home.answer(asked, q.Piece(version=question.version, at=question.at),
                        source.piece(question.digest, question.at, question.size))


def _fetch(away: Any, taken: Any, copy: Any) -> None:
    from busrl.hosts import questions as q
    from busrl.hosts.link import wait
    from busrl.hosts.relay import Fetch
    from busrl.hosts.versions import Pieces, Sources

    class Links:
        def to(self, peer: object) -> Any:
            return away

    pieces = Pieces(len(taken.data), PIECE, taken.digests)
    copy.begin(taken.version, taken.step, taken.checksum, taken.manifest, taken.digest, pieces)
    fetch = Fetch(Links(), pieces, 0.0)  # type: ignore[arg-type]
    head = q.Version(version=taken.version, nbytes=len(taken.data), piece=PIECE, digest=taken.digest)
    fetch.begin(head, Sources([], 0.0, 60.0, time.monotonic()))
    while fetch.pieces.left:
        assert not fetch.advance(copy, time.monotonic())
        wait(1.0, [away])
    copy.done()


def _plain(nbytes: int) -> None:
    """The same bytes through one connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        data = bytes(4 << 20)

        def send() -> None:
            with socket.create_connection(server.getsockname()) as out:
                for _ in range(nbytes // len(data)):
                    out.sendall(data)

        thread = threading.Thread(target=send)
        thread.start()
        taken, _ = server.accept()
        buffer, got = bytearray(4 << 20), 0
        with taken:
            while got < nbytes:
                got += taken.recv_into(buffer)
        thread.join()


# -- from host to host -----


def chain(megabytes: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of versions in each way; the first version of each, before which nobody knows a rate, is left out."""
    rows = []
    three, slow = ("a", "b", "c"), ("a", "b", "slow")
    for way, names, settings in (
        ("one", ("a",), []), ("chain", three, []), ("from home", three, ["hosts.chain=false"]), ("slow", slow, []),
    ):
        rows += _versions(way, names, settings, megabytes, rounds)
    return rows


def _versions(
    way: str, names: tuple[str, ...], settings: list[str], megabytes: int, rounds: int
) -> list[dict[str, Any]]:
    from relay_scene import Net, Relays

    rows, timed = [], [name for name in names if name != "slow"]
    with (
        tempfile.TemporaryDirectory() as folder, Net(names) as net,
        Relays(Path(folder), names, megabytes, *settings, address=net.home, before=net.before) as relays,
    ):
        net.limit("200mbit")
        if "slow" in names:
            net.limit("20mbit", "slow")
        for version in range(1, rounds + 2):
            begun, sent, whole = time.monotonic(), net.sent(), dict[str, float]()
            relays.publish(version)
            while len(whole) < len(timed) and time.monotonic() - begun < MOST_S:
                whole |= {name: time.monotonic() - begun for name in timed
                          if name not in whole and relays.newest(name) >= version}
                time.sleep(0.005)
            if version == 1:
                relays.until_all_have(1)
                continue
            rows.append({"way": way, "version": version, "seconds": max(whole.values()), "hosts": whole,
                         "sent_mb": (net.sent() - sent) / 1e6, "mb": megabytes, "load": os.getloadavg()[0],
                         "slow_has": relays.newest("slow") if "slow" in names else None})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=("runs", "rate", "chain"), default="runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--goal", type=float, default=0.85)
    parser.add_argument("--mb", type=int, default=0)
    parser.add_argument("--port", type=int, default=5640)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "rate":
        rows = rate(options.mb or 200, options.rounds, options.port)
        figures = {name: statistics.median(row[name] for row in rows) for name in ("relay_s", "plain_s")}
        for unit in ("s", "cpu_s"):
            figures[f"ratio_{unit}"] = statistics.median(row[f"relay_{unit}"] / row[f"plain_{unit}"] for row in rows)
    elif options.what == "chain":
        rows = chain(options.mb or 100, options.rounds)
        ways = {row["way"]: [other["seconds"] for other in rows if other["way"] == row["way"]] for row in rows}
        figures = {way: statistics.median(seconds) for way, seconds in ways.items()}
        figures |= {f"{way} / {base}": figures[way] / figures[base]
                 for way, base in (("chain", "one"), ("from home", "one"), ("slow", "chain"))}
    else:
        rows = []
        for number in range(options.rounds):
            for apart in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(whole_run(Path(folder), apart, options.goal, options.port + 10 * number, number))
                print(rows[-1], flush=True)
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
        figures = {"ratio": statistics.median(apart["seconds"] / home["seconds"] for home, apart in pairs)}
    print(json.dumps(figures))
    if options.out:
        result = {"machine": machine(), "commit": commit(ROOT), "rows": rows, **figures}
        options.out.write_text(json.dumps(result, indent=1))
