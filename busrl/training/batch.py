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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

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

    def fault(self, vocabulary: int) -> str | None:
        """Why this sample must not be trained, or None."""
        if len(self.prompt_ids) < 1 or len(self.token_ids) < 1:
            return f"{len(self.prompt_ids)} prompt and {len(self.token_ids)} generated tokens: at least one of each"
        counts = len(self.token_ids), len(self.behaviour_logprobs), len(self.policy_versions)
        if len(set(counts)) > 1:
            return "{} tokens, {} log-probabilities, {} versions".format(*counts)
        bad = self.behaviour_logprobs[~(np.isfinite(self.behaviour_logprobs) & (self.behaviour_logprobs <= 0))]
        if len(bad):
            return f"a log-probability is above 0 or not a finite number: {bad[:1].tolist()}"
        if not math.isfinite(self.reward):
            return f"reward {self.reward}: training needs a finite number"
        low = min(int(self.prompt_ids.min()), int(self.token_ids.min()))
        high = max(int(self.prompt_ids.max()), int(self.token_ids.max()))
        if low < 0 or high >= vocabulary:
            return f"token {low if low < 0 else high} is outside of the vocabulary of {vocabulary}"
        if not 0 <= self.context < len(self.token_ids):
            return f"{self.context} of {len(self.token_ids)} tokens are context: at least one must be left to train"
        return None if self.temperature > 0 else f"temperature {self.temperature}: training needs one above 0"


def all_sound(samples: Sequence[Sample], vocabulary: int) -> bool:
    """Whether none of `samples` has a `fault`, looked at together: much cheaper than one by one."""
    for s in samples:
        counted = len(s.token_ids) == len(s.behaviour_logprobs) == len(s.policy_versions) > 0 and len(s.prompt_ids) > 0
        sound = counted and s.temperature > 0 and math.isfinite(s.reward) and 0 <= s.context < len(s.token_ids)
        if not sound:
            return False
    ids = np.concatenate([ids for s in samples for ids in (s.prompt_ids, s.token_ids)])
    logprobs = np.concatenate([s.behaviour_logprobs for s in samples])
    # NaN compares as false with everything, and minus infinity is below every float.
    below = bool((logprobs <= 0).all()) and float(logprobs.min()) >= np.finfo(np.float32).min
    return below and int(ids.min()) >= 0 and int(ids.max()) < vocabulary


def cut(samples: Sequence[Sample], budget: int, together: bool = False) -> list[list[int]]:
    """Micro-batches as lists of indices, each sorted by length, so that little is padded; padded size at most `budget`.

    `together` is for a forward that computes a shared prompt once and pads nothing: the members of a group stay in one
    place, and the budget is in real tokens. A single sample above the budget is one micro-batch.
    """
    lengths = [sample.length for sample in samples]
    by_length = [(lengths[i], s.group, s.member) for i, s in enumerate(samples)]
    if not together:
        return list(_filled(sorted(range(len(samples)), key=by_length.__getitem__), lengths, budget))
    by_group = sorted(range(len(samples)), key=lambda i: (samples[i].group, samples[i].member))
    parts = _filled_exactly(by_group, lengths, budget)
    return [sorted(part, key=by_length.__getitem__) for part in parts]


def _filled(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    current: list[int] = []
    for index in order:  # ascending: the next is the widest
        if current and lengths[index] * (len(current) + 1) > budget:
            yield current
            current = []
        current.append(index)
    if current:
        yield current


def _filled_exactly(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Parts of about equal size: a small last part would cost as many calls as a full one."""
    total = sum(lengths)
    target = total / max(1, -(-total // budget))
    parts: list[list[int]] = []
    size = filled = 0
    for index in order:
        if not parts or size + lengths[index] > budget or filled >= target * len(parts):
            parts.append([])
            size = 0
        parts[-1].append(index)
        size += lengths[index]
        filled += lengths[index]
    return parts


@dataclass(frozen=True)
class Padded:
    """A right-padded rectangle of whole samples. Causal attention never looks right, so the padding needs no mask."""

    ids: Tensor  # [samples, longest], 0 in the padding
    rows: Tensor  # of each trained token: its sample,
    columns: Tensor  # and the position that predicts it

    def to(self, device: torch.device) -> Padded:
        return Padded(self.ids.to(device), self.rows.to(device), self.columns.to(device))


def pad(samples: Sequence[Sample]) -> Padded:
    """The rectangle and, per trained token, the place of its logits."""
    prompts, responses = lengths_of(samples)
    lengths = prompts + responses
    ids = np.zeros((len(samples), int(lengths.max())), np.int64)
    pieces = [part for sample in samples for part in (sample.prompt_ids, sample.token_ids)]
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = np.concatenate(pieces)
    rows, columns = predicting_positions(prompts, responses)
    return Padded(torch.from_numpy(ids), torch.from_numpy(rows), torch.from_numpy(columns))


def lengths_of(samples: Sequence[Sample]) -> tuple[Ints, Ints]:
    """Prompt and response lengths."""
    prompts = np.fromiter((len(sample.prompt_ids) for sample in samples), np.int64, len(samples))
    return prompts, np.fromiter((len(sample.token_ids) for sample in samples), np.int64, len(samples))


def predicting_positions(prompts: Ints, responses: Ints) -> tuple[Ints, Ints]:
    """Row and column whose logits predict each trained token: from the last prompt token to the last but one of all."""
    rows = np.repeat(np.arange(len(prompts)), responses)
    first = np.cumsum(responses) - responses
    return rows, np.arange(len(rows)) - np.repeat(first, responses) + prompts[rows] - 1


@dataclass(frozen=True)
class Flat:
    """The generated tokens of a micro-batch, one entry per token; `lengths` and `uids` have one per sample."""

    targets: Tensor
    behaviour_logprobs: Tensor
    policy_versions: NDArray[np.uint32]
    rows: Tensor  # the sample of each token
    lengths: Tensor  # trained tokens of each sample
    temperature: Tensor | None  # per token; None if all are 1
    mask: Tensor | None = None  # true where trained; None if all are
    uids: list[int] = field(default_factory=list)

    def per_token(self, per_sample: Sequence[float], dtype: torch.dtype) -> Tensor:
        """A value of each sample, repeated for its tokens: all of them share its advantage."""
        return torch.tensor(list(per_sample), dtype=dtype, device=self.rows.device)[self.rows]

    def to(self, device: torch.device) -> Flat:
        temperature = None if self.temperature is None else self.temperature.to(device)
        mask = None if self.mask is None else self.mask.to(device)
        moved = {name: getattr(self, name).to(device) for name in ("targets", "behaviour_logprobs", "rows", "lengths")}
        return replace(self, temperature=temperature, mask=mask, **moved)


def flatten(samples: Sequence[Sample], padded: Padded, dtype: torch.dtype) -> Flat:
    """What the loss needs of the tokens at the predicted positions; a prompt token has log-probability 0."""
    behaviour, versions = _at_positions(samples, padded)
    temperatures = torch.tensor([sample.temperature for sample in samples], dtype=dtype)
    mask = _trained(samples, padded)
    rows = padded.rows if mask is None else padded.rows[mask]
    return Flat(
        targets=padded.ids[padded.rows, padded.columns + 1],
        behaviour_logprobs=torch.from_numpy(behaviour).to(dtype),
        policy_versions=versions,
        rows=padded.rows,
        lengths=torch.bincount(rows, minlength=len(samples)),
        temperature=None if bool((temperatures == 1).all()) else temperatures[padded.rows],
        mask=mask,
        uids=[sample.uid for sample in samples],
    )


def _trained(samples: Sequence[Sample], padded: Padded) -> Tensor | None:
    """Which of the flat tokens are trained; None if all are."""
    context = np.fromiter((sample.context for sample in samples), np.int64, len(samples))
    if not context.any():
        return None
    prompts, _ = lengths_of(samples)
    first = torch.from_numpy(prompts + context)
    return padded.columns + 1 >= first[padded.rows]


def _at_positions(samples: Sequence[Sample], padded: Padded) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    prompts, responses = lengths_of(samples)
    own_rows, own_columns = _generated_positions(prompts, responses)
    logprobs, versions = np.zeros(padded.ids.shape, np.float32), np.zeros(padded.ids.shape, np.uint32)
    logprobs[own_rows, own_columns] = np.concatenate([sample.behaviour_logprobs for sample in samples])
    versions[own_rows, own_columns] = np.concatenate([sample.policy_versions for sample in samples])
    rows, tokens = padded.rows.numpy(), padded.columns.numpy() + 1
    return logprobs[rows, tokens], versions[rows, tokens]


def _generated_positions(prompts: Ints, responses: Ints) -> tuple[Ints, Ints]:
    rows = np.repeat(np.arange(len(prompts)), responses)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(responses) - responses, responses) + prompts[rows]
