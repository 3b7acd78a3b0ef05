"""Starts the server of `endpoint.py` as a process, and talks to its back door."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

WAIT_S = 60


class Endpoint:
    """The server's process."""

    def __init__(
        self, folder: Path, token_s: float, port: int = 0, kinds: int = 30, tokenizer: Path | None = None
    ) -> None:
        """`tokenizer`: chats are rendered as that of this folder does it, not letter by letter."""
        self.port_file, self.token_s = folder / f"port{time.monotonic_ns()}", token_s
        command = [sys.executable, str(Path(__file__).with_name("endpoint.py")), str(self.port_file), str(token_s)]
        self.process = subprocess.Popen([*command, str(port)], env={
            **os.environ, "ENDPOINT_KINDS": str(kinds), "ENDPOINT_TOKENIZER": str(tokenizer or "")
        })
        deadline = time.monotonic() + WAIT_S
        while not self.port_file.exists():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        self.port = int(self.port_file.read_text())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def behave(self, *script: str) -> None:
        self._call("/test/behave", {"script": list(script)})

    def allow(self, tokens: int) -> None:
        """How many tokens it draws in all before it waits; so that a test meets answers under way."""
        self._call("/test/behave", {"allowed": tokens})

    @property
    def log(self) -> list[dict[str, Any]]:
        return list(self._call("/test/log", {})["log"])

    def calls(self, *paths: str) -> list[str]:
        return [entry["path"].partition("?")[0] for entry in self.log if entry["path"].partition("?")[0] in paths]

    @property
    def models(self) -> list[str]:
        """Names that requests may have."""
        return [str(entry["id"]) for entry in self._call("/v1/models", {})["data"]]

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=WAIT_S) as response:
            return dict(json.loads(response.read()))

    @property
    def drawn(self) -> int:
        return int(self._call("/test/log", {})["drawn"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
