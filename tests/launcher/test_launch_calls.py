"""The ring of model calls over starts and ends of a run, and its size."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from busrl.launcher.rundir import OpenRun, open_run, remove_runtime_dir, unlink_segments
from busrl.paths import SHM
from busrl.preflight.load import load
from busrl.quickstart.cache import ensure
from busrl.ring.calls import Caller, ModelCall
from busrl.topology.sizes import call_ring

ROOT = Path(__file__).resolve().parents[2]


def opened(folder: Path, calls: bool) -> OpenRun:
    files = ensure("tiny:sort")
    keys = [f"model.path={files.model}", f"data.train={files.train}", "validation.data=", "generation.max_batch=4"]
    topology = load(ROOT / "configs" / "quickstart.toml", keys)
    assert not topology.has_callers and topology.derived.call_slots == 0
    slots, slot_bytes = call_ring(topology) if calls else (0, 0)
    derived = dataclasses.replace(topology.derived, call_slots=slots, call_slot_bytes=slot_bytes)
    return open_run(folder, dataclasses.replace(topology, derived=derived))


def test_a_start_recreates_the_call_ring_and_the_run_end_removes_it(tmp_path: Path) -> None:
    run = opened(tmp_path / "run", calls=True)
    try:
        assert run.calls is not None and run.calls.n_slots == 4 + 1 + 16
        run.calls.register("agent", "agent/0")
        assert Caller(run.calls, lambda message, to: None).put(ModelCall(np.arange(5, dtype=np.int32), 8))
        run.release()  # as of a launch that was killed: both rings stay
        again = opened(tmp_path / "run", calls=True)
        assert again.calls is not None and again.calls.stats().occupancy["FREE"] == again.calls.n_slots
        again.release()
        assert (SHM / run.paths.calls_name).exists()
        without = opened(tmp_path / "run", calls=False)
        assert without.calls is None and not (SHM / run.paths.calls_name).exists()
        without.release()
        opened(tmp_path / "run", calls=True).release()
    finally:
        unlink_segments(run.paths.ring_name)
        remove_runtime_dir(run.paths)
    assert not (SHM / run.paths.calls_name).exists()


@pytest.mark.parametrize("answer", [1, 7, 64, 999, 4096])
@pytest.mark.parametrize("prompt", [1, 16, 1000, 8001])
def test_the_longest_call_of_a_topology_fits_a_slot_of_its_ring(tmp_path: Path, prompt: int, answer: int) -> None:
    base = load(ROOT / "configs" / "quickstart.toml")
    generation = dataclasses.replace(base.generation, max_prompt_tokens=prompt, max_new_tokens=answer)
    _, slot_bytes = call_ring(dataclasses.replace(base, generation=generation))
    details = ModelCall(np.zeros(1, np.int32), 1, stream=(1 << 64) - 1, stop=tuple(range(1 << 20, (1 << 20) + 50)))
    align = 64
    ids, details_length = 4 * (prompt + answer), len(details.details())
    needed = sum(-(-size // align) * align for size in (ids, details_length, 4 * answer, 4 * answer, 4 * answer, 24))
    assert needed <= slot_bytes
