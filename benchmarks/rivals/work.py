"""Makes what all sides of `trainers` and `loop-10m` are given: a model folder with random weights, prompts, a reward.

Imports torch and transformers when it makes a folder; runs in the environment of any rival. Knows nothing of busrl.

- Weights are random, so nothing is learned: lengths come from an end token whose probability is set to 1 / `mean` at
  each place (by its row of the embedding), so they are drawn from the same long-tailed distribution by every side.
- The reward is a coin that every side can toss: is the sum of the ids odd? Few groups are flat.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

END, PAD = 1, 0
COMMON = 2.0  # first number of every row of the embedding: what makes the end token's probability settable


@dataclass(frozen=True)
class Work:
    """Terms of a comparison; `mean` and `longest` of the completions, in tokens, prompts of `prompt`, at least half."""

    shape: str
    groups: int = 8  # of a step
    group: int = 8  # completions of a prompt
    prompts: int = 512
    prompt: int = 64
    mean: float = 40.0
    longest: int = 128
    lr: float = 1e-9  # the same arithmetic, but at 1e-6 answers became shorter with each step, so with the faster side
    seed: int = 0

    @classmethod
    def of(cls, folder: Path) -> Work:
        return cls(**json.loads((folder / "work.json").read_text()))

    def write(self, folder: Path) -> None:
        """Make `folder`/model, `folder`/train.jsonl and `folder`/work.json."""
        make_model(folder / "model", self.shape, self.seed, self.mean)
        words, chance = SHAPES[self.shape]["vocab_size"], random.Random(self.seed)
        with (folder / "train.jsonl").open("w") as lines:
            for _ in range(self.prompts):
                ids = [chance.randrange(2, words) for _ in range(chance.randint(self.prompt // 2, self.prompt))]
                lines.write(json.dumps({"prompt": " ".join(map(str, ids)), "answer": ""}) + "\n")
        (folder / "work.json").write_text(json.dumps(asdict(self)))


def score(record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
    """The reward, as busrl calls it."""
    return float(sum(token_ids) % 2)


# -- models ------------------------------------------------------------------------------------------------------------

# Qwen3's architecture. `body`: nearly all parameters are in the layers; `words`: in the embedding, as in small models.
SHAPES: dict[str, dict[str, int]] = {
    "body-10m": {"vocab_size": 2_048, "hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 8,
                 "num_attention_heads": 5},
    "words-10m": {"vocab_size": 151_936, "hidden_size": 64, "intermediate_size": 288, "num_hidden_layers": 4,
                  "num_attention_heads": 4},
    "body-20m": {"vocab_size": 2_048, "hidden_size": 384, "intermediate_size": 1_152, "num_hidden_layers": 10,
                 "num_attention_heads": 6},
    "words-20m": {"vocab_size": 151_936, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4,
                  "num_attention_heads": 2},
    "tiny": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 2},
}


def make_model(folder: Path, shape: str, seed: int = 0, mean: float = 0.0) -> int:
    """Write a Hugging Face folder with random weights and a word for each id; the number of parameters.

    With a `mean` the model ends a text after that many tokens in the mean; without, hardly ever.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    sizes = {**SHAPES[shape], "num_key_value_heads": SHAPES[shape]["num_attention_heads"]}
    sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    config = Qwen3Config(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=END, pad_token_id=PAD,
        bos_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, PAD
    if mean:
        set_end(model, 1.0 / mean)
    model.save_pretrained(folder)
    words = {"<pad>": PAD, "<end>": END, **{str(k): k for k in range(2, sizes["vocab_size"])}}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<pad>", padding_side="left",
    ).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    # By the model's type transformers would take Qwen's own class, which splits otherwise.
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    return sum(parameter.numel() for parameter in model.parameters())


def set_end(model: Any, probability: float) -> None:
    """Raise the end token's row until it has this mean probability after random texts."""
    import torch

    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[:, 0] = COMMON
        ids = torch.randint(2, table.shape[0], (8, 64))
        low, high = 0.0, 64.0
        for _ in range(24):
            middle = (low + high) / 2
            table[END, 0] = COMMON + middle
            now = model(input_ids=ids).logits[:, 16:].float().softmax(-1)[..., END].mean().item()
            low, high = (low, middle) if now > probability else (middle, high)
