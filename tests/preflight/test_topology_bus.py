"""[bus] in a topology: tcp needs an address, two ports, and keys that are there and private."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from busrl import curve
from busrl.preflight.explain import report
from busrl.topology import Topology

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]


@pytest.fixture
def key_directory(here: Path) -> Path:
    curve.init(here / "keys")
    return here / "keys"


def bus(endpoint: str, directory: str = "keys") -> str:
    return f'[bus]\nendpoint = "{endpoint}"\nkeys = "{directory}"\n'


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:5600", "tcp://*:5600", "tcp://[::1]:5600", "tcp://localhost:65534"]
)
def test_tcp_with_keys_is_accepted_and_explained(loaded: Loaded, key_directory: Path, endpoint: str) -> None:
    curve.add(key_directory, "laptop")
    page = report(loaded(bus(endpoint)))
    assert f"{endpoint} and the next port, encrypted (CURVE) with the keys in {key_directory}" in page
    assert "1 clients may connect there: laptop" in page


def test_a_list_of_nobody_deserves_a_warning(loaded: Loaded, key_directory: Path) -> None:
    assert "no client may connect to tcp://127.0.0.1:5600 yet; see `busrl keys add NAME`" in report(
        loaded(bus("tcp://127.0.0.1:5600"))
    )


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5600", "tcp://127.0.0.1:5600"])
def test_tcp_without_keys_is_refused_on_loopback_too(refused: Refused, endpoint: str) -> None:
    (problem,) = refused(bus(endpoint, "nowhere"))
    assert "bus.keys" in problem and "tcp needs keys" in problem and "busrl keys init --dir" in problem


def test_the_default_directory_is_looked_at_when_none_is_given(
    loaded: Loaded, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    text = '[bus]\nendpoint = "tcp://127.0.0.1:5600"\n'
    (problem,) = refused(text)
    assert "busrl/keys does not exist" in problem
    curve.init(curve.default_directory())
    assert loaded(text).bus.keys == ""


def test_keys_that_others_can_read_are_refused_before_anything_starts(refused: Refused, key_directory: Path) -> None:
    (key_directory / "server.key_secret").chmod(0o644)
    (problem,) = refused(bus("tcp://127.0.0.1:5600"))
    assert "server.key_secret: its mode is 0644" in problem and "chmod 600" in problem


@pytest.mark.parametrize("endpoint", ["udp://1:2", "tcp://host.example:5600", "tcp://0.0.0.0", "5600", "", "ipc:///x"])
def test_an_endpoint_that_can_not_be_bound_is_refused_with_an_example(
    refused: Refused, key_directory: Path, endpoint: str
) -> None:
    (problem,) = refused(bus(endpoint))
    assert "bus.endpoint" in problem and "tcp://0.0.0.0:5600" in problem


@pytest.mark.parametrize("port", [0, 65535, 99999])
def test_a_port_without_a_next_one_is_refused(refused: Refused, key_directory: Path, port: int) -> None:
    (problem,) = refused(bus(f"tcp://127.0.0.1:{port}"))
    assert "two ports are used" in problem and "1 to 65534" in problem


def test_keys_without_tcp_deserve_a_warning(loaded: Loaded, key_directory: Path) -> None:
    assert any("so they are not used" in text for text in loaded('[bus]\nkeys = "keys"\n').derived.warnings)
