"""Arguments and dispatch of the command `busrl`: one parser per verb, its function named, and errors made exit codes.

Only argparse and `busrl.errors` are loaded for `busrl --help`: a verb's module is imported when the verb is used. Knows
nothing of what the verbs do.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from busrl.errors import BugError, BusrlError, MachineError, TopologyError


def positive(text: str) -> float:
    """The value of an option that is a time or a size."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return number


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


EPILOG = """\
A first run:     busrl launch configs/quickstart.toml
Look before:     busrl check my.toml --set learner.lr=1e-4
Try a schedule:  busrl simulate my.toml --actors 64 --sweep learner.trigger.n_min=16,32,64
From outside:    busrl monitor           busrl status            busrl stop runs/NAME
Afterwards:      busrl audit runs/NAME    busrl evaluate runs/NAME
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is 0, the verb's own, or that of the error's family."""
    options = parser().parse_args(arguments)
    module, _, function = options.verb.partition(":")
    if module == "simulate":  # the predictors' matrices are small: a second numeric thread would only spin
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is loaded
    try:
        code = int(getattr(importlib.import_module(f"busrl.cli.{module}"), function)(options))
        sys.stdout.flush()
        return code
    except BusrlError as error:
        return _tell(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `busrl check x | head`: nobody reads any more
        _discard_output()
        return 141
    except OSError as error:
        if not _output_fails():  # another file's: the code that opened it should have named it
            raise
        _discard_output()
        return _tell(MachineError(f"standard output: {error.strerror}; make room where it goes, or send it elsewhere"))


def _output_fails() -> bool:
    """Whether standard output takes nothing: an empty line is the test, as what was printed may be given up already."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _discard_output() -> None:
    """What is still to be printed goes nowhere, or the interpreter would fail at it again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(error: BusrlError) -> int:
    if isinstance(error, BugError):
        traceback.print_exception(error)
        print("busrl: this is a bug of busrl; please report it with the lines above", file=sys.stderr)
    elif isinstance(error, TopologyError) and len(error.problems) > 1:
        print(f"busrl: {len(error.problems)} problems\n{error}", file=sys.stderr)
    else:
        print(f"busrl: {error}", file=sys.stderr)
    return error.exit_code


# -- parsers -----------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="busrl",
        description="Asynchronous reinforcement-learning post-training of language models, as processes on a bus.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_launch(verbs)
    _add_check(verbs)
    _add_status(verbs)
    _add_stop(verbs)
    _add_audit(verbs)
    _add_evaluate(verbs)
    _add_ring(verbs)
    _add_keys(verbs)
    _add_monitor(verbs)
    _add_record(verbs)
    _add_replay(verbs)
    _add_simulate(verbs)
    _verb(verbs, "version", "run:version", "print the version of busrl and of what it uses")
    return top


Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _verb(verbs: Verbs, name: str, function: str, text: str, more: str = "") -> argparse.ArgumentParser:
    """The parser of one verb; `function`: "MODULE:NAME" in `busrl.cli`, which takes the options."""
    made: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}".strip(), allow_abbrev=False
    )
    made.set_defaults(verb=function)
    return made


def _add_topology(made: argparse.ArgumentParser) -> None:
    made.add_argument("topology", type=Path, metavar="TOPOLOGY", help="topology file (.toml)")
    made.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="change one key, e.g. learner.trigger.n_min=16 or process.rollout.count=2; may be repeated",
    )


def _add_launch(verbs: Verbs) -> None:
    more = "Starting again in the same run directory continues that run: nothing is lost, nothing is trained twice."
    made = _verb(verbs, "launch", "run:launch", "start every process of a run, watch them, end with a summary", more)
    _add_topology(made)
    made.add_argument("--run-dir", type=Path, metavar="DIR", help="directory of the run (default: runs/NAME-TIME)")
    made.add_argument("--dry-run", action="store_true", help="explain what would be started, and start nothing")
    made.add_argument(
        "--resume", default="auto", metavar="auto|never|PATH",
        help="auto: go on from what the run directory holds (default); never: refuse if it holds a run; "
        "PATH: go on in this run directory",
    )


def _add_check(verbs: Verbs) -> None:
    text = "explain a topology: processes, sums, sizes, prompts, model; or everything that is wrong with it"
    made = _verb(verbs, "check", "run:check", text)
    _add_topology(made)
    made.add_argument("--verbose", action="store_true", help="also how slots, memory and limits follow from the keys")


def _add_status(verbs: Verbs) -> None:
    made = _verb(verbs, "status", "watch:status", "show what a run is doing now, changing nothing")
    made.add_argument("--json", action="store_true", help="one JSON object; its keys stand in docs/operating.md")
    made.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="default: the newest below runs/")


def _add_stop(verbs: Verbs) -> None:
    more = "What is in flight stays in the ledger, and a later `busrl launch` in the same directory continues."
    made = _verb(verbs, "stop", "run:stop", "end a run in order and wait until it has ended", more)
    made.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    made.add_argument("--wait", type=positive, default=120.0, metavar="S", help="give up after this long (default 120)")


def _add_audit(verbs: Verbs) -> None:
    more = "Exit code 0 if every promise holds, 1 if not. It works on a run that is running, has ended, or was killed."
    made = _verb(verbs, "audit", "run:audit", "recompute the fate of every sample from the files of a run", more)
    made.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    made.add_argument("--json", action="store_true", help="print one JSON object")


def _add_evaluate(verbs: Verbs) -> None:
    text = "measure a model or a checkpoint on held-out prompts, without a run"
    add_evaluate_arguments(_verb(verbs, "evaluate", "evaluate:evaluate", text))


def _add_ring(verbs: Verbs) -> None:
    text = "look at or remove shared-memory rings of this user"
    made: argparse.ArgumentParser = verbs.add_parser("ring", help=text, description=text, allow_abbrev=False)
    inner = made.add_subparsers(title="verbs", metavar="VERB", required=True)
    _verb(inner, "list", "rings:show_all", "list the rings in /dev/shm and who uses them")
    more = "With --uid: all that the run knows of one sample, also when it has ended."
    made = _verb(inner, "inspect", "rings:inspect", "show a ring's slots by state and owner, and its processes", more)
    text = "name as `busrl ring list` shows it, or a run directory (default: the newest below runs/)"
    made.add_argument("ring", metavar="RING", nargs="?", default="", help=text)
    made.add_argument("--uid", default="", metavar="UID", help="tell one sample's history (v7: of a validation sample)")
    more = "A later start of that run generates again what was in its slots."
    made = _verb(inner, "clean", "rings:clean", "remove the shared memory of a run that is over", more)
    made.add_argument("ring", metavar="RING", help="name as `busrl ring list` shows it, a run directory, or `all`")
    made.add_argument("--force", action="store_true", help="also while processes use it, or if it cannot be read")


def _add_keys(verbs: Verbs) -> None:
    text = "make and manage the keys that TCP connections to the bus need"
    made: argparse.ArgumentParser = verbs.add_parser("keys", help=text, description=text, allow_abbrev=False)
    inner = made.add_subparsers(title="verbs", metavar="VERB", required=True)
    one = _with_directory(_verb(inner, "init", "keys:init", "make the key directory and the broker's pair"))
    one.add_argument("--replace", action="store_true", help="a new pair for the broker; clients need their files again")
    more = "Prints the file that the client needs: its pair and the broker's public key."
    one = _with_directory(_verb(inner, "add", "keys:add", "let a client in", more))
    one.add_argument("name", metavar="NAME")
    one.add_argument("--public", default="", metavar="KEY", help="its public key, if it made its pair itself")
    _with_directory(_verb(inner, "list", "keys:show_all", "show who may connect"))
    one = _with_directory(_verb(inner, "show", "keys:show", "show the broker's public key, or that of a client"))
    one.add_argument("name", metavar="NAME", nargs="?", default="")
    more = "It cannot connect again; a connection that it has lasts until the process `bus` ends."
    one = _with_directory(_verb(inner, "remove", "keys:remove", "take a client off the list and delete its file", more))
    one.add_argument("name", metavar="NAME")
    text = "connect to a broker with a client's file and say whether it lets us in"
    one = _verb(inner, "try", "keys:try_to_connect", text)
    one.add_argument("endpoint", metavar="ENDPOINT", help="tcp://HOST:PORT, as in bus.endpoint")
    one.add_argument("file", metavar="FILE", type=Path, help="the file that `busrl keys add` printed")
    one.add_argument("--wait", type=positive, default=5.0, metavar="S", help="give up after this long (default 5)")


def _with_directory(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    text = "key directory (default $XDG_CONFIG_HOME/busrl/keys, or ~/.config/busrl/keys)"
    made.add_argument("--dir", type=Path, metavar="DIR", help=text)
    return made


def _add_monitor(verbs: Verbs) -> None:
    text = "watch a run, a recording that is replayed, or any endpoint, changing nothing"
    made = _verb(verbs, "monitor", "watch:monitor", text, "Keys of the live view: q quit, e errors.")
    made.add_argument(
        "target", nargs="?", metavar="RUN_DIR|ENDPOINT", help="default: the only run of this user that lives"
    )
    made.add_argument("--once", action="store_true", help="print the picture once and leave")
    made.add_argument("--json", action="store_true", help="with --once: one JSON object, its keys as documented")
    made.add_argument("--plain", action="store_true", help="lines without colours, as on a pipe")
    made.add_argument(
        "--seconds", type=positive, metavar="S",
        help="with --once: listen for so long first (default 1; at an endpoint until the replay is over, at most 60)",
    )


def _add_record(verbs: Verbs) -> None:
    more = "It ends with Ctrl-C, with the run, or at a limit; the file can be replayed, or read while it grows."
    text = "write what passes the bus of a run into a file, changing nothing"
    made = _verb(verbs, "record", "watch:record", text, more)
    made.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="default: the only run of this user that lives")
    made.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="a new file")
    made.add_argument("--seconds", type=positive, metavar="S", help="record for so long")
    made.add_argument("--limit", type=positive, default=1024.0, metavar="MIB", help="end at this size (default 1024)")


def _add_replay(verbs: Verbs) -> None:
    more = "It begins when somebody listens. An endpoint is ipc:///path."
    made = _verb(verbs, "replay", "watch:replay", "publish a recording again, for a monitor or another listener", more)
    made.add_argument("file", type=Path, metavar="FILE", help="what `busrl record` wrote")
    made.add_argument("--speed", default="1", metavar="N|max", help="1: as it was (default); N times as fast; max")
    made.add_argument(
        "--bind", default="", metavar="ENDPOINT", help="where listeners connect (default: one of its own)"
    )
    made.add_argument("--wait", type=positive, default=60.0, metavar="S", help="limit of the wait for a listener (60)")
    made.add_argument("--info", action="store_true", help="say what the file holds, and publish nothing")


def _add_simulate(verbs: Verbs) -> None:
    text = "how a topology would run: throughput, busy shares, ages, waits, on as many actors as you like"
    more = "Times and lengths are assumptions unless --fit or --trace say better; what was assumed is printed."
    add_simulate_arguments(_verb(verbs, "simulate", "simulate:simulate", text, more))
