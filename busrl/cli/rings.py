"""`busrl ring list | inspect | clean`: the shared memory that runs of this user have, or left behind.

Maps rings read-only and asks the ring for proof of life. Removes files only in `clean`. Knows nothing of runs beyond
the names that `paths` gives; `sample.py` shows what is known of one sample.

- `clean` refuses while a launch has the ring or a registered process lives: what it wrote would be lost
  unnoticed.
- A ring that cannot be read may be in use by another version of busrl, so it takes --force too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from busrl.cli.sample import history
from busrl.errors import RingError, RunInUse, UserError
from busrl.launch.rundir import unlink_segments
from busrl.monitor.sources import living, newest_run
from busrl.monitor.text import printable
from busrl.paths import SHM, RunPaths
from busrl.ring import UID_NONE, WORKING, Ring, RingGuard, State
from busrl.ring.calls import open_episodes
from busrl.states import VALIDATE_BIT

SUFFIX = ".ring"


def show_all(_options: argparse.Namespace) -> int:
    names = ring_names()
    if not names:
        print(f"no rings of user {os.getuid()} in {SHM}")
    unused = "nobody uses it: `busrl launch` in its run directory continues, `busrl ring clean` removes it"
    for name in names:
        print(printable(f"{name}  {(SHM / name).stat().st_size / (1 << 20):8.1f} MiB  {users(name) or unused}"))
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Slots by state with owners and ages, header words, and processes of one ring; or what is known of one sample."""
    target = options.ring or str(newest_run(Path("runs")))
    if options.uid:
        _show(history(Path(target), options.uid).split("\n"))
        return 0
    name = ring_name(target)
    ring = Ring.attach(name, read_only=True)
    try:
        print(f"{name}: {ring.n_slots} slots of {ring.slot_bytes} bytes, uuid {bytes(ring.uuid).hex()}")
        words = ("step", "version", "version_step", "next_admission", "unpublished_groups", "hold", "run_state")
        print("  " + ", ".join(f"{word} {ring.header(word)}" for word in words))
        print("  slots: " + ", ".join(f"{count} {state}" for state, count in states(ring).items()))
        _show(render_slots(ring))
        _show(render_calls(ring, f"{name.removesuffix(SUFFIX)}.calls"))
        _show(render_processes(ring))
    finally:
        ring.close()
    return 0


def _show(lines: Iterable[str]) -> None:
    """Names, activities and texts were written by others."""
    print("\n".join(map(printable, lines)))


def clean(options: argparse.Namespace) -> int:
    """Remove the ring, the weights and the sockets of a run; with `all`, of every run that nobody uses."""
    every = options.ring == "all"
    for name in ring_names() if every else [ring_name(options.ring)]:
        if living := _removed(name, options.force):
            if not every:
                raise RunInUse(f"{name}: {living}; stop the run first (`busrl stop RUN_DIR`), or use --force")
            print(printable(f"{name}: kept, {living}"))
    return 0


def _removed(name: str, force: bool) -> str:
    """Unlink what a run that nobody uses has outside its directory; who uses it, in words, else."""
    try:
        guard = RingGuard(SHM / name)
    except OSError as error:  # gone already, or not ours to open
        return "" if isinstance(error, FileNotFoundError) else f"it cannot be opened: {error.strerror}"
    try:
        if not guard.try_take() and not force:
            return "in use by a launch"
        if not force and (living := users(name)):
            return living
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
    """The ring that a name or a run directory means; UserError if there is none."""
    name = target if target in ring_names() or not Path(target).is_dir() else RunPaths.of(target).ring_name
    if "/" in name or not (SHM / name).is_file() or not name.endswith(SUFFIX):
        raise UserError(f"{target}: there is no ring of that name or run directory; see `busrl ring list`")
    return name


def users(name: str) -> str:
    """Which processes use a ring, in words; empty if none does."""
    try:
        ring = Ring.attach(name, read_only=True)
    except RingError as error:
        return f"it cannot be read ({error}), so another version of busrl may use it"
    try:
        there = [f"{one.label} (pid {one.pid})" for one in living(ring)]
    finally:
        ring.close()
    return f"in use by {', '.join(there)}" if there else ""


def states(ring: Ring) -> dict[str, int]:
    """Slots by state, empty states left out."""
    counts = Counter(map(int, ring.lines()["state"]))
    known = {int(state): state.name for state in State}
    return {known.get(state, f"in no state ({state})"): counts[state] for state in sorted(counts)}


def render_slots(ring: Ring) -> list[str]:
    """One line per state and owner of the slots that hold a sample: how many, since when, and which uid the longest."""
    lines, now = ring.lines(), time.monotonic_ns()
    held = lines[(lines["state"] != State.FREE) & (lines["uid"] != UID_NONE)]
    if not len(held):
        return ["  no sample in any slot"]
    owners = {process.index: process.label for process in ring.processes()}
    table = [f"  {'state':<12}{'owner':<14}{'slots':>6}{'oldest':>10}  its uid"]
    for state, owner in sorted({(int(line["state"]), int(line["owner"])) for line in held}):
        here = held[(held["state"] == state) & (held["owner"] == owner)]
        oldest = here[here["changed_ns"].argmin()]
        age, uid = (now - int(oldest["changed_ns"])) / 1e9, int(oldest["uid"])
        # In DROPPED the owner's place holds the reason.
        name = owners.get(owner, f"process {owner}") if owner and State(state) in WORKING else "-"
        shown = f"v{uid & ~VALIDATE_BIT}" if uid & VALIDATE_BIT else str(uid)
        table.append(f"  {State(state).name:<12}{name:<14}{len(here):>6}{age:>8.1f} s  {shown}")
    return table


def render_calls(ring: Ring, name: str) -> list[str]:
    """The ring of model calls by state, and what the open episodes do; nothing where the run has none."""
    try:
        calls = Ring.attach(name, read_only=True, calls=True)
    except RingError:
        return []
    try:
        found = open_episodes(ring.lines(), calls.lines(), time.monotonic_ns())
        told = [f"  {state:<12}{count:>6} episodes, the oldest {age:.1f} s" for state, (count, age) in found.items()]
        return [f"  calls: {', '.join(f'{count} {state}' for state, count in states(calls).items())}", *told]
    finally:
        calls.close()


def render_processes(ring: Ring) -> list[str]:
    """The table of registered processes; busy is the share of time spent working."""
    lines = [f"  {'process':<14}{'pid':>8}  {'state':<10}{'busy':>6}  {'samples':>9}  {'version':>7}  activity"]
    for one in ring.processes():
        state = "dead" if ring.is_dead(one.index) else one.state
        busy = f"{one.busy_ns / (one.busy_ns + one.idle_ns):.0%}" if one.idle_ns else "-"
        lines.append(
            f"  {one.label:<14}{one.pid:>8}  {state:<10}{busy:>6}  {one.samples:>9,}  {one.version:>7}  {one.activity}"
        )
    return lines if len(lines) > 1 else ["  no processes"]
