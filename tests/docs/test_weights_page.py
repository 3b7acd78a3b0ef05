"""docs/weights.md has every transport, and the table of weights-measured.md is made of results as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from busrl.topology.declare import items
from busrl.topology.schema import Weights

ROOT = Path(__file__).resolve().parents[2]
TRANSPORTS = ROOT / "docs" / "weights.md"
PAGE = ROOT / "docs" / "weights-measured.md"


def test_every_transport_has_a_row() -> None:
    choices = items(Weights)["transport"].rule.choices
    table = TRANSPORTS.read_text().split("## Which one")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    for name in choices:
        assert any(line.startswith(f"| `{name}`") for line in rows), name
    assert all(line.count("|") == 8 for line in rows), "seven cells in each"


def test_results_become_rows_between_the_marks(tmp_path: Path) -> None:
    row = {"mode": "shm", "model_mb": 100.0, "moved_mb": 100.0, "publish_s": 0.031, "take_s": 0.02, "limit_s": 0.0251,
           "limit": "memcpy"}
    machine = {"cpu": "Some CPU", "cores": 2, "kernel": "6", "python": "3.11"}
    result, page = tmp_path / "r.json", tmp_path / "weights.md"
    result.write_text(json.dumps({"machine": machine, "commit": "abc", "date": "2026-01-02", "rows": [row]}))
    page.write_text(PAGE.read_text())
    command = [sys.executable, "-m", "benchmarks", "tables", "--weights", str(result), "--page", str(page)]
    assert subprocess.run([*command, "--check"], cwd=ROOT, check=False).returncode == 1
    subprocess.run(command, cwd=ROOT, check=True)
    assert "| shm | torch | 100 | 100 | 31 | 20 |  | 51 | 25.1 | memcpy |" in page.read_text()
    assert "Some CPU, 2 cores, Linux 6, Python 3.11, 2026-01-02, commits abc; medians." in page.read_text()
    assert subprocess.run([*command, "--check"], cwd=ROOT, check=False).returncode == 0
    assert page.read_text().split("## Not verified")[1] == PAGE.read_text().split("## Not verified")[1]
