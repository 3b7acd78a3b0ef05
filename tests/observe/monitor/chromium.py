"""A real Chromium without a screen, driven over its DevTools: a page of a size and a theme, keys, its console."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE_S = 60.0
KEYS = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}


class Page:
    """One page. `console`: every warning, error and exception so far."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.console: list[str] = []
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            answer = message.json()
            if "id" in answer:
                self._waiting.pop(answer["id"]).set_result(answer)
            elif answer["method"] == "Runtime.consoleAPICalled" and answer["params"]["type"] in ("warning", "error"):
                self.console.append(str(answer["params"]["args"]))
            elif answer["method"] == "Runtime.exceptionThrown":
                self.console.append(str(answer["params"]["exceptionDetails"]))
            elif answer["method"] == "Log.entryAdded" and answer["params"]["entry"]["level"] in ("warning", "error"):
                self.console.append(str(answer["params"]["entry"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._waiting[number], PATIENCE_S)
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def look(self, width: int, height: int, theme: str) -> None:
        """How the page is looked at."""
        mobile = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    async def open(self, url: str) -> None:
        for domain in ("Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The value of an expression once it is true."""
        end = asyncio.get_running_loop().time() + PATIENCE_S
        while not (value := await self.value(expression)):
            assert asyncio.get_running_loop().time() < end, f"{expression} within {PATIENCE_S:g} s; {self.console}"
            await asyncio.sleep(0.02)
        return value

    async def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        code = KEYS.get(key, ord(key[0].upper()))
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def picture(self, file: Path, **options: Any) -> None:
        answer = await self.call("Page.captureScreenshot", **options)
        file.write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    """A browser with one empty page, its profile in a folder that goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="brc"))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={folder}"]
    browser = subprocess.Popen(
        [str(PROGRAM), *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)}, start_new_session=True,
    )
    try:
        port = await _port(folder / "DevToolsActivePort", browser)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [target for target in await answer.json() if target["type"] == "page"]
            [address] = [page["webSocketDebuggerUrl"] for page in pages]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(browser.pid, 9)
        browser.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _port(file: Path, browser: subprocess.Popen[bytes]) -> int:
    end = asyncio.get_running_loop().time() + PATIENCE_S
    while not (file.is_file() and file.read_text().strip()):
        assert browser.poll() is None and asyncio.get_running_loop().time() < end, "Chromium did not start"
        await asyncio.sleep(0.05)
    return int(file.read_text().split()[0])
