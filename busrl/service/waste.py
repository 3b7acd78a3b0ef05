"""Account of the tokens that a service sampled: those that a client trained on, and those that never came back.

Used by `busrl audit --waste`, which gives the records of the logs. Reads their bodies with a few lines of its own.
Knows nothing of the processes that wrote them.

- A sample came back if the data of a `forward_backward` that was executed begin with its prompt and all its tokens.
- What only scored a prompt (one token, with `prompt_logprobs`) sampled nothing that a client wants, and is left out.
- Samples are known by a number of 64 bits for prompt and tokens; two samples that are the same come back together.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]
ODD, SPREAD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
INT32, FORWARD_ONLY, MOST_LINES = 3, 6, 8


@dataclass
class Amount:
    samples: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.samples += 1
        self.tokens += tokens

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens of {self.samples:,} samples"


class Prompt(NamedTuple):
    """A prompt: its number and the count of its tokens."""

    number: int
    tokens: int


class Sampled(NamedTuple):
    """A sample: the number of prompt and tokens, the count of its tokens, the model that it was drawn with."""

    number: int
    tokens: int
    model: str


def prompt_of(body: bytes) -> Prompt | None:
    """The prompt of a request for samples; None of one that only scores it."""
    asked = json.loads(body)
    if asked.get("prompt_logprobs") and asked["sampling_params"].get("max_tokens") == 1:
        return None
    tokens = np.array([token for chunk in asked["prompt"]["chunks"] for token in chunk["tokens"]], np.int32)
    return Prompt(int(prefixes(tokens)[-1]) if len(tokens) else 0, len(tokens))


def account_of(answered: Iterable[tuple[Prompt, bytes, str]], bodies: Iterable[bytes]) -> dict[str, Any]:
    """Tokens and samples: all, those that came back, those that did not, and these by model.

    `answered`: of requests for samples the prompt, the answer, and the model of the sampler, "" for the base; `bodies`:
    those of the `forward_backward` that were executed.
    """
    samples = [sample for prompt, answer, model in answered for sample in samples_of(prompt, answer, model)]
    known, back = np.unique(np.array([sample.number for sample in samples], np.uint64)), set[int]()
    for body in bodies:
        for tokens in data_of(body):
            back.update(those_of(known, prefixes(tokens)))
    amounts, lost = defaultdict[str, Amount](Amount), defaultdict[str, Amount](Amount)
    for sample in samples:
        amounts["sampled"].add(sample.tokens)
        amounts["trained" if sample.number in back else "lost"].add(sample.tokens)
        if sample.number not in back:
            lost[sample.model or "the base"].add(sample.tokens)
    whole = {name: asdict(amounts[name]) for name in ("sampled", "trained", "lost")}
    return {**whole, "lost_by_model": {model: asdict(amount) for model, amount in lost.items()}}


def samples_of(prompt: Prompt, answer: bytes, model: str) -> Iterator[Sampled]:
    for tokens in sequences_of(answer):
        if len(tokens):
            number = prompt.number + int(prefixes(tokens, prompt.tokens)[-1])
            yield Sampled(number % 2**64, len(tokens), model)


def lines_of(account: Mapping[str, Any]) -> Iterator[str]:
    sampled, lost = Amount(**account["sampled"]), Amount(**account["lost"])
    share = f"{lost.tokens / sampled.tokens:.0%}" if sampled.tokens else "none"
    yield f"  sampled: {sampled}"
    yield f"  never came back in a forward_backward: {lost} ({share})"
    if account["kept_no_longer"]:
        counted = ", ".join(f"{count} requests for {name}" for name, count in account["kept_no_longer"].items())
        yield f"    without what the run keeps no longer: {counted}"
    by_model = sorted(account["lost_by_model"].items(), key=lambda item: -int(item[1]["tokens"]))
    yield from (f"    {model}: {Amount(**amount)}" for model, amount in by_model[:MOST_LINES])
    if len(by_model) > MOST_LINES:
        yield f"    and {len(by_model) - MOST_LINES} more models"


def prefixes(tokens: NDArray[np.int32], before: int = 0) -> Numbers:
    """A number for each beginning of a sequence: of its first token, of its first two, ... `before`: the count of
    tokens before these, whose own number is to be added."""
    values = (tokens.astype(np.uint64) + ODD) * SPREAD
    values ^= values >> np.uint64(29)
    powers = np.cumprod(np.full(len(tokens), ODD)) * np.uint64(pow(int(ODD), before, 2**64))
    return np.cumsum(values * powers, dtype=np.uint64)


def those_of(known: Numbers, numbers: Numbers) -> list[int]:
    """The numbers that are known. `known`: in ascending order, and many."""
    if not len(known):
        return []
    nearest = known[np.searchsorted(known, numbers).clip(max=len(known) - 1)]
    some: list[int] = numbers[nearest == numbers].tolist()
    return some


# -- bodies -----


def sequences_of(answer: bytes) -> Iterator[NDArray[np.int32]]:
    """The tokens of each sample in an answer."""
    for number, sample in fields(answer):
        if number == 1:
            yield np.frombuffer(dict(fields(sample)).get(2, b""), "<i4")


def data_of(body: bytes) -> Iterator[NDArray[np.int32]]:
    """The tokens of each datum, and the last of its targets behind them; none of a request that trains nothing."""
    message = list(fields(body))
    if (FORWARD_ONLY, 1) in message:
        return
    for number, datum in message:
        if number == 3:
            parts = list(fields(datum))
            chunks = (dict(fields(dict(fields(chunk)).get(1, b""))).get(1, b"") for name, chunk in parts if name == 1)
            inputs = (dict(fields(entry)) for name, entry in parts if name == 2)
            targets = next((entry[2] for entry in inputs if entry.get(1) == b"target_tokens"), b"")
            yield np.concatenate([np.frombuffer(b"".join(chunks), "<i4"), last_of(targets)])


def last_of(tensor: bytes) -> NDArray[np.int32]:
    """The last number of a dense tensor; none of a sparse one, which has several for each place."""
    entry = dict(fields(tensor))
    kind = "<i4" if entry.get(3) == INT32 else "<i8"
    return np.frombuffer(entry.get(1, b""), kind)[-1:].astype(np.int32)


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and content of each field of protobuf: bytes, or a number."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        size = {1: 8, 5: 4}.get(key & 7, 0)
        if key & 7 == 0:
            value, at = varint(message, at)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, at = varint(message, at)
        yield key >> 3, message[at : at + size]
        at += size


def varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
