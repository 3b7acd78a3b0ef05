"""The text of a sampled turn as a message: reasoning, tool calls, and the rest of the text.

Talks to nothing but the file of a user's parser. Knows nothing of ids, renderings or engines.

- A malformed call stays in the text as it is, and is counted: the model has to learn from its mistakes.
- Names that no tool has are passed on. Arguments are JSON of an object, with the model's order of keys.
- A parser reads the text once: its time grows linearly with the length, whatever the model wrote.
- A parser never raises, whatever the model wrote. If a user's parser does, the text stays as it is, and is counted.
- Text is searched for calls only where tools were offered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from busrl.errors import UserError
from busrl.system import imports

Tools = Sequence[Mapping[str, Any]]


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_decoder = json.JSONDecoder(parse_constant=_no_number)


@dataclass
class Parsed:
    """A turn's text without its calls; each call is (name, arguments as JSON). `unparsed`: how many are malformed."""

    text: str
    calls: list[tuple[str, str]] = field(default_factory=list)
    unparsed: int = 0


Parser = Callable[[str, Tools], Parsed]


# -- common to the formats --------------------------------


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = _decoder.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _call_of(value: object, *keys: str) -> tuple[str, str] | None:
    """The call of {"name": ..., "arguments": {...}}, or with another of `keys` for the arguments, which may be missing,
    or JSON in a text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not _can_be_sent(value["name"]):
        return None
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):
        arguments = _object(arguments)
    return _call(value["name"], arguments) if isinstance(arguments, dict) else None


def _call(name: str, arguments: dict[str, Any]) -> tuple[str, str] | None:
    """A call; None where its JSON holds what cannot be sent: an infinite number, or half of a character."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # 1e999 is read as infinite; deep values can be read but not written
        return None
    return (name, text) if _can_be_sent(name) and _can_be_sent(text) else None


def _can_be_sent(text: str) -> bool:
    """True for a text that is not empty, and has no half of a character."""
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")


def _blocks(text: str, read: Callable[[str], tuple[str, str] | None]) -> Parsed:
    """Parse calls that stand in blocks of their own; blocks that `read` understands are removed from the text."""
    calls: list[tuple[str, str]] = []
    parts, last = [], 0
    for begin, end, body in _between(text, _OPENING, _CLOSING):
        call = read(body)
        if call is not None:
            calls.append(call)
            parts.append(text[last:begin])
            last = end
    rest = "".join([*parts, text[last:]])
    return Parsed(rest.strip("\n") if calls else text, calls, rest.count(_OPENING))


def _between(text: str, opening: str, closing: str) -> Iterator[tuple[int, int, str]]:
    """Yield the begin and end of each block, and the text between its marks."""
    end = 0
    while (begin := text.find(opening, end)) >= 0:
        inner = begin + len(opening)
        close = text.find(closing, inner)
        if close < 0:
            return
        end = close + len(closing)
        yield begin, end, text[inner:close]


def _block_at(text: str, place: int, opening: str, closing: str) -> tuple[str, int] | None:
    """The text between the marks of the block that begins at `place`, after space, and where the block ends."""
    begin = _after_space(text, place)
    close = text.find(closing, begin) if text.startswith(opening, begin) else -1
    return (text[begin + len(opening) : close], close + len(closing)) if close >= 0 else None


def _after_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _of_types(name: str, texts: dict[str, str], tools: Tools) -> tuple[str, str] | None:
    """A call whose arguments have no quotes: texts where the tool declares a string, else JSON if it can be read."""
    types = _types(tools, name)
    values = {key: text if types.get(key) == "string" else _json_or_text(text) for key, text in texts.items()}
    return _call(name, values)


def _types(tools: Tools, name: str) -> Mapping[str, Any]:
    """The types that a tool declares for its parameters."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(properties, Mapping):
                return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, Mapping)}
    return {}


def _json_or_text(text: str) -> Any:
    try:
        return _decoder.decode(text)
    except (ValueError, RecursionError):
        return text


# -- the formats ------------------------------------------

def hermes(text: str, tools: Tools) -> Parsed:
    """`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`: Qwen 2.5, Qwen 3, Hermes."""
    return _blocks(text, lambda body: _call_of(_object(body), "arguments", "parameters"))


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.S)


def qwen_xml(text: str, tools: Tools) -> Parsed:
    """`<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`: Qwen 3.5 and later, Qwen 3 Coder.
    A value stands between line breaks of its own."""

    def read(body: str) -> tuple[str, str] | None:
        match = _FUNCTION.fullmatch(body)
        parameters = _parameters(match.group(2)) if match else None
        if match is None or parameters is None:
            return None
        return _of_types(match.group(1).strip(), parameters, tools)

    return _blocks(text, read)


def _parameters(text: str) -> dict[str, str] | None:
    """Read `<parameter=key>value</parameter>`, any number of them and nothing else."""
    parameters, place = {}, 0
    while block := _block_at(text, place, "<parameter=", "</parameter>"):
        (key, closed, value), place = block[0].partition(">"), block[1]
        if not key or not closed or "\n" in key:
            return None
        parameters[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    return parameters if _after_space(text, place) == len(text) else None


def glm(text: str, tools: Tools) -> Parsed:
    """`<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`: GLM 4.5 and later."""

    def read(body: str) -> tuple[str, str] | None:
        name, mark, rest = body.partition("<arg_key>")
        name, arguments = name.strip(), _arguments(mark + rest)
        if not name or re.search(r"[\s<>{}]", name) or arguments is None:
            return None
        return _of_types(name, arguments, tools)

    return _blocks(text, read)


def _arguments(text: str) -> dict[str, str] | None:
    """Read keys and their values, any number of them and nothing else."""
    arguments, place = {}, 0
    while key := _block_at(text, place, "<arg_key>", "</arg_key>"):
        value = _block_at(text, key[1], "<arg_value>", "</arg_value>")
        if value is None:
            return None
        arguments[key[0].strip()], place = value
    return arguments if _after_space(text, place) == len(text) else None


_PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = re.compile(r"[ \t\r\n;]*")
_LOOKS_LIKE_A_CALL = re.compile(r'\{\s*"(name|function|type)"\s*:.*"(parameters|arguments)"', re.S)


def llama3(text: str, tools: Tools) -> Parsed:
    """`{"name": "add", "parameters": {"a": 1}}` as the whole turn, several with `;` between: Llama 3.1 and later."""
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    calls, place = [], 0
    while place < len(body):
        value, end = _value_at(body, place)
        has_arguments = isinstance(value, dict) and not {"parameters", "arguments"}.isdisjoint(value)
        call = _call_of(value, "parameters", "arguments") if has_arguments else None
        if call is None:
            tried = _PYTHON_TAG in text or _LOOKS_LIKE_A_CALL.match(body) is not None
            return Parsed(text, [], int(tried))
        calls.append(call)
        place = end + len(_SEPARATORS.match(body, end)[0])  # type: ignore[index] # it always matches
    return Parsed("", calls) if calls else Parsed(text)


def _value_at(text: str, place: int) -> tuple[object, int]:
    """The JSON value that begins at `place`, and where it ends; None if there is none."""
    try:
        value, end = _decoder.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place
    return value, end


def mistral(text: str, tools: Tools) -> Parsed:
    """`[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]`, or `[TOOL_CALLS]add[ARGS]{"a": 1}` for each call."""
    before, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return Parsed(text)
    values, end = _value_at(rest, len(rest) - len(rest.lstrip()))
    if isinstance(values, list) and not rest[end:].strip():
        calls = [_call_of(value, "arguments", "parameters") for value in values]
    else:
        calls = [_mistral_call(part) for part in rest.split("[TOOL_CALLS]")]
    wellformed = [call for call in calls if call is not None]
    if not wellformed or len(wellformed) < len(calls):
        return Parsed(text, [], max(1, len(calls)))
    return Parsed(before.strip("\n"), wellformed)


def _mistral_call(text: str) -> tuple[str, str] | None:
    head, mark, rest = text.partition("{")
    name, _, identity = head.strip().removesuffix("[ARGS]").partition("[CALL_ID]")
    arguments = _object(mark + rest)
    if arguments is None or "[" in identity or re.search(r"[\s\[\]{}]", name.strip()):
        return None
    return _call(name.strip(), arguments)


def none(text: str, tools: Tools) -> Parsed:
    """No calls: the text as it is."""
    return Parsed(text)


PARSERS: dict[str, Parser] = {
    "hermes": hermes, "qwen_xml": qwen_xml, "llama3": llama3, "mistral": mistral, "glm": glm, "none": none,
}
# A mark in the source of a chat template -> the format that the template teaches; the first mark that is there decides.
_TAUGHT = (
    ("<arg_key>", "glm"), ("<function=", "qwen_xml"), ("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"),
    (_PYTHON_TAG, "llama3"), ('"parameters": dictionary', "llama3"),
)


def kind_of(template: str) -> str:
    """The format of tool calls that a chat template teaches, by the marks in its source."""
    return next((kind for mark, kind in _TAUGHT if mark in template), "none")


def parser_of(setting: str, template: str, base_dir: str) -> Parser:
    """The parser that `agents.tools` names: a format, "auto", or the user's `file.py:function`, which takes a text and
    the tools, and returns (the rest of the text, [(name, arguments), ...])."""
    if setting == "auto":
        return PARSERS[kind_of(template)]
    if setting in PARSERS:
        return PARSERS[setting]
    if ":" not in setting:
        formats = ", ".join(["auto", *PARSERS])
        raise UserError(f"agents.tools = {setting!r}: must be one of {formats}, or file.py:function")
    return _guarded(imports.load("agents.tools", setting, UserError, base_dir))


def _guarded(function: Callable[..., Any]) -> Parser:
    """A user's parser, guarded: where it raises, or returns another shape, the text stays as it is."""

    def parse(text: str, tools: Tools) -> Parsed:
        try:
            rest, pairs = function(text, tools)
            objects = [(str(name), _object(value) if isinstance(value, str) else dict(value)) for name, value in pairs]
            calls = [_call(name, arguments) for name, arguments in objects if arguments is not None]
            wellformed = [call for call in calls if call is not None]
            if len(wellformed) == len(objects) and _can_be_sent(f"{rest}."):
                return Parsed(str(rest), wellformed)
        except (Exception, SystemExit):  # the code is foreign
            pass
        return Parsed(text, [], 1)

    return parse


# -- reasoning --------------------------------------------

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def split_reasoning(text: str, prompt: str = "") -> tuple[str | None, str]:
    """The reasoning at the beginning of a turn (None: there is none), and the rest. The opening mark may be the end of
    the prompt; a turn that was cut before the closing mark is all reasoning."""
    for opening, closing in THINKING:
        begun = text.lstrip().startswith(opening)
        if begun or prompt.rstrip().endswith(opening):
            head, _, rest = text.partition(closing)
            return (head.lstrip().removeprefix(opening) if begun else head).strip("\n"), rest.lstrip("\n")
    return None, text


# -- the message ------------------------------------------


@dataclass(frozen=True)
class MessageMaker:
    """Makes messages of turns: `reasoning` = "split" moves a turn's reasoning to `reasoning_content`."""

    parse: Parser
    reasoning: str = "split"

    def message(self, text: str, prompt: str, tools: Tools, number: int) -> tuple[dict[str, Any], int]:
        """The message of call `number` of an episode, and how many tool calls in it are malformed. `text`: the sampled
        text without its end; `prompt`: at least the last words before it."""
        reasoning, rest = split_reasoning(text, prompt) if self.reasoning == "split" else (None, text)
        parsed = self.parse(rest, tools) if tools else Parsed(rest)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if parsed.calls:
            message["content"] = parsed.text or None
            message["tool_calls"] = [
                {"id": call_id(number, place), "type": "function", "function": {"name": name, "arguments": arguments}}
                for place, (name, arguments) in enumerate(parsed.calls)
            ]
        return message, parsed.unparsed


class Draft:
    """The parts of a message while its text is drawn, where no tools were offered: as much of them as later text cannot
    change. `message` False: the answer is the text itself, with its reasoning."""

    def __init__(self, maker: MessageMaker, message: bool, prompt: str, stops: Sequence[str]) -> None:
        self._splits, self._prompt, self._stops = message and maker.reasoning == "split", prompt, stops
        self._sent: dict[str, str] = {}

    def more(self, text: str) -> dict[str, str]:
        """The text that is new in each part of the message; `text` is all that was drawn so far."""
        cut = min((place for stop in self._stops if (place := text.find(stop)) >= 0), default=None)
        text = text[:cut] if cut is not None else _without_begun(text, self._stops)
        new = {}
        for name, part in self._certain(text.rstrip("\ufffd")).items():  # the last character may be incomplete
            sent = self._sent.get(name, "")
            if len(part) > len(sent) and part.startswith(sent):
                new[name], self._sent[name] = part[len(sent) :], part
        return new

    def _certain(self, text: str) -> dict[str, str]:
        if not self._splits:
            return {"content": text}
        begun = text.lstrip()
        if any(begun != opening and opening.startswith(begun) for opening, _ in THINKING):
            return {}
        reasoning, rest = split_reasoning(text, self._prompt)
        if reasoning is None:
            return {"content": rest}
        if not rest:
            reasoning = _without_begun(reasoning, [closing for _, closing in THINKING]).rstrip("\n")
        return {"reasoning_content": reasoning, "content": rest}


def _without_begun(text: str, marks: Sequence[str]) -> str:
    """The text without an end that may be the beginning of a mark."""
    begun = (length for mark in marks for length in range(1, len(mark)) if text.endswith(mark[:length]))
    return text[: len(text) - max(begun, default=0)]


def call_id(number: int, place: int) -> str:
    """An id of nine letters and digits, as some templates require; the same in a repeated episode."""
    return f"c{number & 0xFFFFF:05x}{place & 0xFFF:03x}"
