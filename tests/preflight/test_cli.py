"""The command line as a user meets it: real processes, exit codes, messages without tracebacks. One starts cold."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from commands import busrl

from busrl import __version__
from busrl.algorithms import catalog
from busrl.cli import main
from busrl.paths import SHM, RunPaths
from busrl.ring import OfdLock, Ring
from busrl.states import HeaderWord, RunPhase

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"


def told(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a command that must have failed as the user's own mistake."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, busrl.cli as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'torch', 'msgspec', 'zmq', 'busrl._ring', 'busrl.topology'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for verb in ("launch", "check", "status", "stop", "audit", "ring", "version"):
        assert f"    {verb}" in done.stdout


def test_check_explains_a_topology() -> None:
    command = [sys.executable, "-m", "busrl.cli", "check", QUICKSTART, "--set", "process.rollout.count=2", "--verbose"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for text in ("rollout/1", "B + W = 75 + 22 = 97 <= (max_staleness + 1) x n_lo + 1", "/dev/shm has", "4096 prompts"):
        assert text in done.stdout


def test_check_prints_every_problem_and_no_traceback() -> None:
    message = told(busrl("check", QUICKSTART, "--set", "learner.lr=fast", "--set", "groups.size=0"))
    assert "2 problems" in message and "learner.lr" in message and "groups.size" in message


def test_check_refuses_a_run_that_shared_memory_can_not_hold() -> None:
    message = told(busrl("check", QUICKSTART, "--set", "ring.slots=1048576", "--set", "ring.slot_bytes=1073741824"))
    assert "/dev/shm has" in message and "the run needs ring" in message


def test_check_warns_where_only_longest_answers_exceed_shared_memory() -> None:
    space = os.statvfs("/dev/shm")
    slots = max(2048, space.f_bavail * space.f_frsize // (64 << 20) + 8)
    sizes = (f"ring.slots={slots}", f"ring.slot_bytes={64 << 20}", "ring.expected_tokens=1")
    done = busrl("check", QUICKSTART, "--verbose", *(part for size in sizes for part in ("--set", size)))
    assert done.returncode == 0, done.stderr
    assert "enough for usual answers" in done.stdout and "if all are as long as they may be" in done.stdout
    assert f"{slots} answers of 1 tokens (ring.expected_tokens)" in done.stdout


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    done = busrl("launch", QUICKSTART, "--dry-run", "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    configs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"process"')]
    assert [config["process"] for config in configs][:3] == ["bus", "keeper", "scheduler"]
    assert not (tmp_path / "run").exists()


def test_resume_takes_auto_never_or_a_run_directory(tmp_path: Path) -> None:
    message = told(busrl("launch", QUICKSTART, "--resume", tmp_path / "nothing"))
    assert "expected auto, never, or a run directory" in message
    message = told(busrl("launch", QUICKSTART, "--resume", tmp_path, "--run-dir", tmp_path / "other"))
    assert "two different run directories" in message


def test_verbs_about_a_run_say_so_if_there_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for verb in (["status"], ["stop"], ["audit"], ["ring", "inspect"]):
        arguments = [*verb, str(tmp_path)]
        told(subprocess.CompletedProcess(arguments, main(arguments), *(printed := capfd.readouterr())))
    assert "no ring of that name or run directory" in printed.err
    assert "no run" in told(busrl("status", cwd=tmp_path))


def test_a_request_to_a_killed_run_does_not_name_an_earlier_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths.of(tmp_path)
    paths.summary.write_text(json.dumps({"outcome": "finished", "ended": 5.0}))
    for started, told in ((3.0, "the run is finished"), (9.0, "the run is not over")):
        paths.run_json.write_text(json.dumps({"started": started}))
        assert main(["set", str(tmp_path), "learner.lr", "1"]) != 0 and told in capfd.readouterr().err


def test_the_option_version_is_the_version_alone() -> None:
    done = busrl("--version")
    assert done.returncode == 0 and done.stdout == f"busrl {__version__}\n"


def test_version_names_what_it_stands_on() -> None:
    done = busrl("version")
    assert done.returncode == 0 and done.stdout.startswith("busrl 0.") and "pyzmq" in done.stdout


def test_every_recipe_is_listed_with_all_that_it_sets(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    page = capfd.readouterr().out
    assert all(f"\n{name}  (its loss: " in page for name in catalog.RECIPES)
    assert all(f"  {key} = " in page for recipe in catalog.RECIPES.values() for key in recipe)
    assert main(["recipes", "scalerl"]) == 0
    assert capfd.readouterr().out.splitlines()[-2:] == ["  data.skip.max_pass_rate = 0.9", "  data.skip.rest = 0"]
    assert main(["recipes", "nope"]) == 2 and "there is no recipe nope" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------------ rings

HOLDER = """
import sys
from busrl.ring import Ring
ring = Ring.attach(sys.argv[1])
ring.register("rollout", "rollout/0")
ring.set_ready()
ring.add(busy_ns=1000)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run_ring(tmp_path: Path) -> Iterator[RunPaths]:
    """A run directory's ring in /dev/shm, with nobody in it."""
    paths = RunPaths.of(tmp_path)
    ring = Ring.create(paths.ring_name, slots=4, slot_bytes=1024, uuid=uuid.uuid4().bytes)
    ring.close()
    yield paths
    Ring.unlink(paths.ring_name)


@pytest.fixture
def holder(run_ring: RunPaths) -> Iterator[subprocess.Popen[str]]:
    """A process that is registered in the ring."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, run_ring.ring_name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.communicate(timeout=30)


def test_clean_refuses_while_a_registered_process_lives(run_ring: RunPaths, holder: subprocess.Popen[str]) -> None:
    message = told(busrl("ring", "clean", run_ring.root))
    assert f"in use by rollout/0 (pid {holder.pid})" in message
    assert run_ring.ring_file.exists()
    assert f"in use by rollout/0 (pid {holder.pid})" in busrl("ring", "list").stdout
    shown = busrl("ring", "inspect", run_ring.ring_name).stdout
    assert "4 FREE" in shown and re.search(r"rollout/0 +\d+  ready +-  ", shown), shown  # busy, but for how long?


def test_clean_removes_what_a_killed_process_left(run_ring: RunPaths, holder: subprocess.Popen[str]) -> None:
    run_ring.weights_file.write_bytes(b"")
    draft = SHM / f"{run_ring.weights_name}.1.new"  # of a learner that was killed while it made them
    draft.write_bytes(b"")
    (run_ring.adapters / "v000000000001-s1").mkdir(parents=True)
    (run_ring.adapters / "v000000000001-s1" / "adapter_config.json").write_text("{}")
    holder.send_signal(signal.SIGKILL)
    holder.wait(30)
    assert " dead " in busrl("ring", "inspect", run_ring.ring_name).stdout
    done = busrl("ring", "clean", run_ring.ring_name)
    assert done.returncode == 0, done.stderr
    assert not run_ring.ring_file.exists() and not run_ring.weights_file.exists() and not draft.exists()
    assert not run_ring.adapters.exists()


def test_clean_with_force_removes_a_ring_in_use(run_ring: RunPaths, holder: subprocess.Popen[str]) -> None:
    assert busrl("ring", "clean", run_ring.root, "--force").returncode == 0
    assert not run_ring.ring_file.exists()
    assert holder.poll() is None  # nobody is killed


def test_clean_takes_no_other_file_of_shared_memory(tmp_path: Path) -> None:
    other = SHM / f"busrl-test-{os.getpid()}"
    other.write_bytes(b"keep")
    try:
        told(busrl("ring", "clean", other.name, "--force"))
        told(busrl("ring", "clean", f"../shm/{other.name}", "--force"))
        assert other.exists()
    finally:
        other.unlink()


def test_a_ring_that_can_not_be_read_is_kept_without_force(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    paths.ring_file.write_bytes(b"something else")
    try:
        assert "cannot be read" in told(busrl("ring", "clean", tmp_path))
        assert paths.ring_file.exists()
        assert busrl("ring", "clean", tmp_path, "--force").returncode == 0
    finally:
        paths.ring_file.unlink(missing_ok=True)


def test_a_run_directory_given_as_topology_says_how_a_run_goes_on(tmp_path: Path) -> None:
    message = told(busrl("check", tmp_path))
    assert f"{tmp_path}: cannot be read: is a directory" in message and "give the path of a topology file" in message
    (tmp_path / "run.json").write_text("{}")
    assert f"busrl launch TOPOLOGY --run-dir {tmp_path}" in told(busrl("launch", tmp_path))


# ------------------------------------------------------------------------------------------------------------- stop

LAUNCH = """
import json, os, signal, sys, threading
from busrl.ring import OfdLock
lock = OfdLock(sys.argv[1] + "/run.lock")
lock.acquire(5)
json.dump({"launch_pid": os.getpid()}, open(sys.argv[1] + "/run.json", "w"))
ended = threading.Event()
if sys.argv[2] == "polite":
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
ended.wait(60)
"""


@pytest.fixture
def launched(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a run directory as `launch` does."""
    child = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(tmp_path), getattr(request, "param", "polite")],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.communicate(timeout=30)


def test_stop_ends_a_run_and_waits_for_its_end(tmp_path: Path, launched: subprocess.Popen[str]) -> None:
    done = busrl("stop", tmp_path)
    assert done.returncode == 0, done.stderr
    assert launched.wait(30) == 0
    assert f"asked process {launched.pid} to stop" in done.stdout
    assert "nothing to stop" in busrl("stop", tmp_path).stdout


@pytest.mark.parametrize("launched", ["deaf"], indirect=True)
def test_stop_names_a_run_that_does_not_end(tmp_path: Path, launched: subprocess.Popen[str]) -> None:
    message = told(busrl("stop", tmp_path, "--wait", "0.2"))
    assert f"process {launched.pid} has not ended 0.2 s after it was asked" in message
    assert launched.poll() is None


def test_stop_names_a_launch_that_somebody_holds(tmp_path: Path, launched: subprocess.Popen[str]) -> None:
    launched.send_signal(signal.SIGSTOP)
    message = told(busrl("stop", tmp_path, "--wait", "0.2"))
    assert f"its launch is stopped (SIGSTOP; `kill -CONT {launched.pid}`" in message
    launched.send_signal(signal.SIGCONT)
    assert launched.wait(30) == 0, "the signal waited for it"


@pytest.mark.parametrize("launched", ["deaf"], indirect=True)
@pytest.mark.parametrize("phase, expected", [
    (RunPhase.RUNNING, "its launch has not taken it up (load"),
    (RunPhase.STOPPING, "rollout/0 (starting) has still to end"),
])
def test_stop_says_who_has_still_to_end(
    tmp_path: Path, run_ring: RunPaths, launched: subprocess.Popen[str], holder: subprocess.Popen[str],
    phase: RunPhase, expected: str,
) -> None:
    with closing(Ring.attach(run_ring.ring_name)) as ring:
        ring.set_header(HeaderWord.RUN_STATE, phase)
    assert expected in told(busrl("stop", tmp_path, "--wait", "0.2"))


def test_stop_says_that_it_took_a_signal(tmp_path: Path, launched: subprocess.Popen[str]) -> None:
    assert "by SIGTERM, as no message was answered" in busrl("stop", tmp_path).stdout


def test_stop_signals_nobody_whose_pid_only_stands_in_a_stale_file(
    tmp_path: Path, launched: subprocess.Popen[str]
) -> None:
    stale = tmp_path / "stale"
    stale.mkdir()
    (stale / "run.json").write_text(json.dumps({"launch_pid": launched.pid}))
    assert "nothing to stop" in busrl("stop", stale).stdout
    lock = OfdLock(str(stale / "run.lock"))
    lock.acquire(5)  # the lock says that somebody else runs here
    try:
        assert "is gone, but a child still holds" in told(busrl("stop", stale))
    finally:
        lock.release()
    assert launched.poll() is None
