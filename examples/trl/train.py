"""TRL's asynchronous GRPO on the quickstart's task, with rollouts from a busrl run (bridge.py).

    python examples/trl/train.py MODEL_FOLDER PROMPTS.jsonl OUT [--server http://127.0.0.1:8000] [--steps 20]

MODEL_FOLDER is the `model.path` of the run. Needs trl, peft, aiohttp and requests, and nothing of busrl. It prints the
mean reward of each step.

- TRL 1.16 computes attention with a kernel for GPUs. Without a GPU the same is computed by torch, sample by sample.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


class PlainTokenizer(PreTrainedTokenizerFast):
    """The tokenizer of a model without chats: a conversation is its texts, an answer its text."""

    def parse_response(self, ids: list[int], **_: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": self.decode(ids)}


def sorts(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 for each completion whose text behind the bar is the answer."""
    texts = (completion[-1]["content"].removesuffix("<eos>").rpartition("|")[2] for completion in completions)
    return [float(text.replace(" ", "") == right) for text, right in zip(texts, answer)]


class OnAnyDevice:
    """flash_attn_varlen_func in torch: segments of queries, each after the keys of its path."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor,
        *_: Any, softmax_scale: float, **more: Any,
    ) -> torch.Tensor:
        rows, groups = [], query.shape[1] // key.shape[1]
        bounds_q, bounds_k = ([*zip(starts.tolist(), starts.tolist()[1:])] for starts in (starts_q, starts_k))
        for (first_q, end_q), (first_k, end_k) in zip(bounds_q, bounds_k):
            queries = query[first_q:end_q].transpose(0, 1)
            keys, values = (part[first_k:end_k].transpose(0, 1).repeat_interleave(groups, 0) for part in (key, value))
            count, length = queries.shape[1], keys.shape[1]
            seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            rows.append(F.scaled_dot_product_attention(queries, keys, values, seen, scale=softmax_scale))
        return torch.cat(rows, 1).transpose(0, 1)


class Rewards(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            print(f"step {state.global_step}: reward {logs['reward']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "prompts", "out"):
        parser.add_argument(name)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    async_rollout_worker.is_vllm_available = lambda *_, **__: True  # the server speaks like it
    if not torch.cuda.is_available():
        packing._flash_attn = OnAnyDevice
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks for the name of the GPU
    tokenizer = PlainTokenizer.from_pretrained(options.model)
    tokenizer.chat_template = tokenizer.response_template = PLAIN  # TRL looks for both
    lines = [json.loads(line) for line in Path(options.prompts).read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": line["prompt"]}], "answer": line["answer"]} for line in lines]
    config = AsyncGRPOConfig(
        options.out, max_steps=options.steps, per_device_train_batch_size=64, gradient_accumulation_steps=1,
        num_generations=8, max_completion_length=64, learning_rate=2e-3, logging_steps=1, report_to=[], token_budget=0,
        max_staleness=2, use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False,
        save_strategy="no", vllm_server_base_url=options.server,
    )
    lora = LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj",
                                                          "up_proj", "down_proj"])
    trainer = AsyncGRPOTrainer(
        options.model, [sorts], config, Dataset.from_list(rows), tokenizer, [Rewards()], peft_config=lora)
    trainer.train()


if __name__ == "__main__":
    main()
