"""What a learner's imports cost: CPU of a process that makes a small model, in turns with Python's looks for cycles
meanwhile and without, as busrl does it.

    python -m benchmarks starts [--runs 6]

CPU is user and system time of each process until the model is there, in seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from benchmarks import ROOT

MAKE = """
import gc, os, sys, time
if sys.argv[1] == "with":
    gc.freeze = gc.disable = lambda: None
from busrl.system.imports import uncollected
with uncollected():
    import busrl.roles.learner
gc.freeze()
with uncollected():
    import transformers.models.auto.modeling_auto
from transformers.models.qwen2 import modeling_qwen2 as qwen2
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
qwen2.Qwen2ForCausalLM(qwen2.Qwen2Config(vocab_size=64, **sizes))
print(time.process_time(), flush=True)
os._exit(0)
"""


def cpu_s(looks: str) -> float:
    """CPU seconds of one start, `with` or `without` looks for cycles."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", MAKE, looks], cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, text=True, check=True, timeout=300,
    )
    return float(done.stdout)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=int, default=6)
    options = arguments.parse_args()
    cpu_s("with")  # compiles what is not
    took: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(options.runs):
        for looks, seconds in took.items():
            seconds.append(cpu_s(looks))
    before, now = (statistics.median(seconds) for seconds in took.values())
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, medians of {options.runs}")
    print(f"with looks for cycles {before:.2f} s of CPU, without {now:.2f} s: {now / before:.2f} of it")
