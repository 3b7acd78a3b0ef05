"""The caller's side of model calls: puts them into the ring of calls, waits for them, takes answers, cancels.

`Caller` is for one thread; `AsyncCaller` puts it behind an asyncio loop, with one more thread that waits at the ring.
Talks to the ring of calls, and sends messages by a function that it gets. Knows nothing of episodes, text or engines.

- While its caller lives, only the caller takes a call out of its slot, unless the call was cancelled.
- An answer is taken once, whole and checked. A bad answer of an engine raises `CallUnanswered` and nothing else.
- The caller gives a call up after two engines died of it while they held nothing else: no other process may free it.
- Messages spare an engine useless tokens and smooth a stream: no answer needs one.
- Every wait ends, with an error that names the holder of the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.errors import BadTensor, BugError, CallUnanswered, NoSuchTensor, RingError, SlotTooSmall
from busrl.protocol import messages as m
from busrl.protocol.codec import address
from busrl.ring import Process, Ring, owner_of, seq_of
from busrl.states import POISON_DEATHS, State

Ids = npt.NDArray[np.int32]
Send = Callable[[m.Message, str], None]
AFFINITY_S = 0.02
REFUSAL_BYTES = 1000
WAIT_S, LOOK_S = 0.5, 0.05
GIVES = "gives"  # of a call's `extra`: names of tensors that are to come with the answer, as
ROUTES = ("routes", "prompt_routes")  # where engines say which experts they chose (`busrl.engines.base.Finished`)
ANSWER = {"tokens": np.dtype(np.int32), "logprobs": np.dtype(np.float32), "versions": np.dtype(np.uint32)}


def asks_for_routes(extra: Mapping[str, Any]) -> bool:
    """Tell whether the caller of a call with this `extra` wants routes with the answer."""
    given = extra.get(GIVES)
    return isinstance(given, list) and set(ROUTES) <= {name for name in given if isinstance(name, str)}


class CallDetails(msgspec.Struct, omit_defaults=True):
    """Details without a field in the line of a call: the tensor `call`, as msgpack."""

    stream: int = 0  # 64 bits: number of the stream of random numbers
    stop: list[int] = msgspec.field(default_factory=list)  # ids that end the answer beside the model's own
    tokens: bool = False  # CALL_TOKENS are wanted
    extra: dict[str, Any] = {}  # what only some engines know; GIVES


class Served(NamedTuple):
    """The tensor `served`. `engine` is the index of the process that answered, `claimed_ns` and `done_ns` are of the
    monotonic clock. `computed` counts the ids whose keys and values were computed, if the engine reports it. `step` is
    the learner's step of the oldest version that drew a token; 0 if unknown, which looks too old, never too new."""

    engine: int
    claimed_ns: int
    done_ns: int
    computed: int = 0
    step: int = 0


@dataclass(frozen=True)
class ModelCall:
    """The ids of a prompt and the settings of its answer. `uid` and `stream` name the random numbers of the answer. The
    higher `priority` goes first, then the older `admission`. For `affinity_s` only `engine` may claim the call."""

    ids: Ids
    max_new_tokens: int
    uid: int = 0
    stream: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[int, ...] = ()
    priority: int = 0
    admission: int = 0
    cls: int = 0
    engine: int = 0
    affinity_s: float = AFFINITY_S
    streams: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def details(self) -> bytes:
        return msgspec.msgpack.encode(CallDetails(self.stream, list(self.stop), self.streams, self.extra))


@dataclass(frozen=True)
class CallAnswer:
    """The tokens that an engine drew: at least one id, each with its log-probability and policy version. `finish` is a
    code of `Finish`; `engine` is the process that answered, whose cache may still have the prefix; `computed` and
    `step` are those of `Served`, `extra` has the tensors that the call asks for beside."""

    ids: Ids
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.uint32]
    finish: int
    engine: int
    waited_s: float
    generated_s: float
    computed: int = 0
    step: int = 0
    extra: dict[str, npt.NDArray[Any]] = field(default_factory=dict)


@dataclass(eq=False)
class PendingCall:
    """A call under way. Done once it has an `answer` or an `error`; `sampled` are the tokens that came early."""

    call: ModelCall
    slot: int
    word: int  # the slot's control word as the call was queued
    put_ns: int
    answer: CallAnswer | None = None
    error: CallUnanswered | None = None
    cancelled: bool = False
    sampled: list[int] = field(default_factory=list)
    _seq: int = 0  # of the claim in which `sampled` was sampled

    @property
    def done(self) -> bool:
        return self.answer is not None or self.error is not None

    def result(self) -> CallAnswer:
        if self.answer is None:
            raise self.error or CallUnanswered("late", "the call is still under way")
        return self.answer


def read_ids(ring: Ring, slot: int, name: str, segment: int) -> Ids:
    """Ids of a slot, at least one, as a view; BadTensor or NoSuchTensor if another program wrote something else."""
    ids: Ids = ring.get(slot, name, segment)
    if ids.dtype != np.int32 or ids.ndim != 1 or not len(ids):
        raise BadTensor(f"slot {slot}: {name} is {ids.dtype} of shape {ids.shape}, expected int32 of one or more")
    return ids


def write_answer(
    ring: Ring, slot: int, word: int, ids: Ids, logprobs: npt.NDArray[np.float32], versions: npt.NDArray[np.uint32],
    finish: int, claimed_ns: int, step: int, computed: int = 0, extra: dict[str, npt.NDArray[Any]] | None = None,
) -> bool:
    """Put an answer into a held call and commit it; False if the slot has moved. `step` is the learner's step of the
    oldest version. Raises SlotTooSmall or NotOwner."""
    served = np.array(Served(ring.index, claimed_ns, time.monotonic_ns(), computed, step), np.uint64)
    answer: dict[str, npt.NDArray[Any]] = {"tokens": ids, "logprobs": logprobs, "versions": versions, "served": served}
    for name, array in (answer | (extra or {})).items():
        ring.put(slot, word, name, array, 0)
    ring.set(slot, word, finish=finish, response_tokens=len(ids), version=int(versions.min()))
    return bool(ring.commit_segment(slot, word, True))


def write_refusal(ring: Ring, slot: int, word: int, why: str) -> bool:
    """Commit a reason in the place of an answer; False if the slot has moved. If it does not fit the
    caller finds no tensors."""
    with contextlib.suppress(SlotTooSmall):
        ring.clear_segments(slot, word, 0)
        ring.put(slot, word, "refused", np.frombuffer(why.encode()[:REFUSAL_BYTES] or b"?", np.uint8), 0)
    return bool(ring.commit_segment(slot, word, True))


# -- the caller ---------------------------------------------


class Caller:
    """The calls of this process. `ring` is registered; `send` takes a message and its address ("" = everybody)."""

    def __init__(self, ring: Ring, send: Send) -> None:
        self.ring, self._send = ring, send
        self._open: dict[int, PendingCall] = {}  # by slot
        self._me = (ring.index, ring.epoch)

    @property
    def open(self) -> int:
        """Count the calls that are under way."""
        return len(self._open)

    def put(self, call: ModelCall) -> PendingCall | None:
        """Queue a call; None while no slot is free. SlotTooSmall if no slot has room for it and its longest answer."""
        now = time.monotonic_ns()
        put = self.ring.put_call(
            call.ids, call.details(), uid=call.uid, admission=call.admission, cls=call.cls, priority=call.priority,
            max_new_tokens=call.max_new_tokens, temperature=call.temperature, top_p=call.top_p,
            offer_to=max(0, call.engine), offer_s=call.affinity_s,
        )
        if put is None:
            return None
        pending = PendingCall(call, *put, now)
        if (earlier := self._open.get(pending.slot)) is not None:  # an engine cancelled it, unnoticed so far
            self._end(earlier, CallUnanswered("cancelled", "the call was cancelled"))
        self._open[pending.slot] = pending
        return pending

    def poll(self) -> list[PendingCall]:
        """Take every answer that is there; returns the calls that have ended."""
        words = self.ring.words() if self._open else np.empty(0, np.uint64)
        return [pending for slot, pending in list(self._open.items()) if self._look(pending, int(words[slot]))]

    def wait(self, timeout_s: float) -> list[PendingCall]:
        """`poll`, with a wait for the first end; empty after the time, or if no call is under way."""
        end = time.monotonic() + timeout_s
        while self._open:
            seen = self.ring.transitions(State.GENERATED)
            if ended := self.poll():
                return ended
            left = end - time.monotonic()
            if left <= 0:
                break
            self.ring.wait(State.GENERATED, seen, min(left, WAIT_S))
        return []

    def cancel(self, pending: PendingCall) -> None:
        """Give up the answer. The slot is freed now, or by its engine, or when the answer is there."""
        if pending.done or pending.cancelled:
            return
        pending.cancelled = True
        word = int(self.ring.line(pending.slot)["word"])
        if word >> 58 == State.GENERATING and (engine := self._engine(word)) is not None:
            self._send(m.CallCancel(slot_id=pending.slot, seq=seq_of(word)), address(engine.label))
        self._look(pending, word)

    def tokens(self, message: m.CallTokens) -> PendingCall | None:
        """Take over tokens that an engine announced; returns the call that got some. Tokens that do not follow those
        before are left to the answer."""
        pending = self._open.get(message.slot_id)
        if pending is None or pending.done or pending.cancelled:
            return None
        word = int(self.ring.line(pending.slot)["word"])
        if seq_of(word) != message.seq or word >> 58 not in (State.GENERATING, State.GENERATED):
            return None
        if pending._seq != message.seq:  # another engine began again, with the same random numbers
            if pending._seq and message.at == 0 and message.ids[: len(pending.sampled)] != pending.sampled:
                return None
            pending._seq = message.seq
        new = message.ids[len(pending.sampled) - message.at :] if message.at <= len(pending.sampled) else []
        pending.sampled += new
        return pending if new else None

    def whose(self, pending: PendingCall) -> str:
        """Name the holder of the call, for an error of a wait."""
        word = int(self.ring.line(pending.slot)["word"])
        if word >> 58 == State.QUEUED:
            queued = self.ring.stats().occupancy["QUEUED"]
            there = ", ".join(process.label for process in self.ring.processes() if process.role == "rollout") or "none"
            return f"slot {pending.slot} is one of {queued} that wait for an engine; there is {there}"
        if word >> 58 == State.GENERATING:
            engine = self._engine(word)
            whose = f"{engine.label} (pid {engine.pid})" if engine else f"process {owner_of(word)}"
            return f"slot {pending.slot} is in the hands of {whose}"
        return f"slot {pending.slot} is {State(word >> 58).name}"

    def close(self) -> None:
        """Cancel all calls. A reaper frees the slots on which an engine is still at work, once that is done."""
        for pending in list(self._open.values()):
            self.cancel(pending)

    # -- internals -----

    def _look(self, pending: PendingCall, word: int) -> bool:
        """Act on the state of a call, whose control word is `word`; True if the call has ended."""
        state = word >> 58
        if state == State.GENERATED:
            return self._take(pending, word)
        if not pending.cancelled and (word == pending.word or state == State.GENERATING):
            return False
        if state == State.QUEUED and (pending.cancelled or self._is_poison(pending)):
            if not self.ring.free_call(pending.slot, word):
                return False  # an engine was faster: look again
            poison = "two engines died of the call while they held nothing else"
            code, why = ("cancelled", "the call was cancelled") if pending.cancelled else ("poison", poison)
            return self._end(pending, CallUnanswered(code, why))
        if state in (State.FREE, State.RESERVED) or not self._is_mine(pending.slot):
            gone = CallUnanswered("cancelled", "the call was cancelled")
            lost = CallUnanswered("lost", f"slot {pending.slot} was taken from its caller: the ring was damaged")
            return self._end(pending, gone if pending.cancelled else lost)
        return False

    def _is_mine(self, slot: int) -> bool:
        line = self.ring.line(slot)
        return (int(line["group"]), int(line["step"])) == self._me

    def _is_poison(self, pending: PendingCall) -> bool:
        return int(self.ring.line(pending.slot)["alone_deaths"]) >= POISON_DEATHS

    def _engine(self, word: int) -> Process | None:
        """The process that holds a slot, if it is registered."""
        return next((process for process in self.ring.processes() if process.index == owner_of(word)), None)

    def _take(self, pending: PendingCall, word: int) -> bool:
        slot = pending.slot
        if pending.cancelled:
            if self._is_mine(slot):
                self.ring.free_call(slot, word)
            return self._end(pending, CallUnanswered("cancelled", "the call was cancelled"))
        error: CallUnanswered | None = None
        try:
            pending.answer = self._read(pending)
        except CallUnanswered as problem:
            error = problem
        except (BadTensor, NoSuchTensor) as problem:
            error = CallUnanswered("malformed", f"the answer in slot {slot} cannot be read: {problem}")
        if not self.ring.free_call(slot, word):
            raise BugError(f"slot {slot} went from under the caller of its call")
        return self._end(pending, error)

    def _read(self, pending: PendingCall) -> CallAnswer:
        slot, ring = pending.slot, self.ring
        try:
            ids, logprobs, versions = (ring.get(slot, name, 0) for name in ANSWER)
        except NoSuchTensor:
            why = ring.get(slot, "refused", 0).tobytes().decode("utf-8", "replace")
            raise CallUnanswered("refused", why) from None
        kinds = [(array.dtype, array.shape) for array in (ids, logprobs, versions)]
        if kinds != [(kind, (len(ids),)) for kind in ANSWER.values()] or not len(ids):
            raise BadTensor(f"ids, log-probabilities and versions are {kinds}")
        if not np.isfinite(logprobs).all():
            raise CallUnanswered("malformed", "the engine drew from numbers that are not finite")
        served = Served(0, pending.put_ns, time.monotonic_ns())
        with contextlib.suppress(NoSuchTensor, TypeError):
            served = Served(*ring.get(slot, "served", 0).tolist())
        finish = int(ring.line(slot)["finish"])
        extra = {name: ring.get(slot, name, 0).copy() for name in pending.call.extra.get(GIVES, ())}
        waited, generated = served.claimed_ns - pending.put_ns, served.done_ns - served.claimed_ns
        return CallAnswer(
            ids.copy(), logprobs.copy(), versions.copy(), finish, served.engine, waited / 1e9, generated / 1e9,
            served.computed, served.step, extra,
        )

    def _end(self, pending: PendingCall, error: CallUnanswered | None) -> bool:
        pending.error = error
        if self._open.get(pending.slot) is pending:
            del self._open[pending.slot]
        return True


# -- in an asyncio loop -------------------------------------


class _Waiter:
    """A coroutine's wait for a call; `news` is set whenever there is something to look at."""

    def __init__(self, call: ModelCall) -> None:
        self.call, self.news = call, asyncio.Event()
        self.pending: PendingCall | None = None
        self.refused: RingError | None = None
        self.given_up = False

    async def look_later(self, timeout_s: float | None = None) -> None:
        self.news.clear()
        await asyncio.wait_for(self.news.wait(), timeout_s)


class RingWatch:
    """A thread that makes a loop call `look` after a slot of a ring has entered a state, and every `LOOK_S` at least.
    """

    def __init__(self, ring: Ring, state: State, look: Callable[[], None]) -> None:
        self._ring, self._state, self._look = ring, state, look
        self._loop = asyncio.get_running_loop()
        self._stopped, self._looking = False, False
        self._thread = threading.Thread(target=self._watch, name=f"watch {state.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """End the thread: after this it neither calls `look` nor uses the ring."""
        self._stopped = True
        await asyncio.to_thread(self._thread.join)

    def _watch(self) -> None:
        seen = self._ring.transitions(self._state)
        while not self._stopped:
            seen = self._ring.wait(self._state, seen, LOOK_S)
            if not self._looking:
                self._looking = True
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._in_the_loop)

    def _in_the_loop(self) -> None:
        self._looking = False
        if not self._stopped:
            self._look()


class AsyncCaller:
    """Calls from coroutines of one loop. Calls without a free slot wait here, best first. Use `async with`."""

    def __init__(self, ring: Ring, send: Send) -> None:
        self.caller = Caller(ring, send)
        self._loop = asyncio.get_running_loop()
        self._in_slots: dict[PendingCall, _Waiter] = {}
        self._waiting: list[tuple[int, int, int, _Waiter]] = []  # a heap, in the order of claims
        self._numbers = itertools.count()
        self._answers = RingWatch(ring, State.GENERATED, self._look)

    async def __aenter__(self) -> AsyncCaller:
        self._answers.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._answers.stop()
        self.caller.close()

    async def ask(self, call: ModelCall, timeout_s: float) -> CallAnswer:
        """Wait for the answer. CallUnanswered if there is none within the time; cancelling the coroutine cancels the
        call."""
        waiter = _Waiter(call)
        try:
            return await asyncio.wait_for(self._answered(waiter), timeout_s)
        except asyncio.TimeoutError:
            raise self._late(waiter, timeout_s) from None
        finally:
            self._forget(waiter)

    async def stream(self, call: ModelCall, timeout_s: float) -> AsyncIterator[list[int] | CallAnswer]:
        """Yield ids as they are drawn, at last the answer. CallUnanswered if the answer does not begin with the ids so
        far, because an engine died and the next one drew with other weights."""
        waiter, yielded, end = _Waiter(replace(call, streams=True)), 0, self._loop.time() + timeout_s
        try:
            pending = await asyncio.wait_for(self._queued(waiter), timeout_s)
            while not pending.done:
                if new := pending.sampled[yielded:]:
                    yielded += len(new)
                    yield new
                else:
                    await waiter.look_later(max(0.0, end - self._loop.time()))
            answer = pending.result()
            ids = answer.ids.tolist()
            if ids[:yielded] != pending.sampled[:yielded]:
                raise CallUnanswered("lost", "the answer was begun again by another engine, and became another one")
            if ids[yielded:]:
                yield ids[yielded:]
            yield answer
        except asyncio.TimeoutError:
            raise self._late(waiter, timeout_s) from None
        finally:
            self._forget(waiter)

    def tokens(self, message: m.CallTokens) -> None:
        """Take over the tokens of a message; call it in the loop."""
        pending = self.caller.tokens(message)
        if pending is not None and pending in self._in_slots:
            self._in_slots[pending].news.set()

    # -- internals -----

    async def _answered(self, waiter: _Waiter) -> CallAnswer:
        pending = await self._queued(waiter)
        while not pending.done:
            await waiter.look_later()
        return pending.result()

    async def _queued(self, waiter: _Waiter) -> PendingCall:
        """Wait until the call has a slot."""
        call = waiter.call
        heapq.heappush(self._waiting, (-call.priority, call.admission, next(self._numbers), waiter))
        self._fill()
        while waiter.pending is None:
            if waiter.refused is not None:
                raise waiter.refused
            await waiter.look_later()
        return waiter.pending

    def _fill(self) -> None:
        """Put the best of the waiting calls into the free slots."""
        while self._waiting:
            waiter = self._waiting[0][-1]
            if not waiter.given_up:
                try:
                    waiter.pending = self.caller.put(waiter.call)
                except RingError as problem:
                    waiter.refused = problem
                if waiter.pending is None and waiter.refused is None:
                    return
                if waiter.pending is not None:
                    self._in_slots[waiter.pending] = waiter
                waiter.news.set()
            heapq.heappop(self._waiting)

    def _late(self, waiter: _Waiter, timeout_s: float) -> CallUnanswered:
        full = f"all {self.caller.ring.n_slots} slots of the ring of calls are in use"
        whose = self.caller.whose(waiter.pending) if waiter.pending else full
        return CallUnanswered("late", f"no answer within {timeout_s:g} s: {whose}")

    def _forget(self, waiter: _Waiter) -> None:
        waiter.given_up = True
        if waiter.pending is not None:
            self._in_slots.pop(waiter.pending, None)
            self.caller.cancel(waiter.pending)

    def _look(self) -> None:
        """Take the calls that have ended, then use the free slots."""
        for pending in self.caller.poll():
            if pending in self._in_slots:
                self._in_slots[pending].news.set()
        self._fill()
