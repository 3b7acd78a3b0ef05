"""Arguments and dispatch of the command `busrl`: one parser per verb, its function named, and errors made exit codes.

Only argparse, `busrl.errors` and the table of optional parts are loaded for `busrl --help`: a verb's module is imported
when the verb is used. The verbs of an optional part, and their options, come from `busrl.capabilities`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import math
import os
import re
import sys
import syslog
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO, TypeAlias, TypeVar, cast

import busrl
from busrl import capabilities
from busrl.errors import BugError, BusrlError, MachineError, TopologyError, Unfailing, UserError, escaped
from busrl.pages import IS_CLONE, PACKAGE, opened


def positive(text: str) -> float:
    """The value of an option that is a time or a size."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return number


def _count(text: str) -> int:
    number = positive(text)
    if number != int(number) or number > MOST_COUNT:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1 to {MOST_COUNT}")
    return int(number)


def _temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= HOTTEST:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 (greedy) to {HOTTEST:g}")
    return number


T = TypeVar("T")


def progress(line: Callable[[T], str], every_s: float) -> Callable[[T], None]:
    """Make a function that prints `line` of its argument on stderr, at most once in `every_s` seconds."""
    due = time.monotonic() + every_s

    def show(state: T) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + every_s
            print(line(state), file=sys.stderr, flush=True)

    return show


# Errors of a file that a verb cannot use where it is: they go to the person who named it, without a traceback.
UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENOSPC, errno.EDQUOT,
            errno.ELOOP, errno.ENAMETOOLONG, errno.EIO}
MOST_COUNT, HOTTEST = 1 << 20, 10.0  # values of options


EPILOG = """\
A first run:     busrl quickstart
Look before:     busrl check my.toml --set learner.lr=1e-4
Try a schedule:  busrl simulate my.toml --actors 64 --sweep learner.trigger.n_min=16,32,64
From outside:    busrl monitor           busrl status            busrl stop runs/NAME
While it runs:   busrl pause runs/NAME   busrl set runs/NAME learner.lr 1e-6
Afterwards:      busrl report runs/NAME   busrl audit runs/NAME    busrl evaluate runs/NAME
                 busrl export runs/NAME --out FOLDER
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is 0, the verb's own, or that of the error's family."""
    _open_streams()
    stderr = Unfailing(sys.stderr)
    try:
        with contextlib.redirect_stderr(cast(TextIO, stderr)):
            return _ended(sys.argv[1:] if arguments is None else arguments)
    finally:
        if stderr.lost:
            _discard(sys.stderr)


def _open_streams() -> None:
    """Open each closed standard stream as the null device: else the next file would get its number, and with it what
    processes print. Characters that the encoding of a stream lacks are spelt out."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - they live as long as the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _require_names(options: argparse.Namespace) -> None:
    """UserError for a path that is no UTF-8, the encoding of names in busrl's files, messages and process titles."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise UserError("the current directory does not exist any more; change to another one") from None
    options_of = vars(options).values()
    values = [value for option in options_of for value in (option if isinstance(option, list) else [option])]
    paths = [os.path.realpath(value) for value in values if isinstance(value, Path)]
    for text in (here, *paths, *(value for value in values if isinstance(value, str))):
        try:
            text.encode()
        except UnicodeEncodeError:
            shown = text.encode(errors="backslashreplace").decode()
            raise UserError(f"{shown}: the name is no UTF-8, as busrl's files need it; give it another name") from None


def _function_of(options: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """Load the module of the verb that was parsed; its function."""
    module, _, name = options.verb.partition(":")
    return cast(Callable[[argparse.Namespace], int], getattr(importlib.import_module(f"busrl.{module}"), name))


def _ended(arguments: Sequence[str]) -> int:
    verb = next(iter(arguments), "")
    try:
        options = parser(arguments).parse_args(arguments)
        verb = options.control
        _require_names(options)
        if getattr(options, "tag", None) is not None:
            importlib.import_module("busrl.cli.models").at_model(options)
        code = int((options.verb if callable(options.verb) else _function_of(options))(options))
        sys.stdout.flush()
        return code
    except BusrlError as error:
        return _print_error(error)
    except ImportError as error:
        if (problem := _lacking(error, verb)) is None:
            raise
        return _print_error(problem)
    except MemoryError as error:
        return _print_error(MachineError(f"`busrl {verb}` needs more memory than is there ({error}); ask for less"))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `busrl check x | head`, after head has ended
        _discard(sys.stdout)
        return 141
    except OSError as error:
        if error.filename is not None and error.errno in UNUSABLE:
            remedy = f"give a place that `busrl {verb}` can use"
            return _print_error(MachineError(f"{error.filename}: {error.strerror}; {remedy}"))
        if not _output_fails():  # then another file failed, and the code that opened it should have named it
            raise
        _discard(sys.stdout)
        remedy = "make room where it goes, or send it elsewhere"
        return _print_error(MachineError(f"standard output: {error.strerror}; {remedy}"))


COMPILED = re.compile(r"\b_(?:ring|wire|blocks)\b")


def _lacking(error: ImportError, verb: str) -> BusrlError | None:
    """Error of a failed import: a package of an extra to add, or an installation to repeat. None for any other."""
    from busrl.system.imports import remedy_for  # only here: `busrl --help` is to be quick

    if COMPILED.search(f"{error.name} {error}"):
        place = f"-e {PACKAGE.parent}" if IS_CLONE else f"--force-reinstall --no-deps busrl=={busrl.__version__}"
        return MachineError(
            f"{PACKAGE}: its compiled parts are missing, or of another busrl, Python or platform ({error}); install it "
            f"again: {sys.executable} -m pip install {place}"
        )
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not (remedy := remedy_for(package)):
        return None
    return UserError(f"`busrl {verb}` needs {package}, which {sys.executable} has not: {remedy}")


def _output_fails() -> bool:
    """Check by an empty line whether standard output takes nothing: what was printed before may be lost already."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _discard(stream: TextIO) -> None:
    """Drop what a stream still holds: the interpreter would fail at it again when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_error(error: BusrlError) -> int:
    """Print an error; the exit code of its family."""
    if isinstance(error, BugError):
        traceback.print_exception(error)
        print("busrl: this is a bug of busrl; please report it with the lines above", file=sys.stderr)
    elif isinstance(error, TopologyError) and len(error.problems) > 1:
        print(escaped(opened(f"busrl: {len(error.problems)} problems\n{error}")), file=sys.stderr)
    else:
        print(escaped(opened(f"busrl: {error}")), file=sys.stderr)
    if getattr(sys.stderr, "lost", False):  # a full disk takes no output: the system log is what is left
        syslog.openlog("busrl")
        syslog.syslog(syslog.LOG_ERR, str(error))
    return error.exit_code


# -- parsers -----


class Formatter(argparse.HelpFormatter):
    """Help that names pages as the reader can open them, and breaks no name of a page at the end of a line."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(opened(text).split()), width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else "\n".join(indent + line for line in self._split_lines(text, width))


def parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of all verbs. The verb of an optional part has its options only if `arguments` begin with it."""
    top = argparse.ArgumentParser(
        prog="busrl",
        description="Asynchronous reinforcement-learning post-training of language models, as processes on a bus.",
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    told = f"busrl {busrl.__version__}"
    top.add_argument("--version", action="version", version=told, help="print the version alone")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_quickstart(verbs)
    _add_init(verbs)
    _add_launch(verbs)
    _add_checks(verbs)
    _add_runs(verbs)
    _add_control(verbs)
    _add_accounts(verbs)
    _add_evaluate(verbs)
    _add_export(verbs)
    _add_ring(_group(verbs, "ring", "look at or remove shared-memory rings of this user"))
    _add_keys(_group(verbs, "keys", "make and manage the keys that TCP connections to the bus need"))
    _add_parts(verbs, arguments)
    _verb(verbs, "version", "cli.run:version", "print the version of busrl and of what it uses")
    return top


Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Add: TypeAlias = Callable[..., argparse.Action]


def _group(verbs: Verbs, name: str, text: str) -> Verbs:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=text, allow_abbrev=False, formatter_class=Formatter
    )
    return parser.add_subparsers(title="verbs", metavar="VERB", required=True)


def _verb(verbs: Verbs, name: str, function: str, text: str, more: str = "") -> Add:
    """Add a verb; its `add_argument`. `function` is "MODULE:NAME", the module relative to `busrl`: it takes the
    options and returns the exit code."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}".strip(), allow_abbrev=False,
        formatter_class=Formatter,
    )
    parser.set_defaults(verb=function, control=name)
    return parser.add_argument


def _set(add: Add, text: str) -> None:
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=text)


def _of_model(add: Add, default: str = "the first trained") -> None:
    add("--model", metavar="TAG", dest="tag", help=f"this one of a run of several models (default: {default})")


CASES = {  # of init
    "gsm8k": "word problems with a number as answer", "own": "your questions and answers (--data), as they are",
    "chat": "the same for a chat model, with a system prompt", "agents": "episodes of several model calls",
    "gpus": "gsm8k or --data on the GPUs of this host", "hosts": "the same, generated on other hosts too (--host)",
}


def _add_init(verbs: Verbs) -> None:
    text = "write a folder to begin with: prompts, a reward and a topology for your model"
    more = "Questions come from reasoning-gym (gsm_symbolic), or from a file of yours; nothing is downloaded."
    add = _verb(verbs, "init", "cli.init:init", text, more)
    add("name", choices=CASES, metavar="CASE", help="; ".join(f"{name}: {text}" for name, text in CASES.items()))
    add("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face model folder")
    add("--out", type=Path, metavar="FOLDER", help="where to write (default: a folder of the task's name)")
    text = "a JSONL or Parquet file, or a data set's folder, with question (or prompt, problem) and answer"
    add("--data", type=Path, metavar="FILE", help=text)
    add("--gpus", type=int, default=8, metavar="N", help="of the case gpus: how many there are (default 8)")
    add("--host", action="append", default=[], metavar="NAME", help="of the case hosts: who generates; may be repeated")
    text = "of the case hosts: where this host's bus listens, as the others see it"
    add("--endpoint", metavar="ENDPOINT", help=f"{text} (default: tcp://ITS_ADDRESS:5600)")


OVERRIDES = "change one key, e.g. learner.trigger.n_min=16 or process.rollout.count=2; may be repeated"


def _add_quickstart(verbs: Verbs) -> None:
    text = "make a tiny model and train it while you watch, on two CPU cores in about a minute"
    more = "It needs no file and no network; the model is kept for the next time."
    add = _verb(verbs, "quickstart", "cli.quickstart:quickstart", text, more)
    text = "start nothing: write topology, reward and README of a run of your own into a folder"
    add("--copy", type=Path, metavar="FOLDER", help=text)
    _add_start(add)


def _add_launch(verbs: Verbs) -> None:
    more = "Starting again in the same run directory continues that run: nothing is lost, nothing is trained twice."
    text = "start every process of a run, watch them, end with a summary"
    add = _verb(verbs, "launch", "cli.run:launch", text, more)
    add("topology", type=Path, metavar="TOPOLOGY", help="topology file (.toml)")
    _add_start(add)


def _add_start(add: Add) -> None:
    """The options of a start, whichever topology it has."""
    _set(add, OVERRIDES)
    add("--run-dir", type=Path, metavar="DIR", help="directory of the run (default: runs/NAME-TIME)")
    add("--dry-run", action="store_true", help="explain what would be started, and start nothing")
    text = "print what a cluster starts this run by (a JobSet or LeaderWorkerSet of Kubernetes, or a job of Slurm)"
    add("--emit", choices=("jobset", "lws", "slurm"), help=f"{text}, and start nothing")
    text = "auto: go on from what the run directory holds (default); never: refuse if it holds a run; "
    add("--resume", default="auto", metavar="auto|never|PATH", help=f"{text}PATH: go on in this run directory")


def _add_checks(verbs: Verbs) -> None:
    text = "look at this machine and at what is installed, and say what to do about what is wrong"
    add = _verb(verbs, "doctor", "preflight.doctor:doctor", text, "Exit code 0 if busrl can run here, 1 if not.")
    add("--json", action="store_true", help="print one JSON list")
    text = "print the JSON schema of topology files, for editors (docs/operating.md)"
    _verb(verbs, "schema", "cli.run:schema", text)
    text = "explain a topology: processes, sums, sizes, prompts, model; or everything that is wrong with it"
    add = _verb(verbs, "check", "cli.run:check", text)
    add("topology", type=Path, metavar="TOPOLOGY", help="topology file (.toml)")
    _set(add, OVERRIDES)
    add("--verbose", action="store_true", help="also how slots, memory and limits follow from the keys")
    text = "list the published algorithms of learner.recipe, and the keys that each sets"
    add = _verb(verbs, "recipes", "cli.run:recipes", text)
    add("names", nargs="*", metavar="NAME", help="only these (default: all)")


def _add_runs(verbs: Verbs) -> None:
    add = _verb(verbs, "status", "cli.run:status", "show what a run is doing now, changing nothing")
    add("--json", action="store_true", help="one JSON object; its keys stand in docs/run-directory.md")
    add("--host", default="", metavar="NAME", help="only another host of the run, with its processes")
    _of_model(add)
    add("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="default: the newest below runs/")
    more = "A name that another host has too is of this machine; there, name the directory of `busrl host`."
    add = _verb(verbs, "logs", "cli.run:logs", "print what the processes of a run wrote, all of them or one", more)
    add("run_dir", type=Path, metavar="RUN_DIR")
    add("name", nargs="?", default="", metavar="NAME", help="one process, as `busrl status` names it (default: all)")
    add("-f", "--follow", action="store_true", help="go on with what they write, until Ctrl-C or the end of the run")
    more = "What is in flight stays in the ledger, and a later `busrl launch` in the same directory continues."
    add = _verb(verbs, "stop", "cli.run:stop", "end a run in order and wait until it has ended", more)
    add("run_dir", type=Path, metavar="RUN_DIR")
    add("--now", action="store_true", help="kill everything at once; the next start repairs it")
    add("--wait", type=positive, default=120.0, metavar="S", help="give up after this long (default 120)")


def _add_control(verbs: Verbs) -> None:
    def verb(name: str, text: str, more: str) -> Add:
        add = _verb(verbs, name, "cli.run:control", text, more)
        add("run_dir", type=Path, metavar="RUN_DIR")
        add("--wait", type=positive, default=60.0, metavar="S", help="give up after this long (default 60)")
        return add

    more = "Nothing is dispatched or generated until `busrl resume`; nothing is lost, and nothing times out."
    verb("pause", "hold a running run: its engines draw nothing", more)
    verb("resume", "let a run that was paused go on", "Answers continue where they were.")
    text = "have a running run write a checkpoint now, and wait for it"
    _of_model(verb("checkpoint", text, "None is made twice for a step."), "all that learn")
    more = "It holds until it is set again, over restarts too. docs/operating.md has the keys."
    add = verb("set", "change a key of a running run", more)
    _of_model(add)
    add("key", metavar="KEY", help="for example learner.lr")
    add("value", metavar="VALUE", help="as in a topology")
    text = "change the number of processes of a role in a running run"
    add = verb("scale", text, "Fewer: the last ones end in order.")
    _of_model(add)
    add("key", metavar="ROLE", help="for example rollout")
    add("value", metavar="N")


def _add_accounts(verbs: Verbs) -> None:
    more = "Exit code 0 if every promise holds, 1 if not. It works on a run that is running, has ended, or was killed."
    add = _verb(verbs, "audit", "cli.run:audit", "recompute the fate of every sample from the files of a run", more)
    add("run_dir", type=Path, metavar="RUN_DIR")
    text = "also what became of the tokens, and whether long answers are lost more often"
    add("--waste", action="store_true", help=text)
    _of_model(add)
    add("--json", action="store_true", help="print one JSON object")


def _add_evaluate(verbs: Verbs) -> None:
    text = "measure a model or a checkpoint on held-out prompts, without a run"
    add = _verb(verbs, "evaluate", "cli.evaluate:evaluate", text)
    add("target", type=Path, metavar="TOPOLOGY|RUN_DIR", help="where engine, prompts and reward are described")
    text = "a step of the run, or a folder: a checkpoint or any model (default: the newest of the run, or model.path)"
    add("--checkpoint", default="", metavar="STEP|PATH", help=text)
    _of_model(add)
    _set(add, "change a key of a topology")
    add("--data", type=Path, metavar="FILE", help="prompts (default: validation.data, else data.train)")
    add("--validation", metavar="NAME", help="a [[validation.set]] of the topology (default: the first set)")
    add("--samples", type=_count, metavar="N", help="prompts (default: those of the set)")
    add("--k", type=_count, metavar="K", help="answers to each prompt (default: those of the set)")
    add("--temperature", type=_temperature, metavar="T", help="0 = greedy (default: validation.temperature)")
    add("--out", type=Path, metavar="FILE", help="a line per sample (default: RUN_DIR/evaluated/step_N.jsonl)")
    add("--json", action="store_true", help="print one JSON object")
    text = "ask a run that is running for a round of validation now, and wait for its figures"
    more = "Training goes on meanwhile, as validation.mode says."
    add = _verb(verbs, "validate", "cli.evaluate:validate", text, more)
    _of_model(add)
    add("run_dir", type=Path, metavar="RUN_DIR")
    add("names", nargs="*", metavar="NAME", help="sets of the run (default: all of them)")
    add("--free", action="store_true", help="hold nothing: answers may be of several versions, which is said")
    add("--wait", type=positive, default=600.0, metavar="S", help="give up waiting after this long (default 600)")
    add("--json", action="store_true", help="print the lines of validation.jsonl")


def _add_export(verbs: Verbs) -> None:
    text = "write the model of a checkpoint as a Hugging Face folder, its tokenizer beside it"
    more = "With LoRA base and adapter are merged. Nothing is overwritten, and the run may be running."
    add = _verb(verbs, "export", "cli.evaluate:export", text, more)
    add("run_dir", type=Path, metavar="RUN_DIR")
    text = "what a client of a service saved, tinker://MODEL/KIND/NAME, in place of a checkpoint"
    add("saved", metavar="SAVED", nargs="?", default="", help=text)
    _of_model(add)
    add("--adapter", action="store_true", help="of SAVED the adapter alone, as a folder in peft's format")
    add("--step", type=_count, metavar="N", help="the checkpoint of this step (default: the newest)")
    add("--out", type=Path, required=True, metavar="FOLDER", help="a new folder")
    text = "number type of the weights (default: as in the checkpoint)"
    add("--dtype", choices=("float32", "bfloat16", "float16"), help=text)


def _add_ring(verbs: Verbs) -> None:
    _verb(verbs, "list", "cli.rings:show_all", "list the rings in /dev/shm and who uses them")
    more = "With --uid: all that the run knows of one sample, also when it has ended."
    text = "show a ring's slots by state and owner, and its processes"
    add = _verb(verbs, "inspect", "cli.rings:inspect", text, more)
    text = "name as `busrl ring list` shows it, or a run directory (default: the newest below runs/)"
    add("ring", metavar="RING", nargs="?", default="", help=text)
    _of_model(add)
    add("--uid", default="", metavar="UID", help="print one sample's history (v7: of a validation sample)")
    more = "A later start of that run generates again what was in its slots."
    add = _verb(verbs, "clean", "cli.rings:clean", "remove the shared memory of a run that is over", more)
    add("ring", metavar="RING", help="name as `busrl ring list` shows it, a run directory, or `all`")
    add("--force", action="store_true", help="also while processes use it, or if it cannot be read")


def _add_keys(verbs: Verbs) -> None:
    def verb(name: str, text: str, more: str = "") -> Add:
        add = _verb(verbs, name, f"cli.keys:{'show_all' if name == 'list' else name}", text, more)
        where = "key directory (default $XDG_CONFIG_HOME/busrl/keys, or ~/.config/busrl/keys)"
        add("--dir", type=Path, metavar="DIR", help=where)
        return add

    add = verb("init", "make the key directory and the broker's pair")
    add("--replace", action="store_true", help="a new pair for the broker; clients need their files again")
    more = "Prints the file that the client needs: its pair and the broker's public key."
    add = verb("add", "allow a client to connect", more)
    add("name", metavar="NAME")
    add("--public", default="", metavar="KEY", help="its public key, if it made its pair itself")
    verb("list", "show who may connect")
    verb("show", "show the broker's public key, or that of a client")("name", metavar="NAME", nargs="?", default="")
    more = "It cannot connect again; a connection that it has lasts until the process `bus` ends."
    verb("remove", "take a client off the list and delete its file", more)("name", metavar="NAME")
    text = "connect to a broker with a client's file and say whether it accepts us"
    add = _verb(verbs, "try", "cli.keys:try_to_connect", text)
    add("endpoint", metavar="ENDPOINT", help="tcp://HOST:PORT, as in bus.endpoint")
    add("file", metavar="FILE", type=Path, help="the file that `busrl keys add` printed")
    add("--wait", type=positive, default=5.0, metavar="S", help="give up after this long (default 5)")


def _add_parts(verbs: Verbs, arguments: Sequence[str]) -> None:
    """Add the verbs of the optional parts that are installed. UserError: `arguments` use a verb of one that is not."""
    for part, command in capabilities.commands():
        used = command.name in arguments[:1]
        if not part.here:
            if used:
                raise part.missing()
            continue
        description = f"{command.text[0].upper()}{command.text[1:]}. {command.more}".strip()
        added = verbs.add_parser(
            command.name, help=command.text, description=description, allow_abbrev=False, formatter_class=Formatter
        )
        if command.of_model:
            _of_model(added.add_argument)
        if used:
            added.set_defaults(verb=capabilities.load(command)(added), control=command.name)
