"""Attaching shows the truth at once, changes nothing, and leaves without a trace, whatever ends it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from monitor_scene import PATIENCE_S, Scene, finished, metrics_line, until

from busrl.cli import main
from busrl.observe.monitor.sources import living_runs
from busrl.protocol import messages as m
from busrl.ring import Ring
from busrl.status.reader import RingLook

Start = Callable[..., "subprocess.Popen[str]"]


def test_one_snapshot_tells_what_ring_and_files_hold_without_a_single_message(scene: Scene, started: Start) -> None:
    scene.broker.kill()
    told = json.loads(finished(started("monitor", str(scene.paths.root), "--once", "--json", "--seconds", "0.1")))
    assert told["schema"] == 1 and told["state"] == "running" and told["name"] == "scene"
    assert (told["step"], told["version"], told["max_steps"]) == (40, 41, 200)
    [row] = told["processes"]
    assert (row["name"], row["pid"], row["state"], row["activity"]) == ("rollout/0", os.getpid(), "ready", "compiling")
    assert row["deadline_s"] == pytest.approx(500) and row["progress_age_s"] >= 0 and not row["late"]
    assert told["slots"] == {"free": 16} and told["groups"] == {"open": 0, "ready": 0}
    newest = told["newest_step"]
    assert (newest["step"], newest["reward"], newest["length_ended"], newest["age_p95"]) == (40, 0.4, 17.0, 1.0)
    assert told["errors"]["count"] == 1 and told["errors"]["newest"][0]["text"] == "sample 7 is poison"


def test_the_speed_is_known_at_once_from_the_steps_that_were_written(scene: Scene, started: Start) -> None:
    told = json.loads(finished(started("monitor", str(scene.paths.root), "--once", "--json", "--seconds", "0.1")))
    passed = time.time() - scene.paths.metrics.stat().st_mtime
    # 20 s of steps of 0.5 s, and the one under way since then
    slowest = 40 / (20 + passed)
    assert slowest <= told["steps_per_min"] / 60 <= 2.0
    assert 32 * slowest <= told["samples_per_s"] + 0.001 <= 64.001
    assert told["left_s"] > 0


def test_what_passes_the_bus_is_counted_by_name(scene: Scene, started: Start) -> None:
    publisher = scene.endpoint("scheduler")
    child = started("monitor", str(scene.paths.root), "--once", "--json", "--seconds", "1.5")
    out: list[str] = []
    reader = threading.Thread(target=lambda: out.append(finished(child)))
    reader.start()
    while reader.is_alive():
        publisher.send(m.SchedulerState(credit=5, waiting="credit (group 9)"))
        publisher.send(m.NewTask(worker_id="w", slot_id=1, seq=2, uid=3), to="rollout/7")
        reader.join(0.05)
    told = json.loads(out[0])
    by_name = told["messages"]["by_name"]
    assert by_name["SCHEDULER_STATE"]["count"] > 5 and by_name["NEW_TASK"]["count"] > 5
    assert by_name["NEW_TASK"]["per_s"] > 0 and told["messages"]["missed"] == 0
    assert told["waiting"] == "credit (group 9)"


def test_it_writes_nothing_and_registers_nowhere(scene: Scene, started: Start) -> None:
    before = scene.state()
    finished(started("monitor", str(scene.paths.root), "--once", "--json", "--seconds", "0.2"))
    assert scene.state() == before


def test_a_killed_monitor_leaves_no_trace_and_had_nothing_open_for_writing(scene: Scene, started: Start) -> None:
    before = scene.state()
    child = started("monitor", str(scene.paths.root))
    assert child.stdout is not None
    until("the first line", child.stdout.readline)
    assert_reads_only(child.pid, scene)
    child.send_signal(signal.SIGKILL)
    child.wait(PATIENCE_S)
    assert scene.state() == before


def assert_reads_only(pid: int, scene: Scene) -> None:
    """Its mappings and descriptors of the run are for reading; it listens at the tap and nowhere else."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = [line for line in maps if str(scene.paths.root) in line or scene.paths.key in line]
    assert any(scene.paths.ring_name in line for line in mapped)
    assert all(line.split()[1] == "r--s" for line in mapped), mapped
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(link)
        if target.startswith((str(scene.paths.root), "/dev/shm/")):
            flags = int(re.search(r"flags:\s+(\d+)", Path(f"/proc/{pid}/fdinfo/{link.name}").read_text())[1], 8)
            assert flags & os.O_ACCMODE == os.O_RDONLY, target


def without_size() -> dict[str, str]:
    """The environment without a size of the terminal, which would go before the terminal's own."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


@pytest.mark.parametrize("ending", ["key", "SIGTERM"])
def test_the_live_screen_follows_the_terminal_and_restores_it_afterwards(
    scene: Scene, started: Start, ending: str
) -> None:
    before = scene.state()
    master, slave = pty.openpty()
    resize(slave, 80, 24)
    settings = termios.tcgetattr(slave)
    child = started(
        "monitor", str(scene.paths.root), stdin=slave, stdout=slave, stderr=slave,
        env={**without_size(), "TERM": "xterm-256color"},
    )
    seen = read_until(master, lambda text: "scene · running" in text and "compiling" in text)
    assert "age of samples" not in seen
    resize(slave, 120, 40)
    child.send_signal(signal.SIGWINCH)
    read_until(master, lambda text: "age of samples" in text)
    os.write(master, b"e")
    read_until(master, lambda text: "sample 7 is poison" in text)
    if ending == "key":
        os.write(master, b"q")
    else:
        child.send_signal(getattr(signal, ending))
    read_until(master, lambda text: "\x1b[?1049l" in text and "\x1b[?25h" in text)  # screen and cursor are back
    assert child.wait(PATIENCE_S) == 0
    assert termios.tcgetattr(slave) == settings
    assert scene.state() == before
    os.close(master)
    os.close(slave)


def resize(terminal: int, width: int, height: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


def read_until(master: int, enough: Callable[[str], bool]) -> str:
    """What the terminal got until it is enough."""
    text, end = "", time.monotonic() + PATIENCE_S
    while not enough(re.sub(r"\x1b\[[0-9;]*m", "", text)):
        assert time.monotonic() < end, text[-3000:]
        if select.select([master], [], [], 1.0)[0]:
            text += os.read(master, 65536).decode(errors="replace")
    return text


def test_new_lines_in_run_files_show_up_while_it_is_watched(scene: Scene, started: Start) -> None:
    child = started("monitor", str(scene.paths.root), "--once", "--json", "--seconds", "1")
    until("it is attached", lambda: scene.paths.ring_name in Path(f"/proc/{child.pid}/maps").read_text())
    with open(scene.paths.metrics, "ab") as file:
        file.write(metrics_line(41))
    assert json.loads(finished(child))["newest_step"]["step"] == 41


def test_a_run_that_has_ended_is_shown_by_its_files(scene: Scene, started: Start) -> None:
    Ring.unlink(scene.paths.ring_name)
    scene.paths.summary.write_text(json.dumps({"outcome": "finished", "why": "the goal is reached"}))
    out = finished(started("monitor", str(scene.paths.root)))
    assert "ended" in out and "finished: the goal is reached" in out and "40 steps" in out


def test_the_monitor_finds_a_later_ring_and_ignores_a_damaged_one(scene: Scene) -> None:
    look = RingLook(scene.paths, group_size=4)
    assert look.look().slots == 16  # type: ignore[union-attr]
    Ring.unlink(scene.paths.ring_name)
    assert look.look() is None
    later = Ring.create(scene.paths.ring_name, slots=8, slot_bytes=64, processes=4, uuid=bytes(16))
    seen = look.look()
    assert seen is not None and (seen.slots, seen.living) == (8, 0)
    later.close()
    Ring.unlink(scene.paths.ring_name)
    assert look.look() is None and look.damage == ""
    scene.paths.ring_file.write_bytes(b"no ring" * 2000)
    assert look.look() is None and "not a busrl ring" in look.damage
    look.close()


def test_a_damaged_ring_is_shown_with_the_reason_and_the_remedy(scene: Scene, started: Start) -> None:
    with open(scene.paths.ring_file, "r+b") as file:
        file.seek(40)
        file.write(b"\xff" * 8)
    told = json.loads(finished(started("monitor", str(scene.paths.root), "--once", "--json", "--seconds", "0.1")))
    assert told["state"] == "damaged" and "slots" not in told
    assert "checksum is wrong" in told["problem"] and "busrl ring clean" in told["problem"]
    out = finished(started("monitor", str(scene.paths.root), "--once", "--seconds", "0.1"))
    assert "its ring is damaged and cannot be read" in out and told["problem"] in out


def test_a_full_device_behind_the_output_is_one_line_and_a_failure(scene: Scene, started: Start) -> None:
    for unbuffered in ("", "1"):
        for arguments in (("monitor", str(scene.paths.root), "--once"), ("status", str(scene.paths.root))):
            with open("/dev/full", "w") as full:
                env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}  # read at a cold start
                child = started(*arguments, cold=True, stdout=full, env=env)
                _, problems = child.communicate(timeout=PATIENCE_S)
            assert child.returncode == 2
            assert problems.startswith("busrl: standard output: No space left on device; ")
            assert problems.count("\n") == 1


def test_without_a_name_the_only_living_run_is_found(scene: Scene) -> None:
    assert scene.paths.root in list(living_runs())


def test_the_tap_is_for_its_owner_alone(scene: Scene) -> None:
    assert scene.paths.runtime_dir.stat().st_mode & 0o077 == 0
    for name in ("pub.sock", "sub.sock", "tap.sock"):
        assert (scene.paths.runtime_dir / name).stat().st_mode & 0o077 == 0


def test_a_directory_without_a_run_and_an_invalid_address_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", str(tmp_path), "--once"]) == 2
    assert "no run.json there" in capsys.readouterr().err
    assert main(["monitor", "http://x", "--once"]) == 2
    assert "over ipc:// alone" in capsys.readouterr().err
    assert main(["monitor", "tcp://127.0.0.1:5600", "--once"]) == 2
    told = capsys.readouterr().err
    assert "on the host of the run" in told and "ssh HOST busrl monitor RUN_DIR" in told and "keys" not in told


def test_validation_rounds_of_a_finished_run_appear_in_the_picture(scene: Scene, started: Start) -> None:
    scene.paths.validation.write_text(
        '{"round":0,"val/reward":0.25,"version":0,"samples":8}\n{"round":40,"val/reward":null}\n{"rou'
    )
    told = json.loads(finished(started("monitor", str(scene.paths.root), "--once", "--json", "--seconds", "0.2")))
    assert told["validation"] == [{"round": 0, "mean": 0.25, "samples": 8}]


def test_an_endpoint_where_nobody_says_anything_is_no_picture_but_an_error(tmp_path: Path, started: Start) -> None:
    child = started("monitor", f"ipc://{tmp_path}/nobody", "--once", "--json", "--seconds", "0.2")
    out, error = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 2 and out == ""
    assert f"ipc://{tmp_path}/nobody: nothing was received there within 0.2 s" in error
