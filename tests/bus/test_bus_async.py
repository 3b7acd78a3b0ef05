"""The asyncio face does what the blocking face does, on asyncio's loop and on uvloop's."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from busrl.bus.aio import AsyncEndpoint
from busrl.errors import BusNotReady
from busrl.protocol import messages as m
from busrl.protocol import topic

PATIENCE_S = 30.0
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=list(LOOPS))
def run(request):
    loop = LOOPS[request.param]()
    yield loop.run_until_complete
    loop.close()


def test_two_endpoints_of_one_loop_talk_through_the_broker(broker, run):
    async def talk() -> list[float]:
        options = {"frontend": broker.frontend, "backend": broker.backend}
        async with (
            AsyncEndpoint("a", subscribe=[topic(m.SchedulerState)], **options) as listener,
            AsyncEndpoint("b", **options) as sender,
        ):
            await listener.ready(PATIENCE_S)
            await sender.ready(PATIENCE_S)
            for value in range(200):
                await sender.send(m.SchedulerState(values={"x": value}))
            got = []
            while len(got) < 200:
                first = await listener.recv(PATIENCE_S)
                got += [one.values["x"] for one in [first, *listener.drain()]]
            return got

    assert run(talk()) == list(range(200))


def test_a_wait_without_a_message_ends_with_none_and_lets_other_tasks_run(broker, run):
    async def wait() -> tuple[object, int]:
        async with AsyncEndpoint("a", broker.frontend, broker.backend) as listener:
            await listener.ready(PATIENCE_S)
            turns = 0

            async def turn() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            other = asyncio.ensure_future(turn())
            got = await listener.recv(0.05)
            other.cancel()
            return got, turns

    got, turns = run(wait())
    assert got is None and turns > 1


def test_waiting_for_a_missing_broker_ends_with_an_error(short_dir, run):
    async def wait() -> None:
        async with AsyncEndpoint("a", f"ipc://{short_dir}/a", f"ipc://{short_dir}/b") as alone:
            await alone.ready(0.1)

    with pytest.raises(BusNotReady, match="'a'"):
        run(wait())
