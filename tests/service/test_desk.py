"""The desk of a service beside the disk: how many looks at it requests cost that come together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from busrl.service.desk import Desk
from busrl.service.folders import ServiceFolders
from busrl.service.requests import LogWriter, Request

CLIENTS = 40


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
