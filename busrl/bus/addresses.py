"""Addresses of the sockets: what may be bound or connected to, and who can reach it.

Talks to the file system only. Knows nothing of messages. The bus trusts every process that can connect, so connecting
must need the user's own rights, or a key that the user has listed.

- An ipc socket lies in a directory of mode 0700 and has mode 0600 from its first instant: the umask is set around bind.
- TCP without keys is refused on every address, loopback too: any user of the machine could connect there.
- A path that does not fit into `sun_path` is refused before libzmq cuts or rejects it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import zmq

from busrl.errors import BadEndpoint, RunInUse
from busrl.system import private

SUN_PATH_BYTES: Final = 107  # sockaddr_un.sun_path has 108, one is the final zero
_TCP: Final = re.compile(r"tcp://(\[[^\]]+\]|[^:\[\]]+):(\d{1,5})")
_LISTENING: Final = "0A"


def check_endpoint(endpoint: str, keys: bool = False) -> None:
    """Refuse an address that cannot work, or would be open to others; `keys`: CURVE will guard it."""
    scheme, mark, rest = endpoint.partition("://")
    if not mark or scheme not in ("ipc", "tcp"):
        raise BadEndpoint(f"bus endpoint {endpoint!r}: it must begin with ipc:// or tcp://")
    if scheme == "ipc":
        _check_path(rest)
        return
    host_and_port(endpoint)
    if not keys:
        raise BadEndpoint(
            f"bus endpoint {endpoint!r}: tcp needs keys, since without them everybody who can reach the address can "
            "connect; make them with `busrl keys init` and `busrl keys add NAME`, or use ipc"
        )


def host_and_port(endpoint: str) -> tuple[str, int]:
    parts = _TCP.fullmatch(endpoint)
    if parts is None or not 1 <= int(parts[2]) <= 65535:
        raise BadEndpoint(f"bus endpoint {endpoint!r}: expected tcp://HOST:PORT, for example tcp://127.0.0.1:5600")
    return parts[1], int(parts[2])


def tcp_pair(endpoint: str) -> tuple[str, str]:
    """Endpoints of publishers and subscribers: the port that was given, and the one after it."""
    host, port = host_and_port(endpoint)
    if port == 65535:
        raise BadEndpoint(f"bus endpoint {endpoint!r}: two ports are used, this one and the next, so 65534 is the last")
    return f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}"


def relay_endpoint(endpoint: str) -> str:
    """The endpoint where other hosts ask for topology, state and weights: the port after the two of the bus."""
    host, port = host_and_port(tcp_pair(endpoint)[1])
    if port == 65535:
        raise BadEndpoint(f"bus endpoint {endpoint!r}: hosts need a third port, so 65533 is the last")
    return f"tcp://{host}:{port + 1}"


def _check_path(path: str) -> None:
    if (length := len(os.fsencode(path))) > SUN_PATH_BYTES:
        raise BadEndpoint(
            f"socket path {path!r} has {length} bytes, the kernel allows {SUN_PATH_BYTES}; set XDG_RUNTIME_DIR to a "
            "shorter directory"
        )
    if not path.startswith("/"):
        raise BadEndpoint(f"socket path {path!r}: it must be absolute, since processes differ in their directory")


def private_directory(path: str | os.PathLike[str]) -> Path:
    """Make (or check) a directory that only this user can enter, and the parent named after the user likewise."""
    directory = Path(path)
    if directory.parent.name.startswith("busrl-"):
        private.private_directory(directory.parent)
    return private.private_directory(directory)


@contextmanager
def private_umask() -> Iterator[None]:
    """Files made inside are for this user alone. The umask is the whole process's: only around bind, before threads."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def prepare(endpoint: str) -> None:
    """Check an address before a bind without keys, and make its directory private."""
    check_endpoint(endpoint)
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        private_directory(Path(rest).parent)


def bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind, so that nobody else can open the socket's file; RunInUse names the holder of an address in use."""
    try:
        with private_umask():
            socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise RunInUse(
                f"bus endpoint {endpoint}: the address is in use by {_holder(endpoint)}; stop that process, or choose "
                "another port in bus.endpoint"
            ) from None
        raise BadEndpoint(f"bus endpoint {endpoint}: it cannot be bound: {error.strerror}") from None


def allow_many_connections() -> None:
    """Raise the process's limit of descriptors: each connection is one, and a flood of them must not reach it soon."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _holder(endpoint: str) -> str:
    """Name the process that listens on a tcp port, as far as /proc shows it to this user."""
    port = host_and_port(endpoint)[1]
    listening = (row for row in tcp_table() if row[3] == _LISTENING)
    inodes = {row[9] for row in listening if int(row[1].rpartition(":")[2], 16) == port}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to look at
            for descriptor in (process / "fd").iterdir():
                if os.readlink(descriptor).removeprefix("socket:").strip("[]") in inodes:
                    title = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    return f"process {process.name} ({title.strip()[:80]})"
    return "a process of another user"


def tcp_table() -> list[list[str]]:
    """The fields of the TCP sockets of this host (proc(5)); none where the kernel shows no table."""
    rows: list[list[str]] = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows += [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return rows
