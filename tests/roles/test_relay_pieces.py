"""A version of weights on its way to another host: every wait for its pieces has an end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from busrl.errors import PeerLost
from busrl.protocol import hosts as h
from busrl.roles.relay import fetch_pieces

VERSION = bytes(range(250))
SIZE = 100


class Link:
    """Answers what is asked, as `pieces` says of each place: "" whole, "lost", or "overtaken". A state comes with each
    look at what is there, so that something is always heard."""

    def __init__(self, pieces: dict[int, str], chatty: bool) -> None:
        self.pieces, self.chatty, self.asked = pieces, chatty, list[tuple[int, h.WeightsPiece]]()
        self.number = 0

    def post(self, question: h.WeightsPiece) -> int:
        self.number += 1
        self.asked.append((self.number, question))
        return self.number

    def receive(self, timeout_s: float) -> Any:
        while self.asked:
            number, one = self.asked.pop(0)
            how = self.pieces.get(one.at, "")
            if how == "overtaken":
                return h.Refused(number=number, text=how), memoryview(b"")
            if not how:
                data = memoryview(VERSION)[one.at : one.at + one.size]
                return h.Piece(number=number, version=one.version, at=one.at), data
        time.sleep(min(0.01, timeout_s))
        return (h.State(), memoryview(b"")) if self.chatty else None


class Copy:
    def __init__(self) -> None:
        self.data = bytearray(len(VERSION))

    def write(self, at: int, data: memoryview) -> None:
        self.data[at : at + len(data)] = data


def fetched(link: Any, copy: Any) -> bool:
    return fetch_pieces(link, copy, 7, len(VERSION), SIZE, 0.2, lambda reply: None)


@pytest.mark.parametrize("chatty", [False, True])
def test_all_pieces_come_and_none_twice(chatty: bool) -> None:
    link, copy = Link({}, chatty), Copy()
    assert fetched(link, copy) and copy.data == VERSION and link.number == 3


@pytest.mark.parametrize("chatty", [False, True])
def test_a_piece_that_is_lost_ends_the_wait_whatever_else_is_heard(chatty: bool) -> None:
    with pytest.raises(PeerLost, match=r"no piece of it for 0\.2 s"):
        fetched(Link({100: "lost"}, chatty), Copy())


def test_a_version_that_is_overtaken_is_given_up() -> None:
    assert not fetched(Link({200: "overtaken"}, chatty=True), Copy())
