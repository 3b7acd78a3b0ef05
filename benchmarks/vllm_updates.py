"""Weight updates with vLLM on a CPU, transport by transport: publish, take, into the model.

    PYTHONPATH=. .venv/vllm/bin/python -m benchmarks vllm-updates [--transport shm ...] [--shape 256x4 ...] [--rows 32]
        [--updates 20] [--restarts 3] [--name NAME] [--out benchmarks/results]

For each shape (width x layers) and transport an engine is started whose rows are all in use. `into the model` is what
these wait for: the pause, or with a restart the start of an engine. A version is an adapter of rank 8 with `lora_*`.
With `cuda_ipc` a copy of all values stands for the optimiser's step. Medians; the first version is not counted. The
rows are those of the table of docs/weights-measured.md, with a decoding step and a plain copy beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import RESULTS, ROOT
from benchmarks.common import report
from busrl.engines.base import Request
from busrl.engines.vllm.engine import VllmEngine
from busrl.engines.vllm.process import Start
from busrl.topology.schema import Vllm
from busrl.weights import factory
from busrl.weights.factory import TransportSettings

LENGTH, RANK = 512, 8
ADAPTERS, RESTARTS, ONE_COPY = ("lora_hotswap", "lora_restart"), ("lora_restart", "checkpoint_restart"), "cuda_ipc"
TRANSPORTS = ("shm", "broadcast", ONE_COPY, "lora_hotswap", "lora_restart", "checkpoint_restart")
Named = dict[str, torch.Tensor]


def main() -> None:
    options = parse()
    result: dict[str, Any] = {
        "machine": report.machine(), "commit": report.commit(ROOT), "date": time.strftime("%Y-%m-%d"),
        "load_before": os.getloadavg(), "threads": torch.get_num_threads(), "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.name}_{result['machine']['cores']}cores_{result['date']}.json"
    for shape in options.shape:
        for transport in options.transport:
            hidden, layers = map(int, shape.split("x"))
            result["rows"].append(engine_of(transport, hidden, layers, options))
            print(json.dumps(result["rows"][-1]), flush=True)
            result["load_after"] = os.getloadavg()
            path.write_text(json.dumps(result, indent=2) + "\n")
    print(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=TRANSPORTS, nargs="+", default=list(TRANSPORTS))
    parser.add_argument("--shape", nargs="+", default=["256x4", "512x7"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=3, help="updates that are counted where each is a restart")
    parser.add_argument("--name", default="vllm-updates")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def engine_of(transport: str, hidden: int, layers: int, options: argparse.Namespace) -> dict[str, Any]:
    updates = options.restarts if transport in RESTARTS else options.updates
    with tempfile.TemporaryDirectory(prefix="busrl-bench-") as folder:
        model = make(Path(folder) / "model", hidden, layers)
        rank, slots = (RANK, updates + 4) if transport in ADAPTERS else (0, 0)
        start = Start(str(Path(folder) / "model"), "float32", capacity=options.rows, max_length=LENGTH,
                      lora_rank=rank, adapters=slots, settings=Vllm(start_s=600.0, rpc_s=60.0, check_parameters=0))
        engine = VllmEngine(start)
        try:
            return measure(engine, model, Path(folder), transport, updates)
        finally:
            engine.close()


def make(folder: Path, hidden: int, layers: int) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64), num_key_value_heads=max(1, hidden // 64), head_dim=64,
        vocab_size=512, max_position_embeddings=LENGTH, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({str(k): k for k in range(512)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1", pad_token="0").save_pretrained(folder)
    return model


def measure(engine: VllmEngine, model: Any, folder: Path, transport: str, updates: int) -> dict[str, Any]:
    settings, named, write = published(transport, model, folder, updates + 4)
    receiver = engine.receiver(settings, "bench") or factory.make_receiver(settings, "bench")
    sender: Any = factory.make_sender(settings, write=write)
    if transport == ONE_COPY:
        source, named = named, sender.connect(named, torch.device("cpu"), 60.0)
    took: dict[str, list[float]] = {"publish_s": [], "take_s": [], "apply_s": [], "update_s": [], "step_s": []}
    for version in range(1, updates + 2):
        keep_full(engine, version)
        times = {"step_s": step_s(engine), "publish_s": 0.0}
        if transport == ONE_COPY:
            learner = threading.Thread(target=change, args=(sender, version, named, source))
            learner.start()
        else:
            times["publish_s"], _ = timed(lambda: sender.publish(version, version, named))  # noqa: B023
        times["take_s"], _ = timed(lambda: receiver.wait_for(version, 60.0))  # noqa: B023
        if transport in RESTARTS:
            engine.pause("abort")  # as a rollout process does
        before = engine.statistics().pause_s
        times["update_s"], _ = timed(lambda: engine.update_weights(receiver))
        paused = engine.statistics().pause_s - before
        times["apply_s"] = times["update_s"] if transport in RESTARTS else paused
        if transport == "lora_hotswap":  # loaded beside the answers that run
            times["take_s"] += times["update_s"] - paused
        if transport == ONE_COPY:
            learner.join()
            times["take_s"] = 0.0  # that is the wait for the learner's thread
        for name, seconds in times.items():
            took[name] += [seconds] if version > 1 else []
    receiver.close()
    sender.close()
    return row(transport, model, named, {name: statistics.median(some) for name, some in took.items()}, engine, updates)


def row(
    transport: str, model: Any, named: Named, took: dict[str, float], engine: VllmEngine, updates: int
) -> dict[str, Any]:
    of_model, moved = nbytes(dict(model.named_parameters())), nbytes(named)
    return {
        "mode": transport + (" (on a CPU; not verified on hardware)" if transport == ONE_COPY else ""),
        "engine": "vLLM on CPU", "model_mb": round(of_model / 1e6, 2),
        "moved_mb": 0.0 if transport == ONE_COPY else round(moved / 1e6, 3), **took,
        "limit_s": copy_s(named), "limit": "one copy of what is sent", "rows": engine.capacity, "updates": updates,
    }


def nbytes(named: Named) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in named.values())


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.monotonic()
    result = work()
    return time.monotonic() - begun, result


def change(sender: Any, version: int, views: Named, source: Named) -> None:
    """A learner's step on the engine's own tensors."""
    sender.pause_engines(version, version)
    for name, tensor in views.items():
        tensor.copy_(source[name])
    sender.publish(version, version, views)


def published(transport: str, model: Any, folder: Path, held: int) -> tuple[TransportSettings, Named, Any]:
    """Place of the versions, their tensors, and who writes them where they are folders."""
    settings = TransportSettings(transport, str(folder / "weights"), str(folder / "address"))
    named: Named = {name: p.data for name, p in model.named_parameters()}
    base = folder / "model"
    if transport in ADAPTERS:
        from busrl.training.model import Adapter, LoraSettings, load

        adapter = Adapter(load(base), LoraSettings(RANK, 2.0))
        settings = replace(settings, folders=str(folder / "adapters"), kept=2, kept_by_engine=held, base=str(base))
        return settings, dict(adapter.tensors()), adapter.write
    if transport in RESTARTS:
        from busrl.training import checkpoint

        def write(into: Path, named: Any) -> None:
            checkpoint.export(model, into, base, named)

        return replace(settings, folders=str(folder / "published")), named, write
    return settings, named, None


def keep_full(engine: VllmEngine, round_: int) -> None:
    """Every row in use by an answer that goes on for longer than the measurement."""
    engine.step()
    prompt = np.arange(2, 18, dtype=np.int32)
    free = engine.capacity - engine.active
    engine.submit([
        Request(round_ * 1000 + k, k, 0, prompt, prompt[:0], LENGTH, 1.0, 1.0, round_) for k in range(free)
    ])
    seen = engine.statistics().tokens
    while engine.statistics().tokens < seen + 4 * engine.capacity:
        engine.step()


def step_s(engine: VllmEngine, steps: int = 8) -> float:
    """Seconds of a decoding step as things are."""
    begun, first = time.monotonic(), engine.statistics().steps
    while engine.statistics().steps < first + steps:
        engine.step()
    return (time.monotonic() - begun) / (engine.statistics().steps - first)


def copy_s(named: Named) -> float:
    """A copy of the same tensors in this process."""
    into = {name: torch.empty_like(t) for name, t in named.items()}
    times = []
    for _ in range(5):
        begun = time.monotonic()
        for name, tensor in named.items():
            into[name].copy_(tensor)
        times.append(time.monotonic() - begun)
    return min(times)
