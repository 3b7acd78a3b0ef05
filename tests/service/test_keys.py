"""Keys of a service: a new one is written once, and known by its digest."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from busrl.errors import UserError
from busrl.service.keys import Keys, key_of, make_key
from busrl.topology.reader import parse_toml
from busrl.topology.schema import Tinker, TinkerKey


def made(name: str, out: Path) -> int:
    return make_key(argparse.Namespace(name=name, out=out))


def test_the_lines_of_a_new_key_let_it_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ann.key"
    assert made("ann", file) == 0
    printed = capsys.readouterr().out
    (lines,) = parse_toml(printed)["tinker"]["key"]
    key = file.read_text()
    assert key.startswith("tml-") and key not in printed and file.stat().st_mode & 0o077 == 0
    keys = Keys("tml-run", Tinker(samples_in_flight=7, key=(TinkerKey(**lines),)))
    account = keys.account(key)
    assert account is not None and (account.name, account.samples_in_flight) == ("ann", 7)
    assert keys.account(key + "0") is None


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    made("ann", tmp_path / "key")
    before = (tmp_path / "key").read_text()
    with pytest.raises(UserError, match="nothing is overwritten"):
        made("ben", tmp_path / "key")
    assert (tmp_path / "key").read_text() == before == key_of(tmp_path / "key")


@pytest.mark.parametrize("name", ["run", "", "..", "a b"])
def test_a_name_that_no_key_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no name of a key"):
        made(name, tmp_path / "key")
    assert not (tmp_path / "key").exists()


@pytest.mark.parametrize(("entries", "said"), [
    ([("run", "0" * 64)], "another key's"),
    ([("ann", "0" * 64), ("ann", "1" * 64)], "another key's"),
    ([("ann", "0" * 64), ("ben", "0" * 64)], "another key's"),
    ([("ann", "tml-0123")], "no name and digest"),
])
def test_two_keys_never_share_name_or_digest(entries: list[tuple[str, str]], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Keys("tml-run", Tinker(key=tuple(TinkerKey(name=name, digest=digest) for name, digest in entries)))
