"""Real runs need the quickstart's model once; it is made by the same code as a user's and cached."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def quickstart() -> None:
    from busrl.quickstart import ensure

    ensure("tiny:sort")


@pytest.fixture(scope="session")
def undisturbed(quickstart: None, tmp_path_factory: pytest.TempPathFactory):
    """Tokens that a run of so many steps generates when nobody disturbs it."""
    from checks import check_end
    from harness import Run, running

    known: dict[int, int] = {}

    def tokens(steps: int) -> int:
        if steps not in known:
            run = Run(tmp_path_factory.mktemp("undisturbed") / "run", steps=steps)
            with running(run):
                check_end(run, run.wait())
            known[steps] = run.summary()["generated_tokens"]
        return known[steps]

    return tokens
