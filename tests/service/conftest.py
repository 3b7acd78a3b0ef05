"""The harness of real runs, and the quickstart's model, for tests of a whole service."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from busrl.service.driver import Suspects
from busrl.service.requests import LogWriter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "run"))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def quickstart() -> None:
    from busrl.quickstart import ensure

    ensure("tiny:sort")


@pytest.fixture(autouse=True)
def closed_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files of a test's own tuners and doors, which die without closing them, are closed behind it."""
    opened: list[LogWriter | Suspects] = []

    def remembers(kind: type[LogWriter | Suspects]) -> None:
        begin: Any = kind.__init__

        def remembered(holder: Any, *arguments: Any, **named: Any) -> None:
            begin(holder, *arguments, **named)
            opened.append(holder)

        monkeypatch.setattr(kind, "__init__", remembered)

    remembers(LogWriter)
    remembers(Suspects)
    yield
    for holder in opened:
        with contextlib.suppress(OSError):  # the test closed it
            holder.close()
