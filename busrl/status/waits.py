"""Chains of waits, from the learner along every wait to the one that nobody else can end; and when that is a stall.

Pure: decides from a `RunState` (process table, slots by state and owner, header words, texts that processes declare)
and clock values. Knows nothing of files, sockets or of how a chain is shown.

- A chain begins with the learner, since a run that trains is not stuck, whatever else waits. It ends at a root:
  something that is not another process's work.
- Each process stands in it once, so it ends, and the same picture gives the same chain.
- Of several that could be waited for, one that is in trouble (stopped, dead, silent, without disk space) is named
  first, then the one that has waited longest.
- Long work that gets on is no stall, nor is a pause: time counts from the newest sign of progress then.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple

import msgspec

from busrl.states import CALLER_ROLES, PAUSE_STARTING, HeaderWord
from busrl.status.state import RECENT, Held, ProcessRecord, ProcessRow, RunState

WAITS = re.compile(r"waits: ([a-z_]+)(?:, group ([0-9]+))?")  # what learner and scheduler declare (`Shown.waits`)
QUIET_S: Final = 2.0  # no progress for longer than this is said
SILENT_S: Final = 5.0  # a worker that comes through the gateway, or a host, is told of every second
CHILD_IN: Final = "in "  # what a reward declares of a long call: in WHAT
TOGETHER: Final = "broadcast"  # the transport in which engines wait for each other
DISK: Final = "waiting for disk space"
ROLE_OF: Final = {"queued": "rollout", "generated": "reward"}  # who takes a slot that rests
LEARNERS: Final = {
    "admission": "waits for groups and none is under way",
    "groups": "waits for {missing}",
    "window": "waits for group {draw}, which younger ones may not pass",
    "round": "waits for the rest of its round",
    "staleness": "waits for group {draw}, which a step without it would make too old",
}
SCHEDULERS: Final = {
    "slots": "opens no group: no slot is free",
    "in_flight": "opens no group: as many are in flight as may be",
    "round": "opens no group before the round is trained",
    "staleness": "opens no group before group {draw} is trained: it is too old",
    "ahead": "opens no group: enough samples wait for an engine",
}


class Link(msgspec.Struct, frozen=True, rename={"waits_for": "for"}):
    """`process` waits `for` the process of the next link, or at the end for the root, in words. `because` continues a
    sentence that begins with the process."""

    process: str
    waits_for: str
    since_s: float
    because: str


def chain(run: RunState, now: float) -> list[Link]:
    """From symptom to root; empty where no run is running, or nothing is known of it."""
    return _Search(run, now).links() if _runs(run) else []


def said(links: Sequence[Link]) -> str:
    return " <- ".join([*(f"{one.process} {one.because}" for one in links), *(one.waits_for for one in links[-1:])])


# -- the search -------------------------------------------------------------------------------------------------------

class _Step(NamedTuple):
    """The wait of one process: `next`, a name, or without one the root."""

    because: str
    since_s: float = 0.0
    next: str = ""
    root: str = "its own work"


class _Search:
    def __init__(self, run: RunState, now: float) -> None:
        assert run.ring is not None
        self.run, self.now, self.ring, self.facts = run, now, run.ring, run.facts
        self.rows = {row.name: row for row in run.rows(now) if row.state != "dead"}
        self.names = sorted({*self.rows, *run.restarts})  # those of the table, and children that are not in it
        self.steps: dict[str, Callable[[ProcessRow], _Step]] = {
            "learner": self._learner, "scheduler": self._scheduler, "rollout": self._rollout, "reward": self._reward,
            "validator": self._validator, **dict.fromkeys(CALLER_ROLES, self._caller),
        }
        self.seen: set[str] = set()

    def links(self) -> list[Link]:
        if paused(self.run):
            since = self.run.since_step_s(self.now) or 0.0
            return [Link("scheduler", "`busrl resume`", since, "opens no group: the run is paused")]
        found: list[Link] = []
        # Where nothing is trained (on another host) it begins with what speaks with the run.
        name = next((name for name in ("learner", "relay") if name in self.names), "")
        while name:
            self.seen.add(name)
            step = self._of(name)
            if step.next in self.seen:
                step = step._replace(next="", root=f"{step.next}, which waits for it: a circle of waits")
            found.append(Link(name, step.next or step.root, round(max(0.0, step.since_s), 3), step.because))
            name = step.next
        return found

    def _of(self, name: str) -> _Step:
        if (trouble := self._trouble(name)) is not None:
            return trouble
        row = self.rows[name]
        step = self.steps.get(row.role, self._other)(row)
        if row.late and not step.next:
            quiet = f"no progress for {row.progress_age_s:.0f} s, launch will start it again"
            return step._replace(because=f"{step.because}; {quiet}")
        return step

    def _trouble(self, name: str) -> _Step | None:
        """Find what keeps a process from doing anything at all; None if it can work."""
        row = self.rows.get(name)
        if row is None:
            latest = self.run.deaths.get(name)
            return _Step(f"is not there{f': {latest}' if latest else ''}", root="its start by launch")
        quiet = row.progress_age_s
        if row.stopped:
            how = f"is stopped (pid {row.pid}: SIGSTOP, a debugger or a frozen group){self._holding(name)}"
            return _Step(how, quiet, root=f"kill -CONT {row.pid}")
        if row.remote and quiet > SILENT_S:
            if "keeper" in self.names and self._trouble("keeper") is not None:
                return _Step("speaks with the run through the keeper", quiet, next="keeper")
            return _Step(f"is silent: nothing was heard of it for {quiet:.0f} s{self._holding(name)}", quiet,
                         root="its host, and the network to it")
        if row.activity == DISK:
            return _Step("has no disk space", row.activity_age_s, root="space on the disk (docs/operating.md)")
        if row.activity.startswith("waits for pid"):
            other = row.activity.removeprefix("waits for ")
            return _Step(f"may not work beside {other}, which does the same", row.activity_age_s, root=other)
        if row.state == "starting" and row.activity not in ("waits for its ranks", "first weights"):
            again = f" after {row.restarts} restarts" if row.restarts else ""
            return _Step(f"is starting{again}: {row.activity or 'starting'}", row.activity_age_s, root="its start")
        return None

    # -- each role ----------------------------------------------------------------------------------------------

    def _learner(self, row: ProcessRow) -> _Step:
        reason, draw = reason_of(row)
        if reason:
            found = self._holders(draw, validates=False)
            missing = _count(max(1, self.run.n_min - max(0, self.ring.groups_ready)), "more group")
            because = LEARNERS.get(reason, f"waits ({reason})").format(missing=missing, draw=draw)
            since = self.run.since_step_s(self.now)
            age = row.activity_age_s if since is None else since
            return _Step(because, age, next=found if reason != "admission" and found else "scheduler")
        if held_up := self._troubled("rank"):
            return _Step(f"computes with its ranks: {row.activity}", row.activity_age_s, next=held_up)
        if row.activity == "held by validation" and "validator" in self.names:
            version = self.run.version
            return _Step(f"publishes nothing while version {version} is held", row.activity_age_s, next="validator")
        if row.activity == "publish":
            taking = self._troubled("rollout") or self._behind()
            return _Step(f"publishes weights ({self.facts.transport})", row.activity_age_s, next=taking)
        return self._works(row)

    def _scheduler(self, row: ProcessRow) -> _Step:
        reason, draw = reason_of(row)
        if reason == "arrivals":
            return _Step("has opened every group that has arrived", row.activity_age_s, root="prompts (data.arrivals)")
        if not reason:
            return self._works(row)
        because = SCHEDULERS.get(reason, f"waits ({reason})").format(draw=draw)
        found = self._holders(draw, validates=False)
        if reason == "slots":
            states = sorted((count, name) for name, count in self.ring.occupancy.items() if count and name != "free")
            because += f" ({', '.join(f'{count} {name}' for count, name in reversed(states))})"
            found = found or self._largest()
        if not found and self.ring.words.get(HeaderWord.UNPUBLISHED_GROUPS, 0):
            found, because = "learner", f"{because}; those trained are not published"
        return _Step(because, row.activity_age_s, next=found)

    def _rollout(self, row: ProcessRow) -> _Step:
        newest = self.run.version
        behind, first = reason_of(row)[0] == "weights", row.activity == "first weights"
        if not behind and not first and row.activity != "new weights":
            return self._holds(row, "its engine", f"{row.tokens} tokens so far")
        because = "waits for its first weights" if first else f"takes version {newest} of the weights"
        if behind:
            because = f"takes no samples: it has version {row.version} of the weights, {newest} is published"
        # The learner sends, and a transfer to all is done when each has it.
        other = "learner" if self._trouble("learner") is not None else ""
        other = other or (self._troubled("rollout") if self.facts.transport == TOGETHER else "")
        if first and not other and "learner" not in self.seen:  # it has not published yet
            other = "learner"
        return _Step(because, row.activity_age_s, other, f"the transport of weights ({self.facts.transport})")

    def _reward(self, row: ProcessRow) -> _Step:
        what, age = row.activity.removeprefix(CHILD_IN), row.activity_age_s
        function = f"reward function {self.facts.reward_function or self.facts.reward_kind}"
        if not row.activity.startswith(CHILD_IN):
            return self._holds(row, function, f"{row.samples} judged so far")
        root = function if what == "the function" else f"{what} of the reward"
        return self._holds(row, root, f"no call returned for {age:.0f} s")

    def _validator(self, row: ProcessRow) -> _Step:
        if found := self._holders(-1, validates=True):
            return _Step("waits for the samples of its round", row.activity_age_s, next=found)
        return self._works(row)

    def _caller(self, row: ProcessRow) -> _Step:
        """Follow the open episode that is worst off: its call, or its own code."""
        own = self._own(row.name)
        if not own:
            return self._works(row)
        worst = max(own, key=lambda one: self._urgency(self._callee(one), one))
        if engine := self._callee(worst):
            how = "wait for an engine" if worst.call == "queued" else "are with one"
            return _Step(f"has {_count(worst.slots, 'episode')} whose calls {how}", worst.oldest_s, next=engine)
        code = f" ({self.facts.agent_function})" if self.facts.agent_function else ""
        stands = f", {row.activity}" if row.activity else ""
        what = f"has {_count(worst.slots, 'episode')} open with no call under way for {worst.oldest_s:.0f} s{stands}"
        return _Step(what, worst.oldest_s, root=f"the episodes' own code{code}, or its clients")

    def _other(self, row: ProcessRow) -> _Step:
        if row.role == "relay" and row.activity:
            return _Step(row.activity, row.activity_age_s, root="the run's own host, and the network to it")
        return self._holds(row, "its host" if row.remote else "its own work", "")

    # -- parts of the answers -----------------------------------------------------------------------------------

    def _works(self, row: ProcessRow, root: str = "its own work") -> _Step:
        doing = f": {row.activity}" if row.activity else ""
        quiet = f", no progress for {row.progress_age_s:.0f} s" if row.progress_age_s > QUIET_S else ""
        return _Step(f"works{doing}{quiet}", row.activity_age_s if row.activity else row.progress_age_s, root=root)

    def _holds(self, row: ProcessRow, root: str, more: str) -> _Step:
        own = self._own(row.name)
        if not own:
            return self._works(row, root)
        count, oldest = sum(one.slots for one in own), max(one.oldest_s for one in own)
        quiet = f"no progress for {row.progress_age_s:.0f} s" if row.progress_age_s > QUIET_S else ""
        text = ", ".join(filter(None, (f"has had {_count(count, 'sample')} for {oldest:.0f} s", more, quiet)))
        return _Step(f"{text}{self._full(count)}", oldest, root=root)

    def _holding(self, name: str) -> str:
        count = sum(one.slots for one in self._own(name))
        return f" and holds {_count(count, 'sample')}{self._full(count)}" if count else ""

    def _full(self, count: int) -> str:
        free = self.ring.occupancy.get("free", 0)
        return "" if free else f" (no slot is free, it has {count} of {self.ring.slots})"

    def _own(self, name: str) -> list[Held]:
        return [one for one in self.ring.held if one.owner == name]

    def _holders(self, draw: int, validates: bool) -> str:
        """Find who has what is waited for: of that group where it is known and under way, else of all."""
        under_way = [one for one in self.ring.held if one.validates == validates and self._holder(one)]
        named = [one for one in under_way if one.draw == draw >= 0]
        found = ((self._holder(one), one) for one in named or under_way)
        return max(found, key=lambda one: self._urgency(*one), default=("", None))[0]

    def _largest(self) -> str:
        count = Counter[str]()
        for one in self.ring.held:
            count[self._holder(one) or "learner"] += one.slots
        return max(sorted(count), key=lambda name: count[name], default="")

    def _holder(self, one: Held) -> str:
        """Find who has to do something about a slot; "" where that is the learner or the validator."""
        if one.owner:
            return one.owner if one.state != "training" else ""
        role = ROLE_OF.get(one.state)
        return self._taker(role, one.validates) if role else ""

    def _taker(self, role: str, validates: bool) -> str:
        """Find who would take what rests: one that can, best one that has such samples, or else one that cannot.
        Episodes make samples where there are such roles, and judge them where no reward process does."""
        callers = [name for name in self.names if _role(name) in CALLER_ROLES]
        own = [name for name in self.names if _role(name) == role]
        if callers and (role == "rollout" or not own):
            own = callers
        able = [name for name in own if self._trouble(name) is None]

        def oldest(name: str) -> float:
            return max((one.oldest_s for one in self._own(name) if one.validates == validates), default=-1.0)

        return max(able or own, key=oldest, default="")

    def _callee(self, one: Held) -> str:
        """Find the engine that an episode's call waits for."""
        if one.call != "queued":
            return one.call
        engines = [name for name in self.names if _role(name) == "rollout"]
        able = [name for name in engines if self._trouble(name) is None]
        return next(iter(able or engines), "")

    def _urgency(self, name: str, held: Held) -> tuple[bool, float, str, str, str]:
        return bool(name) and self._trouble(name) is not None, held.oldest_s, name, held.state, held.call

    def _troubled(self, role: str) -> str:
        """The first of a role that cannot work."""
        return next((name for name in self.names if _role(name) == role and self._trouble(name) is not None), "")

    def _behind(self) -> str:
        """An engine that takes weights, or the one with the oldest."""
        rows = [row for row in self.rows.values() if row.role == "rollout"]
        taking = [row.name for row in rows if row.activity == "new weights"]
        return min(taking, default=min(rows, key=lambda row: (row.version, row.name)).name if rows else "")


def _role(name: str) -> str:
    return name.partition("/")[0]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def reason_of(row: ProcessRecord) -> tuple[str, int]:
    """The reason to wait that a process declares, and the group that it waits for; "" and -1 where it declares none."""
    found = WAITS.fullmatch(row.activity)
    return (found[1], int(found[2] or -1)) if found else ("", -1)


def _runs(run: RunState) -> bool:
    """Also in a replay, which has no other state."""
    ring = run.ring
    return ring is not None and not ring.words.get(HeaderWord.RUN_STATE, 0) and run.state in ("running", "replay")


def paused(run: RunState) -> bool:
    """Check whether somebody has paused the run; a learner that is not ready yet is no pause."""
    return run.ring is not None and bool(run.ring.words.get(HeaderWord.GENERATION_PAUSE, 0) & ~PAUSE_STARTING)


# -- stalls -----------------------------------------------------------------------------------------------------------

FIRST: Final = 5  # times the least time until a first step is missed: it may compile and warm up


def limit_s(run: RunState, least_s: float) -> float:
    """For how long nothing may be trained before that is a stall; inf: never."""
    newest = run.steps.course(lambda one: one.seconds)[-RECENT:]
    known = [seconds for seconds in newest if 0 < seconds < math.inf]
    if not run.facts.stall_steps:
        return math.inf
    return max(least_s, run.facts.stall_steps * median(known)) if known else FIRST * least_s


def stalled_s(run: RunState, now: float) -> float | None:
    """For how long nothing was trained, if that is a stall."""
    since = run.since_step_s(now)
    counted = None if since is None else _counted(run, since)
    return counted if counted is not None and counted > limit_s(run, run.facts.stall_s) else None


def _counted(run: RunState, quiet_s: float) -> float:
    """Seconds without a step as far as they count: not in a pause, nor while the learner starts or gets on with work
    that it declares."""
    processes = run.ring.processes if run.ring is not None else ()
    learner = next((one for one in processes if one.name == "learner" and one.state != "dead"), None)
    if not _runs(run) or paused(run) or (learner is not None and learner.state == "starting"):
        return 0.0
    if learner is not None and learner.deadline_s > 0 and learner.activity != DISK:
        return min(quiet_s, learner.progress_age_s)
    return quiet_s


class StallAlarm:
    """Counts by the clock of whoever looks. `quiet_s`: seconds without a step, as far as they count."""

    def __init__(self) -> None:
        self.quiet_s, self._step, self._told = 0.0, -1, False

    def look(self, run: RunState, passed_s: float) -> bool:
        """Check whether this is a stall that was not told of: once until a step is made."""
        if run.at_step != self._step:
            self.quiet_s, self._step, self._told = 0.0, run.at_step, False
        self.quiet_s = _counted(run, self.quiet_s + passed_s)
        due = self.quiet_s > limit_s(run, run.facts.stall_s) and not self._told
        self._told = self._told or due
        return due
