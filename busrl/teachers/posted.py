"""Values that environments of Atropos post of a teacher with their groups, and the files that keep it.

The role atropos writes a file per group before it commits the group's samples; the learner reads it when it trains
them (`of_groups`). Talks to files of the run directory; loads no torch. Knows nothing of requests or losses.

- A posted position is about the token that stands there, as its log-probability is: position t predicts token t.
- A file lies there, and on disk, before its group can be trained, until no log holds its samples any more: a step that
  is trained again is taught the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.algorithms.catalog import FEWER
from busrl.errors import UserError
from busrl.system.files import replace

FILES_READ = 256  # that are kept in memory


class TaughtTokens(msgspec.Struct):
    """Ids and log-probabilities at each trained token of a sequence, `width` of each per token."""

    width: int
    ids: bytes  # int32
    logprobs: bytes  # float32

    def arrays(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        ids, logprobs = np.frombuffer(self.ids, np.int32), np.frombuffer(self.logprobs, np.float32)
        return ids.reshape(-1, self.width), logprobs.reshape(-1, self.width)


class Store:
    """The files of a run: one for each draw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = lru_cache(FILES_READ)(self._of_file)

    def write(self, draw: int, members: Sequence[TaughtTokens]) -> None:
        """Write what the members of a draw are taught, in their order. DiskFull or WriteFailed if it cannot be."""
        self.folder.mkdir(exist_ok=True)
        replace(self._path(draw), msgspec.msgpack.encode(list(members)))

    def read(self, draw: int, member: int) -> TaughtTokens:
        """Read what a sample is taught; UserError names the file that is not there, or lacks it."""
        members = self._read(draw)
        if member >= len(members):
            raise UserError(f"{self._path(draw)}: it has {len(members)} members, and no member {member}")
        return members[member]

    def draws(self) -> Iterable[int]:
        """The draws that have a file."""
        return (int(path.stem) for path in self.folder.glob("*.taught") if path.stem.isdigit())

    def remove(self, draws: Iterable[int]) -> None:
        for draw in draws:
            with contextlib.suppress(OSError):
                os.unlink(self._path(draw))

    def _path(self, draw: int) -> Path:
        return self.folder / f"{draw}.taught"

    def _of_file(self, draw: int) -> list[TaughtTokens]:
        try:
            return msgspec.msgpack.decode(self._path(draw).read_bytes(), type=list[TaughtTokens])
        except (OSError, msgspec.DecodeError) as problem:
            raise UserError(
                f"{self._path(draw)}: what a teacher said of the samples of draw {draw} cannot be read: {problem}; put "
                "the file back, or begin again from a checkpoint of before (learner.start_from)"
            ) from problem


# -- what environments post -----


def posted_rows(
    ids: Any, logprobs: Any, trained: npt.NDArray[np.bool_], count: int, vocabulary: int
) -> TaughtTokens:
    """Read what a posted sequence is taught: `distill_token_ids` and `distill_logprobs` [position][k], of which the
    `count` most probable ones of each trained position are kept. ValueError names the position that breaks a rule."""
    for values in (ids, logprobs):
        if not isinstance(values, list) or len(values) != len(trained):
            there = len(values) if isinstance(values, list) else "no"
            raise ValueError(f"has {there} positions: must be as many as tokens, {len(trained)}")
    rows = [_position(ids[at], logprobs[at], at, count, vocabulary) for at in np.flatnonzero(trained).tolist()]
    listed = [_filled(some, measured, count) for some, measured in rows]
    return TaughtTokens(count, np.array([row[0] for row in listed], np.int32).tobytes(),
                        np.array([row[1] for row in listed], np.float32).tobytes())


def _position(ids: Any, logprobs: Any, at: int, count: int, vocabulary: int) -> tuple[list[int], list[float]]:
    if not isinstance(ids, list) or not isinstance(logprobs, list) or not ids or len(ids) != len(logprobs):
        raise ValueError(f"[{at}] must be at least one token, with a log-probability of each, where one is trained")
    if wrong := [token for token in ids if type(token) is not int or not 0 <= token < vocabulary]:
        raise ValueError(f"[{at}] has {wrong[0]!r}: must be 0 to {vocabulary - 1}, of the trained model's tokenizer")
    if wrong := [value for value in logprobs if type(value) not in (int, float) or not FEWER < value <= 0]:
        raise ValueError(f"[{at}] has {wrong[0]!r}: must be a log-probability, a finite number at most 0")
    if len(set(ids)) < len(ids):
        raise ValueError(f"[{at}] has a token twice")
    if sum(np.exp(logprobs)) > 1 + 1e-3:
        raise ValueError(f"[{at}] has probabilities whose sum is above 1")
    best = sorted(range(len(ids)), key=lambda n: (-logprobs[n], ids[n]))[:count]
    return [ids[n] for n in best], [float(logprobs[n]) for n in best]


def _filled(ids: list[int], logprobs: list[float], count: int) -> tuple[list[int], list[float]]:
    """`count` tokens, those that are not there as FEWER."""
    missing = count - len(ids)
    return ids + [0] * missing, logprobs + [FEWER] * missing
