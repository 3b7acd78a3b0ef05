"""The C++ reward worker of examples/cpp-reward, built from a copy of its folder, in real runs of the quickstart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "run"))

from checks import check_end  # noqa: E402
from harness import Run, running  # noqa: E402

from busrl.quickstart import ensure  # noqa: E402

STEPS = 10
NEEDED = {"/usr/include/zmq.h": "libzmq3-dev", "/usr/include/nlohmann/json.hpp": "nlohmann-json3-dev"}
MISSING = [package for file, package in NEEDED.items() if not Path(file).exists()]
pytestmark = [pytest.mark.long,
              pytest.mark.skipif(bool(MISSING), reason=f"the example needs the packages {MISSING}")]


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as a user has it after its build; the model is made if this is the first run here."""
    folder = tmp_path_factory.mktemp("cpp") / "cpp-reward"
    shutil.copytree(ROOT / "examples" / "cpp-reward", folder, ignore=shutil.ignore_patterns("build", "runs"))
    made = subprocess.run(["make", f"PYTHON={sys.executable}"], cwd=folder, capture_output=True, text=True, timeout=170)
    assert made.returncode == 0 and "warning" not in made.stderr, made.stderr
    ensure("tiny:sort")
    return folder / "run.toml"


def test_the_worker_reads_every_golden_vector_and_skips_invalid_messages(topology: Path, tmp_path: Path) -> None:
    source, vectors = Path(__file__).parent / "vectors.cpp", ROOT / "docs" / "vectors"
    build = ["g++", "-std=c++17", "-I", str(topology.parent), str(source), "-o", str(tmp_path / "vectors"), "-lzmq"]
    subprocess.run(build, check=True, timeout=170)
    said = json.loads(subprocess.check_output([tmp_path / "vectors", vectors], timeout=60))
    assert said["wrong"] == [] and said["messages"] == len(json.loads((vectors / "messages.json").read_text()))
    # A field that is missing or of another type is for whoever asks for that field.
    no_message = {"no_bytes", "cut_in_the_middle", "bytes_after_the_map", "an_array", "the_reserved_byte_c1"}
    no_message |= {"a_length_of_4_gigabytes", "a_newer_protocol", "a_key_that_is_no_text"}
    assert set(said["left_out"]) == no_message


def log_of(run: Run) -> str:
    return run.paths.log("reward/0").read_text()


def test_a_run_whose_rewards_come_from_cpp_learns_and_ends_clean(topology: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", config=topology, steps=STEPS)
    with running(run):
        pid = run.until("the worker was registered", lambda: run.pid("reward/0"))
        assert Path(f"/proc/{pid}/exe").resolve() == topology.parent / "build" / "reward"
        code = run.wait()
    check_end(run, code)
    assert run.restarts("reward/0") == 0 and "stopping: STOP" in log_of(run), log_of(run)
    rewards = [row["reward"] for row in run.metrics()]
    assert sum(rewards[-3:]) > sum(rewards[:3]), rewards


@pytest.mark.slow
def test_the_cpp_worker_and_the_broker_are_killed_and_nothing_is_lost(topology: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", config=topology, steps=30)
    with running(run):
        run.kill_at_random_steps(["reward/0", "bus"], 3, seed=7)
        code = run.wait()
    check_end(run, code)
    assert run.restarts("reward/0") >= 3 and log_of(run).count("ready") >= 3


@pytest.mark.slow
def test_the_cpp_worker_ends_in_order_at_a_signal_and_resumes_later(topology: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", config=topology, steps=STEPS)
    with running(run):
        run.until_step(3)
        assert run.child is not None
        run.child.terminate()
        assert run.wait() == 143, run.tail()
        assert not run.audit().errors and run.leftovers() == [] and "stopping: " in log_of(run)
        run.start()
        code = run.wait()
    check_end(run, code)


@pytest.mark.slow
def test_the_cpp_worker_needs_no_doorbell(topology: Path, tmp_path: Path) -> None:
    """The broker is stopped in its tracks: from then on no message reaches anybody, STOP neither."""
    run = Run(tmp_path / "run", "limits.progress_s=120", "limits.stop_s=4", config=topology, steps=STEPS)
    with running(run):
        run.until_step(1)
        os.kill(run.pid("bus"), signal.SIGSTOP)
        code = run.wait()
    check_end(run, code)
    assert run.restarts("reward/0") == 0 and "stopping: a signal" in log_of(run), log_of(run)
