"""A decoder for the common block (Llama, Qwen2, Qwen3, Mistral), and the choice of the decoder for a model.

Used by the torch engine. `choose_decoder` checks decoders against the model's own forward when an engine is built. A
decoder that computes something else would train the model on wrong log-probabilities, silently: one that disagrees, or
raises, is not used, the next slower one is tried, and the log says why. Knows nothing of sampling or requests.

- The model's parameters stay the only copy: fused projections are made by moving the parameters' storage into one
  tensor each, so that a write into a parameter is a write into the fused one.
- Nothing derived from a weight is kept between steps; the rotary table depends on the configuration alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from busrl.engines.torch.decoder import (
    Decoder,
    GenericDecoder,
    RowCache,
    StateDecoder,
    WholeDecoder,
    whole_by_logits,
    window_of,
)
from busrl.errors import UserError

log = logging.getLogger("busrl")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose table does not depend on the sequence's length


class NotRecognised(Exception):
    """The model has another structure; the message says which part."""


class Block:
    """Weights of one layer, views of the model's own."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_norm = layer.input_layernorm.weight
        self.qkv, self.qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self.q_norm = attention.q_norm.weight if hasattr(attention, "q_norm") else None
        self.k_norm = attention.k_norm.weight if hasattr(attention, "k_norm") else None
        self.output, self.output_bias = attention.o_proj.weight, attention.o_proj.bias
        self.mlp_norm = layer.post_attention_layernorm.weight
        self.gate_up, self.gate_up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
        self.down, self.down_bias = mlp.down_proj.weight, mlp.down_proj.bias


class FastDecoder(Decoder):
    """Pre-norm blocks with rotary positions, grouped-query attention and a gated MLP: far fewer operations a token."""

    cache: RowCache

    def __init__(self, model: Any, rows: int, max_length: int) -> None:
        base = _recognise(model)
        attention = base.layers[0].self_attn
        self.cache = RowCache(rows, max_length)
        self._width = int(attention.head_dim)
        self._kv_heads = attention.k_proj.out_features // self._width
        self._heads = attention.q_proj.out_features // self._width
        self._groups = self._heads // self._kv_heads
        self._scale = float(attention.scaling)
        self._eps = float(base.norm.variance_epsilon)
        self._activation = base.layers[0].mlp.act_fn
        self._inner = base.layers[0].mlp.gate_proj.out_features
        self._embedding = base.embed_tokens.weight
        self._norm = base.norm.weight
        self._head = model.lm_head.weight
        self._head_bias = model.lm_head.bias
        self._blocks = [Block(layer) for layer in base.layers]
        self._cos, self._sin = _rotary_table(base.rotary_emb, max_length, self._embedding)
        self._small = self._embedding.dtype == torch.float32 and self._embedding.device.type == "cpu"

    def prefill(self, ids: Tensor, rows: Tensor) -> None:
        length = ids.shape[1]
        self.cache.plan_prefill(rows, length)
        self._read(ids, self._cos[:length, None], self._sin[:length, None], None)

    def extend(self, ids: Tensor, rows: Tensor, positions: Tensor, span: int) -> None:
        self.cache.plan_extend(rows, positions, span)
        known = torch.arange(span, device=ids.device) <= positions[:, None, :, None]
        self._read(ids, self._cos[positions][:, :, None], self._sin[positions][:, :, None], known)

    def _read(self, ids: Tensor, cos: Tensor, sin: Tensor, known: Tensor | None) -> None:
        """Keys and values of `ids` [sequences, length] into the cache; `known`: what each attends to, else causal."""
        x = F.embedding(ids, self._embedding)
        for layer, block in enumerate(self._blocks):
            q, k, v = self._project(x, block, cos, sin)
            k, v = self.cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)
            if layer == len(self._blocks) - 1:
                return  # only keys and values of a prompt are wanted
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, known, is_causal=known is None, scale=self._scale, enable_gqa=self._groups > 1
            )
            x = self._finish(x, mixed.transpose(1, 2).reshape(*ids.shape, -1), block)

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        self.cache.plan_step(positions, span)
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        mask = self._mask(positions, span)
        x = F.embedding(tokens, self._embedding)
        for layer, block in enumerate(self._blocks):
            q, k, v = self._project(x, block, cos, sin)
            keys, values = self.cache.store_step(layer, k, v)
            mixed = self._attend(q, keys, values, mask)
            x = self._finish(x, mixed, block)
        return F.linear(self._normed(x, self._norm), self._head, self._head_bias)

    # -- parts of a block -----

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _project(self, x: Tensor, block: Block, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values, [..., heads, width]."""
        heads = F.linear(self._normed(x, block.attention_norm), block.qkv, block.qkv_bias)
        heads = heads.view(*heads.shape[:-1], -1, self._width)
        rotated, values = heads[..., : -self._kv_heads, :], heads[..., -self._kv_heads :, :]
        if block.q_norm is not None and block.k_norm is not None:
            rotated = F.rms_norm(rotated, (self._width,), None, self._eps)
            rotated[..., : self._heads, :].mul_(block.q_norm)
            rotated[..., self._heads :, :].mul_(block.k_norm)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self._width // 2, -1), sin)
        return rotated[..., : self._heads, :], rotated[..., self._heads :, :], values

    def _mask(self, positions: Tensor, span: int) -> Tensor:
        beyond = torch.arange(span, device=positions.device) > positions[:, None]
        mask = torch.zeros(beyond.shape, dtype=self._embedding.dtype, device=beyond.device)
        mask = mask.masked_fill_(beyond, -torch.inf)[:, None, None]
        if not self._small:
            return mask
        return mask.expand(-1, self._kv_heads, 1, -1).reshape(-1, 1, span)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention of one query a row. Batched products beat the fused kernel on a CPU, where it starts per head."""
        rows = len(q)
        if not self._small:
            mixed = F.scaled_dot_product_attention(
                q[:, :, None], keys, values, mask, scale=self._scale, enable_gqa=self._groups > 1
            )
            return mixed.reshape(rows, -1)
        queries = q.reshape(rows * self._kv_heads, self._groups, self._width)
        scores = torch.baddbmm(mask, queries, keys.flatten(0, 1).transpose(1, 2), alpha=self._scale)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(rows, -1)

    def _finish(self, x: Tensor, mixed: Tensor, block: Block) -> Tensor:
        """The rest of a block: output projection and MLP, each added to the residual stream."""
        x = x + F.linear(mixed, block.output, block.output_bias)
        both = F.linear(self._normed(x, block.mlp_norm), block.gate_up, block.gate_up_bias)
        gated = self._activation(both[..., : self._inner]).mul_(both[..., self._inner :])
        return x + F.linear(gated, block.down, block.down_bias)


# -- recognising and fusing -----

def _recognise(model: Any) -> Any:
    """The base model, or NotRecognised with the part that differs."""
    base = getattr(model, "model", None)
    wanted = ("embed_tokens", "layers", "norm", "rotary_emb")
    if base is None or not all(hasattr(base, name) for name in wanted) or not hasattr(model, "lm_head"):
        raise NotRecognised(f"{type(model).__name__} has no model.{{{', '.join(wanted)}}} and lm_head")
    if window_of(model.config) is not None:
        raise NotRecognised("it has sliding-window layers")
    if getattr(base.rotary_emb, "rope_type", "default") not in ROPE_TYPES:
        raise NotRecognised(f"its rotary table ({base.rotary_emb.rope_type}) depends on the sequence's length")
    for layer in base.layers:
        parts = {name for name, module in layer.named_modules() if name and next(module.children(), None) is None}
        required = {f"self_attn.{p}_proj" for p in "qkvo"} | {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
        required |= {"input_layernorm", "post_attention_layernorm"}
        optional = {"self_attn.q_norm", "self_attn.k_norm", "mlp.act_fn"}
        if not required <= parts <= required | optional:
            raise NotRecognised(f"its layers have other parts: {sorted(parts ^ required)}")
    return base


def _fuse(*modules: Any) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) for modules with the same input; their parameters become views of it."""
    weight = _concatenate([module.weight for module in modules])
    if all(module.bias is None for module in modules):
        return weight, None
    if any(module.bias is None for module in modules):
        raise NotRecognised("only some of the fused projections have a bias")
    return weight, _concatenate([module.bias for module in modules])


def _concatenate(parameters: list[Any]) -> Tensor:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        stop = start + parameter.shape[0]
        parameter.data = whole[start:stop]
        start = stop
    return whole


def _rotary_table(rotary: Any, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of all positions. With x rolled by half a head, x * cos + rolled * sin is the rotation."""
    positions = torch.arange(length, device=like.device)[None]
    with torch.inference_mode():
        cos, sin = rotary(like, positions)
    cos, sin = cos[0], sin[0].clone()
    sin[:, : sin.shape[-1] // 2].neg_()
    return cos.contiguous(), sin


# -- choosing a decoder -----

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
LOOSE = 0.15  # bfloat16 and float16: rounding in another order
Maker = Callable[[Any, int, int], Decoder]
WAYS: tuple[Any, ...] = (FastDecoder, GenericDecoder, StateDecoder, WholeDecoder, whole_by_logits)  # quickest first
SLOW = (WholeDecoder, whole_by_logits)
SLOW_TEXT = "every token costs a forward pass over its whole sequence; engine = vllm is quicker"


def choose_decoder(model: Any, rows: int, max_length: int, fast: bool) -> Decoder:
    """The quickest decoder that agrees with the model; UserError if none does."""
    name = type(model).__name__
    objections: list[str] = []
    maker: Maker
    for maker in WAYS if fast else WAYS[1:]:
        why = _objection(model, maker, max_length)
        if not why:
            if maker in SLOW:
                log.warning("%s: %s; %s", name, "; ".join(objections), SLOW_TEXT)
            return maker(model, rows, max_length)
        objections.append(f"{maker.__name__}: {why}")
        if maker is FastDecoder:
            log.info("generic decoder for %s: %s", name, why)
    raise UserError(
        f"{name}: decoding differs from its plain forward ({'; '.join(objections)}); the torch engine cannot run this "
        "architecture, use another engine"
    )


def _objection(model: Any, maker: Maker, max_length: int) -> str:
    """Why this decoder is not for the model; "" if it is."""
    try:
        gap = disagreement(model, maker, max_length)
    except NotRecognised as problem:
        return str(problem)
    except Exception as problem:  # a model that asks its cache for something else: whatever it raises
        return f"{type(problem).__name__}: {problem}"
    allowed = TOLERANCE.get(next(model.parameters()).dtype, LOOSE)
    return "" if gap <= allowed else f"its logits differ from the model's by {gap:.2g} (allowed {allowed:.2g})"


def disagreement(model: Any, maker: Maker, max_length: int) -> float:
    """Largest difference of logits over random sequences of unequal length, prefilled, continued and stepped."""
    # Made outside of inference mode: it may move the parameters, which stay writable.
    return _disagreement(model, maker(model, 3, max_length), max_length)


@torch.inference_mode()
def _disagreement(model: Any, decoder: Decoder, max_length: int) -> float:
    rows, device = 3, next(model.parameters()).device
    length = max(2, min(12, max_length))
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)
    wanted = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
    known = torch.tensor([length // 2, length // 3, length // 2], device=device)  # tokens prefilled, per row
    order, everyone = torch.tensor([2, 0, 1], device=device), torch.arange(rows, device=device)
    if decoder.equal_lengths:
        decoder.prefill(ids[[2, 0], : length // 2], everyone[[2, 0]])
        decoder.prefill(ids[1:2, : length // 3], everyone[1:2])
    else:
        decoder.prefill(ids[order, : length // 2], everyone[order])
    _continue(decoder, ids, -(-length // 4), known)
    gap = 0.0
    for k in range(length - length // 2):
        positions = known + k
        logits = decoder.step(ids[everyone, positions], positions, int(positions.max()) + 1).float()
        gap = max(gap, float((logits - wanted[everyone, positions]).abs().max()))
    scale = max(1.0, float(wanted.abs().max()))
    return gap / scale if gap == gap else float("inf")


def _continue(decoder: Decoder, ids: Tensor, piece: int, known: Tensor) -> None:
    """Fill the first two rows again, in two pieces each, the second from unequal places on."""
    pairs = [[0], [1]] if decoder.equal_lengths else [[0, 1]]
    for rows in (torch.tensor(pair, device=ids.device) for pair in pairs):
        begins = torch.minimum((piece - rows).clamp(min=1), known[rows])
        decoder.prefill(ids[rows, : int(begins.max())], rows)
        longest = int((known[rows] - begins).max())
        if longest:
            positions = begins[:, None] + torch.arange(longest, device=ids.device)
            decoder.extend(ids[rows[:, None], positions], rows, positions, int(positions.max()) + 1)
