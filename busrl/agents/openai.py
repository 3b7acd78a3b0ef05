"""Bodies of OpenAI's and vLLM's routes as requests of an episode, and turns as their answers. Pure.

Talks to nothing. Knows nothing of HTTP, keys or episodes: `busrl.agents.http` carries these bodies.

- A request for another sampling distribution than the sample's is refused, or overridden and counted
  (`agents.sampling`): the learner's ratios hold for the sample's distribution.
- Unknown fields are ignored, as OpenAI's servers do; a field of the wrong type is refused by its name.
- `usage` counts the whole path that the model read, and what it wrote: clients compact their histories by it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from busrl.agents.episode import finish_reason
from busrl.agents.llm import ChatRequest, CompleteRequest
from busrl.agents.tree import Turn
from busrl.errors import CallRefused

MOST_STOPS, LONGEST_STOP = 16, 256
Sent = Mapping[int, Mapping[str, str]]  # by choice: the text of each part of its message that a stream has sent
Sampling = tuple[str, float, float]  # a rule of agents.sampling, temperature and top-p of the sample


class Body(msgspec.Struct):
    """The fields of all routes of calls."""

    model: str = ""
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    structured_outputs: Any = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    busrl_key: str = ""  # of the turn (`busrl.agents.llm.ChatRequest.key`)


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: list[msgspec.Raw] = []
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.Raw(b"null")
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None


class PromptIds(msgspec.Struct):
    """A prompt as vLLM's own server takes it."""

    prompt_token_ids: list[int]


class CompletionBody(Body):
    """`POST /v1/completions`, and `POST /generate` of vLLM's own server, which clients of atroposlib ask."""

    prompt: str | list[Any] | PromptIds = ""  # a text, token ids, or a list of one of these
    logprobs: int | bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class GenerateBody(msgspec.Struct):
    """`POST /inference/v1/generate`, vLLM's route of token ids."""

    token_ids: list[int]
    sampling_params: CompletionBody = msgspec.field(default_factory=CompletionBody)
    model: str = ""

    def completion(self) -> CompletionBody:
        """The body of `/v1/completions` with the same meaning, not streamed."""
        model = self.model or self.sampling_params.model
        return msgspec.structs.replace(self.sampling_params, prompt=self.token_ids, stream=None, model=model)


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`: a prompt, or messages."""

    prompt: str = ""
    messages: list[msgspec.Raw] = []
    tools: msgspec.Raw = msgspec.Raw(b"null")
    add_generation_prompt: bool = True
    model: str | None = None


class DetokenizeBody(msgspec.Struct):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


def read(body: bytes, kind: type[Any]) -> Any:
    """Read a body as this type; CallRefused names the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as problem:
        where = re.search(r"\$\.?([^`\s]*)", str(problem))
        param = re.split(r"[.\[]", where[1])[0] if where else ""
        raise CallRefused("invalid", f"{param or 'the body'}: {problem}", param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise CallRefused("invalid", f"the body is not JSON: {problem}") from None
    except RecursionError:
        raise CallRefused("invalid", "the body is nested too deeply") from None


# -- requests ---------------------------------------------


def chat_request(body: ChatBody, sampling: Sampling) -> tuple[ChatRequest, bool]:
    """The request of a body, and whether its sampling parameters were overridden."""
    for name, allowed in (("functions", None), ("function_call", None), ("modalities", ["text"])):
        if getattr(body, name) not in (None, allowed):
            raise CallRefused("unsupported", f"{name} is not supported here: use tools, and text", name)
    choice = body.tool_choice
    if choice not in (None, "auto", "none"):
        raise CallRefused("unsupported", 'tool_choice: only "auto" and "none": a forced call changes the distribution '
                          "that is trained", "tool_choice")
    if body.top_logprobs:
        raise CallRefused("unsupported", "top_logprobs: only 0: engines keep the drawn token's alone", "top_logprobs")
    changed = _sampling(body, sampling)
    tools = msgspec.Raw(b"null") if choice == "none" else body.tools
    return ChatRequest(body.messages, tools, body.chat_template_kwargs, **_common(body)), changed


def complete_request(body: CompletionBody, sampling: Sampling) -> tuple[CompleteRequest, bool]:
    """The request of a body with a text or token ids, as `chat_request` for messages."""
    for name in ("echo", "suffix", "best_of"):
        if getattr(body, name) not in (None, False, "", 1):
            raise CallRefused("unsupported", f"{name} is not supported", name)
    changed = _sampling(body, sampling)
    return CompleteRequest(_prompt(body.prompt), **_common(body)), changed


def wants_numbers(body: Body) -> bool:
    """True if the answer carries data for each token: a stream then brings it whole."""
    return bool(body.return_token_ids) or getattr(body, "logprobs", None) not in (None, False)


def _prompt(prompt: Any) -> str | list[int]:
    """A text or token ids, from themselves or from a list with nothing else."""
    if isinstance(prompt, PromptIds):
        return prompt.prompt_token_ids
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) != 1:
            raise CallRefused("unsupported", f"prompt: {len(prompt)} prompts; ask for one at a time", "prompt")
        prompt = prompt[0]
    if (isinstance(prompt, list) and all(type(token) is int for token in prompt)) or isinstance(prompt, str):
        checked: str | list[int] = prompt
        return checked
    raise CallRefused("invalid", "prompt: must be a text or a list of token ids", "prompt")


def _common(body: Body) -> dict[str, Any]:
    """The fields of requests of both kinds."""
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted is not None and wanted < 1:
        raise CallRefused("invalid", f"max_tokens = {wanted}: must be at least 1", "max_tokens")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MOST_STOPS or any(not 1 <= len(stop) <= LONGEST_STOP for stop in stops):
        raise CallRefused("invalid", f"stop: at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters", "stop")
    return {"n": 1 if body.n is None else body.n, "max_tokens": wanted or 0, "stop": stops, "key": body.busrl_key}


def _sampling(body: Body, sampling: Sampling) -> bool:
    """True if the request wants another distribution than the sample's; CallRefused where the rule forbids that."""
    rule, temperature, top_p = sampling
    for name in ("response_format", "guided_json", "guided_regex", "structured_outputs"):
        wanted = getattr(body, name)
        if wanted is not None and not (isinstance(wanted, dict) and wanted.get("type") == "text"):
            raise CallRefused("unsupported", f"{name} changes the distribution that is trained", name)
    sample = {"temperature": temperature, "top_p": top_p, "presence_penalty": 0, "frequency_penalty": 0,
           "repetition_penalty": 1, "top_k": 0, "min_p": 0, "logit_bias": {}}
    other = [name for name, value in sample.items()
             if (wanted := getattr(body, name)) not in (None, value) and not (name == "top_k" and wanted == -1)]
    if other and rule == "refuse":
        name = other[0]
        rule = f'samples are drawn with {sample[name]} (agents.sampling = "refuse")'
        raise CallRefused("unsupported", f"{name} = {getattr(body, name)}: {rule}", name)
    return bool(other)


# -- answers ----------------------------------------------


@dataclass(frozen=True)
class Answers:
    """The turns of one request, in the shapes of its routes. `text_of` returns the text of ids."""

    turns: Sequence[Turn]
    body: Body
    model: str
    number: int
    text_of: Callable[[Sequence[int]], str]

    def usage(self) -> dict[str, int]:
        read, wrote = self.turns[0].begin, sum(len(turn.ids) for turn in self.turns)
        return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}

    def head(self, kind: str, prefix: str) -> dict[str, Any]:
        return {"id": f"{prefix}-{self.number}", "object": kind, "created": int(time.time()),
                "model": self.body.model or self.model}

    def chat(self) -> dict[str, Any]:
        turns = enumerate(self.turns)
        choices = [{"index": place, "message": turn.message, **self._more(turn)} for place, turn in turns]
        return {**self.head("chat.completion", "chatcmpl"), "choices": choices, "usage": self.usage(), **self._ids(),
                "busrl": self.about(self.turns[-1])}

    def piece(self, place: int, new: Mapping[str, str], first: bool, chat: bool) -> dict[str, Any]:
        """A chunk with text that was drawn before the answer was complete."""
        if not chat:
            choice = {"index": place, "text": new["content"], "finish_reason": None, "logprobs": None}
            return {**self.head("text_completion", "cmpl"), "choices": [choice]}
        delta = {"role": "assistant", **new} if first else dict(new)
        head = self.head("chat.completion.chunk", "chatcmpl")
        return {**head, "choices": [{"index": place, "delta": delta, "finish_reason": None, "logprobs": None}]}

    def chunks(self, sent: Sent) -> Iterator[dict[str, Any]]:
        """An answer as chunks of a stream: for each choice the text that was not sent before, then its end."""
        head = self.head("chat.completion.chunk", "chatcmpl")
        for place, turn in enumerate(self.turns):
            calls = [{**call, "index": at} for at, call in enumerate(turn.message.get("tool_calls") or [])]
            delta = {**turn.message, "tool_calls": calls} if calls else turn.message
            if before := sent.get(place):
                delta = {name: text[len(before.get(name, "")) :] for name, text in delta.items() if name != "role"}
            more = self._more(turn)
            reason = more.pop("finish_reason")
            yield {**head, "choices": [{"index": place, "delta": delta, "finish_reason": None, **more}]}
            about = self.about(turn)
            yield {**head, "choices": [{"index": place, "delta": {}, "finish_reason": reason}], "busrl": about}
        yield from self._usage_chunk(head)

    def completion(self) -> dict[str, Any]:
        return {**self.head("text_completion", "cmpl"), "choices": [*self._texts()], "usage": self.usage(),
                **self._ids(), "busrl": self.about(self.turns[-1])}

    def completion_chunks(self, sent: Sent) -> Iterator[dict[str, Any]]:
        head = self.head("text_completion", "cmpl")
        for choice in self._texts():
            before = sent.get(choice["index"], {}).get("content", "")
            yield {**head, "choices": [{**choice, "text": choice["text"][len(before) :]}]}
        yield from self._usage_chunk(head)

    def generated(self) -> dict[str, Any]:
        choices = [{"index": place, "token_ids": turn.ids.tolist(), "finish_reason": finish_reason(turn),
                    "logprobs": {"content": self._logprobs(turn, True)}} for place, turn in enumerate(self.turns)]
        return {"request_id": f"gen-{self.number}", "choices": choices, "usage": self.usage(),
                "busrl": self.about(self.turns[-1])}

    def native(self) -> dict[str, Any]:
        """The texts and the ends of the answers, and for each token `[{id: log-probability}]`."""
        pairs = [zip(turn.ids.tolist(), turn.logprobs.tolist(), strict=True) for turn in self.turns]
        return {"text": [turn.message["content"] for turn in self.turns],
                "finish_reasons": [finish_reason(turn) for turn in self.turns],
                "token_ids": [turn.ids.tolist() for turn in self.turns],
                "logprobs": [[[{str(token): score}] for token, score in answer] for answer in pairs],
                "busrl": self.about(self.turns[-1])}

    def about(self, turn: Turn) -> dict[str, int]:
        """The fields that busrl adds: the policy version of the last token, and the call's number."""
        return {"version": int(turn.versions[-1]), "turn": turn.number}

    def _more(self, turn: Turn) -> dict[str, Any]:
        as_ids = bool(self.body.return_tokens_as_token_ids)
        wanted = bool(getattr(self.body, "logprobs", None))
        fields: dict[str, Any] = {"finish_reason": finish_reason(turn),
                                 "logprobs": {"content": self._logprobs(turn, as_ids)} if wanted else None}
        return {**fields, "token_ids": turn.ids.tolist()} if self.body.return_token_ids else fields

    def _texts(self) -> Iterator[dict[str, Any]]:
        for place, turn in enumerate(self.turns):
            more = self._more(turn)
            if getattr(self.body, "logprobs", None) is not None:
                rows = self._logprobs(turn, bool(self.body.return_tokens_as_token_ids))
                more["logprobs"] = {"tokens": [row["token"] for row in rows], "top_logprobs": None, "text_offset": [],
                                    "token_logprobs": [row["logprob"] for row in rows]}
            yield {"index": place, "text": turn.message["content"], **more}

    def _logprobs(self, turn: Turn, as_ids: bool) -> list[dict[str, Any]]:
        pairs = zip(turn.ids.tolist(), turn.logprobs.tolist(), strict=True)
        return [{"token": f"token_id:{token}" if as_ids else self.text_of([token]), "logprob": score, "bytes": None,
                 "top_logprobs": []} for token, score in pairs]

    def _ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.turns[0].call.prompt.tolist()} if self.body.return_token_ids else {}

    def _usage_chunk(self, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if (self.body.stream_options or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": self.usage()}


def error(text: str, code: str, param: str = "") -> dict[str, Any]:
    """An error as OpenAI has it."""
    kind = "authentication_error" if code == "invalid_api_key" else "invalid_request_error"
    return {"error": {"message": text, "type": kind, "param": param or None, "code": code}}


def written(value: Mapping[str, Any]) -> bytes:
    """JSON of a value; halves of characters, which a model may write, as escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()
