"""Kept prefixes: episodes of many turns in real runs, with and without them.

    python -m benchmarks prefix [--turns 40] [--json FILE]
    python -m benchmarks prefix --engine [--turns 20]

Each run is `busrl launch` with an agent whose episodes put fixed numbers of ids between answers of fixed lengths, so
that all variants read and draw alike. Told of each: ids that an episode puts in, prompt ids computed for it by engines
(also for each id put in, of which the bar is 1.3, and for each trained), the share found in kept rows, and the seconds
from the first step to the last over the episodes that ended meanwhile. `--engine` times the torch engine alone, in CPU
seconds, with 32 such episodes at a time, each of which waits one to three decoding steps between two turns.
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
from statistics import fmean
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--groups", type=int, default=4, help="of four episodes, in a step")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--only", nargs="+", default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", action="store_true")
    options = parser.parse_args()
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
        result = {"machine": report.machine(), "commit": report.commit(ROOT), "date": time.strftime("%F %R"),
                "turns": options.turns, "runs": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
