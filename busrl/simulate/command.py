"""`busrl simulate`: the figures of a run of a topology, with any number of actors, within seconds.

Arguments, files and printed text; the simulation itself is `busrl.simulate.world`. Starts no process, loads no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from busrl.cli.command import progress
from busrl.data.trace import Shape, make_trace, write
from busrl.errors import UserError
from busrl.preflight import machine
from busrl.simulate import report
from busrl.simulate.figures import Figures
from busrl.simulate.fit import Fitted, fit
from busrl.simulate.report import Axis, Point, axis, points
from busrl.simulate.settings import Setting, make, notes
from busrl.simulate.world import World
from busrl.system import files

PATIENCE_S = 10.0
Rows = Sequence[tuple[tuple[str, ...], Figures]]  # values and figures of each point of a sweep
# Options of --generate with their values when left out, and those that belong to a simulation.
GENERATING: dict[str, Any] = {"prompts": 2048, "group_size": 8, "median": 400.0, "limit": 8192, "arrivals": 0.0}
SIMULATING = ("topology", "overrides", "trace", "fit", "sweep", "out", "json")


def simulate_options(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    add = parser.add_argument
    add("topology", nargs="?", type=Path, metavar="TOPOLOGY", help="topology file (.toml)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="change one key")
    add("--actors", type=int, metavar="N", help="rollout processes (default: as the topology says)")
    add("--trace", type=Path, metavar="FILE", help="prompts with the lengths of their answers (JSONL)")
    add("--fit", type=Path, metavar="RUN_DIR", help="times, lengths and rewards of a finished run")
    add("--sweep", action="append", default=[], metavar="KEY=A,B,C", help="simulate with each value; may be repeated")
    add("--steps", type=int, metavar="S", help="optimiser steps (default: the first 60 of run.max_steps)")
    add("--seed", type=int, metavar="N", help="of all that happens by chance (default: run.seed)")
    add("--out", type=Path, metavar="DIR", help="where a sweep writes its table and picture (default: simulated/NAME)")
    add("--json", action="store_true", help="print JSON")
    add("--generate", type=Path, metavar="FILE", help="write a long-tailed trace and leave")
    add("--prompts", type=int, metavar="N", help="with --generate: its lines (default 2048)")
    add("--group-size", type=int, metavar="G", help="with --generate: answers per prompt (default 8)")
    add("--median", type=float, metavar="T", help="with --generate: median length (default 400)")
    add("--limit", type=int, metavar="T", help="with --generate: longest answer (default 8192)")
    add("--arrivals", type=float, metavar="R", help="with --generate: prompts per second, 0 = all at once")
    return simulate


def simulate(options: argparse.Namespace) -> int:
    _refuse_mixed(options)
    if options.generate is not None:
        return _generate_trace(options)
    if options.topology is None:
        raise UserError("busrl simulate: give a topology file, or --generate FILE to write a trace")
    axes = [axis(text) for text in options.sweep]
    if options.actors is not None and any(key == "simulate.actors" for key, _ in axes):
        raise UserError("--actors and --sweep simulate.actors contradict each other; remove --actors")
    fitted = fit(options.fit) if options.fit else None
    chosen = {name: getattr(options, name) for name in ("trace", "actors", "steps", "seed")}
    checked = points(options.topology, options.overrides, axes)
    settings = [(point, make(point.topology, fitted, point.written, **chosen)) for point in checked]
    if not axes:
        return _single(*settings[0], fitted, options.json)
    return _sweep(settings, axes, fitted, options)


def _refuse_mixed(options: argparse.Namespace) -> None:
    generating = [name for name in GENERATING if getattr(options, name) is not None]
    if options.generate is None:
        if generating:
            raise UserError(f"{_option(generating[0])} belongs to --generate FILE, which writes a trace; remove it")
        return
    others = [name for name in SIMULATING if getattr(options, name)]
    if options.actors is not None or options.steps is not None:
        others.append("actors" if options.actors is not None else "steps")
    if others:
        raise UserError(
            f"--generate {options.generate} only writes a trace, and {_option(others[0])} belongs to a "
            "simulation; run one command for each"
        )


def _option(name: str) -> str:
    return {"topology": "TOPOLOGY", "overrides": "--set"}.get(name, f"--{name.replace('_', '-')}")


def _generate_trace(options: argparse.Namespace) -> int:
    for name, value in GENERATING.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    seed = options.seed or 0
    wrong = [
        (f"--prompts {options.prompts}", options.prompts < 1, "must be >= 1"),
        (f"--group-size {options.group_size}", not 1 <= options.group_size <= 1024, "must be 1 to 1024"),
        (f"--median {options.median:g}", not 1 <= options.median <= options.limit, "must be 1 to --limit"),
        (f"--limit {options.limit}", options.limit < 1, "must be >= 1"),
        (f"--arrivals {options.arrivals:g}", not 0 <= options.arrivals < float("inf"), "must be >= 0 per second"),
        (f"--seed {seed}", seed < 0, "must be >= 0"),
    ]
    for what, broken, rule in wrong:
        if broken:
            raise UserError(f"{what}: {rule}; give another value")
    shape = Shape(options.group_size, options.median, options.limit, arrivals_per_s=options.arrivals)
    if os.path.lexists(options.generate):
        raise UserError(f"--generate {options.generate}: exists already; give another name, or remove it first")
    try:
        write(options.generate, make_trace(options.prompts, shape, seed))
    except OSError as error:
        raise UserError(f"--generate {options.generate}: cannot be written: {error.strerror}") from None
    print(f"{options.generate}: {options.prompts} prompts of {options.group_size} answers, median {options.median:g}")
    return 0


def _progress(world: World, name: str, begun: float) -> str:
    """A line about a simulation under way. `name`: of the point of a sweep; `begun`: by the real clock."""
    return (
        f"{name}step {world.learner.step} of {world.steps} after {time.monotonic() - begun:.0f} s here and "
        f"{world.now:.0f} s of virtual time: {world.counts.ended} answers, {sum(world.counts.aside.values())} groups "
        "set aside"
    )


def _play(point: Point, setting: Setting) -> Figures:
    world = World(
        point.topology, setting.times, setting.answers, actors=setting.actors, steps=setting.steps,
        seed=setting.seed, oracle=point.topology.simulate.oracle,
    )
    name, begun = f"{' '.join(point.values)}: " if point.values else "", time.monotonic()
    return world.run(progress(lambda world: _progress(world, name, begun), PATIENCE_S))


def _single(point: Point, setting: Setting, fitted: Fitted | None, as_json: bool) -> int:
    begun = time.perf_counter()
    figures = _play(point, setting)
    took = time.perf_counter() - begun
    if as_json:
        print(json.dumps(_plain(point, setting, figures), indent=2))
        return 0
    print(report.page(point.topology, setting, figures, took, len(machine.cores())), end="")
    if fitted is not None:
        for note in (*fitted.notes, *_beyond(fitted, [((), figures)])):
            print(f"  {note}")
    return 0


def _beyond(fitted: Fitted | None, rows: Rows) -> list[str]:
    if fitted is None:
        return []
    beyond = [(" ".join(values), report.outside(fitted.seen, figures)) for values, figures in rows]
    return [
        f"WARNING: {name + ': ' if name else ''}{what}: beyond what the fitted run showed, so its times are a guess "
        "there; fit a run of that size"
        for name, what in beyond
        if what
    ]


def _sweep(
    settings: Sequence[tuple[Point, Setting]], axes: Sequence[Axis], fitted: Fitted | None, options: argparse.Namespace
) -> int:
    keys = [key for key, _ in axes]
    done: list[tuple[Point, Setting, Figures]] = []
    for point, setting in settings:
        done.append((point, setting, _play(point, setting)))
        if not options.json:
            print(f"{' '.join(point.values)}: {done[-1][2].samples_per_s:.4g} samples/s", flush=True)
    rows = [(point.values, figures) for point, _, figures in done]
    written = _write(options.out or Path("simulated") / settings[0][0].topology.run.name, keys, rows)
    if options.json:
        print(json.dumps([_plain(*entry) for entry in done], indent=2))
        return 0
    print("\n".join(["", *report.warning(settings[0][1])]))
    origins = notes((" ".join(point.values), setting.answers_note) for point, setting in settings)
    lines = [f"answers: {note}" for note in origins]
    print("\n".join(["", report.markdown(keys, rows), *lines, *_beyond(fitted, rows)]))
    print(", ".join(map(str, written)))
    return 0


def _write(folder: Path, keys: Sequence[str], rows: Rows) -> list[Path]:
    texts = {"csv": report.comma_separated(keys, rows), "md": report.markdown(keys, rows)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be made a directory: {error.strerror}; give another") from None
    for ending, text in texts.items():
        files.replace(folder / f"sweep.{ending}", text.encode())
    return [folder / f"sweep.{ending}" for ending in texts]


def _plain(point: Point, setting: Setting, figures: Figures) -> dict[str, Any]:
    times = {name: {"value": value, "source": source} for name, value, source in setting.times.notes()}
    return {
        "name": point.topology.run.name, "set": list(point.topology.overrides), "actors": setting.actors,
        "seed": setting.seed, "answers": setting.answers_note, "times": times, "figures": figures.to_json(),
    }
