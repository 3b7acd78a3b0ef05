"""Keys of a service: who is let in, under which name, and how much may be used under it.

Read by the door; `busrl tinker-key` makes one. Talks to the topology's `[[tinker.key]]` and to the file of the run's
own key. Knows nothing of HTTP or of requests.

- A topology holds the digests of keys alone: whoever reads it learns no key.
- What clients make belongs to the name of their key: a new key under an old name opens all that is there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from busrl.errors import UserError
from busrl.service.bodies import NAME
from busrl.service.registry import RUN
from busrl.topology.schema import Tinker

DIGEST = re.compile("[0-9a-f]{64}")


class Account(NamedTuple):
    """A name that clients work under. `models` and `samples_in_flight` are the most that it may have at a time,
    `tokens_per_day` the most that it may train on and draw in a day of UTC, 0: any number."""

    name: str
    models: int
    samples_in_flight: int
    tokens_per_day: int = 0


class Keys:
    """The accounts of a service by their keys. `key` is the run's own. UserError: a `[[tinker.key]]` is none."""

    def __init__(self, key: str, settings: Tinker) -> None:
        self.secret = hashlib.sha256(f"addresses signed by {key}".encode()).digest()  # as lasting as the run's key
        self._accounts = {digest_of(key): Account(RUN, settings.models, settings.samples_in_flight)}
        for entry in settings.key:
            if not NAME.fullmatch(entry.name) or not DIGEST.fullmatch(entry.digest):
                raise UserError(f"tinker.key.name = {entry.name!r}, digest = {entry.digest!r}: no name and digest of a "
                                "key; `busrl tinker-key NAME` prints the lines")
            names = {account.name for account in self._accounts.values()}
            if entry.name in names or entry.digest in self._accounts:
                raise UserError(f"tinker.key.name = {entry.name!r}: name or digest is another key's ({RUN!r} is the "
                                "run's own); remove this one, or make it anew by `busrl tinker-key NAME`")
            in_flight = entry.samples_in_flight or settings.samples_in_flight
            self._accounts[entry.digest] = Account(entry.name, entry.models, in_flight, entry.tokens_per_day)

    def account(self, key: str) -> Account | None:
        """The account that this key opens; None if it is no key of this service."""
        return self._accounts.get(digest_of(key))


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_of(path: Path) -> str:
    """The key in that file, which is made where it is missing, readable by its owner alone."""
    with contextlib.suppress(FileExistsError):
        _write_new_key(path)
    return path.read_text().strip()


def _write_new_key(path: Path) -> None:
    file_no = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file_no, "w") as file:
        file.write(f"tml-{secrets.token_hex(16)}")  # the SDK sends no key that begins otherwise


# -- the command -----


def key_options(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    parser.add_argument("name", metavar="NAME", help="whose key it is")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the key is written (default: NAME.key)")
    return make_key


def make_key(options: argparse.Namespace) -> int:
    """Write a new key into a file, and print the lines by which a topology knows it."""
    path: Path = options.out or Path(f"{options.name}.key")
    if not NAME.fullmatch(options.name) or options.name == RUN:
        raise UserError(f"{options.name!r} is no name of a key; take 1 to 128 of A-Z, a-z, 0-9, '.', '_', '-', but not "
                        f"{RUN!r}, which is the run's own")
    try:
        _write_new_key(path)
    except FileExistsError:
        raise UserError(f"{path}: it is there, and nothing is overwritten; name another file by --out") from None
    except OSError as problem:
        raise UserError(f"{path}: {problem.strerror}; name another file by --out") from None
    print(f"# {path} holds the key: give it to {options.name} by a way that you trust, as TINKER_API_KEY")
    print(f'[[tinker.key]]\nname = "{options.name}"\ndigest = "{digest_of(path.read_text())}"')
    return 0
