"""What children of a template do in tests, and, run as a program, an owner that has one."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import resource
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from busrl.system.template import OPENBLAS, SET_OPENBLAS, Template


def returns(_: Sequence[int], code: int) -> int:
    return code


def raises(_: Sequence[int]) -> int:
    raise ValueError("on purpose")


class Torn:
    """An object that writes a line when the interpreter takes it apart."""

    def __del__(self) -> None:
        os.write(2, b"torn down\n")


def leaves_things_undone(_: Sequence[int], folder: str) -> int:
    """Ends with a thread that runs, an exit handler, and text in a file that nobody closes."""
    begun = threading.Event()

    def writes_late() -> None:
        begun.wait()
        Path(folder, "thread").write_text("done")

    threading.Thread(target=writes_late).start()
    atexit.register(lambda: Path(folder, "handler").write_text("done"))
    sys.modules["kept"] = SimpleNamespace(torn=Torn(), file=open(Path(folder, "file"), "w"))  # type: ignore[assignment]  # noqa: SIM115
    sys.modules["kept"].file.write("done")
    print("said last")
    begun.set()
    return 3


def kills_itself(_: Sequence[int]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def sleeps(_: Sequence[int]) -> int:
    signal.pause()
    return 0


def describes_itself(descriptors: Sequence[int], text: str, number: int) -> int:
    print("said by the child", flush=True)
    cores = os.sched_getaffinity(0)
    facts = f"MINE={os.environ['MINE']} parent={os.getppid()} session={os.getsid(0)} cores={cores}"
    os.write(descriptors[0], f"{text} {number} {facts}".encode())
    return 0


def imports_numpy() -> None:
    import numpy.random  # noqa: F401  # `import numpy` leaves it to its first use


def draws(descriptors: Sequence[int]) -> int:
    import numpy as np

    os.write(descriptors[0], f"{random.random()} {np.random.random()} ".encode())
    return 0


def imports_nothing_there() -> None:
    import no_such_module  # noqa: F401


def starts_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def imports_numpy_and_torch() -> None:
    import numpy  # noqa: F401
    import torch  # noqa: F401


def counts_threads(descriptors: Sequence[int]) -> int:
    import torch

    with open("/proc/self/maps") as file:
        library = ctypes.CDLL(OPENBLAS.findall(file.read())[0])
    name = next(name.replace("_set_", "_get_") for name in SET_OPENBLAS if hasattr(library, name))
    os.write(descriptors[0], f"torch {torch.get_num_threads()} numpy {getattr(library, name)()}".encode())
    return 0


def answers_unasked() -> None:
    connection = socket.fromfd(int(sys.argv[-1]), socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.send(b"{}")


def starts_a_driver() -> None:
    own_pid = os.getpid()
    cuda = SimpleNamespace(is_initialized=lambda: False, _is_in_bad_fork=lambda: os.getpid() != own_pid)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # type: ignore[assignment]


def forbids_processes() -> None:
    os.setresuid(65534, 65534, 65534) if os.getuid() == 0 else None  # root has no such limit
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def leaves_an_orphan(descriptors: Sequence[int]) -> int:
    orphan = os.fork()
    if orphan == 0:
        os.close(descriptors[0])
        signal.pause()
    os.write(descriptors[0], str(orphan).encode())
    return 0


def main() -> None:
    template = Template([sys.executable, "-m", "busrl.system.template"], os.environ, 2)
    child = template.fork("template_children:sleeps", [], os.environ, [2], [], 60.0)
    print(template.pid, child, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
