"""The golden vectors as the msgpack package of the JavaScript examples reads them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
VECTORS = HERE.parents[1] / "docs" / "vectors"


@pytest.fixture
def packages(request: pytest.FixtureRequest) -> Path:
    """The folder of the JavaScript examples with their packages; conftest.py beside this file makes it."""
    try:
        return request.getfixturevalue("javascript")
    except pytest.FixtureLookupError:
        pytest.skip("there are no JavaScript examples here")


def test_javascript_reads_every_golden_vector_without_rounding_a_number(packages: Path):
    program = packages / "js-reward" / "vectors.mjs"  # beside its packages, where node looks for them
    shutil.copyfile(HERE / "vectors.mjs", program)
    done = subprocess.run(["node", str(program), str(VECTORS)], capture_output=True, text=True, timeout=60)
    said = json.loads(done.stdout or "{}")
    assert done.returncode == 0, f"{said.get('wrong')} {done.stderr}"
    assert said == {"messages": len(json.loads((VECTORS / "messages.json").read_text())), "wrong": []}
