"""What an answer of a worker from outside must be: its arrays and numbers, checked whole before anything is written.

Pure: reads the gateway's messages and compares them with what the run allows. Knows nothing of claims or sockets, and
opens no ring.

- A refusal names the value, the rule and the place.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from busrl.hosts import messages as g
from busrl.states import Finish

CLOSE_TO_ZERO = 1e-4  # a log-probability may be this much above 0 from rounding


class Refused(Exception):
    """A request breaks a rule, or the ledger has no room. `code` goes into the answer; the text says what to change."""

    def __init__(self, text: str, code: str = "refused") -> None:
        super().__init__(text)
        self.code = code


class AnswerLimits(NamedTuple):
    """What the answer to a claim may be: at most `tokens` in segment number `segment`, of a `vocabulary` (0 = not
    known), by a version that was published, `newest` at most. `prompt_tokens`: of the prompt that comes with it, 0: it
    comes with none. `version` and `step` are those of its admission."""

    tokens: int
    segment: int
    prompt_tokens: int
    vocabulary: int = 0
    newest: int = 0
    version: int = 0
    step: int = 0


class RemoteAnswer(NamedTuple):
    """A generated segment that was checked: arrays of one length, and what belongs to the whole completion."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.uint32]
    prompt_ids: npt.NDArray[np.int32] | None
    text: str
    finish: int
    done: bool
    step: int = 0  # of the oldest weights that drew it, as the worker knows
    episode: dict[str, g.Tensor] | None = None  # instead of the arrays; looked through by the ledger, which knows them


_NONE = np.zeros(0, np.int32)
_OF_EPISODE = RemoteAnswer(_NONE, _NONE.astype(np.float32), _NONE.astype(np.uint32), None, "", Finish.EOS, True)


class Judged(NamedTuple):
    """The reward of an answer that its host has judged too."""

    reward: float
    parts: dict[str, float]




def checked_answer(message: g.RemoteGenerated, limits: AnswerLimits) -> RemoteAnswer:
    """The arrays of an answer; `Refused` if it breaks a rule."""
    tokens = _array(message.tokens, "tokens", np.int32, limits.tokens)
    logprobs = _array(message.logprobs, "logprobs", np.float32, limits.tokens)
    versions = _array(message.versions, "versions", np.uint32, limits.tokens)
    if not len(tokens) == len(logprobs) == len(versions):
        raise Refused(
            f"{len(tokens)} tokens, {len(logprobs)} logprobs, {len(versions)} versions: there must be as many of each"
        )
    _check_ids("tokens", tokens, limits.vocabulary)
    if not bool(np.isfinite(logprobs).all()):
        raise Refused("logprobs has a value that is not finite")
    if float(logprobs.max()) > CLOSE_TO_ZERO:
        raise Refused(f"logprobs has {float(logprobs.max()):g}: a log-probability is at most 0")
    if int(versions.max()) > limits.newest:
        raise Refused(f"versions has {int(versions.max())}: the newest version that was published is {limits.newest}")
    if message.finish not in (Finish.EOS, Finish.LENGTH):
        allowed = f"{Finish.EOS:d} (ended by itself) or {Finish.LENGTH:d} (cut by a limit)"
        raise Refused(f"finish = {message.finish}: it must be {allowed}")
    if message.finish == Finish.EOS and not message.done:
        text = "an answer that ended by itself has no further segment"
        raise Refused(f"finish = {Finish.EOS:d} and done = false: {text}")
    prompt_ids = None
    if limits.segment == 0 and limits.prompt_tokens > 0:
        if message.prompt_ids is None:
            raise Refused("prompt_ids is missing: the first segment brings the token ids of its prompt")
        prompt_ids = _array(message.prompt_ids, "prompt_ids", np.int32, limits.prompt_tokens)
        _check_ids("prompt_ids", prompt_ids, limits.vocabulary)
    return RemoteAnswer(tokens, logprobs, versions, prompt_ids, message.text, message.finish, message.done)


class BatchAnswers:
    """The answers of a REMOTE_BATCH, looked through once for all of them; one that breaks a rule is found by
    `checked_answer`. `Refused`: the columns do not fit together."""

    def __init__(self, message: g.RemoteBatch) -> None:
        self._message, count = message, len(message.tasks)
        needed = (message.lengths, message.prompt_lengths, message.finishes, message.texts)
        given = [*needed, *(one for one in (message.rewards, message.parts, message.steps, message.episodes) if one)]
        if any(len(column) != count for column in given):
            raise Refused(f"{count} tasks, and lists of {[len(one) for one in given]}: there must be one item for each")
        if message.episodes and any((*message.lengths, *message.prompt_lengths)):
            raise Refused("lengths and prompt_lengths: an episode has tensors of its own, so all of them must be 0")
        self._steps, self._parts = message.steps or [0] * count, message.parts or [{}] * count
        self._made, self._read = (_slices(one) for one in (message.lengths, message.prompt_lengths))
        drawn, read = sum(message.lengths), sum(message.prompt_lengths)
        self._tokens = _column(message.tokens, "tokens", np.int32, drawn)
        self._logprobs = _column(message.logprobs, "logprobs", np.float32, drawn)
        self._versions = _column(message.versions, "versions", np.uint32, drawn)
        self._prompts = _column(message.prompt_ids, "prompt_ids", np.int32, read)
        self._probable = bool((self._logprobs <= CLOSE_TO_ZERO).all() and np.isfinite(self._logprobs).all())
        self._lowest = min(int(one.min(initial=0)) for one in (self._tokens, self._prompts))
        self._highest = max(int(one.max(initial=0)) for one in (self._tokens, self._prompts))
        self._newest = int(self._versions.max(initial=0))

    def answer(self, at: int, limits: AnswerLimits) -> RemoteAnswer:
        """Number `at`; `Refused` if it breaks a rule, but for those of an episode, which are the ledger's."""
        message, step = self._message, self._steps[at]
        if message.episodes:
            return _OF_EPISODE._replace(text=message.texts[at], step=step, episode=message.episodes[at])
        sound = (
            self._probable and self._newest <= limits.newest and self._lowest >= 0
            and (self._highest < limits.vocabulary or not limits.vocabulary) and not limits.segment
            and 1 <= message.lengths[at] <= limits.tokens and 1 <= message.prompt_lengths[at] <= limits.prompt_tokens
            and message.finishes[at] in (Finish.EOS, Finish.LENGTH)
        )
        made, prompt = self._made[at], self._prompts[self._read[at]]
        arrays = (self._tokens[made], self._logprobs[made], self._versions[made])
        if sound:
            return RemoteAnswer(*arrays, prompt, message.texts[at], message.finishes[at], True, step)
        tokens, logprobs, versions = map(tensor, arrays)
        alone = g.RemoteGenerated(
            life=0, task=message.tasks[at], tokens=tokens, logprobs=logprobs, versions=versions,
            text=message.texts[at], prompt_ids=tensor(prompt), finish=message.finishes[at],
        )
        return checked_answer(alone, limits)._replace(step=step)

    def judged(self, at: int) -> Judged | None:
        """The reward of number `at`; None if this host has given none."""
        if not self._message.rewards:
            return None
        return Judged(finite(self._message.rewards[at], self._parts[at]), self._parts[at])


def _slices(lengths: list[int]) -> list[slice]:
    """Where each of these stands in a column."""
    return [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths))]


def finite(reward: float, parts: dict[str, float]) -> float:
    for name, value in {"reward": reward, **parts}.items():
        if not math.isfinite(value):
            raise Refused(f"{name} = {value}: a reward must be finite")
    return float(reward)


def tensor(array: npt.NDArray[Any]) -> g.Tensor:
    """An array as it travels."""
    return g.Tensor(array.dtype.name, list(array.shape), np.ascontiguousarray(array).tobytes())


def _array(given: g.Tensor, what: str, dtype: Any, most: int) -> npt.NDArray[Any]:
    array = read_tensor(given, what, dtype)
    if not 1 <= len(array) <= most:
        raise Refused(f"{what} has {len(array)} elements: there must be 1 to {most}")
    return array


def _column(given: g.Tensor, what: str, dtype: Any, total: int) -> npt.NDArray[Any]:
    array = read_tensor(given, what, dtype)
    if len(array) != total:
        raise Refused(f"{what} has {len(array)} elements, and the lengths of the answers come to {total}")
    return array


def read_tensor(given: g.Tensor, what: str, dtype: Any, dimensions: int = 1) -> npt.NDArray[Any]:
    """A copy of an array that travelled; `Refused` if it is none of this type."""
    wanted = np.dtype(dtype)
    if given.dtype != wanted.name:
        raise Refused(f"{what} has dtype {given.dtype!r}: it must be {wanted.name}")
    if len(given.shape) != dimensions:
        rule = "one dimension" if dimensions == 1 else f"{dimensions} dimensions"
        raise Refused(f"{what} has shape {given.shape}: it must have {rule}")
    if math.prod(given.shape) * wanted.itemsize != len(given.data) or (dimensions > 1 and not given.data):
        raise Refused(f"{what} says shape {given.shape} of {wanted.name}, and has {len(given.data)} bytes")
    return np.frombuffer(given.data, wanted.newbyteorder("<")).astype(wanted).reshape(given.shape)


def _check_ids(what: str, ids: npt.NDArray[np.int32], vocabulary: int) -> None:
    if int(ids.min()) < 0 or (vocabulary and int(ids.max()) >= vocabulary):
        bound = f"0 to {vocabulary - 1}" if vocabulary else "0 or more"
        raise Refused(f"{what} has ids from {int(ids.min())} to {int(ids.max())}: an id is {bound}")
