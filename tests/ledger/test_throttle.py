"""How often one kind of warning is told, however often it comes and whatever it is called."""

from __future__ import annotations

from busrl.ledger.errors import EVERY_S, LONGEST_S, MOST_KINDS, Throttle


def told_in(seconds: int, uids: list[int]) -> tuple[int, int]:
    """Lines and occurrences that are told of one warning a second."""
    throttle, lines, times = Throttle(), 0, 0
    for second in range(seconds):
        first = throttle.admit("kind", ("text",), float(second), uids)
        repeats = throttle.due(float(second))
        lines, times = lines + first + len(repeats), times + first + sum(due.times for due in repeats)
    return lines, times + sum(due.times for due in throttle.due(0.0, everything=True))


def test_a_recurring_warning_is_told_ever_less_often_and_always_counted():
    lines, times = told_in(86_400, [])
    assert times == 86_400 and 86_400 / LONGEST_S < lines < 86_400 / LONGEST_S + 10


def test_warnings_about_samples_stay_as_frequent_since_each_names_its_own():
    lines, times = told_in(3600, [7])
    assert times == 3600 and lines == 3600 / EVERY_S


def test_one_that_was_quiet_is_told_at_once_again():
    throttle = Throttle()
    assert throttle.admit("kind", ("text",), 0.0)
    assert throttle.due(EVERY_S) == [] and throttle.admit("kind", ("text",), EVERY_S)


def test_kinds_from_outside_are_bounded_and_none_is_uncounted():
    throttle = Throttle()
    told = sum(throttle.admit(f"kind {number}", (str(number),), 0.0) for number in range(100_000))
    assert told == MOST_KINDS + 1, "each kind of its own is told at once, and so is the first of all others"
    (others,) = throttle.due(EVERY_S)
    assert told + others.times == 100_000 and others.line == ("99999",)
