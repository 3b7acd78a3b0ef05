"""What an engine runs while it has to start again with new weights: finished before, or cut and continued after it.

Used by the rollout role where versions are folders that an engine restarts with; talks to the engine. Knows nothing of
slots beyond their numbers as keys, of versions or of files.

- A cut answer loses no token: what was drawn becomes the prefix of a new request, and the pieces are committed as one,
  each token with its own log-probability and version.
- The piece after a cut draws from a stream of random numbers of its own: the same numbers twice would tie tokens of
  one answer to each other.
- Pieces live in this process alone. If it dies, the whole sample is generated again, as any that was running.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from busrl.inference import ABORTED, Engine, Finished, Request

PIECE = 1 << 32  # segments are numbered below it, so piece k of segment s draws from stream s + k * PIECE


@dataclass
class _Running:
    """A request as it was submitted first, and the pieces of its answer so far."""

    request: Request
    pieces: list[Finished]

    @property
    def tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)

    def rest(self) -> Request:
        """What is left to be generated."""
        first = self.request
        return replace(
            first,
            segment=first.segment + PIECE * len(self.pieces),
            prefix_ids=np.concatenate([first.prefix_ids, *(piece.token_ids for piece in self.pieces)]).astype(np.int32),
            max_new_tokens=first.max_new_tokens - self.tokens,
        )


class Restart:
    """`finish`: let answers end before the engine restarts, and start none meanwhile; else they are cut."""

    def __init__(self, finish: bool) -> None:
        self.finish = finish
        self.draining = False
        self._running: dict[int, _Running] = {}
        self._cut: list[int] = []  # keys of what was taken out of the engine, until it goes on

    def submitted(self, requests: Iterable[Request]) -> None:
        """Remember what runs; every request comes back by `whole`."""
        for request in requests:
            self._running[request.key] = _Running(request, [])

    def waits(self, engine: Engine) -> bool:
        """Whether the restart has to wait for running answers; none is to be started meanwhile (`draining`)."""
        self.draining = self.finish and engine.active > 0
        return self.draining

    def empty(self, engine: Engine) -> list[Finished]:
        """Stop the engine and take out what runs. Returns those that had ended all the same."""
        ended = []
        for one in engine.pause("abort"):
            if one.finish == ABORTED:
                self._cut.append(one.key)
                if len(one.token_ids):
                    self._running[one.key].pieces.append(one)
            else:
                ended.append(one)
        return ended

    def go_on(self, engine: Engine) -> None:
        """Let the engine work again, on what was cut."""
        engine.resume()
        cut, self._cut = self._cut, []
        engine.submit([self._running[key].rest() for key in cut])

    def whole(self, last: Finished) -> Finished:
        """The answer with the pieces that came before its last one."""
        running = self._running.pop(last.key, None)
        if running is None or not running.pieces:
            return last
        pieces = [*running.pieces, last]
        return replace(
            last,
            token_ids=np.concatenate([piece.token_ids for piece in pieces]),
            logprobs=np.concatenate([piece.logprobs for piece in pieces]),
            versions=np.concatenate([piece.versions for piece in pieces]),
            text=None,  # the engine knows that of the last piece at most
        )
