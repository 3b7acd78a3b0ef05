"""The stream gives every process the same prompts, and every complaint names file and line."""

from __future__ import annotations

import json
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.data import JsonlStream, render, scan
from busrl.data.stream import line_bounds
from busrl.errors import DataError


def write(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "p.jsonl", [{"prompt": f"p{i}", "answer": str(i)} for i in range(7)])


def test_an_epoch_holds_every_line_once_and_the_next_one_has_another_order(prompts: Path) -> None:
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
    assert stream.prompt(stream.item(1)) == "€"


@given(st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=30), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_index_finds_the_same_lines_as_splitting(lines: list[bytes], ends: bool) -> None:
    import os
    import tempfile

    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    want = data.split(b"\n")
    want = want[:-1] if data.endswith(b"\n") or not data else want
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        bounds = line_bounds(file.fileno())
        got = [os.pread(file.fileno(), int(e) - 1 - int(s), int(s)) for s, e in pairwise(bounds)]
    assert got == want


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', ["not JSON", "one complete JSON object per line"]),
        ('["prompt"]', ["must be a JSON object"]),
        ('{"question": "a"}', ["['question']", "'prompt'", "data.prompt_key"]),
        ('{"prompt": 7, "answer": "7"}', ["prompt = 7", "must be a string", "quotes"]),
        ('{"prompt": "a"}', ["'answer'", "data.answer_key"]),
        ("", ["empty line", "delete the line"]),
    ],
)
def test_a_bad_line_is_named_with_value_rule_and_remedy(tmp_path: Path, line: str, words: list[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "ok", "answer": "1"}\n' + line + "\n")
    stream = JsonlStream(path, 0, False, "prompt", "answer")
    with pytest.raises(DataError) as caught:
        stream.record(stream.item(1))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert all(word in str(caught.value) for word in words)


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
    found = scan(path, "prompt", "answer")
    assert (found.count, found.longest_prompt, found.broken, len(found.problems)) == (11, 18, 8, 5)
    assert [p.place for p in found.problems] == [f"{path}:{n}" for n in range(4, 9)]


def test_a_clean_scan_finds_nothing_and_an_empty_file_is_a_finding(tmp_path: Path) -> None:
    assert scan(write(tmp_path / "a.jsonl", [{"prompt": "x"}])).problems == ()
    [found] = scan(write(tmp_path / "b.jsonl", [])).problems
    assert "empty" in str(found)


class Plain:
    prompt_key = "q"
    template = "none"


class Chat(Plain):
    template = "chat"


def test_a_prompt_is_rendered_as_it_stands_or_as_a_user_turn() -> None:
    assert render({"q": " 1+1="}, Plain()) == " 1+1="
    assert render({"q": "hi"}, Chat(), lambda m: f"<{m[0]['role']}>{m[0]['content']}") == "<user>hi"


def test_a_prompt_that_can_not_be_rendered_says_why() -> None:
    with pytest.raises(DataError, match="must be a string"):
        render({"q": None}, Plain())
    with pytest.raises(DataError, match="no chat template"):
        render({"q": "hi"}, Chat())
