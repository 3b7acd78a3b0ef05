"""Chains of waits, from the learner to the cause that no other process can end; and whether a run is stalled.

Pure: decides from a `RunState` (process table, slots by state and owner, header words, texts that processes declare)
and clock values. Knows nothing of files, sockets or of how a chain is shown.

- A chain begins with the learner, since a run that trains is not stuck, whatever else waits. It ends at a root:
  something that is not another process's work.
- Each process stands in a chain once, so every chain ends. The same state gives the same chain.
- Where a process waits for several, the chain follows one in trouble (stopped, dead, silent, without disk space), else
  the one that has waited longest.
- Long work with progress is no stall, and neither is a pause: time counts from the newest sign of progress.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple

import msgspec

from busrl.capabilities import CALLER_ROLES
from busrl.states import PAUSE_STARTING, HeaderWord
from busrl.status.state import RECENT, Held, ProcessRecord, ProcessRow, RunState

# What learner and scheduler declare (`Shown.waits`); a scheduler also of which other model.
WAITS = re.compile(r"waits: ([a-z_]+(?: \([a-z0-9-]+\))?)(?:, group ([0-9]+))?")
QUIET_S: Final = 2.0  # time without progress is mentioned if it is longer
SILENT_S: Final = 5.0  # of a remote worker or a host, whose entry is renewed every second
CHILD_IN: Final = "in "  # the beginning of what a reward declares during a long call: in WHAT
TOGETHER: Final = "broadcast"  # the transport in which engines wait for each other
DISK: Final = "waiting for disk space"
ROLE_OF: Final = {"queued": "rollout", "generated": "reward"}  # the role that claims a slot without an owner
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
    "starting": "opens no group before every learner is there",
    "fates": "opens no group: a table of fates is damaged",
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
    """The chain from symptom to root; [] if the run does not run, or its state is unknown."""
    return _Search(run, now).links() if _runs(run) else []


def sentence_of(links: Sequence[Link]) -> str:
    """A chain in words, from symptom to root; "" for an empty one."""
    waits = [f"{link.process} {link.because}" for link in links]
    return " <- ".join([*waits, *(link.waits_for for link in links[-1:])])


# -- the search -------------------------------------------------------------------------------------------------------

class _Step(NamedTuple):
    """The wait of a process for the process `next`, or without one for `root`."""

    because: str
    since_s: float = 0.0
    next: str = ""
    root: str = "its own work"


class _Search:
    def __init__(self, run: RunState, now: float) -> None:
        assert run.ring is not None
        self.run, self.now, self.ring, self.facts = run, now, run.ring, run.facts
        self.rows = {row.name: row for row in run.rows(now) if row.state != "dead"}
        beside = [(tag, row) for tag, rows in run.rows_beside().items() for row in rows if row.state != "dead"]
        self.there = {(tag, row.name) for tag, row in beside}  # a process of several models is there for each
        self.tags = {row.name: tag for tag, row in reversed(beside) if row.name not in self.rows}  # of others alone
        self.rows = {row.name: row for _, row in reversed(beside)} | self.rows
        self.names = sorted({*self.rows, *run.restarts})  # those of the table, and children that are not in it
        mine = (name for name in self.names if _role(name) == "learner" and name not in self.tags)
        # Beside the lead it may be one that several models share, with another's name.
        self.learner = next(mine, f"learner/{run.facts.beside}") if run.facts.beside else "learner"
        self.steps: dict[str, Callable[[ProcessRow], _Step]] = {
            "learner": self._learner, "scheduler": self._scheduler, "rollout": self._rollout, "reward": self._reward,
            "validator": self._validator, **dict.fromkeys(CALLER_ROLES, self._caller),
        }
        self.seen: set[str] = set()

    def links(self) -> list[Link]:
        if paused(self.run):
            since = self.run.since_step_s(self.now) or 0.0
            return [Link("scheduler", "`busrl resume`", since, "opens no group: the run is paused")]
        links: list[Link] = []
        # On another host, which trains nothing, the chain begins with the link to the run.
        name = next((name for name in (self.learner, "relay") if name in self.names), "")
        while name:
            self.seen.add(name)
            step = self._of(name)
            if step.next in self.seen:
                step = step._replace(next="", root=f"{step.next}, which waits for it: a circle of waits")
            links.append(Link(name, step.next or step.root, round(max(0.0, step.since_s), 3), step.because))
            name = step.next
        return links

    def _of(self, name: str) -> _Step:
        if (trouble := self._trouble(name)) is not None:
            return trouble
        row = self.rows[name]
        step = self._works(row) if name in self.tags else self.steps.get(row.role, self._other)(row)
        if row.late and not step.next:
            quiet = f"no progress for {row.progress_age_s:.0f} s, launch will start it again"
            return step._replace(because=f"{step.because}; {quiet}")
        return step

    def _trouble(self, name: str) -> _Step | None:
        """The cause that keeps a process from all work; None if it can work."""
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
            return _Step("has no disk space", row.activity_age_s, root="space on the disk (docs/stuck.md)")
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
            holder = self._holders(draw, validates=False)
            missing = _count(max(1, self.run.n_min - max(0, self.ring.groups_ready)), "more group")
            because = LEARNERS.get(reason, f"waits ({reason})").format(missing=missing, draw=draw)
            since = self.run.since_step_s(self.now)
            age = row.activity_age_s if since is None else since
            return _Step(because, age, next=holder if reason != "admission" and holder else "scheduler")
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
        reason, _, tag = reason.removesuffix(")").partition(" (")  # of another model
        because = SCHEDULERS.get(reason, f"waits ({reason})").format(draw=draw)
        if tag:
            return _Step(f"{because} (of {tag})", row.activity_age_s, self._learner_of(tag), f"the learner of {tag}")
        holder = self._holders(draw, validates=False)
        if reason == "slots":
            states = sorted((count, name) for name, count in self.ring.occupancy.items() if count and name != "free")
            because += f" ({', '.join(f'{count} {name}' for count, name in reversed(states))})"
            holder = holder or self._largest()
        if not holder and self.ring.words.get(HeaderWord.UNPUBLISHED_GROUPS, 0):
            holder, because = self.learner, f"{because}; those trained are not published"
        return _Step(because, row.activity_age_s, next=holder)

    def _rollout(self, row: ProcessRow) -> _Step:
        newest = self.run.version
        behind, first = reason_of(row)[0] == "weights", row.activity == "first weights"
        if not behind and not first and row.activity != "new weights":
            return self._holds(row, "its engine", f"{row.tokens} tokens so far")
        because = "waits for its first weights" if first else f"takes version {newest} of the weights"
        if behind:
            because = f"takes no samples: it has version {row.version} of the weights, {newest} is published"
        # The learner sends; a transfer to all ends when every engine has it.
        other = self.learner if self._trouble(self.learner) is not None else ""
        other = other or (self._troubled("rollout") if self.facts.transport == TOGETHER else "")
        if first and not other and self.learner not in self.seen:  # the learner has not published yet
            other = self.learner
        return _Step(because, row.activity_age_s, other, f"the transport of weights ({self.facts.transport})")

    def _reward(self, row: ProcessRow) -> _Step:
        what, age = row.activity.removeprefix(CHILD_IN), row.activity_age_s
        function = f"reward function {self.facts.reward_function or self.facts.reward_kind}"
        if not row.activity.startswith(CHILD_IN):
            return self._holds(row, function, f"{row.samples} judged so far")
        root = function if what == "the function" else f"{what} of the reward"
        return self._holds(row, root, f"no call returned for {age:.0f} s")

    def _validator(self, row: ProcessRow) -> _Step:
        if holder := self._holders(-1, validates=True):
            return _Step("waits for the samples of its round", row.activity_age_s, next=holder)
        return self._works(row)

    def _caller(self, row: ProcessRow) -> _Step:
        """The wait of the most urgent open episode: for its call, or for its own code."""
        episodes = self._slots_of(row.name)
        if not episodes:
            return self._works(row)
        worst = max(episodes, key=lambda entry: self._urgency(self._callee(entry), entry))
        if engine := self._callee(worst):
            waiting, _, tag = worst.call.partition(" ")
            how = f"wait for an engine{f' of {tag}' if tag else ''}" if waiting == "queued" else "are with one"
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
        slots = self._slots_of(row.name)
        if not slots:
            return self._works(row, root)
        count, oldest = sum(entry.slots for entry in slots), max(entry.oldest_s for entry in slots)
        quiet = f"no progress for {row.progress_age_s:.0f} s" if row.progress_age_s > QUIET_S else ""
        text = ", ".join(filter(None, (f"has had {_count(count, 'sample')} for {oldest:.0f} s", more, quiet)))
        return _Step(f"{text}{self._full(count)}", oldest, root=root)

    def _holding(self, name: str) -> str:
        count = sum(entry.slots for entry in self._slots_of(name))
        return f" and holds {_count(count, 'sample')}{self._full(count)}" if count else ""

    def _full(self, count: int) -> str:
        free = self.ring.occupancy.get("free", 0)
        return "" if free else f" (no slot is free, it has {count} of {self.ring.slots})"

    def _slots_of(self, name: str) -> list[Held]:
        return [entry for entry in self.ring.held if entry.owner == name]

    def _holders(self, draw: int, validates: bool) -> str:
        """The process that holds the awaited samples: those of the group `draw` if any are under way, else all."""
        under_way = [entry for entry in self.ring.held if entry.validates == validates and self._holder(entry)]
        of_draw = [entry for entry in under_way if entry.draw == draw >= 0]
        candidates = ((self._holder(entry), entry) for entry in of_draw or under_way)
        return max(candidates, key=lambda pair: self._urgency(*pair), default=("", None))[0]

    def _largest(self) -> str:
        count = Counter[str]()
        for entry in self.ring.held:
            count[self._holder(entry) or self.learner] += entry.slots
        return max(sorted(count), key=lambda name: count[name], default="")

    def _holder(self, entry: Held) -> str:
        """The process that has to work on a slot next; "" where that is the learner or the validator."""
        if entry.owner:
            return entry.owner if entry.state != "training" else ""
        role = ROLE_OF.get(entry.state)
        return self._taker(role, entry.validates) if role else ""

    def _taker(self, role: str, validates: bool) -> str:
        """The process that would claim a slot without an owner: one that can work, if any can, with the oldest samples.
        Callers of the model stand in for rollouts, and for rewards where there is no reward process."""
        callers = [name for name in self.names if _role(name) in CALLER_ROLES]
        takers = [name for name in self.names if _role(name) == role]
        if callers and (role == "rollout" or not takers):
            takers = callers
        able = [name for name in takers if self._trouble(name) is None]

        def oldest(name: str) -> float:
            return max((entry.oldest_s for entry in self._slots_of(name) if entry.validates == validates), default=-1.0)

        return max(able or takers, key=oldest, default="")

    def _callee(self, entry: Held) -> str:
        """The engine that an episode's call waits for."""
        waiting, _, tag = entry.call.partition(" ")
        if waiting != "queued":
            return entry.call
        engines = [name for name in self.names if _role(name) == "rollout"
                   and ((tag, name) in self.there if tag else name not in self.tags)]
        able = [name for name in engines if self._trouble(name) is None]
        return next(iter(able or engines), "")

    def _urgency(self, name: str, entry: Held) -> tuple[bool, float, str, str, str]:
        return bool(name) and self._trouble(name) is not None, entry.oldest_s, name, entry.state, entry.call

    def _learner_of(self, tag: str) -> str:
        """The learner of another model; "" where it is not known, or is this one's too, with which the chain began."""
        shared = (name for name in self.names if _role(name) == "learner" and (tag, name) in self.there)
        name = next(shared, f"learner/{tag}")
        return name if name in self.names and name != self.learner else ""

    def _troubled(self, role: str) -> str:
        """The first process of a role that cannot work, of this model's."""
        mine = (name for name in self.names if _role(name) == role and name not in self.tags)
        return next((name for name in mine if self._trouble(name) is not None), "")

    def _behind(self) -> str:
        """An engine that takes new weights, else the one with the oldest."""
        rows = [row for row in self.rows.values() if row.role == "rollout" and row.name not in self.tags]
        taking = [row.name for row in rows if row.activity == "new weights"]
        return min(taking, default=min(rows, key=lambda row: (row.version, row.name)).name if rows else "")


def _role(name: str) -> str:
    return name.partition("/")[0]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def reason_of(row: ProcessRecord) -> tuple[str, int]:
    """The reason to wait that a process declares, and the group that it waits for; "" and -1 where it declares none."""
    match = WAITS.fullmatch(row.activity)
    return (match[1], int(match[2] or -1)) if match else ("", -1)


def _runs(run: RunState) -> bool:
    """True if the run trains, in a replay too."""
    ring = run.ring
    return ring is not None and not ring.words.get(HeaderWord.RUN_STATE, 0) and run.state in ("running", "replay")


def paused(run: RunState) -> bool:
    """Check whether somebody has paused the run; a learner that is not ready yet is no pause."""
    return run.ring is not None and bool(run.ring.words.get(HeaderWord.GENERATION_PAUSE, 0) & ~PAUSE_STARTING)


# -- stalls -----------------------------------------------------------------------------------------------------------

FIRST: Final = 5  # times the least limit, for the first step: it may compile and warm up


def limit_s(run: RunState, least_s: float) -> float:
    """The time without a step after which a run is stalled; inf: never."""
    newest = run.steps.course(lambda step: step.seconds)[-RECENT:]
    durations = [seconds for seconds in newest if 0 < seconds < math.inf]
    if not run.facts.stall_steps:
        return math.inf
    return max(least_s, run.facts.stall_steps * median(durations)) if durations else FIRST * least_s


def stalled_s(run: RunState, now: float) -> float | None:
    """The time without a step, if that is a stall."""
    since = run.since_step_s(now)
    counted = None if since is None else _counted(run, since)
    return counted if counted is not None and counted > limit_s(run, run.facts.stall_s) else None


def _counted(run: RunState, quiet_s: float) -> float:
    """The seconds without a step that count: none in a pause or while the learner starts; during work that it declares
    those without progress."""
    processes = run.ring.processes if run.ring is not None else ()
    learner = next((one for one in processes if _role(one.name) == "learner" and one.state != "dead"), None)
    if not _runs(run) or paused(run) or (learner is not None and learner.state == "starting"):
        return 0.0
    if learner is not None and learner.deadline_s > 0 and learner.activity != DISK:
        return min(quiet_s, learner.progress_age_s)
    return quiet_s


class StallAlarm:
    """Counts time by the caller's clock. `quiet_s`: the seconds without a step that count."""

    def __init__(self) -> None:
        self.quiet_s, self._step, self._alarmed = 0.0, -1, False

    def look(self, run: RunState, passed_s: float) -> bool:
        """True once in a stall, until a step is made."""
        if run.at_step != self._step:
            self.quiet_s, self._step, self._alarmed = 0.0, run.at_step, False
        self.quiet_s = _counted(run, self.quiet_s + passed_s)
        due = self.quiet_s > limit_s(run, run.facts.stall_s) and not self._alarmed
        self._alarmed = self._alarmed or due
        return due
