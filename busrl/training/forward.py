"""From samples to one row of logits per trained token, in the flat order of `batch`, with as little work as the model
allows.

`choose` looks at the model once and picks: the lean forward of `lean` where it gives the same numbers, else the
decoder and the head apart (only trained positions meet the vocabulary), else `logits_to_keep`, else all logits.

- A shorter way is taken only after it gave the model's own logits on a probe: models that scale or cap logits differ
  there.
- No attention mask is passed: rows are padded at the right and attention is causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .batch import Padded, Sample, pad
from .lean import LeanForward, fits
from .model import takes_logits_to_keep, vocabulary

PROBE_TOLERANCE = 1e-4


class Forward(Protocol):
    """`together`: computes a shared prompt once and pads nothing; a group should be in one micro-batch."""

    name: str
    together: bool

    def logits(self, samples: Sequence[Sample], padded: Padded) -> Tensor: ...


class FullLogits:
    """All logits of all positions, then the wanted ones: works for every model, costs the most."""

    name, together = "full", False

    def __init__(self, model: Any) -> None:
        self.model = model

    def logits(self, samples: Sequence[Sample], padded: Padded) -> Tensor:
        logits: Tensor = self.model(input_ids=_inputs(padded, self.model), use_cache=False).logits
        return logits[padded.rows, padded.columns]


class KeptLogits:
    """The logits of the columns in which any sample has a trained token."""

    name, together = "logits_to_keep", False

    def __init__(self, model: Any) -> None:
        self.model = model

    def logits(self, samples: Sequence[Sample], padded: Padded) -> Tensor:
        first = int(padded.columns.min())
        keep = torch.arange(first, padded.ids.shape[1] - 1, device=self.model.device)
        logits: Tensor = self.model(input_ids=_inputs(padded, self.model), use_cache=False, logits_to_keep=keep).logits
        return logits[padded.rows, padded.columns - first]


class HeadApart:
    """The decoder over everything, the head over trained positions only."""

    name, together = "head_apart", False

    def __init__(self, model: Any) -> None:
        self.decoder, self.head, self.model = model.base_model, model.get_output_embeddings(), model

    def logits(self, samples: Sequence[Sample], padded: Padded) -> Tensor:
        hidden = self.decoder(input_ids=_inputs(padded, self.model), use_cache=False)[0]
        logits: Tensor = self.head(hidden[padded.rows, padded.columns])
        return logits


def _inputs(padded: Padded, model: Any) -> Tensor:
    # The last column predicts nothing that is trained.
    return padded.ids[:, :-1].to(model.device)


def choose(model: Any, lean: bool = True) -> Forward:
    """The cheapest way that gives the model's own logits."""
    for way in _candidates(model, lean):
        if agrees(way, model):
            return way
    return FullLogits(model)


def _candidates(model: Any, lean: bool) -> list[Forward]:
    found: list[Forward] = []
    if lean and fits(model):
        found.append(LeanForward(model))
    if model.get_output_embeddings() is not None and model.base_model is not model:
        found.append(HeadApart(model))
    if takes_logits_to_keep(model):
        found.append(KeptLogits(model))
    return found


def agrees(way: Forward, model: Any) -> bool:
    """Compares with the full logits on small samples of different lengths, some of which share a prompt."""
    samples, padded = probe(vocabulary(model))
    with torch.no_grad():
        expected = FullLogits(model).logits(samples, padded).float()
        try:
            found = way.logits(samples, padded).float()
        except Exception:  # a decoder with another call than most: this way is not for it, whatever it raises
            return False
        scale = max(1.0, float(expected.abs().max()))
        return found.shape == expected.shape and bool((found - expected).abs().max() <= PROBE_TOLERANCE * scale)


def probe(size: int) -> tuple[list[Sample], Padded]:
    """Fixed samples with ids spread over the vocabulary."""

    def ids(start: int, count: int) -> Any:
        return ((np.arange(count) * 7919 + start) % size).astype(np.int32)

    def sample(member: int, group: int, prompt: Any, tokens: Any) -> Sample:
        count = len(tokens)
        return Sample(member, group, member, prompt, tokens, np.zeros(count, np.float32), np.zeros(count, np.uint32))

    shared = ids(1, 3)
    samples = [sample(0, 0, shared, ids(2, 4)), sample(1, 0, shared, ids(5, 2)), sample(2, 1, ids(3, 1), ids(9, 3))]
    return samples, pad(samples)
