"""A sink of your own: the numbers of a run as a table for a spreadsheet (docs/extend-functions.md)."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Any

from busrl.observe.sinks import RunCard


class Table:
    """`sinks/<its name>/long.csv`: a line per number, as `step, name, value`."""

    def __init__(self, card: RunCard) -> None:
        self._file = open(card.folder / "long.csv", "a", newline="")  # noqa: SIM115
        self._table = csv.writer(self._file)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._table.writerows((step, name, value) for name, value in values.items())

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._table.writerows((step, "sample", row.get("completion", "")) for row in rows)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
