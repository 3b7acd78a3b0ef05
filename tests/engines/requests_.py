"""Requests for an engine, engines without an end, a loop that drives one, and the log-probs of a plain forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from busrl.engines import Engine, Finished, Request

if TYPE_CHECKING:
    from busrl.engines.torch.engine import TorchEngine


def request(key: int, prompt: Sequence[int], **changes: object) -> Request:
    fields: dict[str, object] = {
        "key": key, "uid": 1000 + key, "segment": 0, "prompt_ids": np.asarray(prompt, np.int32),
        "prefix_ids": np.empty(0, np.int32), "max_new_tokens": 20, "temperature": 1.0, "top_p": 1.0, "seed": 5,
    }
    return Request(**{**fields, **changes})  # type: ignore[arg-type]


def crowd(count: int, **changes: object) -> list[Request]:
    """Requests with prompts of 1 to 14 tokens; every third prompt occurs twice."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 35, rng.integers(1, 15)) for _ in range(count)]
    return [request(k, prompts[k - 1] if k % 3 == 1 else prompts[k], **changes) for k in range(count)]


def endless(folder: Path, **settings: Any) -> TorchEngine:
    """An engine whose model has no token that ends an answer, so that every answer has its longest length."""
    from busrl.engines.torch.engine import TorchEngine

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    return TorchEngine(model, tokenizer, **settings)


def run(engine: Engine, requests: Sequence[Request]) -> dict[int, Finished]:
    """Feed all requests as rows become free; every engine step is counted, so that a stuck engine fails."""
    waiting, results = list(requests), {}
    for _ in range(10_000):
        room = engine.capacity - engine.active
        if waiting and room:
            engine.submit(waiting[:room])
            waiting = waiting[room:]
        results.update({finished.key: finished for finished in engine.step()})
        if not waiting and not engine.active:
            return results
    raise AssertionError(f"{engine.active} sequences still active")


def plain_logprobs(model: torch.nn.Module, prompt: np.ndarray, new: np.ndarray, temperature: float) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate((prompt, new)).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
