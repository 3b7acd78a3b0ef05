"""Tool calls and reasoning in what a model wrote: the formats as models write them, and what is none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.agents.parsers import (
    PARSERS,
    Draft,
    MessageMaker,
    Parsed,
    call_id,
    glm,
    hermes,
    kind_of,
    llama3,
    none,
    parser_of,
    qwen_xml,
    split_reasoning,
)
from busrl.errors import UserError

TOOLS = [worlds.ADD, {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {
    "text": {"type": "string"}, "times": {"type": "integer"}}}}}]
ADD = ("add", {"a": 1, "b": 2})


def read(parsed: Parsed) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in parsed.calls]


@pytest.mark.parametrize("kind, text", [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
    ("hermes", '<tool_call>{"arguments":"{\\"a\\":1,\\"b\\":2}","name":"add"}</tool_call>\n'),
    ("qwen_xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
                 "</function>\n</tool_call>"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>"),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value>"
            "</tool_call>"),
    ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
    ("llama3", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}'),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1, "b": 2}'),
])
def test_a_call_in_each_format_is_found_and_leaves_no_text(kind: str, text: str) -> None:
    parsed = PARSERS[kind](text, TOOLS)
    assert read(parsed) == [ADD] and parsed.text == "" and parsed.unparsed == 0


@pytest.mark.parametrize("kind", ["hermes", "glm", "mistral", "llama3"])
def test_several_calls_come_out_in_order_with_the_text_before_them(kind: str) -> None:
    if kind == "llama3":
        text = '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "add", "parameters": {"a": 3, "b": 4}}'
    else:
        text = worlds.calling({"hermes": "qwen3"}.get(kind, kind), (1, 2), (3, 4), text="Both:")
    parsed = PARSERS[kind](text, TOOLS)
    assert read(parsed) == [ADD, ("add", {"a": 3, "b": 4})]
    assert parsed.text == ("" if kind == "llama3" else "Both:")


def test_an_unreadable_call_stays_in_the_text_beside_a_readable_one() -> None:
    good, bad = '<tool_call>{"name": "add", "arguments": {}}</tool_call>', '<tool_call>{"name": "add", </tool_call>'
    parsed = hermes(f"First {bad} then {good}", TOOLS)
    assert parsed.text == f"First {bad} then " and parsed.calls == [("add", "{}")] and parsed.unparsed == 1


@pytest.mark.parametrize("kind, text", [
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "say", "arguments": {"text": "\\ud800"}}</tool_call>'),
    ("glm", '<tool_call>say<arg_key>x</arg_key><arg_value>["\\udfff"]</arg_value></tool_call>'),
    ("glm", "<tool_call>add<arg_key>a</arg_key>and<arg_value>1</arg_value></tool_call>"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": -1e999}'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {'),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {"[" * 100_000}</tool_call>'),
    ("qwen_xml", "<tool_call><function=add><parameter=a>1</function></tool_call>"),
    ("glm", "<tool_call>add 1 and 2</tool_call>"),
    ("llama3", '{"name": "add", "parameters": {"a": 1}'),
    ("llama3", '<|python_tag|>print(1)'),
    ("mistral", "[TOOL_CALLS]add(1, 2)"),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"arguments": {}}]'),
])
def test_what_is_no_call_stays_in_the_text_and_is_counted(kind: str, text: str) -> None:
    assert PARSERS[kind](text, TOOLS) == Parsed(text, [], PARSERS[kind](text, TOOLS).unparsed)
    assert PARSERS[kind](text, TOOLS).unparsed >= 1


@pytest.mark.parametrize("text", ['{"name": "Bob", "age": 3}', '{"x": 1}', "The sum is 3.", ""])
def test_an_answer_in_json_is_no_call_that_failed(text: str) -> None:
    assert llama3(text, TOOLS) == Parsed(text)


def test_values_without_quotes_have_the_type_that_the_tool_declares() -> None:
    text = ("<tool_call>\n<function=say>\n<parameter=text>\n12\nand 13\n</parameter>\n<parameter=times>\n2\n"
            "</parameter>\n<parameter=other>\n[1]\n</parameter>\n</function>\n</tool_call>")
    assert read(qwen_xml(text, TOOLS)) == [("say", {"text": "12\nand 13", "times": 2, "other": [1]})]
    text = "<tool_call>say<arg_key>text</arg_key><arg_value>12</arg_value></tool_call>"
    assert read(glm(text, TOOLS)) == [("say", {"text": "12"})]
    assert read(glm(text, [])) == [("say", {"text": 12})], "without a declaration what is JSON is JSON"


@pytest.mark.parametrize("kind, piece", [
    ("hermes", "<tool_call>"), ("glm", "<tool_call>add<arg_key>"), ("qwen_xml", "<tool_call><function=add><parameter="),
    ("glm", "<arg_key>"), ("glm", "<arg_key>a</arg_key>"), ("qwen_xml", "<parameter=a>"), ("qwen_xml", "<parameter="),
    ("qwen_xml", "</function>"), ("llama3", '{"name": "add", "parameters": {}};'), ("mistral", "[TOOL_CALLS]a"),
])
def test_a_mark_that_a_model_repeats_without_end_is_read_once(kind: str, piece: str) -> None:
    """In a time that grows with the square of the repeats none of these would end within the limit of a test."""
    for around in ("{}", "<tool_call>add{}</tool_call>", "<tool_call><function=add>{}</function></tool_call>"):
        parsed = PARSERS[kind](around.format(piece * 100_000), TOOLS)
        assert all(name == "add" for name, _ in parsed.calls) and len(parsed.text) + len(parsed.calls) + parsed.unparsed


@pytest.mark.parametrize("text", ["a" + " " * 200_000, "a[CALL_ID]" + " " * 200_000, " " * 200_000])
def test_the_spaces_of_a_call_are_read_once(text: str) -> None:
    assert PARSERS["mistral"]("[TOOL_CALLS]" + text, TOOLS).unparsed == 1


def test_calls_are_looked_for_only_where_tools_were_offered() -> None:
    text = worlds.calling("qwen3", (1, 2))
    assert MessageMaker(hermes).message(text, "", [], 0) == ({"role": "assistant", "content": text}, 0)
    message, _ = MessageMaker(hermes).message(text, "", TOOLS, 7)
    assert message["content"] is None and message["tool_calls"][0]["id"] == call_id(7, 0)


@pytest.mark.parametrize("text, prompt, reasoning, rest", [
    ("<think>\none\n</think>\n\nTwo.", "", "one", "Two."),
    ("one\n</think>\n\nTwo.", "<|im_start|>assistant\n<think>\n", "one", "Two."),
    ("<think>\none", "", "one", ""),
    ("one and", "<think>\n", "one and", ""),
    ("Two.", "<think>\n\n</think>\n\n", None, "Two."),
    ("In text, </think> is a mark.", "", None, "In text, </think> is a mark."),
    ("[THINK]one[/THINK]Two.", "", "one", "Two."),
    ("<think></think>Two.", "", "", "Two."),
])
def test_reasoning_is_split_off_also_where_the_prompt_has_opened_it(
    text: str, prompt: str, reasoning: str | None, rest: str
) -> None:
    assert split_reasoning(text, prompt) == (reasoning, rest)


def test_reasoning_may_stay_in_the_text() -> None:
    message, _ = MessageMaker(none, reasoning="keep").message("<think>one</think>Two.", "", TOOLS, 0)
    assert message == {"role": "assistant", "content": "<think>one</think>Two."}


@pytest.mark.parametrize("template, kind", [
    ("qwen2_5", "hermes"), ("qwen3", "hermes"), ("glm", "glm"), ("mistral", "mistral"), ("llama3", "llama3"),
    ("gemma", "none"),
])
def test_the_format_is_known_by_the_marks_of_the_template(template: str, kind: str) -> None:
    assert kind_of(worlds.TEMPLATES[template]) == kind


def test_a_parser_of_the_users_own_that_fails_leaves_the_text_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def parse(text, tools):\n    name, _, a = text.partition('!')\n    return '', [(name, {'a': int(a)})]\n"
    )
    parse = parser_of("mine.py:parse", "", str(tmp_path))
    assert parse("add!3", TOOLS) == Parsed("", [("add", '{"a": 3}')])
    assert parse("no call", TOOLS) == Parsed("no call", [], 1)
    assert parse("\ud800!3", TOOLS) == Parsed("\ud800!3", [], 1), "a name that cannot be sent"


def test_an_unknown_format_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"agents.tools = 'xml': must be one of auto, hermes, .*file.py:function"):
        parser_of("xml", "", ".")


PIECES = [
    "<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "[TOOL_CALLS]",
    "[ARGS]", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '{"name": "add"', '"arguments": {', "}", "]",
    "[", ",", ";", "add", "1", "\n", "<|python_tag|>", "\\ud800", '"', "<think>", "</think>",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=40))
def test_no_parser_raises_and_a_text_without_calls_is_whole(text: str) -> None:
    for parse in PARSERS.values():
        parsed = parse(text, TOOLS)
        assert parsed.calls or parsed.text == text
        for name, arguments in parsed.calls:
            assert name.encode() and arguments.encode() and isinstance(json.loads(arguments), dict)


# -- drafts -----------------------------------------------

WORDS = st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "<th", "</", "[", "\n", " ", "a", "stop", "st",
                         "\ufffd", "é"])


@given(st.lists(WORDS, max_size=12).map("".join), st.sampled_from(["", "<think>\n"]), st.booleans(),
       st.sampled_from([[], ["stop"], ["top", "a"]]), st.data())
def test_what_a_draft_gives_is_the_beginning_of_the_message(
    text: str, prompt: str, message: bool, stops: list[str], data: Any
) -> None:
    maker, given_so_far = MessageMaker(none), dict[str, str]()
    draft = Draft(maker, message, prompt, stops)
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6))), len(text)]:
        for name, new in draft.more(text[:end]).items():
            assert new
            given_so_far[name] = given_so_far.get(name, "") + new
    answer = min((text.partition(stop)[0] for stop in stops), key=len, default=text)
    expected = maker.message(answer, prompt, [], 0)[0] if message else {"content": answer}
    for name, part in given_so_far.items():
        assert expected[name].startswith(part)


def test_a_draft_holds_back_no_more_than_what_may_become_a_mark() -> None:
    draft = Draft(MessageMaker(none), True, "", ["STOP"])
    texts = ("<thi", "<think>\nhm", "<think>\nhm, well\n</thi", "<think>\nhm, well\n</think>\nSo S",
             "<think>\nhm, well\n</think>\nSo Say")
    pieces = [draft.more(text) for text in texts]
    assert pieces == [{}, {"reasoning_content": "hm"}, {"reasoning_content": ", well"}, {"content": "So "},
                    {"content": "Say"}]
