"""The stream gives every process the same prompts, and every complaint names file and line."""

from __future__ import annotations

import json
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from busrl.data import JsonlStream, plain_text, prompt_of, scan
from busrl.data.prompts import BLOCK, BOM, shares
from busrl.errors import DataError
from busrl.ledger.audit.snapshot import Prompts


def write(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "p.jsonl", [{"prompt": f"p{i}", "answer": str(i)} for i in range(7)])


def test_an_epoch_holds_every_line_once_in_an_order_of_its_own(prompts: Path) -> None:
    stream = JsonlStream(prompts, seed=3, shuffle=True)
    first, second = ([stream.item(e * 7 + i).index for i in range(7)] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second


def test_the_order_is_the_documented_one_and_needs_no_state(prompts: Path) -> None:
    draws = [13, 0, 40, 6, 14, 3]
    seen = [JsonlStream(prompts, seed=5, shuffle=True).item(d).index for d in draws]
    for draw, index in zip(draws, seen):
        order = np.random.Generator(np.random.PCG64([5, draw // 7])).permutation(7)
        assert index == order[draw % 7]


def test_without_shuffle_the_lines_come_in_file_order_for_ever(prompts: Path) -> None:
    stream = JsonlStream(prompts, seed=0, shuffle=False)
    assert [stream.item(d).index for d in range(16)] == [d % 7 for d in range(16)]


def test_an_item_is_the_raw_line_without_its_newline_and_its_crc(tmp_path: Path) -> None:
    lines = [b'{"prompt": "a\\u00e9",  "x":1}\r', b'{"prompt": "\xe2\x82\xac"}', b'{"prompt":"last"}']
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\n".join(lines))
    stream = JsonlStream(path, 0, False)
    assert [stream.item(i).line for i in range(3)] == lines
    assert [stream.item(i).crc for i in range(3)] == [zlib.crc32(line) for line in lines]
    assert stream.record(stream.item(1))["prompt"] == "€"


@given(st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=30), st.booleans())
@settings(max_examples=60)
def test_the_index_finds_the_same_lines_as_splitting(lines: list[bytes], ends: bool) -> None:
    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    want = data.split(b"\n")
    while want and not want[-1].strip():
        want.pop()
    assume(want and not data.startswith(BOM))
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with JsonlStream(file.name, 0, False) as stream:
            assert [stream.at(index).line for index in range(len(stream))] == want


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', ["not JSON", "one complete JSON object per line"]),
        ('["prompt"]', ["must be a JSON object"]),
        ('{"question": "a"}', ["['question']", "'prompt'", "data.prompt_key"]),
        ('{"prompt": 7, "answer": "7"}', ["prompt = 7", "must be a string", "quotes"]),
        ('{"prompt": "7", "answer": [7]}', ["answer = [7]", "a number, true or false", "quotes"]),
        ('{"prompt": "a"}', ["'answer'", "data.answer_key"]),
        ("", ["empty line", "delete the line"]),
    ],
)
def test_a_bad_line_is_named_with_value_rule_and_remedy(tmp_path: Path, line: str, words: list[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "ok", "answer": "1"}\n' + line + '\n{"prompt": "ok", "answer": ""}\n')
    (problem,) = scan(path, "prompt", "answer").problems
    assert str(problem).startswith(f"{path}:2: ")
    assert all(word in str(problem) for word in words)


def test_an_empty_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "e.jsonl"
    empty.write_text("")
    for path, words in ((empty, "empty"), (tmp_path / "no.jsonl", "cannot be read"), (tmp_path, "directory")):
        with pytest.raises(DataError, match=words):
            JsonlStream(path, 0, True)


def test_a_file_that_changes_under_the_run_is_refused(prompts: Path) -> None:
    stream = JsonlStream(prompts, 0, False)
    prompts.write_bytes(prompts.read_bytes()[:20])
    with pytest.raises(DataError, match="changed while a run uses it"):
        stream.item(6)


def test_a_scan_counts_measures_and_keeps_the_first_five_findings(tmp_path: Path) -> None:
    good: list[object] = [{"prompt": "é" * n, "answer": "1"} for n in (1, 9, 3)]
    path = write(tmp_path / "p.jsonl", [*good, *({"prompt": n} for n in range(8))])
    content = scan(path, "prompt", "answer")
    assert (content.count, content.longest_prompt, content.broken, len(content.problems)) == (11, 18, 8, 5)
    assert [p.place for p in content.problems] == [f"{path}:{n}" for n in range(4, 9)]


def test_a_clean_scan_finds_nothing_and_an_empty_file_is_a_finding(tmp_path: Path) -> None:
    assert scan(write(tmp_path / "a.jsonl", [{"prompt": "x"}])).problems == ()
    [problem] = scan(write(tmp_path / "b.jsonl", [])).problems
    assert "empty" in str(problem)


class Plain:
    prompt_key = "q"
    template = "none"
    system = ""
    tools_key = ""
    template_arguments: dict[str, object] = {}  # noqa: RUF012 - never changed


class Chat(Plain):
    template = "chat"


class Instructed(Chat):
    system = "Be short."


TURNS = (("user", "a"), ("assistant", "b"), ("user", "c"))
CONVERSATION = [{"role": role, "content": content} for role, content in TURNS]


def test_a_prompt_is_a_text_a_user_turn_or_a_chat() -> None:
    assert prompt_of({"q": " 1+1="}, Plain()) == " 1+1="
    assert prompt_of({"q": "hi"}, Chat()) == [{"role": "user", "content": "hi"}]
    assert prompt_of({"q": CONVERSATION}, Chat()) == CONVERSATION


def test_the_system_prompt_begins_every_chat_that_has_none_of_its_own() -> None:
    system = {"role": "system", "content": "Be short."}
    assert prompt_of({"q": "hi"}, Instructed()) == [system, {"role": "user", "content": "hi"}]
    assert prompt_of({"q": CONVERSATION}, Instructed()) == [system, *CONVERSATION]
    with_system = [{"role": "system", "content": "Be long."}, *CONVERSATION]
    assert prompt_of({"q": with_system}, Instructed()) == with_system


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "must be a string, or a list of messages"),
        (7, "must be a string, or a list of messages"),
        ([], "a chat needs one"),
        (["hi"], "every message must be"),
        ([{"role": "user"}], "every message must be"),
        ([{"role": "user", "content": [{"type": "image"}]}], "every message must be"),
        (CONVERSATION[:2], "the last message is the assistant's own"),
    ],
)
def test_a_prompt_that_is_neither_says_why(value: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        prompt_of({"q": value}, Chat())
    (problem,) = scan(write(tmp_path / "p.jsonl", [{"q": value}]), "q").problems
    assert words in problem.rule



def test_messages_without_a_chat_template_are_refused_with_the_key_to_set() -> None:
    with pytest.raises(DataError, match=r'set data\.template = "chat"'):
        prompt_of({"q": CONVERSATION}, Plain())


def written_by_people(path: Path) -> Path:
    """A byte order mark, Windows line ends, a chat, answers that are no text, empty lines at the end."""
    lines = [{"q": "é", "a": 72}, {"q": CONVERSATION, "a": 0.5}, {"q": "x", "a": True}, {"q": "y", "a": "t"}]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\r\n" for line in lines)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n \n\n")
    return path


def test_files_are_read_as_people_write_them(tmp_path: Path) -> None:
    path = written_by_people(tmp_path / "p.jsonl")
    content = scan(path, "q", "a")
    assert (content.count, content.broken, content.problems, content.chats) == (4, 0, (), 1)
    assert list(content.sizes) == [2, 5, 1, 1]
    stream = JsonlStream(path, 0, False, "q")
    assert len(stream) == 4
    assert [stream.record(stream.item(i))["a"] for i in range(4)] == [72, 0.5, True, "t"]
    assert [plain_text(stream.record(stream.item(i))["q"]) for i in range(2)] == ["é", "a\nb\nc"]
    data = path.read_bytes()
    for index, start in enumerate(content.starts):
        line = stream.at(index).line
        assert data[start : start + len(line)] == line


def test_the_audit_reads_the_same_lines_by_itself(tmp_path: Path) -> None:
    path = written_by_people(tmp_path / "p.jsonl")
    stream, prompts = JsonlStream(path, 3, True, "q"), Prompts(path, 3, True)
    assert len(prompts) == 4
    assert prompts.crcs(np.arange(20)).tolist() == [stream.item(draw).crc for draw in range(20)]


def test_an_empty_line_in_the_middle_is_an_error_at_its_place(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n\n')
    content = scan(path)
    assert content.count == 3 and [str(problem.place) for problem in content.problems] == [f"{path}:2"]


def test_broken_lines_beyond_the_first_few_are_counted_by_what_is_wrong(tmp_path: Path) -> None:
    records: list[object] = [*({"prompt": 1} for _ in range(6)), *({"text": "a"} for _ in range(9)), [1]]
    path = write(tmp_path / "p.jsonl", records)
    path.write_text(path.read_text() + "nonsense\n" * 3)
    content = scan(path)
    assert content.broken == 19 and sum(n for _, n in content.more) == 14
    assert dict(content.more) == {
        "must be a string, or a list of messages": 1, "the key 'prompt' is missing": 9, "not JSON": 3,
        "every line must be a JSON object": 1,
    }


# -- mixtures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    start: int
    count: int
    share: int


@st.composite
def mixtures(draw: st.DrawFn) -> list[Part]:
    counts = draw(st.lists(st.integers(1, 40), min_size=2, max_size=5))
    weights = draw(st.lists(st.floats(0.05, 10), min_size=len(counts), max_size=len(counts)))
    starts = [sum(counts[:at]) for at in range(len(counts))]
    return [Part(*part) for part in zip(starts, counts, shares(weights))]


def mixed(parts: list[Part], seed: int, shuffle: bool = True) -> JsonlStream:
    with tempfile.NamedTemporaryFile("w") as file:
        file.writelines(f'{{"prompt": "p{n}"}}\n' for n in range(sum(part.count for part in parts)))
        file.flush()
        return JsonlStream(file.name, seed, shuffle, sections=parts)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
def test_shares_fill_a_block_and_none_is_off_by_a_whole_draw(weights: list[float]) -> None:
    counts = shares(weights)
    assert sum(counts) == BLOCK
    assert all(abs(share - weight / sum(weights) * BLOCK) < 1 for share, weight in zip(counts, weights))


@given(mixtures(), st.integers(0, 2**31 - 1), st.integers(0, 50), st.booleans())
@settings(max_examples=25)
def test_blocks_of_a_mixture_have_their_shares_and_sources_whole_epochs(
    parts: list[Part], seed: int, block: int, shuffle: bool
) -> None:
    with mixed(parts, seed, shuffle) as stream:
        lines = [stream.item(draw).index for draw in range(block * BLOCK, (block + 2) * BLOCK)]
    for part in parts:
        drawn = [line - part.start for line in lines if part.start <= line < part.start + part.count]
        firsts = sum(part.start <= line < part.start + part.count for line in lines[:BLOCK])
        assert (firsts, len(drawn)) == (part.share, 2 * part.share)
        begun = -(block * part.share) % part.count  # the first of these draws that begins an epoch
        for start in range(begun, len(drawn) - part.count + 1, part.count):
            assert sorted(drawn[start : start + part.count]) == list(range(part.count))
            assert shuffle or drawn[start : start + part.count] == list(range(part.count))


@given(mixtures(), st.integers(0, 2**31 - 1), st.integers(0, 50))
@settings(max_examples=15)
def test_a_place_names_its_source_line_and_epoch(
    parts: list[Part], seed: int, block: int
) -> None:
    draws = range(block * BLOCK, (block + 1) * BLOCK)
    with mixed(parts, seed) as stream:
        places = [stream.place(draw) for draw in draws]
        assert all(stream.item(draw).index == place.line for draw, place in zip(draws[::50], places[::50]))
        last = stream.epochs(draws[7])
    for number, part in enumerate(parts):
        of_source = [place for place in places if place.source == number]
        assert all(part.start <= place.line < part.start + part.count for place in of_source)
        assert max((place.epoch for place in of_source), default=-1) == last[number]


@given(mixtures(), st.integers(0, 2**31 - 1), st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
@settings(max_examples=25)
def test_a_draw_of_a_mixture_is_the_same_after_any_restart(
    parts: list[Part], seed: int, draws: list[int]
) -> None:
    with mixed(parts, seed) as stream, mixed(parts, seed) as other:
        items = [stream.item(draw) for draw in draws]
        assert items == [other.item(draw) for draw in reversed(draws)][::-1]
    with tempfile.NamedTemporaryFile("w") as file:
        file.writelines(f'{{"prompt": "p{n}"}}\n' for n in range(sum(part.count for part in parts)))
        file.flush()
        audited = Prompts(Path(file.name), seed, True, [(part.start, part.count, part.share) for part in parts])
        assert audited.crcs(np.array(draws)).tolist() == [item.crc for item in items]


def test_one_source_is_drawn_like_a_file() -> None:
    with mixed([Part(0, 7, BLOCK)], 3) as stream:
        order = np.random.Generator(np.random.PCG64([3, 1])).permutation(7)
        assert [stream.item(7 + n).index for n in range(7)] == order.tolist()


def test_a_file_with_fewer_lines_than_its_sources_is_refused() -> None:
    parts = [Part(0, 3, 500), Part(3, 4, 500)]
    with tempfile.NamedTemporaryFile("w") as file:
        file.write('{"prompt": "a"}\n')
        file.flush()
        with pytest.raises(DataError, match="fewer lines than its sources"):
            JsonlStream(file.name, 0, True, sections=parts)
