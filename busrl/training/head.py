"""The output head in pieces: log-probability and entropy per row from hidden states, without ever holding all logits.

Called by the forward passes, on the rows whose next token is wanted. Talks to the head's weight alone; knows nothing
of samples, losses or the decoder.

- At most `rows` rows of logits exist at a time, in float32, in forward and in backward alike: backward computes them
  again from the hidden states.
- The gradient of the weight is summed in float32 whatever type the weight has: a bfloat16 sum over many pieces loses
  bits.
- A token that cannot occur (a logit of -inf) adds nothing to entropy or gradient; a row without a token cannot.
- An entropy that no loss reads costs nothing in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from busrl.data.vocabulary import ALL_ROWS, TokenRows

PIECE_BYTES = {"cpu": 1 << 26}  # of one float32 buffer of logits; forward holds one, backward at most three
OTHERWISE = 1 << 28  # on an accelerator, which wants larger matrix products


@dataclass(frozen=True)
class Head:
    """The way in which a model makes logits of hidden states: x = cap tanh(scale (h W^T + b) / cap), each part only
    where it has it.

    `rows`: rows of logits at a time; 0 = as many as PIECE_BYTES allow. `dtype`: of the matrix product; None: as it is.
    """

    scale: float = 1.0
    cap: float = 0.0
    rows: int = 0
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, config: Any, rows: int = 0, dtype: torch.dtype | None = None) -> Head:
        """From a transformers configuration: Gemma caps its logits, Cohere and Granite scale them."""
        times, over, cap = (
            getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping")
        )
        return cls((times or 1.0) / (over or 1.0), cap or 0.0, rows, dtype)

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None = None,
        bias: Tensor | None = None, token_rows: TokenRows = ALL_ROWS,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of the target and entropy in nats, float32 [n] each, both with gradient.

        hidden [n, width], weight [vocabulary, width], targets int64 [n], bias [vocabulary]; `temperature` per row, None
        where all are 1; over the rows of `token_rows`. Targets [n, m] give log-probabilities [n, m]. Float64 inputs are
        computed in float64.
        """
        single = targets.ndim == 1
        dtype = self.dtype or hidden.dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        rows = self._rows(len(weight), hidden.device.type)
        logprobs, entropy = _Pieces.apply(  # type: ignore[no-untyped-call]
            hidden, weight, targets[:, None] if single else targets, temperature, bias, self.scale, self.cap, rows,
            token_rows,
        )
        return (logprobs[:, 0] if single else logprobs), entropy

    @torch.no_grad()
    def best(
        self, hidden: Tensor, weight: Tensor, count: int, limit: int, temperature: Tensor | None = None,
        bias: Tensor | None = None, token_rows: TokenRows = ALL_ROWS,
    ) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities (over all tokens), [n, count], of each row's most probable tokens below `limit`."""
        dtype = self.dtype or hidden.dtype
        hidden, weight, best = hidden.to(dtype), weight.to(dtype), []
        rows = self._rows(len(weight), hidden.device.type)
        room = _room(hidden, weight, rows)
        for part in _parts(len(hidden), rows):
            logits = piece_logits(hidden[part], weight, bias, self.scale, self.cap, room)
            _divide(token_rows.mask(logits), temperature, part)
            values, ids = logits[:, :limit].topk(min(count, limit, token_rows.tokens), -1)
            best.append((ids, values - logits.logsumexp(-1, keepdim=True)))
        ids, logprobs = (torch.cat(some) for some in zip(*best, strict=True))
        return ids, logprobs

    def _rows(self, words: int, kind: str) -> int:
        return self.rows or max(1, PIECE_BYTES.get(kind, OTHERWISE) // (4 * words))


class _Pieces(torch.autograd.Function):
    """Keeps hidden states, weight and log-normaliser; see the head of the module."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None, bias: Tensor | None,
        scale: float, cap: float, rows: int, token_rows: TokenRows,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.cap, ctx.rows, ctx.token_rows = scale, cap, rows, token_rows
        exact = torch.promote_types(hidden.dtype, torch.float32)
        entropy, normaliser = (hidden.new_empty(len(hidden), dtype=exact) for _ in range(2))
        logprobs = hidden.new_empty(targets.shape, dtype=exact)
        room = _room(hidden, weight, rows)
        for part in _parts(len(hidden), rows):
            logits = piece_logits(hidden[part], weight, bias, scale, cap, room)
            _divide(token_rows.mask(logits), temperature, part)
            wanted, largest = logits.gather(-1, targets[part]), logits.amax(-1)
            shares = logits.sub_(largest[:, None]).exp_()
            sums = shares.sum(-1)
            normaliser[part] = sums.log() + largest
            logprobs[part] = wanted - normaliser[part, None]
            entropy[part] = torch.special.entr(shares.div_(sums[:, None]), out=shares).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperature, bias, normaliser, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, _, _, bias, normaliser, _ = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if ctx.needs_input_grad[4] else None
        room = _room(hidden, weight, ctx.rows)
        for part in _parts(len(hidden), ctx.rows):
            change = _to_logits(ctx, part, gradients, room)
            if to_bias is not None:
                to_bias += change.sum(0)
            change = change.to(hidden.dtype)
            if to_hidden is not None:
                torch.mm(change, weight, out=to_hidden[part])
            if to_weight is not None and to_weight.dtype == hidden.dtype:
                to_weight.addmm_(change.t(), hidden[part])
            elif to_weight is not None:
                to_weight += change.t() @ hidden[part]
        as_weight = None if to_weight is None else to_weight.to(weight.dtype)
        as_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, as_weight, None, None, as_bias, None, None, None, None


def _to_logits(ctx: Any, part: slice, gradients: tuple[Tensor | None, ...], room: Tensor) -> Tensor:
    """The gradient of one piece's h W^T + b: g (1[target] - p) of a log-probability, -g p (log p + H) of an entropy."""
    hidden, weight, targets, temperature, bias, normaliser, entropy = ctx.saved_tensors
    logits = piece_logits(hidden[part], weight, bias, ctx.scale, ctx.cap, room)
    slope = None if not ctx.cap else 1 - (logits / ctx.cap).square_()
    _divide(ctx.token_rows.mask(logits), temperature, part)
    logs = logits.sub_(normaliser[part, None])
    of_logprobs, of_entropy = gradients[0] if gradients[0] is None else gradients[0][part], gradients[1]
    of_entropy = None if of_entropy is None else of_entropy[part, None]
    of_all = None if of_logprobs is None else of_logprobs.sum(-1, keepdim=True)
    change = logs.exp_() if of_entropy is None else logs.exp()
    if of_entropy is not None:
        surprise = logs.clamp_(min=-1e4).add_(entropy[part, None]).mul_(of_entropy)
        change.mul_(surprise if of_all is None else surprise.add_(of_all))
    elif of_all is not None:
        change.mul_(of_all)
    change.neg_()
    if of_logprobs is not None:
        change.scatter_add_(-1, targets[part], of_logprobs)
    _divide(change, temperature, part)
    if slope is not None:
        change.mul_(slope)
    return change if ctx.scale == 1.0 else change.mul_(ctx.scale)


def _room(hidden: Tensor, weight: Tensor, rows: int) -> Tensor:
    """A buffer for the logits of any piece: a new one per piece would be mapped and zeroed each time."""
    return hidden.new_empty(min(rows, len(hidden)), len(weight))


def piece_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, cap: float, room: Tensor) -> Tensor:
    """In float32 at least, scaled and capped, before the temperature; in `room`, if that has the type."""
    logits = torch.mm(hidden, weight.t(), out=room[: len(hidden)])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits += bias
    if scale != 1.0:
        logits *= scale
    return logits if not cap else logits.div_(cap).tanh_().mul_(cap)


def _divide(rows: Tensor, temperature: Tensor | None, part: slice) -> None:
    if temperature is not None:
        rows.div_(temperature[part, None])


def _parts(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
