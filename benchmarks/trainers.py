"""Optimiser step of the learner beside that of a plain loop and of TRL: the same models and batches, in turn.

    python -m benchmarks trainers --trl-python .venv/trl/bin/python [--at-once 8] [--rounds 3]

Two models of 20 M parameters: `words-20m` has nearly all in the embedding of 151,936 words, `body-20m` in its layers.
Completions are given, nothing is generated. A round is one process of each; the first step is not counted. All train
in float32 with AdamW, the clipped loss as a mean over the tokens of the step, advantages by group, no checkpointing of
activations. The rivals take `--at-once` sequences per micro-batch, busrl as many tokens as these have positions with
their padding. Reported: trained tokens per second and per CPU second, the peak of resident memory, and that peak above
what the process had with its model loaded; loss and gradient norm of the first step say whether all did the same.
`plain` is rivals/plain.py, `trl-compact` TRL with the positions of its head chosen as on a GPU (trl_step.py says what
that is).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import COMMAND, RESULTS, ROOT
from benchmarks.common.judge import Bar, Log, Program, in_rounds
from benchmarks.rivals.work import SHAPES, make_model

GROUP, LR, SEED = 8, 1e-6, 0
RIVALS = {
    "plain": ["benchmarks.rivals.plain", "steps"], "trl": ["benchmarks.rivals.trl_step"],
    "trl-compact": ["benchmarks.rivals.trl_step", "compact"],
}
JUDGED = (
    ("tokens_per_s", "tokens per second", 1.3, False), ("tokens_per_cpu_s", "tokens per CPU second", 1.3, False),
    ("peak", "peak of resident memory", 0.7, True), ("peak_above", "that peak above the loaded model", 0.7, True),
    ("first_loss", "loss of the first step", 1.001, True),
    ("first_norm", "gradient norm of the first step", 1.001, True),
)


# -- what all are given -------------------------------------------------------------


def made_work(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of groups: a prompt, completions with log-normal lengths (sigma 0.7), rewards of 0 and 1."""
    import numpy as np

    random, words = np.random.default_rng(SEED), SHAPES[shape]["vocab_size"]

    def group() -> dict[str, Any]:
        lengths = np.clip(random.lognormal(np.log(options.median), 0.7, GROUP), 4, options.longest).astype(int)
        tokens = [random.integers(2, words, length).tolist() for length in lengths]
        rewards = random.permutation([0.0] * 4 + [1.0] * 4).tolist()
        prompt = random.integers(2, words, options.prompt).tolist()
        return {"prompt": prompt, "completions": tokens, "rewards": rewards}

    steps = [[group() for _ in range(options.groups)] for _ in range(options.steps + 1)]
    return {"steps": steps, "at_once": options.at_once, "threads": options.threads, "lr": LR}


# -- memory of a process, and what it says -----------------------------------------------


def resident(field: str) -> int:
    """Bytes: VmRSS now, VmHWM at most since `forget_peak`."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """From here on the peak counts; what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def say(figures: dict[str, tuple[float, str]]) -> None:
    for name, (value, unit) in figures.items():
        print(json.dumps({"name": name, "value": value, "unit": unit}), flush=True)


def told(tokens: int, wall: float, cpu: float, loaded: int, loss: float, norm: float) -> dict[str, tuple[float, str]]:
    """Report of one process on its counted steps."""
    most = resident("VmHWM")
    return {
        "tokens_per_s": (tokens / wall, "tokens/s"), "tokens_per_cpu_s": (tokens / cpu, "tokens/CPU s"),
        "peak": (most / 2**20, "MiB"), "peak_above": ((most - loaded) / 2**20, "MiB"),
        "first_loss": (loss, ""), "first_norm": (norm, ""),
    }


# -- the learner's side ---------------------------------------------------------------------


def learner(model: str, work_file: str) -> None:
    """Do what the learner does with complete groups, in this process."""
    import torch

    from busrl.algorithms.advantages import group_std
    from busrl.system import device
    from busrl.training.model import load
    from busrl.training.settings import TrainerSettings
    from busrl.training.trainer import Trainer

    work = json.loads(Path(work_file).read_text())
    torch.set_num_threads(work["threads"])
    device.keep_freed_memory()
    longest = max(len(group["prompt"]) + len(row) for step in work["steps"] for group in step
                  for row in group["completions"])
    net = load(Path(model))
    loaded = forget_peak()
    trainer = Trainer(net, TrainerSettings(
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, micro_batch_tokens=work["at_once"] * longest,
        clip_low=0.2, clip_high=0.28, newest_ratio="one",
    ))
    walls, cpus, tokens, stats = 0.0, 0.0, 0, []
    for number, step in enumerate(work["steps"]):
        began, began_cpu = time.perf_counter(), time.process_time()
        samples = [sample for place, group in enumerate(step) for sample in samples_of(place, number, group)]
        values = [value for group in step for value in group_std(group["rewards"]).tolist()]
        trainer.accumulate(samples, values, version=number)
        stats.append(trainer.step(work["lr"]))
        if number:
            walls, cpus = walls + time.perf_counter() - began, cpus + time.process_time() - began_cpu
            tokens += stats[-1].tokens
    say(told(tokens, walls, cpus, loaded, stats[0].loss, stats[0].grad_norm))
    say({"micro_batches": (stats[-1].micro_batches, ""), "padding": (stats[-1].padding, "share")})


def samples_of(place: int, version: int, group: dict[str, Any]) -> list[Any]:
    """Drawn by the weights of `version`."""
    import numpy as np

    from busrl.training.batch import Sample

    prompt, samples = np.array(group["prompt"], np.int32), []
    for member, (row, reward) in enumerate(zip(group["completions"], group["rewards"], strict=True)):
        count = len(row)
        samples.append(Sample(
            GROUP * place + member, place, member, prompt, np.array(row, np.int32),
            np.full(count, -12.0, np.float32), np.full(count, version, np.uint32), reward,
        ))
    return samples


# -- the comparison ---------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default="", help="interpreter of an environment with TRL; see README.md here")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["words-20m", "body-20m"])
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="that are counted")
    parser.add_argument("--groups", type=int, default=2, help=f"of {GROUP} in a step")
    parser.add_argument("--at-once", type=int, default=8, help="sequences in a micro-batch of a rival")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--median", type=float, default=100.0, help="of the completions' lengths")
    parser.add_argument("--longest", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="trainers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "WORK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        learner(*options.worker)
        return 0
    compare(options)
    return 0


def compare(options: argparse.Namespace) -> None:
    os.environ.update(OMP_NUM_THREADS=str(options.threads), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1",
                      TOKENIZERS_PARALLELISM="false")
    log = Log()
    with tempfile.TemporaryDirectory(prefix="busrl.bench.") as folder:
        for shape in options.shapes:
            make_model(Path(folder) / shape, shape, SEED)
            (Path(folder) / f"{shape}.json").write_text(json.dumps(made_work(shape, options)))
        programs = [program for shape in options.shapes for program in sides_of(shape, Path(folder), options)]

        def measure_round(number: int) -> None:
            for program in programs:
                log.run(program)

        shown = {name: value for name, value in vars(options).items() if name not in ("out", "worker", "trl_python")}
        in_rounds(log, options.rounds, measure_round, bars(options), options.name, options.out, settings=shown,
                  models={key: SHAPES[key] for key in options.shapes})


def bars(options: argparse.Namespace) -> list[Bar]:
    """Ratios of busrl over each rival."""
    return [
        Bar(f"{shape}: {what}, busrl / {rival}", f"{shape}:busrl:{name}", f"{shape}:{rival}:{name}", limit, at_most)
        for shape in options.shapes for rival in options.rivals for name, what, limit, at_most in JUDGED
    ]


def sides_of(shape: str, folder: Path, options: argparse.Namespace) -> Iterator[Program]:
    """The programs of one model in turn; TRL's if there is an interpreter for it."""
    given = [str(folder / shape), str(folder / f"{shape}.json")]
    yield Program(f"{shape}:busrl", [*COMMAND, "trainers", "--worker", *given], ROOT, 1800.0)
    for rival in options.rivals:
        python = options.trl_python if rival.startswith("trl") else sys.executable
        if python:
            yield Program(f"{shape}:{rival}", [python, "-m", *RIVALS[rival], *given], ROOT, 1800.0)
