"""The door among strangers: connections that say nothing, heads and bodies without an end, and bodies too large."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import aiohttp
import pytest
from agent_worlds import of

from busrl.agents.http import EpisodeServer
from busrl.agents.renderer import Renderer

WAIT_S, CONTEXT = 60.0, 80
DESCRIPTORS, STRANGERS = 256, 400
SERVER = f"""
import asyncio, logging, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
logging.basicConfig(level=logging.WARNING)
from busrl.agents.http import EpisodeServer
class Desk:
    async def claim(self, body):
        open("/dev/null").close()  # work of its own that takes a descriptor
        return [{{"episode": "7-1"}}]
async def serve():
    async with EpisodeServer({CONTEXT}, None, "override", desk=Desk(), key="the key") as door:
        print(door.base_url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(serve())
"""


class Server:
    """A door in a process with few descriptors."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.child = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                          stderr=log)
        assert self.child.stdout is not None
        self.port = int(self.child.stdout.readline().rpartition(b":")[2].split(b"/")[0])

    def stranger(self, says: bytes) -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        connected.sendall(says)
        return connected

    def client(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.child.communicate(timeout=WAIT_S)


def claim(client: http.client.HTTPConnection) -> int:
    client.request("POST", "/busrl/v1/episodes", b"{}", {"Authorization": "Bearer the key"})
    answer = client.getresponse()
    answer.read()
    return answer.status


WRONG = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: wrong\r\nContent-Length: 999999\r\n\r\n{"
SAYS = {"nothing": b"", "half of a head": b"POST /busrl/v1/episodes HTTP/1.1\r\nHo", "a body without an end": WRONG}


@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
def test_more_strangers_than_descriptors_shut_no_honest_client_out(server: Server, says: bytes) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * STRANGERS)), hard))
    with ExitStack() as stack:
        honest = stack.enter_context(closing(server.client()))
        assert claim(honest) == 200
        before = honest.sock
        for _ in range(STRANGERS):
            stack.enter_context(closing(server.stranger(says)))
        for _ in range(4):
            with closing(server.client()) as client:
                assert claim(client) == 200
        assert claim(honest) == 200 and honest.sock is before, "a client with a key keeps its connection"
    end = time.monotonic() + WAIT_S
    while not (log := server.log.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    server.child.communicate(timeout=WAIT_S)
    assert len(log) < 4000 and log.count(f"{DESCRIPTORS} descriptors allow") == 1, log[:4000]
    assert "silent connections were closed" in log and "from 127.0.0.1" in log


def test_a_strangers_connection_ends_with_its_answer_and_a_clients_does_not(server: Server) -> None:
    with closing(server.client()) as stranger, closing(server.client()) as client:
        stranger.request("GET", "/v1/models")
        answer = stranger.getresponse()
        assert answer.status == 200 and answer.getheader("Connection") == "close"
        client.request("GET", "/v1/models", headers={"x-api-key": "the key"})
        assert client.getresponse().getheader("Connection") != "close"


@pytest.mark.parametrize("says", list(SAYS.values())[:2], ids=list(SAYS)[:2])
def test_a_head_that_does_not_come_ends_its_connection(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrl.system.listener.HEAD_S", 0.2)

    async def run() -> None:
        warnings: list[str] = []
        renderer: Any = None
        async with EpisodeServer(CONTEXT, renderer, "override", tell=warnings.append) as door:
            reader, writer = await asyncio.open_connection("127.0.0.1", _port(door))
            writer.write(says)
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()
            while not warnings:
                await asyncio.sleep(0.01)
        assert "1 silent connections were closed (1 from 127.0.0.1)" in warnings[0]

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


# -- bodies -----


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return worlds.renderer(tmp_path_factory.mktemp("chat"), "qwen2_5")


def _port(door: EpisodeServer) -> int:
    return int(door.base_url.rpartition(":")[2].removesuffix("/v1"))


def with_door(chat: Renderer, work: Callable[..., Any]) -> None:
    """`work` gets the address of a door with a small context, and two episodes' sessions."""

    async def run() -> None:
        first, second = (of(chat, ["Word."], limits={"context": CONTEXT}, max_new_tokens=20)[0] for _ in range(2))
        async with EpisodeServer(CONTEXT, chat, "override") as door:
            door.open(first)
            door.open(second)
            heads = [{"x-api-key": episode.openai["api_key"]} for episode in (first, second)]
            async with (aiohttp.ClientSession(headers=heads[0]) as one_client,
                        aiohttp.ClientSession(headers=heads[1]) as another):
                await work(door.base_url, one_client, another)

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


HELLO = {"messages": [{"role": "user", "content": "Hello?"}]}


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_what_the_context_allows_is_refused_with_the_bound(chat: Renderer, chunked: bool) -> None:
    async def work(url: str, first: aiohttp.ClientSession, second: aiohttp.ClientSession) -> None:
        body = json.dumps({**HELLO, "tools": [{"a": "x" * (1 << 20)}] * 2}).encode()

        async def pieces() -> Any:
            for place in range(0, len(body), 1 << 16):
                yield body[place : place + (1 << 16)]

        async with first.post(f"{url}/chat/completions", data=pieces() if chunked else body) as answer:
            message = (await answer.json())["error"]["message"]
            assert answer.status == 413 and "80 tokens" in message and "1,053,696 bytes" in message

    with_door(chat, work)


def test_tools_that_cannot_fit_are_refused_before_they_are_rendered(
    chat: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Renderer, "prompt", lambda *parts: pytest.fail("they were rendered"))
    more = {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 500_000}}]}
    arguments = {"chat_template_kwargs": {"about": "x" * 500_000}}

    async def work(url: str, first: aiohttp.ClientSession, second: aiohttp.ClientSession) -> None:
        for body in ({**HELLO, **more}, {**HELLO, **arguments}):
            async with first.post(f"{url}/chat/completions", json=body) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["code"] == "context_length_exceeded"
        async with first.post(url.replace("/v1", "/tokenize"), json={**HELLO, **more}) as answer:
            assert (await answer.json())["error"]["code"] == "context_length_exceeded"

    with_door(chat, work)


LONG = "word " * 6000


@pytest.mark.parametrize("path", ["chat/completions", "completions", "tokenize"])
def test_a_long_body_is_worked_on_while_others_are_answered(
    chat: Renderer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The long one does not go on before the other client has its answer."""
    answered, begun = threading.Event(), threading.Event()
    encoded = chat.tokenizer.encode
    monkeypatch.setattr("busrl.agents.episode.ID_BYTES", 1 << 20)

    def encode(self: Any, text: str, *more: Any) -> list[int]:
        if "word word" in text:
            begun.set()
            assert answered.wait(20), "nobody else was answered meanwhile"
        return encoded(text)

    monkeypatch.setattr(type(chat.tokenizer), "encode", encode)
    monkeypatch.setattr(type(chat.tokenizer), "ids", encode)

    async def work(url: str, first: aiohttp.ClientSession, second: aiohttp.ClientSession) -> None:
        body = {"prompt": LONG} if path != "chat/completions" else {"messages": [{"role": "user", "content": LONG}]}
        long = asyncio.ensure_future(first.post(url.replace("/v1", "") + "/tokenize" if path == "tokenize"
                                              else f"{url}/{path}", json=body))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        async with second.post(f"{url}/chat/completions", json=HELLO) as answer:
            assert answer.status == 200
        answered.set()
        async with await long as answer:
            assert answer.status == (200 if path == "tokenize" else 400)

    with_door(chat, work)


def test_text_becomes_ids_while_other_threads_run(chat: Renderer) -> None:
    turns, work = 0, threading.Thread(target=chat.encode, args=("some words of a text " * 50_000,))
    work.start()
    while work.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20
