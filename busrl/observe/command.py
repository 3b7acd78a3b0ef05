"""Commands that show a run from outside and change nothing: `busrl monitor`, `record`, `replay`, `report` and `trace`.

Adds their options, resolves their arguments and prints their results. The parts that draw, record and replay are in
`monitor` and `report`.

- A command imports a part when it uses it: on a busy machine rich, aiohttp and the report are a third of the time to
  the first picture of a command that needs none of them.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from busrl.cli.command import positive
from busrl.errors import NoSuchRun, UserError
from busrl.observe.monitor.sources import Watcher, find, give_way, models_of, settle, watched
from busrl.paths import RunPaths
from busrl.status.view import to_json
from busrl.status.words import duration, printable
from busrl.system import files

if TYPE_CHECKING:
    from busrl.observe.report.files import RunRecord

LISTEN_S, REPLAY_S = 1.0, 60.0  # of --once: at a run; at an endpoint, where a mark ends a replay


Verb: TypeAlias = Callable[[argparse.Namespace], int]


def monitor_options(parser: argparse.ArgumentParser) -> Verb:
    add = parser.add_argument
    add("target", nargs="?", metavar="RUN_DIR|ENDPOINT", help="default: the only run of this user that lives")
    add("--once", action="store_true", help="print the picture once and leave")
    add("--json", action="store_true", help="with --once: one JSON object, its keys as documented")
    add("--plain", action="store_true", help="lines without colours, as on a pipe")
    text = "a page for a browser, at a free port of this host alone or at an address of yours; named after the run"
    add("--web", nargs="?", const="", metavar="[HOST:]PORT", help=text)
    text = "with --once: listen for so long first (default 1; at an endpoint until the replay is over, at most 60)"
    add("--seconds", type=positive, metavar="S", help=text)
    return monitor


def record_options(parser: argparse.ArgumentParser) -> Verb:
    add = parser.add_argument
    add("run_dir", nargs="?", metavar="RUN_DIR", help="default: the only run of this user that lives")
    add("-o", "--out", type=Path, required=True, metavar="FILE", help="a new file")
    add("--seconds", type=positive, metavar="S", help="record for so long")
    add("--limit", type=positive, default=1024.0, metavar="MIB", help="end at this size (default 1024)")
    return record


def replay_options(parser: argparse.ArgumentParser) -> Verb:
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="what `busrl record` wrote")
    add("--speed", default="1", metavar="N|max", help="1: as it was (default); N times as fast; max")
    add("--bind", default="", metavar="ENDPOINT", help="where listeners connect (default: one of its own)")
    add("--wait", type=positive, default=60.0, metavar="S", help="limit of the wait for a listener (60)")
    add("--info", action="store_true", help="say what the file holds, and publish nothing")
    return replay


def report_options(parser: argparse.ArgumentParser) -> Verb:
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    text = "default: RUN_DIR/report.html; of several: beside them"
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help=text)
    return report


def timeline_options(parser: argparse.ArgumentParser) -> Verb:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: RUN_DIR/trace.json")
    return write_timeline


# -- the commands ------------------------------------------------------------------------------------------------------

def report(options: argparse.Namespace) -> int:
    from busrl.observe.report.files import read
    from busrl.observe.report.page import page

    records = [read(run_dir) for run_dir in options.run_dirs]
    folder = os.path.commonpath([record.paths.root for record in records])  # of several runs: the one above them
    out = options.out or RunPaths.of(folder).report
    files.replace(out, page(records).encode())
    return _written(out, records)


def write_timeline(options: argparse.Namespace) -> int:
    """Write the timeline of a run; print how much of the decoding falls into training."""
    from busrl.observe.report.files import read
    from busrl.observe.report.timeline import overlap, slices_of, timeline

    record = read(options.run_dir)
    slices = slices_of(record)
    out = options.out or record.paths.timeline
    files.replace(out, timeline(record, slices).encode())
    share = overlap(slices)
    _written(out, [record])
    if share is None:
        print("no overlap is known: no steps, or no decoding, with a `time` in metrics.jsonl and pace/")
    else:
        print(f"{share:.1%} of the decoding time falls into training; ui.perfetto.dev shows the file")
    return 0


def _written(out: Path, records: Sequence[RunRecord]) -> int:
    for record in records:
        for fault in dict.fromkeys(record.faults):
            print(printable(f"busrl: {record.paths.root}: {fault}"), file=sys.stderr)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
    return 0


def monitor(options: argparse.Namespace) -> int:
    """Show a run: on a live screen until `q`, as plain lines without a terminal, as a page for a browser, or once."""
    target = find(options.target)
    watcher = Watcher(target)
    try:
        if options.once or options.json:
            return _once(watcher, target, options.json, options.seconds)
        if options.web is not None:
            return _page(watcher, target, options.web)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            _until_quit(watcher, target, options.plain)
        return 0
    finally:
        watcher.close()


def _once(watcher: Watcher, target: RunPaths | str, as_json: bool, seconds: float | None) -> int:
    from busrl.observe.monitor.screen import as_text

    patience = seconds if seconds is not None else REPLAY_S if isinstance(target, str) else LISTEN_S
    settle(watcher, patience)
    if isinstance(target, str) and not watcher.run.traffic.total.count and not watcher.run.replay:
        raise NoSuchRun(
            f"{target}: nothing was received there within {patience:g} s; name the tap of a run (`tap` in its "
            "run.json), or the endpoint that `busrl replay` printed"
        )
    print(to_json(watched(watcher, target)) if as_json else as_text(watcher))
    return 0


def _page(watcher: Watcher, target: RunPaths | str, address: str) -> int:
    from busrl.observe.monitor.web.server import Address, Server

    server = Server(watcher, target, Address.of(address))
    asyncio.run(server.run(lambda url: print(f"the run is shown at {url} until Ctrl-C", flush=True)))
    return 0


def _until_quit(watcher: Watcher, target: RunPaths | str, plain: bool) -> None:
    from busrl.observe.monitor import screen

    terminal = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if plain or not terminal:
        screen.run_plain(watcher, sys.stdout)
    else:
        screen.run_live(watcher, sys.stdin, models_of(target) if isinstance(target, RunPaths) else ())


MIB = 1 << 20
NICE = 15  # a run goes first; but a monitor comes later, as a message that the recorder is too late for is lost


def record(options: argparse.Namespace) -> int:
    """Record until Ctrl-C, a limit or the end of the run; the exit code is 0 in each case, as the file is complete."""
    from busrl.observe.monitor.recording import Recorder

    target, out, seconds = find(options.run_dir), options.out, options.seconds
    if isinstance(target, str):
        raise UserError(f"{options.run_dir}: a run directory is recorded, not an endpoint")
    recorder = Recorder(target, out, math.inf if seconds is None else seconds, options.limit * MIB)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: recorder.stop(f"asked to by {signal.Signals(got).name}"))
    print(f"recording {target.root} to {out}; Ctrl-C ends it", flush=True)
    give_way(NICE)
    end = recorder.run()
    missed = f", {end.missed:,} missed" if end.missed else ", none missed"
    print(f"{end.why}: {end.messages:,} messages, {end.bytes:,} bytes{missed}")
    return 0


def replay(options: argparse.Namespace) -> int:
    """Publish a recording once, or print what it holds."""
    from busrl.observe.monitor.recording import Recording, Replayer, own_endpoint

    if options.info:
        print("\n".join(_described(options.file)))
        return 0
    factor = speed_of(options.speed)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with Recording(options.file) as recording, own_endpoint() as endpoint:
            bind = options.bind or endpoint
            with Replayer(recording, bind, speed=factor) as replayer:
                print(f"waiting for a listener: busrl monitor {bind}", flush=True)
                count = replayer.run(options.wait, lambda: print("publishing", flush=True))
            print(f"published {count:,} messages{f'; {recording.torn}' if recording.torn else ''}")
    except KeyboardInterrupt:
        print("stopped")
    return 0


def speed_of(text: str) -> float:
    if text == "max":
        return 0.0
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e9:
        raise UserError(f"--speed {text}: expected a positive number (1 = as it was, 10 = ten times as fast), or max")
    return factor


def _described(file: Path) -> list[str]:
    from busrl.observe.monitor.recording import summary

    contents = summary(file)
    header = contents["header"]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(header.wall_ns / 1e9))
    lines = [
        f"{file}: {header.facts.run_id or header.facts.name or 'a run'} on {header.host}, from {at} for "
        f"{duration(contents['seconds'])}",
        f"  protocol {header.protocol}, busrl {header.busrl}, run uuid {header.uuid}",
        f"  {sum(contents['messages'].values()):,} messages, {contents['missed']:,} missed; "
        + (f"ended: {contents['ended']}" if contents["ended"] else "not ended in order"),
    ]
    by_count = sorted(contents["messages"].items(), key=lambda item: -item[1])
    lines += [f"    {name:<22}{count:>9,}" for name, count in by_count]
    return [*lines, f"  torn: {contents['torn']}"] if contents["torn"] else lines
