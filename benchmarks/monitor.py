"""Cost of watching: the quickstart with and without monitor, page and recorder, and the broker's tap by itself.

    python -m benchmarks monitor --pairs 5
    python -m benchmarks monitor --pairs 0        only the tap
    python -m benchmarks monitor --crowd 20       a screen of 64 senders, 10,000 messages a second
    python -m benchmarks monitor --windows 12     one run, its watchers stopped (SIGSTOP) every other 15 seconds
    python -m benchmarks monitor --shares 60      what each process of a watched run takes of a core, and what idles
    python -m benchmarks monitor --first 10       how long the first picture takes, beside a run that trains

Runs are taken in turn, so that a slow hour of the machine hits both kinds. A pair is two runs of the same seed. The
throughput is samples that ended (and tokens drawn) over the time from the first step to the last one. The live view is
drawn on a pseudo-terminal of 120 by 40. Results: benchmarks/results/monitor.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq

from benchmarks import RESULTS, ROOT
from benchmarks.common import report, sides
from busrl.ledger.trained import step_lines

TOPOLOGY = ROOT / "configs" / "quickstart.toml"
SERVE = """
import signal, sys
from busrl.bus.broker import run_broker, StopRequest
from busrl.ring import OfdLock
d, tap, stop = sys.argv[1], sys.argv[2], StopRequest()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
run_broker(f"ipc://{d}/f", f"ipc://{d}/b", OfdLock(f"{d}/lock"), stop, tap=tap, on_ready=lambda: print(flush=True))
"""
LISTEN = """
import sys, zmq
s = zmq.Context().socket(zmq.SUB)
s.setsockopt(zmq.RCVHWM, 4096)
s.setsockopt(zmq.SUBSCRIBE, b"")
s.connect(sys.argv[1])
s.recv_multipart()
print(flush=True)
while True:
    s.recv_multipart()
"""
SEND = """
import sys, time
from busrl.bus import Endpoint
from busrl.protocol import messages as m
folder, senders, rate = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
names = [f"rollout/{n}" for n in range(senders)]
ends = [Endpoint(name, f"ipc://{folder}/f", f"ipc://{folder}/b", hwm=0) for name in names]
sent, begun, beat, print_at = 0, time.monotonic(), 0.0, time.monotonic() + 1
while True:
    now = time.monotonic()
    if now >= beat:
        beat = now + 1
        for end in ends:
            end.send(m.Heartbeat(role="rollout", activity="generating"))
    while sent < (now - begun) * rate:
        ends[sent % senders].send(m.DataGenerated(slot_id=sent % 512, seq=sent, uid=sent, version=sent >> 16))
        sent += 1
    if now >= print_at:
        print(sent, flush=True)
        print_at = now + 1
    time.sleep(0.005)
"""
SCREEN = """
import json, sys, time
from rich.console import Console
from busrl.cli import main
from busrl.observe.monitor import screen
from busrl.observe.monitor.sources import Watcher
from busrl.observe.monitor.web import server
web = sys.argv[3:] == ["--web"]
place = server if web else screen
place.DRAW_S, place.DRAW_SHARE, place.WAKE_S, place.give_way = 0.1, 1.0, 0.02, lambda nice: None
told = {"frames": 0, "draw_cpu_s": 0.0, "messages": 0, "listen_cpu_s": 0.0}
def timed(owner, name, cpu, count=""):
    inner = getattr(owner, name)
    def outer(*args, **more):
        begun = time.process_time()
        found = inner(*args, **more)
        told[cpu] += time.process_time() - begun
        if count:
            told[count] += found if type(found) is int else 1
        return found
    setattr(owner, name, outer)
timed(Watcher, "listen", "listen_cpu_s", "messages")
if web:
    timed(server.Server, "_draw", "draw_cpu_s", "frames")
else:
    timed(screen, "view", "draw_cpu_s")
    timed(Console, "update_screen", "draw_cpu_s", "frames")
begun = time.monotonic()
main(["monitor", sys.argv[1], *sys.argv[3:]])
json.dump(told | {"cpu_s": time.process_time(), "seconds": time.monotonic() - begun}, open(sys.argv[2], "w"))
"""
BODY = bytes(190)
MODES = ("no tap", "tap, nobody listens", "tap, one listens", "tap, one was stopped")


# ------------------------------------------------------------------------------------------------- the whole run


def run_once(watched: bool, seed: int, steps: int, sinks: Sequence[str] = ()) -> dict[str, Any]:
    """Make a run of the quickstart: rates, CPU seconds, load."""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="brl") as folder:
        directory = Path(folder) / "run"
        command = [sys.executable, "-m", "busrl.cli", "launch", str(TOPOLOGY), "--run-dir", str(directory)]
        for setting in (f"run.seed={seed}", f"run.max_steps={steps}", "validation.at_end=false"):
            command += ["--set", setting]
        if watched and sinks:
            command += ["--set", f"sinks.to={json.dumps(list(sinks))}"]
        run = sides.started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        watchers: dict[str, subprocess.Popen[bytes]] = {}
        if watched:
            until(lambda: ring_of(directory).exists(), run)
            watchers = watch(directory, Path(folder) / "a.rec")
            until(lambda: metrics_of(directory), run)
        begun = {name: cpu_ns(child.pid) / 1e9 for name, child in watchers.items()}
        code = run.wait()
        cpu = {name: round(ended_cpu(child) - begun[name], 3) for name, child in watchers.items()}
        if code != 0:
            raise SystemExit(f"the run ended with {code}")
        return {"watched": watched, "seed": seed, "load": before, **rates(directory), "watchers_cpu_s": cpu}


@contextmanager
def training(*settings: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The quickstart without an end of its own, past its first step, and its run directory; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="brl") as folder:
        directory = Path(folder) / "run"
        command = [sys.executable, "-m", "busrl.cli", "launch", str(TOPOLOGY), "--run-dir", str(directory)]
        for setting in ("run.max_steps=100000", "limits.idle_groups=0", *settings):
            command += ["--set", setting]
        run = sides.started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: metrics_of(directory), run)
            yield run, directory
        finally:
            run.send_signal(signal.SIGTERM)
            run.wait()


def windows(pairs: int, seconds: float, sinks: Sequence[str]) -> dict[str, Any]:
    """Trained tokens a second while watchers watch over those while they are stopped, in turns within one run: what
    differs between two runs, or two minutes of a machine, is in neither. The policy hardly learns, so that its answers
    stay as long as they are."""
    with training(f"sinks.to={json.dumps(list(sinks))}", "learner.lr=1e-9") as (run, directory):
        watchers = watch(directory, directory.parent / "a.rec")
        until(lambda: len(step_lines(directory / "metrics.jsonl")) > 40, run)
        spans: list[tuple[bool, float, float]] = []
        for number in range(2 * pairs):
            on = number % 4 in (0, 3)  # on, off, off, on: what drifts is in both
            for child in watchers.values():
                child.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
            begun = time.time()
            time.sleep(seconds)
            spans.append((on, begun, time.time()))
        for child in watchers.values():
            child.send_signal(signal.SIGCONT)
            child.terminate()
            child.wait()
        rows = step_lines(directory / "metrics.jsonl")
    ends, sums = [row["time"] for row in rows], np.cumsum([row["tokens"] for row in rows])
    # What a step brought came evenly over it, so that a window does not win or lose a whole step at its ends.
    rate = [(on, float(np.diff(np.interp(span, ends, sums))[0]) / (span[1] - span[0])) for on, *span in spans]
    both = [dict(pair) for pair in zip(rate[::2], rate[1::2])]
    ratios = [pair[True] / pair[False] for pair in both]
    return {"median": round(statistics.median(ratios), 4), "mean": round(statistics.mean(ratios), 4),
            "standard_error": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 4),
            "ratios": [round(pair, 3) for pair in ratios], "seconds": seconds, "sinks": list(sinks),
            "load": os.getloadavg()[0]}


def shares(seconds: float, sinks: Sequence[str]) -> dict[str, Any]:
    """Percent of a core that each process of a watched run takes in so many seconds, and that nobody does."""
    with training(f"sinks.to={json.dumps(list(sinks))}") as (run, directory):
        watchers = watch(directory, directory.parent / "a.rec")
        until(lambda: len(step_lines(directory / "metrics.jsonl")) > 40, run)
        pids = {process.name().removeprefix("busrl:"): process.pid for process in psutil.Process(run.pid).children()}
        pids |= {"launch": run.pid, **{f"watcher {name}": child.pid for name, child in watchers.items()}}
        before, idle, begun = {name: cpu_ns(pid) for name, pid in pids.items()}, psutil.cpu_times().idle, time.time()
        time.sleep(seconds)
        share = 100 / (time.time() - begun)
        percent = {name: round((cpu_ns(pid) - before[name]) / 1e9 * share, 2) for name, pid in pids.items()}
        idles = round((psutil.cpu_times().idle - idle) * share, 1)
        for child in watchers.values():
            child.terminate()
            child.wait()
    return {"percent_of_a_core": percent, "idle": idles, "seconds": seconds, "sinks": list(sinks)}


def ring_of(directory: Path) -> Path:
    from busrl.paths import RunPaths

    return RunPaths.of(directory).ring_file


def metrics_of(directory: Path) -> bool:
    """Tell whether the first step has ended."""
    return bool(step_lines(directory / "metrics.jsonl"))


def watch(directory: Path, recording: Path) -> dict[str, subprocess.Popen[bytes]]:
    """A live monitor, a page whose stream is read, and a recorder."""
    busrl = [sys.executable, "-m", "busrl.cli"]
    return {
        "monitor": on_a_terminal([*busrl, "monitor", str(directory)], empty)[0],
        "web": on_a_terminal([*busrl, "monitor", str(directory), "--web"], look)[0],
        "recorder": sides.started(
            [*busrl, "record", str(directory), "-o", str(recording)], stdout=subprocess.DEVNULL
        ),
    }


def on_a_terminal(command: list[str], read: Callable[[int], None]) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the other end of a terminal of its own, which a thread reads."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    child = sides.started(
        command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm-256color"}
    )
    os.close(slave)
    threading.Thread(target=read, args=(master,), daemon=True).start()
    return child, master


def empty(master: int) -> None:
    try:
        while os.read(master, 65536):
            pass
    except OSError:
        os.close(master)


def ended_cpu(child: subprocess.Popen[bytes]) -> float:
    """End a watcher; its CPU seconds, the start included (the recorder ends with the run by itself)."""
    os.kill(child.pid, signal.SIGTERM)  # not through Popen, which would collect it without its usage
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return round(usage.ru_utime + usage.ru_stime, 3)


def rates(directory: Path) -> dict[str, Any]:
    rows = step_lines(directory / "metrics.jsonl")
    summary = json.loads((directory / "summary.json").read_text())
    span = rows[-1]["time_s"] - rows[0]["time_s"]
    # Of the training time alone: what imports and loading cost is the same with and without watchers.
    cpu = {name: round((process["cpu_share"] or 0.0) * span, 3) for name, process in summary["processes"].items()}
    return {
        "seconds": round(span, 3),
        "samples_per_s": round(sum(row["samples_ended"] for row in rows[1:]) / span, 1),
        "tokens_per_s": round(sum(row["tokens"] for row in rows[1:]) / span, 1),
        "cpu_s": cpu,
        "run_cpu_s": round(sum(cpu.values()), 2),
    }


def until(condition: Any, run: subprocess.Popen[bytes]) -> None:
    while not condition():
        if run.poll() is not None:
            raise SystemExit("the run ended before it began")
        time.sleep(0.02)


# --------------------------------------------------------------------------------------------------- the tap alone


@contextmanager
def bus(mode: str) -> Iterator[tuple[str, subprocess.Popen[bytes], zmq.Context[zmq.Socket[bytes]]]]:
    """A broker in this mode; its directory and process, and a context for clients."""
    with tempfile.TemporaryDirectory(prefix="brl") as folder:
        tap = "" if mode == MODES[0] else f"ipc://{folder}/t"
        broker = sides.started([sys.executable, "-c", SERVE, folder, tap], stdout=subprocess.PIPE)
        assert broker.stdout is not None
        broker.stdout.readline()
        listener = listen(tap) if mode in MODES[2:] else None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            if mode == MODES[3]:
                assert listener is not None
                listener.send_signal(signal.SIGSTOP)
            yield folder, broker, context
        finally:
            context.destroy(linger=0)
            for child in (listener, broker):
                if child is not None:
                    child.kill()
                    child.wait()


def listen(tap: str) -> subprocess.Popen[bytes]:
    """Somebody at the tap, who has heard the first message (the broker's own ping comes every second)."""
    child = sides.started([sys.executable, "-c", LISTEN, tap], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def clients(folder: str, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A connected publisher and subscriber."""
    pub, sub = context.socket(zmq.PUB), context.socket(zmq.SUB)
    pub.setsockopt(zmq.SNDHWM, 0)
    sub.setsockopt(zmq.RCVHWM, 0)
    sub.setsockopt(zmq.SUBSCRIBE, b"NEW_TASK/")
    pub.connect(f"ipc://{folder}/f")
    sub.connect(f"ipc://{folder}/b")
    while not sub.poll(50):
        pub.send_multipart([b"NEW_TASK/", b"?"])
    while sub.poll(100):
        sub.recv_multipart()
    return pub, sub


def tap_once(mode: str, flood: int, pings: int) -> dict[str, Any]:
    """Broker CPU per message in a flood of bursts of 200, then round trips, one at a time."""
    with bus(mode) as (folder, broker, context):
        pub, sub = clients(folder, context)
        cpu, begun = cpu_ns(broker.pid), time.monotonic()
        for _ in range(flood // 200):
            for _ in range(200):
                pub.send_multipart([b"NEW_TASK/", BODY])
            for _ in range(200):
                sub.recv_multipart()
        seconds, cpu = time.monotonic() - begun, cpu_ns(broker.pid) - cpu
        trips = []
        for _ in range(pings):
            sent = time.perf_counter_ns()
            pub.send_multipart([b"NEW_TASK/", BODY])
            sub.recv_multipart()
            trips.append((time.perf_counter_ns() - sent) / 1000)
    return {
        "mode": mode,
        "broker_cpu_us_per_message": cpu / flood / 1000,
        "messages_per_s": flood / seconds,
        "trip_p50_us": statistics.median(trips),
        "trip_p99_us": statistics.quantiles(trips, n=100)[98],
    }


def crowd(seconds: float, web: bool, senders: int = 64, rate: int = 10_000) -> dict[str, Any]:
    """Cost of a screen, or an open page, of many processes that is drawn ten times a second, which is ten times as
    often as it is."""
    with bus(MODES[1]) as (folder, _, _), tempfile.TemporaryDirectory() as place:
        sender = sides.started(
            [sys.executable, "-c", SEND, folder, str(senders), str(rate)], stdout=subprocess.PIPE, text=True
        )
        told = Path(place) / "told.json"
        command = [sys.executable, "-c", SCREEN, f"ipc://{folder}/t", str(told), *(["--web"] if web else [])]
        screen, keys = on_a_terminal(command, look if web else empty)
        assert sender.stdout is not None
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and sender.stdout.readline():
            pass
        screen.send_signal(signal.SIGTERM) if web else os.write(keys, b"q")
        screen.wait(60)
        sender.kill()
        sender.wait()
        costs: dict[str, Any] = json.loads(told.read_text())
    frame, message = costs["draw_cpu_s"] / costs["frames"], costs["listen_cpu_s"] / costs["messages"]
    return {
        "web": web, "senders": senders, "rate": rate, **costs, "load": os.getloadavg()[0],
        "frame_ms": round(1e3 * frame, 2), "message_us": round(1e6 * message, 2),
        "cores_for_10_frames_and_the_rate": round(10 * frame + rate * message, 3),
    }


def look(master: int) -> None:
    """Open the page whose address is printed, and read its stream."""
    printed = b""
    while not (address := re.search(rb"http://\S+", printed)) or not printed.endswith(b"\n"):
        printed += os.read(master, 4096)
    with contextlib.suppress(OSError), urllib.request.urlopen(address[0].decode() + "events") as stream:
        while stream.read1(1 << 20):
            pass


# ----------------------------------------------------------------------------------------------- the first picture


def first_pictures(count: int) -> dict[str, Any]:
    """Milliseconds from the start of a program to its first picture of a run of the quickstart that trains beside it,
    and from a browser's request to the first picture of a page whose server is there."""
    with training() as (_, directory):
        terminal = [on_screen(["monitor", str(directory)], rb"rollout/0")[0] for _ in range(count)]
        pages = [on_page(directory) for _ in range(count)]
    return {
        name: {"median_ms": round(1e3 * statistics.median(times)), "worst_ms": round(1e3 * max(times))}
        for name, times in (("terminal", terminal), ("page, server started", [started for started, _ in pages]),
                            ("page, server there", [opened for _, opened in pages]))
    } | {"load": os.getloadavg()[0]}


def on_screen(arguments: list[str], shown: bytes, then: Callable[[bytes], float] | None = None) -> tuple[float, float]:
    """Seconds until a command of busrl has shown this on its terminal, and what `then` makes of all that was shown."""
    seen: dict[str, Any] = {"said": b""}
    done = threading.Event()

    def read(master: int) -> None:
        while not re.search(shown, seen["said"]):
            seen["said"] += os.read(master, 65536)
        seen["at"] = time.monotonic()
        done.set()
        empty(master)

    begun = time.monotonic()
    child, _ = on_a_terminal([sys.executable, "-m", "busrl.cli", *arguments], read)
    if not done.wait(60):
        raise SystemExit(f"busrl {arguments[0]} showed nothing within 60 s: {seen['said'][-500:]!r}")
    more = then(seen["said"]) if then else 0.0
    ended_cpu(child)
    return seen["at"] - begun, more


def on_page(directory: Path) -> tuple[float, float]:
    """Seconds from the server's start to its first picture, and from the request of a page to its own."""

    def open_page(said: bytes) -> float:
        address = re.search(rb"http://\S+", said)
        assert address is not None
        begun = time.monotonic()
        urllib.request.urlopen(address[0].decode()).read()
        with urllib.request.urlopen(address[0].decode() + "events") as stream:
            while b"data:" not in stream.readline():
                pass
        return time.monotonic() - begun

    started, opened = on_screen(["monitor", str(directory), "--web"], rb"http://\S+\s", open_page)
    return started + opened, opened


def cpu_ns(pid: int) -> int:
    """CPU nanoseconds of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


# ------------------------------------------------------------------------------------------------------ the sums


def median(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def told_of_runs(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios watched over alone, pair by pair, and what noise the runs alone have."""
    alone, watched = ([run for run in runs if run["watched"] is kind] for kind in (False, True))
    ratios = [w["samples_per_s"] / a["samples_per_s"] for a, w in zip(alone, watched)]
    tokens = [w["tokens_per_s"] / a["tokens_per_s"] for a, w in zip(alone, watched)]
    rates_alone = [run["samples_per_s"] for run in alone]
    names = watched[0]["watchers_cpu_s"]
    watchers = {name: statistics.median(run["watchers_cpu_s"][name] for run in watched) for name in names}
    return {
        "samples_per_s": {"alone": median(alone, "samples_per_s"), "watched": median(watched, "samples_per_s")},
        "ratio_median": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "token_ratio_median": round(statistics.median(tokens), 4),
        "noise_alone": round((max(rates_alone) - min(rates_alone)) / statistics.median(rates_alone), 4),
        "run_cpu_s": {"alone": median(alone, "run_cpu_s"), "watched": median(watched, "run_cpu_s")},
        "bus_cpu_s": {
            kind: statistics.median(run["cpu_s"]["bus"] for run in rows)
            for kind, rows in (("alone", alone), ("watched", watched))
        },
        "watchers_cpu_s": watchers,
        "watchers_cpu_share_of_run": round(sum(watchers.values()) / median(watched, "run_cpu_s"), 4),
    }


def told_of_tap(rows: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("broker_cpu_us_per_message", "messages_per_s", "trip_p50_us", "trip_p99_us")
    by_mode = {mode: [row for row in rows if row["mode"] == mode] for mode in MODES}
    return {mode: {key: round(median(rows_of, key), 2) for key in keys} for mode, rows_of in by_mode.items()}


def table(result: dict[str, Any]) -> str:
    host = result["machine"]
    lines = [
        "# What watching costs", "",
        f"{host['cpu']}, {host['cores']} cores, Linux {host['kernel']}, Python {host['python']}, commit "
        f"{result['commit']}, {result['date']}, load before the runs {result['load']:.1f}.", "",
    ]
    if "run" in result:
        run = result["run"]
        lines += [
            f"Quickstart, {result['steps']} steps, {result['pairs']} pairs of runs in turn, a live monitor (120 x 40), "
            f"a page and a recorder{''.join(f', {name}' for name in result['sinks'])} attached in every second one:",
            "",
            "| | alone | watched |", "|---|---|---|",
            *(f"| {name} | {run[key]['alone']:g} | {run[key]['watched']:g} |"
              for name, key in (("samples/s, median", "samples_per_s"), ("CPU s of the run", "run_cpu_s"),
                                ("CPU s of the broker", "bus_cpu_s"))), "",
            f"Ratio watched / alone: median {run['ratio_median']} (tokens {run['token_ratio_median']}), pair by pair "
            f"{run['ratios']}. Spread of the runs alone: {run['noise_alone']:.1%}.",
            f"CPU s of the watchers, from the first step to their end: {run['watchers_cpu_s']}, "
            f"{run['watchers_cpu_share_of_run']:.1%} of the run's in that time.",
            "All CPU seconds are of the training time.", "",
        ]
    lines += [
        "| the broker alone | CPU us/message | messages/s | round trip p50 us | p99 us |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {mode} | {row['broker_cpu_us_per_message']} | {row['messages_per_s']:,.0f} | {row['trip_p50_us']} | "
        f"{row['trip_p99_us']} |" for mode, row in result["tap"].items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=150)
    arguments.add_argument("--sinks", nargs="*", default=[], help="that watched runs feed too: tensorboard ...")
    arguments.add_argument("--rounds", type=int, default=5, help="of the tap alone")
    arguments.add_argument("--out", type=Path, default=RESULTS / "monitor.json")
    arguments.add_argument("--crowd", type=float, default=0.0, help="seconds; nothing else is done then")
    arguments.add_argument("--windows", type=int, default=0, help="pairs of them; nothing else is done then")
    arguments.add_argument("--seconds", type=float, default=15.0, help="of a window")
    arguments.add_argument("--shares", type=float, default=0.0, help="seconds; nothing else is done then")
    arguments.add_argument("--first", type=int, default=0, help="pictures of each kind; nothing else is done then")
    options = arguments.parse_args()
    os.environ.update(
        OMP_WAIT_POLICY="PASSIVE", PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    )
    if options.windows:
        print(json.dumps(windows(options.windows, options.seconds, options.sinks), indent=1))
        return
    if options.shares:
        print(json.dumps(shares(options.shares, options.sinks), indent=1))
        return
    if options.first:
        print(json.dumps(first_pictures(options.first), indent=1))
        return
    if options.crowd:
        for web in (False, True):
            print(json.dumps(crowd(options.crowd, web), indent=1), flush=True)
        return
    result: dict[str, Any] = {
        "machine": report.machine(), "commit": report.commit(ROOT), "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0], "pairs": options.pairs, "steps": options.steps, "sinks": options.sinks,
    }
    runs = []
    for pair in range(options.pairs):
        for watched in (False, True) if pair % 2 == 0 else (True, False):
            runs.append(run_once(watched, pair, options.steps, options.sinks))
            print(
                {key: runs[-1][key] for key in ("watched", "samples_per_s", "run_cpu_s", "watchers_cpu_s")}, flush=True
            )
    if runs:
        result["run"], result["runs"] = told_of_runs(runs), runs
    taps = [tap_once(mode, 40_000, 2_000) for _ in range(options.rounds) for mode in MODES]
    result["tap"], result["tap_rounds"] = told_of_tap(taps), options.rounds
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table(result))
    print(table(result))
