"""A version of weights on its way to a host: from whoever gives its pieces, and no wait without an end."""

from __future__ import annotations

from typing import Any

import numpy as np

from busrl._blocks import digest
from busrl.hosts import questions as q
from busrl.hosts.relay import Fetch
from busrl.hosts.versions import SILENT_S, Pieces, Sources

VERSION = bytes(range(250)) * 20
SIZE, HOME_S = 100, 10.0
STARTS = range(0, len(VERSION), SIZE)
DIGESTS = np.array([digest(VERSION[at : at + SIZE], at) for at in STARTS], "<u8").tobytes()


class Link:
    """Answers what is asked until it has given `gives` pieces; then it is silent, refuses or gives wrong bytes."""

    def __init__(self, gives: int, then: str = "silent") -> None:
        self.gives, self.then, self.asked = gives, then, list[tuple[int, q.WeightsPiece]]()
        self.number, self.given, self._first = 0, set[int](), gives

    def post(self, question: q.WeightsPiece) -> int:
        self.number += 1
        self.asked.append((self.number, question))
        return self.number

    def here(self) -> Any:
        asked, self.asked = self.asked, []
        if self.gives == self._first:
            yield q.Declined(number=self.number + 1000, text="for an earlier question"), memoryview(b"")
        for number, question in asked:
            if self.gives > 0:
                self.gives -= 1
                self.given.add(question.at)
                data = memoryview(VERSION)[question.at : question.at + question.size]
                yield q.Piece(number=number, version=question.version, at=question.at), data
            elif self.then == "refused":
                yield q.Declined(number=number, text="overtaken"), memoryview(b"")
            elif self.then == "wrong":
                yield q.Piece(number=number, version=question.version, at=question.at), memoryview(bytes(question.size))


class Links:
    def __init__(self, **links: Link) -> None:
        self.all = links

    def avoid(self, peer: q.Peer, now: float) -> None:
        raise AssertionError("it answered")

    def to(self, peer: q.Peer | None) -> Link:
        return self.all[peer.name if peer else "home"]


class Copy:
    def __init__(self) -> None:
        self.data, self.written = bytearray(len(VERSION)), list[int]()

    def write(self, at: int, data: memoryview) -> None:
        self.data[at : at + len(data)] = data
        self.written.append(at)


def fetch_over(links: Links, above: list[str], limit_s: float = 60.0) -> tuple[Copy, float, list[str], Fetch]:
    """Fetch the version in steps of 0.1 s: what was written, in which time, and what was said."""
    fetch = Fetch(links, Pieces(len(VERSION), SIZE, DIGESTS), 0.0)  # type: ignore[arg-type]
    head = q.Version(version=7, nbytes=len(VERSION), piece=SIZE, above=above,
                     peers=[q.Peer(name, "key", "tcp://there") for name in links.all if name != "home"])
    fetch.begin(head, Sources(above, 1.0, HOME_S, 0.0))
    copy, now, said = Copy(), 0.0, list[str]()
    while fetch.pieces.left and fetch.sources is not None and now < limit_s:
        said.append(fetch.advance(copy, now))  # type: ignore[arg-type]
        now += 0.1
    return copy, now, [text for text in said if text], fetch


def test_all_pieces_come_and_none_twice() -> None:
    copy, _, said, _ = fetch_over(links := Links(home=Link(1000)), [])
    assert copy.data == VERSION and not said and links.all["home"].number == len(STARTS)


def test_a_host_that_stops_giving_is_left_for_the_next() -> None:
    for then in ("silent", "refused", "wrong"):
        links = Links(home=Link(1000), a=Link(12, then), b=Link(17, then))
        copy, took, said, _ = fetch_over(links, ["a", "b"])
        assert copy.data == VERSION and len(copy.written) == len(set(copy.written)) == len(STARTS)
        first, second, home = (links.all[name].given for name in ("a", "b", "home"))
        assert (len(first), len(second), len(home)) == (12, 17, len(STARTS) - 29)
        assert len(first | second | home) == len(STARTS)
        assert len(said) == 2 and said[0].startswith({"silent": "nothing heard of a"}.get(then, "a: "))
        assert took < 2 * SILENT_S + 2


def test_without_a_giver_what_came_stays_for_home() -> None:
    links = Links(home=Link(20))
    copy, took, said, fetch = fetch_over(links, [])
    assert fetch.sources is None and HOME_S <= took < HOME_S + 1 and said == ["nothing heard of home for 10 s"]
    links.all["home"].gives = 1000
    fetch.begin(fetch.head, Sources([], 1.0, HOME_S, took))
    while fetch.pieces.left:
        assert not fetch.advance(copy, took)  # type: ignore[arg-type]
    assert copy.data == VERSION and len(copy.written) == len(STARTS)
