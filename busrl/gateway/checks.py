"""What an answer from outside must keep before anything of it is written: types, shapes, finite numbers, lengths.

Pure. The message classes have already held the fields' types; this holds what they can not say. Knows nothing of slots.

- `Broken` says the value, the rule and where; nothing was changed when it is raised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.gateway.book import Answer
from busrl.protocol import gateway as g

EOS, LENGTH = 1, 2
CLOSE_TO_ZERO = 1e-4  # a log-probability may be this much above 0 from rounding


class Broken(Exception):
    """The content of a message breaks a rule."""


@dataclass(frozen=True)
class Limits:
    """`vocabulary` 0 = not known; `newest` is the newest version that was published."""

    prompt_tokens: int
    vocabulary: int
    newest: int = 0


def answer(message: g.RemoteGenerated, limits: Limits, most_tokens: int, segment: int) -> Answer:
    """The arrays of an answer; `most_tokens` may still be generated in segment number `segment`."""
    tokens = _array(message.tokens, "tokens", np.int32, most_tokens)
    logprobs = _array(message.logprobs, "logprobs", np.float32, most_tokens)
    versions = _array(message.versions, "versions", np.uint32, most_tokens)
    if not len(tokens) == len(logprobs) == len(versions):
        raise Broken(
            f"{len(tokens)} tokens, {len(logprobs)} logprobs, {len(versions)} versions: there must be as many of each"
        )
    _check_ids("tokens", tokens, limits.vocabulary)
    _check_logprobs(logprobs)
    if int(versions.max()) > limits.newest:
        raise Broken(f"versions has {int(versions.max())}: the newest version that was published is {limits.newest}")
    if message.finish not in (EOS, LENGTH):
        raise Broken(f"finish = {message.finish}: it must be {EOS} (ended by itself) or {LENGTH} (cut by a limit)")
    if message.finish == EOS and not message.done:
        raise Broken(f"finish = {EOS} and done = false: an answer that ended by itself has no further segment")
    prompt_ids = None if segment else _prompt(message.prompt_ids, limits)
    return Answer(tokens, logprobs, versions, prompt_ids, message.text, message.finish, message.done)


def reward(message: g.RemoteRewarded) -> float:
    """The reward of a message; finite, as are its parts."""
    for name, value in {"reward": message.reward, **message.parts}.items():
        if not math.isfinite(value):
            raise Broken(f"{name} = {value}: a reward must be finite")
    return float(message.reward)


def tensor(array: npt.NDArray[Any]) -> g.Tensor:
    """An array as it travels."""
    return g.Tensor(array.dtype.name, list(array.shape), np.ascontiguousarray(array).tobytes())


def _prompt(given: g.Tensor | None, limits: Limits) -> npt.NDArray[np.int32]:
    if given is None:
        raise Broken("prompt_ids is missing: the first segment brings the token ids of its prompt")
    ids = _array(given, "prompt_ids", np.int32, limits.prompt_tokens)
    _check_ids("prompt_ids", ids, limits.vocabulary)
    return ids


def _array(given: g.Tensor, what: str, dtype: Any, most: int) -> npt.NDArray[Any]:
    wanted = np.dtype(dtype)
    if given.dtype != wanted.name:
        raise Broken(f"{what} has dtype {given.dtype!r}: it must be {wanted.name}")
    if len(given.shape) != 1:
        raise Broken(f"{what} has shape {given.shape}: it must have one dimension")
    count = given.shape[0]
    if count * wanted.itemsize != len(given.data):
        raise Broken(f"{what} says shape {given.shape} of {wanted.name}, and has {len(given.data)} bytes")
    if not 1 <= count <= most:
        raise Broken(f"{what} has {count} elements: there must be 1 to {most}")
    return np.frombuffer(given.data, wanted.newbyteorder("<")).astype(wanted)


def _check_ids(what: str, ids: npt.NDArray[np.int32], vocabulary: int) -> None:
    if int(ids.min()) < 0 or (vocabulary and int(ids.max()) >= vocabulary):
        bound = f"0 to {vocabulary - 1}" if vocabulary else "0 or more"
        raise Broken(f"{what} has ids from {int(ids.min())} to {int(ids.max())}: an id is {bound}")


def _check_logprobs(logprobs: npt.NDArray[np.float32]) -> None:
    if not bool(np.isfinite(logprobs).all()):
        raise Broken("logprobs has a value that is not finite")
    if float(logprobs.max()) > CLOSE_TO_ZERO:
        raise Broken(f"logprobs has {float(logprobs.max()):g}: a log-probability is at most 0")
