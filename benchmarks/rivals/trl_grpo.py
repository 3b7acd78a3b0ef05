"""The rival of `compare`: TRL's GRPOTrainer from PyPI, set as well as we can for this model on two cores.

Two ranks of one thread over Gloo share the batch. float32, no gradient checkpointing, no reference model, no logging,
no saving, everything generated at once with a key-value cache. Same model folder, prompts, reward, batch (32 drawn
groups of 8), clip range, optimiser and learning rate as the others. Prints one JSON object; the clock runs from the
first step's begin (all ranks ready) to the goal, without imports and loading.

    python -m torch.distributed.run --nproc_per_node 2 benchmarks/rivals/trl_grpo.py --folder FOLDER --seed 0
    ... trl_grpo.py --folder FOLDER --steps-file FILE

FOLDER has model/ and train.jsonl: a quickstart's, or one of work.py. The second form is for `loop-10m`: there is no
goal, and a line of FILE ends each step, until who started it ends it. Logits are then computed where a token is
trained, as TRL does on a GPU (trl_step.py). Imports nothing of busrl, which is not in TRL's environment.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils

from benchmarks.rivals.work import Work, score

MAX_NEW, GROUP = 64, 8
CONTINUOUS = {"page_size": 16, "num_blocks": 2048, "max_batch_tokens": 512}  # unbounded, it takes all memory


def judge(vocabulary: dict[str, int]):
    """The reward function: 1 where the completion ends with the bar, the answer, and the end token."""
    bar, end = vocabulary["|"], vocabulary["<eos>"]

    def sorted_digits(completion_ids: list[list[int]], answer: list[str], **_: object) -> list[float]:
        rewards = []
        for ids, digits in zip(completion_ids, answer, strict=True):
            wanted = [bar, *(vocabulary[digit] for digit in digits), end]
            rewards.append(float(list(ids[-len(wanted) :]) == wanted))
        return rewards

    return sorted_digits


def coin(completion_ids: list[list[int]], **_: object) -> list[float]:
    """The reward function of a work folder."""
    return [score({}, "", ids) for ids in completion_ids]


class UntilGoal(TrainerCallback):
    """Keeps the clock and the curve, and stops the training at the goal."""

    def __init__(self, goal: float, steps_file: Path | None, samples: int) -> None:
        self.goal, self.curve, self.rewards, self.reached = goal, [], [], False
        self.steps_file, self.samples = steps_file, samples
        self.trainer: GRPOTrainer | None = None
        self.began: float | None = None

    def on_step_begin(self, args, state, control, **_: object) -> None:
        if self.began is None:
            if dist.is_initialized():
                dist.barrier()
            self.began, self.cpu_began = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **_: object) -> None:
        # Every rank sees the same numbers: the trainer gathers rewards before it takes the mean.
        self.rewards = self.trainer._metrics["train"]["reward"]
        last = self.rewards[-10:]
        self.curve.append([round(time.perf_counter() - self.began, 3), round(last[-1], 4)])
        self.reached = len(last) == 10 and math.fsum(last) / 10 >= self.goal
        if self.reached:
            control.should_training_stop = True
        self.cpu = time.process_time() - self.cpu_began
        if self.steps_file and state.is_world_process_zero:
            length = self.trainer._metrics["train"]["completions/mean_length"][-1]
            with self.steps_file.open("a") as lines:
                lines.write(json.dumps({"samples": self.samples, "tokens": round(length * self.samples)}) + "\n")


def settings(options: argparse.Namespace, work: Work | None, folder: str, ranks: int) -> GRPOConfig:
    per_rank = options.groups * GROUP // ranks
    return GRPOConfig(
        output_dir=folder,
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=per_rank // options.accumulate,
        gradient_accumulation_steps=options.accumulate,
        num_generations=GROUP,
        max_completion_length=work.longest if work else MAX_NEW,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        cache_implementation=options.cache or None,
        use_transformers_continuous_batching=options.continuous,
        transformers_continuous_batching_config=CONTINUOUS if options.continuous else None,
        max_steps=options.max_updates,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",  # token-mean over the whole batch
        scale_rewards="group",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def run(options: argparse.Namespace) -> dict | None:
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    folder, train = options.folder / "model", options.folder / "train.jsonl"
    work = Work.of(options.folder) if (options.folder / "work.json").is_file() else None
    if work:
        utils._use_triton = lambda device: True  # chooses the positions alone; the kernels ask another
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=options.attention)
    records = [json.loads(line) for line in train.read_text().splitlines()]
    watch = UntilGoal(options.goal, options.steps_file, options.groups * GROUP)
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=coin if work else judge(tokenizer.get_vocab()),
            args=settings(options, work, output, ranks),
            train_dataset=Dataset.from_list(records),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        watch.trainer = trainer
        trainer.train()
    cpu = torch.tensor(watch.cpu, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(cpu)
    if rank != 0:
        return None
    return {
        "system": "trl",
        "seed": options.seed,
        "ranks": ranks,
        "threads": options.threads,
        "lr": options.lr,
        "reached": watch.reached,
        "updates": len(watch.curve),
        "seconds": watch.curve[-1][0],
        "cpu_seconds": round(cpu.item(), 3),
        "samples": len(watch.curve) * options.groups * GROUP,
        "curve": watch.curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="a folder with model/ and train.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a rank in a step")
    parser.add_argument("--cache", default="static", help="cache_implementation; empty: dynamic")
    parser.add_argument("--continuous", action="store_true", help="transformers' continuous batching")
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "eager"))
    parser.add_argument("--goal", type=float, default=0.85)
    parser.add_argument("--max-updates", type=int, default=400)
    parser.add_argument("--steps-file", type=Path, help="a line for each step")
    result = run(parser.parse_args())
    if result is not None:
        print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
