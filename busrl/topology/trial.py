"""What a run would do with its first prompt, tried before it starts: the prompt as the model reads it, its token ids,
and what the reward says of an empty answer and of the right one (of a made-up one where the record names none).

The reward runs in a process of its own with deadlines (`busrl.rewards.trial`), since it is foreign code: it may raise,
hang or print. Talks to the prompt file and the model folder. Knows nothing of how a report looks.

- A reward that can not be loaded, or that fails for every answer that is tried, is a problem: each sample of the run
  would be lost. One that fails for some of them, or says the same of both, is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from busrl import quickstart
from busrl.data.chat import LightTokenizer
from busrl.data.check import open_file, prompt_lines
from busrl.data.prompt import prompt_of
from busrl.errors import DataError
from busrl.topology import machine
from busrl.topology.prompts import tools_of_chats
from busrl.topology.schema import TINY, Topology, has_model

LOAD_S = 60.0  # importing a reward may take so long
SHOWN_TEXT, SHOWN_IDS = 160, 12
EMPTY, RIGHT, MADE_UP = "an empty answer", "the right answer", "a made-up answer"
SOMETHING = "42"  # text, a number and JSON: a reward that fails for this too fails for more than an empty text


@dataclass(frozen=True)
class Tried:
    """One answer and what came of it. `error`: "" | raised | malformed | hung | died, `text` says more."""

    what: str
    answer: str
    value: float = 0.0
    error: str = ""
    text: str = ""

    def told(self) -> str:
        """In words."""
        if self.error == "hung":
            return self.text
        cause = self.text.strip().splitlines()[0] if self.text.strip() else self.error
        return cause if self.error else f"{self.value:g}"


@dataclass(frozen=True)
class Trial:
    """Lines for `busrl check`; what the reward did; why it can not be loaded."""

    lines: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    not_loaded: str = ""

    @property
    def failed(self) -> Tried | None:
        """What failed, where nothing went well."""
        return self.tried[0] if self.tried and all(one.error for one in self.tried) else None


@dataclass
class First:
    """The first prompt of the training file."""

    place: str
    line: str
    record: dict[str, Any] = field(default_factory=dict)


def try_first(t: Topology) -> Trial:
    """Load the reward, and judge the first record with it where one is there."""
    first = first_of(t)
    tokenizer = _tokenizer(t)
    answers = list(_answers(t, first, tokenizer)) if first and _is_ours(t) else []
    not_loaded, tried = call(t, first.line if first else "{}", answers)
    lines = [*_prompt(t, first, tokenizer), *_judged(tried)] if first else []
    return Trial(tuple(lines), tuple(tried), not_loaded)


def first_of(t: Topology) -> First | None:
    """The first line of data.train; None where there is none to be read (a quickstart's that is not made yet)."""
    path = t.data.train
    if path.startswith(TINY):
        made = quickstart.paths(path)
        if made is None:
            return None
        path = str(made.train)
    try:
        with open(open_file(Path(path)), "rb") as file:
            _, line = next(prompt_lines(file))
        record = json.loads(line)
    except (OSError, ValueError, DataError, StopIteration):
        return None  # what is wrong with the file is told elsewhere
    return First(f"{path}:1", line.decode(), record) if isinstance(record, dict) else None


def _is_ours(t: Topology) -> bool:
    """Whether a reward process of busrl's own is started here; what others do is theirs."""
    return any(entry.role == "reward" and entry.count and not entry.command for entry in t.process)


def _generates(t: Topology) -> bool:
    """Whether an engine of busrl's makes answers here with the model's own end tokens."""
    return any(entry.role == "rollout" and has_model(entry) for entry in t.process)


def _tokenizer(t: Topology) -> LightTokenizer | None:
    folder = Path(t.model.path)
    if t.model.path.startswith(TINY):
        made = quickstart.paths(t.model.path)
        if made is None:
            return None
        folder = made.model
    return LightTokenizer.of(folder, tools_of_chats(t))


def _answers(t: Topology, first: First, tokenizer: LightTokenizer | None) -> Iterator[tuple[str, str, list[int]]]:
    """What, text and ids of the answers to try."""
    yield EMPTY, "", []
    right = first.record.get(t.reward.answer_key or t.data.answer_key)
    if right is not None and not isinstance(right, (dict, list)):
        text = right if isinstance(right, str) else json.dumps(right)
        yield RIGHT, text, tokenizer.ids(text) if tokenizer else []
    else:
        yield MADE_UP, SOMETHING, tokenizer.ids(SOMETHING) if tokenizer else []


def _prompt(t: Topology, first: First, tokenizer: LightTokenizer | None) -> Iterator[str]:
    yield f"first prompt ({first.place})"
    try:
        prompt = prompt_of(first.record, t.data)
        text = tokenizer.text(prompt) if tokenizer else prompt
        ids = tokenizer.ids(prompt) if tokenizer else []
    except DataError as problem:
        yield f"  can not be written: {problem}"
        return
    yield f"  as the model reads it: {_short(text)}"
    if ids:
        more = ", ..." if len(ids) > SHOWN_IDS else ""
        yield f"  {len(ids)} tokens: {', '.join(map(str, ids[:SHOWN_IDS]))}{more}"


def _judged(tried: list[Tried]) -> Iterator[str]:
    for one in tried:
        shown = f" {_short(one.answer)}" if one.answer else ""
        yield f"  reward of {one.what}{shown}: {one.told()}"
    if [one.what for one in tried if not one.error] == [EMPTY, RIGHT] and tried[0].value == tried[1].value:
        yield "  (both are worth the same: right, if the reward wants more than the bare answer)"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_TEXT else f"{text[: SHOWN_TEXT // 2]} ... {text[-SHOWN_TEXT // 2 :]}"


def ends(t: Topology) -> str:
    """What is wrong with the tokens that end an answer; empty where nothing is, or where no model runs here."""
    tokenizer = _tokenizer(t) if not t.model.path.startswith(TINY) and _generates(t) else None
    if tokenizer is None:
        return ""
    folder = Path(t.model.path)
    own = tokenizer.id_of(tokenizer.end) if tokenizer.end else None
    known = machine.end_ids(folder) | ({own} if own is not None else set())
    shown, size = ", ".join(map(str, sorted(known))), machine.vocabulary_size(folder)
    limit = f"generation.max_new_tokens = {t.generation.max_new_tokens}"
    if size and all(one >= size for one in known):
        what = f"its end tokens ({shown}) are none of its {size} ids" if known else "it names no end token"
        return f"model.path: {what}, so every answer is cut at {limit}; set eos_token_id in generation_config.json"
    turn = tokenizer.turn_end() if t.data.template == "chat" else None
    if turn is not None and turn[0] not in known:
        return (
            f"model.path: its chat template ends a turn with {turn[1]} (id {turn[0]}), and the end tokens are {shown}: "
            f"an answer may go on to {limit}; add {turn[0]} to eos_token_id in generation_config.json"
        )
    return ""


# ------------------------------------------------------------------------------------------------ the other process


Answers = list[tuple[str, str, list[int]]]


def call(t: Topology, line: str, answers: Answers) -> tuple[str, list[Tried]]:
    """Why the reward can not be loaded ("" if it can), and what it did with each answer until one hung."""
    own = t.reward
    asked = {
        "parent": os.getpid(), "record": line, "answers": [answer[1:] for answer in answers],
        "reward": {"kind": own.kind, "function": own.function, "extract": own.extract, "answer_key": own.answer_key},
    }  # fmt: skip
    entry = next((one for one in t.process if one.role == "reward" and not one.command), None)
    environment = {**os.environ, **(entry.env if entry else {})}
    with tempfile.TemporaryFile() as printed:  # a file: whatever user code prints, it never waits for a reader
        child = subprocess.Popen(
            [sys.executable, "-m", "busrl.rewards.trial"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=printed, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            return _conversation(child, asked, answers, own.timeout_s, printed)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # it, and whatever user code has started
            child.communicate()


def _conversation(
    child: subprocess.Popen[bytes], asked: dict[str, Any], answers: Answers, timeout_s: float, printed: IO[bytes]
) -> tuple[str, list[Tried]]:
    assert child.stdin is not None and child.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(asked).encode() + b"\n")
        child.stdin.flush()
    events = Events(child.stdout)
    loaded = events.next(LOAD_S)
    if loaded is None:
        return (f"importing it took longer than {LOAD_S:g} s" if not events.ended else _last_words(child, printed)), []
    if loaded["not_loaded"]:
        return str(loaded["not_loaded"]), []
    tried: list[Tried] = []
    for what, answer, _ in answers:
        event = events.next(timeout_s)
        if event is not None:
            tried.append(Tried(what, answer, event["value"], event["error"], event["text"]))
            continue
        if events.ended:
            tried.append(Tried(what, answer, error="died", text=f"the process died: {_last_words(child, printed)}"))
        else:
            text = f"no result after {timeout_s:g} s (reward.timeout_s)"
            tried.append(Tried(what, answer, error="hung", text=text))
        break
    return "", tried


class Events:
    """Lines of JSON from a pipe, each waited for with a deadline."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._rest = pipe, b""
        self.ended = False

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next one; None after the time, or when the other side has ended."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._pipe.fileno(), 1 << 16) if ready else b""
            if not data:
                self.ended = bool(ready)
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event


def _last_words(child: subprocess.Popen[bytes], printed: IO[bytes]) -> str:
    """Exit code and the last line that it printed."""
    code = child.wait(timeout=5)
    printed.seek(0)
    rows = printed.read().decode(errors="replace").strip().splitlines()
    return f"exit code {code}" + (f", {rows[-1]}" if rows else "")
