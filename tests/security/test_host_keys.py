"""A host whose key the run does not know: told at once as such, with exit code 2, and with a remedy that works."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from busrl import curve
from busrl.bus.addresses import relay_endpoint
from busrl.bus.broker import CurveListener
from busrl.cli import main
from busrl.hosts.link import Answering


@pytest.fixture
def endpoint() -> str:
    """An address whose port for hosts is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"tcp://127.0.0.1:{taken.getsockname()[1] - 2}"


@pytest.fixture
def home(key_directory: Path, endpoint: str) -> Iterator[Answering]:
    """What answers other hosts at a run's home; nobody reads what they ask."""
    listener = CurveListener(endpoint, key_directory, (relay_endpoint(endpoint),))
    with closing(Answering(listener)) as answering:
        yield answering


def stranger(key_directory: Path, folder: Path, name: str = "gpu2") -> Path:
    """The file of a client that was listed once."""
    file = curve.add(key_directory, name)
    assert file is not None
    kept = shutil.copy(file, folder / f"{name}.key_secret")
    curve.remove(key_directory, name)
    return Path(kept)


def test_an_unknown_key_is_bad_input_and_is_told_as_such(
    home: Answering, key_directory: Path, endpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = stranger(key_directory, tmp_path)
    assert main(["host", endpoint, "--keys", str(file), "--wait", "60"]) == 2
    said = capfd.readouterr().err
    public = curve.load_client(file).pair.public
    assert f"does not know the key of gpu2 ({public})" in said and "reach the port" not in said
    command = re.search(r"`busrl (keys add gpu2 --public) KEY`", said)
    assert command is not None
    assert main([*command[1].split(), public, "--dir", str(key_directory)]) == 0, "the remedy works"
    assert main(["host", endpoint, "--keys", str(file), "--wait", "0.5"]) == 3, "known now, and nobody answers"


def test_a_port_where_nothing_listens_is_no_question_of_keys(
    key_directory: Path, endpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = stranger(key_directory, tmp_path)
    assert main(["host", endpoint, "--keys", str(file), "--wait", "0.5"]) == 3
    assert "this host can reach the port" in capfd.readouterr().err
