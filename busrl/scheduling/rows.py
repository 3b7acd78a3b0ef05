"""How many sequences all workers can run at once, as far as they said.

Talks to nothing: announcements and clock values come in. Knows nothing of slots or messages.

- Before anybody announced anything it is what the topology says; a worker that fell silent counts no more.
- Not more than `most` are remembered: a name comes from outside, and a run has no more processes.
- Workers that announce nothing (they do not listen on the bus) are known only by what they run.
"""

from __future__ import annotations


class Rows:
    """`expected`: rows of the workers that the topology starts; `forget_s`: after this silence a worker is gone."""

    def __init__(self, expected: int, forget_s: float, most: int = 1024) -> None:
        self.expected, self.forget_s, self.most = expected, forget_s, most
        self._said: dict[str, tuple[int, float]] = {}

    def announce(self, worker: str, rows: int, now: float) -> bool:
        """A worker can run `rows` sequences, 0 if it did not say; False if there are too many workers already."""
        if worker not in self._said and len(self._said) >= self.most and len(self.workers(now)) >= self.most:
            return False
        self._said[worker] = rows, now
        return True

    def workers(self, now: float) -> list[str]:
        """Who announced lately."""
        self._said = {name: said for name, said in self._said.items() if now - said[1] < self.forget_s}
        return list(self._said)

    def total(self, generating: int) -> int:
        """Rows of all workers; at least those in use."""
        known = sum(rows for rows, _ in self._said.values())
        return max(generating, known or self.expected)
