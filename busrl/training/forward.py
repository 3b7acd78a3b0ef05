"""From samples to one row of logits per generated token, in the flat order of `batch`, with as little work as possible.

`choose_forward` looks at the model once and picks: shared prompts for small Llama-like models, else the decoder and
the head apart (only trained positions meet the vocabulary), else `logits_to_keep`, else all logits. Calls the Hugging
Face model, its decoder or its layers. Knows nothing of losses.

- A shorter way is taken only after it gave the model's own logits on a probe: models that scale or cap logits differ
  there.
- No attention mask is passed: rows are padded at the right and attention is causal.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from busrl.training.batch import Ints, Sample, numbered, pad
from busrl.training.model import vocabulary

# -- ways through any model ----------------------------------------------------------


class Forward:
    """All logits of all positions, then the wanted ones: works for every model, costs the most."""

    name = "full"
    together = False  # computes a shared prompt once and pads nothing: a group should be in one micro-batch

    def __init__(self, model: Any) -> None:
        self.model = model

    def logits(self, samples: Sequence[Sample]) -> Tensor:
        """[generated tokens, vocabulary], on the model's device."""
        ids, rows, columns = self._padded(samples)
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits[rows, columns]

    def size(self, samples: Sequence[Sample]) -> int:
        """How many positions are computed, padding included."""
        lengths = [sample.length for sample in samples]
        return sum(lengths) if self.together else len(lengths) * max(lengths)

    def _padded(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        """The model's input without the last column, which predicts nothing; row and column of each wanted logit."""
        ids, rows, columns = (part.to(self.model.device) for part in pad(samples))
        return ids[:, :-1], rows, columns


class KeptLogits(Forward):
    """The logits of the columns in which any sample has a trained token."""

    name = "logits_to_keep"

    def logits(self, samples: Sequence[Sample]) -> Tensor:
        ids, rows, columns = self._padded(samples)
        first = int(columns.min())
        keep = torch.arange(first, ids.shape[1], device=ids.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
        return logits[rows, columns - first]


class HeadApart(Forward):
    """The decoder over everything, the head over trained positions only."""

    name = "head_apart"

    def logits(self, samples: Sequence[Sample]) -> Tensor:
        ids, rows, columns = self._padded(samples)
        hidden = self.model.base_model(input_ids=ids, use_cache=False)[0]
        logits: Tensor = self.model.get_output_embeddings()(hidden[rows, columns])
        return logits


# -- shared prompts ------------------------------------------------------------------

MODEL_TYPES = ("llama", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3")  # angles that do not depend on the length of the batch
LARGEST_HIDDEN = 1024  # above, matrix products are all that counts and the plain forward is as good
PIECES, SMALLEST_PIECE = 4, 32


@dataclass(frozen=True)
class Rectangle:
    """One attention over padded sequences of consecutive rows."""

    queries: Tensor  # [sequences, longest], rows
    keys: Tensor  # [sequences, longest context], rows
    bias: Tensor  # [sequences, 1, longest, longest context], 0 or -inf
    real: Tensor  # the places in `queries`, flattened, that are no padding


@dataclass(frozen=True)
class Plan:
    """The rows of a micro-batch: the prompt of a group but for its last token, once for all members, then one row per
    generated token, in flat order: the position that predicts it."""

    ids: Tensor
    positions: Tensor
    shared: int  # rows of the first kind
    prompts: Rectangle
    own: tuple[Rectangle, ...]


def plan_of(samples: Sequence[Sample], dtype: torch.dtype) -> Plan:
    """The plan of these samples, whose ids are int32; the biases are of that type."""
    prompts: dict[bytes, int] = {}
    which = np.array([prompts.setdefault(sample.prompt_ids.tobytes(), len(prompts)) for sample in samples])
    pieces = [np.frombuffer(prompt, np.int32)[:-1] for prompt in prompts]
    shared_lengths = np.array([len(piece) for piece in pieces])
    own_lengths = np.array([len(sample.token_ids) for sample in samples])
    pieces += [part for sample in samples for part in (sample.prompt_ids[-1:], sample.token_ids[:-1])]
    shared, before = int(shared_lengths.sum()), shared_lengths[which]
    positions = np.concatenate([numbered(shared_lengths), numbered(own_lengths) + np.repeat(before, own_lengths)])
    shared_first = np.cumsum(shared_lengths) - shared_lengths
    own_first = np.cumsum(own_lengths) - own_lengths + shared
    none = np.zeros_like(shared_lengths)
    # Consecutive samples in a few rectangles, cut where lengths change enough: little padding.
    parts = np.array_split(np.arange(len(samples)), min(PIECES, 1 + len(samples) // SMALLEST_PIECE))
    return Plan(
        ids=torch.from_numpy(np.concatenate(pieces).astype(np.int64)), positions=torch.from_numpy(positions),
        shared=shared, prompts=_rectangle(none, none, shared_first, shared_lengths, dtype),
        own=tuple(
            _rectangle(shared_first[which[part]], before[part], own_first[part], own_lengths[part], dtype)
            for part in parts
        ),
    )


def _rectangle(before_first: Ints, before: Ints, first: Ints, lengths: Ints, dtype: torch.dtype) -> Rectangle:
    """Per sequence, attention of the rows from `first` on to themselves and to `before` rows from `before_first` on."""
    place = np.arange(max(int(lengths.max()), 1))
    span = np.arange(max(int((before + lengths).max()), 1))
    real = place < lengths[:, None]
    own = np.where(span < (before + lengths)[:, None], first[:, None] + span - before[:, None], 0)
    seen = torch.from_numpy(span <= before[:, None, None] + place[:, None])
    return Rectangle(
        queries=torch.from_numpy(np.where(real, first[:, None] + place, 0)),
        keys=torch.from_numpy(np.where(span < before[:, None], before_first[:, None] + span, own)),
        bias=torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None],
        real=torch.from_numpy(real.ravel().nonzero()[0]),
    )


def attention(queries: Tensor, keys: Tensor, values: Tensor, blocks: Sequence[Rectangle], scale: float) -> Tensor:
    """Attention over rectangles that cover the last rows. All are [rows, heads, size], keys and values perhaps of fewer
    heads; returns [those rows, query heads x size]."""
    repeats, mixed = queries.shape[1] // keys.shape[1], []
    for block in blocks:
        known, carried = _gathered(keys, block.keys, repeats), _gathered(values, block.keys, repeats)
        scores = _gathered(queries, block.queries) @ known.transpose(2, 3)
        shares = torch.softmax(scores * scale + block.bias, -1)
        mixed.append((shares @ carried).transpose(1, 2).flatten(2).flatten(0, 1)[block.real])
    return torch.cat(mixed)


def _gathered(rows: Tensor, index: Tensor, repeats: int = 1) -> Tensor:
    """[rows, heads, size] at an index of [sequences, length], as [sequences, heads x repeats, length, size]."""
    found = F.embedding(index, rows.flatten(1)).view(*index.shape, *rows.shape[1:]).transpose(1, 2)
    return found if repeats == 1 else found.repeat_interleave(repeats, 1)


class SharedPrompts(Forward):
    """Computes nothing twice and nothing that is not trained, in rows of tokens without padding (`Plan`). In the last
    layer only the rows that predict a generated token are carried on."""

    name, together = "shared_prompts", True

    def logits(self, samples: Sequence[Sample]) -> Tensor:
        plan, decoder = plan_of(samples, self.model.dtype), self.model.model
        rows = decoder.embed_tokens(plan.ids)
        cosine, sine = (part[0][:, None] for part in decoder.rotary_emb(rows, plan.positions[None]))
        for layer in decoder.layers:
            rows = self._layer(layer, rows, cosine, sine, plan, final=layer is decoder.layers[-1])
        logits: Tensor = self.model.lm_head(decoder.norm(rows))
        return logits

    def _layer(self, layer: Any, rows: Tensor, cosine: Tensor, sine: Tensor, plan: Plan, final: bool) -> Tensor:
        part, normed = layer.self_attn, layer.input_layernorm(rows)
        split = (len(rows), -1, part.head_dim)
        queries, keys, values = (own(normed).view(split) for own in (part.q_proj, part.k_proj, part.v_proj))
        if getattr(part, "q_norm", None) is not None:
            queries, keys = part.q_norm(queries), part.k_norm(keys)
        queries, keys = rotated(queries, cosine, sine), rotated(keys, cosine, sine)
        blocks = plan.own if final or not plan.shared else (plan.prompts, *plan.own)
        mixed = part.o_proj(attention(queries, keys, values, blocks, part.scaling))
        rows = (rows[plan.shared :] if final else rows) + mixed
        carried: Tensor = rows + layer.mlp(layer.post_attention_layernorm(rows))
        return carried


def rotated(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The rotation by position of [rows, heads, size]; cosine and sine are [rows, 1, size]."""
    low, high = values.chunk(2, -1)
    return values * cosine + torch.cat((-high, low), -1) * sine


def shares_prompts(model: Any) -> bool:
    """True if the model is of a family and size that `SharedPrompts` is written for; the probe has the last word."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config.hidden_size > LARGEST_HIDDEN or model.device.type != "cpu":
        return False
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return all(kind == "full_attention" for kind in kinds) and rope in STATIC_ROPE


# -- the choice ----------------------------------------------------------------------

PROBE_TOLERANCE = 1e-4


def choose_forward(model: Any, shared: bool = True) -> Forward:
    """The cheapest way that gives the model's own logits; `shared`: prompts may be computed once for a group."""
    ways: list[Forward] = []
    if shared and shares_prompts(model):
        ways.append(SharedPrompts(model))
    if model.get_output_embeddings() is not None and model.base_model is not model:
        ways.append(HeadApart(model))
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        ways.append(KeptLogits(model))
    return next((way for way in ways if agrees(way)), Forward(model))


@torch.no_grad()
def agrees(way: Forward) -> bool:
    """Compares with the full logits on small samples of different lengths, some of which share a prompt."""
    samples = _probe(vocabulary(way.model))
    expected = Forward(way.model).logits(samples).float()
    try:
        found = way.logits(samples).float()
    except Exception:  # a decoder with another call than most: this way is not for it, whatever it raises
        return False
    scale = max(1.0, float(expected.abs().max()))
    return found.shape == expected.shape and bool((found - expected).abs().max() <= PROBE_TOLERANCE * scale)


def _probe(size: int) -> list[Sample]:
    """Fixed samples with ids spread over the vocabulary."""

    def ids(start: int, count: int) -> Any:
        return ((np.arange(count) * 7919 + start) % size).astype(np.int32)

    def sample(member: int, group: int, prompt: Any, tokens: Any) -> Sample:
        zeros = np.zeros(len(tokens), np.float32)
        return Sample(member, group, member, prompt, tokens, zeros, zeros.astype(np.uint32))

    return [
        sample(0, 0, ids(1, 3), ids(2, 4)), sample(1, 0, ids(1, 3), ids(5, 2)), sample(2, 1, ids(3, 1), ids(9, 3))
    ]
