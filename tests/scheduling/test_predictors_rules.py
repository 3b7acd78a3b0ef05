"""Rules: words of two languages, tags and limits rank prompts; a table of words is checked key by key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.predict.lengths import Keywords, RulesPredictor
from busrl.predict.lengths.rules import check, shipped
from busrl.scheduling.predictor import Candidate

LIMIT = 4096


def score(prompt: str, words: dict[str, float], tag: str = "", **tags: float) -> float:
    return float(RulesPredictor(Keywords(words, tags)).predict([Candidate(0, prompt, LIMIT, tag)])[0])


def added(prompt: str, words: dict[str, float]) -> float:
    return score(prompt, words) - score(prompt, {"unheard of": 1.0})


def test_the_shipped_table_has_words_of_both_languages_and_is_sound() -> None:
    table = shipped()
    assert {"prove", "证明", "briefly", "简短"} <= set(table.words) and table.tags["code"] > 0
    assert check({"words": table.words, "tags": table.tags})[1] == []
    chinese = [word for word in table.words if not word.isascii()]
    assert len(chinese) >= 30 and len(table.words) - len(chinese) >= 30


def test_a_latin_word_has_to_stand_alone_and_others_match_anywhere() -> None:
    assert added("Prove it.", {"prove": 100}) == 100 and added("improved", {"prove": 100}) == 0
    assert added("请证明它", {"证明": 100}) == 100 and added("写code吧", {"code": 100}) == 100


def test_a_word_counts_once_and_no_part_of_a_longer_one() -> None:
    words = {"step": 10.0, "step by step": 100.0, "why not?": 7.0}
    assert added("step by step, step by step", words) == 100
    assert added("one step", words) == 10 and added("Why not?", words) == 7


def test_tags_limits_and_digits_count_too() -> None:
    assert score("x", {"w": 1}, "Code", code=200.0) == score("x", {"w": 1}) + 200
    rules = RulesPredictor()
    small, large, digits = rules.predict([Candidate(0, "a", 100), Candidate(1, "a", 5000), Candidate(2, "7", 100)])
    assert small < digits < large


@given(st.text(max_size=200), st.integers(0, 5000))
def test_very_long_prompts_are_searched_at_both_ends(middle: str, repeats: int) -> None:
    words = {"zzbegin": 50.0, "zzend": 70.0, "zznever": 1.0}
    assert added(f"zzbegin {middle * (1 + repeats // 100)} zzend", words) == pytest.approx(120)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"words": {"a": "long"}}, "a weight must be a number of tokens"),
        ({"words": {"a": True}}, "a weight must be a number of tokens"),
        ({"words": {"a": float("nan")}}, "a weight must be finite"),
        ({"words": {"a": float("-inf")}}, "a weight must be finite"),
        ({"tags": {"a": 1e7}}, "within 1000000 tokens"),
        ({"tags": {"a": 10**400}}, "within 1000000 tokens"),
        ({"words": {"": 5}}, "an empty word is in every prompt"),
        ({"words": {"  ": 5}}, "an empty word is in every prompt"),
        ({"words": {"Prove": 5, "prove ": 6}}, "the same word is there already"),
        ({"words": {"a": {"b": 5}}}, "not a table"),
        ({"words": 5}, "must be a table"),
        ({"word": {"a": 5}}, "has [words] and [tags], nothing else"),
        ({}, "no word and no tag"),
    ],
)
def test_a_table_fault_is_named_and_the_rest_still_counts(tables: dict[str, Any], said: str) -> None:
    keywords, (fault,) = check(tables)
    assert said in fault.rule and fault.remedy
    if isinstance(tables.get("words"), dict):
        again, faults = check({**tables, "words": {**tables["words"], "good": 3}})
        assert again.words["good"] == 3.0 and len(faults) == 1
    assert all(abs(weight) <= 1e6 for weight in (*keywords.words.values(), *keywords.tags.values()))
