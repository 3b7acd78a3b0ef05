"""Arguments of verbs that have many, apart from `command.py`, which stays one page per verb.

Loads nothing but argparse: `busrl --help` must be quick.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from busrl.cli.options import positive


def add_simulate_arguments(made: argparse.ArgumentParser) -> None:
    """Of `busrl simulate`."""
    add = made.add_argument
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


def add_evaluate_arguments(made: argparse.ArgumentParser) -> None:
    """Of `busrl evaluate`."""
    add = made.add_argument
    add("target", type=Path, metavar="TOPOLOGY|RUN_DIR", help="where engine, prompts and reward are described")
    text = "a step of the run, or a folder: a checkpoint or any model (default: the newest of the run, or model.path)"
    add("--checkpoint", default="", metavar="STEP|PATH", help=text)
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="change a key of a topology")
    add("--data", type=Path, metavar="FILE", help="prompts (default: validation.data, else data.train)")
    add("--samples", type=_count, metavar="N", help="how many (default: validation.samples)")
    add("--temperature", type=_temperature, metavar="T", help="0 = greedy (default: validation.temperature)")
    add("--out", type=Path, metavar="FILE", help="a line per sample (default: RUN_DIR/evaluated/step_N.jsonl)")
    add("--json", action="store_true", help="print one JSON object")


def _count(text: str) -> int:
    number = positive(text)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number")
    return int(number)


def _temperature(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else positive(text)
