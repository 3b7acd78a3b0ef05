"""Tiny random models with a tokenizer, one folder per architecture, made once per test session."""

from __future__ import annotations

import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "roles"))
sys.path.insert(0, str(Path(__file__).parent))
from architectures import OTHERS

torch.set_num_threads(1)  # tiny models: a second thread costs more than it does

LETTERS = string.ascii_lowercase + " ,=:.+"
VOCABULARY = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", *LETTERS])}
EOS_ID = VOCABULARY["<eos>"]
SHARED: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "eos_token_id": EOS_ID,
    "bos_token_id": VOCABULARY["<bos>"],
    "pad_token_id": VOCABULARY["<pad>"],
}
LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

def config_of(kind: str) -> PretrainedConfig:
    if kind == "qwen3":
        return Qwen3Config(**LLAMA_LIKE, head_dim=8, tie_word_embeddings=True, **SHARED)
    if kind == "qwen3-window":  # one layer of each kind
        window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
        return Qwen3Config(**LLAMA_LIKE, **window, head_dim=8, **SHARED)
    if kind == "qwen2":
        return Qwen2Config(**LLAMA_LIKE, **SHARED)  # with biases in q, k, v
    if kind == "llama":
        return LlamaConfig(**LLAMA_LIKE, **SHARED)
    if kind == "mistral-window":
        return MistralConfig(**LLAMA_LIKE, sliding_window=6, **SHARED)
    if kind in OTHERS:
        name, changes = OTHERS[kind]
        shared = {key: value for key, value in LLAMA_LIKE.items() if changes.get(key, value) is not None}
        changed = {key: value for key, value in changes.items() if value is not None}
        config: PretrainedConfig = getattr(transformers, name)(**{**SHARED, **shared, **changed})
        return config
    return GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **SHARED)


def character_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny random model of the kind; weights are wide enough that answers differ and logits are spread."""
    folders: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in folders:
            torch.manual_seed(len(folders))
            model = AutoModelForCausalLM.from_config(config_of(kind))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(6.0)
            folders[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folders[kind])
            character_tokenizer().save_pretrained(folders[kind])
        return folders[kind]

    return make
