"""CURVE keys of the bus: the broker's pair, the clients' pairs, and the list of clients that may connect.

Talks to one directory of the user; used by the command `busrl keys`, by the check of a topology and by the broker.
Knows nothing of sockets. The files are certificates as CZMQ writes them, so other languages can read them too.

    DIR/server.key                the broker's public key
    DIR/server.key_secret         the broker's pair
    DIR/allowed/NAME.key          public keys that may connect: this directory is the allow-list
    DIR/clients/NAME.key_secret   what client NAME needs: its own pair and the broker's public key

- Directories have mode 0700 and files 0600; keys that others can read are refused, as they may be known already.
- Adding and removing are one rename or unlink each, and a running broker reads the list at every handshake.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from busrl.errors import BadKeys
from busrl.system import files
from busrl.system.private import exposed, private_directory

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85, 32 bytes
FIELD = re.compile(r'^\s*(public-key|secret-key)\s*=\s*"([^"]*)"\s*$')
MAX_FILE_BYTES, MAX_CLIENTS = 4096, 4096


@dataclass(frozen=True)
class Pair:
    """A public and a secret key, 40 characters of Z85 each."""

    public: str
    secret: str


@dataclass(frozen=True)
class ClientKeys:
    """Keys that a process needs to connect: its own pair, and the broker's public key."""

    pair: Pair
    server: str


def default_directory() -> Path:
    """The folder of keys unless the topology or --dir says otherwise."""
    return files.user_folder("XDG_CONFIG_HOME", ".config") / "busrl" / "keys"


def directory_of(setting: str) -> Path:
    """The directory of keys for a value of `bus.keys`; "" is the default one."""
    return Path(setting) if setting else default_directory()


# -- making -----


def init(directory: Path, replace: bool = False) -> Pair:
    """Make the directory and the broker's pair; `replace` makes a new pair where there is one."""
    if (directory / "server.key_secret").exists() and not replace:
        raise BadKeys(
            f"{directory}: there are keys already; `busrl keys add NAME` lets a client in, `busrl keys init --replace` "
            "makes a new pair of the broker, after which every client needs its file again"
        )
    files.make_folder(directory.parent, "name another one with --dir, or as bus.keys in the topology", 0o700)
    for folder in (directory, directory / "allowed", directory / "clients"):
        private_directory(folder, "key directory", "use --dir with a directory of your own")
    pair = _new_pair()
    files.replace(directory / "server.key_secret", _text("the broker of a busrl bus; keep it secret", pair))
    files.replace(directory / "server.key", _text("the broker of a busrl bus", Pair(pair.public, "")))
    for name, public in allowed(directory).items():
        file = client_file(directory, name)
        if file.exists():
            _write_client(file, name, Pair(public, _read(file)["secret-key"]), pair.public)
    return pair


def add(directory: Path, name: str, public: str = "") -> Path | None:
    """Let client `name` in: with a new pair (its file is returned), or with a public key that it made itself."""
    if not NAME.fullmatch(name):
        raise BadKeys(f"client name {name!r}: 1 to 64 letters, digits, dots, dashes or underscores")
    if public and not KEY.fullmatch(public):
        raise BadKeys(f"public key {public!r}: a CURVE key has 40 characters of Z85")
    server, listed = server_pair(directory), allowed(directory)
    if name in listed:
        raise BadKeys(f"{directory}: {name} is allowed already; `busrl keys remove {name}` first to give it a new key")
    if len(listed) >= MAX_CLIENTS:
        raise BadKeys(f"{directory}: {len(listed)} clients are allowed, which is the most there can be")
    pair = Pair(public, "") if public else _new_pair()
    file = client_file(directory, name)
    if not public:
        _write_client(file, name, pair, server.public)
    files.replace(directory / "allowed" / f"{name}.key", _text(f"client {name}", Pair(pair.public, "")))
    return None if public else file


def remove(directory: Path, name: str) -> None:
    """Take a client off the list: it cannot connect again. A connection that it has stays until the broker ends."""
    _check(directory)
    file = directory / "allowed" / f"{name}.key"
    if not NAME.fullmatch(name) or not file.exists():
        names = ", ".join(allowed(directory)) or "nobody"
        raise BadKeys(f"{directory}: no client {name!r} is allowed; there is {names}")
    file.unlink()
    client_file(directory, name).unlink(missing_ok=True)


def client_file(directory: Path, name: str) -> Path:
    return directory / "clients" / f"{name}.key_secret"


def _new_pair() -> Pair:
    import zmq

    public, secret = zmq.curve_keypair()
    return Pair(public.decode(), secret.decode())


def _write_client(file: Path, name: str, pair: Pair, server: str) -> None:
    text = _text(f"client {name} of a busrl bus; keep it secret", pair)
    files.replace(file, text + f'server\n    public-key = "{server}"\n'.encode("ascii"))


def _text(what: str, pair: Pair) -> bytes:
    secret = f'    secret-key = "{pair.secret}"\n' if pair.secret else ""
    return f'# {what}\ncurve\n    public-key = "{pair.public}"\n{secret}'.encode("ascii")


# -- reading -----


def server_pair(directory: Path) -> Pair:
    """The broker's pair; BadKeys says what is missing, broken or open to others."""
    _check(directory)
    fields = _read(directory / "server.key_secret")
    return Pair(fields["public-key"], fields["secret-key"])


def allowed(directory: Path) -> dict[str, str]:
    """Public keys by client name. A broken file admits no client; `broken` names it."""
    return {name: public for name, public in _listed(directory) if KEY.fullmatch(public)}


def broken(directory: Path) -> list[str]:
    """Faults of files of the allow-list, a line each."""
    return [problem for _, problem in _listed(directory) if not KEY.fullmatch(problem)]


def _listed(directory: Path) -> list[tuple[str, str]]:
    """(name, public key or problem) of each file; the directory's rights decide who may write them.

    An OSError of the machine (no descriptor left) is passed on: it says nothing about any key.
    """
    keys_or_problems = []
    folder = directory / "allowed"
    for file in sorted(folder / name for name in os.listdir(folder) if name.endswith(".key"))[:MAX_CLIENTS]:
        try:
            keys_or_problems.append((file.name.removesuffix(".key"), _read(file, ("public-key",))["public-key"]))
        except BadKeys as problem:
            keys_or_problems.append((file.name, str(problem)))
    return keys_or_problems


def load_client(file: Path) -> ClientKeys:
    """The keys in a file that `busrl keys add` made."""
    fields = _read(file)
    text = _open(file).partition("\nserver\n")[2]
    server = _fields(text).get("public-key", "")
    if not KEY.fullmatch(server):
        raise BadKeys(f"{file}: no public key of the broker in it; give the file that `busrl keys add` made")
    return ClientKeys(Pair(fields["public-key"], fields["secret-key"]), server)


def _check(directory: Path) -> None:
    for path in (directory, directory / "allowed", directory / "server.key_secret"):
        if not path.exists():
            raise BadKeys(f"{path} does not exist; make keys with `busrl keys init --dir {directory}`")
    for path in (directory, directory / "allowed", directory / "clients"):
        if path.exists() and (why := exposed(path)):
            raise BadKeys(f"{path}: {why}; `chmod 700 {path}`, and make new keys if anybody may have read these")


def _read(file: Path, wanted: tuple[str, ...] = ("public-key", "secret-key")) -> dict[str, str]:
    """The keys in the first section of a file."""
    fields = _fields(_open(file).partition("\nserver\n")[0])
    for name in wanted:
        if not KEY.fullmatch(fields.get(name, "")):
            raise BadKeys(f"{file}: no {name} of 40 characters of Z85 in it; was it edited? Make the key again")
    return fields


def _open(file: Path) -> str:
    try:
        if file.name.endswith("_secret") and (why := exposed(file)):
            raise BadKeys(f"{file}: {why}; `chmod 600 {file}`, and make a new key if anybody may have read this one")
        with open(file, encoding="ascii", errors="replace") as stream:
            return stream.read(MAX_FILE_BYTES)
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise BadKeys(f"{file}: {error.strerror}; `busrl keys list` shows what there is") from None


def _fields(text: str) -> dict[str, str]:
    return {match[1]: match[2] for line in text.splitlines() if (match := FIELD.match(line))}
