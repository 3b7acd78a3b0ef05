"""Weight updates whose versions are folders, beside a copy of the bytes: publish, take, into the model.

    python -m benchmarks weight-folders [--mb 1 100] [--rounds 5] [--rank 8] [--out benchmarks/results]

For each size a random Qwen3 of about so many MB (float32) is made. In turn for each mode: the learner's sender writes a
version, the engine's receiver takes it, and the embedded model is given it, as in a run. The limit is one copy of the
bytes that have to end up in the model (of the adapted layers for an adapter) between two buffers of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, ROOT
from benchmarks.common import report
from busrl.weights.folders import FolderReceiver, FolderSender
from busrl.weights.tensors import fingerprint

MODES = ("lora_hotswap", "lora_restart", "checkpoint_restart")


def model_folder(folder: Path, megabytes: float) -> Path:
    """A random model of about that size in float32: 8 layers, the width that gives it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    width = 16 * max(1, round((megabytes * 1e6 / 4 / 8 / 12) ** 0.5 / 16))
    config = Qwen3Config(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, head_dim=width // 4, max_position_embeddings=256, tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(256)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


def copy_seconds(nbytes: int, rounds: int) -> float:
    """Copy so many bytes, both buffers touched before: the best of several."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return min(timed(lambda: target.copy_(source))[0] for _ in range(max(3, rounds)))


def measure(base: Path, mode: str, rank: int, rounds: int, place: Path) -> dict[str, Any]:
    from busrl.engines.torch.lora import WeightLoader
    from busrl.training import checkpoint
    from busrl.training.model import Adapter, LoraSettings, load

    learner, engine = load(base), load(base).requires_grad_(False)
    files, adapted = WeightLoader(engine, base), mode != "checkpoint_restart"
    if adapted:
        adapter = Adapter(learner, LoraSettings(rank, 2.0))
        named, write = adapter.tensors(), adapter.write
        moved = sum(4 * layer.base_layer.weight.numel() for layer in adapter._layers.values())
    else:
        named = {name: value.detach() for name, value in learner.named_parameters()}
        moved = sum(value.numel() * value.element_size() for value in named.values())

        def write(folder: Path, named: Any) -> None:
            checkpoint.export(learner, folder, base, named)

    kind, mark = ("adapter", fingerprint(base)) if adapted else ("checkpoint", "")
    root = place / mode
    sender = FolderSender(root, write, kind=kind, kept=2, base=mark)
    kind_of_receiver: Any = "adapter" if mode == "lora_hotswap" else "folder"
    receiver = FolderReceiver(root, "engine", kind=kind_of_receiver, base=base if adapted else None)
    took: dict[str, list[float]] = {"publish_s": [], "take_s": [], "apply_s": []}
    for version in range(1, rounds + 2):  # the first is not counted: it finds nothing in any cache
        times = [timed(lambda: sender.publish(version, version, dict(named)))[0]]  # noqa: B023
        seconds, (_, _, folder) = timed(receiver.take)
        times += [seconds, timed(lambda: (files.swap if mode == "lora_hotswap" else files.restart)(folder))[0]]  # noqa: B023
        for name, value in zip(took, times):
            took[name] += [value] if version > 1 else []
    size = sum(path.stat().st_size for path in folder.rglob("*"))
    receiver.close()
    sender.close()
    return {
        "mode": mode, "model_mb": round(sum(p.numel() for p in engine.parameters()) * 4 / 1e6, 2),
        "moved_mb": round(size / 1e6, 3), **{name: statistics.median(values) for name, values in took.items()},
        "limit_s": copy_seconds(moved, rounds), "limit": "one copy of what changes in the model", "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 100])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": report.machine(), "commit": report.commit(ROOT), "date": time.strftime("%Y-%m-%d"),
        "load_before": os.getloadavg(), "threads": torch.get_num_threads(), "rank": options.rank, "rows": [],
    }
    for megabytes in options.mb:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as disk:
            base = model_folder(Path(disk) / "base", megabytes)
            for mode in MODES:
                place = Path(disk if mode == "checkpoint_restart" else memory)
                result["rows"].append(measure(base, mode, options.rank, options.rounds, place))
                print(json.dumps(result["rows"][-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"weight-folders_{result['machine']['cores']}cores_{result['date']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path)
