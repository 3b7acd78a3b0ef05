"""`launch`, the bus and the protocol stay light: they never bring torch into a process that does no tensor work."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("busrl.launcher", ("torch", "transformers")),
        ("busrl.bus", ("torch", "numpy", "busrl.ring", "busrl.topology")),
        ("busrl.protocol", ("zmq", "numpy", "busrl.bus")),
    ],
)
def test_importing_a_light_part_brings_in_no_heavy_one(module, forbidden):
    code = f"import sys, {module}; print([one for one in {forbidden!r} if one in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
