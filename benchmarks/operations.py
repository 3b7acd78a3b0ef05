"""Single operations of busrl from Python: ring, log, bus, weights. No rivals; `ring` and `bus` have those.

    python -m benchmarks operations [--rounds N]

Afterwards `python -m benchmarks tables --write` puts the newest result into the table of docs/benchmarks.md.
A figure is the median over rounds of medians over many short chunks; one chunk is some dozen calls in a row, without
the loop around them. Everything runs in this one process; the broker of the bus runs in a thread of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import RESULTS
from benchmarks.common.judge import Log, written
from busrl.bus import Endpoint
from busrl.bus.broker import Proxy
from busrl.ledger.wal import Record, SampleRecord, Wal
from busrl.protocol.messages import DataGenerated, NewTask
from busrl.ring import Fates, Ring, State

SLOTS = 256
TOKENS = np.arange(64, dtype=np.int32)
SHM = "/dev/shm"


class Clock:
    """Seconds per call of each named operation, one entry a chunk."""

    def __init__(self) -> None:
        self.chunks: dict[str, list[float]] = {}

    def __call__(self, name: str, todo: Callable[[], object], calls: int) -> None:
        start = time.perf_counter()
        todo()
        self.chunks.setdefault(name, []).append((time.perf_counter() - start) / calls)


def ring_calls(clock: Clock, chunks: int) -> None:
    with tempfile.TemporaryDirectory(prefix="busrl.bench.", dir=SHM) as folder:
        ring = Ring.create(f"{folder}/ring", slots=SLOTS, slot_bytes=8192, processes=8, uuid=bytes(16))
        ring.bind_fates(Fates(f"{folder}/fates", create=True, capacity=1 << 24))
        ring.register("bench", "bench")
        try:
            for chunk in range(chunks):
                one_life(clock, ring, chunk * SLOTS)
        finally:
            ring.close()


def one_life(clock: Clock, ring: Ring, uid: int) -> None:
    """All slots of the ring from dispatch to the end, one kind of call after the other."""
    task = b'{"prompt": "sort: 3 1 4 1 5 9 2 6"}'

    def dispatch() -> None:
        for k in range(SLOTS):
            ring.dispatch(
                uid=uid + k, group=k // 8, admission=uid + k, member=k % 8, group_size=8, cls=0, task=task,
                prompt_crc=1, max_new_tokens=64, temperature=1.0,
            )

    held: list[tuple[int, int]] = []

    def claim_alone() -> None:
        for _ in range(32):
            held.extend(ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1))

    def claim_batch() -> None:
        held.extend(ring.take(State.QUEUED, State.GENERATING, cls=None, limit=SLOTS))

    clock("dispatch a sample (claim, line, prompt, fate, commit)", dispatch, SLOTS)
    clock("claim alone, out of a full ring", claim_alone, 32)
    clock("claim in a batch, per slot", claim_batch, SLOTS - 32)
    clock("write a tensor of 64 tokens", lambda: [ring.put(s, w, "tokens", TOKENS, 0) for s, w in held], SLOTS)
    clock("commit a segment", lambda: [ring.commit_segment(s, w, True) for s, w in held], SLOTS)
    claimed = ring.take(State.GENERATED, State.REWARDING, cls=None, limit=SLOTS)
    clock("read a tensor in place", lambda: [ring.get(s, "tokens", 0) for s, _ in claimed], SLOTS)
    clock("set two fields", lambda: [ring.set(s, w, reward=1.0, reward_parts=1) for s, w in claimed], SLOTS)
    clock("release", lambda: [ring.release(s, w, State.REWARDED) for s, w in claimed], SLOTS)
    claimed = ring.take(State.REWARDED, State.TRAINING, cls=None, limit=SLOTS)
    clock("all control lines as one array, per slot", ring.lines, SLOTS)
    clock("finish", lambda: [ring.finish(s, w, "T") for s, w in claimed], SLOTS)


def sample(uid: int) -> SampleRecord:
    tokens = np.arange(40, dtype="<i4")
    return SampleRecord(
        uid=uid, group=uid // 8, admission=uid, member=uid % 8, attempt=0, prompt_crc=1, reward=1.0, temperature=1.0,
        version=1, step=1, finish=1, prompt_ids=tokens.tobytes(), token_ids=tokens.tobytes(),
        logprobs=tokens.astype("<f4").tobytes(), versions=tokens.astype("<u4").tobytes(),
    )


def log_calls(clock: Clock, chunks: int, folder: str) -> int:
    """Appends of one batch of 256; returns the bytes of a record."""
    samples = [sample(k) for k in range(256)]
    nbytes = 0
    for sync in (False, True):
        with tempfile.TemporaryDirectory(dir=folder) as place, Wal(Path(place) / "wal", sync=sync) as wal:
            name = f"append a batch of 256 samples to the log, {'with' if sync else 'without'} fdatasync"
            for step in range(chunks):
                record = Record(step=step, version=step, cause="full", groups=[1], samples=samples)
                clock(name, lambda record=record: wal.append(record), 1)  # type: ignore[misc]
            nbytes = sum(file.stat().st_size for file in (Path(place) / "wal").iterdir()) // chunks
    return nbytes


def bus_calls(clock: Clock, chunks: int) -> None:
    with tempfile.TemporaryDirectory(prefix="busrl-bench-") as folder:
        front, back = f"ipc://{folder}/in", f"ipc://{folder}/out"
        with (
            Proxy(front, back, 0, 1 << 20),
            Endpoint("here", front, back, hwm=0) as here,
            Endpoint("there", front, back, subscribe=["NEW_TASK/there/"], hwm=0) as there,
        ):
            here.ready(10)
            there.ready(10)
            for _ in range(chunks):
                tasks = [NewTask(worker_id="there", slot_id=k, seq=k, uid=k) for k in range(200)]
                clock("send a message on the bus", lambda tasks=tasks: [here.send(t, to="there") for t in tasks], 200)
                first = there.recv(10)
                time.sleep(0.005)  # all of them are here, so that only receiving is measured
                clock("receive a message from the bus", lambda: [there.recv(10) for _ in range(199)], 199)
                assert first is not None
    message = DataGenerated(slot_id=1, seq=2, uid=3)
    from busrl.protocol.codec import encode

    for _ in range(chunks):
        clock("encode a message", lambda: [encode(message) for _ in range(200)], 200)


def weight_calls(clock: Clock, chunks: int, mib: int) -> None:
    import torch

    from busrl.weights.shm import ShmReceiver, ShmSender

    torch.set_num_threads(1)
    named = {f"layer.{k}": torch.ones(1024, 256 * mib // 16) for k in range(16)}
    with tempfile.TemporaryDirectory(prefix="busrl.bench.", dir=SHM) as folder:
        sender, receiver = ShmSender(f"{folder}/weights"), ShmReceiver(f"{folder}/weights")
        there = {name: torch.zeros_like(value) for name, value in named.items()}
        for version in range(1, chunks + 3):
            run = clock if version > 2 else Clock()  # the first ones touch new pages
            run("publish weights by shared memory", lambda v=version: sender.publish(v, v, named), 1)  # type: ignore[misc]
            run("fetch weights by shared memory", lambda: receiver.fetch(there), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights-mib", type=int, default=64)
    parser.add_argument("--log-folder", default=".", help="where the log is written: its disk is what fdatasync costs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    log = Log()
    nbytes = 0
    for turn in range(options.rounds):
        clock = Clock()
        log.loads.append(os.getloadavg()[0])
        ring_calls(clock, 60)
        nbytes = log_calls(clock, 30, options.log_folder)
        bus_calls(clock, 60)
        weight_calls(clock, 12, options.weights_mib)
        for name, chunks in clock.chunks.items():
            median = statistics.median(chunks)
            if name.endswith("shared memory"):
                log.say(name, options.weights_mib * (1 << 20) / median / 1e9, "GB/s")
            else:
                log.say(name, median * 1e6, "us")
        print(f"round {turn + 1} of {options.rounds}", flush=True)
    result = written(log, (), "operations", options.out, rounds=options.rounds, log_record_bytes=nbytes)
    for name, median in result["medians"].items():
        print(f"{median['value']:10.3g} {median['unit']:5} {name}")
    return 0
