"""What a run would do with its prompts, tried before it starts: their tokens, and what the reward gives for the first.

Counts with the tokenizer of the model folder and, for chats, through its chat template, without torch: that is what
`generation.max_prompt_tokens = "auto"` comes to, and which prompts a given limit leaves out. The reward runs in a
process of its own (`busrl.rewards.child`) with deadlines, since it is foreign code: it may raise, hang or print.
Knows nothing of other keys' rules, or of how a report looks.

- A file of up to ALL prompts is counted whole; of a larger one the longest by bytes and some spread evenly are, and
  the text says how many. The rest is bounded by the most tokens for a byte that were seen.
- Where nothing can be counted a byte counts as a token, which no common tokenizer exceeds.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from busrl.config import pretrained
from busrl.config.declare import FUNCTION
from busrl.config.rules import Finding
from busrl.config.schema import AGENT, BYTES_PER_TOKEN, TINY, Process, Topology, has_model
from busrl.data.chat import LightTokenizer, template_of
from busrl.data.prompts import Scan, open_file, prompt_lines, prompt_of
from busrl.data.sources import ENVIRONMENT
from busrl.errors import DataError
from busrl.pipes import interpreter

# -- prompts in tokens -----

ALL = 20_000  # prompts that are all counted,
ALL_BYTES = 16 << 20  # if they are not more than this
SOME = 5_000  # of a larger file: so many of the longest, and so many spread evenly
BATCH = 1_000
TOO_MANY = 0.01  # share of prompts above a given limit that a run is not started with
UNKNOWN = 1  # tokens, where prompts cannot be looked at: no rule about long ones is broken by it


@dataclass(frozen=True)
class Counted:
    """Prompts of one file: `tokens` of those that were counted, `lines` (from 1) where these stand. `spread` says which
    of them stand for the whole file (all, where all were counted)."""

    path: str
    prompts: int
    tokens: tuple[int, ...]
    lines: tuple[int, ...]
    spread: tuple[bool, ...]
    bound: int  # no prompt is longer, as far as is known
    how: str
    highest: int = 0  # token id

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest prompt that was counted, and its line."""
        return max(zip(self.tokens, self.lines), default=(0, 0))

    @property
    def about(self) -> str:
        """What stands before a number that is an estimate."""
        return "about " if len(self.tokens) < self.prompts else ""

    def longest_in_words(self) -> str:
        longest, line = self.longest
        place = f"{self.path}:{line}" if line else self.path
        return f"the longest prompt has {longest or self.bound} ({place}; {self.how})"

    def over(self, limit: int) -> int:
        """How many prompts of the file have more tokens; of a file that was not counted whole an estimate."""
        known = sum(n > limit for n in self.tokens)
        some = [n for n, spread in zip(self.tokens, self.spread) if spread]
        return max(known, round(self.prompts * sum(n > limit for n in some) / max(1, len(some))))

    def fits_most(self) -> int:
        """A limit that leaves out no more than is allowed."""
        some = sorted(n for n, spread in zip(self.tokens, self.spread) if spread)
        return some[max(0, len(some) - 1 - int(TOO_MANY * len(some)))] if some else self.bound


@dataclass(frozen=True)
class Limit:
    """The limit in force, what was counted as text for `busrl check`, and what is wrong."""

    tokens: int = UNKNOWN
    text: str = ""
    findings: tuple[Finding, ...] = ()


def limit_of(topology: Topology, scans: Mapping[str, Scan], context: int) -> Limit:
    """`scans` by key (data.train, validation.data, validation.set.0.data); `context`: tokens that the model takes, 0 if
    unknown."""
    given = topology.generation.max_prompt_tokens
    auto = not isinstance(given, int)
    found: list[Finding] = []
    counted: list[Counted] = []
    try:
        counted = list(_counted(topology, scans))
    except DataError as problem:
        rule, _, remedy = str(problem).rpartition("; ")
        remedies = (rule, remedy) if rule else (remedy, "correct the prompt, or the template")
        found.append(Finding(("data.template",), *remedies))
    limit = given if isinstance(given, int) else max([UNKNOWN, *(one.bound for one in counted)])
    if auto and (left := context - topology.generation.max_new_tokens) > 0:
        limit = min(limit, left)  # as far as the model has room for the longest prompt and an answer
    if not counted:
        return Limit(limit, "", tuple(found))
    lines = [one.longest_in_words() for one in counted]
    lines += [f"{one.about}{one.over(limit)} of {one.path} are longer than {limit} and will be set aside"
              for one in counted if one.over(limit)]
    room = context if auto else 0  # what "auto" had to keep to
    found = [_too_many(one, limit, room) for one in counted if one.over(limit) > TOO_MANY * one.prompts]
    found += _foreign_ids(topology, counted)
    text = f"tokens: {'; '.join(lines)}; generation.max_prompt_tokens = {limit}{' (auto)' if auto else ''}"
    return Limit(limit, text, tuple(found))


def _foreign_ids(topology: Topology, counted: Sequence[Counted]) -> Iterator[Finding]:
    """Ids in prompts for which the model has no row: its first layer would fail, on an accelerator without a word."""
    folder = pretrained.model_at(topology.model.path)
    size = pretrained.vocabulary_size(folder) if folder else 0
    for one in counted if size else ():
        if one.highest >= size:
            rule = f"prompts of {one.path} have token ids up to {one.highest}, and the model has {size} (vocab_size)"
            yield Finding(("model.path",), rule, "put the tokenizer of this model there, or resize its embeddings")
            return


def _too_many(one: Counted, limit: int, context: int) -> Finding:
    over, (longest, line) = one.over(limit), one.longest
    rule = (
        f"{one.about}{over} of the {one.prompts} prompts of {one.path} ({over / one.prompts:.1%}) are longer than "
        f"{limit} tokens and would be set aside; the longest has {longest} (line {line}; {one.how})"
    )
    remedy = f'"auto" or {max(longest, one.bound)} fits all, {one.fits_most()} fits 99 %'
    if context:
        room = f"the model takes {context} tokens, prompt and answer"
        remedy = f"{room}: lower generation.max_new_tokens, or shorten the prompts"
    return Finding(("generation.max_prompt_tokens",), rule, remedy)


# -- counting -----


def _counted(topology: Topology, scans: Mapping[str, Scan]) -> Iterator[Counted]:
    if topology.scripted:
        for scan in scans.values():
            tokens = tuple(-(-size // BYTES_PER_TOKEN) for size in scan.sizes)
            lines = tuple(range(1, scan.count + 1))
            how = f"one for {BYTES_PER_TOKEN} bytes"
            yield Counted(str(scan.path), scan.count, tokens, lines, (True,) * scan.count, max(tokens, default=1), how)
        return
    light = _tokenizer(topology)
    named = {f"validation.set.{index}.data": one.data for index, one in enumerate(topology.validation.set)}
    for key, path in {"data.train": topology.data.train, "validation.data": topology.validation.data, **named}.items():
        if path.startswith(TINY):
            yield _tiny(path, light)
        elif key in scans:
            yield _by_bytes(topology, scans[key]) if light is None else _by_tokens(topology, scans[key], light)


def _tokenizer(topology: Topology) -> LightTokenizer | None:
    folder = pretrained.model_at(topology.model.path)
    return LightTokenizer.of(folder, tools_of_chats(topology)) if folder else None


def tools_of_chats(topology: Topology) -> list[Any]:
    """What every chat request names, and the template with it."""
    asked = topology.openai.tools if topology.openai.endpoint == "chat" else ""
    listed = pretrained.read_json(Path(asked)) if asked else None
    return listed if isinstance(listed, list) else []


def _tiny(path: str, light: LightTokenizer | None) -> Counted:
    """A tiny task's prompts have a known length in characters, made or not."""
    task = pretrained.maker().RECIPES.get(path)
    longest = int(task.max_prompt_tokens) if task else UNKNOWN
    tokens = len(light.ids("9" * longest)) if light is not None else longest
    return Counted(path, 1, (), (), (), max(longest, tokens), "a bound")


def _by_bytes(topology: Topology, scan: Scan) -> Counted:
    chat = topology.data.template == "chat"
    written = len(template_of(Path(topology.model.path)).encode()) + len(topology.data.system.encode()) if chat else 0
    how = "a byte counted as a token: there is no tokenizer.json, or no package tokenizers"
    return Counted(str(scan.path), scan.count, (), (), (), scan.longest_prompt + written + 1, how)


def _by_tokens(topology: Topology, scan: Scan, light: LightTokenizer) -> Counted:
    chosen, spread = _chosen(scan)
    tokens = list(_tokens(topology, scan, light, chosen))
    how = "all counted" if len(chosen) == scan.count else (
        f"counted: {len(chosen):,} of {scan.count:,} prompts, the longest by bytes and some spread evenly"
    )
    if topology.data.template == "chat":
        how += ", chat template included"
    lines = tuple(index + 1 for index in chosen)
    bound = max([1, *tokens, _rest(scan, chosen, tokens)])
    return Counted(str(scan.path), scan.count, tuple(tokens), lines, tuple(spread), bound, how, light.highest)


def _chosen(scan: Scan) -> tuple[list[int], list[bool]]:
    """Which lines are counted, in the order of the file, and which of them stand for the whole file."""
    sizes = np.frombuffer(scan.sizes, np.int64)
    if scan.count <= ALL and sizes.sum() <= ALL_BYTES:
        return list(range(scan.count)), [True] * scan.count
    some = max(1, min(SOME, scan.count // 2, int(ALL_BYTES / 2 / max(1.0, sizes.mean()))))
    even = np.unique(np.linspace(0, scan.count - 1, some).astype(np.int64))
    by_size = np.argsort(-sizes, kind="stable")[:SOME]
    longest = by_size[: max(1, int(np.searchsorted(np.cumsum(sizes[by_size]), ALL_BYTES / 2)))]
    both = np.union1d(even, longest)
    return both.tolist(), np.isin(both, even).tolist()


def _tokens(topology: Topology, scan: Scan, light: LightTokenizer, chosen: Sequence[int]) -> Iterator[int]:
    """Tokens of the prompts of these lines."""
    with open(scan.path, "rb") as file:
        for begin in range(0, len(chosen), BATCH):
            prompts = []
            for index in chosen[begin : begin + BATCH]:
                file.seek(scan.starts[index])
                prompt = prompt_of(msgspec.json.decode(file.readline()), topology.data)
                try:
                    prompts.append(light.text(prompt))
                except DataError as problem:
                    raise DataError(f"{scan.path}:{index + 1}: {problem}") from problem
            yield from light.counts(prompts, topology.data.template == "none")


def _rest(scan: Scan, chosen: Sequence[int], tokens: Sequence[int]) -> int:
    """A bound on the tokens of the prompts that were not counted."""
    if len(chosen) == scan.count:
        return 0
    sizes = np.frombuffer(scan.sizes, np.int64)
    counted, left = sizes[list(chosen)], np.delete(sizes, list(chosen))
    overhead = min(tokens)  # about what the template writes around a short prompt
    most = float(np.max((np.asarray(tokens) - overhead) / np.maximum(1, counted)))
    return overhead + int(most * int(left.max())) + 1


# -- the first prompt and its reward -----

LOAD_S, MODEL_LOAD_S = 60.0, 600.0  # importing a reward may take so long, and loading a reward model
END_S = 5.0  # from the end of its output to that of the process
JUDGE_PAUSE_S = 20.0  # at most, between the two tries of a judge
SHOWN_TEXT, SHOWN_IDS = 160, 12
TRIED = ("python", "code")  # kinds that a run is not started without having tried
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

    def in_words(self) -> str:
        """The value, or the first line of the error."""
        if self.error == "hung":
            return self.text
        cause = self.text.strip().splitlines()[0] if self.text.strip() else self.error
        return cause if self.error else f"{self.value:g}"


@dataclass(frozen=True)
class Judged:
    """What one reward, or one part of it, did with each answer; or why it cannot be loaded. `key`: of its function;
    `label` names a part in lines."""

    key: str
    label: str
    tried: tuple[Tried, ...] = ()
    not_loaded: str = ""

    @property
    def failed(self) -> Tried | None:
        """What failed, where nothing went well."""
        return self.tried[0] if self.tried and all(one.error for one in self.tried) else None

    def lines(self) -> Iterator[str]:
        if self.not_loaded:
            yield f"  reward{self.label}: cannot be used: {self.not_loaded}"
        for one in self.tried:
            shown = f" {_short(one.answer)}" if one.answer else ""
            yield f"  reward{self.label} of {one.what}{shown}: {one.in_words()}"
        values = [one.value for one in self.tried]
        if [one.what for one in self.tried if not one.error] == [EMPTY, RIGHT] and values[0] == values[1]:
            yield "  (both are worth the same: right, if the reward wants more than the bare answer)"


@dataclass(frozen=True)
class Trial:
    """Lines for `busrl check`; what the reward, or each of its parts, did."""

    lines: tuple[str, ...] = ()
    judged: tuple[Judged, ...] = ()


def try_first(t: Topology, kinds: Sequence[str] = ()) -> Trial:
    """Load the reward, and judge the first record with it where one is there and busrl's own reward process starts.
    Of a reward with parts each alone: those of these kinds, or all."""
    place, line = _first_line(t)
    record: dict[str, Any] = json.loads(line) if line else {}
    tokenizer = _tokenizer(t)
    judged = []
    for one in _subjects(t):
        if not kinds or one.setup["kind"] in kinds:
            not_loaded, tried = _judge(t, one, line or "{}", _answers(t, one, record, tokenizer) if line else [])
            judged.append(Judged(one.key, one.label, tuple(tried), not_loaded))
    lines = [*_prompt(t, place, record, tokenizer), *(text for one in judged for text in one.lines())] if line else []
    return Trial(tuple(lines), tuple(judged))


def boxes() -> str:
    """What this machine has of a box for code that a model wrote."""
    words = [*interpreter()[0], "-m", "busrl.rewards.box"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LOAD_S)
    return "; ".join(done.stdout.splitlines()) or done.stderr.strip()[-SHOWN_TEXT:]


@dataclass(frozen=True)
class Subject:
    """What is tried: fields of a `busrl.rewards.base.Setup`, and how long a call may take."""

    key: str
    label: str
    setup: dict[str, Any]
    timeout_s: float
    timeout_key: str = "reward.timeout_s"


def _subjects(t: Topology) -> Iterator[Subject]:
    own = t.reward
    if own.kind == AGENT and not own.part:
        return  # its episodes judge themselves
    if not own.part:
        told = ("kind", "function", "extract", "answer_key", "timeout_s", "memory_mb")
        setup = {name: getattr(own, name) for name in told}
        yield Subject("reward.function", "", setup, own.timeout_s)
    more = {"prompt_key": t.data.prompt_key, "device": t.device_of("reward/0")}
    for index, part in enumerate(own.part):
        tries = min(1, part.retries)  # a judge that is not there is soon known
        placed: dict[str, Any] = {"place": f"reward.part {part.name!r}", "retries": tries}
        placed["memory_mb"] = 0 if part.kind == "model" else own.memory_mb
        whole = {**dataclasses.asdict(part), **more, **placed}
        waits = part.timeout_s * (1 + tries) + JUDGE_PAUSE_S if part.kind == "judge" else part.timeout_s
        key = f"reward.part.{index}.{'function' if part.kind == 'python' else 'kind'}"
        yield Subject(key, f" part {part.name}", whole, waits, "its timeout_s")


def _answers(t: Topology, one: Subject, record: dict[str, Any], tokenizer: LightTokenizer | None) -> Answers:
    """An empty answer, and the right one where the record has it."""
    if not any(entry.role == "reward" and entry.count and not entry.command for entry in t.process):
        return []
    right = record.get(one.setup["answer_key"] or t.data.answer_key)
    what, text = MADE_UP, SOMETHING
    if right is not None and not isinstance(right, (dict, list)):
        what, text = RIGHT, right if isinstance(right, str) else json.dumps(right)
    if one.setup["kind"] == "code" and not one.setup["extract"] and "```" not in text:
        text = f"```python\n{text if what == RIGHT else 'pass'}\n```"
    return [(EMPTY, "", []), (what, text, tokenizer.ids(text) if tokenizer else [])]


def _first_line(t: Topology) -> tuple[str, str]:
    """Place and text of the first line of data.train; both empty where none can be read (a quickstart's file that is
    not made yet)."""
    path = t.data.train
    if path.startswith(TINY):
        made = pretrained.made(path)
        if made is None:
            return "", ""
        path = str(made.train)
    try:
        with open(open_file(Path(path)), "rb") as file:
            _, line = next(prompt_lines(file))
        return (f"{path}:1", line.decode()) if isinstance(json.loads(line), dict) else ("", "")
    except (OSError, ValueError, DataError, StopIteration):
        return "", ""  # `files` reports what is wrong with the file


def _prompt(t: Topology, place: str, record: dict[str, Any], tokenizer: LightTokenizer | None) -> Iterator[str]:
    yield f"first prompt ({place})"
    try:
        prompt = prompt_of(record, t.data)
        text = tokenizer.text(prompt) if tokenizer else prompt
        ids = tokenizer.ids(prompt) if tokenizer else []
    except DataError as problem:
        yield f"  cannot be written: {problem}"
        return
    yield f"  as the model reads it: {_short(text)}"
    if ids:
        more = ", ..." if len(ids) > SHOWN_IDS else ""
        yield f"  {len(ids)} tokens: {', '.join(map(str, ids[:SHOWN_IDS]))}{more}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_TEXT else f"{text[: SHOWN_TEXT // 2]} ... {text[-SHOWN_TEXT // 2 :]}"


def ends(t: Topology) -> str:
    """What is wrong with the tokens that end an answer; empty where nothing is, or where no model runs here."""
    generates = any(entry.role == "rollout" and has_model(entry) for entry in t.process)
    tokenizer = _tokenizer(t) if generates and not t.model.path.startswith(TINY) else None
    if tokenizer is None:
        return ""
    folder = Path(t.model.path)
    own = tokenizer.id_of(tokenizer.end) if tokenizer.end else None
    known = pretrained.end_ids(folder) | ({own} if own is not None else set())
    shown, size = ", ".join(map(str, sorted(known))), pretrained.vocabulary_size(folder)
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


# -- the other process -----

Answers = list[tuple[str, str, list[int]]]


@contextlib.contextmanager
def foreign(
    t: Topology, role: str, *command: str, python: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A process for a user's code with the environment of that role, and the file that it prints to; killed at the end.

    A file: whatever the code prints, it never waits for a reader.
    """
    entry = next((one for one in t.process if one.role == role and not one.command), None)
    program, variables = interpreter(python or (entry.python if entry else ""))
    environment = {**(variables or os.environ), **(entry.env if entry else {})}
    with tempfile.TemporaryFile() as printed:
        child = subprocess.Popen(
            [*program, "-m", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed,
            env=environment, start_new_session=True,
        )
        try:
            yield child, printed
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # it, and whatever user code has started
            child.communicate()


def _judge(t: Topology, one: Subject, line: str, answers: Answers) -> tuple[str, list[Tried]]:
    """Why the reward cannot be loaded ("" if it can), and what it did with each answer until one hung."""
    items = [
        {"key": key, "record_line": line.encode(), "completion": text, "token_ids": ids}
        for key, (_, text, ids) in enumerate(answers)
    ]
    with foreign(t, "reward", "busrl.rewards.child", str(os.getpid())) as (child, printed):
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(msgspec.json.encode(one.setup) + b"\n" + msgspec.json.encode(items) + b"\n")
            child.stdin.flush()
        events = Events(child.stdout)
        load_s = MODEL_LOAD_S if one.setup["kind"] == "model" else LOAD_S
        loaded = events.next(load_s)
        if loaded is None:
            late = f"importing it took longer than {load_s:g} s"
            return last_words(child, printed) if events.ended else late, []
        tried: list[Tried] = []
        for what, answer, _ in answers if not loaded["error"] else ():
            if event := events.next(one.timeout_s):
                tried.append(Tried(what, answer, event["value"], event["error"], event["text"]))
                continue
            error, text = "hung", f"no result after {one.timeout_s:g} s ({one.timeout_key})"
            if events.ended:
                error, text = "died", f"the process died: {last_words(child, printed)}"
            tried.append(Tried(what, answer, error=error, text=text))
            break
        return str(loaded["text"]) if loaded["error"] else "", tried


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


def last_words(child: subprocess.Popen[bytes], printed: IO[bytes]) -> str:
    """Exit code and last line of a process whose output has ended; it may live on where user code has closed that."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
    printed.seek(0)
    rows = printed.read().decode(errors="replace").strip().splitlines()
    code = "its output is closed" if child.returncode is None else f"exit code {child.returncode}"
    return f"{code}, {rows[-1]}" if rows else code


# -- a loss, an advantage estimator, metrics and an optimiser by import path -----


def try_functions(t: Topology) -> list[tuple[str, str]]:
    """(key, what is wrong) of each function that [learner] names by import path and of an optimiser with options, tried
    in a process of its own."""
    own = t.learner
    named = [("learner.loss", own.loss), ("learner.advantage", own.advantage)]
    named += [("learner.metrics", path) for path in own.metrics]
    asked = [(key, path) for key, path in named if FUNCTION.fullmatch(path)]
    arguments = [text for pair in asked for text in pair]
    if FUNCTION.fullmatch(own.optimizer) or (own.options and own.optimizer == "adafactor"):
        asked.append(("learner.optimizer", own.optimizer))
        adam = {"betas": own.betas, "eps": own.eps, "weight_decay": own.weight_decay, "parts": t.ranks > 1}
        arguments += "learner.optimizer", json.dumps({"target": own.optimizer, "options": own.options, **adam})
    if not asked:
        return []
    with foreign(t, "learner", "busrl.training.custom", *arguments) as (child, printed):
        try:
            faults = json.loads(child.communicate(timeout=LOAD_S)[0])
        except subprocess.TimeoutExpired:
            faults = [f"importing and trying it took longer than {LOAD_S:g} s"] * len(asked)
        except json.JSONDecodeError:
            faults = [f"the process that tried it died: {last_words(child, printed)}"] * len(asked)
    return [(key, fault.removeprefix(f"{key} = {path!r}: ")) for (key, path), fault in zip(asked, faults) if fault]


# -- the function of episodes ----------------------------


def turns(t: Topology) -> Iterator[str]:
    """How the model's chat template lets the turns of an episode be continued; nothing without agents or a template."""
    folder = pretrained.model_at(t.model.path)
    if folder is None or not t.has_callers:
        return
    with foreign(t, AGENT, "busrl.agents.renderer", str(folder)) as (child, printed):
        try:
            found = child.communicate(timeout=LOAD_S)[0].decode(errors="replace").splitlines()
        except subprocess.TimeoutExpired:
            found = [f"not tried: the template took longer than {LOAD_S:g} s"]
        if child.returncode:
            found = [f"cannot be tried: {last_words(child, printed)}"]
    if found:
        yield "turns of an episode, as the chat template lets them be continued"
        yield from (f"  {line}" for line in found)


def try_episodes(t: Topology) -> Iterator[tuple[str, str]]:
    """(which key of [[process]], what is wrong) of each agent whose function or environment cannot be loaded, or that
    cannot begin an episode, in a process of its own."""
    for index, entry in enumerate(t.process):
        sound = bool(ENVIRONMENT.fullmatch(entry.environment)) != bool(FUNCTION.fullmatch(entry.function))
        sound = sound and (not entry.python or os.access(entry.python, os.X_OK))
        if entry.role == AGENT and sound and (fault := _episode_fault(t, entry)):
            key, value = ("environment", entry.environment) if entry.environment else ("function", entry.function)
            yield f"process.{index}.{key}", fault.removeprefix(f"{key} = {value!r}: ")


def _episode_fault(t: Topology, entry: Process) -> str:
    base = str(Path(t.source).parent)
    setup = {"type": "setup", "function": entry.function, "base_dir": base, "environment": entry.environment,
             "options": entry.options, "trial": True}
    until = time.monotonic() + LOAD_S
    with foreign(t, AGENT, "busrl.agents.child", str(os.getpid()), python=entry.python) as (child, printed):
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(setup).encode() + b"\n")
            child.stdin.flush()
        events = Events(child.stdout)
        while (event := events.next(max(0.0, until - time.monotonic()))) is not None:
            if event["type"] == "ready":
                return str(event.get("error", ""))
        late = f"importing and setting it up took longer than {LOAD_S:g} s"
        return f"its process died: {last_words(child, printed)}" if events.ended else late
