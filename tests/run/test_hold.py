"""The version pin names one life of one process, and ends with it."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from busrl.ring import Ring
from busrl.roles import version_pin
from busrl.states import HeaderWord

HOLDER = """
import sys
from busrl.ring import Ring
from busrl.roles import version_pin
ring = Ring.attach(sys.argv[1])
ring.register("validator", "validator")
print(ring.index, version_pin.pin(ring), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    ring = Ring.create(str(tmp_path / "ring"), slots=4, slot_bytes=1024, processes=4, uuid=uuid.uuid4().bytes)
    yield ring
    ring.close()


class Holder:
    """Another process that pins the version."""

    def __init__(self, ring: Ring) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, ring.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self.child.stdout is not None
        index, took = self.child.stdout.readline().split()
        self.index, self.took = int(index), took == "True"

    def kill(self) -> None:
        self.child.kill()
        self.child.communicate()


def test_only_one_living_process_holds(ring: Ring) -> None:
    first, second = Holder(ring), Holder(ring)
    assert first.took and not second.took
    assert version_pin.pinned_by(ring) and not version_pin.clear_stale(ring)
    assert "validator (pid" in version_pin.name_of(ring, version_pin.pinned_by(ring))
    first.kill()
    second.kill()


def test_a_hold_is_over_with_its_process_and_can_be_taken_over(ring: Ring) -> None:
    first = Holder(ring)
    first.kill()
    assert version_pin.pinned_by(ring) == 0
    second = Holder(ring)
    assert second.took and version_pin.pinned_by(ring)
    second.kill()
    assert version_pin.clear_stale(ring) and not version_pin.clear_stale(ring)


def test_a_hold_never_passes_to_the_next_process_in_its_entry(ring: Ring) -> None:
    first = Holder(ring)
    first.kill()
    ring.reap()
    assert ring.register("rollout", "rollout/0") == first.index
    assert not ring.is_dead(first.index) and version_pin.pinned_by(ring) == 0
    version_pin.unpin(ring)
    assert ring.header(HeaderWord.HOLD) != 0, "it was not ours to let go"
    assert version_pin.clear_stale(ring) and version_pin.pin(ring)
    version_pin.unpin(ring)
    assert ring.header(HeaderWord.HOLD) == 0
