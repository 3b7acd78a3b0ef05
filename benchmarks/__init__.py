"""Programs that measure busrl, with their results: `python -m benchmarks` lists them.

A program is a module of this folder or of `experiments/`, or the `run.py` of a folder; its name is the file's, with
dashes. `common/` has what programs share, `rivals/` what busrl is compared with. Nothing here is installed.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EXPERIMENT_RESULTS = ROOT / "benchmarks" / "experiments" / "results"
COMMAND = [sys.executable, "-m", "benchmarks"]  # a program of this folder in a process of its own
