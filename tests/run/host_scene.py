"""Other hosts of a run in tests: `busrl host` on this machine, with a scratch directory, ring and sockets apart."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from harness import Run

from busrl import curve


def free_ports() -> int:
    """The first of three ports that nobody listens at."""
    while True:
        taken = [socket.socket() for _ in range(3)]
        try:
            taken[0].bind(("127.0.0.1", 0))
            first = taken[0].getsockname()[1]
            for offset, port in enumerate(taken[1:], 1):
                port.bind(("127.0.0.1", first + offset))
            return int(first)
        except (OSError, OverflowError):
            continue
        finally:
            for port in taken:
                port.close()


class Cable:
    """Two network namespaces of this machine and a pair of interfaces between them; `away` has a /dev/shm and a host
    name of its own. Skips the test where the kernel or the user's rights do not give them."""

    home = "10.77.0.1:5600"

    def __init__(self) -> None:
        self.names = [f"busrl{os.getpid()}{end}" for end in "ab"]
        inside = 'mount -t tmpfs t /dev/shm && hostname gpu-0 && exec "$@"'
        self.at_home: tuple[str, ...] = ("ip", "netns", "exec", self.names[0])
        self.away: tuple[str, ...] = (
            "ip", "netns", "exec", self.names[1], "unshare", "--mount", "--uts", "sh", "-c", inside, "sh",
        )

    def __enter__(self) -> Cable:
        try:
            self._lay()
        except (OSError, subprocess.CalledProcessError) as problem:
            self.__exit__()
            pytest.skip(f"no network namespaces here, which need ip and the rights of root: {problem}")
        return self

    def _lay(self) -> None:
        first, other = self.names
        for name in self.names:
            _ip("netns", "add", name)
        _ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other)
        for name, address in ((first, "10.77.0.1/24"), (other, "10.77.0.2/24")):
            _ip("-n", name, "addr", "add", address, "dev", "cable")
            for link in ("lo", "cable"):
                _ip("-n", name, "link", "set", link, "up")
        subprocess.run([*self.away, "true"], check=True, capture_output=True)

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def plug(self, state: str) -> None:
        """Pull the cable ("down"), or put it back ("up")."""
        _ip("-n", self.names[0], "link", "set", "cable", state)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Home(Run):
    """A run whose rollouts are on the hosts `names`, and none at home; or, with `ranks`, a learner of so many, which
    are at home and on the hosts; or, if `placed`, what the configuration itself says."""

    def __init__(
        self, folder: Path, *settings: str, names: tuple[str, ...] = ("gpu-0",), steps: int = 20,
        cable: Cable | None = None, config: Path | None = None, placed: bool = False, ranks: int = 0,
    ) -> None:
        address = cable.home if cable else f"127.0.0.1:{free_ports()}"
        self.endpoint, self.keys = f"tcp://{address}", folder / "keys"
        self.prefix = cable.at_home if cable else ()
        curve.init(self.keys)
        for name in names:
            curve.add(self.keys, name)
        listed, role = ", ".join(f'"{name}"' for name in names), "learner" if ranks else "rollout"
        settings = (f"process.learner.ranks={ranks}", *settings) if ranks else settings
        super().__init__(
            folder / "run", f'bus.endpoint="{self.endpoint}"', f'bus.keys="{self.keys}"',
            *([] if placed else [f"process.{role}.hosts=[{listed}]"]), *settings, steps=steps, config=config,
        )


class Host(Run):
    """`busrl host` of the run `home`, under `name`, by the key of `key`."""

    def __init__(
        self, home: Home, name: str = "gpu-0", key: str = "", wait_s: float = 60.0, cable: Cable | None = None,
        place: str = "",
    ) -> None:
        super().__init__(home.directory.parent / (place or f"scratch-{name}"))
        self.prefix = cable.away if cable else ()
        self.words = [
            "host", home.endpoint, "--keys", str(curve.client_file(home.keys, key or name)), "--name", name,
            "--scratch", str(self.directory), "--wait", str(wait_s),
        ]

    def command(self) -> list[str]:
        return self.words
