"""Prompts are left out by their newest groups alone, the same by every scheduler, and never all of them for ever."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.scheduling.pass_rates import Band, PassRates, PromptFilter

SIZE = 4


class At(NamedTuple):
    source: int
    epoch: int
    line: int


class Told(NamedTuple):
    """A group that ended."""

    draw: int
    right: int
    answers: int


def place(draw: int) -> At:
    """Of two sources of three and five prompts that take turns of eight draws."""
    block, at = divmod(draw, 8)
    return At(0, block, at) if at < 3 else At(1, block, at)


def epochs(draw: int) -> list[int]:
    return [draw // 8, draw // 8]


def rates_of(band: Band, groups: list[Told]) -> PassRates:
    rates = PassRates(band, [3, 5])
    for group in groups:
        rates.ended(group.draw, place(group.draw), group.right, group.answers)
    return rates


def by_definition(band: Band, groups: list[Told], draw: int) -> bool:
    """Whether a prompt rests, from all of its groups."""
    of_line = sorted(group for group in groups if place(group.draw).line == place(draw).line and group.answers)
    newest: list[Told] = []
    while of_line and (not newest or sum(group.answers for group in newest) < band.after):
        newest.append(of_line.pop())
    answers = sum(group.answers for group in newest)
    if not newest or answers < band.after:
        return False
    rate = sum(group.right for group in newest) / answers
    out = rate < band.least or (band.most > 0 and rate >= band.most)
    return out and (not band.rest or place(draw).epoch <= place(newest[0].draw).epoch + band.rest)


BANDS = st.builds(
    Band, st.sampled_from([0.0, 0.25, 0.5]), st.sampled_from([0.0, 0.5, 0.75, 1.0]), st.integers(0, 12),
    st.integers(0, 3))
GROUPS = st.lists(
    st.builds(lambda draw, right, lost: Told(draw, min(right, SIZE - lost), SIZE - lost),
              st.integers(0, 60), st.integers(0, SIZE), st.integers(0, 1)),
    max_size=40, unique_by=lambda group: group.draw)


@settings(max_examples=200)
@given(BANDS, GROUPS, st.randoms())
def test_a_prompt_rests_by_its_newest_groups_in_any_ending_order(
    band: Band, groups: list[Told], chance: object
) -> None:
    shuffled = list(groups)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    rates, other = rates_of(band, groups), rates_of(band, [*shuffled, *groups[:3]])
    for draw in range(80):
        assert rates.rests(place(draw)) == other.rests(place(draw)) == by_definition(band, groups, draw)
    for draw in range(0, 80, 8):
        resting = [sum(rates.rests(place(draw + at)) for at in lines) for lines in (range(3), range(3, 8))]
        assert rates.resting(epochs(draw)) == resting


@settings(max_examples=200)
@given(BANDS, GROUPS, st.integers(0, 80))
def test_some_prompt_of_two_passes_is_opened_whatever_was_answered(band: Band, groups: list[Told], first: int) -> None:
    prompts = PromptFilter(rates_of(band, groups), place, epochs)
    left_out = [prompts.leaves_out(draw) for draw in range(first, first + 17)]
    assert not all(left_out)


@settings(max_examples=100)
@given(BANDS, GROUPS, st.integers(0, 80), st.integers(0, 40))
def test_a_successor_that_is_told_the_same_decides_the_same(
    band: Band, groups: list[Told], first: int, killed: int
) -> None:
    whole = PromptFilter(rates_of(band, groups), place, epochs)
    expected = [whole.leaves_out(draw) for draw in range(first, first + 40)]
    before = PromptFilter(rates_of(band, groups), place, epochs)
    decided = [before.leaves_out(draw) for draw in range(first, first + killed)]
    after = PromptFilter(rates_of(band, groups), place, epochs)
    after.given_up = before.given_up  # as the file says
    decided += [after.leaves_out(draw) for draw in range(first + killed, first + 40)]
    assert decided == expected


def test_where_every_prompt_rests_one_pass_is_opened_whole() -> None:
    solved = [Told(draw, SIZE, SIZE) for draw in range(8)]
    prompts = PromptFilter(rates_of(Band(0.0, 0.9, 0, 0), solved), place, epochs)
    assert not any(prompts.leaves_out(draw) for draw in range(10, 18))
    prompts.rates.ended(10, place(10), 0, SIZE)  # one was forgotten: it alone goes on after the pass
    assert [draw for draw in range(18, 34) if not prompts.leaves_out(draw)] == [18, 26]


def test_a_rested_prompt_is_tried_again_and_a_new_answer_counts() -> None:
    band = Band(0.0, 0.9, SIZE, 2)
    rates = rates_of(band, [Told(0, SIZE, SIZE)])
    assert [rates.rests(place(draw)) for draw in (0, 8, 16, 24)] == [True, True, True, False]
    rates.ended(24, place(24), 1, SIZE)
    assert not rates.rests(place(32))
    rates.ended(32, place(32), SIZE, SIZE)
    assert rates.rests(place(40)) and rates.rests(place(48)) and not rates.rests(place(56))
