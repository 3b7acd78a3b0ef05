"""The program that makes a box and runs one command in it:
`python -I -S box_launcher.py FILES_FD STATUS_FD PARENT_PID NAME=VALUE...`

Started by `busrl.rewards.box` alone, which describes the box. Stands alone: it imports nothing of busrl, and of the
standard library only what is quick: `json` or `signal` would take as long as Python's own start. Three processes: this
one outside, process 1 of the new namespace, and the command below it. With the word `parts` alone it prints what of a
box this kernel has.

- FILES_FD holds the files of the command, one behind the other; `file=NAME=BYTES` says which they are.
- STATUS_FD is closed before the command begins: the command cannot write how it ended. Lines go there: `started` when
  the command begins, `code N` when it has ended, or `refused` and why.
- A step that the kernel refuses ends the launcher with that line; the command is then never started.
- A spec with `trust` has a folder for the command and limits on its resources, and nothing else of a box.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # that of `typing`, whose import takes as long as the rest
if TYPE_CHECKING:
    from typing import Any

NEW_MOUNT, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
PDEATHSIG, SET_DUMPABLE, NO_NEW_PRIVS, SIGKILL = 1, 4, 38, 9  # of prctl; and the signal
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
    if sys.argv[1:] == ["parts"]:
        print(", ".join(f"{name}: {what}" for name, what in parts().items()))
        return 0
    files_fd, status_fd, parent = (int(word) for word in sys.argv[1:4])
    try:
        spec = described(sys.argv[4:], files_fd)
        if not spec["trust"]:
            leave_root(spec["python_home"])
            enter_namespaces()
        checked(libc.prctl(PDEATHSIG, SIGKILL), "prctl")
        if os.getppid() != parent:
            return 1
        first = os.fork()
        if first == 0:
            first_process(spec, status_fd)
        os.waitpid(first, 0)
    except OSError as problem:
        tell(status_fd, f"refused {problem}")
    return 0


def described(words: list[str], files_fd: int) -> dict[str, Any]:
    given: dict[str, list[str]] = {}
    for word in words:
        name, _, value = word.partition("=")
        given.setdefault(name, []).append(value)
    limits, files = (dict(one.split("=") for one in given[name]) for name in ("limit", "file"))
    with open(files_fd, "rb") as file:
        held = {name: file.read(int(size)) for name, size in files.items()}
    single = {name: given[name][0] for name in ("python_home", "trust", "folder_bytes", "folder_files")}
    return {**single, "command": given["command"], "readable": given["readable"], "limits": limits, "files": held}


def tell(status_fd: int, what: str) -> None:
    os.write(status_fd, what.replace("\n", " ").encode(errors="replace") + b"\n")


def parts() -> dict[str, str]:
    """Each part of a box, and what the kernel says to this user about it: `yes`, a version, or the refusal."""
    kinds = {"user": NEW_USER, "PID": NEW_PID, "mount": NEW_MOUNT, "network": NEW_NET, "IPC": NEW_IPC}
    found = {f"{name} namespace": _tried(NEW_USER | flag) for name, flag in kinds.items()}
    version = libc.syscall(RULESET, None, 0, 1)
    found["Landlock"] = f"version {version}" if version > 0 else f"no ({os.strerror(ctypes.get_errno())})"
    if version < LEAST_LANDLOCK:
        found["Landlock"] += f", version {LEAST_LANDLOCK} (Linux 6.12) is needed"
    return found


def _tried(flags: int) -> str:
    """What becomes of such namespaces in a process of its own."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if os.getuid() == 0:
                os.setresuid(NOBODY, NOBODY, NOBODY)
            checked(libc.unshare(flags), "no")
            os.write(write, b"yes")
        except OSError as problem:
            os.write(write, str(problem).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as said:
        text = said.read().decode()
    os.waitpid(pid, 0)
    return text or "no"


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
        checked(libc.prctl(PDEATHSIG, SIGKILL), "prctl")
        folder = spec["trust"] or FOLDER
        if not spec["trust"]:
            room = f"size={spec['folder_bytes']},nr_inodes={spec['folder_files']}".encode()
            checked(libc.mount(b"box", FOLDER.encode(), b"tmpfs", 6, room), "tmpfs")  # 6: no devices, no set-user-id
        for name, content in spec["files"].items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)
        check_read, check_write = os.pipe()
        command = os.fork()
        if command == 0:
            run_command(spec, check_write)
        os.close(check_write)
        with open(check_read, "rb") as problems:
            problem = problems.read().decode(errors="replace")  # ends where the command begins
        if not problem:
            tell(status_fd, "started")
        while True:
            pid, status = os.wait()
            if pid == command:
                break
        tell(status_fd, f"refused {problem}" if problem else f"code {os.waitstatus_to_exitcode(status)}")
    except OSError as problem_here:
        tell(status_fd, f"refused {problem_here}")
    finally:
        os._exit(0)


def run_command(spec: dict[str, Any], problems: int) -> None:
    """Become the command; what the kernel refuses goes to `problems`, which exec closes. Never returns."""
    try:
        if not spec["trust"]:  # which has no other end than that of its group
            os.setsid()
        folder = spec["trust"] or FOLDER
        os.chdir(folder)
        for name, most in spec["limits"].items():
            resource.setrlimit(getattr(resource, name), (int(most), int(most)))
        checked(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        if not spec["trust"]:
            hold_files(spec["readable"])
        os.closerange(3, problems)
        os.closerange(problems + 1, 1 << 16)
        os.execve(spec["command"][0], spec["command"], {"PATH": "/usr/bin:/bin", "HOME": folder, "LC_ALL": "C.UTF-8"})
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
