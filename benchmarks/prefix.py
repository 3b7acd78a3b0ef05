"""Kept prefixes: episodes of many turns in real runs, with and without them.

    python -m benchmarks prefix [--turns 40] [--json FILE]
    python -m benchmarks prefix --engine [--turns 20]
    python -m benchmarks prefix --learner [--json FILE]

Each run is `busrl launch` with an agent whose episodes put fixed numbers of ids between answers of fixed lengths, so
that all variants read and draw alike. Told of each: ids that an episode puts in, prompt ids computed for it by engines
(also for each id put in, of which the bar is 1.3, and for each trained), the share found in kept rows, and the seconds
from the first step to the last over the episodes that ended meanwhile. `--engine` times the torch engine alone, in CPU
seconds, with 32 such episodes at a time, each of which waits one to three decoding steps between two turns.
`--learner` times forward and backward of a micro-batch, in CPU seconds of one thread: sequences share their prompts
alone, or all that they have in common; the two take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import ROOT
from benchmarks.common import report, runs

NEW, DRAWN, FIRST = 12, 16, 24  # ids between two turns, of an answer, of the first prompt
EPISODE = '''
import random

async def episode(task, llm):
    chance = random.Random(task["prompt"])
    ids = [chance.randrange(2, 14) for _ in range({first})]
    for _ in range({turns}):
        answer = await llm.complete(ids, max_tokens={drawn})
        ids += [*answer.ids, *(chance.randrange(2, 14) for _ in range({new}))]
    return float(sum(answer.ids) % 2)
'''
runs.LIMIT_S = 900.0
LARGER = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "head_dim": 64}
SIZES: dict[str, dict[str, Any]] = {"0.1 M": {}, "3 M": {**LARGER, "layer_types": 4 * ["full_attention"]}}
KEEP, OFF = (), ("generation.prefix_keep_s=0",)
VARIANTS = {
    "off": OFF, "kept": KEEP, "kept, recompute": ("generation.on_update=recompute",),
    "off, two engines": (*OFF, "process.rollout.count=2"), "kept, two engines": ("process.rollout.count=2",),
    "kept, two engines, no affinity": ("process.rollout.count=2", "agents.affinity_ms=0"),
    "kept, two engines, affinity 20 ms": ("process.rollout.count=2", "agents.affinity_ms=20"),
}


def model_folder(folder: Path, changes: dict[str, Any], length: int) -> Path:
    """The quickstart's model without an end token, of another size, with new weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from busrl.quickstart.cache import ensure

    shutil.copytree(ensure("tiny:sort").model, folder)
    more = {**changes, "max_position_embeddings": length, "eos_token_id": None}
    for name, new in (("config.json", more), ("generation_config.json", {"eos_token_id": None}),
                      ("tokenizer_config.json", {"eos_token": None, "model_max_length": length})):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **new}))
    AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(str(folder))).save_pretrained(str(folder))
    return folder


def measured(model: Path, folder: Path, turns: int, groups: int, steps: int, settings: tuple[str, ...]) -> Any:
    length = FIRST + turns * (NEW + DRAWN)
    overrides = (
        f"model.path={model}", f"process.agent.function={folder}/talk.py:episode", f"agents.context={length}",
        f"agents.sampled={turns * DRAWN}", f"agents.tokens={2 * length}", f"generation.max_new_tokens={DRAWN}",
        "agents.episodes=32", "generation.max_batch=64", "validation.data=", f"learner.trigger.n_min={groups}",
        f"run.max_steps={steps}", "learner.checkpoint_every=0", "groups.size=4", "weights.max_staleness=3", *settings,
    )
    with runs.run(*overrides, config=ROOT / "configs" / "agents.toml") as run:
        if run.wait():
            raise RuntimeError(run.tail())
        rows = [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]
    rows = [row for row in rows if "kind" not in row][1:]  # the first one waits for the start
    seconds, episodes = sum(row["seconds"] for row in rows), sum(row["samples_ended"] for row in rows)
    put_in = FIRST + (turns - 1) * NEW
    per_episode = fmean(row["episodes"]["computed_per_trained"] * row["tokens"] / row["samples"] for row in rows)
    return {
        "put_in": put_in, "drawn": turns * DRAWN, "computed": per_episode, "computed_per_new": per_episode / put_in,
        "computed_per_trained": per_episode / (turns * DRAWN),
        "hit_share": fmean(row["episodes"]["prefix_hit_share"] for row in rows),
        "seconds_per_episode": seconds / episodes, "episodes": episodes, "load": os.getloadavg()[0],
    }


def engine_alone(model: Path, turns: int, keep_s: float, episodes: int = 32) -> str:
    import numpy as np
    import torch

    from busrl.engines.base import Request
    from busrl.engines.torch.engine import TorchEngine

    torch.set_num_threads(1)
    engine = TorchEngine.load(model, capacity=64, max_length=2048, prefix_keep_s=keep_s)
    chance, none, step, asked = random.Random(0), np.empty(0, np.int32), 0, 0
    paths = [[chance.randrange(2, 14) for _ in range(FIRST)] for _ in range(episodes)]
    left, due, whose = [turns] * episodes, dict.fromkeys(range(episodes), 0), dict[int, int]()
    begun = time.process_time()
    while due or engine.active:
        for episode in [episode for episode, at in due.items() if at <= step]:
            del due[episode]
            asked, whose[asked] = asked + 1, episode
            prompt = np.array(paths[episode], np.int32)
            engine.submit([Request(asked, asked, 0, prompt, none, DRAWN, 1.0, 1.0, 0)])
        step += 1
        for ended in engine.step():
            episode = whose.pop(ended.key)
            paths[episode] += [*ended.token_ids.tolist(), *(chance.randrange(2, 14) for _ in range(NEW))]
            left[episode] -= 1
            due |= {episode: step + chance.randrange(1, 4)} if left[episode] else {}
    seconds = (time.process_time() - begun) / episodes
    return f"| {1e3 * seconds:.0f} ms | {engine.statistics().prefill_tokens // episodes:,} |"


# -- the learner -----

FORKS, ROUNDS = 8, 7


def micro_batches() -> dict[str, list[Any]]:
    """Samples of about 8,000 positions each: groups whose prompts begin alike, forked episodes, and what shares nothing
    but prompts."""
    import numpy as np

    from busrl.training.batch import Sample, Turns

    chance = np.random.default_rng(0)

    def ids(count: int) -> Any:
        return chance.integers(2, 14, count).astype(np.int32)

    def answer(uid: int, group: int, prompt: Any, count: int) -> Sample:
        zeros = np.zeros(count, np.float32)
        return Sample(uid, group, uid, prompt, ids(count), zeros, zeros.astype(np.uint32))

    def forked(uid: int, common: int, own: int) -> Sample:
        start = ids(common)
        parts = [np.concatenate([start, ids(own)]) for _ in range(FORKS)]
        rows = np.array([(0, 24, 40), *((n, common, common + own) for n in range(FORKS))])
        count = int((rows[:, 2] - rows[:, 1]).sum())
        zeros = np.zeros(count, np.float32)
        turns = Turns(np.array([len(part) for part in parts]), rows, np.zeros(count, np.bool_))
        return Sample(uid, uid, 0, ids(0), np.concatenate(parts), zeros, zeros.astype(np.uint32), turns=turns)

    system = ids(400)
    prompts = [np.concatenate([system, ids(40)]) for _ in range(8)]
    return {
        "8 groups of 4, prompts of 440 with 400 in common, answers of 130": [
            answer(4 * g + n, g, prompts[g], 130) for g in range(8) for n in range(4)],
        "2 episodes of 8 forks, 400 in common, 100 each": [forked(uid, 400, 100) for uid in range(2)],
        "2 episodes of 8 forks, 100 in common, 400 each": [forked(uid, 100, 400) for uid in range(2)],
        "8 groups of 8, prompts of 200, answers of 100": [
            answer(8 * g + n, g, prompt, 100) for g, prompt in enumerate(map(ids, [200] * 8)) for n in range(8)],
        "64 groups of 1, prompts of 24, answers of 16": [answer(g, g, ids(24), 16) for g in range(64)],
    }


def learner_alone(model: Path, samples: list[Any]) -> dict[str, Any]:
    """CPU seconds of forward and backward, and rows, with prompts shared alone and with all that is in common."""
    import torch

    from busrl.training import packing
    from busrl.training.batch import flatten
    from busrl.training.forward import choose_forward
    from busrl.training.model import load

    torch.set_num_threads(1)
    way = choose_forward(load(model))
    flat = flatten(samples, torch.float32, torch.device("cpu"))
    usual, spent = packing.LEAST_SAVED, dict[str, list[float]]()
    rows = {name: len(packing.plan_of(samples, beyond=name == "all").ids) for name in ("prompts", "all")}
    for _ in range(ROUNDS):
        for name, least in (("prompts", 2.0), ("all", usual)):
            packing.LEAST_SAVED = least  # two times all rows are never saved
            begun = time.process_time()
            way.score(samples, flat)[0].sum().backward()
            spent.setdefault(name, []).append(time.process_time() - begun)
    packing.LEAST_SAVED = usual
    seconds = {name: median(times[1:]) for name, times in spent.items()}
    return {"rows": rows, "seconds": seconds, "gain": seconds["prompts"] / seconds["all"], "load": os.getloadavg()[0]}


def compare_learner(sizes: list[str], file: Path | None) -> None:
    print("| model | micro-batch | rows, prompts once | rows, all once | CPU s | CPU s | times as fast |\n|"
          + 7 * "---|")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for size in sizes:
            model = model_folder(Path(name) / size, SIZES[size], 2048)
            for what, samples in micro_batches().items():
                row = {"model": size, "micro_batch": what, **learner_alone(model, samples)}
                rows.append(row)
                counts, seconds = row["rows"], row["seconds"]
                print(f"| {size} | {what} | {counts['prompts']:,} | {counts['all']:,} | {seconds['prompts']:.3f} | "
                      f"{seconds['all']:.3f} | {row['gain']:.2f} |", flush=True)
                if file:
                    file.write_text(json.dumps({**_where(), "runs": rows}, indent=1) + "\n")


def _where() -> dict[str, Any]:
    return {"machine": report.machine(), "commit": report.commit(ROOT), "date": time.strftime("%F %R")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--groups", type=int, default=4, help="of four episodes, in a step")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--only", nargs="+", default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--learner", action="store_true")
    options = parser.parse_args()
    if options.learner:
        compare_learner(options.sizes, options.json)
        return
    if options.engine:
        print("| model | prefix_keep_s | CPU time of an episode | prompt ids computed |\n|---|---|---|---|")
        with tempfile.TemporaryDirectory() as name:
            for size in options.sizes:
                model = model_folder(Path(name) / size, SIZES[size], 2048)
                for keep_s in (0.0, 30.0) * 2:
                    print(f"| {size} | {keep_s:g} {engine_alone(model, options.turns, keep_s)}", flush=True)
        return
    rows: list[dict[str, Any]] = []
    print(f"{options.turns} turns, {NEW} ids between answers of {DRAWN}; per episode\n"
          "| model | variant | ids put in | ids computed | for each put in | for each trained | found | s | load |\n|"
          + 9 * "---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        talk = EPISODE.format(first=FIRST, new=NEW, drawn=DRAWN, turns=options.turns)
        (folder / "talk.py").write_text(talk)
        for size in options.sizes:
            model = model_folder(folder / size, SIZES[size], 2048)
            for variant in options.only:
                figures = measured(model, folder, options.turns, options.groups, options.steps, VARIANTS[variant])
                rows.append({"model": size, "variant": variant, **figures})
                print(f"| {size} | {variant} | {figures['put_in']} | {figures['computed']:,.0f} "
                      f"| {figures['computed_per_new']:.2f} | {figures['computed_per_trained']:.2f} "
                      f"| {figures['hit_share']:.3f} "
                      f"| {figures['seconds_per_episode']:.3f} | {figures['load']:.1f} |", flush=True)
    if options.json:
        result = {**_where(), "turns": options.turns, "runs": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
