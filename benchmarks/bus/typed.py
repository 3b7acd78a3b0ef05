"""busrl's typed messages through the same broker: `Endpoint.send` here, `Endpoint.recv` there.

    typed.py rate|trip FRONTEND BACKEND COUNT      prints one JSON line
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time

from busrl.bus import Endpoint
from busrl.protocol.messages import DataGenerated, NewTask, Stop

SPAWN = multiprocessing.get_context("spawn")


def endpoint(name: str, frontend: str, backend: str, *topics: str) -> Endpoint:
    return Endpoint(name, frontend, backend, subscribe=topics, hwm=0)


def task(k: int) -> NewTask:
    return NewTask(worker_id="there", slot_id=k & 255, seq=k, uid=k, count=1)


def sink(up, ended, frontend: str, backend: str) -> None:
    bus = endpoint("there", frontend, backend, "NEW_TASK/there/", "STOP/")
    bus.ready(10)
    up.set()
    bus.recv(30)
    start, spent, count = time.perf_counter(), time.process_time(), 0
    while not isinstance(bus.recv(30), Stop):
        count += 1
    ended.put((count, time.perf_counter() - start, time.process_time() - spent))


def rate(frontend: str, backend: str, count: int) -> tuple[float, float]:
    """Messages a second, and the CPU time of a message at both ends, their I/O threads included, in us."""
    up, ended = SPAWN.Event(), SPAWN.Queue()
    process = SPAWN.Process(target=sink, args=(up, ended, frontend, backend), daemon=True)
    process.start()
    up.wait(30)
    bus = endpoint("here", frontend, backend)
    bus.ready(10)
    time.sleep(0.3)
    spent = time.process_time()
    for k in range(count + 1):
        bus.send(task(k), to="there")
    bus.send(Stop())
    got, seconds, theirs = ended.get(timeout=60)
    process.join()
    if got != count:
        raise SystemExit(f"{count - got} of {count} messages were lost")
    return count / seconds, (theirs + time.process_time() - spent) / count * 1e6


def echo(up, frontend: str, backend: str, count: int) -> None:
    bus = endpoint("there", frontend, backend, "NEW_TASK/there/")
    bus.ready(10)
    up.set()
    for _ in range(count):
        got = bus.recv(30)
        bus.send(DataGenerated(slot_id=got.slot_id, seq=got.seq, uid=got.uid))
    time.sleep(0.2)


def trip(frontend: str, backend: str, count: int) -> float:
    up = SPAWN.Event()
    process = SPAWN.Process(target=echo, args=(up, frontend, backend, count), daemon=True)
    process.start()
    up.wait(30)
    bus = endpoint("here", frontend, backend, "DATA_GENERATED/")
    bus.ready(10)
    time.sleep(0.3)
    spent = []
    for k in range(count):
        start = time.perf_counter()
        bus.send(task(k), to="there")
        bus.recv(30)
        spent.append(time.perf_counter() - start)
    process.join()
    return statistics.median(spent[count // 10 :]) * 1e6


def main() -> None:
    what, frontend, backend, count = sys.argv[1:5]
    if what == "trip":
        print(json.dumps({"name": "typed_trip", "value": trip(frontend, backend, int(count)), "unit": "us"}))
        return
    value, cpu = rate(frontend, backend, int(count))
    print(json.dumps({"name": "typed_rate", "value": value, "unit": "messages/s"}))
    print(json.dumps({"name": "typed_ends", "value": cpu, "unit": "us"}))


if __name__ == "__main__":
    main()
