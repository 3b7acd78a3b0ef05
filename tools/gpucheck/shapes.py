"""Qwen shapes and models of them with random weights, made in code: nothing is downloaded.

Sizes are those of the published configurations of Qwen3 0.6B, 1.7B and 8B and Qwen2.5 0.5B; `tiny` is for trying the
tool out on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch

COMMON = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True},
    "0.5B": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
             "max_position_embeddings": 32768, "tie_word_embeddings": True},
    "0.6B": {**COMMON, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "tie_word_embeddings": True},
    "1.7B": {**COMMON, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
             "num_attention_heads": 16, "tie_word_embeddings": True},
    "8B": {**COMMON, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "tie_word_embeddings": False},
}
FUSED = ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj"))
Shapes = dict[str, tuple[int, ...]]


def config(size: str) -> Any:
    from transformers import AutoConfig

    # No token ends a sequence: lengths are those that are asked for.
    given = {"model_type": "qwen3", **SHAPES[size], "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    return AutoConfig.for_model(**given)


def model(size: str, device: torch.device, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """Random weights, large enough that distributions are far from uniform."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    with torch.device(device):
        made: Any = AutoModelForCausalLM.from_config(config(size), dtype=dtype, attn_implementation=attention)
    return made.to(device).eval()


def checkpoint_shapes(size: str) -> Shapes:
    """Names and shapes of the parameters, each once."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config(size))
    return {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}


def fused_shapes(shapes: Shapes) -> Shapes:
    """The same as an engine that fuses them has them (names and order of vLLM's models)."""
    found: Shapes = {}
    for name, shape in shapes.items():
        fused = name
        for pieces, whole in FUSED:
            for piece in pieces:
                fused = fused.replace(f".{piece}.", f".{whole}.")
        found[fused] = (found[fused][0] + shape[0], *shape[1:]) if fused in found else shape
    return found


def tensors(shapes: Shapes, device: torch.device, dtype: torch.dtype, value: float = 0.01) -> dict[str, torch.Tensor]:
    """Tensors of those shapes, each filled with numbers of its own that depend on `value`."""
    return {
        name: torch.full(shape, value * (1 + k % 7), device=device, dtype=dtype)
        for k, (name, shape) in enumerate(shapes.items())
    }


def nbytes(shapes: Shapes, dtype: torch.dtype) -> int:
    total = 0
    for shape in shapes.values():
        count = 1
        for n in shape:
            count *= n
        total += count * dtype.itemsize
    return total


def tokenizer(vocabulary: int) -> Any:
    """One word a token; the checks give ids, so that its words matter to nobody."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(n): n for n in range(vocabulary)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words)
