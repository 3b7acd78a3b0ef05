"""Learner's forward and backward: memory and time of the head, packing, saved bytes, peaks, ranks, steps.

`learner head` computes log-probability and entropy of `--rows` tokens over `--words` words, in pieces and with one
log-softmax, each in a process of its own, and reports peak memory above the hidden states, CPU seconds and how far the
gradients are apart. `learner packing` trains long-tailed samples (log-normal lengths, median 300, sigma 0.7) both
ways and reports tokens per second and the share of computed positions that were padding. `learner saved` counts the
bytes that a forward saves for its backward, per token, with and without activation checkpointing, at the widths of a
real model in a few of its layers. `learner peak` makes true optimiser steps of a model with random weights in a
process of its own and reports its peak of resident memory beside what `busrl check` says. `learner ranks` lets
ranks load, train and publish a model with random weights, and reports the peaks of each rank's own memory (anonymous
pages: neither mapped files nor the staging in shared memory count) beside what its parts take, and the peak of two
steps beside what `busrl check` says of a rank. `learner steps` makes
optimiser steps at the quickstart's lengths, `--samples` answers of some 11 tokens to prompts of some 13, by its model;
`--against TREE` takes the code of another checkout in turn. One thread each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import COMMAND, ROOT
from benchmarks.common import report, sides

TREE = "BUSRL_BENCH_TREE"  # the checkout whose busrl a child takes
sys.path.insert(0, os.environ.get(TREE) or str(ROOT))
WIDTH, WORDS = 896, 151_936  # Qwen2.5-0.5B
MEDIAN, SIGMA = 300, 0.7


# -- the head ----------------------------------------------------------------------


def head_once(way: str, rows: int, words: int, width: int) -> dict[str, Any]:
    """Make one forward and backward in this process; bytes are peaks of resident memory above the inputs."""
    import torch

    from busrl.training.head import Head

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = (torch.randn(rows, width) * 0.5).requires_grad_()
    weight = (torch.randn(words, width) * 0.05).requires_grad_()
    targets, sides = torch.randint(0, words, (rows,)), torch.randn(rows)
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = peak(), time.process_time()
    if way == "pieces":
        logprobs, _ = Head()(hidden, weight, targets)
    else:
        every = torch.log_softmax((hidden @ weight.t()).float(), -1)
        logprobs = every.gather(-1, targets[:, None])[:, 0]
        _ = -(every.exp() * every).sum(-1).detach()
    forward = time.process_time() - begun
    (logprobs * sides).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    backward, most = time.process_time() - begun - forward, peak() - before
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    checks = [logprobs.double().sum(), hidden.grad.double().norm(), weight.grad.double().norm()]
    return {
        "way": way, "rows": rows, "words": words, "peak": most, "gradients": gradients, "forward_s": forward,
        "backward_s": backward,
        "checks": [float(value) for value in checks],
    }


def peak() -> int:
    """Peak resident bytes since the last reset."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def head(rows: list[int], words: int, width: int, whole_up_to: int, rounds: int) -> list[dict[str, Any]]:
    table = []
    for count in rows:
        ways = ["pieces", "whole"] if count <= whole_up_to else ["pieces"]
        runs = [child("head-once", way, str(count), str(words), str(width)) for _ in range(rounds) for way in ways]
        for way in ways:
            mine = [run for run in runs if run["way"] == way]
            seconds = statistics.median(run["forward_s"] + run["backward_s"] for run in mine)
            table.append({
                "way": way, "rows": count, "peak_gib": max(run["peak"] for run in mine) / 2**30,
                "gradients_gib": mine[0]["gradients"] / 2**30, "cpu_s": seconds, "checks": mine[0]["checks"],
            })
    return table


def child(*arguments: str, tree: Path = ROOT) -> dict[str, Any]:
    command, more = [*COMMAND, "learner", *arguments], {"OMP_NUM_THREADS": "1", TREE: str(tree)}
    ended = sides.ran(command, check=True, env={**os.environ, **more})
    result: dict[str, Any] = json.loads(ended.output.splitlines()[-1])
    return result


# -- packing ---------------------------------------------------------------------------


def packing_once(way: str, budget: int, count: int, width: int, layers: int) -> dict[str, Any]:
    """Tokens per CPU second of forward and backward over `count` samples in groups of 8, and the padding."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from busrl.training import packing
    from busrl.training.batch import Sample
    from busrl.training.forward import PackedRows, PaddedRows
    from busrl.training.settings import TrainerSettings
    from busrl.training.trainer import Trainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    words = 4096
    model = AutoModelForCausalLM.from_config(Qwen3Config(
        vocab_size=words, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, head_dim=64, max_position_embeddings=8192,
    )).eval()
    if way == "packed":
        packing.adopt(model)
    random, samples = np.random.default_rng(1), []
    for number in range(count):
        if number % 8 == 0:
            prompt = random.integers(0, words, 100).astype(np.int32)
        length = int(np.clip(random.lognormal(np.log(MEDIAN), SIGMA), 8, 2048))
        zeros = np.full(length, -1.0, np.float32)
        tokens = random.integers(0, words, length).astype(np.int32)
        samples.append(
            Sample(number, number // 8, number % 8, prompt, tokens, zeros, np.zeros(length, np.uint32)))
    forward = (PackedRows if way == "packed" else PaddedRows)(model)
    trainer = Trainer(model, TrainerSettings(micro_batch_tokens=budget), forward=forward)
    begun = time.process_time()
    trainer.accumulate(samples, [1.0, -1.0] * (count // 2))
    spent = time.process_time() - begun
    stats = trainer.step(0.0)
    return {"way": way, "tokens": stats.tokens, "cpu_s": spent, "padding": stats.padding, "loss": stats.loss}


def packed_beside_padded(budgets: list[int], count: int, width: int, layers: int, rounds: int) -> list[dict[str, Any]]:
    results = []
    for budget in budgets:
        runs = [
            child("packing-once", way, *map(str, (budget, count, width, layers)))
            for _ in range(rounds) for way in ("packed", "padded")
        ]
        speed = {
            way: [run["tokens"] / run["cpu_s"] for run in runs if run["way"] == way] for way in ("packed", "padded")
        }
        results.append({
            "budget": budget, "ratio": statistics.median(a / b for a, b in zip(*speed.values(), strict=True)),
            **{f"{way}_tokens_per_cpu_s": statistics.median(values) for way, values in speed.items()},
            "padding": {run["way"]: run["padding"] for run in runs}, "loss": {run["way"]: run["loss"] for run in runs},
        })
    return results


# -- steps of a tiny model -----------------------------------------------------------------


def steps_once(count: int, samples_of_step: int) -> dict[str, Any]:
    """Milliseconds of so many steps after ten that are not counted; names that older trees have as well."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    import busrl
    from busrl.training.batch import Sample

    training: Any = importlib.import_module("busrl.training.trainer")
    try:
        device = importlib.import_module("busrl.system.device")
    except ModuleNotFoundError:  # a tree of before 2026-11-28
        device = importlib.import_module("busrl.device")
    device.keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    words = 16
    model = AutoModelForCausalLM.from_config(Qwen3Config(
        vocab_size=words, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
    )).eval()
    trainer, random, times = training.Trainer(model, training.TrainerSettings()), np.random.default_rng(1), []
    for step in range(count + 10):
        samples = []
        for number in range(samples_of_step):
            if number % 8 == 0:
                prompt = random.integers(0, words, random.integers(10, 17)).astype(np.int32)
            length = int(np.clip(random.geometric(1 / 11), 2, 64))
            tokens = random.integers(0, words, length).astype(np.int32)
            behaviour, versions = np.full(length, -2.8, np.float32), np.full(length, step, np.uint32)
            samples.append(Sample(number, number // 8, number % 8, prompt, tokens, behaviour, versions))
        begun, begun_cpu = time.perf_counter(), time.process_time()
        trainer.accumulate(samples, [1.0, -1.0] * (samples_of_step // 2), version=step)
        stats = trainer.step(1e-4)
        times.append((time.perf_counter() - begun, time.process_time() - begun_cpu))
    wall, cpu = (1000 * statistics.median(column) for column in zip(*times[10:], strict=True))
    return {"busrl": str(Path(busrl.__file__).parents[1]), "wall_ms": wall, "cpu_ms": cpu, "loss": stats.loss}


def steps(count: int, samples: int, rounds: int, against: Path | None) -> list[dict[str, Any]]:
    trees = [ROOT, *([against.resolve()] if against else [])]
    runs = [[child("steps-once", str(count), str(samples), tree=tree) for tree in trees] for _ in range(rounds)]
    results = []
    for place, tree in enumerate(trees):
        mine = [run[place] for run in runs]
        assert mine[0]["busrl"] == str(tree), f"{mine[0]['busrl']} was measured in place of {tree}"
        results.append({
            "tree": report.commit(tree), "loss": mine[0]["loss"],
            **{name: statistics.median(run[name] for run in mine) for name in ("wall_ms", "cpu_ms")},
            "cpu over the first": statistics.median(run[place]["cpu_ms"] / run[0]["cpu_ms"] for run in runs),
        })
    return results


# -- memory ------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {  # what config.json of these models says of their widths
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "tie_word_embeddings": True},
    "llama-3.2-1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256,
        "tie_word_embeddings": True},
}
# Name, layers, words (0: the model's own), tokens per micro-batch, length of a sample, checkpointing, type, lora.rank
PEAKS = [
    ("qwen2.5-0.5b", 24, 0, 4096, 1024, "full", "float32", 0),  # the whole model, 494 M parameters
    ("qwen2.5-0.5b", 2, 0, 1024, 512, "none", "float32", 0),
    ("qwen3-0.6b", 6, 32_000, 2048, 512, "none", "float32", 0),
    ("llama-3.2-1b", 4, 32_000, 2048, 1024, "full", "float32", 0),
    ("qwen2.5-0.5b", 6, 32_000, 1024, 512, "none", "bfloat16", 0),
    ("qwen2.5-7b", 1, 32_000, 512, 512, "none", "bfloat16", 16),
    ("qwen2.5-7b", 1, 32_000, 1024, 1024, "none", "float32", 0),
]


def described(name: str, layers: int, words: int) -> dict[str, Any]:
    """config.json of so many layers of it."""
    changed = {"num_hidden_layers": layers, **({"vocab_size": words} if words else {})}
    return {**SHAPES[name], **changed, "max_position_embeddings": 8192}


def made_model(name: str, layers: int, words: int, dtype: str = "float32") -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**described(name, layers, words))
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def made_samples(tokens: int, length: int, words: int) -> list[Any]:
    """Groups of 4 with a prompt of 32 tokens."""
    import numpy as np

    from busrl.training.batch import Sample

    random, samples = np.random.default_rng(1), []
    for number in range(tokens // length):
        if number % 4 == 0:
            prompt = random.integers(0, words, 32).astype(np.int32)
        count = length - len(prompt)
        answer = random.integers(0, words, count).astype(np.int32)
        behaviour = np.full(count, -11.0, np.float32)
        samples.append(Sample(number, number // 4, number % 4, prompt, answer, behaviour, np.zeros(count, np.uint32)))
    return samples


def saved_once(name: str, checkpointing: str, dtype: str) -> dict[str, Any]:
    """Bytes that forwards of 2 and of 4 layers save for backward, and from them those of a token in all layers."""
    import torch

    from busrl.training.batch import flatten
    from busrl.training.settings import TrainerSettings
    from busrl.training.trainer import Trainer

    torch.set_num_threads(1)
    words, length, few = 512, 512, (2, 4)
    sizes = []
    for layers in few:
        model = made_model(name, layers, words)
        trainer = Trainer(model, TrainerSettings(compute_dtype=dtype, activation_checkpointing=checkpointing))
        weights, saved = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}, {}  # type: ignore[var-annotated]

        def keep(tensor: Any, weights: Any = weights, saved: Any = saved) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # held: a place is not used again meanwhile
            return tensor

        samples = made_samples(length, length, words)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer.forward.score(samples, flatten(samples, torch.float32, torch.device("cpu")))
        sizes.append(sum(size for size, _ in saved.values()))
    layer = (sizes[1] - sizes[0]) / (few[1] - few[0]) / length
    whole = SHAPES[name]["num_hidden_layers"]
    return {
        "way": checkpointing, "name": name, "dtype": dtype, "bytes_per_token_and_layer": layer,
        "bytes_per_token": layer * whole + sizes[0] / length - layer * few[0], "layers": whole,
    }


def saved(names: list[str], dtypes: list[str]) -> list[dict[str, Any]]:
    results = []
    for name in names:
        for dtype in dtypes:
            none, full = (child("saved-once", way, name, dtype) for way in ("none", "full"))
            results.append({
                "name": name, "dtype": dtype, "none": none["bytes_per_token"], "full": full["bytes_per_token"],
                "layer": none["bytes_per_token_and_layer"],
                "ratio": full["bytes_per_token"] / none["bytes_per_token"],
            })
    return results


def peak_once(place: int) -> dict[str, Any]:
    """A short first step, after which the optimiser is whole, and then one of two micro-batches, a short one, after
    which the gradient is, and a full one; bytes."""
    from busrl.preflight import memory

    name, layers, words, tokens, length, checkpointing, dtype, rank = PEAKS[place]
    config = described(name, layers, words)
    said = memory.learner_sum(config, memory.Work(
        tokens=tokens, dtype=dtype, checkpointing=checkpointing == "full", lora_rank=rank))
    import torch

    from busrl.system import device
    from busrl.training.model import Adapter, LoraSettings
    from busrl.training.settings import TrainerSettings
    from busrl.training.trainer import Trainer

    device.keep_freed_memory()
    torch.set_num_threads(1)
    model = made_model(name, layers, words, dtype if rank else "float32")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    device.keep_freed_memory(parameters)
    adapter = Adapter(model, LoraSettings(rank, 1.0)) if rank else None
    settings = TrainerSettings(
        micro_batch_tokens=tokens, compute_dtype=dtype, activation_checkpointing=checkpointing)
    Path("/proc/self/clear_refs").write_text("5")
    trainer = Trainer(model, settings, adapter=adapter)
    begun = time.process_time()
    short, whole = (made_samples(*sizes, config["vocab_size"]) for sizes in ((64, 64), (tokens, length)))
    for micro_batches in ((short,), (short, whole)):
        for samples in micro_batches:
            trainer.accumulate(samples, [1.0, -1.0, 1.0, -1.0, *[0.5] * len(samples)][: len(samples)])
        stats = trainer.step(1e-6)
    return {
        "way": name, "layers": layers, "words": words, "tokens": tokens, "length": length, "dtype": dtype,
        "checkpointing": checkpointing, "lora_rank": rank, "parameters": parameters, "peak": peak(),
        "said": sum(said.values()), "ratio": sum(said.values()) / peak(), "parts": said, "loss": stats.loss,
        "micro_batches": stats.micro_batches, "cpu_s": time.process_time() - begun,
    }


# -- ranks -------------------------------------------------------------------------------


class Peak:
    """The most anonymous memory of this process within a block, above what it had at its begin."""

    def __enter__(self) -> Peak:
        self.before, self.most, self._over = anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self.begun = time.perf_counter()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.most = max(self.most, anonymous() - self.before)

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.begun
        self._over.set()
        self._thread.join()
        self.most = max(self.most, anonymous() - self.before)


def anonymous() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


RANK_TOKENS = 512  # of a micro-batch of a rank


class RankPeaks(NamedTuple):
    """The trainer of a rank, its peaks while it loaded and while it published, and the peak of its resident memory, in
    bytes, until it published."""

    trainer: Any
    load: Peak
    publish: Peak
    resident: int


def rank_once(rank: int, world: int, tensor: int, folder: str, dtype: str) -> dict[str, Any]:
    """Joins the team at FOLDER/team.sock, loads FOLDER, trains two steps, the last of two micro-batches, and publishes.
    `peak` is that of the resident memory until then, `said` the sum of `busrl check`."""
    import torch

    from busrl.preflight import memory
    from busrl.ranks.builder import TeamSettings, facts
    from busrl.ranks.mesh import Layout
    from busrl.training.settings import TrainerSettings

    torch.set_num_threads(1)
    made_model("qwen2.5-0.5b", 1, 64)  # so that imports are no part of what is measured
    home, settings = Path(folder), TrainerSettings(compute_dtype=dtype, micro_batch_tokens=RANK_TOKENS)
    team = TeamSettings(world, home / "team.sock", facts("bench"), torch.device("cpu"), collective_s=600, start_s=600,
                        layout=Layout(world, tensor=tensor))
    config = json.loads((home / "config.json").read_text())
    said = memory.learner_sum(config, memory.Work(RANK_TOKENS, dtype, ranks=world, tensor=tensor))
    Path("/proc/self/clear_refs").write_text("5")
    peaks = followed(team, settings, rank) if rank else led(team, settings, home, config["vocab_size"])
    return {"way": str(rank), "tensor": tensor, "parts": said, "said": sum(said.values()),
            "ratio": sum(said.values()) / peaks.resident, **rank_row(peaks, 4 if dtype == "float32" else 2)}


def led(team: Any, settings: Any, home: Path, vocabulary: int) -> RankPeaks:
    """Measure rank 0, which leads the others."""
    from busrl.ranks.leader import Team
    from busrl.weights.shm import ShmSender

    leader = Team.gathered(team)
    with Peak() as load:
        trainer = leader.trainer(home, settings)
    for tokens in ((64,), (64, RANK_TOKENS)):
        for count in tokens:
            samples = made_samples(count * team.ranks // team.layout.tensor, count, vocabulary)
            trainer.accumulate(samples, [1.0] * len(samples))
        trainer.step(1e-6)
    resident = peak()
    sender = ShmSender(home / "weights")
    sender.publish(1, 1, trainer.named_weights())  # the file is made, collectives have their buffers
    with Peak() as publish:
        sender.publish(2, 1, trainer.named_weights())
    sender.close()
    leader.close()
    return RankPeaks(trainer, load, publish, resident)


def followed(team: Any, settings: Any, rank: int) -> RankPeaks:
    """Measure another rank, which follows until its leader closes the team."""
    from busrl.ranks.follower import Follower
    from busrl.ranks.wire import Gather

    follower = Follower(team, settings, rank)
    with Peak() as load:
        built = follower.receive(600)
        assert built is not None and follower.act(built)
    assert follower.trainer is not None
    goes_on = True
    while not isinstance(message := follower.receive(600), Gather):
        assert message is None or follower.act(message), "the leader has closed the team without a publication"
    resident = peak()
    with Peak() as publish:
        while goes_on:
            goes_on = message is None or follower.act(message)
            message = follower.receive(600) if goes_on else None
    return RankPeaks(follower.trainer, load, publish, resident)


def rank_row(peaks: RankPeaks, itemsize: int) -> dict[str, Any]:
    """Seconds, and bytes held, moved and published."""
    from busrl.training import sharded

    parameters = list(peaks.trainer.model.parameters())
    counts = [parameter.numel() for parameter in parameters]
    return {
        "parameters": sum(counts), "published": sum(counts) * itemsize, "largest": max(counts) * itemsize,
        "held": sum(sharded.local(parameter).nbytes for parameter in parameters), "peak": peaks.resident,
        "load_s": peaks.load.seconds, "load": peaks.load.most, "publish_s": peaks.publish.seconds,
        "publish": peaks.publish.most,
    }


def ranks(world: int, tensor: int, name: str, layers: int, words: int, dtype: str) -> list[dict[str, Any]]:
    """Peaks of each rank, as shares of what it holds and in largest tensors."""
    with tempfile.TemporaryDirectory() as folder:
        made_model(name, layers, words).save_pretrained(folder)
        command = [*COMMAND, "learner", "ranks-once"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        processes = [
            sides.started([*command, str(rank), str(world), str(tensor), folder, dtype], env=environment,
                             stdout=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        outputs = [process.communicate()[0].splitlines() for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit("a rank failed")
    results = [json.loads(lines[-1]) for lines in outputs]
    return [
        {**result, "name": name, "layers": layers, "words": words, "dtype": dtype, "ranks": world,
         "load_above_held": (result["load"] - result["held"]) / result["held"],
         "publish_in_largest": result["publish"] / result["largest"]}
        for result in results
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    head_options = verbs.add_parser("head")
    head_options.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 16384])
    head_options.add_argument("--words", type=int, default=WORDS)
    head_options.add_argument("--width", type=int, default=WIDTH, help="of hidden states")
    head_options.add_argument("--whole-up-to", type=int, default=2048, help="rows that one log-softmax is tried with")
    packing_options = verbs.add_parser("packing")
    packing_options.add_argument("--budgets", type=int, nargs="+", default=[4096, 16384])
    packing_options.add_argument("--samples", type=int, default=64)
    packing_options.add_argument("--width", type=int, default=256)
    packing_options.add_argument("--layers", type=int, default=4)
    three = verbs.add_parser("saved")
    three.add_argument("--names", nargs="+", default=["qwen2.5-0.5b", "qwen2.5-7b"], choices=SHAPES)
    three.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    four = verbs.add_parser("peak")
    four.add_argument("--places", type=int, nargs="+", default=list(range(len(PEAKS))), help="of the configurations")
    five = verbs.add_parser("ranks")
    five.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    five.add_argument("--tensor", type=int, default=1, help="ranks that compute a layer together")
    five.add_argument("--name", default="qwen2.5-0.5b", choices=SHAPES)
    five.add_argument("--layers", type=int, default=12)
    five.add_argument("--words", type=int, default=32_000)
    five.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    six = verbs.add_parser("steps")
    six.add_argument("--count", type=int, default=60)
    six.add_argument("--samples", type=int, default=64, help="of a step; the quickstart trains 256")
    six.add_argument("--against", type=Path, help="another checkout, taken in turn")
    for verb in (head_options, packing_options, three, four, five, six):
        verb.add_argument("--rounds", type=int, default=3)
        verb.add_argument("--out", type=Path)
    kinds = {"head-once": 4, "packing-once": 5, "saved-once": 3, "peak-once": 1, "ranks-once": 5, "steps-once": 2}
    for name, count in kinds.items():
        verbs.add_parser(name).add_argument("values", nargs=count)
    options = parser.parse_args()
    if options.verb.endswith("-once"):
        print(json.dumps(once(options.verb, options.values)))
        return
    rows = measured(options)
    result = {"machine": report.machine(), "commit": report.commit(ROOT), "verb": options.verb, "rows": rows}
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def once(verb: str, values: list[str]) -> dict[str, Any]:
    if verb == "saved-once":
        return saved_once(values[1], values[0], values[2])
    if verb == "ranks-once":
        rank, world, tensor = map(int, values[:3])
        return rank_once(rank, world, tensor, *values[3:])
    if verb in ("peak-once", "steps-once"):
        return (peak_once if verb == "peak-once" else steps_once)(*map(int, values))
    way, *numbers = values
    return (head_once if verb == "head-once" else packing_once)(way, *map(int, numbers))


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.verb == "head":
        return head(options.rows, options.words, options.width, options.whole_up_to, options.rounds)
    if options.verb == "saved":
        return saved(options.names, options.dtypes)
    if options.verb == "steps":
        return steps(options.count, options.samples, options.rounds, options.against)
    if options.verb == "ranks":
        return [
            row for world in options.ranks for dtype in options.dtypes
            for row in ranks(world, options.tensor, options.name, options.layers, options.words, dtype)
        ]
    if options.verb == "peak":
        return [child("peak-once", str(place)) for place in options.places]
    return packed_beside_padded(options.budgets, options.samples, options.width, options.layers, options.rounds)
