"""`busrl ring list | inspect | clean`: the shared memory that runs of this user have, or left behind.

Maps rings read-only and reads from them which processes live. Only `clean` removes files. What `inspect --uid` shows is
made by `sample_history`.

- `clean` refuses while a launch has the ring or a registered process lives: what it writes would be lost unnoticed.
- Another version of busrl may use a ring that cannot be read, so removing it takes --force too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

from busrl.cli.sample_history import history
from busrl.errors import RingError, RunInUse, UserError
from busrl.launcher.rundir import unlink_segments
from busrl.paths import SHM, RunPaths
from busrl.ring import UID_NONE, WORKING, Ring, RingGuard, State
from busrl.states import shown_uid
from busrl.status.reader import living, newest_run, open_episodes
from busrl.status.words import printable

SUFFIX = ".ring"


def show_all(_options: argparse.Namespace) -> int:
    names = ring_names()
    if not names:
        print(f"no rings of user {os.getuid()} in {SHM}")
    unused = "nobody uses it: `busrl launch` in its run directory continues, `busrl ring clean` removes it"
    for name in names:
        used = users(name)
        with suppress(FileNotFoundError):  # its run has just ended
            print(printable(f"{name}  {(SHM / name).stat().st_size / (1 << 20):8.1f} MiB  {used or unused}"))
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Print slots by state with owners and ages, header words and processes of a ring; or the history of a sample."""
    target = options.ring or str(newest_run(Path("runs")))
    if options.uid:
        _show(history(Path(target), options.uid).split("\n"))
        return 0
    name = ring_name(target)
    with closing(Ring.attach(name, read_only=True)) as ring:
        print(f"{name}: {ring.n_slots} slots of {ring.slot_bytes} bytes, uuid {bytes(ring.uuid).hex()}")
        words = ("step", "version", "version_step", "next_admission", "unpublished_groups", "hold", "run_state")
        print("  " + ", ".join(f"{word} {ring.header(word)}" for word in words))
        print("  slots: " + ", ".join(f"{count} {state}" for state, count in states(ring).items()))
        _show(render_slots(ring))
        _show(render_calls(ring, f"{name.removesuffix(SUFFIX)}.calls"))
        _show(render_processes(ring))
    return 0


def _show(lines: Iterable[str]) -> None:
    """Print lines that hold names, activities and texts of other programs, without what a terminal would obey."""
    print("\n".join(map(printable, lines)))


def clean(options: argparse.Namespace) -> int:
    """Remove the ring, the weights and the sockets of a run; with `all`, of every run that nobody uses."""
    every = options.ring == "all"
    for name in ring_names() if every else [ring_name(options.ring), *_rings_beside(options.ring)]:
        if user := _remove(name, options.force):
            if not every:
                raise RunInUse(f"{name}: {user}; stop the run first (`busrl stop RUN_DIR`), or use --force")
            print(printable(f"{name}: kept, {user}"))
    return 0


def _remove(name: str, force: bool) -> str:
    """Unlink what a run has outside its directory; a text that names its user if a process uses it."""
    try:
        guard = RingGuard(SHM / name)
    except OSError as error:  # removed already, or of another user
        return "" if isinstance(error, FileNotFoundError) else f"it cannot be opened: {error.strerror}"
    try:
        if not guard.try_take() and not force:
            return "in use by a launch"
        if not force and (user := users(name)):
            return user
        if guard.has_name():
            unlink_segments(name)
            sockets = RunPaths(Path("/")).runtime_dir.parent / name.removesuffix(SUFFIX).rpartition(".")[2]
            shutil.rmtree(sockets, ignore_errors=True)
            print(f"{name}: removed")
        return ""
    finally:
        guard.release()


def ring_names() -> list[str]:
    return sorted(path.name for path in SHM.glob(f"busrl.{os.getuid()}.*{SUFFIX}"))


def ring_name(target: str) -> str:
    """The name of a ring, by that name or by the directory of its run; UserError if there is no such ring."""
    name = target if target in ring_names() or not Path(target).is_dir() else RunPaths.of(target).ring_name
    if "/" in name or not (SHM / name).is_file() or not name.endswith(SUFFIX):
        raise UserError(f"{target}: there is no ring of that name or run directory; see `busrl ring list`")
    return name


def _rings_beside(target: str) -> list[str]:
    """The rings of the other models of a run, where `target` is its directory."""
    paths = RunPaths.of(target) if Path(target).is_dir() else None
    models = paths.models.glob("*/run.json") if paths and not paths.run else ()
    names = (RunPaths.of(model.parent).ring_name for model in models)
    return [name for name in sorted(names) if (SHM / name).is_file()]


def users(name: str) -> str:
    """A text that names the processes that use a ring; empty if none does."""
    try:
        ring = Ring.attach(name, read_only=True)
    except RingError as error:
        return f"it cannot be read ({error}), so another version of busrl may use it"
    with closing(ring):
        processes = [f"{process.label} (pid {process.pid})" for process in living(ring)]
    return f"in use by {', '.join(processes)}" if processes else ""


def states(ring: Ring) -> dict[str, int]:
    counts = Counter(map(int, ring.lines()["state"]))
    names = {int(state): state.name for state in State}
    return {names.get(state, f"in no state ({state})"): counts[state] for state in sorted(counts)}


def render_slots(ring: Ring) -> list[str]:
    """A line per state and owner of the slots that hold a sample: how many, since when, and which uid the longest."""
    lines, now = ring.lines(), time.monotonic_ns()
    samples = lines[(lines["state"] != State.FREE) & (lines["uid"] != UID_NONE)]
    if not len(samples):
        return ["  no sample in any slot"]
    owners = {process.index: process.label for process in ring.processes()}
    table = [f"  {'state':<12}{'owner':<14}{'slots':>6}{'oldest':>10}  its uid"]
    for state, owner in sorted({(int(line["state"]), int(line["owner"])) for line in samples}):
        here = samples[(samples["state"] == state) & (samples["owner"] == owner)]
        oldest = here[here["changed_ns"].argmin()]
        age, uid = (now - int(oldest["changed_ns"])) / 1e9, int(oldest["uid"])
        # In DROPPED the owner's word holds the reason.
        name = owners.get(owner, f"process {owner}") if owner and State(state) in WORKING else "-"
        table.append(f"  {State(state).name:<12}{name:<14}{len(here):>6}{age:>8.1f} s  {shown_uid(uid)}")
    return table


def render_calls(ring: Ring, name: str) -> list[str]:
    """Lines about the ring of model calls by state, and about the open episodes; none if the run has no such ring."""
    try:
        calls = Ring.attach(name, read_only=True, calls=True)
    except RingError:
        return []
    with closing(calls):
        episodes = open_episodes(ring.lines(), calls.lines(), time.monotonic_ns())
        lines = [f"  calls: {', '.join(f'{count} {state}' for state, count in states(calls).items())}"]
        for state, (count, age) in episodes.items():
            lines.append(f"  {state:<12}{count:>6} episodes, the oldest {age:.1f} s")
        return lines


def render_processes(ring: Ring) -> list[str]:
    """The table of registered processes; busy is the share of time spent working."""
    lines = [f"  {'process':<14}{'pid':>8}  {'state':<10}{'busy':>6}  {'samples':>9}  {'version':>7}  activity"]
    for process in ring.processes():
        state = "dead" if ring.is_dead(process.index) else process.state
        busy = f"{process.busy_ns / (process.busy_ns + process.idle_ns):.0%}" if process.idle_ns else "-"
        counts = f"{busy:>6}  {process.samples:>9,}  {process.version:>7}"
        lines.append(f"  {process.label:<14}{process.pid:>8}  {state:<10}{counts}  {process.activity}")
    return lines if len(lines) > 1 else ["  no processes"]
