"""The torch engine and the trainer on the device: log-probabilities, tokens per second, an update in flight."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from busrl.engines.base import Finished, Request
from busrl.engines.torch.engine import TorchEngine
from busrl.system import device as devices
from busrl.weights.shm import ShmReceiver, ShmSender
from gpucheck import shapes
from gpucheck.frame import GIGA, Context, Skipped, best_of

NOTHING = np.empty(0, np.int32)
ROWS = 64


def engine(context: Context) -> None:
    """Log-probabilities against a plain forward in float32; then speed against `generate`, in bfloat16."""
    device, size = devices.choose(context.device), "tiny" if context.small else "0.6B"
    _alignment(context, size, device, torch.float32, 1e-4)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype is torch.bfloat16:
        _alignment(context, size, device, dtype, None)
    _speed(context, size, device, dtype)


def _alignment(context: Context, size: str, device: torch.device, dtype: torch.dtype, bar: float | None) -> None:
    model = shapes.model(size, device, dtype)
    made = _engine(model, size, 8)
    context.figure(f"decoder, {_short(dtype)}", type(made.decoder).__name__)
    requests = [_request(size, k, prompt=5 + k, tokens=12 + 4 * k, temperature=0.7 if k % 2 else 1.0) for k in range(8)]
    gap = _gap(model, requests, _run(made, requests))
    name = f"log-probabilities, {size}, {_short(dtype)}: largest difference to a plain forward"
    if bar is None:
        context.figure(name, gap)
    else:
        context.bar(name, gap, at_most=bar)


def _speed(context: Context, size: str, device: torch.device, dtype: torch.dtype) -> None:
    """The same prompts and long-tailed lengths, 64 at once; `generate` makes a batch as long as its longest."""
    random = np.random.default_rng(1)
    count, longest = (ROWS, 24) if context.small else (2 * ROWS, 256)
    lengths = np.clip(np.exp(random.normal(np.log(longest / 6), 0.9, count)), 4, longest).astype(int)
    lengths[::ROWS] = longest
    model = shapes.model(size, device, dtype)
    ids = random.integers(1, shapes.SHAPES[size]["vocab_size"], (count, 32)).astype(np.int32)
    context.figure("sequences, tokens", f"{count}, {int(lengths.sum())} (longest {longest}, 64 at once)")
    _generate(model, ids[:ROWS], 4)
    devices.synchronize(device)
    begun = time.perf_counter()
    for first in range(0, count, ROWS):
        _generate(model, ids[first : first + ROWS], int(lengths[first : first + ROWS].max()))
    devices.synchronize(device)
    theirs = lengths.sum() / (time.perf_counter() - begun)
    context.figure("transformers generate, tokens/s", float(theirs))
    made = _engine(model, size, ROWS)
    requests = [Request(k, k, 0, ids[k], NOTHING, int(n), 1.0, 1.0, 1) for k, n in enumerate(lengths)]
    _run(made, requests[:8])
    devices.synchronize(device)
    begun = time.perf_counter()
    finished = _run(made, requests)
    devices.synchronize(device)
    ours = sum(len(one.token_ids) for one in finished) / (time.perf_counter() - begun)
    context.figure("torch engine, tokens/s", float(ours))
    context.judged("torch engine / generate", float(ours / theirs), at_least=3.0)


def _generate(model: Any, ids: np.ndarray, tokens: int) -> None:
    given = torch.from_numpy(ids.astype(np.int64)).to(model.device)
    with torch.inference_mode():
        model.generate(given, attention_mask=torch.ones_like(given), do_sample=True, top_k=0, max_new_tokens=tokens,
                       min_new_tokens=tokens, use_cache=True, pad_token_id=0)


def inflight(context: Context) -> None:
    """New weights between two steps of running sequences: versions are true, and nobody waits longer than the copy."""
    device, size = devices.choose(context.device), "tiny" if context.small else "0.6B"
    needed = 2 * shapes.nbytes(shapes.checkpoint_shapes(size), torch.float32)
    if needed > (free := os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize):
        raise Skipped(f"{size} needs {needed / GIGA:.1f} GB of /dev/shm, which has {free / GIGA:.1f} GB free")
    model = shapes.model(size, device, torch.float32)
    made = _engine(model, size, 8)
    old = {name: tensor.detach().clone() for name, tensor in made.parameters().items()}
    new = {name: tensor * 1.02 for name, tensor in old.items()}
    path = Path("/dev/shm") / f"busrl.gpucheck.{os.getpid()}.weights"
    sender, receiver = ShmSender(path), ShmReceiver(path)
    try:
        sender.publish(1, 1, new)
        before = [_request(size, k, 6, 24) for k in range(4)]
        made.submit(before)
        step_s = best_of(8, made.step, lambda: devices.synchronize(device))
        begun = time.perf_counter()
        version, _ = made.update_weights(receiver)
        devices.synchronize(device)
        context.figure("update s", time.perf_counter() - begun)
        context.figure("a decoding step s", step_s)
        after = [_request(size, 10 + k, 6, 24) for k in range(4)]
        made.submit(after)
        finished = {one.key: one for one in _finish(made)}
    finally:
        receiver.close()
        sender.close()
        path.unlink(missing_ok=True)
    both = all(set(finished[k].versions.tolist()) == {0, version} for k in range(4))
    context.bar("running sequences have tokens of both versions", float(both), at_least=1.0)
    context.bar("sequences begun after it: largest difference to a plain forward of the new weights",
                _gap(model, after, [finished[10 + k] for k in range(4)]), at_most=1e-4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(old[name])
    gap = _gap(model, before, [_first_version(finished[k]) for k in range(4)])
    context.bar("tokens before it: largest difference to one of the old weights", gap, at_most=1e-4)


def learner(context: Context) -> None:
    """Forward, backward and step of a batch on the device, and the trainer's log-probabilities of its own weights."""
    from busrl.training.batch import Sample
    from busrl.training.settings import TrainerSettings
    from busrl.training.trainer import Trainer

    device, size = devices.choose(context.device), "tiny" if context.small else "0.6B"
    model = shapes.model(size, device, torch.float32)
    random = np.random.default_rng(2)
    length, count = (16, 8) if context.small else (256, 64)
    vocabulary = shapes.SHAPES[size]["vocab_size"]

    def sample(k: int) -> Sample:
        ids = random.integers(1, vocabulary, length + 16).astype(np.int32)
        behaviour = np.full(length, -8.0, np.float32)
        return Sample(k, k // 8, k % 8, ids[:16], ids[16:], behaviour, np.zeros(length, np.uint32))

    samples = [sample(k) for k in range(count)]
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    gap = max(
        float(np.abs(_plain(model, one.prompt_ids, one.token_ids, 1.0) - scored).max())
        for one, scored in zip(samples[:4], Trainer(model, TrainerSettings(micro_batch_tokens=4096)).score(samples[:4]))
    )
    context.bar("trainer's log-probabilities: largest difference to a plain forward", gap, at_most=1e-4)
    trainer = Trainer(model, TrainerSettings(compute_dtype=dtype, micro_batch_tokens=4096))  # rounds the model
    context.figure("way of computing", trainer.forward.name)
    advantages = [1.0 if k % 2 else -1.0 for k in range(count)]

    def step() -> None:
        trainer.accumulate(samples, advantages)
        stats = trainer.step(1e-5)
        assert not stats.skipped, stats.skipped

    seconds = best_of(2, step, lambda: devices.synchronize(device))
    context.figure(f"training, {size}, {dtype}, tokens/s", count * length / seconds)
    context.figure("training step s", seconds)


# ---------------------------------------------------------------------------------------------------------- parts


def _engine(model: Any, size: str, rows: int) -> TorchEngine:
    return TorchEngine(model, shapes.tokenizer(shapes.SHAPES[size]["vocab_size"]), capacity=rows, max_length=320)


def _request(size: str, key: int, prompt: int, tokens: int, temperature: float = 1.0) -> Request:
    ids = np.random.default_rng(key).integers(1, shapes.SHAPES[size]["vocab_size"], prompt).astype(np.int32)
    return Request(key, key, 0, ids, NOTHING, tokens, temperature, 1.0, 1)


def _run(made: TorchEngine, requests: Sequence[Request]) -> list[Finished]:
    """In order, never more than the engine has room for."""
    waiting, finished = list(requests), []
    while waiting or made.active:
        room = made.capacity - made.active
        if room and waiting:
            made.submit(waiting[:room])
            del waiting[:room]
        finished += made.step()
    return sorted(finished, key=lambda one: one.key)


def _finish(made: TorchEngine) -> list[Finished]:
    finished: list[Finished] = []
    while made.active:
        finished += made.step()
    return finished


def _gap(model: Any, requests: Sequence[Request], finished: Sequence[Finished]) -> float:
    """Largest difference between the engine's log-probabilities and those of a plain forward, over all tokens."""
    gaps = [
        np.abs(_plain(model, request.prompt_ids, one.token_ids, request.temperature) - one.logprobs).max()
        for request, one in zip(requests, finished, strict=True)
        if len(one.token_ids)
    ]
    return float(max(gaps))


def _plain(model: Any, prompt: Any, tokens: Any, temperature: float) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64)).to(model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
    chosen: np.ndarray = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].cpu().numpy()
    return chosen


def _first_version(one: Finished) -> Finished:
    kept = int((one.versions == one.versions[0]).sum())
    return Finished(one.key, one.token_ids[:kept], one.logprobs[:kept], one.versions[:kept], one.finish)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
