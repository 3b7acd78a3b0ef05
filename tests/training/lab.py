"""Tiny random models of several architectures, samples for them, and a plain reference of the whole training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from busrl.training import packing
from busrl.training.batch import Sample
from busrl.training.forward import Forward, PackedRows, PaddedRows
from busrl.training.model import load
from busrl.training.scorer import Advantages
from busrl.training.settings import TrainerSettings
from busrl.training.step_stats import StepStats
from busrl.training.trainer import QUIET, Hooks, Teach, Trainer

VOCABULARY = 23
WAYS = {"full": Forward, "padded": PaddedRows, "packed": PackedRows}
LLAMA_LIKE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
              "tie_word_embeddings": True}


def build(kind: str) -> Any:
    """A random model; weights are larger than usual so that its distributions are far from uniform."""
    import transformers as hf

    torch.manual_seed(7)
    configs = {
        "qwen3": lambda: hf.Qwen3Config(**LLAMA_LIKE),
        "qwen2": lambda: hf.Qwen2Config(**LLAMA_LIKE),  # has biases on the projections
        "llama": lambda: hf.LlamaConfig(**{**LLAMA_LIKE, "tie_word_embeddings": False, "num_hidden_layers": 3}),
        "gpt2": lambda: hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        "granite": lambda: hf.GraniteConfig(**LLAMA_LIKE, logits_scaling=3.0),  # divides its logits after the head
    }
    model = hf.AutoModelForCausalLM.from_config(configs[kind](), attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


class Lab:
    """Models, samples and trainers for the tests of a trainer."""

    def __init__(self, folders: Path) -> None:
        self._folders = folders

    def folder(self, kind: str) -> Path:
        path = self._folders / kind
        if not path.exists():
            build(kind).save_pretrained(str(path))
        return path

    def model(self, kind: str = "qwen3", double: bool = True) -> Any:
        return load(self.folder(kind)).to(torch.float64 if double else torch.float32)

    def trainer(self, kind: str = "qwen3", way: str | None = None, double: bool = True, *,
                hooks: Hooks = QUIET, teach: Teach | None = None, **settings: Any) -> Trainer:
        model = self.model(kind, double)
        values = {"max_grad_norm": 1e9, "micro_batch_tokens": 60, **settings}
        if way == "packed":
            packing.adopt(model)
        forward = WAYS[way](model) if way else None
        return Trainer(model, TrainerSettings(**values), forward=forward, hooks=hooks, teach=teach)

    def samples(self, groups: int = 3, members: int = 4, seed: int = 0, temperatures: Sequence[float] = (1.0,),
                model: Any = None) -> list[Sample]:
        """Groups with a shared prompt; log-probabilities near the model's: ratios on both sides of the bounds."""
        random = np.random.default_rng(seed)
        made: list[Sample] = []
        for group in range(groups):
            prompt = random.integers(0, VOCABULARY, random.integers(1, 7)).astype(np.int32)
            for member in range(members):
                count = int(random.integers(1, 10))
                made.append(
                    Sample(
                        group * members + member,
                        group,
                        member,
                        prompt,
                        random.integers(0, VOCABULARY, count).astype(np.int32),
                        (-random.random(count) * 3 - 0.5).astype(np.float32),
                        random.integers(3, 6, count).astype(np.uint32),
                        float(random.random()),
                        temperatures[(group + member) % len(temperatures)],
                    )
                )
        if model is None:
            return made
        rows = [plain_score(model, sample) for sample in made]
        return [
            behaved(sample, np.minimum(row + random.normal(0, 0.5, len(row)), 0.0))
            for sample, row in zip(made, rows, strict=True)
        ]

    def advantages(self, count: int, seed: int = 1) -> list[float]:
        return np.random.default_rng(seed).normal(size=count).tolist()

    def step(self, trainer: Trainer, batches: Sequence[tuple[Sequence[Sample], Sequence[float]]],
             version: int | None = None, **extra: Any) -> tuple[dict[str, Tensor], StepStats]:
        """The gradient as the optimiser gets it, and what the step says; the weights stay as they are."""
        for samples, advantages in batches:
            trainer.accumulate(samples, Advantages(advantages, **extra), version)
        seen: dict[str, Tensor] = {}

        def keep() -> None:
            seen.update({name: p.grad.clone() for name, p in trainer.trained_tensors().items() if p.grad is not None})

        original, trainer.optimizer.step = trainer.optimizer.step, keep  # type: ignore[assignment, method-assign]
        try:
            return seen, trainer.step(1e-3)
        finally:
            trainer.optimizer.step = original  # type: ignore[method-assign]

    def reference(
        self,
        model: Any,
        samples: Sequence[Sample],
        advantages: Sequence[float],
        *,
        loss: str = "ppo_clip",
        prox: Sequence[Any] | None = None,
    ) -> tuple[dict[str, Tensor], float]:
        """Compute gradients and loss as the formulas are written, token by token, with default clip settings."""
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for index, (sample, advantage) in enumerate(zip(samples, advantages, strict=True)):
            ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.token_ids.tolist()])
            logp = torch.log_softmax(model(input_ids=ids[None]).logits[0] / sample.temperature, -1)
            own = torch.zeros((), dtype=torch.float64)
            for t, token in enumerate(sample.token_ids.tolist()):
                now, mu = logp[len(sample.prompt_ids) - 1 + t, token], float(sample.behaviour_logprobs[t])
                start = now.item() if prox is None else float(prox[index][t])
                own = own + plain_loss(now, mu, start, advantage, loss)
            total = total + own
            tokens += len(sample.token_ids)
        value = total / tokens
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        return {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}, float(value.detach())


def plain_loss(now: Tensor, mu: float, prox: float, advantage: float, loss: str) -> Tensor:
    ratio = torch.exp(torch.clamp(now - (mu if loss == "ppo_clip" else prox), -20, 20))
    value = -torch.minimum(ratio * advantage, torch.clamp(ratio, 0.8, 1.28) * advantage)
    if advantage < 0:
        value = torch.minimum(value, torch.tensor(-3.0 * advantage, dtype=torch.float64))
    return value if loss == "ppo_clip" else value * min(math.exp(min(max(prox - mu, -20), 20)), 2.0)


def plain_score(model: Any, sample: Sample) -> Any:
    ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.token_ids.tolist()])
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=ids[None]).logits[0] / sample.temperature, -1)
    start = len(sample.prompt_ids) - 1
    return np.array([float(logp[start + t, token]) for t, token in enumerate(sample.token_ids.tolist())])


def behaved(sample: Sample, logprobs: Any) -> Sample:
    return Sample(
        sample.uid,
        sample.group,
        sample.member,
        sample.prompt_ids,
        sample.token_ids,
        np.asarray(logprobs, np.float32),
        sample.policy_versions,
        sample.reward,
        sample.temperature,
        sample.finish,
    )


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative size of the difference, over all parameters together."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return math.sqrt(difference / sum(float(value.square().sum()) for value in expected.values()))
