"""How long new weights stop vLLM: seconds of pause, of the whole update, and of a decoding step, side by side.

`PYTHONPATH=. .venv/vllm/bin/python tools/bench/vllm_updates.py --hidden 256 --layers 4 --rows 32 --updates 20`
Prints one JSON object: seconds as medians over the updates, size of the weights, what a plain copy of them takes. With
`--transport lora_hotswap` a version is an adapter of rank 8, which answers that run do not change to: no pause.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from busrl.inference.base import Request
from busrl.inference.vllm_engine import VllmEngine
from busrl.inference.vllm_start import Start
from busrl.topology.vllm import Vllm
from busrl.weights import Sender, factory
from busrl.weights.factory import Settings

LENGTH = 512
HOTSWAP, RANK = "lora_hotswap", 8


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="busrl-bench-") as folder:
        model = make(Path(folder) / "model", options)
        rank, slots = (RANK, options.updates + 4) if options.transport == HOTSWAP else (0, 0)
        start = Start(str(Path(folder) / "model"), "float32", capacity=options.rows, max_length=LENGTH,
                      lora_rank=rank, adapters=slots)  # fmt: skip
        engine = VllmEngine(start, Vllm(start_s=600.0, check_parameters=0))
        try:
            print(json.dumps(measure(engine, model, Path(folder), options), indent=1))
        finally:
            engine.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--transport", choices=("shm", "broadcast", HOTSWAP), default="shm")
    return parser.parse_args()


def make(folder: Path, options: argparse.Namespace) -> Any:
    config = Qwen3Config(
        hidden_size=options.hidden, intermediate_size=3 * options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64), num_key_value_heads=max(1, options.hidden // 64), head_dim=64,
        vocab_size=512, max_position_embeddings=LENGTH, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({str(k): k for k in range(512)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1", pad_token="0").save_pretrained(folder)
    return model


def measure(engine: VllmEngine, model: Any, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    settings = Settings(options.transport, str(folder / "weights"), str(folder / "address"))
    if options.transport == HOTSWAP:
        settings, sender, named = adapters(settings, folder, options.updates + 4)
        receiver = engine.receiver(settings, "bench") or factory.receiver(settings, "bench")
    else:
        named = {name: p.data for name, p in model.named_parameters()}
        sender, found = factory.sender(settings), engine.receiver(settings, "bench")
        assert found is not None
        receiver = found
    pauses, updates, steps = [], [], []
    for version in range(1, options.updates + 1):
        sender.publish(version, version, named)
        receiver.wait_for(version, 60.0)
        keep_full(engine, version)
        steps.append(step_s(engine))
        before, begun = engine.statistics(), time.monotonic()
        engine.update_weights(receiver)
        updates.append(time.monotonic() - begun)
        pauses.append(engine.statistics().pause_s - before.pause_s)
    receiver.close()
    sender.close()
    mib = sum(t.numel() * t.element_size() for t in named.values()) / (1 << 20)
    return {
        "transport": options.transport, "weights_mib": round(mib, 1), "rows": options.rows,
        "step_s": statistics.median(steps), "pause_s": statistics.median(pauses),
        "update_s": statistics.median(updates), "copy_s": copy_s(named),
    }  # fmt: skip


def adapters(settings: Settings, folder: Path, held: int) -> tuple[Settings, Sender, dict[str, torch.Tensor]]:
    """A learner's adapter of the model: where its versions go, who writes them, and its tensors."""
    from busrl.training.lora import Adapter, LoraSettings
    from busrl.training.model import load

    base = folder / "model"
    made = Adapter(load(base), LoraSettings(RANK, 2.0))
    settings = replace(settings, folders=str(folder / "adapters"), kept=2, held=held, base=str(base))
    return settings, factory.sender(settings, write=made.write), dict(made.tensors())


def keep_full(engine: VllmEngine, round_: int) -> None:
    """Every row in use by an answer that goes on for longer than the measurement."""
    engine.step()
    prompt = np.arange(2, 18, dtype=np.int32)
    free = engine.capacity - engine.active
    engine.submit([
        Request(round_ * 1000 + k, k, 0, prompt, prompt[:0], LENGTH, 1.0, 1.0, round_) for k in range(free)
    ])  # fmt: skip
    seen = engine.statistics().tokens
    while engine.statistics().tokens < seen + 4 * engine.capacity:
        engine.step()


def step_s(engine: VllmEngine, steps: int = 8) -> float:
    """Seconds of a decoding step as things are."""
    begun, first = time.monotonic(), engine.meter.steps
    while engine.meter.steps < first + steps:
        engine.step()
    return (time.monotonic() - begun) / (engine.meter.steps - first)


def copy_s(named: dict[str, torch.Tensor]) -> float:
    """A copy of the same tensors in this process."""
    into = {name: torch.empty_like(t) for name, t in named.items()}
    found = []
    for _ in range(5):
        begun = time.monotonic()
        for name, tensor in named.items():
            into[name].copy_(tensor)
        found.append(time.monotonic() - begun)
    return min(found)


if __name__ == "__main__":
    main()
