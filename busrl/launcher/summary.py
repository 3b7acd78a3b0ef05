"""Accounts of `launch`: progress, CPU and residence times, its event log and journal, and `summary.json` at the end.

Reads /proc; writes `errors.jsonl`, `supervisor.json` and launch's log. `run.py` passes it messages, the ring's records
and the children. Decides nothing.

- A process of busrl records its own warnings before it publishes them, so launch records only those of other programs.
  A sender is one of busrl by its place in the topology, or by its entry in the ring together with its title.
- Lines about messages of foreign programs are bounded: one each 5 s for each of `MOST_SENDERS`; the others are counted.
- CPU seconds of a process are those of all its lives. Its own children (the judges of a reward worker) count as its
  own.
- Shares of the training time run from the learner's first step of this start to the last look before the end, so that
  imports and model loading are left out.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import convert, to_builtins
from msgspec.structs import replace

from busrl import capabilities
from busrl.errors import first_line
from busrl.launcher.supervisor import Child, is_titled
from busrl.ledger.errors import Throttle, record_error
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.protocol.codec import address
from busrl.ring import Process
from busrl.status.runfiles import in_words
from busrl.status.state import ProcessRow, RecentErrors, RunState
from busrl.status.waits import Link, sentence_of
from busrl.status.words import alike, duration, nothing, printable, reward_line, rises, safe, short
from busrl.system import files
from busrl.system.clocks import Tally
from busrl.system.guardian import stat_of

# -- progress ----------------------------------------------------------------------------------------------------------

class Progress:
    """The state of the run as its launch sees it, and the sums of this start for `summary.json`.

    Step and version come from the ring's header, so lost messages do not falsify them.
    """

    def __init__(self, run: RunState, children: Sequence[Child], now: float, faults: Sequence[str] = ()) -> None:
        self.run, self.children, self.started, self.faults = run, children, now, list(faults)
        run.launched, run.faults, run.errors = True, bool(faults), RecentErrors()
        self.before = self._newest = run.at_step  # steps that were done before this start
        self.groups = self.samples = self.tokens = 0
        self.stood_still: tuple[float, list[Link]] = (0.0, [])

    def ended_still(self, seconds: float, waits: list[Link]) -> None:
        """Record that the run made no step for so long when it ended, and which process waited for which."""
        self.stood_still = (seconds, waits)

    def handle(self, message: m.Message, now: float) -> list[str]:
        """Fold one message in; the lines that a person should read."""
        if m.is_of_another_model(message, self.run.facts.beside):
            return []
        if isinstance(message, m.LearnerStateUpdate) and not self._counts(message):
            return []
        if not isinstance(message, m.Error):  # `EventLog` records errors
            self.run.handle(message, now)
        if not isinstance(message, (m.ValidationDone, m.ValidationSetDone)):
            return []
        mixed, answers = ", versions mixed" if message.mixed else "", message.samples + message.dropped
        samples = f"{message.samples} of {answers} samples, {message.dropped} had no reward"
        judged = f"{message.mean:.3f} over {samples if message.dropped else f'{answers} samples'}{mixed}"
        judged, name = judged if message.samples else nothing(answers), ""
        if isinstance(message, m.ValidationSetDone):
            name = f" of {safe(message.set)}" if message.set else ""
            at_k = {key: value for key, value in message.figures.items() if re.fullmatch(r"val/(pass|maj)@[0-9]+", key)}
            judged += "".join(f", {key.removeprefix('val/')} {value:.3f}" for key, value in at_k.items())
        return [f"validation {message.round}{name} of version {message.version}: {judged}"]

    def _counts(self, update: m.LearnerStateUpdate) -> bool:
        """Count a step, and return True, unless its message is a double, late, beyond the last step, or has a value
        that is not finite."""
        values = (update.reward, update.entropy, update.age_mean, *update.metrics.values())
        if not self._newest < update.step <= self.run.facts.max_steps or not all(map(math.isfinite, values)):
            return False
        self._newest = update.step
        self.groups, self.samples = self.groups + update.groups, self.samples + update.samples
        self.tokens += update.tokens
        self.run.begin_rewards(update.reward)
        return True

    def rows(self, now: float) -> list[ProcessRow]:
        """A row for each child, with what the ring's table has about it."""
        seen = {row.pid: row for row in self.run.rows(now) if not row.remote}
        rows = ((child, seen.get(child.pid or -1, ProcessRow(child.name, pid=child.pid))) for child in self.children)
        return [replace(row, name=child.name, state=child.phase.value, restarts=child.restarts) for child, row in rows]


# -- CPU seconds and busy shares ---------------------------------------------------------------------------------------

TICKS = os.sysconf("SC_CLK_TCK")
LOOK_EVERY_S = 0.5
Seconds = npt.NDArray[np.float64]  # of CPU, and busy
NOTHING: Seconds = np.zeros(2)


class Usage:
    """CPU and busy seconds of the run's processes: `look` now and then, `summary` at the end."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, int], Seconds] = {}  # by name and pid
        self._before: dict[str, Seconds] = {}
        self._next = self._began = self._ended = 0.0

    def look(self, pids: Iterable[tuple[str, int]], entries: dict[int, Process], step: int, now: float) -> None:
        """Add up what the processes have used so far. `pids` has name and pid of every living process, `step` is the
        learner's. Cheap: reads /proc twice a second."""
        if now < self._next:
            return
        self._next = now + LOOK_EVERY_S
        for life in pids:
            entry = entries.get(life[1])
            # The entry may be gone while its process still ends: the busy seconds are those of the last look.
            busy = entry.busy_ns / 1e9 if entry else self._used.get(life, NOTHING)[1]
            self._used[life] = np.array([cpu_of(life[1], children=life[1] != os.getpid()), busy])
        if step > 0 and not self._began:
            self._began, self._before = now, self._sums()
        self._ended = now

    def summary(self) -> dict[str, dict[str, Any]]:
        """By process: cpu_s in all, and the shares of the training time; those are None if nothing was trained."""
        span, shares = self._ended - self._began if self._began else 0.0, {}
        for name, used in self._sums().items():
            cpu, busy = (used - self._before.get(name, NOTHING)) / span if span > 0 else (None, None)
            shares[name] = {
                "cpu_s": round(float(used[0]), 2),
                "cpu_share": None if cpu is None else round(float(cpu), 4),
                "busy_share": None if busy is None else round(min(1.0, float(busy)), 4),
            }
        return shares

    def _sums(self) -> dict[str, Seconds]:
        """Sums of each name over all of its lives."""
        sums: dict[str, Seconds] = {}
        for (name, _), used in self._used.items():
            sums[name] = sums.get(name, NOTHING) + used
        return sums


def cpu_of(pid: int, children: bool = True) -> float:
    """CPU seconds of a process, and with `children` those it has waited for and the living ones; 0 if it is gone."""
    total = 0.0
    with contextlib.suppress(OSError):
        total = sum(int(field) for field in stat_of(pid)[11 : 15 if children else 13]) / TICKS
        living = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if children else []
        for child in living:
            total += cpu_of(int(child))
    return total


# -- residence times of slots ------------------------------------------------------------------------------------------

EVERY_S = 0.25


class ResidenceTimes:
    """Residence times of slots in each state, by Little's law: mean slots in a state / entries into it per second.

    `look` samples four times a second while the learner trains: by the clock and not at events, so that each phase of
    the run counts by its length. `summary` at the end.
    """

    def __init__(self) -> None:
        self._slots: Counter[str] = Counter()
        self._entered: list[tuple[float, Mapping[str, int]]] = []  # at the first look, and at the last
        self._looks, self._next = 0, 0.0

    def look(self, occupancy: Mapping[str, int], transitions: Mapping[str, int], step: int, now: float) -> None:
        """Take a sample. `occupancy` has slots by state, `transitions` all entries into each; `step` is the learner's.
        """
        if step < 1 or now < self._next:
            return
        self._next = now + EVERY_S
        self._slots.update(occupancy)
        self._entered[1:] = [(now, dict(transitions))]
        self._looks += 1

    def summary(self) -> dict[str, dict[str, float]]:
        """By state: mean slots, entries per second, and seconds for which a sample stays (0 if none came); empty if
        there were no looks."""
        if len(self._entered) < 2:
            return {}
        (begin, first), (end, last) = self._entered
        times = {}
        for state, total in self._slots.items():
            mean, rate = total / self._looks, (last.get(state, 0) - first.get(state, 0)) / (end - begin)
            stay = mean / rate if rate > 0 else 0.0
            times[state.lower()] = {"mean": round(mean, 3), "per_s": round(rate, 3), "stay_s": round(stay, 6)}
        return times


# -- the event log -----------------------------------------------------------------------------------------------------

MOST_SENDERS = 64
SAVE_EVERY_S = 1.0
TRACE = 4000
TEXT = 200
REPEATED = 160  # characters of the reason for a run's end: a longer one is printed once, in full


class EventLog:
    """Records of what happened (`errors.jsonl`), and the counts of `supervisor.json`. `programs`: names of the children
    that are busrl's own programs. `tick` now and then, with `everything` at the end."""

    def __init__(self, paths: RunPaths, children: Sequence[Child], programs: Collection[str]) -> None:
        self._paths, self._children = paths, children
        self._programs = {address(name) for name in programs} | {"launch"}
        self._noted: set[tuple[int, int]] = set()  # pid and index of entries
        self._throttle, self._shown, self._tally = Throttle(), Throttle(), Tally(most=MOST_SENDERS)
        self.deaths: dict[str, str] = {}  # the latest of each child
        self._changed, self._next_save = True, 0.0

    def has(self, name: str) -> None:
        """Add a child that is a program of busrl's own."""
        self._programs.add(address(name))

    def died(self, child: Child, text: str, *, gives_up: bool = False) -> None:
        self.warn(text, "critical" if gives_up else "warning")
        self.deaths[child.name] = text
        self._changed = True

    def warn(self, text: str, severity: str = "warning", uids: Sequence[int] = ()) -> None:
        """Record what launch itself saw or did."""
        record_error(self._paths, "launch", severity, "supervisor", text, uids=uids)

    def note_entries(self, entries: Iterable[Process]) -> None:
        """Add roles of busrl that were not started by launch: the process table and their titles show them."""
        for entry in entries:
            if not entry.remote and (entry.pid, entry.index) not in self._noted:
                self._noted.add((entry.pid, entry.index))
                if is_titled(entry.pid, entry.label):
                    self._programs.add(entry.label.replace("/", "-"))

    def received(self, error: m.Error, now: float) -> list[str]:
        """Take an ERROR from the bus; the lines that a person should read now."""
        severity = error.severity if error.severity in m.SEVERITIES else m.SEVERITIES[0]
        if error.sender in self._programs:  # it has recorded the error and limits its rate; a forged sender may not
            if severity == "critical" and error.sender in {address(child.name) for child in self._children}:
                return []  # launch reports the death that follows
            shown_line = (error.sender, severity, error.where, error.text)
            kind = f"{error.sender}/{error.where}/{alike(error.text)[:TEXT]}"
            return [shown(*shown_line)] if self._shown.admit(kind, shown_line, now) else []
        sender = self._tally.add(error.sender, severity, text=first_line(error.text))
        self._changed = True
        line = (sender, severity, error.where, error.text, error.traceback[-TRACE:])
        return [self._file(line)] if self._throttle.admit(sender, line, now) else []

    def tick(self, now: float, everything: bool = False) -> list[str]:
        """Record what was held back and is due, and save the counts; the lines to show. `everything`: at the end."""
        lines = []
        for count, (sender, severity, where, text, trace), _ in self._throttle.due(now, everything):
            lines.append(self._file((sender, severity, where, f"{count} more from it, the latest: {text}", trace)))
        for count, (sender, severity, where, text), _ in self._shown.due(now, everything):
            lines.append(f"{shown(sender, severity, where, text)} ({count} more like this)")
        if self._changed and (everything or now >= self._next_save):
            self._changed, self._next_save = False, now + SAVE_EVERY_S
            files.show(self._paths.supervisor, self.plain())
        return lines

    def _file(self, line: tuple[str, ...]) -> str:
        """Record a line; the text to show."""
        sender, severity, where, text, trace = line
        record_error(self._paths, sender, severity, where, text, trace)
        return shown(sender, severity, where, text)

    def plain(self) -> dict[str, Any]:
        """The content of supervisor.json."""
        processes: dict[str, dict[str, Any]] = {child.name: {**child.account()} for child in self._children}
        for name in processes.keys() & self.deaths.keys():
            processes[name]["latest"] = self.deaths[name]
        return {"time": time.time(), "processes": processes, "errors_from_outside": self._tally.plain()}


def shown(sender: str, severity: str, where: str, text: str) -> str:
    return f"{severity}: {sender}{f' ({where})' if where else ''}: {first_line(text)}"


class Journal:
    """Lines of launch: `show` prints them for the person who watches, `events` records them in errors.jsonl, and all go
    into its log."""

    def __init__(self, paths: RunPaths, show: Callable[[str], None], events: EventLog) -> None:
        self._show, self.events = show, events
        self._log = open(paths.log("launch"), "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def note(self, line: str) -> None:
        """Write a line to the log alone."""
        with contextlib.suppress(OSError):  # a full disk must not end the run
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(line)}\n")

    def say(self, line: str) -> None:
        """Print a line, and write it to the log."""
        self.note(line)
        self._show(line)

    def warn(self, line: str, severity: str = "warning") -> None:
        self.say(line)
        self.events.warn(line, severity)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, as in `note`
            self._log.close()


# -- the end -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class RunOutcome:
    """The end of a run: "finished", "stopped" (by a signal or a request) or "failed"; `why` is for a person."""

    kind: str
    why: str
    exit_code: int


class AuditCounts(Protocol):
    """The numbers of an audit that the last lines name."""

    @property
    def trained(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def trained_twice(self) -> int: ...


class Audit(Protocol):
    """The result of the optional part that audits a run, as a summary reads it: samples set aside by rule and by
    accident, by reason, and the errors that were found, with their kinds."""

    @property
    def counts(self) -> AuditCounts: ...
    @property
    def rules(self) -> Mapping[str, int]: ...
    @property
    def accidents(self) -> Mapping[str, int]: ...
    @property
    def errors(self) -> Sequence[object]: ...
    @property
    def kinds(self) -> Collection[str]: ...
    def to_json(self) -> dict[str, object]: ...


def build(
    outcome: RunOutcome, progress: Progress, report: Audit | None, still_open: int,
    usage: dict[str, dict[str, Any]], residence: dict[str, dict[str, float]], crashes_missing: list[str],
) -> dict[str, Any]:
    """The content of summary.json. `usage` is the result of `Usage.summary`, "launch" included, `residence` that of
    `ResidenceTimes.summary`; `crashes_missing` has planned deaths that never came."""
    run = progress.run
    processes = {child.name: {**child.account(), **usage.get(child.name, {})} for child in progress.children}
    return {
        "name": run.facts.name,
        "outcome": outcome.kind, "why": outcome.why, "exit_code": outcome.exit_code,
        "goal_reached": outcome.exit_code == 0,
        "ended": time.time(), "seconds": round(time.monotonic() - progress.started, 3),
        "steps": run.at_step, "steps_before": progress.before, "max_steps": run.facts.max_steps,
        "version": run.version,
        "seen": {"groups": progress.groups, "samples": progress.samples, "tokens": progress.tokens},
        "generated_tokens": run.ring.tokens if run.ring else 0,
        "reward": {"first": run.first_reward, "last_10_steps": run.steps.recent(lambda step: step.reward)},
        **run.judged(),
        "processes": {"launch": usage.get("launch", {}), **processes},
        "slots": residence,
        "faults": progress.faults, "faults_that_never_came": crashes_missing,
        "open_samples": still_open,
        "stood_still_s": round(progress.stood_still[0], 3), "waits": to_builtins(progress.stood_still[1]),
        "audit": report.to_json() if report else None,
    }


def final_lines(summary: dict[str, Any], report: Audit | None, paths: RunPaths) -> list[str]:
    mark = "✓" if summary["goal_reached"] else "✗"
    why = summary["why"] if len(summary["why"]) <= REPEATED else 'by what "ending:" above says'
    lines = [f"{mark} {summary['name']}: {summary['outcome']}, {why}"]
    before = f" ({summary['steps_before']} were done before)" if summary["steps_before"] else ""
    facts = [f"step {summary['steps']}/{summary['max_steps']} in {duration(summary['seconds'])}{before}"]
    if reward := reward_line(summary["reward"]):
        facts.append(reward)
    if judged := rises(summary["validation"], summary["validation_unmeasured"]):
        facts.append(judged)
    lines.append("  " + " · ".join(facts))
    lines += [line for more in capabilities.plugs("final_lines") for line in more(summary)]
    busy = [
        f"{name} {account['busy_share']:.0%}"
        for name, account in summary["processes"].items()
        if name.partition("/")[0] in ("learner", "rollout", "reward") and account.get("busy_share") is not None
    ]
    if busy:
        lines.append("  busy: " + ", ".join(busy))
    again = {name: account["restarts"] for name, account in summary["processes"].items() if account.get("restarts")}
    if again:
        lines.append("  restarted: " + ", ".join(f"{name} {count}×" for name, count in again.items()))
    if summary["waits"]:
        waits = safe(sentence_of(convert(summary["waits"], list[Link])), 2000)
        lines.append(f"  stood still for {duration(summary['stood_still_s'])}: {waits}")
    lines += [f"  WITH FAULTS ON PURPOSE: {line}" for line in summary["faults"]]
    lines += [f"  THIS DEATH NEVER CAME: {line}" for line in summary["faults_that_never_came"]]
    lines += [f"  {line}" for line in _waste(report)]
    lines.append(f"  {_ledger(summary, report)}")
    lines.append(f"  {paths.root}")
    return lines


def _waste(report: Audit | None) -> list[str]:
    """A line about samples that were generated and not trained, by rule; none below one percent."""
    if report is None:
        return []
    ended = sum(report.rules.values()) + sum(report.accidents.values()) + report.counts.trained
    shares = [f"{count / ended:.0%} {in_words(name)}" for name, count in report.rules.items() if 100 * count >= ended]
    return [f"not trained: {', '.join(shares)} of {short(ended)} samples"] if shares else []


def _ledger(summary: dict[str, Any], report: Audit | None) -> str:
    if report is None:
        return "audit: not made"
    counts = report.counts
    text = f"audit: {short(counts.trained)} samples trained, {counts.lost} lost, {counts.trained_twice} trained twice"
    accidents = sum(report.accidents.values())
    text += f", {accidents} by accident" if accidents else ""
    text += f", {summary['open_samples']} open" if summary["open_samples"] else ""
    return text if not report.errors else f"{text}; NOT CLEAN, see `busrl audit`: {', '.join(sorted(report.kinds))}"
