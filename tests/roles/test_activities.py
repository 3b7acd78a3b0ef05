"""What a process says of long work: the innermost piece, and after it the one around it."""

from __future__ import annotations

from typing import Any

from busrl.roles.actor import Actor


class Told:
    """A ring that notes what is declared."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def activity(self, *what: Any) -> None:
        self.said.append(what)

    def progress(self) -> None:
        pass


class Worker(Actor):
    def __init__(self) -> None:
        self.ring: Any = Told()


def test_work_within_work_gives_the_outer_ones_name_and_time_back() -> None:
    worker = Worker()
    with worker.activity("step", 600.0), worker.activity("held by validation", 630.0):
        pass
    assert worker.ring.said == [("step", 600.0), ("held by validation", 630.0), ("step", 600.0), ("",)]
