"""The table of docs/real-sizes.md: runs with 8, 64 and 512 GPUs, by the sums of `busrl check`.

    python tools/sizes.py            # prints the table

Writes a topology and a model's config.json (and weights that are one hole) for each case, loads them as `busrl check`
does, and prints what `config.derive`, `explain`, `hosts` and `memory` say. Only the seconds of a transfer are this
program's own: bytes over a rate. Starts nothing, and nothing of it was tried at these sizes.
"""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path

from busrl import curve
from busrl.data import pretrained
from busrl.hosts.membership import of_host
from busrl.preflight import explain, memory
from busrl.preflight.load import load
from busrl.topology import sizes
from busrl.topology.schema import Topology

GPUS, PER_HOST, GROUP = (8, 64, 512), 8, 8
TOKENS = (16 << 10, 128 << 10)
ENCRYPTED = 0.8e9  # bytes per second of one encrypted stream, measured on loopback (docs/hosts-tried.md)
MODELS = {  # of that size: hidden, layers, inner, heads, key-value heads, vocabulary; GPUs of an engine
    "7B": (3584, 28, 18944, 28, 4, 152064, 1),
    "32B": (5120, 64, 27648, 40, 8, 152064, 2),
    "70B": (8192, 80, 28672, 64, 8, 128256, 4),
}
ROWS = {16 << 10: 64, 128 << 10: 16}  # sequences of an engine
HEAD = (
    "GPUs, model, answers", "slots", "bytes of a slot", "ring at home: usual, most", "ring of a host: usual, most",
    "/dev/shm of a host", "log per step", "one version", "seconds to all: chain, all from home",
    "learner, per rank of 8",
)


def write_model(folder: Path, name: str) -> None:
    hidden, layers, inner, heads, kv_heads, vocabulary, _ = MODELS[name]
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary, "max_position_embeddings": 1 << 18,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    words = {"a": 0, "<|im_end|>": 1, " " * 128: 2}  # the longest token bounds the text
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": []}))
    count = pretrained.estimate(config)
    head = json.dumps({"w": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + 2 * count)


def topology(folder: Path, name: str, gpus: int, tokens: int) -> Topology:
    """Home trains on 8 GPUs (on 4, and generates on 4, where there are no others); all other hosts generate. An
    engine is one process, whatever it runs on: no sum here asks which."""
    hosts, width = gpus // PER_HOST - 1, MODELS[name][-1]
    rows = ROWS[tokens] * max(1, (PER_HOST * hosts or PER_HOST // 2) // width)
    groups = max(64, rows // GROUP)  # of a step: as many as the engines run at a time
    where = f"hosts = {json.dumps([f'gpu-{n}' for n in range(hosts)])}" if hosts else ""
    engines = max(1, (PER_HOST if hosts else PER_HOST // 2) // width)
    text = f"""
[model]
path = "model"
dtype = "bfloat16"
device = "cuda"
[data]
train = "train.jsonl"
[generation]
max_new_tokens = {tokens}
max_batch = {ROWS[tokens]}
max_prompt_tokens = 2048
[groups]
size = {GROUP}
[learner]
lr = 1e-6
[learner.trigger]
n_min = {groups}
[weights]
mode = "batch-async"
max_staleness = 1
[ring]
processes = 512
[bus]
endpoint = "{'tcp://10.0.0.1:5600' if hosts else 'ipc'}"
keys = "{folder / 'keys'}"
max_message_bytes = {64 << 20}
[[process]]
role = "rollout"
count = {engines}
{where}
[[process]]
role = "learner"
ranks = {PER_HOST if hosts else PER_HOST // 2}
[[process]]
role = "reward"
"""
    (folder / "t.toml").write_text(text)
    return load(folder / "t.toml")


def row(t: Topology, name: str, gpus: int, tokens: int) -> list[str]:
    home, names = t.derived, t.host_names
    away = of_host(t, names[0]) if names else None
    version = dict(explain.shared_memory(t))["weights"] / t.weights.copies
    usual = sizes.PER_TOKEN * home.usual_tokens + 4 * t.max_prompt_tokens
    samples = t.learner.trigger.n_min * t.groups.size
    there = sum(size for _, size in explain.shared_memory(away or t))
    sent = len(names) * version
    rank = sum(memory.of_topology(t).values())
    return [
        f"{gpus}, {name}, {tokens >> 10}k", f"{home.slots:,}", _size(home.slot_bytes),
        f"{_size(home.ring_held)}, {_size(home.ring_bytes)}",
        f"{_size(away.derived.ring_held)}, {_size(away.derived.ring_bytes)}" if away else "-",
        _size(there), _size(samples * usual),
        _size(version), f"{version / ENCRYPTED:,.0f}, {sent / ENCRYPTED:,.0f}" if names else "-", _size(rank),
    ]


def _size(size: float) -> str:
    for unit, step in (("TiB", 1 << 40), ("GiB", 1 << 30)):
        if size >= step:
            return f"{size / step:.1f} {unit}"
    return f"{size / (1 << 20):.1f} MiB"


def main() -> None:
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for name in MODELS:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_model(folder / "model", name)
            (folder / "train.jsonl").write_text('{"prompt": "a", "answer": "a"}\n' * 64)
            curve.init(folder / "keys")
            for gpus in GPUS:
                for tokens in TOKENS:
                    cells = row(topology(folder, name, gpus, tokens), name, gpus, tokens)
                    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
