"""`busrl simulate`: how would this topology run, on how many actors you like, in seconds.

Arguments, files and what is printed; the simulation itself is `busrl.simulate`. Starts no process and loads no torch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from busrl.data.trace import write
from busrl.data.tracemaker import Shape, generate
from busrl.errors import UserError
from busrl.ledger.files import write_whole
from busrl.roles.limits import admission_limits
from busrl.simulate import Figures, World, report
from busrl.simulate.fit import Fitted, fit
from busrl.simulate.picture import svg
from busrl.simulate.settings import Asked, Setting, make
from busrl.simulate.sweep import Axis, Point, axis, points


def simulate(options: argparse.Namespace) -> int:
    """The verb."""
    if options.generate is not None:
        return generate_trace(options)
    if options.topology is None:
        raise UserError("busrl simulate: give a topology file, or --generate FILE to write a trace")
    axes = [axis(text) for text in options.sweep]
    if options.actors is not None and any(one.key == "simulate.actors" for one in axes):
        raise UserError("--actors and --sweep simulate.actors contradict each other; leave --actors out")
    fitted = fit(options.fit) if options.fit else None
    asked = Asked(options.trace, options.actors, options.steps, options.seed)
    found = points(options.topology, options.overrides, axes)
    settings = [(point, make(point.topology, asked, fitted)) for point in found]
    if not axes:
        return _one(*settings[0], fitted, options.json)
    return _sweep(settings, axes, options)


def generate_trace(options: argparse.Namespace) -> int:
    """Write a long-tailed trace."""
    wrong = [
        (f"--prompts {options.prompts}", options.prompts < 1, "must be >= 1"),
        (f"--group-size {options.group_size}", not 1 <= options.group_size <= 1024, "must be 1 to 1024"),
        (f"--median {options.median:g}", not 1 <= options.median <= options.limit, "must be 1 to --limit"),
        (f"--limit {options.limit}", options.limit < 1, "must be >= 1"),
        (f"--arrivals {options.arrivals:g}", not 0 <= options.arrivals < float("inf"), "must be >= 0 per second"),
    ]
    for what, broken, rule in wrong:
        if broken:
            raise UserError(f"{what}: {rule}; give another value")
    shape = Shape(options.group_size, options.median, options.limit, arrivals_per_s=options.arrivals)
    try:
        write(options.generate, generate(options.prompts, shape, options.seed or 0))
    except OSError as error:
        raise UserError(f"--generate {options.generate}: can not be written: {error.strerror}") from None
    print(f"{options.generate}: {options.prompts} prompts of {options.group_size} answers, median {options.median:g}")
    return 0


def _play(point: Point, setting: Setting) -> Figures:
    world = World(
        point.topology, setting.times, setting.answers, actors=setting.actors, steps=setting.steps,
        seed=setting.seed, oracle=point.topology.simulate.oracle,
    )  # fmt: skip
    return world.run()


def _one(point: Point, setting: Setting, fitted: Fitted | None, as_json: bool) -> int:
    begun = time.perf_counter()
    found = _play(point, setting)
    took = time.perf_counter() - begun
    if as_json:
        print(json.dumps(_plain(point, setting, found), indent=2))
        return 0
    limits = admission_limits(point.topology)
    print(report.page(point.topology, limits, setting, found, took), end="")
    for note in fitted.notes if fitted else ():
        print(f"  {note}")
    return 0


def _sweep(settings: Sequence[tuple[Point, Setting]], axes: Sequence[Axis], options: argparse.Namespace) -> int:
    keys = [one.key for one in axes]
    done: list[tuple[Point, Setting, Figures]] = []
    for point, setting in settings:
        done.append((point, setting, _play(point, setting)))
        if not options.json:
            print(f"{' '.join(point.values)}: {done[-1][2].samples_per_s:.4g} samples/s", flush=True)
    rows = [(point.values, found) for point, _, found in done]
    name = settings[0][0].topology.run.name
    written = _write(options.out or Path("simulated") / name, f"{name}: {', '.join(keys)}", keys, rows)
    if options.json:
        print(json.dumps([_plain(*one) for one in done], indent=2))
        return 0
    print(f"\n{report.markdown(keys, rows)}\n{settings[0][1].answers_note}\n{', '.join(map(str, written))}")
    return 0


def _write(
    folder: Path, title: str, keys: Sequence[str], rows: Sequence[tuple[tuple[str, ...], Figures]]
) -> list[Path]:
    texts: dict[str, Callable[[], str]] = {
        "sweep.csv": lambda: report.comma_separated(keys, rows),
        "sweep.md": lambda: report.markdown(keys, rows),
        "sweep.svg": lambda: svg(title, rows),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: can not be made a directory: {error.strerror}; give another") from None
    for name, text in texts.items():
        write_whole(folder / name, text().encode())
    return [folder / name for name in texts]


def _plain(point: Point, setting: Setting, found: Figures) -> dict[str, Any]:
    times = {name: {"value": value, "source": source} for name, value, source in setting.times.notes()}
    return {
        "name": point.topology.run.name, "set": list(point.topology.overrides), "actors": setting.actors,
        "seed": setting.seed, "answers": setting.answers_note, "times": times, "figures": found.to_json(),
    }  # fmt: skip
