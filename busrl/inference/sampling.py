"""Draws one token for each row from logits, all rows at once, by inverting the cumulative distribution.

Used by the torch engine; knows nothing of models, caches or requests. Sums are taken in float64, so that a token is
drawn with its probability even from a vocabulary of 10**5 and the result does not hang on the order of additions.

- The log-probability returned is that of the distribution drawn from: after temperature, and after top-p if it is on.
- Logits that are not finite give a log-probability of NaN and some token of the vocabulary; the caller looks.
- Temperature 0 is greedy: the first largest logit, log-probability 0 (a distribution with one point).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Settings:
    """Sampling settings of all rows, [rows, 1] each; None where no row needs the step."""

    inverse_temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    top_p: torch.Tensor | None


def draw(logits: torch.Tensor, uniforms: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and float32 log-probabilities, [rows] each, for logits [rows, vocabulary] and uniforms [rows, 1]."""
    scores = logits.float()
    if settings.inverse_temperature is not None:
        scores = scores * settings.inverse_temperature
    logprobs = torch.log_softmax(scores, dim=-1)
    if settings.top_p is not None:
        logprobs = _truncate(logprobs, settings.top_p)
    cdf = logprobs.double().exp_().cumsum_(dim=-1)
    tokens = torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True)
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)  # only rows with a NaN are beyond
    chosen = logprobs.gather(-1, tokens)
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, logits.argmax(dim=-1, keepdim=True), tokens)
        chosen = chosen.masked_fill(settings.greedy & ~chosen.isnan(), 0.0)
    return tokens.squeeze(-1), chosen.squeeze(-1).clamp_(max=0.0)


def _truncate(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the likeliest tokens until their mass reaches top_p (the one that reaches it is kept), and renormalise."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().exp_().cumsum_(dim=-1) - ordered.double().exp_()
    beyond = (before >= top_p) & (top_p < 1.0)
    beyond[:, 0] = False
    kept = logprobs.masked_fill(torch.zeros_like(beyond).scatter_(-1, order, beyond), -torch.inf)
    return torch.log_softmax(kept, dim=-1)
