"""A user's table of keywords and the oracle's trace are looked at before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.predict.lengths.keywords import read_keywords
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
SORTED = '[scheduler]\npolicy = "sjf"\n'


def test_every_fault_of_a_table_of_keywords_has_its_line(here: Path, refused: Refused) -> None:
    rows = ["[words]", '"good" = 5', '"long" = "very"', '"" = 3', '"Good" = 7', '"far" = inf', "[tags]", "code = 1e9"]
    (here / "words.toml").write_text("\n".join(rows))
    problems = refused(SORTED + 'keywords = "words.toml"\n')
    assert [message.split(": ")[0] for message in problems] == [f"words.toml:{n}" for n in (3, 4, 5, 6, 8)]
    assert "'long' = 'very': a weight must be a number of tokens" in problems[0]
    assert "within 1000000 tokens" in problems[4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[words]\n"a" = 1\n"a" = 2\n', "words.toml:3: "),
        ('[words]\n"a" = \n', "words.toml:2: "),
        ("# nothing\n", "words.toml: there is no word and no tag in it"),
        ('[word]\n"a" = 1\n', "words.toml:1: word: a table of keywords has [words] and [tags]"),
    ],
)
def test_a_table_that_is_no_table_says_where_and_why(here: Path, refused: Refused, text: str, expected: str) -> None:
    (here / "words.toml").write_text(text)
    (problem,) = refused(SORTED + 'keywords = "words.toml"\n')
    assert expected in problem


def test_a_missing_table_is_reported_at_its_key(here: Path, refused: Refused) -> None:
    (problem,) = refused(SORTED + 'keywords = "nowhere.toml"\n')
    assert "t.toml:13: scheduler.keywords = " in problem and "cannot be read (No such file" in problem
    (here / "words.toml").write_bytes(b"\xff\xfe")
    (problem,) = refused(SORTED + 'keywords = "words.toml"\n')
    assert "it is not UTF-8 text" in problem


def test_a_good_table_is_taken_and_its_path_made_absolute(here: Path, loaded: Loaded) -> None:
    (here / "words.toml").write_text('[words]\n"Hello" = 5\n"你好" = -3.5\n[tags]\nmath = 2\n')
    topology = loaded(SORTED + 'keywords = "words.toml"\n')
    keywords, problems = read_keywords(topology.scheduler.keywords)
    assert not problems and keywords.words == {"hello": 5.0, "你好": -3.5} and keywords.tags == {"math": 2.0}


def test_an_oracle_for_a_real_model_is_refused(here: Path, refused: Refused) -> None:
    line = json.dumps({"prompt": "1+1=", "answer": "2", "lengths": [3, 4]})
    (here / "train.jsonl").write_text(f"{line}\n" * 40)
    (problem,) = refused(SORTED + 'predictor = "oracle"\n')
    assert "the lengths of a real model's answers are not known beforehand" in problem and "blend" in problem


def test_fifo_with_a_predictor_is_warned_about(loaded: Loaded) -> None:
    (warning,) = [w for w in loaded('[scheduler]\npredictor = "blend"\n').derived.warnings if "fifo" in w]
    assert "uses no predictor" in warning
    assert not [w for w in loaded(SORTED + 'predictor = "blend"\n').derived.warnings if "fifo" in w]
