"""Samples, their cut into micro-batches, and the flat tensors of the tokens that are trained.

The trainer hands samples in; `forward` turns the same samples into the model's inputs. Knows nothing of models and
losses.

- Trained are the generated tokens: the prompt never, the end token always, and a length cut has no end token. The
  first `context` of a sample are left out: they get a place in the flat order, and are masked.
- The flat order is sample by sample, token by token; `forward` returns its logits in that order, one row per
  generated token.
- The logits of position t predict token t + 1; this shift is in `predicting_positions` and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Sample:
    """One finished trajectory; the arrays are not copied and must stay unchanged until the step."""

    uid: int
    group: int
    member: int
    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]  # what was generated, the end token included
    behaviour_logprobs: NDArray[np.float32]  # of each generated token, under the distribution it was sampled from
    policy_versions: NDArray[np.uint32]  # of the weights that sampled each token; for accounting
    reward: float = 0.0
    temperature: float = 1.0
    finish: int = 1  # 1 end token, 2 length cut
    context: int = 0  # generated tokens at the start that are read and not trained: earlier segments

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def fault(self) -> str:
        """What is wrong with its shape or its numbers; "" for a sound sample."""
        if len(self.prompt_ids) < 1 or len(self.token_ids) < 1:
            return f"{len(self.prompt_ids)} prompt and {len(self.token_ids)} generated tokens: at least one of each"
        counts = len(self.token_ids), len(self.behaviour_logprobs), len(self.policy_versions)
        if len(set(counts)) > 1:
            return "{} tokens, {} log-probabilities, {} versions".format(*counts)
        if not math.isfinite(self.reward):
            return f"reward {self.reward}: training needs a finite number"
        if not 0 <= self.context < len(self.token_ids):
            return f"{self.context} of {len(self.token_ids)} tokens are context: at least one must be left to train"
        return "" if self.temperature > 0 else f"temperature {self.temperature}: training needs one above 0"


def first_fault(samples: Sequence[Sample], vocabulary: int) -> tuple[int, str] | None:
    """The position of a sample that must not be trained, and why; None if all are sound. Tokens and log-probabilities
    are looked at together: much cheaper than one by one."""
    for position, sample in enumerate(samples):
        if text := sample.fault():
            return position, text
    logprobs = np.concatenate([sample.behaviour_logprobs for sample in samples])
    bad = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= 0)))
    if len(bad):
        text = f"a log-probability is above 0 or not a finite number: {logprobs[bad[:1]].tolist()}"
        return _sample_at(bad[0], [len(sample.token_ids) for sample in samples]), text
    ids = np.concatenate([part for sample in samples for part in (sample.prompt_ids, sample.token_ids)])
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(outside):
        text = f"token {ids[outside[0]]} is outside of the vocabulary of {vocabulary}"
        return _sample_at(outside[0], [sample.length for sample in samples]), text
    return None


def _sample_at(place: int, lengths: Sequence[int]) -> int:
    """The sample that a place of the concatenated tokens belongs to."""
    return int(np.searchsorted(np.cumsum(lengths), place, side="right"))


def cut(samples: Sequence[Sample], budget: int, together: bool = False) -> list[list[int]]:
    """Micro-batches as lists of indices, each sorted by length, so that little is padded; padded size at most `budget`.

    `together` is for a forward that computes a shared prompt once and pads nothing: the members of a group stay in one
    place, and the budget is in real tokens. A single sample above the budget is one micro-batch.
    """
    lengths = [sample.length for sample in samples]
    by_length = [(lengths[i], s.group, s.member) for i, s in enumerate(samples)]
    order = sorted(range(len(samples)), key=[by[1:] if together else by for by in by_length].__getitem__)
    # Parts of about equal size: a small last part would cost as many calls as a full one.
    target = sum(lengths) / max(1, -(-sum(lengths) // budget))
    parts: list[list[int]] = []
    size = filled = 0
    for index in order:
        length = lengths[index]
        if together:
            full = size + length > budget or filled >= target * len(parts)
        else:  # ascending: the next is the widest
            full = bool(parts) and length * (len(parts[-1]) + 1) > budget
        if full or not parts:
            parts.append([])
            size = 0
        parts[-1].append(index)
        size, filled = size + length, filled + length
    return [sorted(part, key=by_length.__getitem__) for part in parts]


def pad(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """The ids of whole samples, right-padded with 0, [samples, longest]; and, per generated token, its row and the
    column that predicts it. Causal attention never looks right, so the padding needs no mask."""
    prompts = np.array([len(sample.prompt_ids) for sample in samples])
    responses = np.array([len(sample.token_ids) for sample in samples])
    lengths = prompts + responses
    ids = np.zeros((len(samples), int(lengths.max())), np.int64)
    pieces = [part for sample in samples for part in (sample.prompt_ids, sample.token_ids)]
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = np.concatenate(pieces)
    rows, columns = predicting_positions(prompts, responses)
    return torch.from_numpy(ids), torch.from_numpy(rows), torch.from_numpy(columns)


def join(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """The ids of whole samples but for their last tokens, which predict nothing, one after another; positions that
    begin at 0 in each; and, per generated token, the place that predicts it."""
    lengths = np.array([sample.length - 1 for sample in samples])
    responses = np.array([len(sample.token_ids) for sample in samples])
    pieces = [part for sample in samples for part in (sample.prompt_ids, sample.token_ids[:-1])]
    wanted = numbered(responses) + np.repeat(np.cumsum(lengths) - responses, responses)
    ids = np.concatenate(pieces).astype(np.int64)
    return torch.from_numpy(ids), torch.from_numpy(numbered(lengths)), torch.from_numpy(wanted)


def predicting_positions(prompts: Ints, responses: Ints) -> tuple[Ints, Ints]:
    """Row and column whose logits predict each generated token: from the last prompt token to the last but one."""
    rows = np.repeat(np.arange(len(prompts)), responses)
    return rows, numbered(responses) + prompts[rows] - 1


def numbered(counts: Ints) -> Ints:
    """0, 1, ... for each of the counts, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True)
class Flat:
    """The generated tokens of a micro-batch, one entry per token; `lengths` and `uids` have one per sample."""

    targets: Tensor
    behaviour_logprobs: Tensor
    policy_versions: NDArray[np.uint32]
    rows: Tensor  # the sample of each token
    lengths: Tensor  # trained tokens of each sample
    temperature: Tensor | None  # per token; None if all are 1
    mask: Tensor | None  # true where trained; None if all are
    uids: list[int]

    def per_token(self, per_sample: Sequence[float], dtype: torch.dtype) -> Tensor:
        """A value of each sample, repeated for its tokens: all of them share its advantage."""
        return torch.tensor(list(per_sample), dtype=dtype, device=self.rows.device)[self.rows]


def flatten(samples: Sequence[Sample], dtype: torch.dtype, device: torch.device) -> Flat:
    """What the loss needs of the generated tokens, on the device; floats are of that type."""

    def placed(values: NDArray[Any], kind: torch.dtype) -> Tensor:
        return torch.from_numpy(values).to(device, kind)

    counts = np.array([len(sample.token_ids) for sample in samples])
    context = np.array([sample.context for sample in samples])
    temperatures = np.array([sample.temperature for sample in samples])
    rows = np.repeat(np.arange(len(samples)), counts)
    return Flat(
        targets=placed(np.concatenate([sample.token_ids for sample in samples]), torch.int64),
        behaviour_logprobs=placed(np.concatenate([sample.behaviour_logprobs for sample in samples]), dtype),
        policy_versions=np.concatenate([sample.policy_versions for sample in samples]),
        rows=placed(rows, torch.int64), lengths=placed(counts - context, torch.int64),
        temperature=None if (temperatures == 1).all() else placed(temperatures[rows], dtype),
        mask=placed(numbered(counts) >= context[rows], torch.bool) if context.any() else None,
        uids=[sample.uid for sample in samples],
    )


# -- rounds of several ranks ------------------------------------------------------------

Round = list[list[int]]  # of each rank the positions of its samples


def rounds_of(lengths: Sequence[int], ranks: int, budget: int, quadratic: float = 0.0) -> list[Round]:
    """Every position once, the longest first to the rank that has the least to do, at most `budget` tokens per rank and
    round; a single longer one is a share by itself. `quadratic`: cost of a token per token before it, in tokens.
    """
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
