"""What a user brings: a model folder of another architecture, prompts with other key names, a reward function."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

PAD, END = "<pad>", "</s>"
CHARACTERS = string.digits + string.ascii_lowercase + " ?!"

REWARD = '''
"""Share of the completion that is made of characters which the record wants."""


def score(record, completion, token_ids):
    text = completion.replace("</s>", "")
    return sum(character in record["wanted"] for character in text) / max(1, len(text))
'''

TOPOLOGY = """
[run]
name = "own"
[model]
path = "model"
[data]
train = "prompts.jsonl"
prompt_key = "question"
[groups]
size = 4
[generation]
max_new_tokens = 16
max_prompt_tokens = 16
[scheduler]
policy = "sjf"
[learner]
lr = 3e-4
[learner.trigger]
n_min = 8
[reward]
kind = "python"
function = "judge.py:score"
"""


def make_model(folder: Path, kind: str, positions: int = 64) -> Path:
    """A tiny model with fresh weights and a tokenizer of single characters, as transformers saves them."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Lfm2Config,
        Lfm2ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    vocabulary = {token: index for index, token in enumerate([PAD, END, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    torch.manual_seed(0)
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    model: Any
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=len(vocabulary), n_positions=positions, n_embd=32, n_layer=2, n_head=2, **tokens
        ))
    else:
        shape: dict[str, Any] = {
            "vocab_size": len(vocabulary), "max_position_embeddings": positions, "hidden_size": 32,
            "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        }
        if kind == "lfm2":  # one layer of convolutions
            model = Lfm2ForCausalLM(Lfm2Config(layer_types=["conv", "full_attention"], **shape, **tokens))
        else:
            model = LlamaForCausalLM(LlamaConfig(**shape, **tokens))
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END).save_pretrained(folder)
    return folder


def make_prompts(path: Path, count: int = 64) -> Path:
    """Questions of different lengths, each with the characters that its answer should be made of."""
    chance = random.Random(0)
    lines = []
    for number in range(count):
        question = "".join(chance.choice(CHARACTERS) for _ in range(chance.randint(3, 12)))
        lines.append(json.dumps({"id": number, "question": question, "wanted": string.ascii_lowercase}))
    path.write_text("\n".join(lines) + "\n")
    return path


def make_all(folder: Path, kind: str, reward: str = REWARD, positions: int = 64) -> Path:
    """Everything in one folder; returns the topology file."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model", kind, positions)
    make_prompts(folder / "prompts.jsonl")
    (folder / "judge.py").write_text(reward)
    topology = folder / "own.toml"
    topology.write_text(TOPOLOGY)
    return topology
