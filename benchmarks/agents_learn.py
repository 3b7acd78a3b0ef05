"""Do episodes of several turns learn? Both games of examples/agents, with several seeds: `python agents_learn.py`.

    python -m benchmarks agents-learn [--seeds 0 1 2] [--steps 60] [--games calculator guess] [--model FOLDER]

Makes the model once, then starts a real run per game and seed. Printed for each: the mean reward of the first step, the
step and the seconds since launch at which the mean of five steps first was 0.9, and the mean of the last five.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import ROOT

GAMES = ROOT / "examples" / "agents"
GOAL, WINDOW = 0.9, 5


def rows(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if "lr" in row]


def learnt(values: list[float]) -> int:
    """The first step at which the mean of the last WINDOW rewards is the goal; 0 if there is none."""
    found = (n for n in range(WINDOW, len(values) + 1) if sum(values[n - WINDOW : n]) / WINDOW >= GOAL)
    return next(found, 0)


def play(folder: Path, model: Path, game: str, seed: int, steps: int) -> str:
    run, settings = folder / f"{game}-{seed}", [
        f"model.path={model / 'model'}", f"data.train={model}/{game}.jsonl", f"run.seed={seed}",
        f"process.agent.function=games.py:{game}", f"run.max_steps={steps}", "learner.checkpoint_every=0",
    ]
    command = [sys.executable, "-m", "busrl.cli", "launch", str(GAMES / "games.toml"), "--run-dir", str(run)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with open(folder / f"{game}-{seed}.out", "wb") as out:
        begun, reached = time.monotonic(), 0.0
        child = subprocess.Popen([*command, *(part for one in settings for part in ("--set", one))], stdout=out,
                                 stderr=out, stdin=subprocess.DEVNULL, env=env, cwd=ROOT)
        while child.poll() is None:
            time.sleep(0.2)
            if not reached and learnt([row["reward"] for row in rows(run)]):
                reached = time.monotonic() - begun
    if child.returncode:
        return f"{game:11}{seed:>4}  exit code {child.returncode}; see {folder}/{game}-{seed}.out"
    values = [row["reward"] for row in rows(run)]
    last = sum(values[-WINDOW:]) / WINDOW
    return (f"{game:11}{seed:>4}{values[0]:>8.2f}{learnt(values):>8}{reached or time.monotonic() - begun:>9.0f}"
            f"{last:>8.2f}{time.monotonic() - begun:>9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--games", nargs="+", default=["calculator", "guess"])
    parser.add_argument("--model", type=Path, help="a folder that make_games.py made before")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="busrl.games.") as made:
        folder = Path(made)
        model = options.model or folder / "made"
        if options.model is None:
            subprocess.run([sys.executable, str(GAMES / "make_games.py"), str(model)], check=True)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; to {GOAL} over {WINDOW} steps\n"
              f"{'game':11}{'seed':>4}{'first':>8}{'step':>8}{'seconds':>9}{'last':>8}{'all s':>9}")
        for game in options.games:
            for seed in options.seeds:
                print(play(folder, model.resolve(), game, seed, options.steps), flush=True)
