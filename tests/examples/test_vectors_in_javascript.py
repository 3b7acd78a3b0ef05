"""The golden vectors as the msgpack package of the JavaScript examples reads them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
VECTORS = HERE.parents[1] / "docs" / "vectors"


def test_javascript_reads_every_golden_vector_without_rounding_a_number(javascript: Path):
    program = javascript / "js-reward" / "vectors.mjs"  # beside its packages, where node looks for them
    shutil.copyfile(HERE / "vectors.mjs", program)
    done = subprocess.run(["node", str(program), str(VECTORS)], capture_output=True, text=True, timeout=60)
    said = json.loads(done.stdout or "{}")
    assert done.returncode == 0, f"{said.get('wrong')} {done.stderr}"
    assert said == {"messages": len(json.loads((VECTORS / "messages.json").read_text())), "wrong": []}
