"""Data of the page of `busrl monitor --web`: all that `--once --json` has, and what drawings need too.

Reads a `Watcher` and keeps a short history of it. Knows nothing of HTTP, or of how anything is drawn.

- Memory is bounded, whatever the run is: processes, spans of time, steps and samples have limits.
- Red is what does not move although it should: a process that is late or dead, a state whose takers are all gone, and
  in a stall whoever stands in the chain of waits. A process that has nothing to do is none of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from busrl.observe.monitor import phrases
from busrl.observe.monitor.sources import Watcher, watched
from busrl.paths import RunPaths
from busrl.status import words
from busrl.status.state import OVER, ProcessRow, Rate, RunState

KEPT_S: Final = 300.0
GAP_S: Final = 3.0  # between two looks; more than that and nobody knows what was in between
MOST_LINES, MOST_SPANS = 64, 512
MOVED_S: Final = 5.0
TAKERS: Final = {"queued": ("rollout", "agent", "serve", "atropos"), "generated": ("reward",), "rewarded": ("learner",)}
COLUMNS: Final = (
    "step", "time", "reward", "reward_trained", "length", "tokens_per_s", "lr", "grad_norm", "flat_share", "cut_share",
    "kl", "k3", "entropy", "ess", "age_mean", "age_max", "mismatch", "n_min", "control_n_min",
)
PART: Final = "part/"  # before the name of a part of the reward, in a column's name
MOST_PARTS: Final = 8
OVERLAP: Final = 16  # steps that are told once more: the file may tell of one after the bus told of the next


# -- what was seen ----------------------------------------------------------------------------------------------------

@dataclass
class Span:
    """A process did one thing from `begin` to `end`: what, how busy in quarters (None where it does not say), and
    whether it was late or dead."""

    begin: float
    end: float
    what: tuple[str, int | None, bool]


@dataclass
class History:
    """The last minutes: what each process did, and how fast slots came into each state. Fed once a second."""

    moved: dict[str, Rate] = field(default_factory=dict)
    lines: dict[str, deque[Span]] = field(default_factory=dict)

    def add(self, run: RunState, now: float) -> None:
        if run.ring is None:
            self.moved.clear()
        elif run.pace > 0:
            for state, count in run.ring.moved.items():
                self.moved.setdefault(state, Rate(MOVED_S)).add(count, now * run.pace)
        for row in run.rows(now) if run.state not in OVER else ():
            if row.name in self.lines or len(self.lines) < MOST_LINES:
                busy = None if row.busy is None else round(row.busy * 4)
                what = words.doing(row), busy, row.late or row.state == "dead"
                _extend(self.lines.setdefault(row.name, deque(maxlen=MOST_SPANS)), Span(now, now, what))
        for name, spans in list(self.lines.items()):
            while spans and spans[0].end < now - KEPT_S:
                spans.popleft()
            if not spans:
                del self.lines[name]

    def per_s(self) -> dict[str, float]:
        return {state: rate.per_s() for state, rate in self.moved.items() if rate.known}

    def timeline(self, now: float) -> list[dict[str, Any]]:
        """By process: spans as seconds ago, newest last."""
        return [
            {"process": name, "spans": [
                [round(now - one.begin, 1), round(now - one.end, 1), *one.what] for one in spans
            ]}
            for name, spans in self.lines.items()
        ]


def _extend(spans: deque[Span], seen: Span) -> None:
    """Extend each course: what is seen now began when the look before it was made."""
    last = spans[-1] if spans else None
    if last is not None and seen.end - last.end < GAP_S:
        if last.what == seen.what:
            last.end = seen.end
            return
        seen.begin = last.end
    spans.append(seen)


# -- what is shown ----------------------------------------------------------------------------------------------------

def blocked(rows: Sequence[ProcessRow], slots: Mapping[str, int], waits: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Name what does not move although it should, with the reason, by process or role; `waits`: those of a stall."""
    found = {row.name: f"no progress for {words.age(row.progress_age_s)}" for row in rows if row.late}
    found |= {row.name: "dead" for row in rows if row.state == "dead"}
    living = {row.role for row in rows if row.state != "dead"}
    for state, roles in TAKERS.items():
        if slots.get(state) and not living.intersection(roles):
            found[roles[0]] = f"{slots[state]:,} slots are {state}, and no {roles[0]} lives"
    for wait in waits:
        said = f"waits for {wait.get('for')}, {words.age(wait.get('since_s') or 0.0)}: {wait.get('because')}"
        found.setdefault(str(wait.get("process")), words.safe(said))
    return found


def picture(watcher: Watcher, target: RunPaths | str, history: History, now: float, wall: float) -> dict[str, Any]:
    """The run now: the keys of `--once --json`, and under `web` what only a drawing needs."""
    run, told = watcher.run, watched(watcher, target)
    told.pop("sample")  # the samples are told on their own
    rows, over = run.rows(now), run.state in OVER
    flows = {name: [round(one.rate.per_s(), 2), round(one.byte_rate.per_s(), 1), one.count, one.bytes]
             for name, one in run.traffic.by_sender.items()}
    stall = told.get("waits") if told.get("stalled_s") else None
    return {**told, "web": {
        "headline": phrases.headline(run, wall), "progress": words.progress(run, now), "over": over, "ended": run.ended,
        "words": {name: said for name, said in words.labelled(run, now).items() if name != "sample"},
        "bus": phrases.bus(run, now), "speed": words.speed(run.speed(now)),
        "damage": run.damage, "rows": [_row(row) for row in rows],
        "blocked": {} if over else blocked(rows, run.ring.occupancy if run.ring else {}, stall or ()),
        "senders": flows, "moved": history.per_s(), "timeline": history.timeline(now), "kept_s": KEPT_S,
        "ring": _ring(run), "max_staleness": run.facts.max_staleness if run.facts.mode == "batch-async" else None,
    }}


def _row(row: ProcessRow) -> dict[str, Any]:
    return {
        "name": row.name, "role": row.role, "pid": row.pid, "state": row.state, "doing": words.doing(row),
        "busy": row.busy, "age": round(row.progress_age_s, 2), "version": row.version, "behind": row.behind,
        "samples": row.samples, "late": row.late, "restarts": row.restarts,
    }


def _ring(run: RunState) -> dict[str, Any] | None:
    if run.ring is None:
        return None
    return {"slots": run.ring.slots, "states": [
        [name, count, *(round(age, 2) for age in run.ring.ages.get(name, ()))] for name, count in words.occupancy(run)
    ], "versions": run.ring.versions}


def steps_after(run: RunState, step: int) -> dict[str, Any]:
    """The steps that a page does not have yet, whose newest is `step`, and some before it; and all rounds of validation
    that judged anything: set, step, mean reward, time."""
    steps = run.steps.after(step - OVERLAP)
    parts = sorted({name for one in steps for name in one.reward_parts})[:MOST_PARTS]
    rows = [
        [*(getattr(one, name) for name in COLUMNS), *(one.reward_parts.get(name) for name in parts)] for one in steps
    ]
    rounds = [[one.set, one.round, one.mean, one.time] for one in run.rounds()]
    return {"columns": [*COLUMNS, *(PART + words.safe(name) for name in parts)], "rows": rows, "rounds": rounds}
