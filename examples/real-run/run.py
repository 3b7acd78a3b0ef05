"""`make demo-real`: makes the model, trains it, kills a process and later the whole run, and resumes it.

    python run.py [--seed 0] [--run-dir runs/real] [--set KEY=VALUE] [--warm-up KEY=VALUE ...]

Uses make_model.py and the commands of busrl, as a person would. Started again, it continues.

- At a third of the steps it kills the rollout with SIGKILL: `launch` starts another. At two thirds it kills `launch`
  itself, whose children end with it: the same command again continues.
- Ends with the audit's exit code: 0 only if nothing was lost and nothing trained twice.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MADE = HERE / "made"  # as real.toml says
BUSRL = [sys.executable, "-m", "busrl.cli"]
LOOK_S = 0.5


def prepare(arguments: list[str]) -> None:
    """Make the folder of the model, unless it is there; it gets its name when it is complete."""
    if (MADE / "model" / "config.json").is_file():
        print(f"{MADE}: the model is there already; remove the folder to make it again", flush=True)
        return
    hidden = HERE / ".made.making"
    subprocess.run([sys.executable, str(HERE / "make_model.py"), str(hidden), *arguments], check=True)
    hidden.rename(MADE)


class Demo:
    """One run directory, and the command that starts or continues it."""

    def __init__(self, run_dir: Path, seed: int, settings: list[str]) -> None:
        self.run_dir = run_dir
        pairs = [part for setting in (f"run.seed={seed}", *settings) for part in ("--set", setting)]
        self.command = [*BUSRL, "launch", str(HERE / "real.toml"), "--run-dir", str(run_dir), *pairs]

    def launch(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command)

    def step(self) -> int:
        """The newest step of metrics.jsonl."""
        try:
            lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return 0
        return max((int(row["step"]) for row in map(json.loads, lines) if "kind" not in row), default=0)

    def status(self) -> dict[str, Any]:
        done = subprocess.run([*BUSRL, "status", str(self.run_dir), "--json"], capture_output=True, check=False)
        answer: dict[str, Any] = json.loads(done.stdout or b"{}")
        return answer

    def wait(self, running: subprocess.Popen[bytes], step: int) -> bool:
        """Wait until the run has reached that step; False if it ended before."""
        while running.poll() is None:
            if self.step() >= step:
                return True
            time.sleep(LOOK_S)
        return False


def kill_rollout(demo: Demo) -> None:
    for process in demo.status().get("processes", []):
        if process["role"] == "rollout" and process["state"] == "ready":
            print(f"-- SIGKILL of {process['name']} at step {demo.step()}", flush=True)
            os.kill(process["pid"], signal.SIGKILL)


def go(demo: Demo) -> int:
    """Run from where it is to its end; its exit code."""
    running = demo.launch()
    try:
        steps = 0
        while not steps and running.poll() is None:
            steps = int(demo.status().get("max_steps") or 0)
            time.sleep(LOOK_S)
        if demo.step() < steps // 3 and demo.wait(running, steps // 3):
            kill_rollout(demo)
        if demo.step() < 2 * steps // 3 and demo.wait(running, 2 * steps // 3):
            print(f"-- SIGKILL of launch, and with it of all processes, at step {demo.step()}", flush=True)
            running.kill()
            running.wait()
            print("-- the same command again", flush=True)
            running = demo.launch()
        return running.wait()
    except KeyboardInterrupt:
        return running.wait()  # the terminal sent it SIGINT too: it ends in order


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the run")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/real"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of real.toml")
    parser.add_argument("--warm-up", nargs="*", default=[], metavar="KEY=VALUE", help="arguments of make_model.py")
    options = parser.parse_args()
    began = time.monotonic()
    prepare([f"--{argument}" for argument in options.warm_up])
    warmed = time.monotonic()
    code = go(Demo(options.run_dir, options.seed, options.set))
    if code == 0:
        print(f"warm-up {warmed - began:.0f} s, run {time.monotonic() - warmed:.0f} s", flush=True)
        subprocess.run([sys.executable, str(HERE / "curves.py"), str(options.run_dir)], check=True)
        code = subprocess.run([*BUSRL, "audit", str(options.run_dir)], check=False).returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
