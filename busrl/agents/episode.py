"""The model calls of an episode: messages become ids, an engine answers, and the answers become messages and turns.

Talks to a function that answers a call (token ids in; ids, log-probabilities and versions out), to the renderer, and to
the tree of turns. Knows nothing of slots, pipes or HTTP: a role wires it to them.

- The parent of a call is fixed once its request is rendered. Long requests are rendered in a thread. At most `parallel`
  calls of an episode run at once.
- A call that could get more room when others end waits for them. One that still has none is refused.
- A call that is cancelled, or whose engine fails, leaves nothing in the tree.
- A request that its client marks as a retry joins the first one with the same body. A request whose clients have all
  gone runs on for `linger_s`, for a client that comes back.
- The episode's own time is the time in which none of its calls waits or generates.
- An episode of several seats is the `Episode` of the first of them, which has the others. Each seat has a tree, limits
  and retries of its own; own time and `parallel` are those of all.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.agents.llm import ChatRequest, Choice, Choices, CompleteRequest, Refusal, Request, Response, RewardRequest
from busrl.agents.parsers import Draft, MessageMaker
from busrl.agents.renderer import Renderer
from busrl.agents.seats import ONLY, Seat
from busrl.agents.tree import Conversation, Ids, OpenCall, Tree, Turn
from busrl.data.episodes import LARGEST_REWARD, EpisodeLimits, fault_of_key
from busrl.errors import CallRefused, CallUnanswered
from busrl.states import Finish

MOST_ANSWERS = 8  # of one request
ID_BYTES = 512  # more than the average text of an id, in any vocabulary
LONG_BYTES = 1 << 14  # a body or request of this size or more is worked on in a thread
LONG_AT_ONCE = 2
T = TypeVar("T")
_threads = ThreadPoolExecutor(LONG_AT_ONCE, "long request")


@dataclass(frozen=True)
class Call:
    """A question to an engine: at most `max_new_tokens` ids behind `prompt`. `stream` (64 bits) names the random
    numbers; `near`: the engine that answered the parent, and may still hold the prefix; `on_ids` gets the ids as they
    are drawn, from engines that send them before the answer; `routes_from`: ids whose routes an earlier answer had."""

    uid: int
    stream: int
    prompt: Ids
    max_new_tokens: int
    near: int
    on_ids: Callable[[list[int]], None] | None = None
    routes_from: int = 0


@dataclass(frozen=True)
class EngineAnswer:
    """The ids that an engine drew, at least one. `finish`: a code of `Finish`; `engine`: the engine's number; `step`:
    the learner's step that made the oldest of the versions; `routes`: of all ids but the last one, from the call's
    `routes_from` on, in a run with routes."""

    ids: Ids
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.uint32]
    finish: int
    engine: int = -1
    waited_ms: int = 0
    generated_ms: int = 0
    step: int = 0
    routes: npt.NDArray[Any] | None = None


Engine = Callable[[Call], Awaitable[EngineAnswer]]
OnDraft = Callable[[int, dict[str, str]], None]  # the number of an answer, and the new text in the parts of its message


@dataclass(frozen=True)
class Settings:
    """The keys of [agents] and [generation] that bind an episode, or a seat of it. `salt`: that of its tree; `stays`:
    all calls go to the engine of the first, since others of its kind answer with other weights."""

    max_new_tokens: int
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    parallel: int = 8
    retry_s: float = 600.0
    linger_s: float = 5.0
    temperature: float = 1.0
    top_p: float = 1.0
    salt: int = 0
    stays: bool = False


@dataclass(frozen=True)
class Question:
    """A request as ids: the `new` ones behind `parent`, and what is needed to make messages of its answers."""

    request: ChatRequest | CompleteRequest
    parent: Turn | None
    new: Ids | Sequence[int]
    history: Conversation | None = None
    text: str | None = None  # of the new ids, where a template wrote them
    tools: Sequence[Any] = ()


@dataclass
class Delivery:
    """The answers to one request. Whoever hands them over calls `delivered`; otherwise they are not trained."""

    turns: list[Turn]

    def delivered(self) -> None:
        for turn in self.turns:
            turn.delivered = True


# -- retries of requests ----------------------------------


@dataclass(eq=False)
class Exchange:
    """A request, and its answer once that is there. `waiting`: clients that wait for it; `delivered_at`: when a client
    last got it, None before."""

    key: bytes
    answer: asyncio.Future[tuple[Delivery, Response]]
    waiting: int = 0
    delivered_at: float | None = None
    giving_up: asyncio.TimerHandle | None = None  # since the last of its clients has gone

    def useful(self, since: float) -> bool:
        """True if the request did not fail, and its answer was not delivered before `since`."""
        failed = self.answer.done() and (self.answer.cancelled() or self.answer.exception() is not None)
        return not failed and (self.delivered_at is None or self.delivered_at >= since)


class Retries:
    """Finds the earlier request that a client's retry repeats: one with the same body. An answer is kept for `keep_s`
    after its delivery; one that nobody got is kept until it fails."""

    def __init__(self, keep_s: float = 600.0) -> None:
        self._keep_s = keep_s
        self._exchanges: list[Exchange] = []

    def first(self, key: bytes, answer: asyncio.Future[tuple[Delivery, Response]]) -> Exchange:
        """Add a request that is no retry. The same body may come several times on purpose: each gets its own answer."""
        self._exchanges.append(Exchange(key, answer))
        return self._exchanges[-1]

    def again(self, key: bytes, now: float) -> Exchange | None:
        """The request that a retry repeats: one whose clients have gone, else one that nobody got yet, else the newest;
        None if there is none."""
        self._exchanges = [exchange for exchange in self._exchanges if exchange.useful(now - self._keep_s)]
        copies = [exchange for exchange in self._exchanges if exchange.key == key]
        undelivered = [exchange for exchange in copies if exchange.delivered_at is None]
        candidates = [*(exchange for exchange in undelivered if not exchange.waiting), *undelivered, *copies[-1:]]
        return candidates[0] if candidates else None

    @property
    def waiting(self) -> int:
        """The number of clients that wait for answers."""
        return sum(exchange.waiting for exchange in self._exchanges)

    def remove(self, request: Exchange) -> None:
        """Forget a request without an answer: a retry of it is a new request."""
        self._exchanges.remove(request)


class OwnTime:
    """The time in which none of an episode's calls waits or generates, and a `gate` through which at most `parallel` of
    them go at once."""

    def __init__(self, parallel: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.gate = clock, asyncio.Semaphore(parallel)
        self._calls, self._own_s, self._since = 0, 0.0, clock()

    @property
    def busy(self) -> bool:
        return self._calls > 0

    def seconds(self) -> float:
        return self._own_s + (0.0 if self._calls else self.clock() - self._since)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Count the time inside as that of a call."""
        if not self._calls:
            self._own_s += self.clock() - self._since
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._since = self.clock()


class Episode:
    """The calls of one episode, or of a seat of it. `counts`: tool calls that were not parsed (`unparsed`), requests
    that were `refused`, those that `joined` an earlier one, and calls that another engine answered than the one they
    stay with (`opponent_switched`). `seats`: by name the parts of the episode, of which this is the first; `openai` and
    `keys` (of the seats, where there are several): how clients over HTTP reach it."""

    def __init__(self, uid: int, engine: Engine, renderer: Renderer, maker: MessageMaker, settings: Settings,
                 clock: Callable[[], float] = time.monotonic, seat: Seat = ONLY, own: OwnTime | None = None,
                 others: Sequence[Episode] = ()) -> None:
        """`others`: the episode's further seats, with the same `own` time."""
        self.uid, self.tree, self.counts = uid, Tree(settings.limits, settings.salt), Counter[str]()
        self.seat, self.seats = seat, {seat.name: self, **{other.seat.name: other for other in others}}
        self.settings, self.renderer = settings, renderer
        self._engine, self._maker = engine, maker
        self._own = own or OwnTime(settings.parallel, clock)
        self._freed = asyncio.Event()  # a call has ended: there may be more room
        self._engines: dict[int, int] = {}  # number of a turn -> its engine
        self._stays_with = -1  # the engine of all calls, where there is one
        self._retries = Retries(settings.retry_s)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.openai: dict[str, str] = {}  # base_url and api_key, where a door is open to it
        self.keys: dict[str, str] = {}
        self.closed = False
        self._on_close: Callable[[], None] = lambda: None
        self._on_unanswered: Callable[[CallUnanswered], None] = lambda problem: None
        for other in others:
            other.on_unanswered(self.unanswered)

    def reached_by(self, openai: dict[str, str], on_close: Callable[[], None],
                   keys: dict[str, str] | None = None) -> None:
        """Set the `base_url` and `api_key` by which clients reach the episode until it is closed, and the `keys` of its
        seats."""
        self.openai, self._on_close, self.keys = openai, on_close, keys or {}

    @property
    def places(self) -> list[Seat]:
        """The seats in their order."""
        return [one.seat for one in self.seats.values()]

    @property
    def spoke(self) -> set[str]:
        """The seats whose calls got an answer that is kept."""
        return {name for name, one in self.seats.items() if any(turn.kept for turn in one.tree.turns)}

    def on_unanswered(self, listener: Callable[[CallUnanswered], None]) -> None:
        """Set the function that is called when engines leave a call unanswered."""
        self._on_unanswered = listener

    def unanswered(self, problem: CallUnanswered) -> None:
        self._on_unanswered(problem)

    # -- requests -----

    async def answer(self, request: Request, on_draft: OnDraft | None = None) -> tuple[Delivery, Response]:
        """Answer a request; a refusal is a response too. The caller calls `delivered` on the delivery. `on_draft` gets
        the text as it is drawn, where no tools are offered; the message in the answer counts."""
        try:
            if isinstance(request, RewardRequest):
                self.reward(request)
                return Delivery([]), Choices([])
            with self.at_work():
                delivery = await self._several(await self._question(request), on_draft)
            return delivery, Choices([choice_of(turn) for turn in delivery.turns])
        except CallRefused as refused:
            self.counts["refused"] += 1
            return Delivery([]), Refusal(refused.code, str(refused), refused.param)

    async def answer_once(self, body: bytes, retried: bool, request: Request,
                          on_draft: OnDraft | None = None) -> tuple[Delivery, Response]:
        """Answer a request of a client over HTTP, which may ask again: with `retried` the same `body` gets the answer
        to the request that it repeats, if there is one, without a draft. A client that goes away cancels this call."""
        key = hashlib.blake2b(body, digest_size=16).digest()
        exchange = self._retries.again(key, self._own.clock()) if retried else None
        self.counts["joined"] += exchange is not None
        if exchange is None:
            exchange = self._retries.first(key, self._started(self.answer(request, on_draft)))
        if exchange.giving_up:
            exchange.giving_up.cancel()
        exchange.waiting += 1
        try:
            delivery, response = await asyncio.shield(exchange.answer)
        finally:
            exchange.waiting -= 1
            if not exchange.waiting and not exchange.answer.done():
                later = asyncio.get_running_loop().call_later
                exchange.giving_up = later(self.settings.linger_s, self._give_up, exchange)
        exchange.delivered_at = self._own.clock()
        return delivery, response

    def close(self) -> None:
        """Cancel the calls under way; the trees keep the answered ones."""
        if not self.closed:
            self.closed = True
            self._on_close()
        for task in list(self._tasks):
            task.cancel()
        for other in self.seats.values():
            if other is not self:
                other.close()

    @property
    def busy(self) -> bool:
        return self._own.busy

    @property
    def waiting(self) -> int:
        """The number of clients over HTTP that wait for answers."""
        return sum(one._retries.waiting for one in self.seats.values())

    def own_s(self) -> float:
        """Seconds in which none of the episode's calls waited or generated."""
        return self._own.seconds()

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        """Count the time inside as that of a call, not as the episode's own."""
        return self._own.stopped()

    def _give_up(self, exchange: Exchange) -> None:
        if not exchange.answer.done():
            exchange.answer.cancel()
            self._retries.remove(exchange)

    def _started(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- calls -----

    async def _question(self, request: ChatRequest | CompleteRequest) -> Question:
        if isinstance(request, ChatRequest):
            size = sum(map(len, request.messages)) + len(request.tools) + len(request.arguments)
            require_some_fit(self.settings.limits.context, len(request.messages), size)
            return await beside(size, self._chat, request)
        prompt = request.prompt
        parts, size = (len(prompt), 0) if isinstance(prompt, list) else (1, len(prompt))
        require_some_fit(self.settings.limits.context, parts, size)
        return await beside(max(parts, size), self._completion, request)

    def _chat(self, request: ChatRequest) -> Question:
        history = self.tree.read(request.messages, request.tools, request.arguments)
        tools = msgspec.json.decode(request.tools) or []
        arguments = msgspec.json.decode(request.arguments) or {}
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise CallRefused("invalid", "tools must be a list of objects", "tools")
        if not isinstance(arguments, dict):
            raise CallRefused("invalid", "arguments of the template must be an object", "chat_template_kwargs")
        prompted = self.renderer.prompt(self.tree, history, tools, arguments)
        return Question(request, prompted.parent, prompted.new, history, prompted.text, tools)

    def _completion(self, request: CompleteRequest) -> Question:
        text_or_ids = request.prompt
        ids = text_or_ids if isinstance(text_or_ids, list) else self.renderer.encode(text_or_ids)
        most = self.renderer.vocabulary
        if wrong := next((f"{token}" for token in ids if not 0 <= token < most), ""):
            raise CallRefused("invalid", f"prompt: the token id {wrong} must be from 0 to {most - 1}", "prompt")
        prompt = np.array(ids, np.int32)
        parent = self.tree.match_ids(prompt)
        return Question(request, parent, prompt[parent.end if parent else 0 :])

    async def _several(self, question: Question, on_draft: OnDraft | None) -> Delivery:
        count, most = question.request.n, question.request.max_tokens
        if not 1 <= count <= MOST_ANSWERS:
            raise CallRefused("invalid", f"n = {count}: must be 1 to {MOST_ANSWERS}", "n")
        if most < 0:
            raise CallRefused("invalid", f"max_tokens = {most}: must be at least 1", "max_tokens")
        if fault := fault_of_key(question.request.key):
            raise CallRefused("invalid", fault, "key")
        wanted = min(most or self.settings.max_new_tokens, self.settings.max_new_tokens)
        if count > 1:  # there is room for all, or none is begun
            await self._room(question, wanted, count)
            wanted = self.tree.room(question.parent, len(question.new), wanted, count)
            if wanted < 1:
                raise self.tree.used_up(question.parent, len(question.new))
        drafts = on_draft if not question.tools else None
        listener = partial(listener_of, self.renderer, self._maker, question, drafts) if drafts else None
        calls = [
            self._started(self._call(question, wanted, listener(place) if listener else None)) for place in range(count)
        ]
        try:
            return Delivery(list(await asyncio.gather(*calls)))
        finally:
            for call in calls:
                call.cancel()

    async def _call(self, question: Question, wanted: int, on_ids: Callable[[list[int]], None] | None) -> Turn:
        parent = question.parent
        async with self._own.gate:
            await self._room(question, wanted)
            call = self.tree.ask(parent, question.new, wanted, question.history, question.text,
                                 question.request.trained, question.request.key)
            try:
                near = self._near(parent)
                read = parent.end - 1 if parent else 0
                answer = await self._engine(Call(self.uid, call.stream, call.prompt, call.room, near, on_ids, read))
                self._answered_by(answer.engine, near)
                return self._settle(question, call, answer)
            except BaseException:
                self.tree.cancel(call)
                raise
            finally:
                freed, self._freed = self._freed, asyncio.Event()
                freed.set()

    def _near(self, parent: Turn | None) -> int:
        """The engine that a call is offered to first; -1 for any."""
        if self.settings.stays:
            return self._stays_with
        return self._engines.get(parent.number, -1) if parent else -1

    def _answered_by(self, engine: int, near: int) -> None:
        """Go on with the engine of the first call, or with the one that had to answer in its place."""
        if self.settings.stays:
            self.counts["opponent_switched"] += 0 <= near != engine
            if self._stays_with in (-1, near):
                self._stays_with = engine

    async def _room(self, question: Question, wanted: int, n: int = 1) -> None:
        """Wait while calls under way hold room that this question could use after them."""
        parent, new = question.parent, len(question.new)
        full = min(wanted, self.settings.limits.context - new - (parent.end if parent else 0))
        while self.tree.open and 0 < full > self.tree.room(parent, new, wanted, n):
            await self._freed.wait()

    def _settle(self, question: Question, call: OpenCall, answer: EngineAnswer) -> Turn:
        stops = question.request.stop
        text, end = self.renderer.text_and_end(answer.ids)
        if stopped := any(stop in text for stop in stops):
            answer, text, end = until(self.renderer, answer, stops)
        message, unparsed = {"role": "assistant", "content": text}, 0
        if question.history is not None:
            message, unparsed = self._maker.message(text, question.text or "", question.tools, call.number)
        turn = self.tree.answer(call, answer.ids, answer.logprobs, answer.versions, answer.finish, message, text, end,
                                answer.waited_ms, answer.generated_ms, answer.step, answer.routes)
        turn.stopped = stopped
        self.counts["unparsed"] += unparsed
        self._engines[turn.number] = answer.engine
        return turn

    def reward(self, request: RewardRequest) -> None:
        """Add a reward to a turn. CallRefused if the episode has no such turn, or if the sum cannot be kept."""
        turn = next((turn for turn in self.tree.turns if turn.number == request.turn), None)
        if turn is None:
            raise CallRefused("invalid", f"turn {request.turn}: this episode has no such turn", "turn")
        reward = (turn.reward or 0.0) + request.value
        if not abs(reward) <= LARGEST_REWARD:
            raise CallRefused("invalid", f"turn {request.turn}: its reward would be {reward:g}, which no float32 holds",
                              "value")
        turn.reward = reward


async def beside(size: int, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function and return its result. For input of a large `size` it runs in one of few threads, so that the
    loop goes on with the requests of others."""
    if size < LONG_BYTES:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *arguments)


def until(renderer: Renderer, answer: EngineAnswer, stops: Sequence[str]) -> tuple[EngineAnswer, str, str]:
    """The answer up to the id that completes a stop text, the text before that, and no end. The client's rule cuts
    the answer as a limit does: ids behind it are not part of the turn."""
    def text(count: int) -> str:
        return renderer.text_and_end(answer.ids[:count])[0]

    def ended(count: int) -> bool:
        return any(stop in text(count) for stop in stops)

    count = bisect.bisect_left(range(len(answer.ids)), True, 1, key=ended)
    drawn = text(count)
    before = drawn[: min(drawn.find(stop) for stop in stops if stop in drawn)]
    routes = None if answer.routes is None else answer.routes[: len(answer.routes) - len(answer.ids) + count]
    cut = replace(answer, ids=answer.ids[:count], logprobs=answer.logprobs[:count],
                   versions=answer.versions[:count], finish=int(Finish.LENGTH), routes=routes)
    return cut, before, ""


def listener_of(renderer: Renderer, maker: MessageMaker, question: Question, on_draft: OnDraft, place: int
                ) -> Callable[[list[int]], None]:
    """A listener for the ids of an answer that is not complete."""
    ids: list[int] = []
    draft = Draft(maker, question.history is not None, question.text or "", question.request.stop)

    def listen(more: list[int]) -> None:
        ids.extend(more)
        if new := draft.more(renderer.text_and_end(ids)[0]):
            on_draft(place, new)

    return listen


def partner_versions(episode: Episode) -> dict[str, list[int]]:
    """The versions of other models than that of the first seat that answered, by their tags."""
    versions: dict[str, set[int]] = {}
    for one in episode.seats.values():
        if one.seat.tag != episode.seat.tag:
            found = versions.setdefault(one.seat.tag, set())
            found.update(*(turn.versions.tolist() for turn in one.tree.turns))
    return {tag: sorted(found) for tag, found in versions.items() if found}


def choice_of(turn: Turn) -> Choice:
    return Choice(
        msgspec.Raw(msgspec.json.encode(turn.message)), turn.text, turn.ids.tolist(), finish_reason(turn), turn.number,
        int(turn.versions[-1]), turn.begin,
    )


def finish_reason(turn: Turn) -> str:
    """OpenAI's name for the end of a turn. A limit that cut it counts as "length", even behind complete tool calls."""
    if turn.finish != Finish.EOS and not turn.stopped:
        return "length"
    return "tool_calls" if turn.message.get("tool_calls") else "stop"


def require_some_fit(context: int, parts: int, size: int) -> None:
    """Refuse what is far too long before a template or tokenizer works on it for seconds: `parts`, each at least one
    id, of `size` bytes in all."""
    if parts > context or size > context * ID_BYTES:
        raise CallRefused("context_length_exceeded", f"This model's maximum context length is {context} tokens; "
                          f"{parts} parts of {size} bytes do not fit (agents.context)", "messages")
