"""Requests of a service that are in its engine, and in no row: they wait for their weights, or their prompt is scored.

Mixed into an engine of any kind, which says in `_advance` what becomes of them. Knows nothing of models or folders.

- A request is beside the rows until it begins, or until its end is in `_done`; it counts as active either way.
- A pause and an abort end it as they end the others: no token of it exists.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from busrl.engines.base import Engine, Finished, PartialAnswer, Pause, Request, Statistics
from busrl.states import Finish

BASE = ""  # the weights of requests that name none


def weights_of(request: Request) -> str:
    """The folder of the weights that a request names."""
    return str(request.extra.get("weights", BASE))


def whole_turn(waiting: Iterable[str], loaded: str | None, users: int) -> str | None:
    """The folder whose requests may begin where an engine has the weights of one, `loaded`, with so many users; None if
    all wait. `waiting`: the folders that requests wait for, the oldest first. Once a request wants another folder those
    that run end first; then all begin that want what the oldest does."""
    folders = list(waiting)
    if not folders or (users and any(folder != loaded for folder in folders)):
        return None
    return folders[0]


class Beside(Engine):
    """An engine with requests in `_beside`, by key, the oldest first."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._beside: dict[int, Request] = {}
        super().__init__(*arguments, **settings)

    @abstractmethod
    def _advance(self) -> None:
        """Let requests begin, or end, whose time has come."""

    @property
    def active(self) -> int:
        return super().active + len(self._beside)

    def step(self) -> list[Finished]:
        if self._beside and not self.paused:
            self._advance()
        return super().step()  # type: ignore[safe-super]

    def abort(self, key: int) -> Finished | None:
        return self._given_up(key) if key in self._beside else super().abort(key)

    def pause(self, how: Pause) -> list[Finished]:
        if how == "abort":
            self._done += [self._given_up(key) for key in list(self._beside)]
        return super().pause(how)

    def statistics(self) -> Statistics:
        statistics = super().statistics()
        return replace(statistics, waiting=statistics.waiting + len(self._beside))

    def _given_up(self, key: int, refused: str = "") -> Finished:
        """End a request beside the rows."""
        return PartialAnswer(self._beside.pop(key)).finished(Finish.ABORTED, refused=refused)
