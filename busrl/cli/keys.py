"""`busrl keys init | add | list | show | remove | try`: who may reach the bus over TCP.

Talks to the key directory (`busrl.curve`), and with `try` to a broker. Knows nothing of runs: a running broker reads
the list at every handshake.

- A secret is never printed: `show` prints public keys and the places of files.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from busrl import curve
from busrl.errors import BadKeys, BusNotReady


def _directory(options: argparse.Namespace) -> Path:
    return Path(options.dir).absolute() if options.dir else curve.default_directory()


def init(options: argparse.Namespace) -> int:
    directory = _directory(options)
    pair = curve.init(directory, options.replace)
    print(f"{directory}: the broker's public key is {pair.public}")
    print("next: `busrl keys add NAME` for each client, and in the topology's [bus] endpoint = \"tcp://ADDRESS:PORT\"")
    if options.dir:
        print(f'      and keys = "{directory}"')
    return 0


def add(options: argparse.Namespace) -> int:
    directory = _directory(options)
    file = curve.add(directory, options.name, options.public)
    if file is None:
        print(f"{options.name} is allowed; it also needs the broker's key {curve.server_pair(directory).public}")
    else:
        print(f"{options.name} is allowed; copy this file to it by a way that you trust, and keep it secret:\n{file}")
    return 0


def show_all(options: argparse.Namespace) -> int:
    directory = _directory(options)
    curve.server_pair(directory)
    listed = curve.allowed(directory)
    print(f"{directory}: {len(listed)} allowed")
    for name, public in listed.items():
        file = curve.client_file(directory, name)
        print(f"  {name:<24} {public}  {file if file.exists() else 'its pair was made elsewhere'}")
    for problem in curve.broken(directory):
        print(f"  accepts no client: {problem}")
    return 0


def show(options: argparse.Namespace) -> int:
    directory = _directory(options)
    pair = curve.server_pair(directory)
    if not options.name:
        print(pair.public)
        return 0
    public = curve.allowed(directory).get(options.name)
    if public is None:
        raise BadKeys(f"{directory}: no client {options.name!r} is allowed; see `busrl keys list`")
    print(public)
    return 0


def remove(options: argparse.Namespace) -> int:
    curve.remove(_directory(options), options.name)
    print(f"{options.name} cannot connect again; a connection that it has lasts until the process `bus` ends")
    return 0


def try_to_connect(options: argparse.Namespace) -> int:
    from busrl.bus import Endpoint, tcp_pair

    client = curve.load_client(options.file)
    frontend, backend = tcp_pair(options.endpoint)
    with Endpoint(f"keys-try-{os.getpid()}", frontend, backend, keys=client) as endpoint:
        begun = time.monotonic()
        try:
            endpoint.ready(options.wait)
        except BusNotReady:
            raise BusNotReady(
                f"{options.endpoint}: no round trip within {options.wait:g} s. Either nothing listens there, or the "
                f"broker has another key than {client.server}, or it does not list {client.pair.public}: on its side "
                "see `busrl keys show`, `busrl keys list`, and `busrl status` for whom it refused"
            ) from None
        connected = time.monotonic()
        endpoint.ready(options.wait)
        now = time.monotonic()
    trip_ms = (now - connected) * 1e3
    print(f"{options.endpoint}: accepted after {connected - begun:.3f} s; a round trip takes {trip_ms:.2f} ms")
    return 0
