"""Makes a small mixture of experts that has begun to sort digits: `python make_experts.py FOLDER [--seed N]`.

FOLDER/model becomes an ordinary Hugging Face folder, a Qwen3-MoE of 0.3 million parameters with 8 experts in each of
three layers, of which a token takes two; FOLDER/train.jsonl and validation.jsonl the prompts. Nothing is downloaded.
Task, tokenizer and warm-up are those of `busrl quickstart`, with shorter rows of digits; the warm-up ends when a third
of the answers is right.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from busrl.quickstart import maker, task

LAYERS, EXPERTS, CHOSEN = 3, 8, 2


def make_model(seed: int) -> Any:
    """Make a model of random weights; its sizes are multiples of 32, which vLLM's kernels on a CPU ask for."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=len(task.VOCABULARY), hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        tie_word_embeddings=True, max_position_embeddings=128, bos_token_id=None,
        eos_token_id=task.VOCABULARY.index(task.END_TOKEN), pad_token_id=task.VOCABULARY.index(task.PAD_TOKEN),
    ))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    recipe = replace(task.Recipe(), digits_max=6, filler_slope=0.5, filler_cap=12, skill=0.35, check_every=10)
    train, validation = task.splits(recipe)
    for name, prompts in (("train", train), ("validation", validation)):
        lines = (json.dumps({"prompt": prompt, "answer": task.answer_of(prompt)}) + "\n" for prompt in prompts)
        (options.folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer, model = maker.new_tokenizer(recipe), make_model(options.seed)
    warm_up = maker.WarmUp(recipe, tokenizer, model, validation)
    passed = warm_up.teach()
    maker.save(options.folder / "model", recipe, tokenizer, model)
    size = sum(weights.numel() for weights in model.parameters())
    print(f"{size:,} parameters; {passed:.2f} of the answers are right", flush=True)


if __name__ == "__main__":
    main()
