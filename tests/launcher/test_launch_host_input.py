"""What a host that launch starts is told over its standard input."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from busrl import curve
from busrl.errors import UserError
from busrl.hosts.joining import from_input
from busrl.hosts.membership import Invitation


def said(data: bytes, wait_s: float = 5.0) -> tuple[str, Path, str]:
    reader, writer = os.pipe()
    with open(reader, "rb") as stream, open(writer, "wb", buffering=0) as file:
        file.write(data)
        return from_input(stream, wait_s)


def test_the_keys_get_a_file_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    curve.init(tmp_path / "keys")
    pair = curve.add(tmp_path / "keys", "gpu-0")
    assert pair is not None
    endpoint, file, name = said(Invitation("tcp://10.0.0.1:5600", "gpu-0", pair.read_text()).line)
    assert (endpoint, name) == ("tcp://10.0.0.1:5600", "gpu-0")
    assert file.stat().st_mode & 0o777 == 0o600 and curve.load_client(file) == curve.load_client(pair)
    assert file.is_relative_to(tmp_path / "cache" / "busrl" / "hosts")


@pytest.mark.parametrize("line, problem", [
    (b"hello\n", "JSON is malformed"),
    (b'{"endpoint": "tcp://a:1", "keys": ""}\n', "missing required field `name`"),
    (b'{"endpoint": "tcp://a:1", "name": "../x", "keys": ""}\n', "Expected `str` matching regex"),
    (b"\n", "truncated"),
])
def test_what_launch_did_not_write_is_refused(line: bytes, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        said(line)
    assert "expected a line of JSON with endpoint, name and keys" in str(refused.value)


def test_a_person_who_types_a_dash_is_not_left_waiting() -> None:
    with pytest.raises(UserError, match="nothing came for 0"):
        said(b"", 0.05)
