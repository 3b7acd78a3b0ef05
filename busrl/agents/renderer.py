"""Messages to token ids: of the new messages alone, wherever the model's chat template allows that.

Talks to the tokenizer and the template of a model folder (`busrl.data.chat`) and to the tree of turns. Knows nothing of
slots, calls or clocks. A request becomes ids in one of three ways:

- `extend`: the ids of the turn that the request continues stay, and the text that the template writes behind such a
  turn is encoded. That text is the difference of two renderings of a stand-in turn, with and without the new messages.
- `splice`: where extending is impossible or not wanted, and the text of a path begins the rendering of all messages,
  the ids of that path stay and the rest of the text is encoded.
- `fresh`: the rendering of all messages is encoded, as a new root.

Invariants:

- Sampled ids are never decoded and encoded again. The end of a turn is never dropped or doubled.
- Special tokens in the contents of messages are encoded as text, wherever they can be told from the template's.
- A template is tried with seven kinds of turns before use: kinds that it would continue wrongly are not extended.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from busrl.agents.tree import REASONING, Conversation, Ids, Message, Tree, Turn, text_of
from busrl.data.chat import LightTokenizer
from busrl.data.prompts import Prompt
from busrl.errors import CallRefused, DataError

How = Literal["extend", "splice", "fresh", "begin"]
LETTERS = "abcdefghijklmnop"  # the digits of the number in a word
AS_LETTERS, AS_DIGITS = str.maketrans("0123456789abcdef", LETTERS), str.maketrans(LETTERS, "0123456789abcdef")
CACHED = 1024


@dataclass(frozen=True)
class Prompted:
    """The ids that a call reads: the `new` ones behind `parent` (None: from the beginning), and their text."""

    parent: Turn | None
    new: list[int]
    text: str
    how: How


# -- messages for the template ----------------------------


def for_template(message: Mapping[str, Any]) -> Message:
    """A message as templates expect it: one string of text, arguments of calls as objects, no key without a value."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = text_of(message)
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_with_objects(call) for call in calls]
    else:
        plain.pop("tool_calls", None)
    return plain


def _with_objects(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = arguments
    return {**call, "function": {**function, "arguments": value if isinstance(value, dict) else arguments}}


# -- special tokens in contents ---------------------------

Piece = tuple[str, bool]  # a text, and whether it is a content's text that reads like a special token


class Marks:
    """Words that stand for the special tokens in contents, and can be found again in a rendering."""

    def __init__(self, special: Sequence[str]) -> None:
        self.base = "Qz" + "".join(secrets.choice(LETTERS) for _ in range(16))
        self._special = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
        self._number = {text: number for number, text in enumerate(self._special)}
        self._find = re.compile("|".join(map(re.escape, self._special))) if self._special else None
        self._word = re.compile(f"{self.base}([{LETTERS}]+)z")

    def masked(self, value: Any) -> tuple[Any, int]:
        """`value` with words in place of special tokens, and how many of them there are."""
        count = 0

        def word(match: re.Match[str]) -> str:
            nonlocal count
            count += 1
            return self.base + f"{self._number[match.group()]:x}".translate(AS_LETTERS) + "z"

        def walk(part: Any) -> Any:
            if isinstance(part, str):
                return self._find.sub(word, part) if self._find else part
            if isinstance(part, list):
                return [walk(inner) for inner in part]
            return {walk(name): walk(inner) for name, inner in part.items()} if isinstance(part, dict) else part

        return walk(value), count

    def pieces(self, text: str) -> list[Piece]:
        """The true text of a rendering of masked messages, in pieces."""
        parts = self._word.split(text)
        return [(self._special[int(part.translate(AS_DIGITS), 16)] if place % 2 else part, bool(place % 2))
                for place, part in enumerate(parts) if part]


def behind(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """The pieces without the first `length` characters."""
    left, rest = length, []
    for text, mark in pieces:
        if len(text) > left:
            rest.append((text[left:], mark and not left))
        left = max(0, left - len(text))
    return rest


class Renderer:
    """The prompts of calls, for the template and tokenizer of one model folder.

    `end_ids`: ids that end a turn of the model. `vocabulary`: one more than the highest id. With `history` = "template"
    no turn is extended: the model reads the template's rendering of the history, and each turn that the template
    rewrites costs a sequence. `counts`: calls by `How`; special tokens of contents that were encoded as text
    (`neutralised`), and renderings in which that was impossible (`injected`).
    """

    def __init__(self, text: LightTokenizer, end_ids: frozenset[int],
                 history: Literal["extend", "template"] = "extend") -> None:
        self.tokenizer, self.end_ids, self.history = text, end_ids, history
        self.special_ids, self.vocabulary = text.special_ids(), text.vocabulary()
        self._marks = Marks([*self.special_ids])
        self._stand_in = self._marks.base + "Turn"
        self._closings = lru_cache(CACHED)(self._closing_of)
        self.counts: Counter[str] = Counter()
        self.turn_end = self._turn_end()
        self._anchor = self.turn_end if len(text.encode(self.turn_end)) == 1 else ""
        self.probes = [self._probe(kind) for kind in KINDS]
        self._never = {shape_of(kind.turn) for kind, probe in zip(KINDS, self.probes) if probe.wrong}

    def prompt(self, tree: Tree, history: Conversation, tools: Sequence[Any] | None = None,
               arguments: Mapping[str, Any] | None = None) -> Prompted:
        """The ids that the call of a request reads; CallRefused if the template refuses its messages."""
        try:
            return self._prompt(tree, history, list(tools or ()), dict(arguments or {}))
        except RecursionError:
            raise CallRefused("invalid", "a message is nested too deeply", "messages") from None
        except UnicodeError as problem:
            raise CallRefused("invalid", f"a message holds half of a character: {problem}", "messages") from None

    def _prompt(self, tree: Tree, history: Conversation, tools: list[Any], arguments: dict[str, Any]) -> Prompted:
        parent, count = tree.match(history)
        if parent is not None and self.history == "extend":
            turn, *tail = map(for_template, history.messages(count - 1))
            if shape_of(turn) not in self._never:
                suffix = self._in_pieces(lambda after: self.suffix(turn, after, arguments, parent.end_text), tail)
                if suffix:
                    self.counts["extend"] += 1
                    return Prompted(parent, self._ids(suffix), _joined(suffix), "extend")
        return self._splice_or_fresh(tree, [for_template(message) for message in history.messages()], tools, arguments)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, arguments: dict[str, Any],
               generation: bool) -> str:
        """The text that the template writes; CallRefused with its reason if it refuses."""
        try:
            prompt: Prompt = {"messages": list(messages), "tools": list(tools or ()), "arguments": arguments}
            text = self.tokenizer.text(prompt, generation)
        except DataError as problem:
            raise CallRefused("invalid", str(problem), "messages") from None
        text.encode()  # UnicodeError: half a character has no ids
        return text

    def text_and_end(self, ids: Sequence[int] | Ids) -> tuple[str, str]:
        """The text of sampled ids without the id that ended them, and the text of that id ("": a limit cut them)."""
        listed = [int(token) for token in ids]
        if listed and listed[-1] in self.end_ids:
            return self.tokenizer.decode(listed[:-1]), self.tokenizer.decode(listed[-1:])
        return self.tokenizer.decode(listed), ""

    def encode(self, text: str) -> list[int]:
        """The ids of a text without a template, with the special tokens that the tokenizer adds."""
        return self.tokenizer.ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    # -- extend -----

    def suffix(self, turn: Message, tail: Sequence[Message], arguments: dict[str, Any], end: str) -> str | None:
        """The text that the template writes from the end of an assistant's `turn` up to the answer after `tail`; None
        where it cannot be determined. Needs neither the messages before the turn nor its text. `end`: the text of the
        id that ended the turn; "" where a limit cut it, and then the template's end of a turn comes first."""
        closing = self._closings(msgspec.json.encode([turn.get("tool_calls"), arguments]))
        if closing is None:
            return None
        closed, gap = closing
        try:
            full = self._after_turn([*self._base(turn), *tail], arguments, True)
        except CallRefused:
            return None
        if not full.startswith(closed):
            return None
        suffix_text = ("" if end else self.turn_end) + gap + full[len(closed):]
        return suffix_text.removeprefix(end)

    def _closing_of(self, key: bytes) -> tuple[str, str] | None:
        """The text that is rendered after a stand-in turn with these calls and template arguments, and the part of that
        text behind the turn's end."""
        calls, arguments = msgspec.json.decode(key)
        turn = {"role": "assistant", "tool_calls": calls} if calls else {"role": "assistant"}
        try:
            closed = self._after_turn(self._base(turn), arguments, False)
            if not calls or self._ends_in(closed):
                return closed, self._behind(closed)
            plain = self._behind(self._after_turn(self._base({}), arguments, False))
        except CallRefused:
            return None
        return (closed, plain) if closed.endswith(plain) else None

    def _ends_in(self, closed: str) -> bool:
        return bool(self.turn_end) and self.turn_end in closed

    def _behind(self, closed: str) -> str:
        """The text behind the end of a turn."""
        return closed.rpartition(self.turn_end)[2] if self._ends_in(closed) else closed

    def _after_turn(self, messages: Sequence[Message], arguments: dict[str, Any], generation: bool) -> str:
        """The text that is rendered behind the stand-in; all of the rendering where the template leaves out the text
        beside calls."""
        _, shown, after = (text := self.render(messages, None, arguments, generation)).rpartition(self._stand_in)
        if not shown and not messages[1].get("tool_calls"):
            raise CallRefused("invalid", "the chat template leaves out what an assistant says", "messages")
        return after if shown else text

    def _base(self, turn: Message) -> list[Message]:
        """A conversation that ends with a stand-in for `turn`, with its calls: results may name them."""
        visible = {name: value for name, value in turn.items() if name not in REASONING}
        return [{"role": "user", "content": "u"}, {**visible, "role": "assistant", "content": self._stand_in}]

    def _turn_end(self) -> str:
        """The special token that the template writes at the end of an assistant's turn, "" without one."""
        try:
            after = self._after_turn(self._base({}), {}, False)
        except CallRefused:
            return ""
        places = {text: after.find(text) for text in self.special_ids if text and text in after}
        return min(places, key=lambda text: (places[text], -len(text)), default="")

    # -- splice and fresh -----

    def _splice_or_fresh(self, tree: Tree, messages: list[Message], tools: list[Any],
                         arguments: dict[str, Any]) -> Prompted:
        pieces = self._in_pieces(lambda parts: self.render(parts[0], parts[1], arguments, True), [messages, tools])
        assert pieces is not None
        text = _joined(pieces)
        turn, length = self._spliced(tree.roots, text)
        if turn is not None:
            self.counts["splice"] += 1
            rest = behind(pieces, length)
            return Prompted(turn, self._ids(rest), _joined(rest), "splice")
        how: How = "fresh" if any(message["role"] == "assistant" for message in messages) else "begin"
        self.counts[how] += 1
        return Prompted(None, self._ids(pieces, begins=True), text, how)

    def _spliced(self, level: Sequence[Turn], text: str, length: int = 0) -> tuple[Turn | None, int]:
        """Find the turn whose path is the longest that begins `text`, of several the newest; and the length of that."""
        best: tuple[Turn | None, int] = (None, 0)
        for turn in level:
            part = self._part(turn)
            end = length + len(part)
            if end < len(text) and text.startswith(part, length):
                deeper = self._spliced(turn.children, text, end)
                candidate = deeper if deeper[0] is not None else (turn, end)
                best = max(best, candidate, key=lambda choice: (choice[1], choice[0].number if choice[0] else -1))
        return best

    def _part(self, turn: Turn) -> str:
        call = turn.call
        if call.text is None:
            call.text = self.tokenizer.decode(call.new.tolist())
        answer = self.tokenizer.decode(turn.ids.tolist()) if turn.stopped else turn.text
        return call.text + answer + turn.end_text

    # -- text to ids -----

    def _in_pieces(self, render: Callable[[Any], str | None], contents: Any) -> list[Piece] | None:
        """The text that `render` writes, in pieces that tell special tokens of contents from the template's."""
        text = render(contents)
        if text is None:
            return None
        masked, marks = self._marks.masked(contents)
        if not marks:
            return [(text, False)]
        try:
            pieces = self._marks.pieces(render(masked) or "")
        except CallRefused:
            pieces = []
        if _joined(pieces) != text:
            self.counts["injected"] += 1
            return [(text, False)]
        self.counts["neutralised"] += sum(mark for _, mark in pieces)
        return pieces

    def _ids(self, pieces: Sequence[Piece], begins: bool = False) -> list[int]:
        ids: list[int] = []
        for text, mark in pieces:
            for part in (text[:1], text[1:]) if mark else (text,):  # two halves are not encoded as a special token
                ids += self.tokenizer.encode(part) if begins else self._encode_behind(part)
                begins = False
        return ids

    def _encode_behind(self, text: str) -> list[int]:
        """The ids of text inside a sequence: some tokenizers encode the beginning of a sequence in another way."""
        if not self._anchor:
            return self.tokenizer.encode(text)
        first, *rest = self.tokenizer.encode(self._anchor + text)
        return rest if first == self.special_ids[self._anchor] else self.tokenizer.encode(text)

    # -- trials of the template -----

    def _probe(self, kind: Kind) -> Probe:
        turn = for_template(kind.turn)
        before, tail = ([for_template(message) for message in messages] for messages in (kind.before, kind.after))
        try:
            prompt = self.render(before, kind.tools, {}, True)
            full = self.render([*before, turn, *tail], kind.tools, {}, True)
            closed = self.render([*before, turn], kind.tools, {}, False)
        except CallRefused as problem:
            return Probe(kind.name, "refused", str(problem))
        suffix = self.suffix(turn, tail, {}, self.turn_end)
        if suffix and full.endswith(suffix):
            return Probe(kind.name, "extend")
        raw = closed.removesuffix(self._behind(closed[len(prompt):]) if self._ends_in(closed[len(prompt):]) else "")
        splice = raw.startswith(prompt) and full.startswith(raw) and len(raw) < len(full)
        return Probe(kind.name, "splice" if splice else "fresh", wrong=suffix is not None)


def _joined(pieces: Sequence[Piece]) -> str:
    return "".join(text for text, _ in pieces)


# -- seven kinds of turns ---------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of turn: what came before it, the turn, the messages after it, and the tools."""

    name: str
    before: tuple[Message, ...]
    turn: Message
    after: tuple[Message, ...]
    tools: tuple[Message, ...] = ()


def shape_of(turn: Mapping[str, Any]) -> tuple[int, bool]:
    """The traits of a turn on which the template's rendering may depend: the number of calls (0, 1, or 2 for several),
    and whether text stands beside calls."""
    calls = min(2, len(turn.get("tool_calls") or ()))
    return calls, bool(calls and text_of(turn).strip())


@dataclass(frozen=True)
class Probe:
    """The way to continue a kind of turn: extend, splice or fresh; or the template's refusal, and `why`. `wrong`: a
    suffix exists, but is not what the template writes."""

    kind: str
    how: str
    why: str = ""
    wrong: bool = False


def _says(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def _adds(*pairs: tuple[int, int], text: str = "", thought: str = "") -> Message:
    calls = [{"type": "function", "id": f"call{a:05d}", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
             for a, b in pairs]
    return _says("assistant", text, tool_calls=calls, **_thinks(thought))


def _thinks(thought: str) -> Message:
    return dict.fromkeys(REASONING, thought) if thought else {}


def _result(a: int, value: str) -> Message:
    return _says("tool", value, tool_call_id=f"call{a:05d}", name="add")


_ADD: Message = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}
_SUM = _says("user", "1+2?")
KINDS = (
    Kind("chat", (_says("user", "One?"),), _says("assistant", "Two."), (_says("user", "Three?"),)),
    Kind("chat after thinking", (_says("user", "One?"),), _says("assistant", "Two.", **_thinks("one, so two")),
         (_says("user", "Three?"),)),
    Kind("tool call", (_SUM,), _adds((1, 2)), (_result(1, "3"),), (_ADD,)),
    Kind("tool call with text", (_SUM,), _adds((1, 2), text="Let me add."), (_result(1, "3"),), (_ADD,)),
    Kind("tool call after thinking", (_SUM,), _adds((1, 2), thought="I add"), (_result(1, "3"),), (_ADD,)),
    Kind("two tool calls", (_SUM,), _adds((1, 2), (3, 4)), (_result(1, "3"), _result(3, "7")), (_ADD,)),
    Kind("answer after a tool", (_SUM, _adds((1, 2), thought="I add"), _result(1, "3")),
         _says("assistant", "It is 3.", **_thinks("so three")), (_says("user", "And 5+6?"),), (_ADD,)),
)


def report(probes: Sequence[Probe]) -> Iterator[str]:
    """Yield lines for people: how each kind of turn is continued, and what `fresh` costs."""
    for probe in probes:
        yield f"{probe.kind:26}{probe.how}" + (f" ({probe.why})" if probe.why else "")
    costly = [probe.kind for probe in probes if probe.how == "fresh"]
    if costly:
        yield (f"the template rewrites what came before: after {', '.join(costly)} every further turn begins a "
               "training sequence of its own, which holds the whole history again")


def main() -> int:
    """`python -m busrl.agents.renderer FOLDER`: the report on a model's chat template, for `busrl check`."""
    text = LightTokenizer.of(Path(sys.argv[1]))
    if text is not None and text.template():
        print("\n".join(report(Renderer(text, frozenset()).probes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
