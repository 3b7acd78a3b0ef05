"""The model as the code of an episode sees it, and the ways in which an episode ends.

    async def episode(task: dict, llm: Llm) -> float | dict[str, float]: ...  # llm["judge"] is another seat

`Llm` turns calls into requests for `busrl.agents.episode`, in this process or in another: requests and replies are
plain structures that fit through a pipe. Knows nothing of trees, slots or processes.

- A reply is an OpenAI message, ready to be appended to the messages.
- A call that is not answered raises `CallRefused`, which the episode may handle.
- An episode ends with a reward as a reward function returns it, or with one for each seat (`busrl.agents.seats`), by
  `Failed` or `Again`, used up, or by another exception.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Literal

import msgspec

from busrl.agents.seats import ONLY, Seat, Worth, seat_of, settled
from busrl.errors import CallRefused, UserError, cause
from busrl.rewards.base import MalformedReward, settle

TEXT_LIMIT = 2000


class Failed(Exception):
    """Raised by an episode to end with this reward; it is trained like any other."""

    def __init__(self, reward: float | Mapping[str, float | Mapping[str, float]], why: str = "") -> None:
        self.reward = reward
        super().__init__(why)


class Again(Exception):
    """Raised by an episode that failed through no fault of the model. It begins again from the start."""


# -- requests and responses -------------------------------


class ChatRequest(msgspec.Struct, tag="chat"):
    """Messages, tools and arguments of the template as JSON; `n` answers of at most `max_tokens` (0: the run's own)."""

    messages: list[msgspec.Raw]
    tools: msgspec.Raw = msgspec.Raw(b"null")
    arguments: msgspec.Raw = msgspec.Raw(b"null")
    n: int = 1
    max_tokens: int = 0
    trained: bool = True
    stop: list[str] = []  # texts that end an answer; ids drawn behind one are thrown away
    key: str = ""  # what the turn is compared by (learner.credit = "turn")


class CompleteRequest(msgspec.Struct, tag="complete"):
    """A text or token ids, to be continued without a template."""

    prompt: str | list[int]
    n: int = 1
    max_tokens: int = 0
    trained: bool = True
    stop: list[str] = []
    key: str = ""


class RewardRequest(msgspec.Struct, tag="reward"):
    turn: int
    value: float


Request = ChatRequest | CompleteRequest | RewardRequest


class Choice(msgspec.Struct):
    """An answer: an OpenAI message as JSON, its text without its end token, its ids, and how it ended."""

    message: msgspec.Raw
    text: str
    ids: list[int]
    finish_reason: str
    turn: int
    version: int
    prompt_tokens: int


class Refusal(msgspec.Struct, tag="refusal"):
    """The fields of a `CallRefused`."""

    code: str
    text: str
    param: str = ""


class Choices(msgspec.Struct, tag="choices"):
    """The answers to a request: as many as it asked for."""

    choices: list[Choice]


Response = Choices | Refusal
Ask = Callable[[Request], Awaitable[Response]]


# -- the model, as an episode sees it ---------------------


class Reply(dict[str, Any]):
    """A message of the model, with the data of its turn."""

    finish_reason: str = ""  # stop, tool_calls, length
    turn: int = -1  # number of the call in its episode
    version: int = 0  # of the weights that drew its last token
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Llm:
    """The model of the run, for one episode; in a run of several, the model in the first seat, and `llm[name]` that in
    another. `task`: the line of the data; `uid`: the number of the episode; `version`: the policy version of the newest
    answer."""

    def __init__(self, ask: Ask, task: dict[str, Any], trained: bool = True, uid: int = 0,
                 openai: Mapping[str, str] | None = None, seat: Seat = ONLY,
                 others: Mapping[str, Llm] | None = None) -> None:
        """`others`: the models of all seats by name, where there are several."""
        self._ask, self.task, self._trained, self.uid, self._openai = ask, task, trained, uid, openai or {}
        self._seat, self._others = seat, others
        self.version, self._newest = 0, -1

    def __getitem__(self, name: str) -> Llm:
        """The model in the seat of this name, or in the only seat of the tag of this name."""
        by_name = {self._seat.name: self} if self._others is None else self._others
        return by_name[seat_of([other._seat for other in by_name.values()], name).name]

    @property
    def seats(self) -> tuple[str, ...]:
        """The names of all seats, this run's first one first."""
        return (self._seat.name,) if self._others is None else tuple(self._others)

    @property
    def tag(self) -> str:
        """The tag of the model in this seat; empty in a run of one model."""
        return self._seat.tag

    @property
    def trained(self) -> bool:
        """Tell whether the turns of this model are trained."""
        return self._trained and self._seat.trained

    async def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, n: int = 1,
                   max_tokens: int = 0, template_arguments: Mapping[str, Any] | None = None,
                   stop: Sequence[str] = (), key: str = "") -> Any:
        """The model's answer to OpenAI's messages, a `Reply`; with `n` above 1 a list of them. A text of `stop` ends
        the answer, and is left out. `key`: the turn is compared with those of other episodes that have this key."""
        raw = [_json(message, "messages") for message in messages]
        around = (_json(tools or None, "tools"), _json(template_arguments or None, "template_arguments"))
        named = _text(key, "key")
        choices = await self._choices(ChatRequest(raw, *around, n, max_tokens, self._trained, list(stop), named))
        replies = [_reply(choice) for choice in choices]
        return replies if n > 1 else replies[0]

    async def complete(self, prompt: str | Sequence[int], n: int = 1, max_tokens: int = 0,
                       stop: Sequence[str] = (), key: str = "") -> Any:
        """The model's continuation of a text or token ids, a `Choice`; with `n` above 1 a list of them."""
        text_or_ids = _text(prompt, "prompt") if isinstance(prompt, str) else [int(token) for token in prompt]
        named = _text(key, "key")
        choices = await self._choices(CompleteRequest(text_or_ids, n, max_tokens, self._trained, list(stop), named))
        return choices if n > 1 else choices[0]

    async def reward(self, value: float, turn: int | None = None) -> None:
        """Add a reward to the newest turn, or to the turn of this number (`Reply.turn`)."""
        number, _ = settle(value)
        await self._choices(RewardRequest(self._newest if turn is None else turn, number))

    @property
    def openai(self) -> dict[str, str]:
        """`base_url` and `api_key` for any OpenAI client, whose calls are turns of this episode."""
        if not self._openai:
            raise UserError('llm.openai needs the package aiohttp: pip install "busrl[agents]"')
        return dict(self._openai)

    def untrained(self) -> Llm:
        """A view of this model for turns that are not trained, such as those of a judge or an opponent."""
        return Llm(self._ask, self.task, False, self.uid, self._openai, self._seat, self._others)

    async def _choices(self, request: Request) -> list[Choice]:
        response = await self._ask(request)
        if isinstance(response, Refusal):
            raise CallRefused(response.code, response.text, response.param)
        for choice in response.choices:
            if choice.turn > self._newest:
                self._newest, self.version = choice.turn, choice.version
        return response.choices


def seated(ask: Callable[[str, Request], Awaitable[Response]], task: dict[str, Any], uid: int, seats: Sequence[Seat],
           openai: Mapping[str, Mapping[str, str]]) -> Llm:
    """The model in the first of these seats; by name it gives those in the others. `ask` gets the name of a seat;
    `openai` is that of each."""
    by_name: dict[str, Llm] = {}
    for seat in seats:
        by_name[seat.name] = Llm(partial(ask, seat.name), task, True, uid, openai.get(seat.name), seat, by_name)
    return by_name[seats[0].name]


def _json(value: Any, param: str) -> msgspec.Raw:
    """Write a value as JSON; objects of clients' libraries, nested ones too, as their `model_dump` has them."""
    try:
        return msgspec.Raw(msgspec.json.encode(value, enc_hook=_dumped))
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise CallRefused("invalid", f"{param} can not be written as JSON: {problem}", param) from None


def _dumped(value: Any) -> Any:
    if dump := getattr(value, "model_dump", None):
        return dump(exclude_none=True)
    raise TypeError(f"{type(value).__name__} is no type of JSON")


def _text(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise CallRefused("invalid", f"{param} holds half of a character: {problem}", param) from None
    except AttributeError:
        raise CallRefused("invalid", f"{param} is a {type(text).__name__}: must be a text", param) from None
    return text


def _reply(choice: Choice) -> Reply:
    reply = Reply(msgspec.json.decode(choice.message))
    reply.finish_reason, reply.turn, reply.version = choice.finish_reason, choice.turn, choice.version
    reply.prompt_tokens, reply.completion_tokens = choice.prompt_tokens, len(choice.ids)
    return reply


# -- the end of an episode --------------------------------

How = Literal["returned", "failed", "again", "used_up", "raised", "malformed", "hung", "crashed"]


class Ended(msgspec.Struct):
    """The end of an episode. `reward` and its `parts` count where the episode judged itself (returned, failed); `text`:
    the reason of all other ends; `seats`: what each seat got, where that is not the same. The pool decides on the last
    two: the episode took too long (hung), or its process died (crashed)."""

    how: How
    reward: float = 0.0
    parts: dict[str, float] = {}
    text: str = ""
    seats: dict[str, Worth] = {}


async def play(function: Callable[..., Any], task: dict[str, Any], llm: Llm, threads: Executor | None = None,
               seats: Sequence[Seat] = (ONLY,)) -> Ended:
    """Run an episode to its end. A function that does not await runs in one of the `threads` (None: the few of the
    loop), with a `Blocking` as its `llm`. Cancelling this call cancels the episode; any other exception, SystemExit
    included, is the episode's end."""
    try:
        if blocking(function):
            loop = asyncio.get_running_loop()
            run = contextvars.copy_context().run
            result = await loop.run_in_executor(threads, run, function, task, Blocking(llm, loop))
        else:
            result = await function(task, llm)
        return judged("returned", result, seats=seats)
    except Failed as failed:
        return judged("failed", failed.reward, str(failed), seats)
    except Again as problem:
        return Ended("again", text=str(problem)[:TEXT_LIMIT])
    except CallRefused as refused:
        how: How = "used_up" if refused.code == "context_length_exceeded" else "raised"
        return Ended(how, text=str(refused)[:TEXT_LIMIT])
    except MalformedReward as problem:  # of a turn
        return Ended("malformed", text=str(problem)[:TEXT_LIMIT])
    except asyncio.CancelledError:
        raise
    except BaseException as problem:
        return Ended("raised", text=f"{cause(problem)[:TEXT_LIMIT]}\n{traceback.format_exc()[-TEXT_LIMIT:]}")


def blocking(function: Callable[..., Any]) -> bool:
    """True for a function that does not await, and so needs a thread."""
    awaits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return not awaits


def judged(how: How, reward: Any, why: str = "", seats: Sequence[Seat] = (ONLY,)) -> Ended:
    """An end with this reward, or with one for each of several `seats`; malformed if it is no reward."""
    try:
        same, parts, each = settled(reward, seats)
        return Ended(how, same, parts, why[:TEXT_LIMIT], each)
    except MalformedReward as problem:
        return Ended("malformed", text=str(problem)[:TEXT_LIMIT])


class Blocking:
    """`Llm` for code that does not await: each call waits for its answer, in the thread of the episode."""

    def __init__(self, llm: Llm, loop: asyncio.AbstractEventLoop) -> None:
        self._llm, self._loop = llm, loop

    def __getattr__(self, name: str) -> Any:
        """`task`, `uid`, `version`, `seats` and `openai`."""
        return getattr(self._llm, name)

    def __getitem__(self, name: str) -> Blocking:
        return Blocking(self._llm[name], self._loop)

    def chat(self, *arguments: Any, **options: Any) -> Any:
        return self._wait(self._llm.chat(*arguments, **options))

    def complete(self, *arguments: Any, **options: Any) -> Any:
        return self._wait(self._llm.complete(*arguments, **options))

    def reward(self, value: float, turn: int | None = None) -> None:
        self._wait(self._llm.reward(value, turn))

    def untrained(self) -> Blocking:
        return Blocking(self._llm.untrained(), self._loop)

    def _wait(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()
