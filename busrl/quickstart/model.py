"""The model and tokenizer of a quickstart: a tiny Qwen3 and a vocabulary of single characters.

Talks to torch, transformers and tokenizers. Both are saved as an ordinary Hugging Face folder that any tool can load.
Knows nothing of the warm-up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from busrl.quickstart.recipe import Recipe
from busrl.quickstart.sort_task import END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN, VOCABULARY

POSITIONS = 128


def new_tokenizer(recipe: Recipe) -> Any:
    """One token per character; decoding joins them without spaces."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast  # untyped in transformers
    return make(
        tokenizer_object=core,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        padding_side="left",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def new_model(recipe: Recipe) -> Any:
    """A Qwen3 with fresh float32 weights, seeded by the recipe."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD_TOKEN),
        eos_token_id=VOCABULARY.index(END_TOKEN),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model: Any = Qwen3ForCausalLM(config)
    return model.to(torch.float32)


def save(folder: Path, recipe: Recipe, tokenizer: Any, model: Any) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files."""
    make: Any = GenerationConfig  # untyped in transformers
    model.generation_config = make(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=recipe.max_new_tokens,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _name_portably(folder / "tokenizer_config.json")


def _name_portably(path: Path) -> None:
    """Newer transformers write a class name that older ones can not load; this one both can."""
    told = json.loads(path.read_text())
    told["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(told, indent=2) + "\n")
