"""The list of planted mistakes is current: each one's text stands in the code, and its tests are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_mistake_fits_the_code_and_names_tests_that_are_there(mutant: Mutant) -> None:
    assert mutant.fault() == ""
    assert mutant.new != mutant.old
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in (ROOT / file).read_text(), test


def test_each_mistake_is_planted_once() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_a_mistake_whose_text_is_gone_is_an_error() -> None:
    gone = Mutant("gone", "busrl/roles/learner/loop.py", "no such text in it", "", ())
    assert "stands 0 times in busrl/roles/learner/loop.py" in gone.fault()
