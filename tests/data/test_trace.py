"""A trace is a prompt file that also says how long the answers were; the generator makes long-tailed ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from busrl.data import JsonlStream
from busrl.data.trace import Shape, TracedPrompt, make_trace, parse, read, write
from busrl.errors import DataError
from busrl.predict.lengths import kendall_tau


def test_what_was_written_is_read_again_and_is_a_prompt_file(tmp_path: Path) -> None:
    tasks = [*make_trace(20, seed=1), TracedPrompt("p", (3, 4), "a", "kind", (0.0, 1.0))]
    write(tmp_path / "t.jsonl", tasks)
    assert read(tmp_path / "t.jsonl") == tasks
    with JsonlStream(tmp_path / "t.jsonl", seed=0, shuffle=False) as stream:
        assert stream.record(stream.item(20))["prompt"] == "p"


def test_a_member_beyond_the_list_starts_again_at_its_front() -> None:
    task = TracedPrompt("p", (3, 4), rewards=(0.0, 1.0))
    assert [task.length(m) for m in range(4)] == [3, 4, 3, 4]
    assert [task.reward(m) for m in range(3)] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"lengths": [3, -1]}, "lengths = [3, -1]: must be"),
        ({"lengths": []}, "lengths = []"),
        ({"lengths": [2.5]}, "whole numbers"),
        ({}, "lengths = None"),
        ({"lengths": [True]}, "lengths holds True"),
        ({"lengths": [1, 2], "rewards": [1.0]}, "1 rewards for 2 lengths"),
        ({"lengths": [1], "arrival_s": -1.0}, "arrival_s = -1.0"),
        ({"turns": [[3]]}, "turns = [[3]]: must be [[tokens, tool_s], ...]"),
        ({"turns": [[0, 1.0]]}, "tokens >= 1"),
        ({"turns": [[[3, 1.0]], []]}, "or a list of such lists"),
        ({"turns": [[3, 1.0]], "lengths": [3]}, "not both"),
    ],
)
def test_a_line_that_is_no_task_is_refused_with_its_place(line: dict[str, object], says: str) -> None:
    with pytest.raises(DataError, match=r"t\.jsonl:7: ") as problem:
        parse(json.dumps({"prompt": "p", **line}).encode(), "t.jsonl:7")
    assert says in str(problem.value)


def test_an_episode_is_as_long_as_its_calls(tmp_path: Path) -> None:
    first, second = ((3, 0.5), (4, 0.0)), ((9, 2.0),)
    for number, (turns, lengths) in enumerate((([[3, 0.5], [4, 0]], (7,)), ([[[3, 0.5], [4, 0]], [[9, 2.0]]], (7, 9)))):
        task = parse(json.dumps({"prompt": "p", "turns": turns}).encode(), "t.jsonl:1")
        assert task.lengths == lengths and task.turns_of(0) == task.turns_of(2) == first
        assert task.turns_of(1) == (second if number else first)
        write(tmp_path / "t.jsonl", [task])
        assert read(tmp_path / "t.jsonl") == [task]


def test_arrivals_on_some_lines_only_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", [TracedPrompt("p", (3,), arrival_s=1.0), TracedPrompt("q", (3,))])
    with pytest.raises(DataError, match="every line or on none"):
        read(tmp_path / "t.jsonl")


def test_a_seed_makes_one_trace_whose_lengths_have_a_tail() -> None:
    shape = Shape(median=100, limit=2000, arrivals_per_s=5)
    tasks = make_trace(2000, shape, seed=3)
    assert tasks == make_trace(2000, shape, seed=3) != make_trace(2000, shape, seed=4)
    lengths = np.array([task.lengths for task in tasks])
    assert 90 < np.median(lengths) < 120
    assert lengths.min() >= 1 and lengths.max() <= 2000
    assert np.percentile(lengths, 99) > 7 * np.median(lengths)
    assert 350 < float(tasks[-1].arrival_s or 0) < 450


def test_siblings_tell_more_about_a_length_the_more_of_them_there_are() -> None:
    lengths = np.array([task.lengths for task in make_trace(1500, seed=5)])
    single = kendall_tau(lengths[:, 0].tolist(), lengths[:, 1].tolist())
    many = kendall_tau(lengths[:, 0].tolist(), np.log(lengths[:, 1:]).mean(1).tolist())
    assert 0.45 < single < 0.62 < many < 0.72
