"""Hostile programs in a box: none reaches what is outside, none outlives its run."""

import contextlib
import os
import socket
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from busrl.rewards import box
from busrl.rewards.box import BoxRefused, Limits, run

REFUSAL = box.refusal()
needs_box = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
PATIENT = Limits(wall_s=60.0)


def left(mark):
    """Processes of this machine with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] * (mark.encode() in path.read_bytes())
    return found


@needs_box
def test_a_program_reads_its_stdin_and_its_exit_code_is_told():
    result = run("import sys; print(sys.stdin.read()[::-1]); sys.exit(3)", "olleh", PATIENT)
    assert (result.code, result.stdout, result.stderr, result.cut) == (3, "hello\n", "", False)


@needs_box
@pytest.mark.parametrize(
    "act",
    [
        "open('/etc/shadow').read()", "open('/proc/1/environ').read()", "os.listdir('/dev/shm')",
        "os.listdir({outside!r})", "open({outside!r} + '/made', 'w')", "open('/mnt/made', 'w')",
        "os.symlink({outside!r} + '/secret', 'link'); open('link').read()",
        "os.link({outside!r} + '/secret', 'hard')",
        "os.kill(os.getppid(), 9); time.sleep(.1); os.kill({parent}, 0)", "os.kill({parent}, 9)",
        "socket.create_connection(('127.0.0.1', {port}), 5)", "'x' * (1 << 30)",
        "open('big', 'wb').write(b'x' * (2 << 20))",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); failed = c.ptrace(16, {parent}, 0, 0); "
        "raise OSError(ctypes.get_errno(), 'ptrace') if failed else SystemExit(0)",
        "os.setuid(0)", "[open(str(n), 'w').close() for n in range(5000)]",
    ],
)  # fmt: skip
def test_what_is_outside_cannot_be_reached(act, tmp_path):
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        act = act.format(outside=str(tmp_path), parent=os.getpid(), port=listener.getsockname()[1])
        result = run(f"import os, socket, time\n{act}", "", PATIENT)
    assert result.code == 1 and result.stderr.strip().splitlines()[-1].split(":")[0] in (
        "PermissionError", "ProcessLookupError", "FileNotFoundError", "OSError", "MemoryError", "ConnectionRefusedError"
    ), result  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@needs_box
@pytest.mark.parametrize("loop", ["while True: pass", "import time; time.sleep(1000)"])
def test_what_does_not_end_is_ended(loop):
    assert run(loop, "", Limits(wall_s=1.0)).code is None


@needs_box
def test_a_fork_bomb_gets_so_many_processes_and_none_is_left():
    bomb = "import os\nn = 0\ntry:\n  while True:\n    if not os.fork(): __import__('time').sleep(1000)\n    n += 1\n"
    result = run(bomb + "except OSError: print(n)", "", PATIENT)
    assert result.code == 0 and 0 < int(result.stdout) < PATIENT.processes


@needs_box
def test_a_daemon_ends_with_its_box():
    mark = f"daemon-{uuid.uuid4().hex}"
    words = [sys.executable, "-c", "import time; time.sleep(1000)", mark]
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, *{words[1:]!r}], start_new_session=True)"
    result = run(code, "", PATIENT)
    assert result.code == 0 and left(mark) == [], result


@needs_box
def test_output_beyond_its_bound_is_dropped():
    result = run("import sys\nfor _ in range(64): sys.stdout.write('x' * (1 << 20))", "", PATIENT)
    assert result.code == 0 and result.cut and len(result.stdout) == PATIENT.output_bytes


@needs_box
def test_the_code_has_no_environment_and_no_descriptors_of_the_launcher(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "secret")
    writes = "for n in range(3, 64):\n  try: os.write(n, b'{}'); print(n)\n  except OSError: pass"
    assert run(f"import os\nprint(sorted(os.environ))\n{writes}", "", PATIENT).stdout == "['HOME', 'LC_ALL', 'PATH']\n"


@needs_box
def test_boxes_run_side_by_side():
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda n: run(f"print({n} * 2)", "", PATIENT), range(8)))
    assert [result.stdout for result in results] == [f"{2 * n}\n" for n in range(8)]


def test_a_launcher_that_says_nothing_is_a_refusal(monkeypatch, tmp_path):
    broken = tmp_path / "launcher.py"
    broken.write_text("raise SystemExit('no')")
    monkeypatch.setattr(box, "LAUNCHER", broken)
    with pytest.raises(BoxRefused, match="without a word: no"):
        run("print(1)", "", PATIENT)
