"""pyzmq without anything on top: bytes through the same kind of proxy, as one frame and as two (topic, payload).

    raw.py rate|trip FRONTEND BACKEND COUNT FRAMES      prints one JSON line

The parent of both ends is here; the broker is started by run.py. The bytes have the size of the typed message.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time

import zmq

TOPIC, BACK, END = b"NEW_TASK/there/", b"DATA_GENERATED/", b"end"
BODY = b"x" * 105  # what the typed message of typed.py has
SNDMORE = int(zmq.SNDMORE)
SPAWN = multiprocessing.get_context("spawn")


def sockets(frontend: str, backend: str, topic: bytes) -> tuple[zmq.Context, zmq.Socket, zmq.Socket]:
    context = zmq.Context()
    publisher, subscriber = context.socket(zmq.PUB), context.socket(zmq.SUB)
    for socket in (publisher, subscriber):
        socket.set_hwm(0)
    subscriber.subscribe(topic)
    publisher.connect(frontend)
    subscriber.connect(backend)
    return context, publisher, subscriber


def senders(socket: zmq.Socket, topic: bytes, frames: int):
    """Way to send `body`, in the fewest calls: pyzmq's send_multipart takes three times as long."""
    if frames == 1:
        return lambda body: socket.send(topic + body)

    def send(body: bytes) -> None:
        socket.send(topic, SNDMORE)
        socket.send(body)

    return send


def receivers(socket: zmq.Socket, frames: int):
    """Way to receive: the last frame."""
    if frames == 1:
        return socket.recv

    def receive() -> bytes:
        socket.recv()
        return socket.recv()

    return receive


def sink(up, ended, frontend: str, backend: str, frames: int) -> None:
    _context, _publisher, subscriber = sockets(frontend, backend, TOPIC)
    receive = receivers(subscriber, frames)
    up.set()
    receive()
    start, spent, count = time.perf_counter(), time.process_time(), 0
    while True:
        if receive().endswith(END):
            break
        count += 1
    ended.put((count, time.perf_counter() - start, time.process_time() - spent))


def rate(frontend: str, backend: str, count: int, frames: int) -> tuple[float, float]:
    """Messages a second, and the CPU time of a message at both ends, their I/O threads included, in us."""
    up, ended = SPAWN.Event(), SPAWN.Queue()
    process = SPAWN.Process(target=sink, args=(up, ended, frontend, backend, frames), daemon=True)
    process.start()
    up.wait(30)
    _context, publisher, _subscriber = sockets(frontend, backend, BACK)
    send = senders(publisher, TOPIC, frames)
    time.sleep(0.3)
    spent = time.process_time()
    for _ in range(count + 1):
        send(BODY)
    send(END)
    got, seconds, theirs = ended.get(timeout=60)
    process.join()
    if got != count:
        raise SystemExit(f"{count - got} of {count} messages were lost")
    return count / seconds, (theirs + time.process_time() - spent) / count * 1e6


def echo(up, frontend: str, backend: str, count: int, frames: int) -> None:
    _context, publisher, subscriber = sockets(frontend, backend, TOPIC)
    receive, send = receivers(subscriber, frames), senders(publisher, BACK, frames)
    up.set()
    for _ in range(count):
        receive()
        send(BODY)
    time.sleep(0.2)


def trip(frontend: str, backend: str, count: int, frames: int) -> float:
    up = SPAWN.Event()
    process = SPAWN.Process(target=echo, args=(up, frontend, backend, count, frames), daemon=True)
    process.start()
    up.wait(30)
    _context, publisher, subscriber = sockets(frontend, backend, BACK)
    receive, send = receivers(subscriber, frames), senders(publisher, TOPIC, frames)
    time.sleep(0.3)
    spent = []
    for _ in range(count):
        start = time.perf_counter()
        send(BODY)
        receive()
        spent.append(time.perf_counter() - start)
    process.join()
    return statistics.median(spent[count // 10 :]) * 1e6


def main() -> None:
    what, frontend, backend, count, frames = sys.argv[1:6]
    ends = (frontend, backend, int(count), int(frames))
    said = {"name": f"raw_{what}_{frames}", "version": zmq.__version__}
    if what == "trip":
        print(json.dumps(said | {"value": trip(*ends), "unit": "us"}))
        return
    value, cpu = rate(*ends)
    print(json.dumps(said | {"value": value, "unit": "messages/s"}))
    print(json.dumps({"name": f"raw_ends_{frames}", "value": cpu, "unit": "us"}))


if __name__ == "__main__":
    main()
