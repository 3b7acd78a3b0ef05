"""Samples, their cut into micro-batches, and the flat tensors of the tokens that are trained.

Knows nothing of models and losses.

- The generated tokens are trained: the prompt never, the end token always; an answer cut at its limit has none. The
  first `context` tokens of a sample are not trained: they have a place in the flat order, and are masked.
- An episode of several turns is one sample of several sequences (pieces), each with some generated spans; an answer is
  one piece with one span. Tokens between spans are read and never trained.
- The flat order is sample by sample, piece by piece, token by token; `forward` returns its logits in that order, one
  row per generated token.
- The logits of position t predict token t + 1; this shift is in `predicting_positions` and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from busrl.data.vocabulary import TokenRows

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Worth = float | Sequence[float]  # of a sample: a number, or one for each of its turns


class Piece(NamedTuple):
    """A sequence that is read at once, up to the last token that was generated in it."""

    ids: NDArray[np.int32]
    spans: Ints  # [spans, 2]: begin and end of generated tokens; at least one span, ascending, none at the very start


@dataclass(frozen=True, eq=False)
class Turns:
    """Places of the turns of an episode in its ids."""

    seqs: Ints  # lengths of its sequences, at least one turn in each
    rows: Ints  # [turns, 3]: sequence, and begin and end in it; sorted, disjoint
    skipped: Bools  # of each generated token: true where it is read and not trained

    @cached_property
    def lengths(self) -> Ints:
        """Generated tokens of each turn."""
        counts: Ints = self.rows[:, 2] - self.rows[:, 1]
        return counts

    def places(self) -> Ints:
        """Places of the generated tokens in all ids."""
        begins = (np.cumsum(self.seqs) - self.seqs)[self.rows[:, 0]] + self.rows[:, 1]
        return numbered(self.lengths) + np.repeat(begins, self.lengths)

    def pieces(self, ids: NDArray[np.int32]) -> list[Piece]:
        pieces = []
        for number, begin in enumerate((np.cumsum(self.seqs) - self.seqs).tolist()):
            spans = self.rows[self.rows[:, 0] == number, 1:]
            pieces.append(Piece(ids[begin : begin + int(spans[-1, 1])], spans))
        return pieces


@dataclass(frozen=True, eq=False)
class Sample:
    """A finished trajectory; the arrays are not copied and must stay unchanged until the step."""

    uid: int
    group: int
    member: int
    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]  # the generated tokens with the end token; of an episode all of its sequences
    behaviour_logprobs: NDArray[np.float32]  # of each generated token, under the distribution it was sampled from
    policy_versions: NDArray[np.uint32]  # of the weights that sampled each token; for accounting
    reward: float = 0.0
    temperature: float = 1.0
    finish: int = 1  # 1 end token, 2 length cut
    context: int = 0  # generated tokens at the start that are read and not trained: earlier segments
    turns: Turns | None = None  # of an episode, which has neither prompt_ids nor context
    # Experts that the engine chose, [positions, layers, chosen]: at the positions that predict the generated tokens,
    # and in the prompt but for its last token; of an episode at all positions of each piece but for its last.
    routes: NDArray[Any] | None = None
    prompt_routes: NDArray[Any] | None = None

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    @cached_property
    def pieces(self) -> list[Piece]:
        if self.turns is not None:
            return self.turns.pieces(self.token_ids)
        begin = len(self.prompt_ids)
        return [Piece(np.concatenate([self.prompt_ids, self.token_ids]), np.array([[begin, self.length]]))]

    @property
    def longest(self) -> int:
        return max(len(piece.ids) for piece in self.pieces)

    @property
    def generated(self) -> int:
        return len(self.token_ids) if self.turns is None else int(self.turns.lengths.sum())

    @property
    def trained(self) -> int:
        return self.generated - (self.context if self.turns is None else int(self.turns.skipped.sum()))

    def targets(self) -> NDArray[np.int32]:
        """Ids of the generated tokens."""
        return self.token_ids if self.turns is None else self.token_ids[self.turns.places()]

    def mask(self) -> Bools:
        """Mask of the generated tokens that are trained."""
        return ~self.turns.skipped if self.turns is not None else np.arange(len(self.token_ids)) >= self.context

    def turn_lengths(self) -> Ints:
        """Generated tokens of each turn."""
        return np.array([len(self.token_ids)]) if self.turns is None else self.turns.lengths

    def trained_of_turns(self) -> Ints:
        """Trained tokens of each turn."""
        lengths = self.turn_lengths()
        return np.add.reduceat(self.mask().astype(np.int64), np.cumsum(lengths) - lengths)

    def fault(self) -> str:
        """Describe what is wrong with shape or numbers; "" for a sound sample."""
        if self.turns is None and (len(self.prompt_ids) < 1 or len(self.token_ids) < 1):
            return f"{len(self.prompt_ids)} prompt and {len(self.token_ids)} generated tokens: at least one of each"
        counts = self.generated, len(self.behaviour_logprobs), len(self.policy_versions)
        if len(set(counts)) > 1:
            return "{} tokens, {} log-probabilities, {} versions".format(*counts)
        if not math.isfinite(self.reward):
            return f"reward {self.reward}: training needs a finite number"
        if self.turns is None and not 0 <= self.context < len(self.token_ids):
            return f"{self.context} of {len(self.token_ids)} tokens are context: at least one must be left to train"
        return "" if self.temperature > 0 else f"temperature {self.temperature}: training needs one above 0"


def first_fault(samples: Sequence[Sample], token_rows: TokenRows) -> tuple[int, str] | None:
    """The position of a sample that must not be trained, and why; None if all are sound. All tokens and
    log-probabilities are checked at once, which is much cheaper than sample by sample. Ids that stand for no token may
    be read, but not drawn."""
    for position, sample in enumerate(samples):
        if text := sample.fault():
            return position, text
    logprobs = np.concatenate([sample.behaviour_logprobs for sample in samples])
    bad = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= 0)))
    if len(bad):
        text = f"a log-probability is above 0 or not a finite number: {logprobs[bad[:1]].tolist()}"
        return _sample_at(bad[0], [sample.generated for sample in samples]), text
    ids = np.concatenate([part for sample in samples for part in (sample.prompt_ids, sample.token_ids)])
    outside = np.flatnonzero((ids < 0) | (ids >= token_rows.rows))
    if len(outside):
        text = f"token {ids[outside[0]]} is outside of the vocabulary of {token_rows.rows}"
        return _sample_at(outside[0], [sample.length for sample in samples]), text
    if token_rows.without and len(token_rows.foreign(ids)):
        for position, sample in enumerate(samples):
            if len(wrong := token_rows.foreign(sample.targets())):
                return position, token_rows.describe(wrong)
    return None


def _sample_at(place: int, lengths: Sequence[int]) -> int:
    """The sample that a place of the concatenated tokens belongs to."""
    return int(np.searchsorted(np.cumsum(lengths), place, side="right"))


def cut(samples: Sequence[Sample], budget: int, together: bool = False) -> list[list[int]]:
    """Micro-batches as lists of indices, sorted by length, so that there is little padding. The padded size is at most
    `budget`, except for a single sample. `together`: groups stay together, and the budget is in real tokens."""
    lengths = [sample.length for sample in samples]
    widths = lengths if together else [sample.longest for sample in samples]
    by_length = [(widths[i], s.group, s.member) for i, s in enumerate(samples)]
    order = sorted(range(len(samples)), key=[by[1:] if together else by for by in by_length].__getitem__)
    # Parts of about equal size: a small last part costs as many calls as a full one.
    target = sum(lengths) / max(1, -(-sum(lengths) // budget))
    parts: list[list[int]] = []
    size = filled = rows = 0
    for index in order:
        length, pieces = lengths[index], len(samples[index].pieces)
        if together:
            full = size + length > budget or filled >= target * len(parts)
        else:  # ascending: the next is the widest
            full = bool(parts) and widths[index] * (rows + pieces) > budget
        if full or not parts:
            parts.append([])
            size = rows = 0
        parts[-1].append(index)
        size, filled, rows = size + length, filled + length, rows + pieces
    return [sorted(part, key=by_length.__getitem__) for part in parts]


def pieces_of(samples: Sequence[Sample]) -> list[Piece]:
    return [piece for sample in samples for piece in sample.pieces]


def pad(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """The ids of whole pieces, right-padded with 0, [pieces, longest]; and, per generated token, its row and the
    column that predicts it. Causal attention never looks right, so the padding needs no mask."""
    pieces = pieces_of(samples)
    lengths = np.array([len(piece.ids) for piece in pieces])
    ids = np.zeros((len(pieces), int(lengths.max())), np.int64)
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = np.concatenate([piece.ids for piece in pieces])
    rows, columns = predicting_positions(pieces)
    return torch.from_numpy(ids), torch.from_numpy(rows), torch.from_numpy(columns)


def join(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """The ids of whole pieces but for their last tokens, which predict nothing, one after another; positions that
    begin at 0 in each; and, per generated token, the place that predicts it."""
    pieces = pieces_of(samples)
    lengths = np.array([len(piece.ids) - 1 for piece in pieces])
    rows, columns = predicting_positions(pieces)
    ids = np.concatenate([piece.ids[:-1] for piece in pieces]).astype(np.int64)
    wanted = columns + (np.cumsum(lengths) - lengths)[rows]
    return torch.from_numpy(ids), torch.from_numpy(numbered(lengths)), torch.from_numpy(wanted)


def predicting_positions(pieces: Sequence[Piece]) -> tuple[Ints, Ints]:
    """Piece and column whose logits predict each generated token: of a span from begin - 1 to end - 2."""
    spans = np.concatenate([piece.spans for piece in pieces])
    counts = spans[:, 1] - spans[:, 0]
    rows = np.repeat(np.repeat(np.arange(len(pieces)), [len(piece.spans) for piece in pieces]), counts)
    return rows, numbered(counts) + np.repeat(spans[:, 0], counts) - 1


def numbered(counts: Ints) -> Ints:
    """0, 1, ... for each of the counts, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True)
class Flat:
    """The generated tokens of a micro-batch, one entry per token; `lengths` and `uids` have one per sample, and
    `turn_lengths` one per turn."""

    targets: Tensor
    behaviour_logprobs: Tensor
    policy_versions: NDArray[np.uint32]
    rows: Tensor  # the sample of each token
    lengths: Tensor  # trained tokens of each sample
    turns: Tensor  # the turn of each token, counted over all samples
    turn_lengths: Tensor  # trained tokens of each turn
    turn_begins: Ints  # the first token of each turn
    turn_counts: list[int]  # turns of each sample
    temperature: Tensor | None  # per token; None if all are 1
    mask: Tensor | None  # true where trained; None if all are
    uids: list[int]

    def per_token(self, worth: Sequence[Worth], dtype: torch.dtype) -> Tensor:
        """A value of each sample, or of each of its turns, repeated for its tokens."""
        by_sample = zip(worth, self.turn_counts, strict=True)
        values = [value for of_sample, count in by_sample for value in by_turn(of_sample, count)]
        return torch.tensor(values, dtype=dtype, device=self.turns.device)[self.turns]

    def begun(self, version: int) -> Tensor:
        """Mask of the tokens for which weights of `version` drew the first one of every turn of its sample: an engine
        may have kept the keys and values of earlier turns."""
        counts = np.array(self.turn_counts)
        oldest = np.minimum.reduceat(self.policy_versions[self.turn_begins], np.cumsum(counts) - counts)
        return torch.from_numpy(oldest == version).to(self.rows.device)[self.rows]


def by_turn(worth: Worth, turns: int) -> Sequence[float]:
    return [worth] * turns if isinstance(worth, (int, float)) else worth


def spread(samples: Sequence[Sample], worth: Sequence[Worth]) -> NDArray[np.float64]:
    """A value of each sample, or of each of its turns, repeated for its generated tokens."""
    lengths = [sample.turn_lengths() for sample in samples]
    values = [by_turn(of_sample, len(counts)) for of_sample, counts in zip(worth, lengths, strict=True)]
    return np.repeat(np.concatenate(values).astype(np.float64), np.concatenate(lengths))


def flatten(samples: Sequence[Sample], dtype: torch.dtype, device: torch.device) -> Flat:
    """Arrange the inputs of the loss by generated token, on the device; floats have the type `dtype`."""

    def placed(values: NDArray[Any], kind: torch.dtype) -> Tensor:
        return torch.from_numpy(values).to(device, kind)

    counts = np.array([sample.generated for sample in samples])
    trained = np.array([sample.trained for sample in samples])
    temperatures = np.array([sample.temperature for sample in samples])
    numbers = np.repeat(np.arange(len(samples)), counts)
    rows, lengths = placed(numbers, torch.int64), placed(trained, torch.int64)
    mask = np.concatenate([sample.mask() for sample in samples]) if (trained < counts).any() else None
    turns, turn_lengths, every, turn_counts = rows, lengths, counts, [1] * len(samples)
    if any(sample.turns is not None for sample in samples):
        by_sample = [sample.turn_lengths() for sample in samples]
        every = np.concatenate(by_sample)
        turn_counts = [len(of_turns) for of_turns in by_sample]
        turns = placed(np.repeat(np.arange(len(every)), every), torch.int64)
        turn_lengths = placed(np.concatenate([sample.trained_of_turns() for sample in samples]), torch.int64)
    return Flat(
        targets=placed(np.concatenate([sample.targets() for sample in samples]), torch.int64),
        behaviour_logprobs=placed(np.concatenate([sample.behaviour_logprobs for sample in samples]), dtype),
        policy_versions=np.concatenate([sample.policy_versions for sample in samples]),
        rows=rows, lengths=lengths, turns=turns, turn_lengths=turn_lengths, turn_counts=turn_counts,
        turn_begins=np.cumsum(every) - every,
        temperature=None if (temperatures == 1).all() else placed(temperatures[numbers], dtype),
        mask=None if mask is None else placed(mask, torch.bool), uids=[sample.uid for sample in samples],
    )


# -- rounds of several ranks ------------------------------------------------------------

Round = list[list[int]]  # of each rank the positions of its samples


def rounds_of(lengths: Sequence[int], ranks: int, budget: int, quadratic: float = 0.0) -> list[Round]:
    """Every position once, the longest first to the rank that has the least to do, at most `budget` tokens per rank and
    round; a single longer one is a share by itself. `quadratic`: cost of a token per token before it, in tokens."""
    rounds, left = [], sorted(range(len(lengths)), key=lambda at: (-lengths[at], at))
    while left:
        shares: Round = [[] for _ in range(ranks)]
        loads, costs, later = [0] * ranks, [0.0] * ranks, []
        for at in left:
            length, rank = lengths[at], min(range(ranks), key=costs.__getitem__)
            if loads[rank] and loads[rank] + length > budget:
                later.append(at)
                continue
            shares[rank].append(at)
            loads[rank] += length
            costs[rank] += length + quadratic * length * length
        rounds.append([sorted(share) for share in shares])
        left = later
    return rounds
