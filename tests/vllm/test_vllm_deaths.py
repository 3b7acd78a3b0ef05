"""What happens when vLLM's processes, or ours, die or stop: a named error in time, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_scene import HERE, ROOT, Scene, request

from busrl.errors import EngineLost

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


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_stopped_engine_core_is_named_within_the_deadline_and_killed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, tied=True, rpc_s=4.0)
    pids = scene.engine.core.pids()
    try:
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


def test_a_killed_engine_core_is_an_error_of_the_next_step_and_a_silent_one_of_a_later(tmp_path: Path) -> None:
    scene = Scene(tmp_path, tied=True, silent_s=3.0)
    pids = scene.engine.core.pids()
    try:
        scene.engine.submit([request(1, [5, 6, 7], 150, temperature=0.0)])
        scene.wait_for_tokens(2)
        os.kill(pids[0], signal.SIGKILL)
        end = time.monotonic() + LATE_S
        with pytest.raises(EngineLost, match=f"died: pid {pids[0]} ended"):
            while time.monotonic() < end:
                scene.engine.step()
        scene.engine.core.close()
        scene.engine.core = scene.engine._start_core()
        scene.engine.begin(scene.engine.running)
        scene.wait_for_tokens(len(scene.engine.running[0].tokens) + 2)
        os.kill(scene.engine.core.pids()[0], signal.SIGSTOP)
        end = time.monotonic() + 3.0 + LATE_S
        with pytest.raises(EngineLost, match=r"made no token for 3 s with 1 requests; .* is stopped"):
            while time.monotonic() < end:
                scene.engine.step()
        assert gone(scene.engine.core.pids(), LATE_S)
    finally:
        scene.close()


PARENT = """
import sys, time
from pathlib import Path
from vllm_scene import Scene
if __name__ == "__main__":
    scene = Scene(Path(sys.argv[1]), tied=True)
    print(*scene.engine.core.pids(), flush=True)
    time.sleep(600)
"""


def test_a_killed_rollout_process_leaves_no_engine_behind(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"}
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "model")], stdout=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert pids and all(_runs(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    assert gone(pids, 5.0)


def test_closing_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    scene = Scene(tmp_path, tied=True)
    pids = scene.engine.core.pids()
    scene.close()
    assert gone(pids, LATE_S)
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("psm_", "vllm"))} == set()
    with pytest.raises(EngineLost, match="closed"):
        scene.engine.step()
