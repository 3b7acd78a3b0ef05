"""Storms: several processes killed at once and launch with them, from its first moment on, files removed, garbage sent.

Whatever is done to it, a run reaches its goal after it was started again as often as it was killed, with every step in
metrics.jsonl once, nothing lost and nothing trained twice. A launch that ends by itself before that has to say what a
person is to do; in most storms nothing is done that needs a person, so none may. The seed decides what happens, not
when exactly.

Where space runs out, a launch may end and name where, and what to do; that is done, and the run is started again. Those
storms have mounts of their own (`small_disk.py`), and files are taken away from them as well.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from checks import check_end
from harness import ROOT, Run, ended, read_lines, running
from small_disk import fill, why_no_mounts

from busrl.paths import SHM

pytestmark = pytest.mark.usefixtures("quickstart")
CALM_S = 600.0  # to the end, once the storm is over
FROZEN_S = 1.0
WHY_NOT = why_no_mounts()
REMEDIES = ("make space", "free some", "enlarge it")
REMOVED = ("topology.json", "run.json", "supervisor.json", "gateway.json", "predictor.npz", "logs", "errors.jsonl")


class Storm:
    """Does one thing after another to a run."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.chance = run, random.Random(seed)
        self.done: list[str] = []
        self.ends: list[int] = []
        self._context = zmq.Context()

    def blow(self, times: int) -> None:
        """So many things, at moments from the first on; launch is started again whenever it is gone."""
        deeds = self.deeds()
        for _ in range(times):
            if ended(self.run.pidfd, self.chance.choice([0.0, 0.05, 0.3, 1.0, 2.0, 4.0]) * self.chance.random()):
                self.again()
            deed = self.chance.choice(deeds)
            self.done.append(deed.__name__)
            deed()
        self._context.destroy(linger=0)

    def deeds(self) -> list[Callable[[], None]]:
        """What it may do, each as often as it is likely."""
        return [
            *[self.kill_some] * 4, *[self.kill_launch] * 3,
            self.kill_all, self.stop, self.freeze, self.remove_a_file, self.remove_sockets, self.send_garbage,
        ]

    def again(self) -> None:
        assert self.run.child is not None
        self.ends.append(self.run.child.wait())
        self.run.start()

    def calm(self) -> int:
        """Let it end; how it did."""
        for _ in range(3):
            code = self.run.wait(CALM_S)
            if code == 0:
                return code
            self.again()
        return code

    def kill_some(self) -> None:
        here = list(self.run.processes().values())
        for process in self.chance.sample(here, min(len(here), self.chance.randint(1, 3))):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def kill_all(self) -> None:
        self.chance.shuffle(here := list(self.run.processes().values()))
        for process in here:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if self.chance.random() < 0.5:
            self.kill_launch()

    def kill_launch(self) -> None:
        assert self.run.child is not None
        self.run.child.kill()
        self.again()

    def stop(self) -> None:
        """An orderly end, now and then hurried, and a start after it."""
        assert self.run.child is not None
        # Before it has children, Python itself may still be starting, and ends with 1 for an interrupt.
        interrupts = [signal.SIGTERM, signal.SIGINT] if self.run.processes() else [signal.SIGTERM]
        self.run.child.send_signal(self.chance.choice(interrupts))
        if self.chance.random() < 0.5:
            ended(self.run.pidfd, self.chance.random())
            self.run.child.send_signal(signal.SIGTERM)
        self.run.wait()
        self.again()

    def freeze(self) -> None:
        stopped = [process.pid for process in self.run.processes().values() if self.chance.random() < 0.5]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGSTOP:
                ended(self.run.pidfd, FROZEN_S * self.chance.random())

    def remove_a_file(self) -> None:
        path = self.run.directory / self.chance.choice(REMOVED)
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def remove_sockets(self) -> None:
        shutil.rmtree(self.run.paths.runtime_dir, ignore_errors=True)

    def send_garbage(self) -> None:
        """To every socket of the run: bytes that are no ZeroMQ, and messages that are none."""
        for path in self.run.paths.runtime_dir.glob("*.sock"):
            with suppress(OSError), socket.socket(socket.AF_UNIX) as raw:
                raw.settimeout(1)
                raw.connect(str(path))
                raw.sendall(self.chance.randbytes(4000))
        pub = self._context.socket(zmq.PUB)
        pub.connect(self.run.paths.frontend)
        end = time.monotonic() + 0.3
        kinds = ["STOP", "HELLO", "TASK_REQUEST", "REMOTE_JOIN", "LEARNER_STATE_UPDATE", "ERROR", "PING", "NONSENSE"]
        while time.monotonic() < end:
            name = self.chance.choice(kinds).encode()
            frames = [name + b"/", self.chance.randbytes(self.chance.randint(0, 300)), b"more"]
            pub.send_multipart(frames[: self.chance.randint(1, 3)])
            ended(self.run.pidfd, 0.001)
        pub.close(0)


class ShortOfSpace(Storm):
    """Fills the disk of the run and /dev/shm as well, frees them again, and takes away locks and metrics.jsonl."""

    def __init__(self, run: Run, seed: int) -> None:
        super().__init__(run, seed)
        self.full: dict[Path, Path] = {}  # where, and the file that takes the space
        self.was_full = False  # since the last start
        self.said: list[str] = []  # what launches that ended by themselves said last
        self.metrics: set[int] = set()  # steps of files that were taken away
        self._read_to = 0

    def deeds(self) -> list[Callable[[], None]]:
        more = [*[self.fill_up] * 5, *[self.make_space] * 3, *[self.remove_locks] * 2, *[self.take_metrics] * 2]
        return super().deeds() + more

    def again(self) -> None:
        """Space that a launch asked for by its last words is made, as a person would."""
        assert self.run.child is not None
        code = self.run.child.wait()
        text = self.run.text()[self._read_to :]
        if code in (1, 2):
            has_remedy = any(remedy in text for remedy in REMEDIES)
            assert self.was_full and has_remedy, f"{self.done}: exit code {code}\n{text}"
            self.said.append(text.strip().rpartition("\n")[2])
            self.make_space()
        self._read_to, self.was_full = len(self.run.text()), bool(self.full)
        super().again()

    def fill_up(self) -> None:
        """The disk, /dev/shm or both, now and then but for a few pages."""
        for where in self.chance.choice([[self.run.directory.parent], [SHM], [self.run.directory.parent, SHM]]):
            if where not in self.full:
                filler = self.full[where] = fill(where)
                self.was_full = True
                os.truncate(filler, max(0, filler.stat().st_size - self.chance.choice([0, 0, 4096, 65536])))

    def make_space(self) -> None:
        for filler in self.full.values():
            filler.unlink()
        self.full.clear()

    def remove_locks(self) -> None:
        for path in self.run.directory.glob("*.lock"):
            path.unlink(missing_ok=True)

    def take_metrics(self) -> None:
        """As a rotation of logs does it; what stood in the file is known afterwards."""
        taken = self.run.directory.parent / "taken.jsonl"
        with suppress(FileNotFoundError):
            os.rename(self.run.paths.metrics, taken)
            self.metrics |= {row["step"] for row in read_lines(taken) if "kind" not in row}


def storm_short_of_space(folder: Path, seed: int) -> None:
    """The storm for which `small_disk.py` has made `folder / "disk"` and /dev/shm small."""
    transport, mode = ["shm", "broadcast"][seed % 2], ["sync", "fully-async", "batch-async"][seed % 3]
    settings = [f"weights.transport={transport}", f"weights.mode={mode}", "limits.progress_s=30", "validation.every=20"]
    run = Run(folder / "disk" / "run", *settings, steps=120)
    run.output = folder / "run.out"  # a person's terminal is not on the full disk
    with running(run):
        storm = ShortOfSpace(run, seed)
        storm.blow(30)
        storm.make_space()
        code = storm.calm()
    told = f"seed {seed}: {storm.done}, ends {storm.ends}, said {storm.said}"
    print(told)
    assert run.audit().accidents.keys() <= {"poison"}, told
    check_end(run, code)
    steps = storm.metrics | {row["step"] for row in run.metrics()}
    assert steps == set(range(1, run.steps + 1)), f"{told}: {sorted(steps)}"


def weather(tmp_path: Path, seed: int, times: int, steps: int, *settings: str) -> None:
    run = Run(tmp_path / "run", "validation.every=20", *settings, steps=steps)
    with running(run):
        storm = Storm(run, seed)
        storm.blow(times)
        code = storm.calm()
        told = f"seed {seed}: {storm.done}, ends {storm.ends}"
        print(told)
    assert set(storm.ends) <= {0, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT, -2, -15}, (
        f"{told}\n{run.tail()}"
    )
    assert run.audit().accidents.keys() <= {"poison"}  # who dies alone on a sample twice, by chance, makes it suspect
    check_end(run, code)
    steps = [row["step"] for row in run.metrics()]
    assert sorted(set(steps)) == list(range(1, run.steps + 1)), f"{told}: {steps}"


@pytest.mark.slow
def test_a_run_reaches_its_goal_through_a_short_storm(tmp_path: Path) -> None:
    weather(tmp_path, 0, 8, 30)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "fully-async", "batch-async"])
def test_a_run_of_any_mode_reaches_its_goal_through_a_storm(mode: str, tmp_path: Path) -> None:
    weather(tmp_path, 1, 25, 120, f"weights.mode={mode}")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 18))
def test_a_run_reaches_its_goal_through_storm(seed: int, tmp_path: Path) -> None:
    transport = "broadcast" if seed % 2 else "shm"
    weather(tmp_path, seed, 40, 200, f"weights.transport={transport}")


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.timeout(2 * CALM_S)
@pytest.mark.parametrize("seed", range(20, 26))
def test_a_run_in_space_storms_reaches_its_goal_or_asks_for_space(
    seed: int, tmp_path: Path
) -> None:
    here = Path(__file__).parent
    command = ["unshare", "-m", sys.executable, str(here / "small_disk.py"), "storm", str(tmp_path), str(seed)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": f"{ROOT}:{here}"}, timeout=CALM_S, text=True, capture_output=True
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
