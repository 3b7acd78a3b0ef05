"""Addresses and directories of the sockets: what may be bound, and who can reach it.

Talks to the file system only; knows nothing of messages. The bus trusts whoever can connect, so reaching it must need
the user's own rights.

- A socket directory belongs to this user and has mode 0700; one that belongs to somebody else is refused, never used.
- The umask is 077 around bind, so that there is no instant at which the socket file is open to others.
- A path that does not fit into `sun_path` is refused before libzmq cuts or rejects it.
- TCP is accepted on loopback only, as there is no authentication on it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from busrl.errors import BadEndpoint, InsecureDirectory

SUN_PATH_BYTES: Final = 107  # sockaddr_un.sun_path has 108, one is the final zero
_LOOPBACK: Final = re.compile(r"(127(\.\d{1,3}){3}|localhost|\[::1\]):\d+")


def check_endpoint(endpoint: str) -> None:
    """Refuse an address that can not work or would be open to others."""
    scheme, mark, rest = endpoint.partition("://")
    if not mark or scheme not in ("ipc", "tcp"):
        raise BadEndpoint(f"bus endpoint {endpoint!r}: it must begin with ipc:// or tcp://")
    if scheme == "ipc":
        _check_path(rest)
    elif not _LOOPBACK.fullmatch(rest):
        raise BadEndpoint(
            f"bus endpoint {endpoint!r}: tcp is accepted on loopback only (127.0.0.1:PORT, localhost:PORT, "
            "[::1]:PORT), since nothing authenticates a peer there; use ipc"
        )


def _check_path(path: str) -> None:
    length = len(os.fsencode(path))
    if length > SUN_PATH_BYTES:
        raise BadEndpoint(
            f"socket path {path!r} has {length} bytes, the kernel allows {SUN_PATH_BYTES}; set XDG_RUNTIME_DIR to a "
            "shorter directory"
        )
    if not path.startswith("/"):
        raise BadEndpoint(f"socket path {path!r}: it must be absolute, since processes differ in their directory")


def private_directory(path: str | os.PathLike[str]) -> Path:
    """Make (or check) a directory that only this user can enter, and the parent named after the user likewise."""
    made = Path(path)
    if made.parent.name.startswith("busrl-"):
        _make_private(made.parent)
    _make_private(made)
    return made


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise InsecureDirectory(
            f"socket directory {path}: {path.parent} does not exist; create it, or set XDG_RUNTIME_DIR"
        ) from None
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise InsecureDirectory(
            f"socket directory {path} belongs to user {info.st_uid} or is no directory; it must be a directory of user "
            f"{os.getuid()}: remove it, or set XDG_RUNTIME_DIR to a directory of your own"
        )
    if info.st_mode & 0o077:
        path.chmod(0o700)


@contextmanager
def private_umask() -> Iterator[None]:
    """Files made inside are for this user alone. The umask is the whole process's: only around bind, before threads."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def prepare(endpoint: str) -> None:
    """Everything before a bind: the address is sound and its directory is private."""
    check_endpoint(endpoint)
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        private_directory(Path(rest).parent)
