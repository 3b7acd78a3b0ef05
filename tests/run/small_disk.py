"""Runs in a mount namespace of its own (`unshare -m`): a full /dev/shm, and a disk that fills up in mid-run.

Started by test_full_disk.py and test_storms.py as `python small_disk.py CASE FOLDER [SEED]`; fails by an assertion.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from checks import check_end
from harness import Run, running

FILLED_AT = 4
STEPS = 14


def why_no_mounts() -> str:
    """Why no mount namespace can be had here; empty if one can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "needs root and unshare(1) for a private mount namespace"
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True, timeout=30
    )
    return f"no private mounts here: {tried.stderr.strip()}" if tried.returncode else ""


def why_no_ext4() -> str:
    """Why no disk of a file can be had here, whose errors make it read-only; empty if one can."""
    missing = [name for name in ("mkfs.ext4", "e2fsck") if shutil.which(name) is None]
    if missing or not list(Path("/dev").glob("loop[0-9]*")) or not Path("/sys/fs/ext4").exists():
        return f"needs loop devices and ext4 with its tools ({', '.join(missing) or 'they are there'})"
    return ""


def mount(where: Path, size: str) -> None:
    where.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)], check=True)


def fill(directory: Path) -> Path:
    """Take all that is left on the file system."""
    filler = directory / "filler"
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
    size = 1 << 20
    while size:
        try:
            os.write(descriptor, b"\0" * size)
        except OSError:
            size //= 2
    os.close(descriptor)
    return filler


def small_shm(folder: Path) -> None:
    """Refused at the start with what is needed, what is free, and what to do."""
    mount(Path("/dev/shm"), "1m")
    run = Run(folder / "run", steps=2)
    with running(run):
        code = run.wait()
    text = run.output.read_text()
    assert code == 2 and "Traceback" not in text, text
    for part in ("/dev/shm has 1.0 MiB free, the run needs ring", "enlarge it", "--shm-size"):
        assert part in text, text
    assert not run.directory.exists() and run.leftovers() == [], run.leftovers()


def disk_fills_up_and_one_dies(folder: Path) -> None:
    """A process that dies meanwhile is started again, or waits for space too; that uses up no attempt."""
    mount(folder / "disk", "96m")
    run = Run(folder / "disk" / "run", "limits.restart_attempts=2", steps=STEPS)
    run.output = folder / "run.out"
    with running(run):
        run.until_step(FILLED_AT)
        log = run.paths.log("rollout/0")
        with open(log, "ab") as file:  # its last block is full as well
            file.write(b"." * (-log.stat().st_size % 4096))
        filler = fill(folder / "disk")
        run.until("training to pause", lambda: "training pauses" in run.output.read_text())
        for name in ("rollout/0", "learner"):
            run.kill(name)
        run.let_pass(12.0)  # two attempts of any of them would be over
        filler.unlink()
        code = run.wait()
    check_end(run, code)


def disk_fills_up(folder: Path) -> None:
    """Training pauses and says so, nobody dies of it, and it goes on when there is space."""
    mount(folder / "disk", "96m")
    run = Run(folder / "disk" / "run", "limits.progress_s=5", steps=STEPS)
    run.output = folder / "run.out"  # a person's terminal is not on the full disk
    with running(run):
        run.until_step(FILLED_AT)
        filler = fill(folder / "disk")
        run.until("training to pause", lambda: "training pauses" in run.output.read_text())
        before = run.processes()
        run.let_pass(7.0)  # longer than limits.progress_s: waiting is no reason to be killed
        assert {name: process.pid for name, process in run.processes().items()} == {
            name: process.pid for name, process in before.items()
        }, run.tail()
        filler.unlink()
        run.until("training to go on", lambda: "training continues" in run.output.read_text())
        code = run.wait()
    check_end(run, code)
    assert run.output.read_text().count("training pauses") == 1, run.output.read_text()


def disk_becomes_read_only(folder: Path) -> None:
    """As the kernel makes it after an error: the run ends at once and says so; on the mended disk it is finished."""
    image, disk = folder / "image", folder / "disk"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(128 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop,errors=remount-ro", str(image), str(disk)], check=True)
    device = next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if f" {disk} " in line)
    run = Run(disk / "run", steps=STEPS)
    run.output = folder / "run.out"
    with running(run):
        run.until_step(FILLED_AT)
        Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("1")
        assert run.wait() == 1, run.tail()
        text = run.output.read_text()
        assert "cannot be written any more: Read-only file system; look at the disk" in text, text
        assert "Traceback" not in text and "starting it again" not in text and run.leftovers() == [], text
        subprocess.run(["umount", str(disk)], check=True)
        assert subprocess.run(["e2fsck", "-fp", str(image)], stdout=subprocess.DEVNULL).returncode in (0, 1)
        subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
        run.start()
        code = run.wait()
    check_end(run, code)
    subprocess.run(["umount", str(disk)], check=True)


def storm(folder: Path) -> None:
    """Both fill up and are freed again while processes are killed and files vanish."""
    from test_storms import storm_short_of_space

    mount(folder / "disk", "96m")
    mount(Path("/dev/shm"), "96m")
    storm_short_of_space(folder, int(sys.argv[3]))


if __name__ == "__main__":
    cases = (small_shm, disk_fills_up, disk_fills_up_and_one_dies, disk_becomes_read_only, storm)
    {case.__name__: case for case in cases}[sys.argv[1]](Path(sys.argv[2]))
