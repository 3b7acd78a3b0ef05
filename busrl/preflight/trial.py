"""Trials of the user's own code before a run starts: the reward of the first prompt, losses, metrics, episodes.

It runs in a process of its own with deadlines, since it is foreign code: it may raise, hang or print.

- A reward that cannot be loaded, or that fails for every answer that is tried, is a problem: each sample of the run
  would be lost. One that fails for some of them, or gives both the same value, is reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from busrl import capabilities
from busrl.data import pretrained
from busrl.data.chat import LightTokenizer
from busrl.data.prompts import open_file, prompt_lines, prompt_of
from busrl.data.vocabulary import end_ids, vocabulary_size
from busrl.errors import DataError
from busrl.preflight.prompt_tokens import tokenizer_of
from busrl.rewards.base import Setup
from busrl.rewards.pool import setups
from busrl.states import TINY
from busrl.system import proxies
from busrl.system.imports import IMPORTING, interpreter
from busrl.topology.declare import FUNCTION
from busrl.topology.reader import show
from busrl.topology.rewards import PYTHON, RETURNED, REWARD_KINDS
from busrl.topology.schema import Topology, has_model

# -- the first prompt and its reward -----

LOAD_S, MODEL_LOAD_S = 60.0, 600.0  # importing a reward may take so long, and loading a reward model
END_S = 5.0  # from the end of its output to that of the process
JUDGE_PAUSE_S = 20.0  # at most, between the two tries of a judge
SHOWN_TEXT, SHOWN_IDS = 160, 12
EMPTY, RIGHT, MADE_UP = "an empty answer", "the right answer", "a made-up answer"
SOMETHING = "42"  # text, a number and JSON: a reward that fails for this too fails for more than an empty text


@dataclass(frozen=True)
class Tried:
    """An answer and what came of it. `error`: "" | raised | malformed | hung | died, `text` says more."""

    what: str
    answer: str
    value: float = 0.0
    error: str = ""
    text: str = ""

    def in_words(self) -> str:
        """The value, or the first line of the error."""
        if self.error == "hung":
            return self.text
        cause = self.text.strip().splitlines()[0] if self.text.strip() else self.error
        return cause if self.error else f"{self.value:g}"


@dataclass(frozen=True)
class Judged:
    """The results of one reward, or one part of it, for each answer; or why it cannot be loaded. `key`: of its
    function; `label` names a part in lines."""

    key: str
    label: str
    tried: tuple[Tried, ...] = ()
    not_loaded: str = ""

    @property
    def failed(self) -> Tried | None:
        """The first failure, where nothing went well."""
        return self.tried[0] if self.tried and all(attempt.error for attempt in self.tried) else None

    def lines(self) -> Iterator[str]:
        if self.not_loaded:
            yield f"  reward{self.label}: cannot be used: {self.not_loaded}"
        for attempt in self.tried:
            shown = f" {show(attempt.answer, SHOWN_TEXT)}" if attempt.answer else ""
            yield f"  reward{self.label} of {attempt.what}{shown}: {attempt.in_words()}"
        values = [attempt.value for attempt in self.tried]
        if [attempt.what for attempt in self.tried if not attempt.error] == [EMPTY, RIGHT] and values[0] == values[1]:
            yield "  (both are worth the same: right, if the reward wants more than the bare answer)"


@dataclass(frozen=True)
class Trial:
    """Lines for `busrl check`; what the reward, or each of its parts, did."""

    lines: tuple[str, ...] = ()
    judged: tuple[Judged, ...] = ()


def try_first(t: Topology, kinds: Sequence[str] = ()) -> Trial:
    """Load the reward, and judge the first record with it, if there is one and busrl's own reward process starts. Parts
    of a reward are tried one by one: those of these kinds, or all."""
    place, line = _first_line(t)
    record: dict[str, Any] = json.loads(line) if line else {}
    tokenizer = tokenizer_of(t)
    judged = []
    for subject in _subjects(t):
        if not kinds or subject.setup.kind in kinds:
            answers = _answers(t, subject, record, tokenizer) if line else []
            not_loaded, tried = _judge(t, subject, line or "{}", answers)
            judged.append(Judged(subject.key, subject.label, tuple(tried), not_loaded))
    if not line:
        return Trial(judged=tuple(judged))
    results = (text for result in judged for text in result.lines())
    return Trial((*_prompt(t, place, record, tokenizer), *results), tuple(judged))


@dataclass(frozen=True)
class Subject:
    """The trial of a reward: its setup, and how long a call may take."""

    key: str
    label: str
    setup: Setup
    timeout_s: float
    timeout_key: str = "reward.timeout_s"


def _subjects(t: Topology) -> Iterator[Subject]:
    # One more try is enough to find a judge absent.
    parts = tuple(dataclasses.replace(part, retries=min(1, part.retries)) for part in t.reward.part)
    reward = dataclasses.replace(t.reward, part=parts)
    for index, (setup, name, _) in enumerate(setups(reward, t.base_dir, t.data.prompt_key, t.device_of("reward/0"))):
        if setup.kind == RETURNED:
            continue  # there is no episode yet
        if not parts:
            yield Subject("reward.function", "", setup, setup.timeout_s)
            continue
        repeats = "retries" in REWARD_KINDS[setup.kind].keys
        waits_s = setup.timeout_s * (1 + setup.retries) + JUDGE_PAUSE_S if repeats else setup.timeout_s
        key = f"reward.part.{index}.{'function' if setup.kind == PYTHON else 'kind'}"
        yield Subject(key, f" part {name}", setup, waits_s, "its timeout_s")


def _answers(t: Topology, subject: Subject, record: dict[str, Any], tokenizer: LightTokenizer | None) -> Answers:
    """An empty answer, and the right one where the record has it."""
    if not any(entry.role == "reward" and entry.count and not entry.command for entry in t.process):
        return []
    right = record.get(subject.setup.answer_key or t.data.answer_key)
    what, text = MADE_UP, SOMETHING
    if right is not None and not isinstance(right, (dict, list)):
        what, text = RIGHT, right if isinstance(right, str) else json.dumps(right)
    if subject.setup.kind == "code" and not subject.setup.extract and "```" not in text:
        text = f"```python\n{text if what == RIGHT else 'pass'}\n```"
    return [(EMPTY, "", []), (what, text, tokenizer.ids(text) if tokenizer else [])]


def _first_line(t: Topology) -> tuple[str, str]:
    """Place and text of the first line of data.train; both empty where none can be read."""
    path = t.data.train
    if path.startswith(TINY):
        prompts = pretrained.task_prompts(path)
        if prompts is None:
            return "", ""
        path = str(prompts)
    try:
        with open(open_file(Path(path)), "rb") as file:
            _, line = next(prompt_lines(file))
        return (f"{path}:1", line.decode()) if isinstance(json.loads(line), dict) else ("", "")
    except (OSError, ValueError, DataError, StopIteration):
        return "", ""  # `prompt_files` reports what is wrong with the file


def _prompt(t: Topology, place: str, record: dict[str, Any], tokenizer: LightTokenizer | None) -> Iterator[str]:
    yield f"first prompt ({place})"
    try:
        prompt = prompt_of(record, t.data)
        text = tokenizer.text(prompt) if tokenizer else prompt
        ids = tokenizer.ids(prompt) if tokenizer else []
    except DataError as problem:
        yield f"  cannot be written: {problem}"
        return
    yield f"  as the model reads it: {show(text, SHOWN_TEXT)}"
    if ids:
        more = ", ..." if len(ids) > SHOWN_IDS else ""
        yield f"  {len(ids)} tokens: {', '.join(map(str, ids[:SHOWN_IDS]))}{more}"


def ends(t: Topology) -> str:
    """The fault of the tokens that end an answer; empty where nothing is, or where no model runs here."""
    generates = any(entry.role == "rollout" and has_model(entry) for entry in t.process)
    tokenizer = tokenizer_of(t) if generates and not t.model.path.startswith(TINY) else None
    if tokenizer is None:
        return ""
    folder = Path(t.model.path)
    tokenizer_end = tokenizer.id_of(tokenizer.end) if tokenizer.end else None
    ending = end_ids(folder) | ({tokenizer_end} if tokenizer_end is not None else set())
    shown, size = ", ".join(map(str, sorted(ending))), vocabulary_size(folder)
    limit = f"generation.max_new_tokens = {t.generation.max_new_tokens}"
    if size and all(token >= size for token in ending):
        what = f"its end tokens ({shown}) are none of its {size} ids" if ending else "it names no end token"
        return f"model.path: {what}, so every answer is cut at {limit}; set eos_token_id in generation_config.json"
    turn = tokenizer.turn_end() if t.data.template == "chat" else None
    if turn is not None and turn[0] not in ending:
        return (
            f"model.path: its chat template ends a turn with {turn[1]} (id {turn[0]}), and the end tokens are {shown}: "
            f"an answer may go on to {limit}; add {turn[0]} to eos_token_id in generation_config.json"
        )
    return ""


# -- the other process -----

Answers = list[tuple[str, str, list[int]]]


class Foreign:
    """A process that runs a user's code, and lines of JSON from it, each waited for with a deadline."""

    def __init__(self, child: subprocess.Popen[bytes], printed: IO[bytes]) -> None:
        self.child, self._printed, self._rest = child, printed, b""
        self.ended = False

    def send(self, *values: Any) -> None:
        """Write lines of JSON; of a process that has died already `last_words` gives the cause."""
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(b"".join(msgspec.json.encode(value) + b"\n" for value in values))
            self.child.stdin.flush()

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next line; None after the time, or when the other side has ended."""
        assert self.child.stdout is not None
        pipe, until = self.child.stdout, time.monotonic() + timeout_s
        poller = select.poll()  # select(2) knows no descriptor from 1,024 on
        poller.register(pipe, select.POLLIN)
        while b"\n" not in self._rest:
            ready = poller.poll(1000 * max(0.0, until - time.monotonic()))
            data = os.read(pipe.fileno(), 1 << 16) if ready else b""
            if not data:
                self.ended = bool(ready)
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event

    def last_words(self) -> str:
        """Exit code and last line; it may live on where user code has closed its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(END_S)
        self._printed.seek(0)
        rows = self._printed.read().decode(errors="replace").strip().splitlines()
        code = "its output is closed" if self.child.returncode is None else f"exit code {self.child.returncode}"
        return f"{code}, {rows[-1]}" if rows else code


@contextlib.contextmanager
def foreign(t: Topology, role: str, *command: str, python: str = "") -> Iterator[Foreign]:
    """A process with the environment of that role, killed at the end. It prints to a file, and so never waits for a
    reader."""
    entry = next((candidate for candidate in t.process if candidate.role == role and not candidate.command), None)
    program = interpreter(python or (entry.python if entry else ""))
    environment = proxies.environment({**os.environ, **(entry.env if entry else {})})
    with tempfile.TemporaryFile() as printed:
        child = subprocess.Popen(
            [*program, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed,
            env=environment, start_new_session=True,
        )
        try:
            yield Foreign(child, printed)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # it, and whatever user code has started
            child.communicate()


def _judge(t: Topology, subject: Subject, line: str, answers: Answers) -> tuple[str, list[Tried]]:
    """The reason why the reward cannot be loaded ("" if it can), and what it did with each answer until one hung."""
    items = [
        {"key": key, "record_line": line.encode(), "completion": text, "token_ids": ids}
        for key, (_, text, ids) in enumerate(answers)
    ]
    with foreign(t, "reward", "busrl.rewards.child", str(os.getpid())) as child:
        child.send(subject.setup, items)
        load_s = MODEL_LOAD_S if REWARD_KINDS[subject.setup.kind].has_model else LOAD_S
        loaded = child.next(load_s)
        if loaded is None:
            late = f"importing it took longer than {load_s:g} s"
            return child.last_words() if child.ended else late, []
        tried: list[Tried] = []
        for what, answer, _ in answers if not loaded["error"] else ():
            if event := _outcome(child, subject.timeout_s):
                tried.append(Tried(what, answer, event["value"], event["error"], event["text"]))
                continue
            error, text = "hung", f"no result after {subject.timeout_s:g} s ({subject.timeout_key})"
            if child.ended:
                error, text = "died", f"the process died: {child.last_words()}"
            tried.append(Tried(what, answer, error=error, text=text))
            break
        return str(loaded["text"]) if loaded["error"] else "", tried


def _outcome(child: Foreign, timeout_s: float) -> dict[str, Any] | None:
    """Wait for what becomes of an answer, within that time without those in which the reward imports modules."""
    left_s, importing = timeout_s, False
    while True:
        begun = time.monotonic()
        event = child.next(LOAD_S if importing else max(0.0, left_s))
        if event is None or event["key"] != IMPORTING:
            return event
        left_s -= 0.0 if importing else time.monotonic() - begun
        importing = bool(event["text"])


# -- a loss, an advantage estimator, metrics and an optimiser by import path -----


def try_functions(t: Topology) -> list[tuple[str, str]]:
    """(key, what is wrong) of each function that [learner] names by import path, and of an optimiser with options."""
    learner = t.learner
    settings = [("learner.loss", learner.loss), ("learner.advantage", learner.advantage)]
    settings += [("learner.metrics", path) for path in learner.metrics]
    paths = [(key, path) for key, path in settings if FUNCTION.fullmatch(path)]
    arguments = [text for pair in paths for text in pair]
    if FUNCTION.fullmatch(learner.optimizer) or (learner.options and learner.optimizer == "adafactor"):
        paths.append(("learner.optimizer", learner.optimizer))
        adam = {"betas": learner.betas, "eps": learner.eps, "weight_decay": learner.weight_decay, "parts": t.ranks > 1}
        arguments += "learner.optimizer", json.dumps({"target": learner.optimizer, "options": learner.options, **adam})
    return _refused(t, "learner", "busrl.training.custom", paths, arguments)


def try_imports(t: Topology) -> list[tuple[str, str]]:
    """(key, what is wrong) of the user's sinks, and of a parser of tools of the user's."""
    settings = [("agents.tools", t.agents.tools)] if t.has_callers else []
    settings += [("sinks.to", sink) for sink in t.sinks.to]
    paths = [(key, path) for key, path in settings if FUNCTION.fullmatch(path)]
    return _refused(t, "sinks", "busrl.system.imports", paths, [text for pair in paths for text in pair])


Keyed = list[tuple[str, str]]  # keys, each with an import path, or with the fault of what it names


def _refused(t: Topology, role: str, module: str, paths: Keyed, arguments: Sequence[str]) -> Keyed:
    """Try these import paths in a process of this module; the keys with a fault, and the faults."""
    if not paths:
        return []
    with foreign(t, role, module, t.base_dir, *arguments) as process:
        try:
            faults = json.loads(process.child.communicate(timeout=LOAD_S)[0])
        except subprocess.TimeoutExpired:
            faults = [f"importing and trying it took longer than {LOAD_S:g} s"] * len(paths)
        except json.JSONDecodeError:
            faults = [f"the process that tried it died: {process.last_words()}"] * len(paths)
    return [(key, fault.removeprefix(f"{key} = {path!r}: ")) for (key, path), fault in zip(paths, faults) if fault]


# -- what optional parts try and note -----


def try_parts(t: Topology) -> Iterator[tuple[str, str]]:
    """(key, fault) of what the optional parts of busrl found by trying what they will play."""
    for attempt in capabilities.plugs("trials"):
        yield from attempt(t)


def facts_of_parts(t: Topology) -> Iterator[str]:
    """Lines on the machine that optional parts put before the trial of a reward."""
    for facts in capabilities.plugs("check_facts"):
        yield from facts(t)


def notes_of_parts(t: Topology) -> Iterator[str]:
    """Lines of `busrl check` that optional parts add."""
    for notes in capabilities.plugs("check_notes"):
        yield from notes(t)
