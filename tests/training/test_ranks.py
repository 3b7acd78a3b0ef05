"""Several ranks against one: the same losses, gradient norms and weights, whoever computed which micro-batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from busrl.training import sharding
from tests.training import rank_program

PROGRAM = Path(rank_program.__file__)
LIMIT_S = 300


def run_ranks(folder: Path, world: int, steps: int, families: Sequence[str]) -> None:
    """All ranks as processes of their own, to their end."""
    store = sharding.open_store(world, 60)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    parts = [str(world), str(store.port), str(folder), str(steps), *families]
    processes = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(rank), *parts], env=environment, stderr=subprocess.PIPE)
        for rank in range(world)
    ]
    try:
        for rank, process in enumerate(processes):
            _, words = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, f"rank {rank}: {words.decode()[-3000:]}"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def of_all(folder: Path, family: str, world: int) -> dict[str, Any]:
    """What all ranks computed together."""
    found = [json.loads((folder / f"{family}.{rank}.json").read_text()) for rank in range(world)]
    assert len({json.dumps(one["norms"]) for one in found}) == 1, "the ranks disagree about the norm"
    sums = np.sum([one["losses"] for one in found], axis=0)
    tokens = np.sum([one["tokens"] for one in found], axis=0)
    return {
        "way": found[0]["way"], "losses": sums, "norms": found[0]["norms"], "tokens": tokens,
        "weights": dict(np.load(folder / f"{family}.npz")),
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found["tokens"]) == expected["tokens"]
    np.testing.assert_allclose(found["losses"], np.array(expected["losses"]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weight, atol=1e-5, err_msg=name)


def test_two_ranks_train_as_one_does_for_every_family_and_in_bfloat16(tmp_path: Path) -> None:
    rounded = "qwen3:bfloat16"
    run_ranks(tmp_path, 2, 5, [*rank_program.FAMILIES, rounded])
    for family in rank_program.FAMILIES:
        found = of_all(tmp_path, family, 2)
        assert found["way"] == "sharded packed", family
        assert_equal(found, rank_program.alone(family, 5))
    found, expected = of_all(tmp_path, rounded, 2), rank_program.alone("qwen3", 5, "bfloat16")
    assert all(one.dtype == np.float32 for one in found["weights"].values()), "trained in float32"
    np.testing.assert_allclose(found["losses"], np.array(expected["losses"]), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-4)


@pytest.mark.slow
def test_four_ranks_train_as_one_does_for_every_family(tmp_path: Path) -> None:
    run_ranks(tmp_path, 4, 20, list(rank_program.FAMILIES))
    for family in rank_program.FAMILIES:
        assert_equal(of_all(tmp_path, family, 4), rank_program.alone(family, 20))
