"""The rival of `trainers`: optimiser steps of TRL's GRPOTrainer on given completions. For TRL's own environment.

    python -m benchmarks.rivals.trl_step [compact] MODEL WORK

TRL's own `train` runs: its rollout function answers with the completions of WORK, its reward function with their
rewards. float32, no gradient checkpointing, no reference model, no logging, no saving, the fused AdamW, and the ratio
of 1 that TRL takes for completions of the present weights. Counted is what it does between the answer of the rollout
function and the end of the step. On a CPU TRL's head computes the logits of prompts and padding too, which it leaves
out on a GPU: with `compact` they are left out here as well.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="",
                  TRL_EXPERIMENTAL_SILENCE="1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils

from benchmarks.trainers import GROUP, forget_peak, say, told


class Steps(TrainerCallback):
    """Gives the completions of each step, and keeps the clock; the first step is not counted."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps, self.number, self.tokens = steps, 0, 0
        self.wall = self.cpu = 0.0
        self.loss = self.norm = 0.0
        self.trainer: Any = None

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """A prompt is the number of its group, and stands there once for each of its completions."""
        groups = self.steps[self.number]
        rows = [(groups[int(name)], k % GROUP) for k, name in enumerate(self.prepared(prompts))]
        self.began, self.began_cpu = time.perf_counter(), time.process_time()
        return {
            "prompt_ids": [group["prompt"] for group, _ in rows],
            "completion_ids": [group["completions"][k] for group, k in rows],
            "logprobs": None, "scores": [group["rewards"][k] for group, k in rows],
        }

    def prepared(self, prompts: list[str]) -> list[str]:
        """Each group's prompt as often as it has completions, in a row."""
        assert all(prompts[k] == prompts[k - k % GROUP] for k in range(len(prompts))), prompts
        return [str(int(name) % len(self.steps[0])) for name in prompts]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if self.number:
            self.wall += time.perf_counter() - self.began
            self.cpu += time.process_time() - self.began_cpu
            self.tokens += sum(len(row) for group in self.steps[self.number] for row in group["completions"])
        self.number += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: object) -> None:
        if "grad_norm" in (logs or {}) and not self.norm:
            self.loss, self.norm = float(logs["loss"]), float(logs["grad_norm"])


def rewards(completions: list[str], scores: list[float], **_: object) -> list[float]:
    return scores


def settings(work: dict[str, Any], folder: str) -> GRPOConfig:
    count = len(work["steps"][0]) * GROUP
    return GRPOConfig(
        output_dir=folder, seed=0, use_cpu=True, bf16=False, per_device_train_batch_size=work["at_once"],
        gradient_accumulation_steps=count // work["at_once"], num_generations=GROUP, shuffle_dataset=False,
        max_completion_length=4096, temperature=1.0, max_steps=len(work["steps"]), learning_rate=work["lr"],
        lr_scheduler_type="constant", optim="adamw_torch_fused", adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8,
        weight_decay=0.0, max_grad_norm=1.0, loss_type="dapo", scale_rewards="group", epsilon=0.2, epsilon_high=0.28,
        beta=0.0, gradient_checkpointing=False, dataloader_num_workers=0, dataloader_pin_memory=False,
        logging_strategy="steps", logging_steps=1, save_strategy="no", eval_strategy="no", report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    *how, model, work_file = sys.argv[1:]
    work = json.loads(Path(work_file).read_text())
    if how == ["compact"]:
        utils._use_triton = lambda device: True  # chooses the positions alone; the kernels ask another
    torch.set_num_threads(work["threads"])
    logging.set_verbosity_error()
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    steps = Steps(work["steps"])
    prompts = [{"prompt": str(k)} for k in range(len(work["steps"]) * len(work["steps"][0]))]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=net, reward_funcs=rewards, args=settings(work, folder), train_dataset=Dataset.from_list(prompts),
            processing_class=AutoTokenizer.from_pretrained(model), callbacks=[steps], rollout_func=steps.rollout,
        )
        loaded = forget_peak()
        trainer.train()
    say(told(steps.tokens, steps.wall, steps.cpu, loaded, steps.loss, steps.norm))


if __name__ == "__main__":
    main()
