"""The program that makes a box and runs one command in it:
`python -I -S launcher.py FILES_FD STATUS_FD PARENT_PID NAME=VALUE...`

Started by `boxes` alone, which describes the box. Imports nothing of busrl, and of the standard library
only modules that load fast: `json` or `signal` would take as long as Python's own start. Three processes: this one
outside, process 1 of the new namespace, and the command below it. With the single word `parts` it prints which parts of
a box this kernel grants. Machines: x86-64 and aarch64, little-endian.

- FILES_FD holds the files of the command, one behind the other; `file=NAME=BYTES` gives their names and sizes.
- STATUS_FD is closed before the command begins: the command cannot write how it ended. Lines go there: `started` when
  the command begins, `code N` when it has ended, or `refused` and the reason.
- A step that the kernel refuses ends the launcher with that line; the command is then never started.
- A box with `trust` has a folder for the command and limits on its resources, and no other part.
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

# -- what the kernel does without counting it among a process's limits, or outside of namespaces ----------------------

SET_SECCOMP, BY_FILTER = 22, 2  # of prctl
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_..., and the column of numbers below
NEWEST_CALL = 462  # mseal, Linux 6.10; later ones are unknown here, and those of x32 lie far above
EPERM, EACCES, EFAULT, ENOSYS = 1, 13, 14, 38
REFUSED = {
    # Memory that no limit of a process counts: segments, queues, memory files, pages and buffers that a descriptor
    # holds, rules, watches and keys. Of io_uring and clone3 a filter cannot see what is asked for.
    ENOSYS: """
        shmget 29 194, shmat 30 196, msgget 68 186, semget 64 190, mq_open 240 180, memfd_create 319 279,
        memfd_secret 447 447, vmsplice 278 75, splice 275 76, tee 276 77, io_setup 206 0, io_uring_setup 425 425,
        inotify_init 253 -, inotify_init1 294 26, fanotify_init 300 262, add_key 248 217, request_key 249 218,
        keyctl 250 219, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, landlock_create_ruleset 444 444,
        clone3 435 435""",
    # A namespace inside the box, with every right in it; other processes' memory and descriptors; pipes of 1 MB.
    EPERM: """
        unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, open_tree 428 428,
        move_mount 429 429, fsopen 430 430, fsmount 432 432, fspick 433 433, mount_setattr 442 442, ptrace 101 117,
        process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_getfd 438 438,
        process_madvise 440 440, open_by_handle_at 304 265, setsockopt 54 208""",
    # A family of sockets that has no namespace (AF_VSOCK), or that a file's name leads out of the box (AF_UNIX).
    EACCES: "socket 41 198, connect 42 203, bind 49 200",
}
CLONE, SOCKETPAIR, FCNTL = (56, 220), (53, 199), (72, 25)
NAMESPACES = 0x7E020000  # of clone's flags
UNIX, STREAM, SEQPACKET, SET_PIPE_SIZE = 1, 1, 5, 1031

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
    """The box that the NAME=VALUE words describe, with the contents of its files."""
    values: dict[str, list[str]] = {}
    for word in words:
        name, _, value = word.partition("=")
        values.setdefault(name, []).append(value)
    limits, files = (dict(value.split("=") for value in values[name]) for name in ("limit", "file"))
    with open(files_fd, "rb") as file:
        contents = {name: file.read(int(size)) for name, size in files.items()}
    single = {name: values[name][0] for name in ("python_home", "library", "trust", "folder_bytes", "folder_files")}
    more = {"command": values["command"], "readable": values["readable"], "limits": limits, "files": contents}
    return {**single, **more}


def tell(status_fd: int, what: str) -> None:
    os.write(status_fd, what.replace("\n", " ").encode(errors="replace") + b"\n")


def parts() -> dict[str, str]:
    """Each part of a box, and the kernel's answer for this user: `yes`, a version, or the refusal."""
    kinds = {"user": NEW_USER, "PID": NEW_PID, "mount": NEW_MOUNT, "network": NEW_NET, "IPC": NEW_IPC}
    answers = {f"{name} namespace": _tried(NEW_USER | flag) for name, flag in kinds.items()}
    version = libc.syscall(RULESET, None, 0, 1)
    answers["Landlock"] = f"version {version}" if version > 0 else f"no ({os.strerror(ctypes.get_errno())})"
    if version < LEAST_LANDLOCK:
        answers["Landlock"] += f", version {LEAST_LANDLOCK} (Linux 6.12) is needed"
    answers["seccomp"] = no_filter() or "yes"
    return answers


def no_filter() -> str:
    """The reason why system calls cannot be filtered; empty where they can."""
    if (machine := os.uname().machine) not in MACHINES:
        return f"no (the numbers of system calls are known for {' and '.join(MACHINES)}; this is {machine})"
    libc.prctl(SET_SECCOMP, BY_FILTER, None, 0, 0)  # a kernel that has filters misses this one's address
    return "" if ctypes.get_errno() == EFAULT else f"no ({os.strerror(ctypes.get_errno())})"


def _tried(flags: int) -> str:
    """The outcome of making such namespaces, in a process of its own."""
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
    with open(read, "rb") as outcome:
        text = outcome.read().decode()
    os.waitpid(pid, 0)
    return text or "no"


def leave_root(python_home: str) -> None:
    """Become NOBODY if this is root: the kernel does not count root's processes, and root owns /etc/shadow. Python may
    lie where only root may read, so MOUNTED shows it to the box, in a mount namespace that ends with the box."""
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
        if not spec["trust"]:  # a trusted command stays in the launcher's group, by which it is ended

            os.setsid()
        folder = spec["trust"] or FOLDER
        os.chdir(folder)
        for name, most in spec["limits"].items():
            resource.setrlimit(getattr(resource, name), (int(most), int(most)))
        checked(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        if not spec["trust"]:
            hold_files(spec["readable"])
            hold_calls()
        os.closerange(3, problems)
        os.closerange(problems + 1, 1 << 16)
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "LC_ALL": "C.UTF-8"}
        if spec["library"]:
            environment["LD_LIBRARY_PATH"] = spec["library"]
        os.execve(spec["command"][0], spec["command"], environment)
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


def hold_calls() -> None:
    """seccomp, last of all: from here on the kernel refuses the calls above to this process and its children."""
    if refused := no_filter():
        raise OSError(f"seccomp: {refused}")
    program = filter_of_calls(*MACHINES[os.uname().machine])
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    checked(libc.prctl(SET_SECCOMP, BY_FILTER, header, 0, 0), "seccomp")


def filter_of_calls(machine: int, column: int) -> bytes:
    """The filter, in instructions of classic BPF: a call has its number at 0, its machine at 4, arguments from 16."""
    number, kind, first, second = (pack_step(0x20, at) for at in (0, 4, 16, 24))
    allow, end = pack_step(0x06, 0x7FFF0000), pack_step(0x06, 0x80000000)
    refuse = {code: pack_step(0x06, 0x50000 | code) for code in REFUSED}
    steps = [kind, pack_step(0x15, machine, 1, 0), end, number, pack_step(0x25, NEWEST_CALL, 0, 1), refuse[ENOSYS]]
    for code, text in REFUSED.items():
        for call in text.split(","):
            if (listed := call.split()[1 + column]) != "-":
                steps += [pack_step(0x15, int(listed), 0, 1), refuse[code]]
    steps += [pack_step(0x15, CLONE[column], 0, 4), first, pack_step(0x45, NAMESPACES, 0, 1), refuse[EPERM], allow]
    steps += [pack_step(0x15, FCNTL[column], 0, 4), second, pack_step(0x15, SET_PIPE_SIZE, 0, 1), refuse[EPERM], allow]
    steps += [pack_step(0x15, SOCKETPAIR[column], 0, 7), first, pack_step(0x15, UNIX, 0, 4), second]
    steps += [pack_step(0x54, 0xF), pack_step(0x15, STREAM, 2, 0), pack_step(0x15, SEQPACKET, 1, 0)]
    steps += [refuse[EACCES], allow]
    return b"".join(steps)


def pack_step(code: int, value: int, where_true: int = 0, where_false: int = 0) -> bytes:
    """An instruction: 0x20 loads, 0x54 masks, 0x06 returns; 0x15, 0x25 and 0x45 skip `where_true` or `where_false`
    instructions, by whether the loaded value is equal to `value`, is greater, or has its bits."""
    return struct.pack("=HBBI", code, where_true, where_false, value)


if __name__ == "__main__":
    sys.exit(main())
