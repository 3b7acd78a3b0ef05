"""What happens when vLLM's processes, or ours, die or stop: a named error in time, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_scene import HERE, ROOT, START_S, Scene, request

from busrl.errors import CannotTrain, EngineLost
from busrl.weights import factory
from busrl.weights.base import GroupCallbacks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
LATE_S = 20.0  # for the kernel and a loaded machine


def gone(pids: list[int], limit_s: float) -> bool:
    """Whether none of the processes runs any more (a dead one may wait for its parent)."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.05)  # processes that are not ours can not be waited for
    return False


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_stopped_engine_core_is_named_within_the_deadline_and_killed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, tied=True, rpc_s=4.0)
    pids = scene.engine.core.pids()
    try:
        with scene.slow_steps():
            scene.engine.submit([request(1, [5, 6, 7], 150, temperature=0.0)])
            scene.wait_for_tokens(2)
            os.kill(pids[0], signal.SIGSTOP)
            begun = time.monotonic()
            with pytest.raises(EngineLost, match=rf"did not answer pause within 4 s; .*pid {pids[0]} is stopped"):
                scene.engine.pause("keep")
        assert time.monotonic() - begun < 4.0 + LATE_S
        assert gone(pids, LATE_S)
        with pytest.raises(EngineLost, match="did not answer pause"):
            scene.engine.step()
    finally:
        scene.close()


def test_a_killed_engine_core_fails_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, tied=True)
    pids = scene.engine.core.pids()
    try:
        with scene.slow_steps():
            scene.engine.submit([request(1, [5, 6, 7], 150, temperature=0.0)])
            scene.wait_for_tokens(2)
            os.kill(pids[0], signal.SIGKILL)
            end = time.monotonic() + LATE_S
            with pytest.raises(EngineLost, match=f"died: pid {pids[0]} ended"):
                while time.monotonic() < end:
                    scene.engine.step()
    finally:
        scene.close()


def test_an_engine_core_that_makes_no_token_is_named_and_killed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, tied=True, silent_s=3.0)
    pids = scene.engine.core.pids()
    try:
        with scene.slow_steps():
            scene.engine.submit([request(1, [5, 6, 7], 150, temperature=0.0)])
            scene.wait_for_tokens(2)
            os.kill(pids[0], signal.SIGSTOP)
            end = time.monotonic() + 3.0 + LATE_S
            with pytest.raises(EngineLost, match=r"made no token for 3 s with 1 requests; .* is stopped"):
                while time.monotonic() < end:
                    scene.engine.step()
        assert gone(pids, LATE_S)
    finally:
        scene.close()


PARENT = """
import sys, time
from pathlib import Path
from vllm_scene import Scene
if __name__ == "__main__":
    scene = Scene(Path(sys.argv[1]), tied=True)
    Path(sys.argv[2]).write_text(" ".join(map(str, scene.engine.core.pids())) + "\\n")
    time.sleep(600)
"""


def test_a_killed_rollout_process_leaves_no_engine_behind(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"}
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "model"), str(tmp_path / "pids")], env=environment
    )
    try:
        end = time.monotonic() + START_S
        while not (told := read(tmp_path / "pids")).endswith("\n"):
            assert parent.poll() is None and time.monotonic() < end
            time.sleep(0.1)  # another process's file can not be waited on
        pids = [int(word) for word in told.split()]
        assert pids and all(_runs(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    assert gone(pids, 5.0)


def test_an_engine_with_wrong_new_weights_is_refused_with_both_numbers(tmp_path: Path) -> None:
    scene = Scene(tmp_path, tied=False)
    pids = scene.engine.core.pids()
    settings = scene.settings("shm")
    sender, receiver = factory.make_sender(settings), scene.engine.receiver(settings, "rollout-0")
    try:
        assert receiver is not None
        scene.engine.core.rpc("busrl_corrupt")
        sender.publish(1, 10, scene.tensors(1))
        receiver.wait_for(1, 60)
        with pytest.raises(CannotTrain, match=r"version 1 differ by \d.* plain forward pass, more than 0.001"):
            scene.engine.update_weights(receiver)
        assert gone(pids, LATE_S)
    finally:
        sender.close()
        scene.close()


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_new_weights_are_checked_at_the_temperature_of_the_samples(tmp_path: Path, mode: str) -> None:
    scene = Scene(tmp_path, tied=False, temperature=0.5, extra={"logprobs_mode": mode})
    settings = scene.settings("shm")
    sender, receiver = factory.make_sender(settings), scene.engine.receiver(settings, "rollout-0")
    try:
        assert receiver is not None
        sender.publish(1, 10, scene.tensors(1))
        receiver.wait_for(1, 60)
        if mode == "raw_logprobs":  # of the distribution before temperature: right at 1.0 alone
            with pytest.raises(CannotTrain, match=r"version 1 differ by \d.* plain forward pass, more than 0.001"):
                scene.engine.update_weights(receiver)
        else:
            assert scene.engine.update_weights(receiver) == (1, 10)
    finally:
        sender.close()
        scene.close()


def test_a_vllm_killed_during_a_broadcast_is_left_out_by_name(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, tied=True)
    pids = scene.engine.core.pids()
    settings = replace(scene.settings("broadcast"), bucket_bytes=4096)
    told: list[str] = []
    callbacks = GroupCallbacks(lambda change: told.append(str(change)), lambda name, text: told.append(text))
    sender: Any = factory.make_sender(settings, callbacks=callbacks)
    receiver, other = scene.engine.receiver(settings, "rollout-0"), factory.make_receiver(settings, "rollout-1")
    assert receiver is not None

    def kill(point: str) -> None:
        if point == "bucket 2" and sender.newest()[0] == 2 and _runs(pids[0]):
            os.kill(pids[0], signal.SIGKILL)

    try:
        sender.publish(1, 10, scene.tensors(1))
        for one in (receiver, other):
            one.wait_for(1, 60)
        scene.engine.submit([request(1, [5, 6, 7], 150, temperature=0.0)])
        sender.hook = kill
        sender.publish(2, 20, scene.tensors(2))
        assert other.wait_for(2, 60) == (2, 20)
        here = {name: tensor.clone() for name, tensor in scene.tensors(1).items()}
        assert other.fetch(here) == (2, 20)
        assert all(torch.equal(here[name], tensor) for name, tensor in scene.tensors(2).items())
        assert "rollout-0" in told[-1], told
        end = time.monotonic() + LATE_S
        with pytest.raises(EngineLost, match=f"died: pid {pids[0]} ended"):
            while time.monotonic() < end:
                scene.engine.step()
        assert gone(pids, LATE_S)
    finally:
        other.close()
        sender.close()
        scene.close()


def test_closing_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    scene = Scene(tmp_path, tied=True)
    pids = scene.engine.core.pids()
    scene.close()
    assert gone(pids, LATE_S)
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("psm_", "vllm"))} == set()
    with pytest.raises(EngineLost, match="closed"):
        scene.engine.step()
