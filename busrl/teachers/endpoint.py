"""A teacher behind an OpenAI-compatible endpoint that gives log-probabilities of a prompt (`prompt_logprobs`, as vLLM).

Asked by the trainer's thread; requests run on an event loop in a thread of their own. Talks HTTP (aiohttp). Reads of
answers are those of `busrl.teachers.answers`. Knows nothing of losses, tags or other teachers.

- Token ids both ways: a sequence is the prompt of a completion, and position t of the answer is about token t.
- At the start the endpoint proves that it has the tokenizer of the trained model, and that it gives log-probabilities.
- Whoever waits for the endpoint calls `on_progress` meanwhile, at the start too: the limit of the wait is `patience_s`.
- An answer that is late, cut or without numbers is named and asked for again; after `patience_s` without a usable one,
  or `TRIES` unusable ones of a sequence, the call raises, and nothing of the micro-batch is trained.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from busrl.errors import PeerTimeout, UserError, may_pass, retry_after_s
from busrl.system.proxies import named, proxy_of
from busrl.teachers.answers import Rows, Unusable, only_model, rows_of, tokenizer_fault, unreadable
from busrl.teachers.base import Pending, Taught
from busrl.teachers.probes import Probe
from busrl.training.batch import Piece, Sample
from busrl.training.scorer import NOTHING

try:
    import aiohttp
except ImportError as missing:
    raise UserError("learner.teacher needs aiohttp, which is not installed: pip install 'busrl[agents]'") from missing

if TYPE_CHECKING:
    from busrl.topology.learner import TeacherRow

log = logging.getLogger("busrl")
TRIES = 3  # unusable answers to one sequence, after which it is given up
FIRST_WAIT_S, MOST_WAIT_S = 0.25, 10.0  # between two tries
TICK_S = 0.5  # a waiting call shows that it lives
ERROR_BYTES = 2000
CONNECT_S, CLOSE_S = 10.0, 5.0
START = "at the start"
EVERY = -1  # in the place of a number: log-probabilities of all tokens
Futures = list["concurrent.futures.Future[Rows] | None"]  # of sequences; None: of no sample


class Failed(Exception):
    """A try that failed for a reason that may pass; `wait_s`: what the server asked for."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Endpoint:
    """A teacher at `row.base_url`, which gives `count` tokens per row, ids below `words`."""

    def __init__(
        self, row: TeacherRow, folder: str, count: int, words: int, on_progress: Callable[[], None],
        every: bool = False,
    ) -> None:
        """`folder`: of the trained model, whose tokenizer the endpoint must have. `every`: ids will be asked about."""
        self._row, self._count, self._words, self._on_progress = row, count, words, on_progress
        self._wanted = EVERY if every else count
        self._coming: dict[int, Futures] = {}  # by sample: of its sequences
        self.url = row.base_url.rstrip("/")
        self.name = f"the teacher at {self.url}" + (f' (tag "{row.tag}")' if row.tag else "")
        self._model, self._proxy = row.model, proxy_of(self.url)
        self._loop = asyncio.new_event_loop()
        self._succeeded = time.monotonic()
        self._room = asyncio.Semaphore(row.concurrency)
        threading.Thread(target=self._loop.run_forever, name="teacher", daemon=True).start()
        self._session = self._wait(self._sent(self._opened()), CONNECT_S)
        atexit.register(self.close)
        try:
            self._prove(Probe.of(folder, words))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        atexit.unregister(self.close)
        if not self._loop.is_running():
            return
        with contextlib.suppress(PeerTimeout):  # at the end of a process nobody is told of progress
            self._wait(self._sent(self._session.close()), CLOSE_S, lambda: None)
        self._loop.call_soon_threadsafe(self._loop.stop)

    # -- the teacher -----

    def expect(self, samples: Sequence[Sample]) -> None:
        """Send requests for samples that are to be asked about soon."""
        self._succeeded = time.monotonic()
        for sample in samples:
            if sample.uid not in self._coming:
                self._coming[sample.uid] = self._begun(sample)

    def wait_for(self, uids: Sequence[int], on_wait: Callable[[], None]) -> None:
        """Wait for all answers about samples that were expected, which `ask` then has; calls `on_wait` meanwhile."""
        def tick() -> None:
            self._on_progress()
            on_wait()

        with self._all_or_none():
            for future in itertools.chain.from_iterable(self._coming.get(uid, []) for uid in uids):
                if future is not None:
                    self._wait(future, on_tick=tick)

    def ask(self, samples: Sequence[Sample], ids: Tensor | None) -> Pending:
        """Send requests for all sequences of the samples, where that was not done yet; the answer waits for them."""
        self._succeeded = time.monotonic()
        sent = [[] if sample is NOTHING else self._coming.pop(sample.uid, []) for sample in samples]
        asked = [future for sample, futures in zip(samples, sent) for future in futures or self._begun(sample)]
        spans = [piece.spans for sample in samples for piece in sample.pieces]
        return partial(self._answer, asked, spans, ids)

    def _begun(self, sample: Sample) -> Futures:
        if sample is NOTHING:
            return [None]
        if sample.temperature != 1:
            raise UserError(
                f"{self.name}: sample {sample.uid} was drawn at temperature {sample.temperature:g}, and an endpoint "
                "gives log-probabilities at temperature 1; draw at 1, or name its folder (path)"
            )
        return [self._sent(self._measured(piece, sample.uid)) for piece in sample.pieces]

    def _answer(self, asked: Futures, spans: Sequence[Any], ids: Tensor | None) -> Taught:
        counts = [int((of_piece[:, 1] - of_piece[:, 0]).sum()) for of_piece in spans]
        wanted = [None] * len(spans) if ids is None else np.split(ids.cpu().numpy(), np.cumsum(counts)[:-1])
        with self._all_or_none(asked):
            taken = [
                Rows.nothing(tokens, self._count) if future is None else self._chosen(self._wait(future), some)
                for future, tokens, some in zip(asked, counts, wanted, strict=True)
            ]
        rows = np.concatenate([rows.ids for rows in taken]), np.concatenate([rows.logprobs for rows in taken])
        return torch.from_numpy(rows[0]), torch.from_numpy(rows[1])

    @contextlib.contextmanager
    def _all_or_none(self, asked: Sequence[concurrent.futures.Future[Rows] | None] = ()) -> Iterator[None]:
        """Cancel what is asked, and what is still to come, if a part of it cannot be had."""
        try:
            yield
        except BaseException:
            for future in itertools.chain(asked, *self._coming.values()):
                if future is not None:
                    future.cancel()
            self._coming.clear()
            raise

    def _chosen(self, rows: Rows, wanted: Any) -> Rows:
        """The rows of the wanted ids; all of them without any."""
        try:
            return rows if wanted is None else Rows(wanted, rows.at(wanted))
        except Unusable as problem:
            raise UserError(f"{self.name}: {problem}") from problem

    # -- one sequence -----

    async def _measured(self, piece: Piece, uid: int) -> Rows:
        phase = f"sample {uid}, {len(piece.ids)} tokens"
        async with self._room:
            return await self._completed(piece.ids.tolist(), self._wanted, phase, lambda answer: rows_of(
                answer, piece, self._wanted, self._words))

    async def _completed(self, ids: list[int], count: int, phase: str, read: Callable[[bytes], Rows]) -> Rows:
        """Give what `read` makes of the first usable answer about a sequence."""
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": count,
                "return_token_ids": True}
        rows: Rows = await self._until(partial(self._post, "/completions", body), phase, read)
        return rows

    async def _until(
        self, post: Callable[[], Coroutine[Any, Any, bytes]], phase: str, read: Callable[[bytes], Any],
    ) -> Any:
        """Give what `read` makes of the first usable answer. PeerTimeout names the endpoint, the phase and the last
        failure after `patience_s`; UserError after TRIES answers that cannot be used."""
        unusable = failures = 0
        while True:
            try:
                result = read(await post())
                self._succeeded = time.monotonic()
                return result
            except Unusable as problem:
                unusable, last, asked_s = unusable + 1, str(problem), 0.0
                if unusable == TRIES:
                    raise UserError(f"{self.name}: {phase}: {problem} ({TRIES} tries)") from problem
            except Failed as problem:
                last, asked_s = str(problem), problem.wait_s
            failures += 1
            if asked_s:
                last += f" (it asks for a wait of {asked_s:g} s)"
            wait_s = max(asked_s, min(MOST_WAIT_S, FIRST_WAIT_S * 2 ** min(failures, 10)) * (0.5 + random.random() / 2))
            silent_s = time.monotonic() - self._succeeded
            if silent_s >= self._row.patience_s:
                raise PeerTimeout(
                    f"{self.name}: {phase}: no usable answer for {silent_s:.1f} s (learner.teacher.patience_s = "
                    f"{self._row.patience_s:g}); the last failure: {last}"
                )
            wait_s = min(wait_s, self._row.patience_s - silent_s)  # one more try, when it is over
            log.warning("%s: %s: %s; asking again in %.1f s", self.name, phase, last, wait_s)
            await asyncio.sleep(wait_s)

    async def _post(self, path: str, body: dict[str, Any] | None, root: str = "") -> bytes:
        """The body of a 200. Failed for what may pass, UserError for a request that the endpoint refuses. Below another
        `root` a route may be missing, or closed to whoever may use those of the API: then nothing."""
        url, method = (root or self.url) + path, "POST" if body is not None else "GET"
        try:
            async with self._session.request(method, url, json=body, proxy=self._proxy) as response:
                if response.ok:
                    answer: bytes = await response.read()
                    return answer
                text = (await response.content.read(ERROR_BYTES)).decode("utf-8", "replace")
                status = response.status
                header = response.headers.get("Retry-After", "")
        except asyncio.TimeoutError as problem:
            raise Failed(f"no answer within {self._row.timeout_s:g} s (learner.teacher.timeout_s)") from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise Failed(f"{type(problem).__name__}: {problem}{named(self._proxy)}") from problem
        why = f"{status}{named(self._proxy)}: {text.strip()}"
        if may_pass(status):
            raise Failed(why, retry_after_s(header))
        if root:
            return b""
        raise UserError(f"{self.name}: it refuses {path}: {why}{_remedy(text)}")

    # -- the start -----

    def _prove(self, probe: Probe) -> None:
        """Require the tokenizer of the trained model, and log-probabilities. Each within `patience_s`."""
        self._model = self._model or self._call(self._until(partial(self._post, "/models", None), START, only_model))
        text = self._call(self._tokenized(probe))
        if fault := tokenizer_fault(text, probe):
            raise UserError(f"{self.name}: {fault}; give a teacher of the same family, whose tokenizer is the same")
        piece = Piece(probe.ids, np.array([[1, len(probe.ids)]]))

        def read(answer: bytes) -> Rows:
            rows = rows_of(answer, piece, self._wanted, self._words)
            if not text and (fault := unreadable(answer, probe)):
                raise Unusable(fault)
            return rows

        self._call(self._completed(probe.ids.tolist(), self._wanted, START, read))

    async def _tokenized(self, probe: Probe) -> bytes:
        """Ask how the endpoint reads the text of the probe; empty where it has no such route."""
        body = {"model": self._model, "prompt": probe.text, "add_special_tokens": False}
        post = partial(self._post, "/tokenize", body, self.url.removesuffix("/v1"))
        answer: bytes = await self._until(post, START, lambda answer: answer)
        return answer

    # -- the loop -----

    async def _opened(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self._row.timeout_s, sock_connect=CONNECT_S)
        return aiohttp.ClientSession(
            headers=_headers(self._row), timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    def _sent(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Begin something on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something of the start, which knows its patience."""
        return self._wait(self._sent(work), self._row.patience_s + self._row.timeout_s + CONNECT_S)

    def _wait(
        self, future: concurrent.futures.Future[Any], limit_s: float = math.inf,
        on_tick: Callable[[], None] | None = None,
    ) -> Any:
        """Wait for something on the loop, and show that this process lives."""
        end, on_tick = time.monotonic() + limit_s, on_tick or self._on_progress
        while True:
            try:
                return future.result(TICK_S)
            except concurrent.futures.TimeoutError:
                if future.done():  # just now, or by an error of this kind
                    return future.result()
                if time.monotonic() > end:
                    future.cancel()
                    raise PeerTimeout(f"{self.name}: no answer within {limit_s:g} s") from None
                on_tick()


def _headers(row: TeacherRow) -> dict[str, str]:
    if not row.api_key_env:
        return {}
    key = os.environ.get(row.api_key_env, "")
    if not key:
        raise UserError(f"learner.teacher.api_key_env names ${row.api_key_env}, which is not set in this environment")
    return {"Authorization": f"Bearer {key}"}


def _remedy(text: str) -> str:
    """Tell what to do about a refusal that is known."""
    if "logprobs" in text.lower():
        return "; start vLLM with --max-logprobs of at least learner.teacher_k (-1 for teacher_top = \"student\")"
    return "; see [[learner.teacher]] base_url, model, api_key_env"
