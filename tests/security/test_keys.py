"""`busrl keys` makes private files, never prints a secret, and says what is wrong with a key directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl import curve
from busrl.cli import main
from busrl.errors import BadKeys, InsecureDirectory


def modes(directory: Path) -> dict[str, int]:
    modes = {str(path.relative_to(directory)): stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*")}
    return {".": stat.S_IMODE(directory.stat().st_mode), **modes}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    curve.init(tmp_path / "keys")
    return tmp_path / "keys"


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_everything_that_is_made_is_for_this_user_alone_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        curve.init(tmp_path / "keys")
        curve.add(tmp_path / "keys", "laptop")
    finally:
        os.umask(before)
    assert modes(tmp_path / "keys") == {
        ".": 0o700, "allowed": 0o700, "clients": 0o700, "server.key": 0o600, "server.key_secret": 0o600,
        "allowed/laptop.key": 0o600, "clients/laptop.key_secret": 0o600,
    }


def test_a_client_file_holds_its_own_pair_and_the_brokers_public_key(directory: Path):
    file = curve.add(directory, "laptop")
    assert file is not None
    client = curve.load_client(file)
    assert client.server == curve.server_pair(directory).public
    assert curve.allowed(directory) == {"laptop": client.pair.public}
    assert curve.server_pair(directory).secret not in file.read_text()


def test_the_files_are_certificates_that_other_programs_read(directory: Path):
    zmq_auth = pytest.importorskip("zmq.auth")
    file = curve.add(directory, "laptop")
    public, secret = zmq_auth.load_certificate(file)
    pair = curve.load_client(file).pair
    assert (public.decode(), secret.decode()) == (pair.public, pair.secret)


def test_a_key_made_elsewhere_is_listed_without_its_secret(directory: Path):
    public = curve.server_pair(directory).public[::-1]
    assert curve.add(directory, "node", public) is None
    assert curve.allowed(directory) == {"node": public} and not curve.client_file(directory, "node").exists()


def test_a_new_pair_of_the_broker_goes_into_clients_files(directory: Path):
    file = curve.add(directory, "laptop")
    before = curve.load_client(file)
    with pytest.raises(BadKeys, match="there are keys already"):
        curve.init(directory)
    pair = curve.init(directory, replace=True)
    after = curve.load_client(file)
    assert after.server == pair.public != before.server and after.pair == before.pair


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 65, "a b", "a\n"])
def test_a_name_that_is_no_file_name_is_refused(directory: Path, name: str):
    with pytest.raises(BadKeys):
        curve.add(directory, name)
    with pytest.raises(BadKeys):
        curve.remove(directory, name)


def test_a_name_is_given_once(directory: Path):
    curve.add(directory, "laptop")
    with pytest.raises(BadKeys, match="busrl keys remove laptop"):
        curve.add(directory, "laptop")
    curve.remove(directory, "laptop")
    assert curve.add(directory, "laptop")


def test_secrets_that_others_can_read_are_refused_with_the_mode(directory: Path):
    (directory / "server.key_secret").chmod(0o640)
    with pytest.raises(BadKeys, match=r"server.key_secret: its mode is 0640.*chmod 600"):
        curve.server_pair(directory)
    (directory / "server.key_secret").chmod(0o600)
    directory.chmod(0o755)
    with pytest.raises(BadKeys, match=r"its mode is 0755.*chmod 700"):
        curve.server_pair(directory)


def test_keys_are_not_made_in_a_directory_that_others_may_write_into(tmp_path: Path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys").chmod(0o777)
    with pytest.raises(InsecureDirectory, match="others may have put files into it"):
        curve.init(tmp_path / "keys")


def test_a_broken_file_lets_nobody_in_and_is_named(directory: Path):
    curve.add(directory, "laptop")
    (directory / "allowed" / "bad.key").write_text("public-key = \"short\"\n")
    assert list(curve.allowed(directory)) == ["laptop"]
    assert len(curve.broken(directory)) == 1 and "bad.key" in curve.broken(directory)[0]


@given(st.binary(max_size=400))
def test_a_file_of_any_bytes_is_a_key_or_a_named_error(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    directory = tmp_path_factory.getbasetemp() / "any"
    directory.mkdir(exist_ok=True)
    (directory / "allowed").mkdir(exist_ok=True)
    (directory / "allowed" / "x.key").write_bytes(content)
    listed = curve.allowed(directory)
    assert all(curve.KEY.fullmatch(public) for public in listed.values())
    assert len(listed) + len(curve.broken(directory)) == 1


def test_the_command_makes_adds_lists_shows_and_removes_without_printing_a_secret(directory, tmp_path, capsys):
    where = ("--dir", tmp_path / "new")
    spoken = [
        run(capsys, "keys", "init", *where), run(capsys, "keys", "add", "laptop", *where),
        run(capsys, "keys", "list", *where), run(capsys, "keys", "show", *where),
        run(capsys, "keys", "show", "laptop", *where),
    ]
    assert [code for code, _, _ in spoken] == [0] * 5
    client = curve.load_client(tmp_path / "new" / "clients" / "laptop.key_secret")
    text = "".join(out + err for _, out, err in spoken)
    assert client.pair.public in text and client.server in text
    assert client.pair.secret not in text and curve.server_pair(tmp_path / "new").secret not in text
    assert run(capsys, "keys", "remove", "laptop", *where)[0] == 0
    assert "0 allowed" in run(capsys, "keys", "list", *where)[1]


def test_mistakes_at_the_command_line_end_with_2_and_a_remedy(directory, tmp_path, capsys):
    for arguments, said in (
        (("add", "x", "--dir", tmp_path / "none"), "busrl keys init"),
        (("show", "x", "--dir", directory), "busrl keys list"),
        (("remove", "x", "--dir", directory), "no client 'x' is allowed"),
        (("add", "x", "--public", "short", "--dir", directory), "40 characters"),
        (("try", "tcp://127.0.0.1:1", tmp_path / "none"), "No such file"),
        (("try", "ipc:///x", directory / "server.key_secret"), "the file that `busrl keys add` made"),
    ):
        code, _, error = run(capsys, "keys", *arguments)
        assert code == 2 and said in error, error


def test_the_default_directory_follows_the_users_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run(capsys, "keys", "init")[0] == 0
    assert curve.server_pair(tmp_path / "busrl" / "keys") == curve.server_pair(curve.directory_of(""))


def test_try_says_whether_a_broker_lets_a_client_in(broker, tmp_path, capsys):
    file = curve.client_file(broker.keys, "laptop")
    code, out, _ = run(capsys, "keys", "try", broker.endpoint, file)
    assert code == 0 and "accepted after" in out
    kept = tmp_path / "kept.key_secret"
    kept.touch(0o600)
    kept.write_text(file.read_text())
    curve.remove(broker.keys, "laptop")
    code, _, error = run(capsys, "keys", "try", broker.endpoint, kept, "--wait", "0.7")
    assert code == 2 and "does not list" in error and curve.load_client(kept).pair.public in error
