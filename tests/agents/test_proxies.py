"""A proxy in the environment: episodes, judges and endpoints at a real one that counts who asks it for what."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import agent_worlds as worlds
import pytest
from agent_worlds import of

from busrl.agents.child import EpisodeSetup
from busrl.agents.episode import Episode
from busrl.agents.http import EpisodeServer
from busrl.agents.pool import Children, Played, Programs
from busrl.engines.openai.client import Client
from busrl.launcher.children import environment_of
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.rewards.base import Setup
from busrl.rewards.judge import Judge, JudgeFailed
from busrl.system import proxies
from busrl.topology.schema import Openai

AGENTS = Path(__file__).resolve().parents[2] / "configs" / "agents.toml"
VERDICT = json.dumps({"choices": [{"message": {"content": "VERDICT: yes"}}]}).encode()


class Proxy(ThreadingHTTPServer):
    """Answers what it is asked for with `body`, or refuses it. `asked`: the addresses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.addresses: list[str] = []
        self.body = b""


class Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        self.server.addresses.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200 if self.server.body else 403)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    do_GET = do_CONNECT = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The environment's proxy for everything, in both spellings."""
    server = Proxy()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://user:secret@127.0.0.1:{server.server_port}")
    for name in proxies.NAMES:
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


# -- episodes -----

HEAD = '''
import json, os
url, key = os.environ["OPENAI_BASE_URL"] + "/completions", os.environ["OPENAI_API_KEY"]
body, head = {"prompt": "One.", "max_tokens": 5}, {"Authorization": "Bearer " + key}
'''
ASKS = {
    "urllib": '''
import urllib.request
asked = urllib.request.Request(url, json.dumps(body).encode(), {**head, "Content-Type": "application/json"})
urllib.request.urlopen(asked).read()
''',
    "requests": 'import requests\nrequests.post(url, json=body, headers=head).raise_for_status()',
    "httpx": 'import httpx\nhttpx.post(url, json=body, headers=head).raise_for_status()',
    "openai": 'import openai\nopenai.OpenAI(max_retries=0).completions.create(model="policy", **body)',
}
SET = {"nothing": {}, "upper": {"NO_PROXY": "intern.example"}, "lower": {"no_proxy": "intern.example, .local"}}
Play = Callable[[Any], Played]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Play one episode at a door."""
    chat = worlds.renderer(tmp_path / "model", "qwen2_5")

    def played(player: Any) -> Played:
        async def main() -> Played:
            async with EpisodeServer(4096, chat, "override") as door:
                def begin() -> Episode:
                    episode = of(chat)[0]
                    door.open(episode)
                    return episode

                if hasattr(player, "start"):
                    await player.start()
                try:
                    return await player.play(begin, b'{"prompt": "One."}')  # type: ignore[no-any-return]
                finally:
                    await player.close()

        return asyncio.run(main())

    return played


def program(folder: Path, code: str) -> Programs:
    (folder / "program.py").write_text(code)
    return Programs([sys.executable, "{here}/program.py"], str(folder), folder, 60.0)


@pytest.mark.parametrize("variables", SET.values(), ids=SET)
@pytest.mark.parametrize("code", ASKS.values(), ids=ASKS)
def test_a_program_reaches_its_episode_past_any_proxy(
    play: Play, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, variables: dict[str, str]
) -> None:
    if "import requests" in code:
        pytest.importorskip("requests")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = play(program(tmp_path, f'{HEAD}{code}\nprint(json.dumps({{"reward": 1.0}}))'))
    assert result.ended.how == "returned" and len(result.episode.tree.turns) == 1, result.ended.text
    assert proxy.addresses == []


def test_a_function_reaches_its_episode_past_any_proxy(play: Play, proxy: Proxy, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('''
import urllib.request

def episode(task, llm):
    given = llm.openai
    asked = urllib.request.Request(given["base_url"] + "/models", headers={"x-api-key": given["api_key"]})
    urllib.request.urlopen(asked).read()
    llm.complete("One.")
    return 1.0
''')
    result = play(Children(EpisodeSetup("mine.py:episode", str(tmp_path)), 1, 60.0))
    assert result.ended.how == "returned" and proxy.addresses == [], result.ended.text


def test_every_process_of_a_run_keeps_its_addresses_from_proxies(tmp_path: Path) -> None:
    topology = load(AGENTS, ['process.agent.env={ NO_PROXY = "mine.example" }'])
    agent = next(process for process in topology.processes() if process.role == "agent")
    environment = environment_of(agent, RunPaths.of(tmp_path), {}, ("10.0.0.7",))
    assert environment["NO_PROXY"] == environment["no_proxy"] == "mine.example,127.0.0.1,localhost,10.0.0.7"


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, "127.0.0.1,localhost"), ({"NO_PROXY": "*"}, "*"), ({"no_proxy": "a, localhost"}, "a,localhost,127.0.0.1"),
])
def test_what_the_user_has_set_stays_in_front_in_both_spellings(variables: dict[str, str], expected: str) -> None:
    environment = proxies.environment({**variables, "HOME": "/"})
    assert environment == {"HOME": "/", "no_proxy": expected, "NO_PROXY": expected}
    assert proxies.environment(environment) == environment


# -- busrl's own clients -----


def judged(url: str) -> float:
    async def ask() -> float:
        judge = Judge(Setup("judge", base_url=url, retries=0, timeout_s=20.0))
        try:
            return await judge({"prompt": "1+1?"}, "2", [])
        finally:
            await judge.close()

    return asyncio.run(ask())


def test_a_judge_behind_a_proxy_is_asked_through_it(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy.body = VERDICT
    assert judged("http://judge.example/v1") == 1.0
    assert proxy.addresses == ["http://judge.example/v1/chat/completions"]
    monkeypatch.setenv("no_proxy", "judge.example")
    with pytest.raises(JudgeFailed) as failed:
        judged("http://judge.example/v1")
    assert len(proxy.addresses) == 1 and "by the proxy" not in str(failed.value)


def test_a_proxy_that_refuses_a_judge_is_named_without_its_password(proxy: Proxy) -> None:
    with pytest.raises(JudgeFailed, match=r"status 403 \(by the proxy 127\.0\.0\.1; no_proxy") as failed:
        judged("http://judge.example/v1")
    assert "secret" not in str(failed.value)


def test_a_judge_on_this_host_is_asked_directly(proxy: Proxy) -> None:
    here = Proxy()
    here.body = VERDICT
    threading.Thread(target=here.serve_forever, daemon=True).start()
    assert judged(f"http://localhost:{here.server_port}/v1") == 1.0
    assert proxy.addresses == [] and here.addresses == ["/v1/chat/completions"]
    here.shutdown()
    here.server_close()


def test_an_endpoint_behind_a_proxy_is_asked_through_it(proxy: Proxy) -> None:
    proxy.body = b"yes"
    client = Client(Openai(base_url="http://models.example/v1"))
    try:
        assert client.send("GET", f"{client.url}/models", None, "a look", once=True) == "yes"
        assert proxy.addresses == ["http://models.example/v1/models"]
    finally:
        client.close()


# -- what a program's standard error says -----


@pytest.mark.parametrize(("code", "how"), [
    ("raise ValueError('no way through')", "raised"),
    ("import sys\nprint('ValueError: no way through', file=sys.stderr)\nprint('done')", "malformed"),
])
def test_the_last_line_of_a_programs_errors_comes_first(
    play: Play, tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str, how: str
) -> None:
    result = play(program(tmp_path, code))
    assert result.ended.how == how and result.ended.text.startswith("ValueError: no way through: its ")
    assert "ValueError: no way through" in capfd.readouterr().err, "and the log has all of it"
