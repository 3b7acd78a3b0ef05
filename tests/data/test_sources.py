"""Sources become lines: what is read, kept, cut, renamed and refused, each with its place and count."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.data.sources import Condition, Conversion, Event, Job, Refused, Source, files_of, parse_where

arrow = pytest.importorskip("pyarrow")
import pyarrow.parquet  # noqa: E402

ROWS = [{"question": f"{n} and {n}", "answer": str(2 * n), "rate": n / 10} for n in range(10)]


def source(path: Path | str = "", **keys: Any) -> Source:
    plain: dict[str, Any] = {
        "name": Path(path).stem, "format": "jsonl", "path": str(path), "split": "train", "function": "", "tasks": {},
        "task_options": {}, "size": 0, "prompt_key": "prompt", "prompt_text": "", "answer_key": "answer", "tag": "t",
        "where": "", "filter": "", "dedupe": False, "min_prompt_tokens": 0, "max_prompt_tokens": 0, "too_long": "drop",
    }
    return Source(**(plain | keys))


def convert(out: Path, *sources: Source, **keys: Any) -> Event:
    plain: dict[str, Any] = {
        "seed": 0, "model": "", "prompt_key": "prompt", "answer_key": "answer", "answers": False, "template": "none",
        "system": "", "tools_key": "", "template_arguments": {}, "base_dir": str(out),
    }
    *_, last = Conversion(Job(sources=list(sources), out=str(out / "out.jsonl"), **(plain | keys))).run()
    return last


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "out.jsonl").read_text().splitlines()]


def problems_of(event: Event) -> list[str]:
    """The problems as people read them."""
    return [": ".join(part for part in problem[1:4] if part) + f"; {problem[4]}" for problem in event.problems]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: list[dict[str, Any]], group: int = 4) -> Path:
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=group, compression="none")
    return path


def test_a_parquet_file_becomes_lines_with_the_keys_of_the_run(tmp_path: Path) -> None:
    event = convert(tmp_path, source(parquet(tmp_path / "p.parquet", ROWS), format="parquet", prompt_key="question"))
    assert event.made[0].count == event.made[0].read == 10 and not event.problems
    text = (tmp_path / "out.jsonl").read_text()
    assert text.splitlines()[3] == '{"answer":"6","prompt":"3 and 3","rate":0.3,"tag":"t"}'
    again = convert(tmp_path, source(tmp_path / "p.parquet", format="parquet", prompt_key="question"))
    assert again.crc == event.crc and (tmp_path / "out.jsonl").read_text() == text


def save_as_datasets_does(folder: Path, rows: list[dict[str, Any]], files: int = 2) -> None:
    """As `datasets.Dataset.save_to_disk`: streams of record batches, and state.json that names them in order."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{files:05d}.arrow" for n in range(files)]
    for n, name in enumerate(names):
        table = arrow.Table.from_pylist(rows[n::files])
        with arrow.OSFile(str(folder / name), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": folder.name}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_saved_data_set_is_read_split_by_split(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save_as_datasets_does(saved / "train", ROWS)
    save_as_datasets_does(saved / "test", ROWS[:2], 1)
    (saved / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    keys: dict[str, Any] = {"format": "hf", "prompt_key": "question"}
    assert convert(tmp_path, source(saved, **keys)).made[0].count == 10
    assert [line["answer"] for line in lines(tmp_path)] == [str(2 * n) for n in (*range(0, 10, 2), *range(1, 10, 2))]
    assert convert(tmp_path, source(saved, split="test", **keys)).made[0].count == 2
    with pytest.raises(Refused, match="no split 'dev'; it has train, test"):
        files_of(saved, "dev")


def test_a_downloaded_folder_gives_the_files_of_its_split(tmp_path: Path) -> None:
    data = tmp_path / "gsm8k" / "main"
    data.mkdir(parents=True)
    parquet(data / "train-00000-of-00002.parquet", ROWS[:6])
    parquet(data / "train-00001-of-00002.parquet", ROWS[6:])
    parquet(data / "test-00000-of-00001.parquet", ROWS[:1])
    assert [path.name[:11] for path, _ in files_of(tmp_path / "gsm8k", "train")] == ["train-00000", "train-00001"]
    event = convert(tmp_path, source(tmp_path / "gsm8k", format="hf", prompt_key="question"))
    assert event.made[0].count == 10
    with pytest.raises(Refused, match="such files in it: main/test-00000"):
        files_of(tmp_path / "gsm8k", "dev")


def test_a_damaged_row_group_is_named_by_its_rows(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", [{"prompt": f"{n}" * 200, "answer": "1"} for n in range(12)])
    data = bytearray(path.read_bytes())
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    begin = group.dictionary_page_offset or group.data_page_offset
    data[begin : begin + 24] = bytes(range(200, 224))
    path.write_bytes(data)
    (problem,) = problems_of(convert(tmp_path, source(path, format="parquet")))
    assert "p.parquet: row 5: rows 5 to 8 cannot be read" in problem and "copy the file again" in problem


def test_a_file_that_is_no_parquet_file_says_so(tmp_path: Path) -> None:
    (problem,) = problems_of(convert(tmp_path, source(write(tmp_path / "p.parquet", ROWS), format="parquet")))
    assert "p.parquet: not a Parquet file" in problem


def test_a_row_that_is_no_prompt_has_place_and_remedy(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", [{"prompt": None if n == 6 else f"{n}", "answer": "1"} for n in range(9)])
    (problem,) = problems_of(convert(tmp_path, source(path, format="parquet")))
    assert "p.parquet: row 7: prompt = None: must be a string, or a list of messages" in problem
    assert problem.endswith('where = "prompt != null"')
    assert convert(tmp_path, source(path, format="parquet", where="prompt != null")).made[0].count == 8


@pytest.mark.parametrize(
    ("value", "remedy"),
    [(7, 'prompt_text = "{prompt}" makes a text of it'), (b"a", "leave it out by a filter"), ({"a": 1}, "by a filter")],
)
def test_a_column_of_another_type_says_what_makes_a_prompt_of_it(tmp_path: Path, value: Any, remedy: str) -> None:
    path = parquet(tmp_path / "p.parquet", [{"prompt": value, "answer": "1"}] * 3)
    problems = problems_of(convert(tmp_path, source(path, format="parquet")))
    assert len(problems) == 3 and all(problem.endswith(remedy) for problem in problems)
    if value == 7:
        event = convert(tmp_path, source(path, format="parquet", prompt_text="{prompt}"))
        assert not event.problems and lines(tmp_path)[0]["prompt"] == "7"


def test_a_null_answer_is_refused_where_answers_are_needed(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", [{"prompt": "a", "answer": None if n == 1 else "1"} for n in range(4)])
    assert not convert(tmp_path, source(path, format="parquet")).problems
    (problem,) = problems_of(convert(tmp_path, source(path, format="parquet"), answers=True))
    assert "p.parquet: row 2: answer = None" in problem and problem.endswith('where = "answer != null"')
    keys: dict[str, Any] = {"format": "parquet", "where": "answer != null"}
    assert convert(tmp_path, source(path, **keys), answers=True).made[0].count == 3


@pytest.mark.parametrize("left", [0, 300])
def test_a_parquet_file_that_was_cut_says_so_in_one_line(tmp_path: Path, left: int) -> None:
    path = parquet(tmp_path / "p.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:left])
    (problem,) = problems_of(convert(tmp_path, source(path, format="parquet")))
    assert problem.startswith(f"{path}: not a Parquet file: ArrowInvalid: Parquet ") and ".pxi" not in problem
    assert problem.endswith("a download may not have finished")


def test_a_parquet_file_without_rows_and_values_that_json_lacks(tmp_path: Path) -> None:
    empty = tmp_path / "empty.parquet"
    pyarrow.parquet.write_table(arrow.table({"prompt": arrow.array([], arrow.string())}), empty)
    (problem,) = problems_of(convert(tmp_path, source(empty, format="parquet")))
    assert problem.startswith("empty: it has no row")
    row = {"prompt": "a", "when": datetime.datetime(2026, 1, 2), "raw": b"\xff", "not": float("nan")}
    assert not convert(tmp_path, source(parquet(tmp_path / "p.parquet", [row]), format="parquet")).problems
    assert lines(tmp_path)[0] == {"prompt": "a", "when": "2026-01-02T00:00:00", "raw": "/w==", "not": None, "tag": "t"}


def test_a_column_that_does_not_exist_lists_those_that_do(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", ROWS)
    for keys in (
        {}, {"prompt_key": "question", "where": "pass_rate > 0"}, {"prompt_key": "question", "answer_key": "right"},
        {"prompt_text": "{text}?"},
    ):
        problems = problems_of(convert(tmp_path, source(path, **keys)))
        assert "no column" in problems[0] and "the columns are answer, question, rate" in problems[0], keys
        assert len(problems) == 1, problems


def test_broken_lines_of_a_jsonl_source_have_their_places(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n["b"]\n{"prompt": "c"}\n')
    assert [problem.split(": ")[0].rpartition("/")[2] for problem in problems_of(convert(tmp_path, source(path)))] == [
        "p.jsonl:2", "p.jsonl:3"
    ]


def test_an_empty_source_and_one_of_which_nothing_is_left_are_refused(tmp_path: Path) -> None:
    empty, full = write(tmp_path / "empty.jsonl", []), write(tmp_path / "full.jsonl", [{"prompt": "a", "r": 0}])
    first, second = problems_of(convert(tmp_path, source(empty), source(full, where="r > 0")))
    assert first.startswith("empty: it has no row")
    assert second.startswith("full: none of its 1 rows is left: 1 by where")


def test_conditions_functions_duplicates_and_sizes_are_counted_by_reason(tmp_path: Path) -> None:
    code = tmp_path / "keep.py"
    code.write_text("def keep(record):\n    return record['rate'] != 0.5\n")
    path = write(tmp_path / "p.jsonl", [*ROWS, *ROWS])
    keys: dict[str, Any] = {"prompt_key": "question", "where": "rate >= 0.3 and rate < 0.9", "dedupe": True}
    event = convert(tmp_path, source(path, filter=f"{code}:keep", **keys))
    (lines_made,) = event.made
    assert (lines_made.read, lines_made.count) == (20, 5)
    assert lines_made.left_out == {"by where": 8, "as duplicates": 5, "by filter": 2}
    assert convert(tmp_path, source(path, size=3, **keys)).made[0].count == 3


def test_a_filter_that_raises_is_named_with_the_row(tmp_path: Path) -> None:
    code = tmp_path / "keep.py"
    code.write_text("def keep(record):\n    return record['nothing'] > 1\n")
    path = write(tmp_path / "p.jsonl", [{"prompt": "a"}])
    (problem,) = problems_of(convert(tmp_path, source(path, filter=f"{code}:keep")))
    assert "p.jsonl:1: the filter raised KeyError: 'nothing' (" in problem and "keep.py:2, in keep)" in problem


def test_a_function_as_a_source_and_what_it_may_not_yield(tmp_path: Path) -> None:
    code = tmp_path / "rows.py"
    code.write_text(
        "def rows():\n    for n in range(3):\n        yield {'prompt': str(n)}\n"
        "def wrong():\n    yield {'prompt': 'a'}\n    yield ['b']\n"
        "def raises():\n    yield {'prompt': 'a'}\n    raise ValueError('no more')\n"
    )
    assert convert(tmp_path, source(format="function", function=f"{code}:rows")).made[0].count == 3
    (wrong,) = problems_of(convert(tmp_path, source(format="function", function=f"{code}:wrong")))
    assert "row 2: yields list, not a map" in wrong
    (raised,) = problems_of(convert(tmp_path, source(format="function", function=f"{code}:raises")))
    assert "it raised ValueError: no more (" in raised and "rows.py:9, in raises)" in raised


def test_columns_in_a_prompt_text_reach_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"q": "{answer} {0.__class__}", "meta": {"level": 3}, "answer": "1"}])
    event = convert(tmp_path, source(path, prompt_text="{q} at level {meta.level}."))
    assert not event.problems and lines(tmp_path)[0]["prompt"] == "{answer} {0.__class__} at level 3."


def test_messages_of_a_table_lose_the_fields_that_are_empty(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "a", "name": None}], "answer": "1"}]
    convert(tmp_path, source(parquet(tmp_path / "p.parquet", rows), format="parquet"), template="chat")
    assert lines(tmp_path)[0]["prompt"] == [{"role": "user", "content": "a"}]


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["none", "chat"])
@pytest.mark.parametrize("rule", ["drop", "truncate_left", "truncate_right"])
def test_a_prompt_that_is_too_long_is_dropped_or_cut_to_fit(
    tmp_path: Path, chat_folder: Callable[..., Path], template: str, rule: str
) -> None:
    """Characters are tokens there, and a text gets a BOS."""
    path = write(tmp_path / "p.jsonl", [{"prompt": "abcdefgh" * n} for n in range(1, 12)])
    model, frame = str(chat_folder()), len("|user\n|\n|assistant\n") if template == "chat" else 1
    limit = 40 + frame
    keys: dict[str, Any] = {"max_prompt_tokens": limit, "min_prompt_tokens": 10 + frame, "too_long": rule}
    (lines_made,) = convert(tmp_path, source(path, **keys), model=model, template=template).made
    prompts = [line["prompt"] for line in lines(tmp_path)]
    assert lines_made.left_out[f"shorter than {10 + frame} tokens"] == 1
    if rule == "drop":
        assert [len(prompt) for prompt in prompts] == [16, 24, 32, 40]
        assert lines_made.left_out[f"longer than {limit} tokens"] == 6
        return
    assert (lines_made.count, lines_made.shortened) == (10, 6) and {len(prompt) for prompt in prompts[4:]} == {40}
    assert all(prompt == "abcdefgh" * 5 for prompt in prompts[4:])


def test_the_last_message_of_a_chat_is_cut_or_dropped(
    tmp_path: Path, chat_folder: Callable[..., Path]
) -> None:
    def chat(first: str, last: str) -> dict[str, Any]:
        return {"prompt": [{"role": "system", "content": first}, {"role": "user", "content": last}]}

    path = write(tmp_path / "p.jsonl", [chat("short", "0123456789" * 4), chat("long" * 20, "0123456789" * 4)])
    keys: dict[str, Any] = {"max_prompt_tokens": 60, "too_long": "truncate_left"}
    (lines_made,) = convert(tmp_path, source(path, **keys), model=str(chat_folder()), template="chat").made
    (line,) = lines(tmp_path)
    assert line["prompt"][0]["content"] == "short" and ("0123456789" * 4).endswith(line["prompt"][1]["content"])
    assert lines_made.left_out == {"longer than 60 tokens": 1}


def test_without_a_tokenizer_nothing_is_guessed(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "a"}])
    (problem,) = problems_of(convert(tmp_path, source(path, max_prompt_tokens=5), model=str(tmp_path)))
    assert "tokens cannot be counted: the model folder has no tokenizer.json" in problem


# -- conditions ------------------------------------------------------------------------------------------------------


def test_conditions_are_read_by_a_grammar_of_their_own() -> None:
    text = "rate >= 0.25 and level != \"a and b\" and `two words` == true and meta.n < -1e3 and x == null"
    assert parse_where(text) == [
        Condition("rate", ">=", 0.25), Condition("level", "!=", "a and b"), Condition("two words", "==", True),
        Condition("meta.n", "<", -1000.0), Condition("x", "==", None),
    ]
    assert parse_where("") == []


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "rate >= 1 or rate < 0", "rate = 1", "rate >= other", "rate >= 1 and",
        "(rate >= 1)", "rate >= 1; import os", "[x for x in y]", "rate >= 1 and and rate < 2", "x > null",
        "rate >= " + "9" * 50 + "e" * 50, "a == 'b' c == 1",
    ],
)
def test_a_hostile_or_unknown_expression_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(ValueError, match="conditions are COLUMN"):
        parse_where(text)


@given(st.text(max_size=60))
@settings(max_examples=200)
def test_no_text_does_more_than_parse_or_be_refused(text: str) -> None:
    try:
        parse_where(text)
    except ValueError as problem:
        assert "COLUMN" in str(problem)


def test_values_of_different_kinds_are_not_compared(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "rate": "high"}])
    (problem,) = problems_of(convert(tmp_path, source(path, where="rate > 0.5")))
    assert "where compares different kinds: str > float" in problem


def gym(**keys: Any) -> Source:
    return source(name="sums", format="reasoning_gym", tasks={"chain_sum": 1.0}, size=20, **keys)


def test_questions_have_the_tag_of_their_source_or_their_task(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    for tag, expected in (("short", "short"), ("", "chain_sum")):
        assert not convert(tmp_path, gym(tag=tag)).problems
        assert {row["tag"] for row in lines(tmp_path)} == {expected}


def test_options_of_a_task_of_reasoning_gym_say_what_is_asked(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    options = {"chain_sum": {"min_terms": 3, "max_terms": 3, "max_digits": 1}}
    assert not convert(tmp_path, gym(task_options=options)).problems
    for line in lines(tmp_path):
        assert (line["metadata"]["num_terms"], line["metadata"]["num_digits"]) == (3, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"terms": 3}, "sums: task 'chain_sum' of reasoning-gym has no option 'terms'; it has allow_negation, "),
        ({"seed": 3}, "sums: task 'chain_sum' of reasoning-gym has no option 'seed'"),
        ({"min_terms": 9}, "sums: task 'chain_sum' of reasoning-gym refuses {'min_terms': 9}: "),
        ({"min_terms": "two"}, "sums: task 'chain_sum' of reasoning-gym refuses {'min_terms': 'two'}: "),
    ],
)
def test_an_option_that_a_task_does_not_have_or_take_is_refused(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    pytest.importorskip("reasoning_gym")
    (problem,) = problems_of(convert(tmp_path, gym(task_options={"chain_sum": options})))
    assert problem.startswith(reason) and "task_options.chain_sum" in problem
