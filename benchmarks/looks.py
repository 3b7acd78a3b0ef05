"""CPU of a learner's looks at the groups of a large ring, per step, with a look for each reward and at a pace.

    python -m benchmarks looks [--slots N] [--groups N] [--rate R] [--steps N] [--rounds N]

A process stands for scheduler, engines and reward workers: it keeps every slot of the ring filled and commits `--rate`
rewards a second, of groups of eight in no order. This process does what a learner does between micro-batches: waits,
copies the lines, scans them, decides, claims, drops, and ends the slots of a step; it trains nothing. Its CPU is
counted without claiming, dropping and ending. The two ways alternate. `each reward` is how a learner looked up to
2026-11-28, with the scan of today.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks import RESULTS
from benchmarks.common.judge import Bar, Log, written
from busrl.ledger.trained import TrainedSet
from busrl.ring import Fates, Ring, State
from busrl.roles.learner.groups import LOOK_MOST_S, Claims, Looks
from busrl.scheduling.admission import Staleness, derive
from busrl.scheduling.groups import GroupScanner
from busrl.scheduling.trigger import Claim, Fire, LearnerPlan, SetAside, Trigger
from busrl.states import Finish, uid_of
from busrl.topology.rewards import Reward
from busrl.topology.schema import Generation

GROUP, STALENESS, MICRO_BATCH, TICK_S = 8, 3, 16, 0.02
OLDEST = 1000  # samples, among which the next reward is drawn
STEP_S = 120  # that a step may take
BAR_S = 0.2  # CPU of looks per step
TOKENS = np.arange(4, dtype=np.int32)
LOGPROBS, VERSIONS = np.full(4, -1.0, np.float32), np.zeros(4, np.uint32)


class EachReward(Looks):
    """Every reward ends the wait, and every end of a wait is a look."""

    def due(self) -> bool:
        self._rewards = self._ring.transitions(State.REWARDED)
        return True

    def wait(self, timeout_s: float) -> None:
        self._ring.wait(State.REWARDED, self._rewards, timeout_s)


WAYS = {"each reward": EachReward, "paced": Looks}


# -- the other roles -------------------------------------------------------------------


def produce(folder: str, rate: float) -> None:
    """Keep the ring full, and commit rewards until this process is killed."""
    ring, fates = Ring.attach(f"{folder}/ring"), Fates(f"{folder}/fates")
    ring.bind_fates(fates)
    ring.register("bench", "others")
    chance, held, draw = np.random.default_rng(0), list[tuple[int, int]](), 0
    begun, done = time.monotonic(), 0
    while True:
        draw = fill(ring, draw)
        held += generate(ring)
        owed, done = int((time.monotonic() - begun) * rate) - done, int((time.monotonic() - begun) * rate)
        for _ in range(min(owed, len(held))):  # what has no sample is not made up for
            slot, word = held.pop(int(chance.integers(min(OLDEST, len(held)))))
            ring.set(slot, word, reward=float(chance.random() < 0.5))
            ring.release(slot, word, State.REWARDED)
        ring.wait(State.DROPPED, ring.transitions(State.DROPPED), 1 / rate)


def fill(ring: Ring, draw: int) -> int:
    """Dispatch whole groups while there is room; returns the next draw."""
    while ring.stats().occupancy["FREE"] >= GROUP:
        ring.dispatch(
            uid=uid_of(draw, 0, 0, GROUP), member=0, members=GROUP, group=draw, admission=draw, group_size=GROUP, cls=0,
            task=b"{}", prompt_crc=1, max_new_tokens=8, temperature=1.0, step=1 << 30,
        )
        draw += 1
    return draw


def generate(ring: Ring) -> list[tuple[int, int]]:
    """Give every queued sample an answer; returns the slots, held by the one who rewards."""
    for slot, word in ring.take(State.QUEUED, State.GENERATING, cls=None, limit=ring.n_slots):
        ring.put(slot, word, "prompt_ids", TOKENS)
        for name, values in (("tokens", TOKENS), ("logprobs", LOGPROBS), ("versions", VERSIONS)):
            ring.put(slot, word, name, values, 0)
        ring.set(slot, word, finish=Finish.EOS, response_tokens=len(TOKENS))
        ring.commit_segment(slot, word, True)
    return list(ring.take(State.GENERATED, State.REWARDING, cls=None, limit=ring.n_slots))


# -- the learner -----------------------------------------------------------------------


class Learner:
    """The looks of a learner, and what it does with the ring after them."""

    def __init__(self, ring: Ring, fates: Fates, groups: int) -> None:
        self.ring, self.fates = ring, fates
        limits = derive("batch-async", groups, STALENESS, GROUP)
        self.plan = LearnerPlan(
            limits, Trigger(groups), Staleness(None, "wait"), streaming=True)
        topology = SimpleNamespace(reward=Reward(), generation=Generation())
        self.claims = Claims(ring, topology, lambda records: None)  # type: ignore[arg-type]
        self.scanner = GroupScanner(fates.view(), GROUP, horizon=2 * groups)
        self.steps = self.looked = 0
        self.apart_s = 0.0

    def step(self, looks: Looks) -> None:
        """Go on until a step has been made."""
        steps, end = self.steps, time.monotonic() + STEP_S
        while self.steps == steps:
            if time.monotonic() > end:
                raise RuntimeError(f"no step within {STEP_S} s: the process of the other roles is late or gone")
            if looks.due():
                self.look(looks)
            looks.wait(TICK_S)

    def look(self, looks: Looks) -> None:
        self.looked += 1
        if len(self.fates) != len(self.scanner.fates):  # the table has grown
            self.scanner.read_from(self.fates.view())
        begun = time.thread_time()
        view, held = self.scanner.scan(self.claims.look(TrainedSet())), self.claims.held
        actions = self.plan.decide(view, list(held), step=self.steps, now=0.0)
        worth = min(MICRO_BATCH, self.plan.missing(view, len(held), 0.0))
        looks.within(LOOK_MOST_S, worth, time.thread_time() - begun)
        with self.apart():
            for action in actions:
                match action:
                    case SetAside():
                        self.claims.drop(view.slots_of(action.draw), action.draw, action.fate)
                    case Claim():
                        if not isinstance(self.claims.take(view, action.draws), list):
                            raise RuntimeError("nobody else claims")
                    case Fire():
                        self.claims.end([held[draw] for draw in action.draws])
                        self.steps += 1
                        looks.again()

    @contextmanager
    def apart(self) -> Iterator[None]:
        begun = time.process_time()
        yield
        self.apart_s += time.process_time() - begun


def measure(log: Log, learner: Learner, way: str, steps: int) -> None:
    looks = WAYS[way](learner.ring)
    learner.step(looks)  # what another way has left
    learner.looked, learner.apart_s = 0, 0.0
    cpu, begun = time.process_time(), time.monotonic()
    for _ in range(steps):
        learner.step(looks)
    spent = time.process_time() - cpu - learner.apart_s
    log.loads.append(os.getloadavg()[0])
    log.say(f"{way}, CPU of looks", spent / steps, "s a step")
    log.say(f"{way}, looks", learner.looked / steps, "a step")
    log.say(f"{way}, step", (time.monotonic() - begun) / steps, "s")
    log.say(f"{way}, a look", 1000 * spent / max(1, learner.looked), "ms")
    log.say("bar", BAR_S, "s a step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--groups", type=int, default=338, help="groups of eight in a step")
    parser.add_argument("--rate", type=float, default=1000.0, help="rewards a second")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    log = Log()
    with tempfile.TemporaryDirectory(prefix="busrl.bench.", dir="/dev/shm") as folder:
        ring = Ring.create(f"{folder}/ring", slots=options.slots, slot_bytes=4096, processes=8, uuid=bytes(16))
        fates = Fates(f"{folder}/fates", create=True, capacity=1 << 24)
        ring.bind_fates(fates)
        ring.register("bench", "learner")
        others = multiprocessing.get_context("fork").Process(target=produce, args=(folder, options.rate))
        others.start()
        try:
            learner = Learner(ring, fates, options.groups)
            for _ in range(options.slots // (GROUP * options.groups) + 1):  # what was rewarded before the first look
                learner.step(Looks(ring))
            for _ in range(options.rounds):
                for way in WAYS:
                    measure(log, learner, way, options.steps)
        finally:
            others.kill()
            others.join()
            ring.close()
    bars = [Bar("CPU of looks a step, paced", "paced, CPU of looks", "bar", 1.0)]
    result = written(log, bars, "looks", options.out, slots=options.slots, rewards=GROUP * options.groups,
                     rate=options.rate, steps=options.steps, rounds=options.rounds)
    for name, median in result["medians"].items():
        print(f"{median['value']:>10.3f} {median['unit']:<10} {name}")
    return 0
