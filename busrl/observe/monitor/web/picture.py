"""Data of the page of `busrl monitor --web`: all that `--once --json` has, and what drawings need besides.

Reads a `Watcher` and keeps a short history of it. Knows nothing of HTTP, and of how anything is drawn.

- Memory is bounded for every run: processes, spans of time, steps and samples have limits.
- The page draws in red what should move and does not: a process that is late or dead, a state of slots whose takers are
  all gone, and in a stall the processes in the chain of waits. A process that has nothing to do is none of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from busrl.capabilities import CALLER_ROLES, plugs
from busrl.observe.monitor import phrases
from busrl.observe.monitor.sources import Watcher, tag_of, watched
from busrl.paths import RunPaths
from busrl.status import words
from busrl.status.state import OVER, ProcessRow, Rate, RunState

KEPT_S: Final = 300.0
GAP_S: Final = 3.0  # between two looks; of a longer time nothing is known
MOST_LINES, MOST_SPANS = 64, 512
MOVED_S: Final = 5.0
TAKERS: Final = {"queued": ("rollout", *CALLER_ROLES), "generated": ("reward",), "rewarded": ("learner",)}
COLUMNS: Final = (
    "step", "time", "reward", "reward_trained", "length", "tokens_per_s", "lr", "grad_norm", "flat_share", "cut_share",
    "kl", "k3", "entropy", "ess", "age_mean", "age_max", "mismatch", "n_min", "control_n_min",
)
PART: Final = "part/"  # before the name of a part of the reward, in a column's name
MOST_PARTS: Final = 8
OVERLAP: Final = 16  # steps that are sent once more: the file may have one after the bus had the next


# -- history ----------------------------------------------------------------------------------------------------------

@dataclass
class Span:
    """A time in which a process did one thing. `what` is that thing, how busy it was in quarters (None if not known),
    and whether it was late or dead."""

    begin: float
    end: float
    what: tuple[str, int | None, bool]


@dataclass
class History:
    """The last minutes: what each process did, and how fast slots came into each state. `add` once a second."""

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
        """Spans of each process, in seconds ago, the newest last."""
        return [
            {"process": name, "spans": [
                [round(now - span.begin, 1), round(now - span.end, 1), *span.what] for span in spans
            ]}
            for name, spans in self.lines.items()
        ]


def _extend(spans: deque[Span], seen: Span) -> None:
    """Add what is seen now to the spans of a process: it began at the look before, or goes on since."""
    last = spans[-1] if spans else None
    if last is not None and seen.end - last.end < GAP_S:
        if last.what == seen.what:
            last.end = seen.end
            return
        seen.begin = last.end
    spans.append(seen)


# -- the picture ------------------------------------------------------------------------------------------------------

def blocked(rows: Sequence[ProcessRow], slots: Mapping[str, int], waits: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Reasons, by process or role, why something does not move although it should; `waits` are those of a stall."""
    reasons = {row.name: f"no progress for {words.age(row.progress_age_s)}" for row in rows if row.late}
    reasons |= {row.name: "dead" for row in rows if row.state == "dead"}
    living = {row.role for row in rows if row.state != "dead"}
    for state, roles in TAKERS.items():
        if slots.get(state) and not living.intersection(roles):
            reasons[roles[0]] = f"{slots[state]:,} slots are {state}, and no {roles[0]} lives"
    for wait in waits:
        text = f"waits for {wait.get('for')}, {words.age(wait.get('since_s') or 0.0)}: {wait.get('because')}"
        reasons.setdefault(str(wait.get("process")), words.safe(text))
    return reasons


def picture(watcher: Watcher, target: RunPaths | str, history: History, now: float, wall: float) -> dict[str, Any]:
    """The run now: the keys of `--once --json`, and under `web` what only a drawing needs."""
    run, data = watcher.run, watched(watcher, target)
    data.pop("sample")  # samples are events of their own
    rows, over = run.rows(now), run.state in OVER
    flows = {name: [round(flow.rate.per_s(), 2), round(flow.byte_rate.per_s(), 1), flow.count, flow.bytes]
             for name, flow in run.traffic.by_sender.items()}
    stall = data.get("waits") if data.get("stalled_s") else None
    several = _models(target, data.get("models") or {})
    return {**data, "web": {
        "headline": phrases.headline(run, wall), "progress": words.progress(run, now), "over": over, "ended": run.ended,
        "words": {name: phrase for name, phrase in words.labelled(run, now).items() if name != "sample"}
        | phrases.said_of_parts(run),
        "bus": phrases.bus(run, now), "speed": words.speed(run.speed(now)),
        "lead": next(iter(several.get("models", {})), None), "damage": run.damage, "rows": [_row(row) for row in rows],
        "blocked": {} if over else blocked(rows, run.ring.occupancy if run.ring else {}, stall or ()),
        "senders": flows, "moved": history.per_s(), "timeline": history.timeline(now), "kept_s": KEPT_S,
        "ring": _ring(run), "max_staleness": run.facts.max_staleness if run.facts.mode == "batch-async" else None,
        **several,
    }}


def _models(target: RunPaths | str, beside: Mapping[str, Any]) -> dict[str, Any]:
    """The models of the run, by their tags, the lead first, and which of them this is; {} of a run of one model.
    `beside`: those beside the lead, if they are known."""
    if not isinstance(target, RunPaths):
        return {}
    models = {tag: said for look in plugs("models_now") for tag, said in look(target.home, beside).items()}
    return {"models": models, "model": tag_of(target)} if models else {}


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
    """The steps for a page whose newest is `step`: the later ones, and some before it; and all rounds of validation
    with a result: set, step, mean reward, time."""
    steps = run.steps.after(step - OVERLAP)
    parts = sorted({name for record in steps for name in record.reward_parts})[:MOST_PARTS]
    rows = [
        [*(getattr(record, name) for name in COLUMNS), *(record.reward_parts.get(name) for name in parts)]
        for record in steps
    ]
    rounds = [[record.set, record.round, record.mean, record.time] for record in run.rounds()]
    return {"columns": [*COLUMNS, *(PART + words.safe(name) for name in parts)], "rows": rows, "rounds": rounds}
