"""What became of the tokens of a run, from its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_scene import ended, interval, make_run, step, write_lines

from busrl.errors import NoSuchRun
from busrl.observe.report.files import read
from busrl.observe.report.waste import render, waste_of


def tokens_of(root: Path) -> dict[str, int | None]:
    return {part.name: part.tokens for part in waste_of(read(root)).parts}


def test_every_token_that_was_drawn_has_a_cause(tmp_path: Path) -> None:
    waste = waste_of(read(make_run(tmp_path)))
    assert waste.sampled == 500 + 250, "an engine that began again counts from 0"
    assert {part.name: part.tokens for part in waste.parts} == {
        "trained": 160, "earlier_segments": 30, "too_old": 10, "flat group": 20, "too old": 300, "validation": 11,
        "left": 750 - 531,
    }
    assert {part.name: part.samples for part in waste.counted} == {"dead": 3, "open": 2, "reward raised": 1}
    assert waste.share == 160 / (750 - 11)
    assert waste.ess["limit"] == 0.5 and waste.ess["below"] == 0.5 and waste.ess["lowest"] == 0.4
    text = render(waste)
    assert "too old" in text and "3 samples in the slots of processes that died" in text


def test_lost_long_answers_show_in_lengths_and_in_the_longest_quarter(tmp_path: Path) -> None:
    waste = waste_of(read(make_run(tmp_path)))
    assert waste.lengths["lost"].mean == 300 and waste.lengths["trained"].mean == 200 / 6
    assert waste.lengths["ended"].samples == 9 and waste.lengths["ended"].mean == 520 / 9
    assert waste.quarters[0].flat == 0.5, "five groups: the first quarter has two"
    assert waste.quarters[-1].lost == 1.0 and waste.quarters[-1].age is None
    assert waste.quarters[-2].trained == 1.0 and waste.quarters[-2].age == 1.0


def test_a_step_undone_and_made_again_counts_once_as_trained(tmp_path: Path) -> None:
    root = make_run(tmp_path)
    write_lines(root / "groups.jsonl", [
        ended(1, [0], "T", [[10]]), ended(2, [1], "T", [[20]]), ended(3, [2], "T", [[40]]),
        ended(2, [1], "T", [[25]]),  # back to the checkpoint of step 1
    ])
    tokens = tokens_of(root)
    assert tokens["undone"] == 60 and tokens["trained"] == 35 - tokens["earlier_segments"] - tokens["too_old"]  # type: ignore[operator]


def test_a_group_whose_learner_died_before_dropping_counts_by_its_outcome(tmp_path: Path) -> None:
    root = make_run(tmp_path)
    write_lines(root / "groups.jsonl", [ended(1, [5], "o", [[70]]), ended(1, [5], "T", [[70]])])
    assert "too old" not in tokens_of(root) and tokens_of(root)["trained"] == 70


def test_engine_output_is_unknown_where_engines_wrote_less_than_ended(tmp_path: Path) -> None:
    root = make_run(tmp_path)
    write_lines(root / "pace" / "rollout-0.jsonl", [interval(2, 100)])
    waste = waste_of(read(root))
    assert waste.sampled is None and "not known in full" in render(waste) and "left" not in tokens_of(root)


def test_a_directory_without_a_run_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match="no run is in it"):
        read(tmp_path)
    with pytest.raises(NoSuchRun, match="no such folder"):
        read(tmp_path / "nowhere")


LINES = st.lists(st.tuples(st.sampled_from("Tfoi"), st.lists(st.integers(0, 99), max_size=4)), max_size=9)


@settings(deadline=None, max_examples=40)
@given(LINES, st.integers(0, 3000))
def test_the_parts_add_up_to_the_drawn_tokens_or_leave_unknowns(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, list[int]]], drawn: int
) -> None:
    root = tmp_path_factory.mktemp("run")
    write_lines(root / "metrics.jsonl", [step(n, masked={"too_old": n}) for n in range(1, 9)])
    write_lines(root / "groups.jsonl", [ended(n, [n], fate, [lengths]) for n, (fate, lengths) in enumerate(lines, 1)])
    write_lines(root / "pace" / "r.jsonl", [interval(1, drawn)])
    waste = waste_of(read(root))
    total = sum(part.tokens or 0 for part in waste.parts)
    assert all((part.tokens or 0) >= 0 for part in waste.parts)
    assert total == max(drawn, sum(sum(lengths) for _, lengths in lines))
    assert (waste.sampled is None) == (drawn < total)
    assert sum(quarter.groups for quarter in waste.quarters) == sum(bool(lengths) for _, lengths in lines)
    assert all(abs(quarter.trained + quarter.flat + quarter.lost - 1) < 1e-9 for quarter in waste.quarters)
