"""The train log, `train.jsonl`: one line per optimiser step, for people and for the audit.

The learner writes it after a step. Talks to one file; `last_step` reads metrics.jsonl as well. Knows nothing of the
write-ahead log's bytes, of the ring or of tensors.

- A line with step s takes the place of all earlier lines with a step >= s: that is how a replay after a restart, or a
  return to a checkpoint with `wal = "off"`, shows. Nothing in the file is ever changed.
- `crc` is the crc32 of the prompt line, so the file proves which prompt each uid was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from busrl.files import json_lines
from busrl.ledger.wal import Record

TRAIN_TAIL_BYTES = 1 << 20  # of lines of thousands of samples
UID_LIMIT = 1 << 34  # 2 GiB of bitmap: far above any fate table, below what a wild uid would ask for
RESTORED = "restored"  # the cause of a line that stands for steps whose own lines are gone
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Uid = Annotated[int, msgspec.Meta(ge=0, lt=UID_LIMIT)]


class TrainLine(msgspec.Struct, kw_only=True):
    """One step; each sample is [uid, attempt, crc]."""

    step: _Natural
    version: int = 0
    cause: str = RESTORED
    samples: list[tuple[_Uid, int, int]]

    @classmethod
    def of(cls, record: Record) -> TrainLine:
        """The line of a record that was trained, also when it was replayed."""
        samples = [(sample.uid, sample.attempt, sample.prompt_crc) for sample in record.samples]
        return cls(step=record.step, version=record.version, cause=record.cause, samples=samples)


def of_step(row: Mapping[str, Any]) -> bool:
    """Whether a line of train.jsonl or metrics.jsonl is a step's. A line with a `kind` reports groups that ended
    without a step, under the number of the step before them."""
    return "kind" not in row


def last_step(path: Path) -> int:
    """The newest step that has a line, by the end of the file; 0 if none has."""
    for tail in (TRAIN_TAIL_BYTES, 0):  # the whole file only where its end is damaged
        steps = [row["step"] for row in json_lines(path, tail) if of_step(row) and isinstance(row.get("step"), int)]
        if steps:
            return int(steps[-1])
    return 0
