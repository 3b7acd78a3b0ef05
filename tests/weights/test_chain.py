"""Who fetches a version of weights from whom: nobody waits for itself, and whoever gives nothing is left in time."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl._blocks import digest
from busrl.errors import WeightsRefused
from busrl.hosts.versions import HOME, SILENT_S, WATCH_S, Chain, Pieces, Sources

HOME_S = 10.0
names = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1)


# -- pieces -----


def pieces_of(data: bytes, size: int) -> Pieces:
    digests = [digest(data[at : at + size], at) for at in range(0, len(data), size)]
    return Pieces(len(data), size, np.array(digests, "<u8").tobytes())


@given(st.integers(0, 400), st.integers(1, 60), st.integers(1, 8), st.integers(0, 1 << 30))
def test_every_piece_comes_once_and_only_pieces_in_flight_are_requested_again(
    nbytes: int, size: int, ahead: int, seed: int
) -> None:
    chance, data = random.Random(seed), random.Random(seed).randbytes(nbytes)
    pieces, copy, flying, again = pieces_of(data, size), bytearray(nbytes), list[tuple[int, int]](), set[int]()
    numbers = set[int]()
    while pieces.left:
        while len(flying) < ahead and (place := pieces.want()) is not None:
            assert place[0] not in numbers or place[0] in again
            again.discard(place[0])
            numbers.add(place[0])
            flying.append(place)
        assert pieces.open == len(flying)
        if chance.random() < 0.2:
            again.update(at for at, _ in flying)
            flying.clear()
            pieces.again()
            continue
        at, length = flying.pop(chance.randrange(len(flying)))
        assert not pieces.has(at, length)
        assert pieces.came(at, memoryview(data[at : at + length]))
        assert pieces.has(at, length) and not pieces.came(at, memoryview(data[at : at + length]))
        copy[at : at + length] = data[at : at + length]
    assert bytes(copy) == data and pieces.want() is None


def test_a_piece_of_another_version_or_place_is_refused() -> None:
    data, other = bytes(range(250)), bytes(range(1, 251))
    pieces = pieces_of(data, 100)
    for at, piece in ((0, other[:100]), (100, data[:100]), (0, data[:99]), (50, data[50:150]), (300, data[:50])):
        with pytest.raises(WeightsRefused):
            pieces.came(at, memoryview(piece))
    assert pieces.left == 3
    with pytest.raises(WeightsRefused, match="with 2 digests"):
        Pieces(250, 100, bytes(16))


# -- from whom on this host -----


@given(names, st.data())
def test_silent_hosts_are_left_in_turn_for_good_with_home_last(
    above: list[str], data: st.DataObject
) -> None:
    sources, now, seen = Sources(above, data.draw(st.sampled_from([0.0, 1e6])), HOME_S, 0.0), 0.0, list[str]()
    while not sources.over:
        seen.append(sources.current)
        silent_from = now
        while sources.current == seen[-1] and not sources.over:
            now += data.draw(st.floats(0.1, 0.5))
            sources.look(now)
        assert now - silent_from < (HOME_S if seen[-1] == HOME else SILENT_S) + 0.5 + 1e-6
    assert seen == [*above, HOME]


@given(names, st.dictionaries(st.sampled_from(["", *"abcdefgh"]), st.floats(0.0, 1e5)), st.sampled_from([0.0, 3e4]))
def test_a_host_that_gives_little_is_left_until_the_best_is_found(
    above: list[str], rates: dict[str, float], usual: float
) -> None:
    """Every source gives pieces at a rate of its own, in bytes per second."""
    sources, turns, steps = Sources(above, usual, HOME_S, 0.0), [above[0]], int((len(above) + 3) * 2 * WATCH_S / 0.25)
    for step in range(1, steps):
        now = 0.25 * step
        sources.received(now, round(rates.get(sources.current, 0.0) * 0.25))
        sources.look(now)
        if sources.current != turns[-1]:
            turns.append(sources.current)
    assert len(turns) <= len(above) + 2, "each is tried once, then one is kept"
    if usual and rates.get(above[0], 0.0) > usual / 2 + 10:
        assert turns == above[:1]
    best = max(rates.get(source, 0.0) for source in [*above, HOME])
    assert rates.get(sources.current, 0.0) >= min(best, usual / 2 if usual else best) - 10


def test_a_host_that_knows_itself_to_be_slow_stays_where_it_is() -> None:
    sources = Sources(["fast"], usual=2.5e6, home_s=HOME_S, now=0.0)
    for step in range(1, 400):
        sources.received(0.1 * step, 200_000)
        assert sources.look(0.1 * step) == ""
    assert sources.usual(40.0) == pytest.approx(2e6, rel=0.05)


# -- from whom, as home says -----


EVENTS = st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.floats(0.0, 30.0), st.booleans())


@given(st.lists(EVENTS, max_size=60))
def test_no_host_waits_for_itself_over_others(
    events: list[tuple[str, int, float, bool]]
) -> None:
    """Events: a host looks with what it has, or asks for the newest version; sometimes a new one is there."""
    chain, now, version = Chain(HOME_S), 0.0, 1
    above = dict[int, dict[str, list[str]]]()
    have = dict[str, int]()
    for name, newer, seconds, complete in events:
        now += seconds / 10
        version += newer == 3
        if complete and above.get(version, {}).get(name) is not None:
            have[name] = version
        chain.looked(name, have.get(name, -1), now)
        if have.get(name, -1) < version:
            above.setdefault(version, {})[name] = sources = chain.asks(name, f"tcp://{name}:1", version, 1000, now)
            assert name not in sources and len(set(sources)) == len(sources) <= 2
    for edges in above.values():
        left = {engine: set(others) for engine, others in edges.items()}
        while left:
            free = [engine for engine, others in left.items() if not others & set(left)]
            assert free, f"these wait for each other: {left}"
            for engine in free:
                del left[engine]


def fetched(chain: Chain, version: int, begun: float, seconds: dict[str, float]) -> dict[str, list[str]]:
    """All hosts ask at once and have the version after so many seconds."""
    above = {name: chain.asks(name, f"tcp://{name}:1", version, 1_000_000, begun) for name in seconds}
    for name, took in sorted(seconds.items(), key=lambda entry: entry[1]):
        chain.looked(name, version, begun + took)
    return above


def test_hosts_fetch_from_their_predecessor_and_slow_ones_come_last_later() -> None:
    chain = Chain(HOME_S)
    assert fetched(chain, 1, 0.0, {"a": 9.0, "b": 1.0, "c": 1.1, "d": 1.2}) == {
        "a": [], "b": ["a"], "c": ["b", "a"], "d": ["c", "b"]
    }
    assert fetched(chain, 2, 10.0, {"a": 9.0, "b": 1.3, "c": 1.2, "d": 1.0}) == {
        "b": [], "c": ["b"], "d": ["c", "b"], "a": ["d", "c"]
    }
    # Small differences change no order.
    assert fetched(chain, 3, 20.0, {"d": 1.0, "c": 1.0, "b": 1.0})["b"] == []


def test_a_host_that_is_busy_or_gone_or_unreachable_is_no_source() -> None:
    chain = Chain(HOME_S)
    fetched(chain, 1, 0.0, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert chain.asks("a", "tcp://a:1", 2, 1000, 2.0) == []
    chain.looked("b", 1, 2.0)
    assert chain.asks("c", "tcp://c:1", 2, 1000, 2.0) == ["b", "a"], "b gets it next"
    assert chain.fetched("c", 2.0) == {2} and chain.fetched("a", 2.0) == {2}
    for name in "bc":
        chain.looked(name, 1, 13.0)
    assert chain.asks("c", "tcp://c:1", 2, 1000, 13.0) == ["b"], "a was not heard of for long"
    chain.looked("c", 2, 14.0)
    chain.looked("a", 1, 14.0)
    assert chain.asks("b", "", 3, 1000, 14.0) == ["c"], "a fetches version 2"
    assert chain.asks("d", "tcp://d:1", 3, 1000, 14.0) == ["c"], "b listens nowhere"
    assert chain.fetched("b", 14.0) == {2, 3}
