"""The program that makes a box and runs one command in it: `python -I -S box_launcher.py SPEC_FD STATUS_FD PARENT_PID`.

Started by `busrl.rewards.box` alone, which describes the box. Stands alone: it imports the standard library and nothing
of busrl. Three processes: this one outside, process 1 of the new namespace, and the command below it.

- STATUS_FD is closed before the command begins: the command cannot write how it ended.
- A step that the kernel refuses ends the launcher with one line on STATUS_FD; the command is then never started.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

NEW_MOUNT, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
PDEATHSIG, SET_DUMPABLE, NO_NEW_PRIVS = 1, 4, 38  # of prctl
RULESET, ADD_RULE, RESTRICT = 444, 445, 446  # Landlock's system calls, the same number on every architecture
EVERY_FILE_ACCESS, EVERY_TCP, EVERY_SCOPE = (1 << 16) - 1, 3, 3  # scope: abstract sockets and signals
READ_FILE, READ_TREE = 1 << 2, 1 << 0 | 1 << 2 | 1 << 3
WRITE_TREE = 1 << 1 | READ_FILE | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 12 | 1 << 14
NOBODY, FOLDER, MOUNTED = 65534, "/tmp", "/mnt"
BIND, RECURSIVE, PRIVATE = 1 << 12, 1 << 14, 1 << 18  # of mount
LEAST_LANDLOCK = 6  # the first that holds signals back

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def main() -> int:
    spec_fd, status_fd, parent = (int(word) for word in sys.argv[1:4])
    try:
        with open(spec_fd, "rb") as file:
            spec = json.load(file)
        leave_root(spec["python_home"])
        enter_namespaces()
        checked(libc.prctl(PDEATHSIG, signal.SIGKILL), "prctl")
        if os.getppid() != parent:
            return 1
        first = os.fork()
        if first == 0:
            first_process(spec, status_fd)
        os.waitpid(first, 0)
    except OSError as problem:
        tell(status_fd, {"refused": str(problem)})
    return 0


def tell(status_fd: int, what: dict[str, Any]) -> None:
    os.write(status_fd, json.dumps(what).encode())


def leave_root(python_home: str) -> None:
    """The kernel does not count the processes of root, and root owns /etc/shadow. Python may lie where only root may
    look: MOUNTED shows it to the box, in a mount namespace that ends with it."""
    if os.getuid() == 0:
        checked(libc.unshare(NEW_MOUNT), "mount namespace")
        checked(libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None), "private mounts")
        checked(libc.mount(python_home.encode(), MOUNTED.encode(), None, RECURSIVE | BIND, None), f"bind {MOUNTED}")
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        checked(libc.prctl(SET_DUMPABLE, 1), "prctl")  # else /proc/self/uid_map stays root's


def enter_namespaces() -> None:
    user, group = os.getuid(), os.getgid()
    checked(libc.unshare(NEW_USER | NEW_MOUNT | NEW_IPC | NEW_PID | NEW_NET), "namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def first_process(spec: dict[str, Any], status_fd: int) -> None:
    """Process 1 of the box: when it ends, the kernel ends all others in there. Never returns."""
    try:
        checked(libc.prctl(PDEATHSIG, signal.SIGKILL), "prctl")
        room = f"size={spec['folder_bytes']},nr_inodes={spec['folder_files']}".encode()
        checked(libc.mount(b"box", FOLDER.encode(), b"tmpfs", 6, room), "tmpfs")  # 6: no devices, no set-user-id
        for name, text in spec["files"].items():
            with open(os.path.join(FOLDER, name), "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        check_read, check_write = os.pipe()
        command = os.fork()
        if command == 0:
            run_command(spec, check_write)
        os.close(check_write)
        with open(check_read, "rb") as problems:
            problem = problems.read().decode(errors="replace")  # ends where the command begins
        while True:
            pid, status = os.wait()
            if pid == command:
                break
        tell(status_fd, {"refused": problem} if problem else {"code": os.waitstatus_to_exitcode(status)})
    except OSError as problem_here:
        tell(status_fd, {"refused": str(problem_here)})
    finally:
        os._exit(0)


def run_command(spec: dict[str, Any], problems: int) -> None:
    """Become the command; what the kernel refuses goes to `problems`, which exec closes. Never returns."""
    try:
        os.setsid()
        os.chdir(FOLDER)
        for name, most in spec["limits"].items():
            resource.setrlimit(getattr(resource, name), (most, most))
        checked(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        hold_files(spec["readable"])
        os.closerange(3, problems)
        os.closerange(problems + 1, 1 << 16)
        os.execve(spec["command"][0], spec["command"], {"PATH": "/usr/bin:/bin", "HOME": FOLDER, "LC_ALL": "C.UTF-8"})
    except OSError as problem:
        os.write(problems, str(problem).encode())
    finally:
        os._exit(1)


def hold_files(readable: list[str]) -> None:
    """Landlock: reads below `readable`, writes below FOLDER, no TCP, no signals to the outside."""
    version = checked(libc.syscall(RULESET, None, 0, 1), "landlock")
    if version < LEAST_LANDLOCK:
        raise OSError(f"landlock: the kernel has version {version}, version {LEAST_LANDLOCK} is needed")
    rules = struct.pack("QQQ", EVERY_FILE_ACCESS, EVERY_TCP, EVERY_SCOPE)
    ruleset = checked(libc.syscall(RULESET, rules, len(rules), 0), "landlock")
    allowed = [(path, READ_TREE if os.path.isdir(path) else READ_FILE) for path in readable if os.path.exists(path)]
    for path, access in [*allowed, (FOLDER, WRITE_TREE), ("/dev/null", READ_FILE | 1 << 1)]:
        opened = os.open(path, os.O_PATH)
        checked(libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", access, opened), 0), f"landlock: {path}")
        os.close(opened)
    checked(libc.syscall(RESTRICT, ruleset, 0), "landlock")


if __name__ == "__main__":
    sys.exit(main())
