"""Rollouts on two other hosts beside the same two at home: the quickstart until its reward is there, in turn.

    hosts.py [--rounds 3] [--goal 0.85] [--out FILE]     whole runs, both ways on this machine over loopback
    hosts.py rate [--mb 200] [--rounds 5] [--out FILE]   a version of weights to one host, beside a plain socket

Both hosts of the first are processes of this machine, with rings, buses and segments of their own, so that they cost
what further processes cost on the same cores. Seconds are from the first step to the goal: the mean reward of ten
steps in a row; `cpu_us` are microseconds of CPU per generated answer of each process in that time, to be read where
others load the machine. The second copies a segment of so many MB through relay and TCP with keys to a second segment,
and the same bytes through one TCP connection without keys.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from report import commit, machine  # noqa: E402
from runs import BenchRun  # noqa: E402

from busrl import keys  # noqa: E402
from busrl.errors import RingError  # noqa: E402
from busrl.paths import RunPaths  # noqa: E402
from busrl.ring import Ring  # noqa: E402

NAMES = ("one", "two")
SETTINGS = ("generation.max_batch=128", "validation.at_start=false", "validation.at_end=false", "run.max_steps=150")
MOST_S = 240.0


def whole_run(folder: Path, apart: bool, goal: float, port: int, seed: int) -> dict[str, Any]:
    """One run with two rollouts, at home or on two hosts; seconds from its first step to the goal."""
    settings = [*SETTINGS, f"run.seed={seed}"]
    if apart:
        settings += [f'bus.endpoint="tcp://127.0.0.1:{port}"', f'bus.keys="{folder}/keys"',
                     'process.rollout.hosts=["one", "two"]']
        keys.init(folder / "keys")
        for name in NAMES:
            keys.add(folder / "keys", name)
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
    found = {}
    for place, paths in places.items():
        try:
            ring = Ring.attach(paths.ring_name, read_only=True)
        except (RingError, OSError):
            continue
        for one in ring.processes():
            if not one.remote and not ring.is_dead(one.index):
                times = Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                answers = one.samples if one.role == "rollout" else 0
                found[f"{place}:{one.label}"] = (sum(map(int, times)) / os.sysconf("SC_CLK_TCK"), answers)
        ring.close()
    return found


def per_answer(before: dict[str, tuple[float, int]], after: dict[str, tuple[float, int]]) -> dict[str, int]:
    """Microseconds of CPU per generated answer: of each process, and of all that neither generate nor train."""
    spent = {name: after[name][0] - before[name][0] for name in before.keys() & after.keys()}
    answers = sum(count for _, count in after.values()) - sum(count for _, count in before.values())
    each = {name: round(1e6 * spent[name] / max(1, answers)) for name in sorted(spent)}
    others = sum(us for name, us in each.items() if not name.partition(":")[2].startswith(("rollout", "learner")))
    return {**each, "all but rollouts and learner": others, "answers": answers}


def _host(folder: Path, name: str, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "busrl.cli", "host", f"tcp://127.0.0.1:{port}", "--keys",
               str(keys.client_file(folder / "keys", name)), "--scratch", str(folder / name)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
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
    from busrl.bus.link import Answering, Asking
    from busrl.weights.relay import SegmentCopy, Snapshot
    from busrl.weights.shm import ShmSender

    found = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, tempfile.TemporaryDirectory() as folder:
        keys.init(Path(folder) / "keys")
        keys.add(Path(folder) / "keys", "one")
        client = keys.load_client(keys.client_file(Path(folder) / "keys", "one"))
        sender = ShmSender(Path(shm) / "home")
        listener = CurveListener(f"tcp://127.0.0.1:{port}", Path(folder) / "keys", (f"tcp://127.0.0.1:{port}",))
        home, source = Answering(listener), Snapshot(Path(shm) / "home")
        away, copy = Asking(f"tcp://127.0.0.1:{port}", client, "one"), SegmentCopy(Path(shm) / "away")
        stop = threading.Event()
        serving = threading.Thread(target=_serve, args=(home, source, stop))
        serving.start()
        weights = {"w": torch.zeros(megabytes << 18)}
        for version in range(1, rounds + 1):
            sender.publish(version, version, weights)
            source.take()
            plain = _timed(lambda: _plain(megabytes << 20))
            found.append({"relay_s": _timed(lambda: _fetch(away, source, copy)), "plain_s": plain, "mb": megabytes})
        stop.set()
        serving.join()
        for one in (away, home, copy, source, sender):
            one.close()
    return found


def _timed(do: Callable[[], None]) -> float:
    begun = time.monotonic()
    do()
    return time.monotonic() - begun


def _serve(home: Any, source: Any, stop: threading.Event) -> None:
    from busrl.protocol import hosts as h

    while not stop.is_set():
        for asked in home.waiting(0.05):
            question = asked.question
            home.answer(asked, h.Piece(version=question.version, at=question.at),
                        source.piece(question.version, question.at, question.size))


def _fetch(away: Any, source: Any, copy: Any) -> None:
    from busrl.roles.relay import fetch_pieces

    taken = source.taken
    copy.begin(taken.version, taken.step, taken.checksum, taken.manifest)
    assert fetch_pieces(away, copy, taken.version, len(taken.data), 4 << 20, 60.0, lambda reply: None)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=("runs", "rate"), default="runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--goal", type=float, default=0.85)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--port", type=int, default=5640)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "rate":
        rows = rate(options.mb, options.rounds, options.port)
        said = {name: statistics.median(row[name] for row in rows) for name in ("relay_s", "plain_s")}
        said["ratio"] = statistics.median(row["relay_s"] / row["plain_s"] for row in rows)
    else:
        rows = []
        for number in range(options.rounds):
            for apart in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(whole_run(Path(folder), apart, options.goal, options.port + 10 * number, number))
                print(rows[-1], flush=True)
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
        said = {"ratio": statistics.median(two["seconds"] / one["seconds"] for one, two in pairs)}
    print(json.dumps(said))
    if options.out:
        made = {"machine": machine(), "commit": commit(ROOT), "rows": rows, **said}
        options.out.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
