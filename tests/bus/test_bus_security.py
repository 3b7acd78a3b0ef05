"""Addresses and directories that would be unsafe, or would not work, are refused with a remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from busrl.bus import Endpoint
from busrl.bus.addresses import check_endpoint, private_directory, private_umask
from busrl.bus.broker import StopRequest, run_broker
from busrl.errors import BadEndpoint, InsecureDirectory
from busrl.ring import OfdLock


def test_a_socket_path_too_long_is_refused_with_its_length():
    path = "/tmp/" + "x" * 103
    with pytest.raises(BadEndpoint, match=r"108 bytes, the kernel allows 107; set XDG_RUNTIME_DIR"):
        check_endpoint(f"ipc://{path}")
    check_endpoint(f"ipc://{path[:-1]}")
    with pytest.raises(BadEndpoint, match="108 bytes"):
        Endpoint("a", f"ipc://{path}", f"ipc://{path}")


TCP = ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:5", "tcp://127.0.0.1:5555", "tcp://[::1]:5555"]


@pytest.mark.parametrize("endpoint", TCP)
def test_tcp_without_keys_is_refused_on_every_address_and_accepted_with_them(endpoint):
    with pytest.raises(BadEndpoint, match=r"tcp needs keys.*busrl keys init"):
        check_endpoint(endpoint)
    check_endpoint(endpoint, keys=True)


@pytest.mark.parametrize("endpoint", TCP)
def test_neither_broker_nor_endpoint_fall_back_to_tcp_without_keys(endpoint, short_dir: Path):
    with pytest.raises(BadEndpoint, match="tcp needs keys"):
        Endpoint("a", endpoint, endpoint)
    with pytest.raises(BadEndpoint, match="tcp needs keys"):
        run_broker(endpoint, endpoint, OfdLock(str(short_dir / "lock")), StopRequest())


@pytest.mark.parametrize("endpoint", ["tcp://", "tcp://host", "tcp://host:0", "tcp://host:65536", "tcp://:5", "tcp://h:5:6"])
def test_a_tcp_address_without_host_or_port_is_refused_with_keys_too(endpoint):
    with pytest.raises(BadEndpoint, match="expected tcp://HOST:PORT"):
        check_endpoint(endpoint, keys=True)


@pytest.mark.parametrize("endpoint", ["", "ipc", "udp://127.0.0.1:1", "ipc://relative/path"])
def test_an_address_that_is_none_is_refused(endpoint):
    with pytest.raises(BadEndpoint):
        check_endpoint(endpoint)


def test_a_private_directory_is_made_or_closed(tmp_path: Path):
    directory = private_directory(tmp_path / "busrl-1" / "abc")
    assert [path.stat().st_mode & 0o777 for path in (directory, directory.parent)] == [0o700, 0o700]
    directory.chmod(0o755)
    private_directory(directory)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_may_write_into_is_refused_with_its_mode(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    with pytest.raises(InsecureDirectory, match=r"mode 0770: others may have put files into it.*chmod 700"):
        private_directory(tmp_path / "open")


def test_a_parent_that_others_can_write_must_be_sticky(tmp_path: Path):
    tmp_path.chmod(0o777)
    with pytest.raises(InsecureDirectory, match=r"mode 0777: others could replace what is in it"):
        private_directory(tmp_path / "mine")
    tmp_path.chmod(0o1777)
    assert private_directory(tmp_path / "mine").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused_with_the_user(tmp_path: Path):
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(InsecureDirectory, match="belongs to user 12345"):
        private_directory(tmp_path / "theirs")
    with pytest.raises(InsecureDirectory, match="belongs to user 12345, who could replace"):
        private_directory(tmp_path / "theirs" / "mine")


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(InsecureDirectory, match="XDG_RUNTIME_DIR"):
        private_directory(tmp_path / "link")


def test_a_missing_parent_is_named(tmp_path: Path):
    with pytest.raises(InsecureDirectory, match="does not exist"):
        private_directory(tmp_path / "no" / "such")


def test_the_umask_is_put_back_after_a_bind(tmp_path: Path):
    before = os.umask(0o022)
    try:
        with private_umask():
            (tmp_path / "inside").touch()
        assert (tmp_path / "inside").stat().st_mode & 0o777 == 0o600
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
