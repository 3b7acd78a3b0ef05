"""A judge behind an endpoint that misbehaves: a verdict is a number, everything else is an accident, never a 0."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from busrl.errors import RewardNotLoaded
from busrl.rewards.base import Item, Outcome, Setup
from busrl.rewards.pool import RewardPool
from busrl.topology.rewards import Reward, RewardPart

judge = pytest.importorskip("busrl.rewards.judge")


class Endpoint(ThreadingHTTPServer):
    """Answers by what the completion in the question says: `TIMES WORD` misbehaves so often, then gives the verdict."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.tries: dict[str, int] = {}
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"].partition("ANSWER ")[2]
        with server.lock:
            server.requests.append(body)
            server.keys.append(self.headers.get("Authorization", ""))
            server.tries[text] = number = server.tries.get(text, 0) + 1
            server.now += 1
            server.most = max(server.most, server.now)
            self.counted = True
        times, _, word = text.partition(" ")
        try:
            if times.isdigit() and number <= int(times):
                self.misbehave(word)
            else:
                server.over.wait(0.05)
                self.chat(f"Let me see. VERDICT: no? At last, Verdict: {times if not times.isdigit() else '0.5'}.")
        finally:
            self.over()

    def over(self) -> None:
        """Not counted any more, from before its client can know the answer and ask for the next one."""
        with self.server.lock:
            self.server.now -= self.counted
            self.counted = False

    def misbehave(self, word: str) -> None:
        if word == "late":
            self.server.over.wait(30)
        elif word == "cut":
            self.connection.close()
        elif word == "json":
            self.send(200, b"<html>welcome</html>")
        elif word == "shape":
            self.send(200, b'{"choices": []}')
        elif word == "verdict":
            self.chat("I would rather not say.")
        elif word == "odd":
            self.chat("VERDICT: maybe")
        elif word == "large":
            self.send(200, b"[" * (1 << 22))
        elif word == "deep":
            self.send(200, b"[" * (1 << 19))
        else:
            self.send(int(word), b'{"error": "not today"}')

    def chat(self, text: str) -> None:
        self.send(200, json.dumps({"choices": [{"message": {"content": text}}]}).encode())

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.over()
        self.wfile.write(body)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (OSError, ValueError):  # the client has gone, or we closed the connection on purpose
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def part(endpoint: Endpoint, **more: Any) -> RewardPart:
    settings = {"timeout_s": 20.0, "base_url": endpoint.url, "model": "m", "template": "{prompt} ANSWER {completion}",
            "answer_key": "answer", "retries": 2, **more}
    return RewardPart("judge", "judge", **settings)


def judged(of_reward: RewardPart, *texts: str) -> list[Outcome]:
    with RewardPool(Reward(part=(of_reward,)), base_dir=".") as pool:
        pool.submit([Item(key, b'{"prompt": "p"}', text, []) for key, text in enumerate(texts)])
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(texts):
            outcomes |= {outcome.key: outcome for outcome in pool.poll(10.0)}
        assert pool.restarts == 0
    return [outcomes[key] for key in range(len(texts))]


def test_the_last_verdict_is_the_reward(endpoint: Endpoint) -> None:
    outcomes = judged(part(endpoint), "yes", "no", "Correct", "0.25")
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [("", 1.0), ("", 0.0), ("", 1.0), ("", 0.25)]
    assert endpoint.requests[0] == {
        "model": "m", "temperature": 0, "max_tokens": 1024,
        "messages": [{"role": "user", "content": endpoint.requests[0]["messages"][0]["content"]}],
    }


TROUBLE = {
    "429": "status 429", "500": "status 500", "503": "not today", "cut": "isconnected",
    "json": "not an answer of a chat",
    "shape": "not an answer of a chat", "verdict": "no verdict in its answer", "odd": "its verdict is 'maybe'",
    "large": "more than 1 MiB", "deep": "not an answer of a chat",
}


def test_a_failed_try_is_repeated_and_the_last_is_an_accident(endpoint: Endpoint) -> None:
    texts = [f"{times} {word}" for word in TROUBLE for times in (1, 9)]
    outcomes = dict(zip(texts, judged(part(endpoint, retries=1), *texts)))
    for word, why in TROUBLE.items():
        once, always = outcomes[f"1 {word}"], outcomes[f"9 {word}"]
        assert (once.error, once.value) == ("", 0.5)
        assert always.error == "raised" and why in always.text and "(try 2 of 2)" in always.text, always
        assert always.text.startswith("part judge: JudgeFailed: http://127.0.0.1:")
    assert set(endpoint.tries.values()) == {2}


def test_a_silent_endpoint_is_an_accident_and_the_others_are_judged(endpoint: Endpoint) -> None:
    late, other = judged(part(endpoint, timeout_s=0.5, retries=0), "9 late", "yes")
    assert late.error == "raised" and "no answer within 0.5 s" in late.text
    assert other.value == 1.0


def test_a_refusal_is_not_asked_again(endpoint: Endpoint) -> None:
    for status, refused in zip(("400", "401"), judged(part(endpoint), "9 400", "9 401")):
        assert f"status {status}" in refused.text and "not today" in refused.text
    assert endpoint.tries == {"9 400": 1, "9 401": 1}


def test_nobody_there_is_an_accident() -> None:
    of_nobody = RewardPart("judge", "judge", timeout_s=5.0, base_url="http://127.0.0.1:9/v1", retries=0)
    (nobody,) = judged(of_nobody, "yes")
    assert nobody.error == "raised" and "127.0.0.1" in nobody.text


def test_no_more_requests_than_allowed_run_at_once_and_none_twice(endpoint: Endpoint) -> None:
    texts = [f"yes {number}" for number in range(30)]
    outcomes = judged(part(endpoint, concurrency=3), *texts, *texts)
    assert all(outcome.error == "" for outcome in outcomes)
    assert endpoint.most == 3 and len(endpoint.requests) == 30


def test_the_key_comes_from_the_environment(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSRL_S_KEY", "secret")
    judged(part(endpoint, api_key_env="BUSRL_S_KEY"), "yes")
    assert endpoint.keys == ["Bearer secret"]
    monkeypatch.delenv("BUSRL_S_KEY")
    with pytest.raises(RewardNotLoaded, match=r"\$BUSRL_S_KEY, which is not set"):
        judged(part(endpoint, api_key_env="BUSRL_S_KEY"), "yes")


def setup(**more: Any) -> Setup:
    return Setup("judge", base_url="http://x/v1", **more)


def test_an_answer_cannot_fill_in_a_placeholder() -> None:
    grader = judge.Judge(setup(template="{prompt}|{completion}|{answer}|{level}|{none}", answer_key="a"))
    record = {"prompt": [{"role": "user", "content": "Q"}], "a": 3, "level": "hard"}
    assert grader.question(record, "{answer} {level}") == "Q|{answer} {level}|3|hard|{none}"
    assert "(none is given)" in judge.Judge(setup()).question({"prompt": "Q"}, "A")


@pytest.mark.parametrize("text", ["", "VERDICT: nan", "VERDICT: inf", "VERDICT: maybe", "yes"])
def test_what_is_no_verdict_is_refused(text: str) -> None:
    with pytest.raises(judge.TryFailed):
        judge.Judge(setup()).read(text)


def test_a_verdict_may_be_a_number_of_the_user_s_own_form() -> None:
    assert judge.Judge(setup(verdict=r"Score: *([0-9.]+)/10")).read("Score: 3/10 ... Score: 7.5/10") == 7.5


def test_pauses_grow_to_a_bound_and_differ() -> None:
    pauses = [[judge.pause(number) for _ in range(50)] for number in (1, 2, 3, 30)]
    assert all(len(set(waits)) > 10 for waits in pauses)
    assert [max(waits) <= bound for waits, bound in zip(pauses, (0.5, 1.0, 2.0, 15.0))] == [True] * 4
    assert min(pauses[3]) >= 7.5 and judge.pause(1, 4.0) == 4.0 and judge.pause(1, 4000.0) == 15.0
