"""A ring with a rollout's intake whose answers have routes that a test can compute again, and the learner's look."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.data.routing import Routed, Routing
from busrl.engines.base import Finished, Request
from busrl.preflight.load import load
from busrl.ring import Ring, State
from busrl.roles.intake import SampleIntake
from busrl.roles.learner.groups import Claimed, Malformed, claim_groups
from busrl.states import Finish
from busrl.topology.schema import Segments, Topology

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Routing((0, 2), 8, 3)
LIMIT = 12
Routes = npt.NDArray[np.uint8]


def routes_at(uid: int, begin: int, end: int) -> Routes:
    """The routes of the positions from `begin` to `end` of a sample: distinct experts that hang on all three."""
    first = np.arange(begin, end)[:, None, None] * 3 + np.arange(2)[None, :, None] * 5 + uid
    return ((first + np.arange(3)) % 8).astype(np.uint8)


def topology(of: str = "all", **segments: Any) -> Topology:
    base = load(ROOT / "configs" / "quickstart.toml")
    return dataclasses.replace(
        base, generation=dataclasses.replace(base.generation, max_new_tokens=LIMIT),
        learner=dataclasses.replace(base.learner, routes_of=of), segments=Segments(**segments),
        derived=dataclasses.replace(base.derived, routing=SHAPE),
    )


class LetterText:
    """What an intake asks of its engine: ids are letters, 0 ends."""

    max_length = 256

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    def decode(self, ids: npt.NDArray[np.int32], ended: bool = True) -> str:
        return "".join(map(chr, ids))


class RoutedWorker:
    """The rollout's side of a ring; `answer` is what an engine would give."""

    def __init__(self, ring: Ring, settings: Topology) -> None:
        self.ring, self.warned = ring, list[str]()
        self.intake = SampleIntake(ring, settings, "rollout/0", LetterText(), self._warn)  # type: ignore[arg-type]

    def _warn(self, where: str, text: str, **_: Any) -> None:
        self.warned.append(text)

    def take(self, room: int = 8) -> list[Request]:
        return self.intake.take(room, lambda: False)

    def run(self, whole: dict[int, str], lies: dict[str, Any] | None = None) -> list[Request]:
        """Answer every request with its part of `whole[uid]` until nothing is left; the requests."""
        seen = []
        while requests := self.take():
            for request in requests:
                seen.append(request)
                self.intake.commit(dataclasses.replace(answer(request, whole[request.uid]), **(lies or {})))
        return seen


def answer(request: Request, whole: str) -> Finished:
    """The tokens of `whole` that a request asks for, with the routes that go with them."""
    known, done = len(request.prompt_ids) + len(request.prefix_ids), len(request.prefix_ids)
    text = whole[done : done + request.max_new_tokens]
    ids = np.array([ord(letter) for letter in text], np.int32)
    finish = Finish.EOS if done + len(text) == len(whole) else Finish.LENGTH
    return Finished(
        request.key, ids, np.full(len(ids), -1, np.float32), np.zeros(len(ids), np.uint32), finish,
        routes=routes_at(request.uid, known - 1, known - 1 + len(ids)),
        prompt_routes=routes_at(request.uid, request.routes_from, known - 1),
    )


def dispatch(ring: Ring, uids: list[int], cls: int = 0, prompt: str = "abcde") -> None:
    for member, uid in enumerate(uids):
        sent = ring.dispatch(
            uid=uid, group=0, admission=0, member=member, group_size=len(uids), cls=cls,
            task=f'{{"prompt": "{prompt}"}}'.encode(), prompt_crc=1, max_new_tokens=LIMIT, temperature=1.0, version=0,
            step=0,
        )
        assert sent


def claimed(ring: Ring, settings: Topology) -> Claimed | Malformed:
    """Reward all answers, and claim them as one group."""
    for slot, word in ring.take(State.GENERATED, State.REWARDING, cls=None, limit=8):
        ring.set(slot, word, reward=float(slot))
        ring.release(slot, word, State.REWARDED)
    lines = ring.lines()
    slots = sorted((lines["state"] == State.REWARDED).nonzero()[0].tolist(), key=lambda at: int(lines["uid"][at]))
    groups = claim_groups(ring, lines, [slots], lambda records: None, Routed.of(settings))
    assert groups is not None
    return groups[0] if isinstance(groups, list) else groups
