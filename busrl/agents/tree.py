"""An episode as a tree of turns with exact token ids, and its training sequences.

A turn is one model call: the ids that the model read behind the end of its parent, and the ids that it sampled. The
path of a turn is all ids from the root to its end. Talks to nothing; knows nothing of tokenizers, templates, slots or
clocks.

- Turns are only added. The path of a parent, and the new ids behind it, are exactly what the engine was given.
- A training sequence is the path of a leaf. Sampled ids are trained once, however often the tree forks: in the first
  sequence that holds their turn, by the number of the leaf's call. In all other sequences they are context.
- A turn that was neither delivered nor continued is in no sequence, and is counted.
- A request continues the newest turn whose messages are the longest proper beginning of the request's, under the same
  tools and arguments of the template. Each spelling of a message is made canonical once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.agents.seats import shown
from busrl.data.episodes import UNLIMITED, EpisodeArrays, EpisodeLimits
from busrl.data.prompts import joined
from busrl.errors import CallRefused

Ids = npt.NDArray[np.int32]
Message = dict[str, Any]
REASONING = ("reasoning_content", "reasoning", "thinking")

# -- the parts of a message that a client's echo repeats --


def canonical(message: Mapping[str, Any]) -> bytes:
    """The role, the text without surrounding space, the tool calls with their arguments as JSON of one spelling, and
    for a result the call that it answers. Two messages that differ in reasoning, in the ids of calls, or in null
    against "" have the same form."""
    role = message.get("role")
    if not isinstance(role, str):
        raise CallRefused("invalid", f"a message has the role {shown(role)}: must be a text, such as user", "messages")
    text = text_of(message)
    if role == "assistant":
        text = text.rpartition("</think>")[2]
    called = message.get("tool_calls") or []
    if not isinstance(called, list):
        raise CallRefused("invalid", f"tool_calls is a {type(called).__name__}: must be a list", "messages")
    calls = [_call(call) for call in called]
    answers = message.get("tool_call_id") if role == "tool" else None
    return json.dumps([role, text.strip(), calls, answers]).encode()


def text_of(message: Mapping[str, Any]) -> str:
    """The content of a message, its parts joined; CallRefused for what is no text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise CallRefused("invalid", f"content is a {type(content).__name__}: must be a text or parts", "messages")
    try:
        return joined(content) if content else ""
    except ValueError as rule:
        raise CallRefused("unsupported", f"messages: {rule}", "messages") from None


def _call(call: object) -> list[Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise CallRefused("invalid", "a tool call has no function with a name", "messages")
    return [function["name"], _one_spelling(function.get("arguments"))]


def _one_spelling(arguments: object) -> str:
    """JSON with sorted keys and 1.0 as 1, since some clients write it so. What is no JSON stays as it is."""
    try:
        value = json.loads(arguments, parse_float=_number) if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return str(arguments).strip()


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else value


@dataclass(frozen=True)
class Conversation:
    """The messages of a request as they came, and the index's number of the beginning that ends with each of them."""

    raw: tuple[bytes, ...]
    states: tuple[int, ...]  # one more than messages: the first is that of the tools and arguments alone

    def messages(self, begin: int = 0) -> list[Message]:
        """Decode the messages from number `begin` on."""
        return [msgspec.json.decode(message) for message in self.raw[begin:]]


class Index:
    """Numbers beginnings of conversations: two with equal canonical messages have the same number. Compares the
    messages themselves, not digests. Any thread may use it; the lock is not held while a message is made canonical."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spelt: dict[bytes, int] = {}  # a message as it came -> the number of its canonical form
        self._forms: defaultdict[bytes, int] = defaultdict(itertools.count().__next__)
        # a beginning and the next message -> the longer beginning
        self._next: defaultdict[tuple[int, int], int] = defaultdict(itertools.count(1).__next__)
        self._last: list[tuple[bytes, int]] = []  # of the request before: most requests repeat it and add something

    def read(self, messages: Sequence[Any], tools: Any, arguments: Any) -> Conversation:
        """Read messages, tools and arguments as objects, or as their JSON (`bytes` or `msgspec.Raw`)."""
        last, here = self._last, []
        tools, arguments = self._around(tools), self._around(arguments)
        for place, message in enumerate(messages):
            raw = _raw(message)
            repeated = place < len(last) and last[place][0] == raw
            here.append(last[place] if repeated else (raw, self._form_of(raw)))
        with self._lock:
            states = [self._next[self._next[0, tools], arguments]]
            for _, form in here:
                states.append(self._next[states[-1], form])
        self._last = here
        return Conversation(tuple(raw for raw, _ in here), tuple(states))

    def add(self, state: int, message: Message) -> int:
        form = self._form_of(_raw(message))
        with self._lock:
            return self._next[state, form]

    def _around(self, value: Any) -> int:
        """The number of tools or template arguments, whatever the order of their keys."""
        raw = b"" if value is None else b"=" + _raw(value)
        number = self._spelt.get(raw)
        if number is None:
            form = json.dumps(msgspec.json.decode(raw[1:]) or None, sort_keys=True).encode() if raw else b"null"
            number = self._number(raw, form)
        return number

    def _number(self, raw: bytes, form: bytes) -> int:
        with self._lock:
            number = self._spelt[raw] = self._forms[form]
        return number

    def _form_of(self, raw: bytes) -> int:
        number = self._spelt.get(raw)
        if number is None:
            try:
                message = msgspec.json.decode(raw)
            except (msgspec.DecodeError, RecursionError) as problem:
                raise CallRefused("invalid", f"a message is no JSON: {problem}", "messages") from None
            if not isinstance(message, dict):
                raise CallRefused("invalid", f"a message is a {type(message).__name__}: must be an object", "messages")
            number = self._number(raw, canonical(message))
        return number


def _raw(value: Any) -> bytes:
    if isinstance(value, (bytes, msgspec.Raw)):
        return bytes(value)
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise CallRefused("invalid", f"a message or tool can not be written as JSON: {problem}", "messages") from None


@dataclass(eq=False)
class OpenCall:
    """A call under way. `prompt`: the ids for the engine; `room`: how many ids it may sample; `stream` names the random
    numbers of the call, and follows from the prompt and the number of calls with that prompt in this episode."""

    number: int
    parent: Turn | None
    new: Ids  # that it reads behind the parent
    begin: int  # the length of the prompt
    room: int
    stream: int
    trained: bool
    history: Conversation | None
    text: str | None  # of the new ids, where a template wrote them
    hash: Any
    key: str = ""  # by which its turn is compared with those of other episodes

    @property
    def prompt(self) -> Ids:
        return np.concatenate([self.parent.path_ids, self.new]) if self.parent else self.new


@dataclass(eq=False)
class Turn:
    """A call that was answered. `ids`: the sampled ids, which stand in the turn's path from `begin` to `end`."""

    call: OpenCall
    ids: Ids
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.uint32]
    finish: int
    message: Message
    text: str  # of the sampled ids, without their end
    end_text: str  # of the id that ended them, "" where something else did
    waited_ms: int = 0
    generated_ms: int = 0
    step: int = 0  # of the learner: the step that made the oldest of the versions
    routes: npt.NDArray[Any] | None = None  # of the ids from the parent's last one on, but for its own last one
    reward: float | None = None
    delivered: bool = False
    stopped: bool = False  # by a stop text of its client
    children: list[Turn] = field(default_factory=list)
    open: int = 0  # calls under way that continue it
    continued: bool = False

    @property
    def number(self) -> int:
        return self.call.number

    @property
    def parent(self) -> Turn | None:
        return self.call.parent

    @property
    def begin(self) -> int:
        return self.call.begin

    @property
    def end(self) -> int:
        return self.call.begin + len(self.ids)

    @property
    def path_ids(self) -> Ids:
        path = np.concatenate([part for turn in self.chain() for part in (turn.call.new, turn.ids)])
        path.flags.writeable = False
        return path

    @property
    def path_routes(self) -> npt.NDArray[Any] | None:
        """The routes of the path but for its last id; None where any of its answers had none."""
        parts = [turn.routes for turn in self.chain() if turn.routes is not None]
        return np.concatenate(parts) if len(parts) == len(self.chain()) else None

    @property
    def kept(self) -> bool:
        return self.delivered or self.continued

    def chain(self) -> list[Turn]:
        """The turns of this turn's path, the root first."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]


@dataclass(frozen=True)
class Trajectory(EpisodeArrays):
    """An episode for training. `text`: of the last turn, without its end; `step`: the learner's step that made the
    oldest version of a trained turn; `undelivered`: the number of turns that were left out; `taught`: what a teacher
    said of it, where that was posted with it."""

    text: str
    step: int
    undelivered: int
    taught: Any = field(default=None, kw_only=True)


class Tree:
    """The turns of one episode. A call is `ask`ed, then `answer`ed or `cancel`led. `salt`: trees of one episode with
    different ones draw different random numbers, though they read the same ids."""

    def __init__(self, limits: EpisodeLimits | None = None, salt: int = 0) -> None:
        self.limits, self._salt = limits or EpisodeLimits(), bytes([salt]) if salt else b""
        self.turns: list[Turn] = []  # in the order of their answers
        self.roots: list[Turn] = []
        self.open = 0  # calls under way
        self._index = Index()
        self._ends: dict[int, list[Turn]] = {}  # a beginning -> turns that end with it
        self._calls_of: Counter[bytes] = Counter()  # digest of a prompt -> calls that had it
        self._calls = self._begun = 0  # all calls; those of them that were not cancelled
        self._sampled = self._tokens = self._sequences = 0  # with the most that calls under way may add

    # -- which turn a request continues -----

    def read(self, messages: Sequence[Any], tools: Any = None, arguments: Any = None) -> Conversation:
        """Read the messages of a request (objects, or their JSON); CallRefused names what cannot be used."""
        if not messages:
            raise CallRefused("invalid", "messages is empty: at least one message is needed", "messages")
        return self._index.read(messages, tools, arguments)

    def match(self, history: Conversation) -> tuple[Turn | None, int]:
        """Find the turn that a request continues, and how many of the request's messages stand in that turn's path."""
        for count in range(len(history.raw) - 1, 0, -1):
            if turns := self._ends.get(history.states[count]):
                return _as_echoed(turns, history.raw[count - 1]), count
        return None, 0

    def match_ids(self, prompt: Ids) -> Turn | None:
        """Find the turn with the longest path that is a proper beginning of the prompt; of several the newest."""
        best, level = None, self.roots
        while level:
            fitting = [turn for turn in level if _continues(turn, prompt)]
            best = max(fitting, key=lambda turn: (turn.end, turn.number), default=best)
            level = [child for turn in fitting for child in turn.children]
        return best

    # -- calls -----

    def room(self, parent: Turn | None, new: int, wanted: int, n: int = 1) -> int:
        """The number of ids that a call may sample if it reads `new` ids behind `parent`: at most `wanted`; below 1 the
        call has no room. For `n` such calls at once: the number for each."""
        limits, begin = self.limits, (parent.end if parent else 0) + new
        more, sequences = self._adds(parent, begin)
        more, sequences = more + (n - 1) * begin, sequences + n - 1  # each but the first is a sequence of its own
        if self._begun + n > limits.turns or self._sequences + sequences > limits.sequences:
            return 0
        left = ((limits.sampled - self._sampled) // n, (limits.tokens - self._tokens - more) // n)
        return min(wanted, limits.context - begin, *left)

    def used(self) -> dict[str, int]:
        """The use of each limit but the context, with the most that calls under way may add."""
        return {"turns": self._begun, "sequences": self._sequences, "sampled": self._sampled, "tokens": self._tokens}

    def used_up(self, parent: Turn | None, new: int) -> CallRefused:
        """The refusal of a call without room, with its reason."""
        limits, begin = self.limits, (parent.end if parent else 0) + new
        if begin >= limits.context:
            why = (f"This model's maximum context length is {limits.context} tokens; the messages have {begin} "
                   "(agents.context)")
        else:
            used = ((key, have, getattr(limits, key)) for key, have in self.used().items())
            stated = ", ".join(f"agents.{key} {have} of {most}" for key, have, most in used if most < UNLIMITED)
            why = f"This episode's maximum context length is used up, calls under way included: {stated}"
        return CallRefused("context_length_exceeded", why, "messages")

    def ask(self, parent: Turn | None, new: Ids | Sequence[int], wanted: int, history: Conversation | None = None,
            text: str | None = None, trained: bool = True, key: str = "") -> OpenCall:
        """Begin a call that reads the ids `new` (at least one) behind `parent`; CallRefused where it has no room."""
        room, begin = self.room(parent, len(new), wanted), (parent.end if parent else 0) + len(new)
        if not len(new):
            raise CallRefused("invalid", "the prompt has no token behind what the model wrote last", "messages")
        if room < 1:
            raise self.used_up(parent, len(new))
        more, sequences = self._adds(parent, begin)
        self._tokens, self._sequences = self._tokens + more + room, self._sequences + sequences
        self._sampled, self._begun, self.open = self._sampled + room, self._begun + 1, self.open + 1
        self._calls += 1
        read = np.array(new, np.int32)
        hashed = parent.call.hash.copy() if parent else hashlib.blake2b(digest_size=8)
        hashed.update(read.data)
        if parent:
            parent.open, parent.continued = parent.open + 1, True
        stream = self._stream(hashed.digest())
        return OpenCall(self._calls - 1, parent, read, begin, room, stream, trained, history, text, hashed, key)

    def answer(self, call: OpenCall, ids: Ids | Sequence[int], logprobs: Iterable[float], versions: Iterable[int],
               finish: int, message: Message, text: str = "", end_text: str = "", waited_ms: int = 0,
               generated_ms: int = 0, step: int = 0, routes: npt.NDArray[Any] | None = None) -> Turn:
        """End a call with the ids, log-probabilities and versions that the engine drew; returns its turn."""
        sampled = np.array(ids, np.int32)
        scores, sampled_with = np.asarray(logprobs, np.float32), np.asarray(versions, np.uint32)
        if not 1 <= len(sampled) <= call.room or not len(sampled) == len(scores) == len(sampled_with):
            raise ValueError(f"an answer of {len(sampled)} ids, {len(scores)} log-probabilities and "
                             f"{len(sampled_with)} versions to a call with room for {call.room}")
        state = self._index.add(call.history.states[-1], message) if call.history else None
        self._release(call, call.room - len(sampled))
        call.hash.update(sampled.data)
        turn = Turn(call, sampled, scores, sampled_with, finish, message, text, end_text, waited_ms, generated_ms, step,
                    routes)
        self.turns.append(turn)
        (call.parent.children if call.parent else self.roots).append(turn)
        if state is not None:
            self._ends.setdefault(state, []).append(turn)
        return turn

    def cancel(self, call: OpenCall) -> None:
        self._release(call, call.room)
        self._begun -= 1
        more, sequences = self._adds(call.parent, call.begin)
        self._tokens, self._sequences = self._tokens - more, self._sequences - sequences

    def _release(self, call: OpenCall, unused: int) -> None:
        self.open -= 1
        self._sampled, self._tokens = self._sampled - unused, self._tokens - unused
        if call.parent:
            call.parent.open -= 1

    def _adds(self, parent: Turn | None, begin: int) -> tuple[int, int]:
        """The ids that one more call reads, and the sequences that it adds to the training data."""
        if parent is None or parent.children or parent.open:
            return begin, 1
        return begin - parent.end, 0

    def _stream(self, prompt: bytes) -> int:
        self._calls_of[prompt] += 1
        seed = prompt + self._calls_of[prompt].to_bytes(8, "little") + self._salt
        return int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")

    # -- the training sequences -----

    @property
    def undelivered(self) -> int:
        return sum(not turn.kept for turn in self.turns)

    def sequences(self) -> list[tuple[Turn, list[Turn]]]:
        """The leaf of each training sequence, with the turns that are trained in that sequence, in order."""
        turns = [turn for turn in self.turns if turn.kept]
        parents, trained_already = {id(turn.parent) for turn in turns}, set[int]()
        sequences = []
        for leaf in sorted((turn for turn in turns if id(turn) not in parents), key=lambda turn: turn.number):
            trained = [turn for turn in leaf.chain() if id(turn) not in trained_already]
            trained_already.update(map(id, trained))
            sequences.append((leaf, trained))
        return sequences

    def trajectory(self) -> Trajectory | None:
        """The arrays of the episode; None if no answer was delivered."""
        sequences = self.sequences()
        if not sequences:
            return None
        rows = [
            [place, turn.begin, turn.end, turn.finish, turn.number, turn.waited_ms, turn.generated_ms,
             int(turn.call.trained)]
            for place, (_, trained) in enumerate(sequences) for turn in trained
        ]
        turns = [turn for _, trained in sequences for turn in trained]
        rewards = None
        if any(turn.reward is not None for turn in turns):
            rewards = np.array([turn.reward or 0.0 for turn in turns], np.float32)
        keys = tuple(turn.call.key for turn in turns)
        routes = [part for leaf, _ in sequences if (part := leaf.path_routes) is not None]
        return Trajectory(
            np.concatenate([leaf.path_ids for leaf, _ in sequences]),
            np.array([leaf.end for leaf, _ in sequences], np.int32), np.array(rows, np.int32),
            np.concatenate([turn.logprobs for turn in turns]), np.concatenate([turn.versions for turn in turns]),
            rewards, max(turns, key=lambda turn: turn.number).text,
            min((turn.step for turn in turns if turn.call.trained), default=0), self.undelivered,
            keys=keys if any(keys) else (), routes=np.concatenate(routes) if len(routes) == len(sequences) else None,
        )

    def transcript(self, limit: int, others: Mapping[str, Tree] | None = None) -> bytes:
        """JSON for people and reward functions: the messages of each sequence, in at most `limit` bytes. Long texts are
        cut first; where that is not enough the oldest messages are left out. Then follow, as far as there is room, the
        messages of `others`, each with its seat."""
        data = within(limit, [transcript_of(leaf) for leaf, _ in self.sequences()])
        theirs = [[{**message, "seat": seat} for message in transcript_of(leaf)]
                  for seat, tree in (others or {}).items() for leaf, _ in tree.sequences()]
        if not theirs or len(more := within(limit - len(data), theirs)) <= len(b"[]"):
            return data
        return more if data == b"[]" else data[:-1] + b", " + more[1:]


def within(limit: int, transcripts: list[list[Message]]) -> bytes:
    """JSON of transcripts, shortened to at most so many bytes."""
    cut = limit
    while len(data := _as_json(transcripts, cut)) > limit:
        cut //= 2
        if cut < 64:
            longest = max(transcripts, key=len, default=[])
            if not longest:
                return b"[]"
            del longest[: -(-len(longest) // 2)]
    return data


def _as_json(transcripts: list[list[Message]], cut: int) -> bytes:
    return json.dumps([[shortened(message, cut) for message in messages] for messages in transcripts]).encode()


def _continues(turn: Turn, prompt: Ids) -> bool:
    """True if the turn's ids stand in the prompt with others behind them, for a turn whose parent's path does."""
    new, begin, end = turn.call.new, turn.begin, turn.end
    read, sampled = prompt[begin - len(new) : begin], prompt[begin:end]
    return end < len(prompt) and np.array_equal(new, read) and np.array_equal(turn.ids, sampled)


def _as_echoed(turns: Sequence[Turn], raw: bytes) -> Turn:
    """The newest of turns with the same canonical message; if the client repeats the reasoning or the call ids of some
    of them, the newest of those."""
    newest = sorted(turns, key=lambda turn: turn.number, reverse=True)
    if len(newest) == 1:
        return newest[0]
    echoed = _own_marks(msgspec.json.decode(raw))
    return next((turn for turn in newest if echoed and _own_marks(turn.message) == echoed), newest[0])


def _own_marks(message: Message) -> list[Any]:
    calls = [call.get("id") for call in message.get("tool_calls") or ()]
    return [*calls, *(message[name].strip() for name in REASONING if isinstance(message.get(name), str))]


def transcript_of(leaf: Turn) -> list[Message]:
    """The messages of a path: its newest request's and the answer. For a request of ids: the texts of the turns."""
    history = leaf.call.history
    if history is None:
        return [{"role": "assistant", "content": turn.text} for turn in leaf.chain()]
    return [*history.messages(), leaf.message]


def shortened(value: Any, most: int) -> Any:
    """A message with its texts cut to `most` characters, each with a note on how many were left out."""
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[:most]}… ({len(value) - most} characters left out)"
    if isinstance(value, list):
        return [shortened(part, most) for part in value]
    if isinstance(value, dict):
        return {name: shortened(part, most) for name, part in value.items()}
    return value
