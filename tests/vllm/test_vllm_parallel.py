"""One engine on two workers: both load the same version or none, and the death of one is the death of all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from test_vllm_deaths import LATE_S, gone
from vllm_scene import EXACT, Scene, request

from busrl.errors import EngineLost
from busrl.weights import factory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("pair"), tied=True, tensor_parallel=2)
    yield made
    made.close()


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_both_workers_load_the_same_version_between_two_steps(pair: Scene, transport: str) -> None:
    engine, settings = pair.engine, pair.settings(transport)
    sender, receiver = factory.make_sender(settings), engine.receiver(settings, "rollout-0")
    assert receiver is not None
    try:
        for version in (engine.version + 1, engine.version + 2):
            asked = [request(k, [5, 6, k], 120) for k in range(2, 8)]
            with pair.slow_steps():
                engine.submit(asked)
                pair.wait_for_tokens(12)
                pair.pause()
                sender.publish(version, 10 * version, pair.tensors(version))
                receiver.wait_for(version, 60)
                engine.resume()
                assert engine.update_weights(receiver) == (version, 10 * version)
            made = pair.finish(len(asked))
            assert {v for one in made.values() for v in one.versions.tolist()} == {version - 1, version}
            assert max(pair.off_by(one, made[one.key]) for one in asked) < EXACT
    finally:
        receiver.close()
        sender.close()


def test_the_death_of_one_worker_ends_the_engine_without_leftovers(pair: Scene) -> None:
    pids = pair.engine.core.pids()
    assert len(pids) == 3
    end = time.monotonic() + LATE_S
    with pair.slow_steps(), pytest.raises(EngineLost):
        pair.engine.submit([request(1, [5, 6, 7], 150, temperature=0.0)])
        pair.wait_for_tokens(2)
        os.kill(pids[-1], signal.SIGKILL)
        while time.monotonic() < end:
            pair.engine.step()
    assert gone(pids, LATE_S)
