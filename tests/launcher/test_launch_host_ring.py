"""Which ring a start of a host works on: the one that its last start left, unless its claims are another's by now."""

from __future__ import annotations

from pathlib import Path

import pytest

from busrl import curve
from busrl.hosts.joining import open_host
from busrl.hosts.membership import HostSource, of_host
from busrl.launcher.rundir import remove_runtime_dir, unlink_segments
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.topology import Topology

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    curve.init(tmp_path / "keys")
    settings = ['process.rollout.hosts=["gpu-0"]', 'bus.endpoint="tcp://10.0.0.1:5600"', f'bus.keys="{tmp_path}/keys"']
    return of_host(load(ROOT / "configs" / "scripted.toml", settings), "gpu-0")


def started(folder: Path, topology: Topology, life: int, holds: int) -> tuple[bool, int]:
    """Whether the start that home counted as `life` found a ring that it went on with, and the life that it went by."""
    source = HostSource("tcp://10.0.0.1:5600", "", "gpu-0", "00" * 16, life)
    opened = open_host(folder / "scratch", topology, source, holds)
    opened.ring.register("launch", "launch")
    state = any("adopted the ring" in note for note in opened.notes), HostSource.read(opened.paths.host_source).life
    remove_runtime_dir(opened.paths)
    opened.release()
    return state


def test_a_start_goes_on_with_ring_and_life_of_the_last(
    tmp_path: Path, topology: Topology
) -> None:
    try:
        assert started(tmp_path, topology, 4, 0) == (False, 4)
        assert started(tmp_path, topology, 5, 4) == (True, 4), "home has its claims"
        assert started(tmp_path, topology, 6, 0) == (True, 4), "nobody has claims"
        assert started(tmp_path, topology, 8, 7) == (False, 8), "a start elsewhere has them"
        assert started(tmp_path, topology, 9, 8) == (True, 8)
    finally:
        unlink_segments(RunPaths.of(tmp_path / "scratch").ring_name)
