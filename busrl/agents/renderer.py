"""Messages to token ids, the new ones alone wherever the model's chat template lets them be told apart.

Talks to the tokenizer and the template of a model folder (`busrl.data.chat`) and to the tree of turns. Knows nothing of
slots, calls or clocks.

- `extend`: behind the ids of the turn that a request continues come the ids of what the template writes after such a
  turn: the difference of two renderings of a stand-in turn, without and with the new messages.
- `splice`: where that cannot be had, or is not wanted, and the text of a path begins the whole rendering, the ids of
  that path stay and the rest is encoded. `fresh`: the whole rendering is a root of its own.
- Ids that were sampled are never decoded and encoded again, and the end of a turn is never dropped or doubled.
- Text of special tokens in the contents of messages is encoded as text, where it can be told from the template's own.
- A template is tried with seven kinds of turns before it is used: what it would render wrongly is not extended.
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
LETTERS = "abcdefghijklmnop"  # a word holds a number with these as digits
AS_LETTERS, AS_DIGITS = str.maketrans("0123456789abcdef", LETTERS), str.maketrans(LETTERS, "0123456789abcdef")
CACHED = 1024


@dataclass(frozen=True)
class Prompted:
    """The ids that a call reads: those that are `new` behind `parent` (None: from the beginning), and their text."""

    parent: Turn | None
    new: list[int]
    text: str
    how: How


# -- messages as a template expects them ------------------


def for_template(message: Mapping[str, Any]) -> Message:
    """Text as one string, arguments of calls as objects, and no key without a value."""
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


# -- text of special tokens in contents -------------------

Piece = tuple[str, bool]  # a text, and whether it came from a content though it reads like a special token


class Marks:
    """Words in place of special tokens in contents, so that they can be found again in what a template wrote."""

    def __init__(self, special: Sequence[str]) -> None:
        self.base = "Qz" + "".join(secrets.choice(LETTERS) for _ in range(16))
        self._special = sorted((one for one in special if len(one) > 1), key=len, reverse=True)
        self._number = {text: number for number, text in enumerate(self._special)}
        self._find = re.compile("|".join(map(re.escape, self._special))) if self._special else None
        self._word = re.compile(f"{self.base}([{LETTERS}]+)z")

    def masked(self, value: Any) -> tuple[Any, int]:
        """`value` with a word for each special token in its texts, and how many there are."""
        found = 0

        def word(match: re.Match[str]) -> str:
            nonlocal found
            found += 1
            return self.base + f"{self._number[match.group()]:x}".translate(AS_LETTERS) + "z"

        def walk(one: Any) -> Any:
            if isinstance(one, str):
                return self._find.sub(word, one) if self._find else one
            if isinstance(one, list):
                return [walk(inner) for inner in one]
            return {walk(name): walk(inner) for name, inner in one.items()} if isinstance(one, dict) else one

        return walk(value), found

    def pieces(self, text: str) -> list[Piece]:
        """A rendering of masked messages as the true text, in pieces."""
        parts = self._word.split(text)
        return [(self._special[int(one.translate(AS_DIGITS), 16)] if place % 2 else one, bool(place % 2))
                for place, one in enumerate(parts) if one]


def behind(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """The pieces without the first `length` characters."""
    left, found = length, []
    for text, mark in pieces:
        if len(text) > left:
            found.append((text[left:], mark and not left))
        left = max(0, left - len(text))
    return found


class Renderer:
    """The prompts of calls, for the template and tokenizer of one model folder.

    `end_ids`: those that end a turn of the model. `vocabulary`: one more than the highest id. `history` = "template"
    never extends: the model sees what the template makes of the history, and each turn that it rewrites costs a
    sequence. `counts`: calls by `How`; special tokens of contents that were encoded as text (`neutralised`), and
    renderings with some that could not be (`injected`).
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
        """The ids that the call of a request reads; CallRefused where the template refuses its messages."""
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
                suffix = self._told_apart(lambda given: self.suffix(turn, given, arguments, parent.end_text), tail)
                if suffix:
                    self.counts["extend"] += 1
                    return Prompted(parent, self._ids(suffix), _joined(suffix), "extend")
        return self._whole(tree, [for_template(one) for one in history.messages()], tools, arguments)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, arguments: dict[str, Any],
               generation: bool) -> str:
        """The text that the template writes; CallRefused says why it refuses."""
        try:
            prompt: Prompt = {"messages": list(messages), "tools": list(tools or ()), "arguments": arguments}
            text = self.tokenizer.text(prompt, generation)
        except DataError as problem:
            raise CallRefused("invalid", str(problem), "messages") from None
        text.encode()  # UnicodeError: half a character has no ids
        return text

    def said(self, ids: Sequence[int] | Ids) -> tuple[str, str]:
        """The text of sampled ids without the id that ended them, and the text of that."""
        listed = [int(one) for one in ids]
        if listed and listed[-1] in self.end_ids:
            return self.tokenizer.decode(listed[:-1]), self.tokenizer.decode(listed[-1:])
        return self.tokenizer.decode(listed), ""

    def encode(self, text: str) -> list[int]:
        """Ids of a text that no template wrote, with the special tokens that the tokenizer adds to one."""
        return self.tokenizer.ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    # -- extend -----

    def suffix(self, turn: Message, tail: Sequence[Message], arguments: dict[str, Any], end: str) -> str | None:
        """The text that the template writes from the end of an assistant's `turn` up to the answer after `tail`, found
        without what came before the turn and without its text; None where it cannot be told. `end`: the text of the id
        that ended the turn, "" where a limit cut it, which then gets the template's own end."""
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
        """The text that is rendered after a stand-in for the text of a turn with these calls and arguments of the
        template, and what of it stands behind the turn's end."""
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
        """The text that follows the end of a turn."""
        return closed.rpartition(self.turn_end)[2] if self._ends_in(closed) else closed

    def _after_turn(self, messages: Sequence[Message], arguments: dict[str, Any], generation: bool) -> str:
        """The text that is rendered behind the stand-in; all of it where the template leaves out the text beside
        calls."""
        _, shown, after = (text := self.render(messages, None, arguments, generation)).rpartition(self._stand_in)
        if not shown and not messages[1].get("tool_calls"):
            raise CallRefused("invalid", "the chat template leaves out what an assistant says", "messages")
        return after if shown else text

    def _base(self, turn: Message) -> list[Message]:
        """A conversation that ends with a stand-in for `turn`: calls kept, as results may name them."""
        kept = {name: value for name, value in turn.items() if name not in REASONING}
        return [{"role": "user", "content": "u"}, {**kept, "role": "assistant", "content": self._stand_in}]

    def _turn_end(self) -> str:
        """The special token that the template writes at the end of an assistant's turn, "" without one."""
        try:
            after = self._after_turn(self._base({}), {}, False)
        except CallRefused:
            return ""
        places = {text: after.find(text) for text in self.special_ids if text and text in after}
        return min(places, key=lambda text: (places[text], -len(text)), default="")

    # -- splice and fresh -----

    def _whole(self, tree: Tree, messages: list[Message], tools: list[Any], arguments: dict[str, Any]) -> Prompted:
        pieces = self._told_apart(lambda given: self.render(given[0], given[1], arguments, True), [messages, tools])
        assert pieces is not None
        text = _joined(pieces)
        turn, length = self._spliced(tree.roots, text)
        if turn is not None:
            self.counts["splice"] += 1
            rest = behind(pieces, length)
            return Prompted(turn, self._ids(rest), _joined(rest), "splice")
        how: How = "fresh" if any(one["role"] == "assistant" for one in messages) else "begin"
        self.counts[how] += 1
        return Prompted(None, self._ids(pieces, begins=True), text, how)

    def _spliced(self, level: Sequence[Turn], text: str, length: int = 0) -> tuple[Turn | None, int]:
        """The newest of the longest turns whose path, as text, begins `text`, and how long that is."""
        best: tuple[Turn | None, int] = (None, 0)
        for turn in level:
            part = self._part(turn)
            end = length + len(part)
            if end < len(text) and text.startswith(part, length):
                deeper = self._spliced(turn.children, text, end)
                found = deeper if deeper[0] is not None else (turn, end)
                best = max(best, found, key=lambda one: (one[1], one[0].number if one[0] else -1))
        return best

    def _part(self, turn: Turn) -> str:
        asked = turn.call
        if asked.text is None:
            asked.text = self.tokenizer.decode(asked.new.tolist())
        said = self.tokenizer.decode(turn.ids.tolist()) if turn.stopped else turn.text
        return asked.text + said + turn.end_text

    # -- text to ids -----

    def _told_apart(self, render: Callable[[Any], str | None], given: Any) -> list[Piece] | None:
        """The text that `render` writes, in pieces; where contents hold special tokens these are told from the
        template's."""
        text = render(given)
        if text is None:
            return None
        masked, marks = self._marks.masked(given)
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
        found: list[int] = []
        for text, mark in pieces:
            for part in (text[:1], text[1:]) if mark else (text,):  # halves of a special token are none
                found += self.tokenizer.encode(part) if begins else self._encode_behind(part)
                begins = False
        return found

    def _encode_behind(self, text: str) -> list[int]:
        """Ids of text that does not begin a sequence, which some tokenizers would treat in another way."""
        if not self._anchor:
            return self.tokenizer.encode(text)
        first, *rest = self.tokenizer.encode(self._anchor + text)
        return rest if first == self.special_ids[self._anchor] else self.tokenizer.encode(text)

    # -- what the template can do -----

    def _probe(self, kind: Kind) -> Probe:
        turn = for_template(kind.turn)
        before, tail = ([for_template(one) for one in some] for some in (kind.before, kind.after))
        try:
            prompt = self.render(before, kind.tools, {}, True)
            whole = self.render([*before, turn, *tail], kind.tools, {}, True)
            closed = self.render([*before, turn], kind.tools, {}, False)
        except CallRefused as problem:
            return Probe(kind.name, "refused", str(problem))
        found = self.suffix(turn, tail, {}, self.turn_end)
        if found and whole.endswith(found):
            return Probe(kind.name, "extend")
        raw = closed.removesuffix(self._behind(closed[len(prompt):]) if self._ends_in(closed[len(prompt):]) else "")
        splice = raw.startswith(prompt) and whole.startswith(raw) and len(raw) < len(whole)
        return Probe(kind.name, "splice" if splice else "fresh", wrong=found is not None)


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
    """The traits of a turn that a template's way with it may depend on: no, one or several calls, and calls with text
    beside them."""
    calls = min(2, len(turn.get("tool_calls") or ()))
    return calls, bool(calls and text_of(turn).strip())


@dataclass(frozen=True)
class Probe:
    """The way in which a kind of turn is continued: extend, splice, fresh; or refused by the template, and `why`.
    `wrong`: a suffix can be made, but it is not what the template writes."""

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
    """Lines for people: how each kind of turn is continued, and what the worse ones cost."""
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
