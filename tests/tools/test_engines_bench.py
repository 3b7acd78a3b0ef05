"""The comparison of engines: each system draws what was asked for, by the same code as in a long run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import engines

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("system", ["torch", "generate", "generate_batch"])
def test_a_system_draws_answers_of_the_asked_lengths(system: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from benchmarks.rivals.work import make_model

    make_model(tmp_path, "tiny")
    work = engines.workload(5, 64)
    once = engines.SYSTEMS[system](str(tmp_path), work)
    assert [once(2), once(5)] == [sum(work["lengths"][:2]), sum(work["lengths"])]


@pytest.mark.slow
def test_a_short_run_has_a_figure_of_each_system(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "engines", "--models", "0.1M", "--rounds", "1", "--answers", "4",
               "--least-s", "0.01", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    results = json.loads(next(tmp_path.glob("engines_*.json")).read_text())
    assert not results["failures"]
    assert {name for name in results["medians"] if name.endswith("cpu_s")} == {
        f"0.1M:{system}:tokens_per_cpu_s" for system in ("torch", "generate", "generate_batch")}
