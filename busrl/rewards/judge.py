"""A part of kind `judge`: another model, behind an OpenAI-compatible endpoint, grades an answer.

Runs on the event loop of a child (`busrl.rewards.child`). Talks HTTP (aiohttp). Knows nothing of other parts, groups or
re-rolls of samples.

- A verdict is a number; a request without a verdict is an accident, never a 0: it is repeated after a growing pause
  with jitter, and after the last try the call raises the cause.
- Equal questions are sent once (up to KEPT verdicts are remembered), also while the first request is under way.
- Text of the policy is put into the template in one pass: it cannot fill in a placeholder.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import re
from collections.abc import Mapping
from typing import Any

from busrl.data.prompts import plain_text
from busrl.errors import RewardNotLoaded, may_pass, retry_after_s
from busrl.rewards.base import Setup, compiled
from busrl.system.proxies import named, proxy_of

try:
    import aiohttp
except ImportError as missing:
    raise RewardNotLoaded("kind = \"judge\" needs aiohttp, not installed: pip install 'busrl[rewards]'") from missing

TEMPLATE = """\
Grade the answer to a question.

Question:
{prompt}

Reference answer:
{answer}

Answer to be graded:
{completion}

Does the answer agree with the reference? Explain in a few sentences, then write one last line: VERDICT: yes, or
VERDICT: no."""
VERDICT = r"(?i)verdict\W*:\W*([\w.+-]+)"
WORTH = {"yes": 1.0, "true": 1.0, "correct": 1.0, "right": 1.0, "no": 0.0, "false": 0.0, "incorrect": 0.0, "wrong": 0.0}
PLACE = re.compile(r"\{(\w+)\}")
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 15.0  # between tries
BODY_BYTES, READ_BYTES = 1 << 20, 1 << 16  # a longer body is a failed try
SHOWN = 200  # characters of an answer in a message
KEPT = 100_000
SPARE_S = 1.0  # so that a try ends before the call does


class JudgeFailed(Exception):
    """No verdict; the sample is drawn again."""


class TryFailed(Exception):
    """A failed try. `again`: whether another may succeed; `wait_s`: the pause that the server requests."""

    def __init__(self, why: str, again: bool = True, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.again, self.wait_s = again, wait_s


class Judge:
    """The requests to a judge: `at_once` calls run at the same time, and each ends within `longest_s`."""

    def __init__(self, setup: Setup) -> None:
        self.url = setup.base_url.rstrip("/") + "/chat/completions"
        self.proxy = proxy_of(self.url)
        self.template, self.model = setup.template or TEMPLATE, setup.model
        self.verdict = compiled(setup.verdict or VERDICT, f"{setup.place}.verdict")
        self.answer_key, self.prompt_key = setup.answer_key or "answer", setup.prompt_key
        self.max_tokens, self.tries, self.at_once = setup.max_tokens, 1 + setup.retries, setup.concurrency
        self.timeout = aiohttp.ClientTimeout(total=setup.timeout_s)
        self.longest_s = self.tries * (setup.timeout_s + SPARE_S) + setup.retries * MOST_WAIT_S
        self.headers = {}
        if setup.api_key_env:
            if not (secret := os.environ.get(setup.api_key_env, "")):
                raise RewardNotLoaded(f"{setup.place}: api_key_env names ${setup.api_key_env}, which is not set")
            self.headers = {"Authorization": f"Bearer {secret}"}
        self._session: aiohttp.ClientSession | None = None
        self._verdicts: dict[bytes, asyncio.Future[float]] = {}

    async def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        text = self.question(record, completion)
        key = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()  # 32 bits would collide
        if key not in self._verdicts:
            if len(self._verdicts) >= KEPT:
                del self._verdicts[next(iter(self._verdicts))]
            self._verdicts[key] = asyncio.ensure_future(self._ask(text))
        try:
            return await asyncio.shield(self._verdicts[key])
        except BaseException:
            self._verdicts.pop(key, None)
            raise

    def question(self, record: Mapping[str, Any], completion: str) -> str:
        """The template with its placeholders filled in; an unknown placeholder stays as it is."""
        values = {name: plain_text(value) for name, value in record.items()}
        values["prompt"] = plain_text(record.get(self.prompt_key, ""))
        values["answer"] = plain_text(record.get(self.answer_key, "(none is given)"))
        values["completion"] = completion
        return PLACE.sub(lambda place: values.get(place[1], place[0]), self.template)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, text: str) -> float:
        """The verdict; `JudgeFailed` after the last try."""
        for number in range(1, self.tries + 1):
            try:
                return self.read(await self._answer(text))
            except TryFailed as problem:
                why = problem
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as problem:
                reason = str(problem) or f"no answer within {self.timeout.total:g} s"
                why = TryFailed(f"{type(problem).__name__}: {reason}{named(self.proxy)}")
            if number == self.tries or not why.again:
                raise JudgeFailed(f"{self.url}: {why} (try {number} of {self.tries})")
            await asyncio.sleep(pause(number, why.wait_s))
        raise AssertionError("the last try raises or returns")

    async def _answer(self, text: str) -> str:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self.at_once)
            self._session = aiohttp.ClientSession(headers=self.headers, timeout=self.timeout, connector=connector)
        request = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": self.max_tokens}
        request |= {"model": self.model} if self.model else {}
        async with self._session.post(self.url, json=request, proxy=self.proxy) as response:
            body = await _body(response)
            if response.status != 200:
                why = f"status {response.status}{named(self.proxy)}: {_shown(body)}"
                raise TryFailed(why, may_pass(response.status), retry_after_s(response.headers.get("Retry-After", "")))
        try:
            content = json.loads(body)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            content = None
        if not isinstance(content, str):
            raise TryFailed(f"not an answer of a chat: {_shown(body)}")
        return content

    def read(self, text: str) -> float:
        verdicts = list(self.verdict.finditer(text))
        word = (verdicts[-1][1] or "").strip().rstrip(".").lower() if verdicts else None
        if word is None:
            raise TryFailed(f"no verdict in its answer: ...{text[-SHOWN:]!r}")
        if word in WORTH:
            return WORTH[word]
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise TryFailed(f"its verdict is {word[:SHOWN]!r}: neither a number nor yes or no")
        return number


def pause(number: int, asked_s: float = 0.0) -> float:
    """Seconds to wait after failed try `number`: doubled each time, half of it random, and at least `asked_s`, which
    the server requests."""
    wait: float = min(MOST_WAIT_S, FIRST_WAIT_S * (1 << min(number - 1, 10)))
    chance = 0.5 + random.random() / 2
    return min(MOST_WAIT_S, max(asked_s, wait * chance))


async def _body(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_chunked(READ_BYTES):
        data += chunk
        if len(data) > BODY_BYTES:
            response.close()
            raise TryFailed(f"an answer of more than {BODY_BYTES >> 20} MiB")
    return bytes(data)


def _shown(body: bytes) -> str:
    return repr(body[:SHOWN].decode(errors="replace"))
