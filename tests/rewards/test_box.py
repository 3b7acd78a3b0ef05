"""Hostile programs in a box: none reaches what is outside, none outlives its run."""

import contextlib
import os
import signal
import socket
import sys
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from busrl.rewards.box import BoxRefused, Limits, boxes, launcher, run

REFUSAL = boxes.refusal()
needs_box = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
PATIENT = Limits(wall_s=60.0)


def left(mark):
    """Processes of this machine with a word in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            pids += [path.parent.name] * (mark.encode() in path.read_bytes())
    return pids


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
    printed = run(f"import os\nprint(sorted({{*os.environ}} - {{'LD_LIBRARY_PATH'}}))\n{writes}", "", PATIENT).stdout
    assert printed == "['HOME', 'LC_ALL', 'PATH']\n"


@needs_box
def test_a_box_has_the_python_of_this_process_with_its_library():
    result = run("import sys, ssl, multiprocessing; print(sys.version)", "", PATIENT)
    assert result.stdout == f"{sys.version}\n", result


REFUSED_CALLS = {  # memory that no limit of a process counts, or rights of a namespace made inside
    "shmget": "c.shmget(0, 4096, 0o1600)", "msgget": "c.msgget(0, 0o1600)", "semget": "c.semget(0, 1, 0o1600)",
    "memfd_create": "c.memfd_create(b'a', 0)", "vmsplice": "c.vmsplice(os.pipe()[1], None, 0, 0)",
    "splice": "c.splice(0, None, 1, None, 0, 0)", "mq_open": "c.mq_open(b'/a', 0o102, 0o600, None)",
    "inotify": "c.inotify_init1(0)", "Landlock rules": "c.syscall(444, struct.pack('QQ', 0, 3), 16, 0)",
    "io_uring": "c.syscall(425, 4, b'\\0' * 120)", "namespaces": "c.unshare(0x10000000)",
    "clone": "c.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0)",
    "fsopen": "c.syscall(430, b'tmpfs', 0)", "socket buffers": "pair[0].setsockopt(1, 7, 1 << 30)",
    "pipes": "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)", "datagrams": "socket.socketpair(type=socket.SOCK_DGRAM)",
    "processes": "c.process_vm_readv(1, None, 0, None, 0, 0)",
}


@needs_box
@pytest.mark.parametrize("call", list(REFUSED_CALLS))
def test_calls_past_every_limit_are_refused(call):
    code = (
        "import ctypes, errno, fcntl, os, socket, struct\n"
        "c, pair = ctypes.CDLL(None, use_errno=True), socket.socketpair()\n"
        f"try:\n  result = {REFUSED_CALLS[call]}\n  number = ctypes.get_errno() if result == -1 else 0\n"
        "except OSError as problem: number = problem.errno\n"
        "print(errno.errorcode.get(number, f'done: {number}'))"
    )
    assert run(code, "", PATIENT).stdout.strip() in ("ENOSYS", "EPERM", "EACCES")


@needs_box
def test_no_family_of_sockets_is_there_but_connected_pairs():
    families = (
        "import socket\nfor name in sorted(dir(socket)):\n"
        "  for kind in (1, 2, 3, 5) if name.startswith('AF_') else ():\n"
        "    try: socket.socket(getattr(socket, name), kind); print(name)\n    except OSError: pass\n"
        "print([len(socket.socketpair(type=kind)) for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)])"
    )
    assert run(families, "", PATIENT).stdout == "[2, 2]\n"


@needs_box
def test_a_socket_of_this_user_outside_is_not_reached_by_its_name():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        os.chmod(folder, 0o755)  # /tmp of the box is its own; this place has the same name inside
        listener.bind(name := f"{folder}/door")
        os.chmod(name, 0o777)
        listener.listen()
        result = run(f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})", "", PATIENT)
    assert result.code == 1 and "PermissionError" in result.stderr, result


@needs_box
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the other calling conventions are those of x86-64")
def test_calls_by_another_convention_are_no_way_around():
    assert run("import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.syscall(0x40000000 | 41, 1, 1, 0))", "",
               PATIENT).stdout == "-1\n"  # fmt: skip
    by_gate = (  # mov eax, 359 (socketpair of i386); int 0x80; ret
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b867010000cd80c3'))\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())"
    )
    result = run(by_gate, "", PATIENT)
    assert (result.code, result.stdout) == (-signal.SIGSYS, ""), result


@needs_box
def test_ordinary_programs_run_under_the_filter():
    ordinary = (
        "import asyncio, concurrent.futures, ctypes, mmap, multiprocessing, shutil, sqlite3, subprocess, tempfile\n"
        "async def echo():\n"
        "  child = await asyncio.create_subprocess_exec('/bin/echo', 'async', stdout=-1)\n"
        "  return (await child.communicate())[0].decode().strip()\n"
        "def work(end): end.send('child'); end.close()\n"
        "print(asyncio.run(echo()), subprocess.run('echo shell | cat', shell=True, capture_output=True).stdout)\n"
        "context = multiprocessing.get_context('fork'); ours, theirs = context.Pipe()\n"
        "child = context.Process(target=work, args=(theirs,)); child.start(); print(ours.recv()); child.join()\n"
        "print(list(concurrent.futures.ThreadPoolExecutor(2).map(abs, [-1])))\n"
        "base = sqlite3.connect('base'); base.execute('create table t(a)'); base.commit()\n"
        "kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int); print(kind(lambda n: n + 1)(3))\n"
        "shutil.copy('base', 'copy'); tempfile.TemporaryFile().write(b'x'); mmap.mmap(-1, 1 << 20)[0] = 1\n"
    )
    result = run(ordinary, "", PATIENT)
    assert (result.code, result.stdout) == (0, "async b'shell\\n'\nchild\n[1]\n4\n"), result


def test_a_machine_without_the_filter_is_named(monkeypatch):
    monkeypatch.setattr(launcher.os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    assert "x86_64 and aarch64; this is riscv64" in launcher.parts()["seccomp"]
    with pytest.raises(OSError, match=r"seccomp: .*riscv64"):
        launcher.hold_calls()


@needs_box
def test_boxes_run_side_by_side():
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda n: run(f"print({n} * 2)", "", PATIENT), range(8)))
    assert [result.stdout for result in results] == [f"{2 * n}\n" for n in range(8)]


def test_a_launcher_that_says_nothing_is_a_refusal(monkeypatch, tmp_path):
    broken = tmp_path / "launcher.py"
    broken.write_text("raise SystemExit('no')")
    monkeypatch.setattr(boxes, "LAUNCHER", broken)
    with pytest.raises(BoxRefused, match="without a word: no"):
        run("print(1)", "", PATIENT)
