"""The trainer at a real size: memory against its estimate, speed, attention implementations, 8-bit optimiser states.

A model of Qwen2.5-0.5B's shape with random weights, in bfloat16 with float32 masters, micro-batches of 16,384 tokens;
on a CPU a tiny one. Each check makes a model of its own, so that no other is in its figures.
"""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from busrl.preflight import memory as estimate
from busrl.system import device as devices
from busrl.topology.learner import ON_GPUS
from busrl.training.batch import Sample
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import Trainer
from gpucheck import shapes
from gpucheck.frame import Context, Skipped, best_of
from gpucheck.machine_checks import name_of

PROMPT, GROUP = 16, 4
DTYPE = "bfloat16"
ROUNDED = 2e-2  # of the largest log-probability; as a start of the learner allows in bfloat16
DENSE_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0}  # bfloat16, of the makers


class Job:
    """The shape, the device and the amounts of a check."""

    def __init__(self, context: Context) -> None:
        self.device = devices.choose(context.device)
        self.size = "tiny" if context.small else "0.5B"
        self.tokens, self.length = (256, 64) if context.small else (16_384, 1_024)
        self.shape = shapes.SHAPES[self.size]
        devices.keep_freed_memory()

    def trainer(self, **more: Any) -> Trainer:
        """With a model of its own, the same weights each time."""
        given = more.get("attention", "auto")
        model = shapes.model(self.size, self.device, torch.float32, "sdpa" if given == "auto" else given)
        return Trainer(model, TrainerSettings(**{"compute_dtype": DTYPE, "micro_batch_tokens": self.tokens, **more}))

    def samples(self, tokens: int) -> list[Sample]:
        """So many positions, in groups with a prompt each."""
        random, found, words = np.random.default_rng(1), [], self.shape["vocab_size"]
        for number in range(tokens // self.length):
            if number % GROUP == 0:
                prompt = random.integers(1, words, PROMPT).astype(np.int32)
            count = self.length - PROMPT
            answer = random.integers(1, words, count).astype(np.int32)
            behaviour = np.full(count, -11.0, np.float32)
            found.append(Sample(number, number // GROUP, number % GROUP, prompt, answer, behaviour,
                                np.zeros(count, np.uint32)))
        return found

    def step(self, trainer: Trainer, samples: list[Sample], lr: float = 1e-6, sign: float = -1.0) -> float:
        """An optimiser step; its loss. With a sign of 1 every sample is to become likelier."""
        trainer.accumulate(samples, [1.0 if k % 2 else sign for k in range(len(samples))])
        stats = trainer.step(lr)
        assert not stats.skipped, stats.skipped
        return stats.loss

    def flops(self) -> float:
        """Of a forward and backward over one micro-batch, without what is computed twice: 6 per parameter and token,
        and causal attention."""
        parameters = shapes.nbytes(shapes.checkpoint_shapes(self.size), torch.int8)
        width = self.shape["num_attention_heads"] * self.shape.get("head_dim", 64)
        attention = 6 * self.shape["num_hidden_layers"] * width * self.length
        return float(self.tokens * (6 * parameters + attention))


def memory(context: Context, checkpointing: str) -> None:
    """The peak of a step against the sum that `busrl check` prints, then speed."""
    job, again = Job(context), checkpointing == "full"
    said = estimate.learner_sum(shapes.config(job.size).to_dict(), estimate.Work(
        tokens=job.tokens, dtype=DTYPE, checkpointing=again, kind=job.device.type))
    trainer, samples = job.trainer(activation_checkpointing=checkpointing), job.samples(job.tokens)
    job.step(trainer, samples[:GROUP])  # the optimiser is whole from here on,
    trainer.accumulate(samples[:GROUP], [1.0] * GROUP)  # and the gradient
    _forget_peak(job.device)
    job.step(trainer, samples)
    context_of_driver = said["libraries"] if job.device.type != "cpu" else 0  # no tensor has it
    peak, needed = _peak(job.device), sum(said.values()) - context_of_driver
    what = f"{job.size}, {job.tokens} tokens"
    context.figure("way of computing", trainer.forward.name)
    context.figure(f"{what}: peak GiB", peak / 2**30)
    context.figure(f"{what}: busrl check says GiB", needed / 2**30)
    for name, size in said.items():
        context.figure(f"estimated: {name} GiB", size / 2**30)
    context.judged(f"{what}: peak / estimate", peak / needed, at_least=0.85, at_most=1.15)
    seconds = best_of(2, lambda: job.step(trainer, samples), lambda: devices.synchronize(job.device))
    _speed(context, job, seconds)


def _speed(context: Context, job: Job, seconds: float) -> None:
    made = job.flops() / seconds / 1e12
    context.figure("step s", seconds)
    context.figure("tokens/s", job.tokens / seconds)
    context.figure("Tflop/s of the model", made)
    plain = _plain_tflops(job, 256 if context.small else 8192)
    context.figure("Tflop/s of a bfloat16 matrix product here", plain)
    context.figure("MFU, of that product", made / plain)
    for name, most in DENSE_TFLOPS.items():
        if name in name_of(job.device):
            context.figure(f"MFU, of the {name}'s {most:g} Tflop/s", made / most)


def _plain_tflops(job: Job, size: int) -> float:
    one, other = (torch.ones(size, size, dtype=torch.bfloat16, device=job.device) for _ in range(2))
    return 2 * size**3 / best_of(5, lambda: one @ other, lambda: devices.synchronize(job.device)) / 1e12


def attention(context: Context) -> None:
    """Each implementation's log-probabilities against those with sdpa, and its speed."""
    job = Job(context)
    samples = job.samples(job.tokens)
    trainer = job.trainer(attention="sdpa")
    expected = np.concatenate(trainer.score(samples))
    for name in ("sdpa", "auto", "eager", *(ON_GPUS if job.device.type != "cpu" else ())):
        if name != "sdpa":
            del trainer
            _free(job.device)
            try:
                trainer = job.trainer(attention=name)
            except (ImportError, ValueError, RuntimeError) as problem:
                context.note(f"{name} is not there: {str(problem).splitlines()[0]}")
                trainer = job.trainer(attention="sdpa")
                continue
            gap = np.abs(np.concatenate(trainer.score(samples)) - expected).max()
            context.bar(f"{name}: largest difference to sdpa, of the largest log-probability",
                        float(gap / np.abs(expected).max()), at_most=ROUNDED)
            context.figure(f"{name}: largest difference to sdpa", float(gap))
        try:
            seconds = best_of(2, lambda: job.step(trainer, samples), lambda: devices.synchronize(job.device))  # noqa: B023
        except torch.OutOfMemoryError:  # eager keeps every score
            context.note(f"{name}: a step of {job.tokens} tokens does not fit into the device")
            continue
        context.figure(f"{name}, computed as {trainer.forward.name} rows: tokens/s", job.tokens / seconds)


def optimizers(context: Context) -> None:
    """The same 50 steps with float32 and with 8-bit states: every sample is to become likelier."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Skipped("bitsandbytes is not installed: pip install 'busrl[adam8]'")
    job, losses = Job(context), {}
    samples = job.samples(GROUP * job.length)
    for name in ("adamw", "adamw8bit"):
        trainer = job.trainer(loss="reinforce", optimizer=name)
        found = [job.step(trainer, samples, lr=1e-3 if context.small else 1e-5, sign=1.0) for _ in range(51)]
        losses[name] = found[-1]
        context.figure(f"{name}: loss before", found[0])
        context.figure(f"{name}: loss after 50 steps", found[-1])
        if job.device.type != "cpu":
            context.figure(f"{name}: GiB after 50 steps", _module(job.device).memory_allocated() / 2**30)
        del trainer
        _free(job.device)
    apart = abs(losses["adamw8bit"] / losses["adamw"] - 1)
    context.bar("adamw8bit's loss after 50 steps, apart from adamw's", apart, at_most=0.02)


# -- memory of the device ------------------------------------------------------------


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        _module(device).empty_cache()


def _forget_peak(device: torch.device) -> None:
    _free(device)
    if device.type == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
    else:
        _module(device).reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    """Bytes at most since then: of tensors on an accelerator, resident ones of the process on a CPU."""
    if device.type != "cpu":
        return int(_module(device).max_memory_allocated(device))
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10
