"""Other hosts of a run in tests: `busrl host` on this machine, with a scratch directory, ring and sockets apart."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from harness import ROOT, Run

from busrl import keys


def free_ports() -> int:
    """The first of three ports that nobody listens at."""
    while True:
        taken = [socket.socket() for _ in range(3)]
        try:
            taken[0].bind(("127.0.0.1", 0))
            first = taken[0].getsockname()[1]
            for offset, one in enumerate(taken[1:], 1):
                one.bind(("127.0.0.1", first + offset))
            return int(first)
        except (OSError, OverflowError):
            continue
        finally:
            for one in taken:
                one.close()


class Home(Run):
    """A run whose rollouts are on the hosts `names`; at home there are none."""

    def __init__(self, folder: Path, *settings: str, names: tuple[str, ...] = ("gpu-0",), steps: int = 20) -> None:
        self.endpoint, self.keys = f"tcp://127.0.0.1:{free_ports()}", folder / "keys"
        keys.init(self.keys)
        for name in names:
            keys.add(self.keys, name)
        listed = ", ".join(f'"{name}"' for name in names)
        super().__init__(
            folder / "run", f'bus.endpoint="{self.endpoint}"', f'bus.keys="{self.keys}"',
            f"process.rollout.hosts=[{listed}]", *settings, steps=steps,
        )


class Host(Run):
    """`busrl host` of the run `home`, under `name`, by the key of `key`."""

    def __init__(self, home: Home, name: str = "gpu-0", key: str = "", wait_s: float = 60.0) -> None:
        super().__init__(home.directory.parent / f"scratch-{name}")
        file = keys.client_file(home.keys, key or name)
        self.command = [
            sys.executable, "-m", "busrl.cli", "host", home.endpoint, "--keys", str(file), "--name", name,
            "--scratch", str(self.directory), "--wait", str(wait_s),
        ]

    def start(self, *arguments: str) -> Run:
        self.forget()
        with open(self.output, "ab") as file:
            self.child = subprocess.Popen(
                [*self.command, *arguments], stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=ROOT,
                env={**os.environ, **self.env},
            )
        self.pidfd = os.pidfd_open(self.child.pid)
        return self
