"""The audit of a run whose model plays several seats: groups are seats of draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

SEATS = 2


@pytest.fixture
def seats(make_run: Callable[..., Any]) -> Any:
    """Both seats of draws 0 and 1 are trained, and those of draw 2 are in slots."""
    run = make_run(seats=SEATS)
    run.step(1, run.group(0) + run.group(1))
    run.step(2, run.group(3) + run.group(2))
    run.dispatch(*run.group(5), *run.group(4))
    return run


def kinds(report: Any) -> set[str]:
    return {finding.kind for finding in report.errors}


def test_seats_of_one_draw_have_one_prompt_and_a_group_each(seats: Any) -> None:
    report = seats.audit()
    assert not report.errors and (report.counts.trained, report.counts.in_flight) == (16, 8)


def test_a_group_is_judged_by_the_members_whose_seat_was_used(seats: Any) -> None:
    for unused, survivors in ((1, 3), (2, 2)):
        group = 6 + unused
        uids = seats.group(group)
        seats.step(2 + unused, uids[:survivors])
        seats.fates.update(dict.fromkeys(uids[survivors:], "u"))
    assert not seats.audit().errors


@pytest.mark.parametrize(("trained", "unused"), [(2, 1), (1, 3), (2, 0)])
def test_a_group_that_lost_members_beside_the_unused_ones_is_found(seats: Any, trained: int, unused: int) -> None:
    uids = seats.group(7)
    seats.step(3, uids[:trained])
    seats.fates.update(dict.fromkeys(uids[trained : trained + unused], "u"))
    report = seats.audit()
    assert kinds(report) == {"group_too_small"} and report.errors[0].count == 1


def test_a_prompt_of_the_draw_with_the_groups_number_is_swapped(seats: Any, make_run: Callable[..., Any]) -> None:
    seats.seats = 1
    wrong = seats.crc(seats.uid(6, 0))
    seats.seats = SEATS
    assert wrong != seats.crc(seats.uid(6, 0))
    seats.step(3, seats.group(6), lies={seats.uid(6, 0): {"prompt_crc": wrong}})
    assert "swapped_prompt" in kinds(seats.audit())


def test_an_admission_index_of_another_seat_is_found_in_log_and_ring(seats: Any) -> None:
    seats.step(3, seats.group(6), lies={seats.uid(6, 1): {"admission": 7}})
    seats.slot(8, seats.uid(8, 0), admission=9)
    seats.fates[seats.uid(8, 0)] = "D"
    report = seats.audit()
    assert kinds(report) == {"seat_out_of_range"}
    assert sum(finding.count for finding in report.errors) == 2


def test_a_token_of_a_version_that_was_not_published_is_found(seats: Any) -> None:
    later = np.array([0, 3, 0], "<u4").tobytes()
    seats.step(3, seats.group(6), lies={seats.uid(6, 1): {"versions": later}})
    report = seats.audit()
    assert "foreign_version" in kinds(report)
    found = next(finding for finding in report.errors if finding.kind == "foreign_version")
    assert found.examples == (seats.uid(6, 1),)


def test_an_unused_seat_is_not_rolled_again(seats: Any) -> None:
    seats.fates[seats.uid(9, 0)] = "u"
    seats.step(3, [seats.uid(9, 0, again=1), *seats.group(9)[1:]])
    assert "reroll_without_accident" in kinds(seats.audit())
