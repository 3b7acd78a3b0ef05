"""Checkpoints in shards: how long training stands still for one, and how soon a team of ranks is back after a kill.

`checkpoints stall` makes steps of a model with random weights in one process and saves it: with training waiting
(`sync`), during the next step (`step`), and with an update at once (`update`), which is the worst that can happen. It
reports seconds of the whole write, seconds for which training stood still (begin, and what `stage` copied), and the
peak of anonymous memory above that of the same step without a checkpoint, beside the bytes of the state.
`checkpoints restart` starts the quickstart with two ranks, kills one of them at seeded moments, and reports seconds
until all are gone, until both are ready again, and until the next step, with CPU seconds of the new ranks until then
(on a loaded machine the better figure). One thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import COMMAND, ROOT
from benchmarks.common import report, sides

sys.path.insert(0, str(ROOT / "tests" / "run"))
WAYS = ("sync", "step", "update")


def anonymous() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


class Peak:
    """The most anonymous memory while it is open, looked at every 5 ms."""

    def __enter__(self) -> Peak:
        self.bytes, self._over = anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, anonymous())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# -- stall ---------------------------------------------------------------------------


def trained(width: int, layers: int, words: int) -> Any:
    """A trainer of a model with random weights, and what makes one step of it."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from busrl.training.batch import Sample
    from busrl.training.settings import TrainerSettings
    from busrl.training.trainer import Trainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(
        vocab_size=words, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, head_dim=64, max_position_embeddings=2048,
    )).eval()
    trainer, chance = Trainer(model, TrainerSettings(micro_batch_tokens=1024)), np.random.default_rng(1)

    def step(seed: int) -> None:
        samples = []
        for number in range(4):
            tokens = chance.integers(0, words, 128).astype(np.int32)
            samples.append(Sample(number, 0, number, tokens[:16], tokens, np.full(128, -9.0, np.float32),
                                  np.zeros(128, np.uint32)))
        trainer.accumulate(samples, [1.0, -1.0, 0.5, -0.5])

    return trainer, step


def stall_once(way: str, width: int, layers: int, words: int, folder: str) -> dict[str, Any]:
    from busrl.training.checkpoint import Pending

    trainer, step = trained(width, layers, words)
    for seed in range(2):
        step(seed)
        trainer.step(1e-5)
    with Peak() as without:
        begun = time.perf_counter()
        step(2)
        between = time.perf_counter() - begun
        trainer.step(1e-5)
    begun = time.perf_counter()
    with Peak() as peak:
        pending = Pending(
            Path(folder), 1, trainer=trainer, meta={}, source=None, extras=lambda directory: None, keep_last=1,
            on_progress=lambda: None, where=None,
        )
        stood, writing = time.perf_counter() - begun, trainer.saving
        if way == "step":
            step(3)
        if way != "sync":
            copying = time.perf_counter()
            writing.stage()
            stood += time.perf_counter() - copying
            trainer.step(1e-5)
        while not pending.ready():
            time.sleep(0.002)
        whole = time.perf_counter() - begun
        pending.commit()
    return {
        "way": way, "state_bytes": writing._size, "write_s": whole, "stood_s": whole if way == "sync" else stood,
        "step_s": between, "copied_bytes": writing.copied, "above_bytes": peak.bytes - without.bytes,
    }


def stall(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    runs = []
    for _ in range(options.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                values = [way, str(options.width), str(options.layers), str(options.words), folder]
                ended = sides.ran([*COMMAND, "checkpoints", "stall-once", *values], check=True, keep_errors=False,
                                  env={**os.environ, "OMP_NUM_THREADS": "1"})
                runs.append(json.loads(ended.output.splitlines()[-1]))
    for way in WAYS:
        mine = [run for run in runs if run["way"] == way]
        medians = {key: statistics.median(run[key] for run in mine) for key in mine[0] if key != "way"}
        rows.append({
            "way": way, **medians, "stood_share": medians["stood_s"] / medians["write_s"],
            "ram_share": medians["above_bytes"] / medians["state_bytes"],
        })
    return rows


# -- restart -------------------------------------------------------------------------

RANKS = '\n[[process]]\nrole = "learner"\nranks = 2\n\n[[process]]\nrole = "rollout"\n\n[[process]]\nrole = "reward"\n'


def cpu_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def restart(options: argparse.Namespace) -> list[dict[str, Any]]:
    from harness import Run, running

    rows: list[dict[str, Any]] = []
    for mode in options.modes:
        chance = random.Random(f"{mode} {options.kills}")
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "two.toml"
            config.write_text((ROOT / "configs" / "quickstart.toml").read_text() + RANKS)
            run = Run(Path(folder) / "run", f"weights.mode={mode}", "learner.checkpoint_every=3", "validation.data=",
                      config=config, steps=10_000)
            with running(run):
                run.until_step(2)
                for _ in range(options.kills):
                    rows.append({"mode": mode, **killed(run, chance)})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                    run.until_step(run.step() + 1)
    return rows


def killed(run: Any, chance: random.Random) -> dict[str, Any]:
    names = ("learner", "rank/1")
    before = {name: run.pid(name) for name in names}
    name, step = chance.choice(names), run.step()
    run.let_pass(chance.uniform(0, 1))
    load, begun = os.getloadavg()[0], time.monotonic()
    run.kill(name)
    run.until("all gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in before.values() if pid), 60)
    gone = time.monotonic() - begun
    run.until("both ready", lambda: all(
        (process := run.processes().get(each)) is not None and process.pid != before[each] and process.state == "ready"
        for each in names), 300)
    ready = time.monotonic() - begun
    spent = [cpu_of(run.pid(each)) for each in names]
    run.until("the next step", lambda: run.step() > step, 300)
    return {"killed": name, "load": load, "gone_s": gone, "ready_s": ready, "ready_cpu_s": max(spent),
            "next_step_s": time.monotonic() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    of_stall, of_restart = verbs.add_parser("stall"), verbs.add_parser("restart")
    of_stall.add_argument("--width", type=int, default=768)
    of_stall.add_argument("--layers", type=int, default=8)
    of_stall.add_argument("--words", type=int, default=16_000)
    of_stall.add_argument("--rounds", type=int, default=3)
    of_stall.add_argument("--folder", help="on the disk that is meant")
    of_restart.add_argument("--kills", type=int, default=5)
    of_restart.add_argument("--modes", nargs="+", default=["sync", "batch-async"])
    for verb in (of_stall, of_restart):
        verb.add_argument("--out", type=Path)
    verbs.add_parser("stall-once").add_argument("values", nargs=5)
    options = parser.parse_args()
    if options.verb == "stall-once":
        way, width, layers, words, folder = options.values
        print(json.dumps(stall_once(way, int(width), int(layers), int(words), folder)))
        return
    rows = (stall if options.verb == "stall" else restart)(options)
    result = {"machine": report.machine(), "commit": report.commit(ROOT), "verb": options.verb, "rows": rows}
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
