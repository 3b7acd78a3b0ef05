"""Reads what an endpoint answers: log-probabilities of the positions of a prompt, its model's name, its tokenizer.

Used by `endpoint`. Knows nothing of HTTP, retries or tensors.

- Nothing is guessed: an answer with other positions, other ids or fewer numbers than were asked for is Unusable, and
  the text says where.
- A position may also have the token that stands there, beside the most probable ones: it is left out if it is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.teachers.probes import LEFT, Probe
from busrl.training.batch import Piece

SHOWN = 200
ABOVE_ZERO = 1e-3  # a log-probability is at most 0, give or take the server's rounding


class Unusable(Exception):
    """An answer that cannot be used; the text says why."""


@dataclass(frozen=True)
class Rows:
    """Ids and log-probabilities that were given of each generated token of a sequence, [tokens, k]."""

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def nothing(cls, tokens: int, count: int) -> Rows:
        return cls(np.zeros((tokens, count), np.int64), np.zeros((tokens, count), np.float32))

    def at(self, wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """The log-probabilities of these ids, [tokens, any]. Unusable for one that was not given."""
        order = np.argsort(self.ids, 1)
        ids, logprobs = np.take_along_axis(self.ids, order, 1), np.take_along_axis(self.logprobs, order, 1)
        found = np.empty(wanted.shape, np.float32)
        for row, some in enumerate(wanted):
            places = np.searchsorted(ids[row], some)
            known = places < ids.shape[1]
            known[known] = ids[row][places[known]] == some[known]
            if not known.all():
                raise Unusable(
                    f"it gave no log-probability of token {int(some[~known][0])}, which the student thinks likely; it "
                    "must give those of all tokens (vLLM: --max-logprobs -1)"
                )
            found[row] = logprobs[row][places]
        return found


class Measured(msgspec.Struct):
    logprob: Annotated[float, msgspec.Meta(le=ABOVE_ZERO)]
    decoded_token: str | None = None


Position = dict[str, Measured] | None


class Choice(msgspec.Struct):
    prompt_logprobs: list[Position] | None = None
    prompt_token_ids: list[int] | None = None


class Answer(msgspec.Struct):
    choices: Annotated[list[Choice], msgspec.Meta(min_length=1)]


def choice_of(body: bytes) -> Choice:
    try:
        return msgspec.json.decode(body, type=Answer).choices[0]
    except msgspec.DecodeError as problem:
        raise Unusable(f"no answer to a completion: {problem}: {body[:SHOWN]!r}") from problem


def rows_of(body: bytes, piece: Piece, count: int, words: int) -> Rows:
    """The rows of the generated tokens of a sequence; `count` below 0: of all tokens that are given."""
    choice = choice_of(body)
    positions = choice.prompt_logprobs
    if positions is None:
        raise Unusable("it gave no log-probabilities of the prompt (prompt_logprobs); vLLM gives them")
    if len(positions) != len(piece.ids):
        raise Unusable(f"it gave log-probabilities of {len(positions)} positions, of {len(piece.ids)}")
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != piece.ids.tolist():
        raise Unusable("it read other token ids than were sent")
    wanted = np.concatenate([np.arange(begin, end) for begin, end in piece.spans.tolist()]).tolist()
    rows = [_row(positions[at], at, int(piece.ids[at]), count, words) for at in wanted]
    widths = {len(row) for row in rows}
    if len(widths) > 1:  # all tokens were asked for
        raise Unusable(f"it gave log-probabilities of {min(widths)} tokens at one position, {max(widths)} at another")
    ids, logprobs = (np.array([[pair[n] for pair in row] for row in rows]) for n in (0, 1))
    return Rows(ids.astype(np.int64), np.minimum(logprobs, 0).astype(np.float32))


def _row(position: Position, at: int, token: int, count: int, words: int) -> list[tuple[int, float]]:
    """Tokens of a position with their log-probabilities, the most probable first."""
    if not position:
        raise Unusable(f"it gave no log-probabilities at position {at}")
    try:
        pairs = [(int(name), measured.logprob) for name, measured in position.items()]
    except ValueError:
        raise Unusable(f"at position {at} a token is {min(position)[:SHOWN]!r}, and no id") from None
    if token not in {number for number, _ in pairs}:
        raise Unusable(f"it gave no log-probability of token {token} itself at position {at}: of another sequence")
    if outside := [number for number, _ in pairs if not 0 <= number < words]:
        raise Unusable(f"token {outside[0]} at position {at} is none of the {words} of model.path: another tokenizer")
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    if count < 0:
        return pairs
    if len(pairs) < count:
        raise Unusable(f"it gave {len(pairs)} log-probabilities at position {at}, of {count} (learner.teacher_k)")
    return pairs[:count]


# -- the model and its tokenizer -----


class Listed(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    data: list[Listed]


class Tokenized(msgspec.Struct):
    tokens: list[int]


def only_model(body: bytes) -> str:
    """The name of the only model of an endpoint."""
    try:
        names = [model.id for model in msgspec.json.decode(body, type=Models).data]
    except msgspec.DecodeError as problem:
        raise Unusable(f"no list of models: {problem}: {body[:SHOWN]!r}") from problem
    if len(names) != 1:
        raise Unusable(f"it has {len(names)} models; name one in learner.teacher.model: {', '.join(names)[:SHOWN]}")
    return names[0]


def tokenizer_fault(body: bytes, probe: Probe) -> str:
    """Describe what is wrong with how an endpoint reads the text of the probe; empty where nothing is, or it did not
    say."""
    if not body:
        return ""
    try:
        tokens = msgspec.json.decode(body, type=Tokenized).tokens
    except msgspec.DecodeError as problem:
        return f"/tokenize gave no tokens: {problem}"
    if tokens == probe.text_ids:
        return ""
    at = next((n for n, (one, other) in enumerate(zip(tokens, probe.text_ids)) if one != other), -1)
    there, here = (shown[max(0, at):][:3] for shown in (tokens, probe.text_ids))
    counts = f"{len(tokens)} tokens, {there}..., model.path {len(probe.text_ids)}, {here}..."
    return f"it has another tokenizer: of one text it makes {counts}"


def unreadable(body: bytes, probe: Probe) -> str:
    """Describe what is wrong with the texts of the tokens in an answer, of an endpoint that tells nothing else about
    its tokenizer; empty where nothing is."""
    looked = 0
    for position in choice_of(body).prompt_logprobs or []:
        for name, measured in (position or {}).items():
            there, here = measured.decoded_token, probe.text_of(int(name))
            if there is None or LEFT in there + here:
                continue
            looked += 1
            if there.strip() != here.strip():
                both = f"{there[:SHOWN]!r} there, and {here[:SHOWN]!r} of model.path"
                return f"it has another tokenizer: token {name} is {both}"
    if not looked:
        return "it tells nothing of its tokenizer (no /tokenize, no decoded_token), which must be that of model.path"
    return ""

