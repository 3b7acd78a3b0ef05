"""The desk of a service beside the disk: how many looks at it requests cost that come together."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as some

from busrl.service.desk import Completed, Desk, Spans
from busrl.service.folders import ServiceFolders
from busrl.service.requests import Answer, LogWriter, Request

CLIENTS = 40
ADAPTER = {"rank": 4, "seed": 0, "attn": True, "mlp": True, "unembed": False}


def test_requests_that_come_together_share_two_looks_at_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, sync = [], LogWriter.sync

    def counted(log: LogWriter) -> None:
        looks.append(log)
        sync(log)

    monkeypatch.setattr(LogWriter, "sync", counted)
    desk = Desk(ServiceFolders(tmp_path), sync=True)

    async def logged(number: int) -> None:
        for _ in range(number % 3):  # some come while a look is under way
            await asyncio.sleep(0)
        desk.log(Request("session", f"{number}", about={"key": f"{number}", "owner": "run", "name": ""}))
        await desk.durable()

    async def all_logged() -> None:
        await asyncio.gather(*map(logged, range(CLIENTS)))

    asyncio.run(all_logged())
    desk.close()
    assert 1 <= len(looks) <= 3, f"{CLIENTS} requests cost {len(looks)} looks"
    assert len(Desk(ServiceFolders(tmp_path), sync=True).registry.sessions) == CLIENTS


@given(some.lists(some.tuples(some.sampled_from(["training", "refused"]), some.integers(0, 3000)), max_size=12),
       some.data())
def test_what_waits_is_counted_until_it_is_answered(asked: list[tuple[str, int]], data: some.DataObject) -> None:
    with TemporaryDirectory() as root:
        where = ServiceFolders(Path(root))
        desk, answers = Desk(where, sync=False), LogWriter(where.answers)
        desk.log(Request("session", "s", about={"key": "k"}))
        desk.log(Request("model", "m", about={"session": "s", "adapter": ADAPTER, "first": 1}))
        for seq, (kind, size) in enumerate(asked, 1):
            body, about = (b"x" * size, {}) if kind == "training" else (b"", {"why": "x" * size})
            desk.log(Request(kind, "m", seq, "forward_backward", b"d", body, about))
        open_ones = dict(enumerate(asked, 1))
        for seq in data.draw(some.permutations(list(open_ones))):
            answers.write(Answer("m", seq, b"d", "done"))
            desk.follow()
            del open_ones[seq]
            assert desk.waiting["m"] == len(open_ones)
            assert desk.waiting_bytes["m"] >= sum(size for _, size in open_ones.values())
        assert desk.waiting_bytes["m"] == 0
        for log in (desk, answers):
            log.close()


def test_clones_that_somebody_asks_about_take_no_memory(tmp_path: Path) -> None:
    desk = Desk(ServiceFolders(tmp_path), sync=False)
    desk.log(Request("session", "s", about={"key": "k"}))
    desk.log(Request("sampler", "s:sample:0", about={"owner": "run"}))

    async def asked() -> None:
        for clone in range(100):
            assert await desk.completions("s:sample:0", clone, 7, 0.0) == ([], 7)

    before = lists_of_completions()
    asyncio.run(asked())
    assert lists_of_completions() == before
    desk.close()


def lists_of_completions() -> int:
    return sum(isinstance(thing, Completed) for thing in gc.get_objects())


@given(some.lists(some.integers(0, 30), unique=True), some.integers(0, 30))
def test_spans_hold_the_numbers_that_they_were_given(numbers: list[int], other: int) -> None:
    spans = Spans()
    for number in numbers:
        spans.add(number)
    assert [number for number in range(-1, 32) if number in spans] == sorted(numbers)
    assert len(spans) == sum(number - 1 not in numbers for number in numbers)
    assert (other in spans) == (other in numbers)


@given(some.integers(0, 8), some.sets(some.integers(0, 7)), some.integers(0, 9))
def test_places_in_a_list_of_completions_stay_valid(count: int, forgotten: set[int], cursor: int) -> None:
    completed, names = Completed(), [("s", number) for number in range(count)]
    for name in names:
        completed.add(name)
    completed.drop_while(lambda name: name[1] in forgotten)
    assert completed.end == count
    assert completed.since(cursor) == [name for name in names[cursor:] if {*range(name[1] + 1)} - forgotten]
