"""One rank of the tests of several: trains tiny random models of real architectures on shares of the same samples.

`python rank_program.py RANK WORLD PORT FOLDER STEPS FAMILY...` joins the others through the store at PORT, reads each
family's model from FOLDER, and writes losses, norms and weights there. `alone` computes the same on one rank. `SMALL`
in the environment is the size below which adamw8bit keeps float32 states.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from busrl.data.routing import Routing
from busrl.data.vocabulary import TokenRows
from busrl.ranks import mesh
from busrl.ranks.builder import TeamSettings, TrainerBuilder
from busrl.ranks.mesh import Layout
from busrl.training import optimizers, sharded
from busrl.training.batch import Sample
from busrl.training.checkpoint import Checkpoint
from busrl.training.model import Adapter, LoraSettings
from busrl.training.scorer import Advantages
from busrl.training.settings import TrainerSettings
from busrl.training.step_stats import RankStats, stats_of
from busrl.training.trainer import Trainer

WORDS, ROWS = 48, 56  # tokens of the samples, and of the model
SIZES: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 0,
}
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 8, "head_dim": 8, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "llama": ("LlamaConfig", {}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen3moe": ("Qwen3MoeConfig", EXPERTS),
}
ROUTING = Routing((0, 1), 4, 2)  # of qwen3moe
SETTINGS = TrainerSettings(weight_decay=0.01, max_grad_norm=0.5)
RATE = 1e-3


def build(family: str) -> Any:
    """The same random model in every process."""
    import transformers as hf

    name, more = FAMILIES[family]
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(getattr(hf, name)(**{**SIZES, **more})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def sample(random: Any, uid: int) -> Sample:
    prompt, count = random.integers(1, 12), int(random.integers(1, 30))
    return Sample(
        uid, uid, 0, random.integers(0, WORDS, prompt).astype(np.int32),
        random.integers(0, WORDS, count).astype(np.int32), (-random.random(count) * 4 - 0.1).astype(np.float32),
        np.zeros(count, np.uint32),
    )


def routed(random: Any, one: Sample) -> Sample:
    """The sample with the routes of an engine that chose by lot; one in seven has none."""
    rows = np.tile(np.arange(ROUTING.experts), (one.length - 1, len(ROUTING.layers), 1))
    routes = random.permuted(rows, axis=-1)[..., : ROUTING.top_k].astype(ROUTING.dtype)
    first = len(one.prompt_ids) - 1
    return one if one.uid == 3 else replace(one, prompt_routes=routes[:first], routes=routes[first:])


def micro_batches(step: int, with_routes: bool = False) -> list[tuple[list[Sample], list[float]]]:
    """One to five, of uneven lengths."""
    random, count = np.random.default_rng(step), 1 + step % 5
    samples = [sample(random, uid) for uid in range(7)]
    if with_routes:  # as the weights of this step drew them
        samples = [routed(np.random.default_rng(one.uid), one) for one in samples]
        samples = [replace(one, policy_versions=np.full_like(one.policy_versions, step)) for one in samples]
    worth = random.normal(size=7).tolist()
    return [(samples[i::count], worth[i::count]) for i in range(count)]


def rounds(parts: list[tuple[list[Sample], list[float]]], world: int) -> list[tuple[list[Sample], list[float]]]:
    """The micro-batches that so many ranks compute at a time, each time's as one."""
    grouped = [parts[start : start + world] for start in range(0, len(parts), world)]
    return [([one for part, _ in some for one in part], [one for _, part in some for one in part]) for some in grouped]


def train(trainer: Trainer, rank: int, world: int, steps: int, joined: int = 1) -> list[RankStats]:
    """A round is a micro-batch on every rank; a rank for which none is left has nothing to do in the last one.
    `joined`: ranks whose micro-batches this one computes as one: the balance of experts is over the rows of all."""
    shares = []
    for step in range(steps):
        version = None if trainer.settings.routing is None else step
        parts = rounds(micro_batches(step, version is not None), joined)
        for start in range(0, len(parts), world):
            if start + rank < len(parts):
                samples, worth = parts[start + rank]
                trainer.micro_batch(samples, Advantages(worth), version)
            else:
                trainer.idle(version)
        shares.append(trainer.update(RATE))
    return shares


KINDS: dict[str, dict[str, Any]] = {  # settings of the trainer
    "": {}, "bfloat16": {"compute_dtype": "bfloat16"}, "again": {"activation_checkpointing": "full"}, "lora": {},
    "lora16": {"compute_dtype": "bfloat16"}, "adafactor": {"optimizer": "adafactor"},
    "adamw8bit": {"optimizer": "adamw8bit"}, "layers": {"train_layers": "1, norm"},
    "rows": {"token_rows": TokenRows(52, (49,))},  # some of its rows stand for no token
    "routes": {"routing": ROUTING, "balance": 0.1, "routes_compare_every": 2},
    "routesagain": {"routing": ROUTING, "balance": 0.1, "activation_checkpointing": "full"},
}


def axes_of(kind: str, world: int) -> tuple[str, Layout, bool]:
    """Of a kind as `again@tensor=2,offload=1`: the kind, how the ranks share the model, and whether parts are on the
    host."""
    kind, _, axes = kind.partition("@")
    sizes = {name: int(size) for name, size in (axis.split("=") for axis in axes.split(",") if axis)}
    offload = bool(sizes.pop("offload", 0))
    return kind, Layout(world, **sizes), offload


def lora_of(kind: str) -> LoraSettings | None:
    return LoraSettings(4, 2.0, ("q_proj", "o_proj"), seed=3) if kind.startswith("lora") else None


def alone(family: str, steps: int, kind: str, shares: int = 1) -> dict[str, Any]:
    """`shares`: of samples, into which several ranks divide a step."""
    model, settings, lora = build(family), replace(SETTINGS, **KINDS[kind]), lora_of(kind)
    if lora is not None:
        for parameter in model.parameters():  # not the buffers
            parameter.data = parameter.data.to(getattr(torch, settings.compute_dtype))
    trainer = Trainer(model, settings) if lora is None else Trainer(model, settings, adapter=Adapter(model, lora))
    return result(trainer, train(trainer, 0, 1, steps, shares if settings.balance else 1))


def parts(world: int, kind: str) -> TrainerBuilder:
    """What a trainer of a shard is made with; no socket is opened for it."""
    kind, layout, offload = axes_of(kind, world)
    team = TeamSettings(world, Path(), {}, torch.device("cpu"), lora=lora_of(kind), layout=layout, offload=offload)
    return TrainerBuilder(replace(SETTINGS, **KINDS[kind]), team, mesh.meshes(layout, "cpu"))


def result(trainer: Trainer, shares: list[RankStats]) -> dict[str, Any]:
    stats = [stats_of([share], RATE) for share in shares]
    return {
        "way": trainer.forward.name, "losses": [share.sums for share in shares],
        "norms": [one.grad_norm for one in stats],
        "tokens": [one.tokens for one in stats], "routes": [share.routes for share in shares],
        "compared": [share.compared for share in shares],
        "weights": {name: sharded.gathered(tensor).numpy() for name, tensor in trainer.trained_tensors().items()},
    }


def main(rank: int, world: int, port: int, folder: Path, steps: int, families: list[str]) -> None:
    torch.set_num_threads(1)
    optimizers.SMALL = int(os.environ.get("SMALL", optimizers.SMALL))
    mesh.join(mesh.find_store(port, world, 60), "tests", rank, world, torch.device("cpu"), 60)
    for family in families:
        one_family(rank, world, folder, steps, family)
    mesh.leave()


def one_family(rank: int, world: int, folder: Path, steps: int, family: str) -> None:
    name, _, kind = family.partition(":")
    made = parts(world, kind)
    trainer = made.trainer(folder / name, Trainer)
    layout, model = made.meshes.layout, trainer.model
    held = sum(sharded.local(parameter).nbytes for parameter in model.parameters())
    whole = sum(parameter.nbytes for parameter in model.parameters())
    results = result(trainer, train(trainer, rank // layout.tensor, layout.shares, steps))
    states = (value for tensor in trainer.optimizer.state_dict()["state"].values() for value in tensor.values())
    results["bytes"] = {
        "whole": whole, "held": held, "read": made.read, "largest": made.largest,
        # Each parameter has a gradient in float32.
        "gradient": sum(sharded.local(parameter).nbytes for parameter in trainer.parameters),
        "states": sum(sharded.local(one).nbytes for one in states if isinstance(one, torch.Tensor) and one.ndim),
    }
    results["counts"] = rank % layout.tensor == 0  # the others computed the same
    weights = results.pop("weights")
    if not rank:
        np.savez(folder / f"{family}.npz", **weights)
    if "@" in kind:  # which changes the weights
        results["again"] = saved_and_restored(rank, world, folder, family, trainer)
    (folder / f"{family}.{rank}.json").write_text(json.dumps(results))


def saved_and_restored(rank: int, world: int, folder: Path, family: str, trainer: Trainer) -> list[Any]:
    """Saves; one step further, and the same of ranks of one axis that restored what was saved: both norms."""
    name, kept = family.partition(":")[0], folder / f"saved-{family}"
    kept.mkdir(exist_ok=True)
    saving = trainer.save(kept)
    saving.entries()
    torch.distributed.barrier()
    layout = axes_of(family.partition(":")[2], world)[1]
    after = train(trainer, rank // layout.tensor, layout.shares, 1)
    other = parts(world, family.partition(":")[2].partition("@")[0]).trainer(folder / name, Trainer)
    other.restore(Checkpoint(kept, 0, {}))
    again = train(other, rank, world, 1)
    return [after[0].norm, again[0].norm]


if __name__ == "__main__":
    rank, world, port, folder, steps, *families = sys.argv[1:]
    main(int(rank), int(world), int(port), Path(folder), int(steps), families)
