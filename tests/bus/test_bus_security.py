"""Addresses and directories that would be unsafe, or would not work, are refused with a remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from busrl.bus import Endpoint
from busrl.bus.security import check_endpoint, private_directory, private_umask
from busrl.errors import BadEndpoint, InsecureDirectory


def test_a_socket_path_too_long_for_the_kernel_is_refused_with_its_length():
    path = "/tmp/" + "x" * 103
    with pytest.raises(BadEndpoint, match=r"108 bytes, the kernel allows 107; set XDG_RUNTIME_DIR"):
        check_endpoint(f"ipc://{path}")
    check_endpoint(f"ipc://{path[:-1]}")
    with pytest.raises(BadEndpoint, match="108 bytes"):
        Endpoint("a", f"ipc://{path}", f"ipc://{path}")


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:5", "tcp://127.evil.com:5"])
def test_tcp_that_others_could_reach_is_refused(endpoint):
    with pytest.raises(BadEndpoint, match="loopback"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", ["", "ipc", "udp://127.0.0.1:1", "ipc://relative/path"])
def test_an_address_that_is_none_is_refused(endpoint):
    with pytest.raises(BadEndpoint):
        check_endpoint(endpoint)


def test_loopback_tcp_is_accepted():
    for endpoint in ("tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://[::1]:5555"):
        check_endpoint(endpoint)


def test_a_private_directory_is_made_with_its_parent_or_closed_if_it_stood_open(tmp_path: Path):
    made = private_directory(tmp_path / "busrl-1" / "abc")
    assert [one.stat().st_mode & 0o777 for one in (made, made.parent)] == [0o700, 0o700]
    made.chmod(0o755)
    private_directory(made)
    assert made.stat().st_mode & 0o777 == 0o700


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
        assert (tmp_path / "inside").stat().st_mode & 0o077 == 0
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
