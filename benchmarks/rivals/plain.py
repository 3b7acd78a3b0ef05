"""The rival of `trainers` and `loop-10m`: a plain PyTorch loop, as one writes it in an afternoon with transformers.

    python -m benchmarks.rivals.plain loop FOLDER STEPS_FILE [--threads N] [--continuous]
    python -m benchmarks.rivals.plain steps MODEL WORK          (for `trainers`: given completions)

Draw with `generate`, judge, normalise by group, train in micro-batches of like length, logits only where a token is
trained, clip, fused AdamW. One process, no other library, nothing of busrl. FOLDER is one of work.py.

- The ratio is that of a log-probability to itself: a loop that trains each batch once needs no recorded ones.
- A line of STEPS_FILE ends a step. Who started it ends it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.rivals.work import END, PAD, Work, score

AT_ONCE = 16  # sequences of a micro-batch


class PlainTrainer:
    """GRPO's step on completions: clipped ratio, mean over the tokens of the step."""

    def __init__(self, model: Any, lr: float, at_once: int = AT_ONCE) -> None:
        self.model, self.at_once = model, at_once
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)
        self.loss = self.norm = 0.0

    def step(self, prompts: list[list[int]], completions: list[list[int]], rewards: list[float], group: int) -> int:
        """Make one update; the number of trained tokens. `prompts` has one for each completion."""
        grouped = torch.tensor(rewards).view(-1, group)
        spread = grouped.std(1, keepdim=True) + 1e-6
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / spread).flatten()
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]) + len(completions[row]))
        tokens = sum(map(len, completions))
        self.loss = 0.0
        self.optimizer.zero_grad()
        for start in range(0, len(order), self.at_once):
            rows = order[start : start + self.at_once]
            ids, trained = padded([prompts[row] for row in rows], [completions[row] for row in rows])
            loss = self.objective(ids, trained, advantages[rows]) / tokens
            loss.backward()
            self.loss += loss.item()
        self.norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        return tokens

    def objective(self, ids: Tensor, trained: Tensor, advantages: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[trained[:, 1:]]
        logits = self.model.lm_head(hidden)
        logprobs = -torch.nn.functional.cross_entropy(logits, ids[:, 1:][trained[:, 1:]], reduction="none")
        ratio = (logprobs - logprobs.detach()).exp()
        each = advantages.repeat_interleave(trained.sum(1))
        return -torch.min(ratio * each, ratio.clamp(0.8, 1.28) * each).sum()


def padded(prompts: list[list[int]], completions: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids padded at the right, where causal attention needs no mask, and which of them are trained."""
    width = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions))
    ids = torch.full((len(prompts), width), PAD)
    trained = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions)):
        ids[row, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
        trained[row, len(prompt) : len(prompt) + len(completion)] = True
    return ids, trained


class PlainLoop:
    """Draws, judges and trains one batch after the other."""

    def __init__(self, folder: Path, continuous: bool) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.work, self.continuous = Work.of(folder), continuous
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
        texts = [json.loads(line)["prompt"] for line in (folder / "train.jsonl").read_text().splitlines()]
        self.prompts: list[list[int]] = tokenizer(texts)["input_ids"]
        self.chance = random.Random(self.work.seed)
        self.trainer = PlainTrainer(self.model, self.work.lr)
        torch.manual_seed(self.work.seed)

    def step(self) -> dict[str, int]:
        drawn = self.chance.sample(self.prompts, self.work.groups)
        prompts = [prompt for prompt in drawn for _ in range(self.work.group)]
        completions = (self.drawn_in_one_batch if self.continuous else self.generated)(prompts)
        rewards = [score({}, "", completion) for completion in completions]
        tokens = self.trainer.step(prompts, completions, rewards, self.work.group)
        return {"samples": len(prompts), "tokens": tokens}

    @torch.no_grad()
    def generated(self, prompts: list[list[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        rows = self.model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=self.work.longest,
        )[:, width:].tolist()
        return [row[: row.index(END) + 1] if END in row else row for row in rows]

    def drawn_in_one_batch(self, prompts: list[list[int]]) -> list[list[int]]:
        """The same by transformers' continuous batching."""
        return continuous(self.model, prompts, [self.work.longest] * len(prompts), END)


def continuous(
    model: Any, prompts: list[list[int]], lengths: list[int], end: int | None, at_once: int | None = None
) -> list[list[int]]:
    """Draw by `generate_batch`'s own manager, with a length for each prompt; ids without prompts, end included."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    make: Any = GenerationConfig
    config = make(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1 if end is None else end,
                  pad_token_id=PAD, max_new_tokens=max(lengths))
    sizes: Any = ContinuousBatchingConfig(
        page_size=16, num_blocks=2048, max_batch_tokens=512, max_requests_per_batch=at_once)
    done: dict[str, list[int]] = {}
    with torch.no_grad(), model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=sizes, block=True, timeout=5,
    ) as manager:
        names = [manager.add_request(prompt, max_new_tokens=n) for prompt, n in zip(prompts, lengths)]
        while len(done) < len(names):
            result = manager.get_result(timeout=60)
            if result is None:
                raise SystemExit("continuous batching gave no answer within 60 s")
            if result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
    return [done[name] for name in names]


def loop(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    plain = PlainLoop(options.folder, options.continuous)
    with options.steps_file.open("a") as lines:
        while True:
            lines.write(json.dumps(plain.step()) + "\n")
            lines.flush()


def steps(options: argparse.Namespace) -> None:
    """Train the completions of WORK, as trl_step.py does; the first step is not counted."""
    from transformers import AutoModelForCausalLM

    from benchmarks.trainers import GROUP, forget_peak, say, told

    work = json.loads(options.work.read_text())
    torch.set_num_threads(work["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    loaded, wall, cpu, tokens = forget_peak(), 0.0, 0.0, 0
    trainer, first = PlainTrainer(model, work["lr"], work["at_once"]), (0.0, 0.0)
    for number, step in enumerate(work["steps"]):
        prompts = [group["prompt"] for group in step for _ in group["completions"]]
        completions = [row for group in step for row in group["completions"]]
        rewards = [reward for group in step for reward in group["rewards"]]
        begun, begun_cpu = time.perf_counter(), time.process_time()
        count = trainer.step(prompts, completions, rewards, GROUP)
        if number:
            wall, cpu = wall + time.perf_counter() - begun, cpu + time.process_time() - begun_cpu
            tokens += count
        else:
            first = (trainer.loss, trainer.norm)
    say(told(tokens, wall, cpu, loaded, *first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    looping = verbs.add_parser("loop")
    looping.add_argument("folder", type=Path)
    looping.add_argument("steps_file", type=Path)
    looping.add_argument("--threads", type=int, default=1)
    looping.add_argument("--continuous", action="store_true", help="draw by transformers' continuous batching")
    looping.set_defaults(act=loop)
    stepping = verbs.add_parser("steps")
    stepping.add_argument("model", type=Path)
    stepping.add_argument("work", type=Path)
    stepping.set_defaults(act=steps)
    options = parser.parse_args()
    options.act(options)


if __name__ == "__main__":
    main()
