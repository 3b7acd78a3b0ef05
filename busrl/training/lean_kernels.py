"""The four steps of a Llama-like layer that are not matrix products, with derivatives written out.

Used by `lean` alone. On small models the time goes into passes over activations; each of these needs about half of
the passes that the same formula costs when autograd takes it apart. Knows nothing of models.

- Every derivative is held against autograd of the plain formula in the tests.
- Nothing here can be differentiated twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .lean_plan import Heads, Spot


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rows / sqrt(mean of squares + eps) * weight."""
    result: Tensor = _RmsNorm.apply(rows, weight, eps)  # type: ignore[no-untyped-call]
    return result


def swiglu(hidden: Tensor) -> Tensor:
    """silu of the first half of the columns times the second half."""
    result: Tensor = _Swiglu.apply(hidden)  # type: ignore[no-untyped-call]
    return result


def head_norm_rope(projected: Tensor, heads: Heads, weight: Tensor | None, eps: float, cosine: Tensor,
                   sine: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Norm (if the model has one) and rotation. Query heads [rows, heads, size]; key heads and value heads together."""
    result: tuple[Tensor, Tensor] = _HeadNormRope.apply(  # type: ignore[no-untyped-call]
        projected.view(-1, heads.all, heads.size), heads, weight, eps, cosine, sine)  # fmt: skip
    return result


def attention(queries: Tensor, pairs: Tensor, spots: tuple[Spot, ...], heads: Heads, scale: float) -> Tensor:
    """Attention over some rectangles that cover the last rows; one row of all query heads for each of them."""
    result: Tensor = _Attention.apply(queries, pairs, spots, heads, scale)  # type: ignore[no-untyped-call]
    return result


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(rows, eps)
        normal = rows * inverse
        ctx.save_for_backward(normal, inverse, weight)
        return normal * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        normal, inverse, weight = ctx.saved_tensors
        product = gradients[0] * normal
        shared = torch.mv(product, weight).div_(-weight.numel())[:, None]
        rows = (gradients[0] * weight).addcmul_(normal, shared).mul_(inverse)
        return rows, product.sum(0), None


def _inverse_rms(values: Tensor, eps: float) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return size.square_().div_(values.shape[-1]).add_(eps).rsqrt_()


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, -1)
        active = F.silu(gate)
        ctx.save_for_backward(hidden, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        hidden, active = ctx.saved_tensors
        gate, up = hidden.chunk(2, -1)
        out = torch.empty_like(hidden)
        to_gate, to_up = out.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=to_gate)
        torch.mul(gradients[0], active, out=to_up)
        return out


class _HeadNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, heads: Heads, weight: Tensor | None, eps: float, cosine: Tensor,
                sine: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        queries = torch.empty(len(values), heads.query, heads.size, dtype=values.dtype)
        pairs = torch.empty(len(values), 2 * heads.key, heads.size, dtype=values.dtype)
        turned = heads.query + heads.key
        part = values[:, :turned]
        ctx.heads, ctx.normed = heads, weight is not None
        if weight is None:
            ctx.save_for_backward(cosine, sine)
        else:
            inverse = _inverse_rms(part, eps)
            normal = part * inverse
            ctx.save_for_backward(cosine, sine, normal, inverse, weight)
            part = normal * weight
        _rotate(part[:, : heads.query], cosine, sine, queries)
        _rotate(part[:, heads.query :], cosine, sine, pairs[:, : heads.key])
        pairs[:, heads.key :] = values[:, turned:]
        return queries, pairs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine, *rest = ctx.saved_tensors
        heads, turned = ctx.heads, ctx.heads.query + ctx.heads.key
        out = torch.empty(len(gradients[0]), heads.all, heads.size, dtype=gradients[0].dtype)
        _rotate_back(gradients[0], cosine, sine, out[:, : heads.query])
        _rotate_back(gradients[1][:, : heads.key], cosine, sine, out[:, heads.query : turned])
        out[:, turned:] = gradients[1][:, heads.key :]
        if not ctx.normed:
            return out, None, None, None, None, None
        normal, inverse, weight = rest
        part = out[:, :turned]
        product = part * normal
        to_weight = product.sum(0)
        shared = product.mul_(weight).sum(-1, keepdim=True).div_(-heads.size)
        part.mul_(weight).addcmul_(normal, shared).mul_(inverse)
        return out, None, to_weight, None, None, None


def _rotate(values: Tensor, cosine: Tensor, sine: Tensor, out: Tensor) -> None:
    half = values.shape[-1] // 2
    torch.mul(values, cosine, out=out)
    out[..., :half].addcmul_(values[..., half:], sine[..., :half], value=-1)
    out[..., half:].addcmul_(values[..., :half], sine[..., half:])


def _rotate_back(gradient: Tensor, cosine: Tensor, sine: Tensor, out: Tensor) -> None:
    half = gradient.shape[-1] // 2
    torch.mul(gradient, cosine, out=out)
    out[..., :half].addcmul_(gradient[..., half:], sine[..., half:])
    out[..., half:].addcmul_(gradient[..., :half], sine[..., :half], value=-1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, pairs: Tensor, spots: tuple[Spot, ...], heads: Heads, scale: float
    ) -> Tensor:
        mixed, kept = [], []
        for spot in spots:
            sequences, wide = spot.bias.shape[0], spot.bias.shape[1]
            # Query heads of one key head are one matrix: [sequences x key heads, repeats x queries, size].
            asked = queries.view(-1, heads.size).index_select(0, spot.queries)
            asked = asked.view(sequences * heads.key, -1, heads.size)
            keys, values = _unpaired(pairs.index_select(0, spot.keys), sequences, heads)
            scores = _scaled_product(asked, keys.transpose(1, 2), scale)
            scores.view(sequences, heads.query, wide, -1).add_(spot.bias[:, None])
            shares = torch.softmax(scores, -1)
            mixed.append(torch.bmm(shares, values).view(-1, heads.size).index_select(0, spot.results))
            kept += [asked, keys, values, shares]
        ctx.save_for_backward(*kept)
        ctx.rest = (spots, heads, scale, len(queries))
        return torch.cat(mixed).view(-1, heads.query * heads.size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        spots, heads, scale, rows = ctx.rest
        gradient = gradients[0].reshape(-1, heads.size)
        to_queries, to_pairs, done = [], [], 0
        for spot, kept in zip(spots, zip(*[iter(ctx.saved_tensors)] * 4)):
            part = gradient[done : done + len(spot.results)]
            done += len(spot.results)
            for_queries, for_pairs = _attention_back(part, spot, heads, scale, *kept)
            to_queries.append(for_queries)
            to_pairs.append(for_pairs)
        untouched = gradient.new_zeros(rows * heads.query - done, heads.size)
        # A shared prompt's keys collect from all samples that read them; padding adds zeros.
        index = torch.cat([spot.keys for spot in spots])
        collected = torch.ops.aten.embedding_dense_backward(torch.cat(to_pairs), index, rows, -1, False)
        return (torch.cat([untouched, *to_queries]).view(rows, heads.query, heads.size),
                collected.view(rows, -1, heads.size), None, None, None)  # fmt: skip


def _attention_back(
    gradient: Tensor,
    spot: Spot,
    heads: Heads,
    scale: float,
    asked: Tensor,
    keys: Tensor,
    values: Tensor,
    shares: Tensor,
) -> tuple[Tensor, Tensor]:
    mixed = torch.zeros_like(asked).view(-1, heads.size).index_copy_(0, spot.results, gradient).view(asked.shape)
    to_scores = torch._softmax_backward_data(torch.bmm(mixed, values.transpose(1, 2)), shares, -1, shares.dtype)
    to_asked = _scaled_product(to_scores, keys, scale).view(-1, heads.size).index_select(0, spot.results)
    to_keys = _scaled_product(to_scores.transpose(1, 2), asked, scale)
    return to_asked, _paired(to_keys, torch.bmm(shares.transpose(1, 2), mixed), len(spot.bias), heads)


def _unpaired(pairs: Tensor, sequences: int, heads: Heads) -> tuple[Tensor, Tensor]:
    """[sequences x length, key and value heads, size] to keys and values [sequences x key heads, length, size]."""
    split = pairs.view(sequences, -1, 2, heads.key, heads.size).permute(2, 0, 3, 1, 4).contiguous()
    both = split.view(2, sequences * heads.key, -1, heads.size)
    return both[0], both[1]


def _paired(keys: Tensor, values: Tensor, sequences: int, heads: Heads) -> Tensor:
    """The counterpart of `_unpaired`, one row per position."""
    both = torch.stack([part.view(sequences, heads.key, -1, heads.size).transpose(1, 2) for part in (keys, values)], 2)
    return both.view(-1, 2 * heads.key * heads.size)


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    unread = left.new_empty(()).expand(left.shape[0], left.shape[1], right.shape[2])
    return torch.baddbmm(unread, left, right, beta=0, alpha=scale)
