"""Time to a mean reward of 0.85 on the quickstart's task: busrl and its rivals in turn.

    python -m benchmarks compare --against loop sync --seeds 0 1 2
    python -m benchmarks compare --against trl --trl-python ~/trl-venv/bin/python

`loop` is run with one and with two threads (rows `loop-1`, `loop-2`): the faster one is the rival. `sync` is busrl
itself with `weights.mode = sync`. Results go to benchmarks/results/ as JSON and Markdown, each run with its load; they
are written after every seed, so a comparison that is stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.common import report, systems

RIVALS = ("trl", "loop", "sync")
Runner = Callable[[int, systems.Terms], dict[str, Any]]


def runners(against: list[str], extra: list[str]) -> dict[str, Runner]:
    """The systems of a comparison, busrl first."""
    chosen: dict[str, Runner] = {"busrl": lambda seed, terms: systems.run_busrl(seed, terms, "busrl", extra)}
    if "loop" in against:
        chosen["loop-1"] = lambda seed, terms: systems.run_loop(seed, terms, 1)
        chosen["loop-2"] = lambda seed, terms: systems.run_loop(seed, terms, 2)
    if "sync" in against:
        sync = [*extra, "weights.mode=sync"]
        chosen["sync"] = lambda seed, terms: systems.run_busrl(seed, terms, "sync", sync)
    if "trl" in against:
        chosen["trl"] = systems.run_trl
    return chosen


def await_quiet(limit: float, patience_s: float) -> None:
    """Wait for the load to fall below `limit`; go on after `patience_s`, since every run's load is recorded."""
    until = time.monotonic() + patience_s
    while os.getloadavg()[0] > limit and time.monotonic() < until:
        time.sleep(2.0)


def measure(name: str, runner: Runner, seed: int, terms: systems.Terms) -> dict[str, Any]:
    before = os.getloadavg()
    figures = runner(seed, terms)
    figures["system"] = name
    figures["load_before"], figures["load_after"] = before, os.getloadavg()
    note = "" if figures["reached"] else ", goal NOT reached"
    print(
        f"{name:8} seed {seed}: {figures['seconds']:7.1f} s, CPU {figures['cpu_seconds']:6.1f} s, "
        f"{figures['updates']:3d} updates, {figures['samples']:6d} samples{note}; load {before[0]:.1f}",
        flush=True,
    )
    return figures


def compare(options: argparse.Namespace, terms: systems.Terms) -> list[str]:
    """Run all systems in turn, seed by seed; returns the runs that failed."""
    chosen = runners(options.against, options.overrides)
    if options.without_busrl:
        del chosen["busrl"]
    runs: list[dict[str, Any]] = []
    failures: list[str] = []
    for turn in range(options.rounds):
        for place, seed in enumerate(options.seeds):
            names = list(chosen)
            first = (turn + place) % len(names)
            for name in names[first:] + names[:first]:
                await_quiet(options.quiet, options.patience)
                try:
                    runs.append({**measure(name, chosen[name], seed, terms), "round": turn})
                except systems.RunFailed as failed:
                    failures.append(f"{name} seed {seed}: {failed}")
                    print(failures[-1], file=sys.stderr, flush=True)
            done = turn * len(options.seeds) + place + 1
            print(kept(result_of(runs, failures, done, options, terms), options))
    return failures


def result_of(
    runs: list[dict[str, Any]], failures: list[str], done: int, options: argparse.Namespace, terms: systems.Terms
) -> dict[str, Any]:
    """All figures after `done` turns; in a turn every system has run with one seed."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": report.commit(ROOT),
        "machine": report.machine(),
        "goal": terms.goal,
        "lr": terms.lr,
        "config": terms.config.name,
        "overrides": options.overrides,
        "seeds": options.seeds,
        "rounds": options.rounds,
        "turns": done,
        "turns_asked": options.rounds * len(options.seeds),
        "summary": report.summary(runs),
        "failures": failures,
        "runs": runs,
    }


def kept(result: dict[str, Any], options: argparse.Namespace) -> str:
    """Write a result as JSON and as a table; returns the table."""
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{'-'.join(options.against)}_{result['machine']['cores']}cores_{result['date']}"
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = report.table(result)
    (options.out / f"{name}.md").write_text(text)
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", nargs="+", choices=RIVALS, default=["loop"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=1, help="how often every seed is run")
    parser.add_argument("--goal", type=float, default=0.85)
    parser.add_argument("--lr", type=float, default=2e-4, help="for every system")
    parser.add_argument("--max-updates", type=int, default=400)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that one run may take")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.toml")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="for busrl")
    parser.add_argument("--trl-python", default=os.environ.get("BUSRL_TRL_PYTHON", ""), help="Python that has TRL")
    parser.add_argument("--quiet", type=float, default=0.7, help="wait before a run until the load is below this")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for that at most")
    parser.add_argument("--without-busrl", action="store_true", help="measure the rivals alone")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if "trl" in options.against and not options.trl_python:
        print("--against trl needs --trl-python, one that has benchmarks/rivals/requirements.txt", file=sys.stderr)
        return 2
    terms = systems.Terms(
        goal=options.goal,
        lr=options.lr,
        max_updates=options.max_updates,
        limit_s=options.limit,
        config=options.config.resolve(),
        trl_python=options.trl_python,
    )
    from busrl.quickstart import ensure

    ensure("tiny:sort")  # made before the first clock starts
    return 1 if compare(options, terms) else 0
