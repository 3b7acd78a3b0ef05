"""Dispatch decisions per second and bytes per waiting prompt, for each policy, in seconds of CPU of one core.

    python -m benchmarks dispatch [--waiting N] [--seconds S] [--rounds N] [--only POLICY] [--against TREE]

A decision is what the scheduler does for one group: find which draws are missing, offer their prompts, take the next,
give it a slot priority, and, a look at a time, tell the policy what is open and what finished. A look opens `LOOK`
groups. Predictions come from a table, since predictors are measured apart; `rules` is the same with that predictor, and
`scans` adds what stands before the policy at each look: a view of a ring of 4,096 slots and of the fates of all draws;
putting the samples into the pretended ring is not counted. Measured after as many groups were opened as wait: by then
the draws that wait have holes up to twice the horizon.
`--against` takes the code of another checkout in turn, each round in a process of its own.
Prompts are made beforehand; their text is not in the bytes, everything else of a waiting prompt is.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import RESULTS, ROOT
from benchmarks.common import sides
from benchmarks.common.judge import Bar, Log, written
from busrl.predict.lengths import RulesPredictor
from busrl.scheduling.dispatch import Policy, make_policy
from busrl.scheduling.groups import GroupScanner
from busrl.scheduling.predictor import Candidate, Predictor
from busrl.states import uid_of

LOOK = 64  # groups opened per look
MOST_DECISIONS = 1_000_000  # of a round: the fates of a quick machine's have room
GROUP, SLOTS, ROWS = 8, 4096, 1024
LINE = np.dtype([("state", "u1"), ("segs", "u1"), ("cls", "u4"), ("uid", "u8"), ("admission", "u8"), ("step", "u4"),
                 ("reward", "f8")])
WAYS = {"plain": (False, False), "rules": (False, True), "scans": (True, False)}  # scanned, by rules
AIM = 20_000  # decisions per second of CPU
QUEUED, GENERATING = 2, 3
WORDS = ["prove", "count", "sort", "why", "the", "number", "of", "primes", "below", "seven", "and", "explain"]


class Stream:
    """Prompts of 8 to 40 words."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.prompts = [" ".join(rng.choice(WORDS, size)) for size in rng.integers(8, 40, 4096)]

    def candidates(self, draws: list[int]) -> list[Candidate]:
        return [Candidate(draw, self.prompts[draw % 4096], 4096, "sums") for draw in draws]


class Table(Predictor):
    """Predictions at no cost."""

    name = "table"

    def __init__(self) -> None:
        self.tokens = np.random.default_rng(1).lognormal(5, 1, 4096)

    def predict(self, candidates: Sequence[Candidate]) -> np.ndarray:
        return self.tokens[np.fromiter((c.draw for c in candidates), np.int64, len(candidates)) % 4096]


class Loop:
    """Keeps `waiting` prompts in a policy while it dispatches. With `scanned` the draws come from a real scan."""

    def __init__(self, name: str, waiting: int, scanned: bool, rules: bool) -> None:
        predictor = RulesPredictor() if rules else Table()
        self.policy: Policy = make_policy(name, waiting, predictor, window=64, group_size=GROUP)
        self.stream, self.waiting, self.scanned = Stream(), waiting, scanned
        self.unopened = np.arange(waiting)
        self.fresh = waiting
        self.open: list[int] = []
        self.apart_s = 0.0
        self.lines = np.zeros(SLOTS, LINE)
        self.fates = np.zeros(2 * GROUP * (waiting + MOST_DECISIONS), np.uint8)
        self.scanner = GroupScanner(self.fates, GROUP, horizon=waiting)
        self.supply()

    def supply(self) -> None:
        if self.scanned:
            view = self.scanner.scan(self.lines)
            self.unopened = view.unopened(self.waiting + LOOK)
        self.policy.offer(self.stream.candidates(self.policy.missing(self.unopened)))

    def look(self) -> int:
        """Take one look of the scheduler; return the decisions it made."""
        done, self.open = self.open[:-LOOK], self.open[-LOOK:]
        if self.policy.learns:
            # What was opened longest ago has finished, with lengths that have something to do with the prompt's.
            self.policy.finished(done, [16 + draw % 997 for draw in done])
            self.policy.look(self.open, [GROUP] * len(self.open), ROWS)
        chosen = []
        for at in range(LOOK):
            candidate = self.policy.next()
            assert candidate is not None
            self.policy.priority(candidate.draw, at)
            chosen.append(candidate.draw)
        self.open += chosen
        self.replace(chosen)
        self.supply()
        return LOOK

    def replace(self, chosen: list[int]) -> None:
        if self.scanned:
            begun = time.process_time()
            self.dispatch(chosen)
            self.apart_s += time.process_time() - begun
            return
        gone = np.searchsorted(self.unopened, np.sort(chosen))
        fresh = np.arange(self.fresh, self.fresh + len(chosen))
        self.unopened = np.concatenate((np.delete(self.unopened, gone), fresh))
        self.fresh += len(chosen)

    def dispatch(self, chosen: list[int]) -> None:
        """The first members go into slots that are used round and round; what leaves a slot was trained."""
        for draw in chosen:
            for member in range(GROUP):
                uid = uid_of(draw, 0, member, GROUP)
                slot = (uid // 2) % SLOTS
                before = int(self.lines["uid"][slot])
                if self.lines["state"][slot]:
                    self.fates[before] = ord("T")
                self.lines[slot] = (GENERATING, 0, 0, uid, draw, 0, 0.0)
                self.fates[uid] = ord("D")


def per_second(loop: Loop, seconds: float) -> float:
    """Decisions per second of CPU time, without what the ring would do."""
    begun, done, loop.apart_s = time.process_time(), 0, 0.0
    while (passed := time.process_time() - begun - loop.apart_s) < seconds:
        done += loop.look()
    return done / passed


def bytes_per_prompt(name: str, waiting: int) -> float:
    """Memory that a policy and its candidates hold, per waiting prompt, without the text."""
    stream = Stream()
    gc.collect()
    tracemalloc.start()
    policy = make_policy(name, waiting, Table(), window=64, group_size=GROUP)
    for start in range(0, waiting, 256):
        policy.offer(stream.candidates(list(range(start, min(waiting, start + 256)))))
    assert policy.next() is not None  # everything has come within the horizon now
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / waiting


def round_of(name: str, way: str, waiting: int, seconds: float) -> float:
    loop = Loop(name, waiting, *WAYS[way])
    for _ in range(waiting // LOOK):
        loop.look()
    return per_second(loop, seconds)


def child(tree: Path, name: str, way: str, waiting: int, seconds: float) -> float:
    """A round with the busrl of another checkout, or of this one, in a process of its own."""
    path = f"import sys, benchmarks; sys.path.insert(0, {str(tree)!r}); "
    code = f"from benchmarks.dispatch import round_of; print(round_of({name!r}, {way!r}, {waiting}, {seconds}))"
    command = [sys.executable, "-c", path + code]
    return float(sides.ran(command, check=True, cwd=ROOT).output)


def measure(log: Log, name: str, options: argparse.Namespace) -> None:
    waiting, seconds = options.waiting, options.seconds
    log.say(f"{name}, bytes", bytes_per_prompt(name, waiting), "bytes a prompt")
    for _ in range(options.rounds):
        for way in WAYS:
            log.loads.append(os.getloadavg()[0])
            for tree, label in ((ROOT, ""), (options.against, ", other tree")):
                if tree:
                    log.say(f"{name}, {way}{label}", child(tree, name, way, waiting, seconds), "decisions/s")


def main() -> int:
    from busrl.topology.kinds import POLICIES  # here, as an older checkout of `--against` has none

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--waiting", type=int, default=100_000, help="prompts that wait, which is also the horizon")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=POLICIES, help="one policy alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--against", type=Path, help="another checkout, with its compiled modules")
    options = parser.parse_args()
    log, policies = Log(), (options.only,) if options.only else tuple(POLICIES)
    print(f"{options.waiting} prompts wait")
    for name in policies:
        measure(log, name, options)
    for _ in range(options.rounds):
        log.say("aim", AIM, "decisions/s")
    bars = [Bar(f"{name} with scans", f"{name}, scans", "aim", 1.0, at_most=False) for name in policies]
    result = written(log, bars, "dispatch", options.out, waiting=options.waiting, rounds=options.rounds)
    for name, median in result["medians"].items():
        print(f"{median['value']:>10,.0f} {median['unit']:<15} {name}")
    return 0
