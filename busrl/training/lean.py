"""A forward for small Llama-like models (Llama, Qwen2, Qwen3) that computes nothing twice and nothing that is not
trained.

Chosen by `forward.choose` after it gave the model's own logits on a probe; reads the parameters of the Hugging Face
model, so gradients end up where the optimiser looks. Knows nothing of losses.

- Rows are tokens without padding. The prompt of a group, but for its last token, is computed once for all of its
  members.
- The other rows are one per trained token, in flat order: each is the position that predicts it.
- In the last layer only those rows are carried on: the others are wanted as keys and values alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batch import Padded, Sample
from .lean_kernels import attention, head_norm_rope, rms_norm, swiglu
from .lean_plan import Heads, Plan, plan_of

MODEL_TYPES = ("llama", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3")  # angles that do not depend on the length of the batch
LARGEST_HIDDEN = 1024  # above, matrix products are all that counts and the plain forward is as good


class LeanForward:
    """Holds the model and its head counts; the plan of a micro-batch is made from its samples."""

    name, together = "lean", True

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
        spots = plan.own if final or not plan.shared else (plan.prompts, *plan.own)
        mixed = attention(queries, pairs, spots, self.heads, self.scale)
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


def fits(model: Any) -> bool:
    """True if the model is of a family and size that this forward is written for; the probe has the last word."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config.hidden_size > LARGEST_HIDDEN or model.device.type != "cpu":
        return False
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if any(hasattr(module, "base_layer") for module in model.modules()):
        return False  # an adapter is on it: a layer is more than the weight that is read here
    return all(kind == "full_attention" for kind in kinds) and rope in STATIC_ROPE and config.hidden_act == "silu"
