"""From samples to one row of logits per generated token, in the flat order of `batch`, with as little work as possible.

`choose_forward` looks at the model once and picks: the fused forward for small Llama-like models, else the decoder and
the head apart (only trained positions meet the vocabulary), else `logits_to_keep`, else all logits. Reads the
parameters of the Hugging Face model, so gradients end up where the optimiser looks. Knows nothing of losses.

- A shorter way is taken only after it gave the model's own logits on a probe: models that scale or cap logits differ
  there.
- No attention mask is passed: rows are padded at the right and attention is causal.
- The fused forward computes nothing twice and nothing that is not trained. Its rows are tokens without padding: the
  prompt of a group but for its last token, once for all members, then one row per generated token, in flat order: the
  position that predicts it. In the last layer only the latter are carried on.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from busrl.training.batch import Ints, Padded, Sample, pad
from busrl.training.model import vocabulary

# -- which rows attend to which ------------------------------------------------------

PIECES, SMALLEST_PIECE = 4, 32


class Heads(NamedTuple):
    """Head counts and size. A row of projections is [query heads, key heads, value heads] of `size` numbers each."""

    query: int
    key: int
    size: int

    @property
    def all(self) -> int:
        return self.query + 2 * self.key


@dataclass(frozen=True)
class AttentionBlock:
    """One attention over a rectangle, for consecutive rows."""

    queries: Tensor  # [sequences x heads x longest], indices into rows of single query heads
    keys: Tensor  # [sequences x longest context], rows
    bias: Tensor  # [sequences, queries, keys], 0 or -inf
    results: Tensor  # per row and head: its place in `queries`


@dataclass(frozen=True)
class Plan:
    """`prompts` and `own` cover the two kinds of rows, in the order of the rows."""

    ids: Tensor
    positions: Tensor
    shared: int  # rows of the first kind
    prompts: AttentionBlock
    own: tuple[AttentionBlock, ...]


def plan_of(samples: Sequence[Sample], heads: Heads, dtype: torch.dtype) -> Plan:
    """The plan of these samples."""
    prompts: dict[bytes, int] = {}
    which = np.array([prompts.setdefault(sample.prompt_ids.tobytes(), len(prompts)) for sample in samples])
    first = {index: sample for sample, index in zip(reversed(samples), which[::-1].tolist(), strict=True)}
    shared_lengths = np.array([len(first[index].prompt_ids) - 1 for index in range(len(prompts))])
    own_lengths = np.fromiter((len(sample.token_ids) for sample in samples), np.int64, len(samples))
    starts = shared_lengths[which]
    shared = int(shared_lengths.sum())
    pieces = [first[index].prompt_ids[:-1] for index in range(len(prompts))]
    pieces += [part for sample in samples for part in (sample.prompt_ids[-1:], sample.token_ids[:-1])]
    positions = np.concatenate([_counts(shared_lengths), _counts(own_lengths) + np.repeat(starts, own_lengths)])
    shared_first, own_first = _starts(shared_lengths), _starts(own_lengths) + shared
    none = np.zeros_like(shared_lengths)
    return Plan(
        ids=torch.from_numpy(np.concatenate(pieces).astype(np.int64)),
        positions=torch.from_numpy(positions), shared=shared,
        prompts=_block(none, none, shared_first, shared_lengths, heads, dtype),
        own=tuple(_block(shared_first[which[part]], starts[part], own_first[part], own_lengths[part], heads, dtype)
                  for part in _alike(own_lengths + starts)))


def _alike(lengths: Ints) -> list[slice]:
    """Consecutive samples cut where the lengths change enough: a rectangle per piece, little padding, few pieces."""
    pieces = min(PIECES, 1 + len(lengths) // SMALLEST_PIECE)
    edges = [len(lengths) * piece // pieces for piece in range(pieces + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(edges)]


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def _counts(lengths: Ints) -> Ints:
    return np.arange(int(lengths.sum())) - np.repeat(_starts(lengths), lengths)


def _block(
    before_first: Ints, before: Ints, first: Ints, lengths: Ints, heads: Heads, dtype: torch.dtype
) -> AttentionBlock:
    """Per sequence, attention of the rows from `first` on to themselves and to `before` rows from `before_first` on."""
    wide = max(int(lengths.max()), 1)
    place = np.arange(wide)
    queries = np.where(place < lengths[:, None], first[:, None] + place, 0)
    blocks = np.arange(max(int((before + lengths).max()), 1))
    own = np.where(blocks < (before + lengths)[:, None], first[:, None] + blocks - before[:, None], 0)
    keys = np.where(blocks < before[:, None], before_first[:, None] + blocks, own)
    seen = blocks <= before[:, None, None] + place[:, None]
    bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
    return AttentionBlock(
        queries=_per_head(queries, heads), keys=torch.from_numpy(keys).view(-1), bias=bias,
        results=_results(lengths, wide, heads))


def _per_head(rows: Ints, heads: Heads) -> Tensor:
    """[sequences, length] of rows to [sequences x heads x length] of rows of single heads."""
    return torch.from_numpy(rows[:, None] * heads.query + np.arange(heads.query)[:, None]).view(-1)


def _results(lengths: Ints, wide: int, heads: Heads) -> Tensor:
    """Per row and head the place in [sequences, heads, wide]."""
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    each = np.arange(heads.query)
    return torch.from_numpy((sequences[:, None] * heads.query + each) * wide + _counts(lengths)[:, None]).view(-1)


# -- the steps of a layer that are not matrix products, with their derivatives -------


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rows / sqrt(mean of squares + eps) * weight."""
    result: Tensor = _RmsNorm.apply(rows, weight, eps)  # type: ignore[no-untyped-call]
    return result


def swiglu(hidden: Tensor) -> Tensor:
    """silu of the first half of the columns times the second half."""
    result: Tensor = _Swiglu.apply(hidden)  # type: ignore[no-untyped-call]
    return result


def head_norm_rope(projected: Tensor, heads: Heads, weight: Tensor | None, eps: float, cosine: Tensor,
                   sine: Tensor) -> tuple[Tensor, Tensor]:
    """Norm (if the model has one) and rotation. Query heads [rows, heads, size]; key heads and value heads together."""
    result: tuple[Tensor, Tensor] = _HeadNormRope.apply(  # type: ignore[no-untyped-call]
        projected.view(-1, heads.all, heads.size), heads, weight, eps, cosine, sine)
    return result


def attention(queries: Tensor, pairs: Tensor, blocks: tuple[AttentionBlock, ...], heads: Heads, scale: float) -> Tensor:
    """Attention over some rectangles that cover the last rows; one row of all query heads for each of them."""
    result: Tensor = _Attention.apply(queries, pairs, blocks, heads, scale)  # type: ignore[no-untyped-call]
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
                sine: Tensor) -> tuple[Tensor, Tensor]:
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
        ctx: Any, queries: Tensor, pairs: Tensor, blocks: tuple[AttentionBlock, ...], heads: Heads, scale: float
    ) -> Tensor:
        mixed, kept = [], []
        for block in blocks:
            sequences, wide = block.bias.shape[0], block.bias.shape[1]
            # Query heads of one key head are one matrix: [sequences x key heads, repeats x queries, size].
            asked = queries.view(-1, heads.size).index_select(0, block.queries)
            asked = asked.view(sequences * heads.key, -1, heads.size)
            keys, values = _unpaired(pairs.index_select(0, block.keys), sequences, heads)
            scores = _scaled_product(asked, keys.transpose(1, 2), scale)
            scores.view(sequences, heads.query, wide, -1).add_(block.bias[:, None])
            shares = torch.softmax(scores, -1)
            mixed.append(torch.bmm(shares, values).view(-1, heads.size).index_select(0, block.results))
            kept += [asked, keys, values, shares]
        ctx.save_for_backward(*kept)
        ctx.rest = (blocks, heads, scale, len(queries))
        return torch.cat(mixed).view(-1, heads.query * heads.size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        blocks, heads, scale, rows = ctx.rest
        gradient = gradients[0].reshape(-1, heads.size)
        to_queries, to_pairs, done = [], [], 0
        for block, kept in zip(blocks, zip(*[iter(ctx.saved_tensors)] * 4)):
            part = gradient[done : done + len(block.results)]
            done += len(block.results)
            for_queries, for_pairs = _attention_back(part, block, heads, scale, *kept)
            to_queries.append(for_queries)
            to_pairs.append(for_pairs)
        untouched = gradient.new_zeros(rows * heads.query - done, heads.size)
        # A shared prompt's keys collect from all samples that read them; padding adds zeros.
        index = torch.cat([block.keys for block in blocks])
        collected = torch.ops.aten.embedding_dense_backward(torch.cat(to_pairs), index, rows, -1, False)
        return (torch.cat([untouched, *to_queries]).view(rows, heads.query, heads.size),
                collected.view(rows, -1, heads.size), None, None, None)


def _attention_back(
    gradient: Tensor,
    block: AttentionBlock,
    heads: Heads,
    scale: float,
    asked: Tensor,
    keys: Tensor,
    values: Tensor,
    shares: Tensor,
) -> tuple[Tensor, Tensor]:
    mixed = torch.zeros_like(asked).view(-1, heads.size).index_copy_(0, block.results, gradient).view(asked.shape)
    to_scores = torch._softmax_backward_data(torch.bmm(mixed, values.transpose(1, 2)), shares, -1, shares.dtype)
    to_asked = _scaled_product(to_scores, keys, scale).view(-1, heads.size).index_select(0, block.results)
    to_keys = _scaled_product(to_scores.transpose(1, 2), asked, scale)
    return to_asked, _paired(to_keys, torch.bmm(shares.transpose(1, 2), mixed), len(block.bias), heads)


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


# -- the fused forward ---------------------------------------------------------------

MODEL_TYPES = ("llama", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3")  # angles that do not depend on the length of the batch
LARGEST_HIDDEN = 1024  # above, matrix products are all that counts and the plain forward is as good


class FusedForward:
    """Holds the model and its head counts; the plan of a micro-batch is made from its samples."""

    name, together = "fused", True

    def __init__(self, model: Any) -> None:
        self.model, self.decoder = model, model.model
        first = self.decoder.layers[0].self_attn
        size = int(first.head_dim)
        self.heads = Heads(first.q_proj.out_features // size, first.k_proj.out_features // size, size)
        self.scale = float(first.scaling)

    def logits(self, samples: Sequence[Sample], padded: Padded) -> Tensor:
        plan = plan_of(samples, self.heads, self.model.dtype)
        rows = F.embedding(plan.ids, self.decoder.embed_tokens.weight)
        cosine, sine = self.decoder.rotary_emb(rows, plan.positions[None])
        rope = (cosine[0][:, None], sine[0][:, None])
        last = len(self.decoder.layers) - 1
        for depth, layer in enumerate(self.decoder.layers):
            rows = self._layer(layer, rows, rope, plan, final=depth == last)
        logits: Tensor = self.model.lm_head(_normed(self.decoder.norm, rows))
        return logits

    def _layer(self, layer: Any, rows: Tensor, rope: tuple[Tensor, Tensor], plan: Plan, final: bool) -> Tensor:
        part = layer.self_attn
        projected = _linear(_normed(layer.input_layernorm, rows), part.q_proj, part.k_proj, part.v_proj)
        queries, pairs = head_norm_rope(projected, self.heads, _head_weights(part, self.heads), _head_eps(part), *rope)
        blocks = plan.own if final or not plan.shared else (plan.prompts, *plan.own)
        mixed = attention(queries, pairs, blocks, self.heads, self.scale)
        rows = _added(rows[plan.shared :] if final else rows, mixed, part.o_proj)
        hidden = _linear(_normed(layer.post_attention_layernorm, rows), layer.mlp.gate_proj, layer.mlp.up_proj)
        return _added(rows, swiglu(hidden), layer.mlp.down_proj)


def _normed(norm: Any, rows: Tensor) -> Tensor:
    return rms_norm(rows, norm.weight, float(norm.variance_epsilon))


def _linear(rows: Tensor, *layers: nn.Linear) -> Tensor:
    """Several projections of the same rows as one product."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return F.linear(rows, torch.cat(weights), torch.cat(biases) if biases else None)


def _added(residual: Tensor, rows: Tensor, layer: nn.Linear) -> Tensor:
    total = torch.addmm(residual, rows, layer.weight.t())
    return total if layer.bias is None else total + layer.bias


def _head_weights(part: Any, heads: Heads) -> Tensor | None:
    """The weights of the norms on query and key heads, one row per head; None where the model has none."""
    if getattr(part, "q_norm", None) is None:
        return None
    return torch.cat([part.q_norm.weight.expand(heads.query, -1), part.k_norm.weight.expand(heads.key, -1)])


def _head_eps(part: Any) -> float:
    return float(part.q_norm.variance_epsilon) if getattr(part, "q_norm", None) is not None else 0.0


def fused_fits(model: Any) -> bool:
    """True if the model is of a family and size that this forward is written for; the probe has the last word."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config.hidden_size > LARGEST_HIDDEN or model.device.type != "cpu":
        return False
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if any(hasattr(module, "base_layer") for module in model.modules()):
        return False  # an adapter is on it: a layer is more than the weight that is read here
    return all(kind == "full_attention" for kind in kinds) and rope in STATIC_ROPE and config.hidden_act == "silu"


# -- the choice of a forward ---------------------------------------------------------

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


def choose_forward(model: Any, fused: bool = True) -> Forward:
    """The cheapest way that gives the model's own logits."""
    for way in _candidates(model, fused):
        if forward_agrees(way, model):
            return way
    return FullLogits(model)


def _candidates(model: Any, fused: bool) -> list[Forward]:
    found: list[Forward] = []
    if fused and fused_fits(model):
        found.append(FusedForward(model))
    if model.get_output_embeddings() is not None and model.base_model is not model:
        found.append(HeadApart(model))
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        found.append(KeptLogits(model))
    return found


def forward_agrees(way: Forward, model: Any) -> bool:
    """Compares with the full logits on small samples of different lengths, some of which share a prompt."""
    samples, padded = probe_forward(vocabulary(model))
    with torch.no_grad():
        expected = FullLogits(model).logits(samples, padded).float()
        try:
            found = way.logits(samples, padded).float()
        except Exception:  # a decoder with another call than most: this way is not for it, whatever it raises
            return False
        scale = max(1.0, float(expected.abs().max()))
        return found.shape == expected.shape and bool((found - expected).abs().max() <= PROBE_TOLERANCE * scale)


def probe_forward(size: int) -> tuple[list[Sample], Padded]:
    """Fixed samples with ids spread over the vocabulary."""

    def ids(start: int, count: int) -> Any:
        return ((np.arange(count) * 7919 + start) % size).astype(np.int32)

    def sample(member: int, group: int, prompt: Any, tokens: Any) -> Sample:
        count = len(tokens)
        return Sample(member, group, member, prompt, tokens, np.zeros(count, np.float32), np.zeros(count, np.uint32))

    shared = ids(1, 3)
    samples = [sample(0, 0, shared, ids(2, 4)), sample(1, 0, shared, ids(5, 2)), sample(2, 1, ids(3, 1), ids(9, 3))]
    return samples, pad(samples)
