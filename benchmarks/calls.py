"""Ring of model calls between two processes: time from put to taken and calls per second, by the prompt's length.

    python -m benchmarks calls [--seconds 3] [--ids 1000 8000]

One process asks, the other answers each call with 64 tokens, as a rollout would without a model: it claims, reads the
ids and the details, writes tokens, log-probabilities, versions and `served`, commits. Printed per length, for one call
at a time and for many: median and p99 of the time from put to taken, and calls per second. The caller is `Caller`, and
with `--asyncio` `AsyncCaller`, with as many coroutines as calls at once.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import time

import msgspec
import numpy as np

from busrl.ring import NO_SEGMENT, Ring, State
from busrl.ring.calls import AsyncCaller, CallDetails, Caller, ModelCall, Served, read_ids

ANSWER = 64
AT_ONCE = 32
TAKES = 8


def engine(name: str, ready: multiprocessing.synchronize.Event) -> None:
    """Answers until it is killed."""
    ring = Ring.attach(name, calls=True)
    ring.register("rollout", "rollout/0")
    tokens, versions = np.arange(ANSWER, dtype=np.int32), np.zeros(ANSWER, np.uint32)
    logprobs, decoder = np.full(ANSWER, -0.5, np.float32), msgspec.msgpack.Decoder(CallDetails)
    ready.set()
    while True:
        held = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=TAKES, timeout_s=0.05)
        for slot, word in held:
            begun = time.monotonic_ns()
            read_ids(ring, slot, "prompt_ids", NO_SEGMENT).copy()
            decoder.decode(ring.get(slot, "call").tobytes())
            for part, array in (("tokens", tokens), ("logprobs", logprobs), ("versions", versions)):
                ring.put(slot, word, part, array, 0)
            ring.put(slot, word, "served", np.array(Served(ring.index, begun, time.monotonic_ns()), np.uint64), 0)
            ring.set(slot, word, finish=2, response_tokens=ANSWER)
            ring.commit_segment(slot, word, True)


def measure(ring: Ring, ids: int, at_once: int, seconds: float) -> list[float]:
    """Seconds from put to taken of each call."""
    caller, call = Caller(ring, lambda message, to: None), ModelCall(np.arange(ids, dtype=np.int32), ANSWER)
    end, took = time.monotonic() + seconds, []
    while time.monotonic() < end:
        while caller.open < at_once and caller.put(call) is not None:
            pass
        for done in caller.wait(1.0):
            done.result()
            took.append((time.monotonic_ns() - done.put_ns) / 1e9)
    caller.close()
    return took


async def measure_async(ring: Ring, ids: int, at_once: int, seconds: float) -> list[float]:
    call, took, end = ModelCall(np.arange(ids, dtype=np.int32), ANSWER), [], time.monotonic() + seconds

    async def one(caller: AsyncCaller) -> None:
        while time.monotonic() < end:
            begun = time.monotonic()
            await caller.ask(call, 60.0)
            took.append(time.monotonic() - begun)

    async with AsyncCaller(ring, lambda message, to: None) as caller:
        await asyncio.gather(*[one(caller) for _ in range(at_once)])
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--ids", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--asyncio", action="store_true", help="coroutines instead of a loop")
    options = parser.parse_args()
    name = f"busrl.bench.{os.getpid()}.calls"
    room = 4 * max(options.ids) + 12 * ANSWER + 1024
    ring = Ring.create(name, slots=2 * AT_ONCE, slot_bytes=room, processes=8, uuid=bytes(16), calls=True)
    ring.register("agent", "agent/0")
    ready = multiprocessing.Event()
    child = multiprocessing.Process(target=engine, args=(name, ready), daemon=True)
    child.start()
    try:
        if not ready.wait(60.0):
            raise SystemExit("the engine's process did not start within 60 s")
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for ids in options.ids:
            for at_once in (1, AT_ONCE):
                arguments = (ring, ids, at_once, options.seconds)
                took = np.array(asyncio.run(measure_async(*arguments)) if options.asyncio else measure(*arguments))
                middle, late = np.percentile(took, [50, 99]) * 1e6
                rate = len(took) / options.seconds
                times = f"{middle:7.0f} us median, {late:7.0f} us p99"
                print(f"{ids:6d} ids, {at_once:3d} at once: {rate:8.0f} calls/s, {times}")
    finally:
        child.kill()
        ring.close()
        Ring.unlink(name)
