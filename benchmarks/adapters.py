"""Many adapters in one torch engine: tokens per second of 16 over one base against one adapter.

    python -m benchmarks adapters [--models 0.1M 3M 10M] [--at-once 64 8 1] [--rounds N] [--rank R] [--json FILE]

The same prompts and lengths each time, 64 sequences at once, float32, one thread. `merged`: one adapter added to the
weights, as `lora_hotswap` does. `rows 1`, `rows 16`: that many adapters of attention and MLP in the rows of one engine,
4 rows of each of 16. `loose 16`: without the padding that makes answers the same to the bit whatever is drawn beside
them. Engines are alternated in rounds; what it takes to load is in no figure. The bars: 0.7 of merged, 0.9 of loose.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ROOT
from benchmarks.common import report
from benchmarks.engines import AT_ONCE, MAX_LENGTH, MODELS, vocabulary_of, workload

MANY = 16
BAR, BAR_OF_LOOSE = 0.7, 0.9


def write_adapters(model: str, folder: Path, rank: int) -> list[str]:
    """Folders of random adapters for that model."""
    import torch

    from busrl.service.adapters import Adapter, Numbers, Wearer, write_folder
    from busrl.training.model import load

    wearer, paths = Wearer(load(model)), []
    for number in range(1, MANY + 1):
        shape = Adapter(rank, number, unembed=False)
        numbers = Numbers(shape, wearer.sites(shape), torch.device("cpu"))
        torch.nn.init.normal_(numbers.vector, std=0.02)
        write_folder(folder / str(number), numbers, torch.float32, model)
        paths.append(str(folder / str(number)))
    return paths


class OneAdapter:
    """A receiver of weights that has one folder."""

    kind = "adapter"

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def take(self) -> tuple[int, int, Path]:
        return 1, 1, self.folder


def engines(model: str, adapters: list[str], at_once: int) -> dict[str, tuple[Any, list[str]]]:
    """Engines by name, each with the adapters that its requests name in turn."""
    from busrl.engines.torch.engine import TorchEngine
    from busrl.service.rows import RowsEngine

    sizes = {"capacity": at_once, "max_length": MAX_LENGTH}
    merged = TorchEngine.load(model, **sizes)
    merged.update_weights(OneAdapter(adapters[0]))  # type: ignore[arg-type]
    made: dict[str, tuple[Any, list[str]]] = {"merged": (merged, [""])}
    for count in (1, MANY):
        made[f"rows {count}"] = (RowsEngine.load(model, **sizes, places=MANY), adapters[:count])
    loose: Any = RowsEngine.load(model, **sizes, places=MANY)
    loose.decoder._least, loose.adapters._least = 0, 1
    made[f"loose {MANY}"] = loose, adapters
    for engine, _ in made.values():
        engine._seats._eos[:] = False  # lengths are given
    return made


def seconds_per_token(engine: Any, adapters: list[str], work: dict[str, Any]) -> float:
    """CPU seconds of one pass over the work, per drawn token."""
    import numpy as np

    from busrl.engines.base import Request

    none, tokens, left = np.empty(0, np.int32), 0, len(work["lengths"])
    waiting = (
        Request(k, k, 0, np.array(prompt, np.int32), none, length, 1.0, 1.0, 0, extra={"weights": adapter})
        for k, (prompt, length, adapter) in enumerate(zip(work["prompts"], work["lengths"], itertools.cycle(adapters)))
    )
    begun = time.process_time()
    while left:
        engine.submit(list(itertools.islice(waiting, engine.capacity - engine.active)))
        for finished in engine.step():
            tokens, left = tokens + len(finished.token_ids), left - 1
    return (time.process_time() - begun) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["0.1M", "3M", "10M"], choices=list(MODELS))
    parser.add_argument("--at-once", nargs="+", type=int, default=[AT_ONCE])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    rows = []
    print(f"rank {options.rank}, tokens per CPU second")
    print(f"| model | at once | merged | rows 1 | rows {MANY} | loose {MANY} | of merged | of rows 1 | of loose |\n|"
          + 9 * "---|", flush=True)
    for model, at_once in itertools.product(options.models, options.at_once):
        work = workload(min(options.answers, 4 * at_once), vocabulary_of(model))
        with tempfile.TemporaryDirectory() as name:
            folder = MODELS[model](Path(name) / "model")[""]
            sides = engines(folder, write_adapters(folder, Path(name) / "adapters", options.rank), at_once)
            costs: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(options.rounds + 1):
                for side, (engine, adapters) in sides.items():
                    cost = seconds_per_token(engine, adapters, work)
                    costs[side] += [cost] if number else []  # the first pass loads adapters and grows the cache
        rates = {side: 1 / median(values) for side, values in costs.items()}
        ratios = [rates[f"rows {MANY}"] / rates[side] for side in ("merged", "rows 1", f"loose {MANY}")]
        rows.append({"model": model, "at_once": at_once, **rates, "of_merged": ratios[0], "of_one": ratios[1],
                     "of_loose": ratios[2], "met": ratios[0] >= BAR and ratios[2] >= BAR_OF_LOOSE})
        cells = [str(at_once), *(f"{rate:,.0f}" for rate in rates.values()), *(f"{ratio:.2f}" for ratio in ratios)]
        print(f"| {model} | {' | '.join(cells)} |", flush=True)
    if options.json:
        bars = {"bar": BAR, "bar_of_loose": BAR_OF_LOOSE}
        result = {"machine": report.machine(), "commit": report.commit(ROOT), "date": time.strftime("%F %R"),
                  "rank": options.rank, "rounds": options.rounds, **bars, "models": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
