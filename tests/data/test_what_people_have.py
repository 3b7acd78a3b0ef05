"""Prompts as people have them: contents in parts, files that are no lines of JSON; and what a terminal gets to see."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import busrl

from busrl.data.chat import LightTokenizer
from busrl.data.prompts import Scan, plain_text, prompt_of, scan
from busrl.data.sources import Conversion, Job, Source
from busrl.errors import COMMANDS, DataError, escaped

# -- contents in parts ---------------------------------------


class Chat:
    prompt_key = "prompt"
    template = "chat"
    system = ""
    tools_key = ""
    template_arguments: dict[str, object] = {}  # noqa: RUF012 - never changed


class Plain(Chat):
    template = "none"


def part(text: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": text}


def says(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def test_text_parts_are_joined_as_a_chat_template_writes_them() -> None:
    prompt = [says("system", part("Be "), part("short.")), says("user", part("1+", "input_text"), part("1?"))]
    joined = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1?"}]
    assert prompt_of({"prompt": prompt}, Chat()) == joined
    assert plain_text(prompt) == "Be short.\n1+1?"


def test_a_joined_prompt_reads_as_one_written_as_text(tmp_path: Path) -> None:
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
    (tmp_path / "chat_template.jinja").write_text(template)
    light = LightTokenizer(tmp_path, None)
    texts = [light.text(prompt_of({"prompt": [message]}, Chat()))
             for message in ({"role": "user", "content": "a b"}, says("user", part("a "), part("b")))]
    assert texts == ["<user>a b<assistant>"] * 2


def test_parts_without_a_message_are_one_text(tmp_path: Path) -> None:
    assert prompt_of({"prompt": [part("a"), part("b")]}, Plain()) == "ab"
    assert prompt_of({"prompt": [part("a")]}, Chat()) == [{"role": "user", "content": "a"}]
    content = scan(written(tmp_path / "p.jsonl", {"prompt": [part("a"), part("b")]}))
    assert (content.problems, content.chats, content.longest_prompt) == ((), 0, 2)


def test_a_turn_that_calls_tools_may_have_no_content() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    prompt = prompt_of({"prompt": [says("user", part("a")), calls, says("tool", part("b"))]}, Chat())
    assert isinstance(prompt, list) and prompt[1] == calls and prompt[2] == {"role": "tool", "content": "b"}


@pytest.mark.parametrize(("content", "kind"), [
    ([part("what is this?"), {"type": "image_url", "image_url": {"url": "data:..."}}], "image_url"),
    ([{"type": "image"}], "image"), ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
    ([{"type": "video_url"}], "video_url"), ([{"type": "tool_result", "content": "7"}], "tool_result"), (["hi"], "str"),
])
def test_a_part_of_another_kind_is_refused_by_its_kind_and_line(content: Any, kind: str, tmp_path: Path) -> None:
    line = {"prompt": [{"role": "user", "content": content}]}
    with pytest.raises(DataError, match=f"a part of this one is of kind '{kind}'"):
        prompt_of(line, Chat())
    (problem,) = scan(written(tmp_path / "p.jsonl", {"prompt": "a"}, line)).problems
    assert problem.place == f"{tmp_path}/p.jsonl:2" and f"kind '{kind}'" in problem.rule


@pytest.mark.parametrize("content", [[], [{"type": "text"}], [{"type": "text", "text": None}]])
def test_parts_without_a_text_are_refused(content: Any) -> None:
    with pytest.raises(DataError, match="its content has no"):
        prompt_of({"prompt": [{"role": "user", "content": content}]}, Chat())


def test_rows_of_a_source_come_out_with_their_parts_joined(tmp_path: Path) -> None:
    rows = [{"prompt": [{**says("user", {**part("a"), "image": None}, part("b")), "name": None}]},
            {"prompt": [{"role": "user", "content": "ab"}]}]
    path = written(tmp_path / "rows.jsonl", *rows)
    last = converted(path, tmp_path / "out", dedupe=True)
    assert not last.problems and last.made[0].left_out == {"as duplicates": 1}
    (line,) = (tmp_path / "out").read_text().splitlines()
    assert json.loads(line)["prompt"] == [{"role": "user", "content": "ab"}]


# -- files of other kinds ------------------------------------

ROWS = [{"prompt": 'a, "b"', "answer": "1"}, {"prompt": "c", "answer": "2"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = 'prompt,answer\n"a, ""b""",1\nc,2\n'


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def converted(path: Path, out: Path, **keys: Any) -> Any:
    plain: dict[str, Any] = {
        "name": "s", "format": "jsonl", "path": str(path), "split": "train", "function": "", "tasks": {},
        "task_options": {}, "size": 0, "prompt_key": "prompt", "prompt_text": "", "answer_key": "answer", "tag": "t",
        "where": "", "filter": "", "dedupe": False, "min_prompt_tokens": 0, "max_prompt_tokens": 0, "too_long": "drop",
    }
    job = Job(sources=[Source(**plain | keys)], out=str(out), seed=0, model="", prompt_key="prompt", template="chat",
              answer_key="answer", answers=False, system="", tools_key="", template_arguments={}, base_dir="")
    *_, last = Conversion(job).run()
    return last


OTHERS: list[tuple[str, bytes, str]] = [
    ("t.csv", TABLE.encode(), "a CSV file"), ("t.jsonl", TABLE.encode(), "a CSV file"),
    ("t.tsv", b"prompt\tanswer\na, \"b\"\t1\nc\t2\n", "a CSV file"),
    ("bom.csv", b"\xef\xbb\xbf" + TABLE.encode(), "a CSV file"),
    ("t.txt", b"prompt;answer\na, \"b\";1\nc;2\n", "a CSV file"),
    ("t.json", json.dumps(ROWS, indent=1).encode(), "one JSON array"),
    ("one line.json", json.dumps(ROWS).encode() + b"\n", "one JSON array"),
    ("t.jsonl.gz", gzip.compress(LINES.encode(), mtime=0), "a gzip file"),
    ("t.jsonl", LINES.encode("utf-16"), "UTF-16 text"),
]


@pytest.mark.parametrize(("name", "data", "what"), OTHERS)
def test_a_file_of_another_kind_is_named_and_its_conversion_works(
    name: str, data: bytes, what: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"is {what}, and prompts are lines of JSON objects") as caught:
        scan(path)
    (problem,) = converted(path, tmp_path / "out").problems
    assert f"is {what}" in problem[3]
    command = re.findall(r"`(.*)`", str(caught.value))[0].replace("python3", shlex.quote(sys.executable))
    subprocess.run(command, shell=True, check=True, timeout=60, cwd=tmp_path)
    (new,) = (file for file in tmp_path.iterdir() if file not in (path, tmp_path / "out"))
    rows = [json.loads(line) for line in new.read_text(encoding="utf-8-sig").splitlines()]
    assert [{name.removeprefix("\ufeff"): value for name, value in row.items()} for row in rows] == ROWS


@pytest.mark.parametrize(("data", "what"), [
    (b"PAR1....", "a Parquet file"), (b"PK\x03\x04..", "a zip file"), (b"BZh9", "a bzip2 file"),
    (b"<!doctype html>\n", "a page of the web"),
    (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
    (b'{\n "data": []\n}\n', "one JSON object over several lines"),
])
def test_other_beginnings_are_named_as_what_they_are(data: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=f"t.jsonl: is {what}"):
        scan(tmp_path / "t.jsonl")


def lines(folder: Path, data: bytes) -> Scan:
    (folder / "t.jsonl").write_bytes(data)
    return scan(folder / "t.jsonl")


@pytest.mark.parametrize(("line", "says"), [
    (b'{"prompt": "a", "answer": NaN}', "knows no NaN"), (b'{"prompt": "a", "x": [-Infinity]}', "knows no -Infinity"),
    (b"{'prompt': 'a'}", "a map as Python prints it"), (b'{"prompt": "\x1b[2J"}', r"\x1b stands in a text as it is"),
    ('{"prompt": "ü"}'.encode("latin1"), "not UTF-8 text (byte 12)"),
])
def test_a_line_that_is_almost_json_says_what_is_wrong(line: bytes, says: str, tmp_path: Path) -> None:
    (problem,) = lines(tmp_path, b'{"prompt": "a"}\n' + line + b"\n").problems
    assert says in problem.rule and problem.place.endswith("t.jsonl:2") and problem.remedy


@pytest.mark.parametrize("data", [
    b'{"prompt": "a,b"}\n', b'\xef\xbb\xbf{"prompt": "[1,2]"}\n', b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n',
    b'  {"prompt": "a"}\n',
])
def test_lines_of_json_stay_what_they_are(data: bytes, tmp_path: Path) -> None:
    assert not lines(tmp_path, data).problems


def test_lists_on_lines_and_words_are_no_files_of_another_kind(tmp_path: Path) -> None:
    assert [problem.place[-1] for problem in lines(tmp_path, b"[1]\n[2]\n").problems] == ["1", "2"]
    assert [problem.place[-1] for problem in lines(tmp_path, b"hello, world\nnext\n").problems] == ["1", "2"]


# -- what a terminal gets ------------------------------------

ATTACK = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize("line", [
    f'{{"prompt": "{ATTACK}"}}', ATTACK, json.dumps({"prompt": 5, ATTACK: 1}), json.dumps({ATTACK: "x"}),
    json.dumps([ATTACK]) + "\n[]", f"{{'prompt': '{ATTACK}'}}",
])
def test_no_message_about_a_file_has_bytes_that_a_terminal_obeys(line: str, tmp_path: Path) -> None:
    problems = lines(tmp_path, line.encode() + b"\n").problems
    assert problems and not any(COMMANDS.search(str(problem)) for problem in problems)
    assert escaped(ATTACK) == r"\x1b]0;mine\x07\x1b[2J\x9b31m\u202e"


def test_a_first_prompt_is_shown_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    rows = [{"prompt": f"{ATTACK} {n}", "answer": ATTACK} for n in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    text = '[model]\npath = "tiny:sort"\n[data]\ntrain = "train.jsonl"\n[learner]\nlr = 1e-4\n'
    (tmp_path / "t.toml").write_text(text)
    done = busrl("check", "t.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert r"\u202e" in done.stdout and not COMMANDS.search(done.stdout)
