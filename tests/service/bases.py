"""A tiny base model with a tokenizer, data of clients for it, and models of clients trained by a fixed recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from busrl.service.models import Adam, Models

VOCABULARY, TOKENS = 40, 38  # rows of logits, and those that the tokenizer has a token for
STEP = Adam(learning_rate=0.02)


@dataclass(frozen=True)
class Datum:
    tokens: NDArray[np.int32]
    inputs: dict[str, NDArray[Any]]


def write_base(folder: Path, *, tied: bool = False) -> Path:
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(3)
    config = hf.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, eos_token_id=1, bos_token_id=None,
    )
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(str(folder))
    words = {"<pad>": 0, "<eos>": 1} | {chr(95 + number): number for number in range(2, TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    return folder


def data_of(seed: int, count: int = 5, targets: int = 0) -> list[Datum]:
    """Data of unequal lengths for every loss with a ratio; `targets` of each position, 0: one, in one dimension."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(random.integers(1, 12))
        shape = (length, targets) if targets else (length,)
        made.append(Datum(random.integers(2, TOKENS, length).astype(np.int32), {
            "target_tokens": random.integers(2, TOKENS, shape).astype(np.int64),
            "logprobs": (-random.random(shape) * 3 - 0.5).astype(np.float32),
            "advantages": random.normal(size=shape).astype(np.float32),
            "weights": (random.random(shape) > 0.3).astype(np.float32),
        }))
    return made


def supervised(data: list[Datum]) -> list[Datum]:
    return [Datum(datum.tokens, {key: datum.inputs[key] for key in ("target_tokens", "weights")}) for datum in data]


def train(tenants: Models[Any], name: str, steps: int = 3, first: int = 0) -> list[float]:
    """Each step has two requests; returns losses and norms."""
    numbers = []
    for step in range(first, first + steps):
        for half in range(2):
            data = data_of(sum(map(ord, name)) + 10 * step + half)
            numbers.append(tenants.forward_backward(name, data, "ppo", {})[1]["loss:sum"])
        numbers.append(tenants.optim_step(name, STEP)["unclipped_grad_l2:mean"])
    return numbers
